# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Named attention problems: the shapes of real models, and a plain grid for comparisons.

A case describes a computation and no implementation. Its mask, number of visible pairs and
floating-point operations are derived here, so that benchmarks and tests count alike.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import score_mods
from attn_core.masks import block_map, constructors, mask as mask_lib
from attn_core.plan import work
from attn_core.score_mods import lookups
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.types import AttentionSpec

# Blocks of (T, S) tokens in which work is counted, independent of the blocks of a kernel.
COUNTED_BLOCK = (512, 256)


class Case(NamedTuple):
  """One attention problem. The last query is at the position of the last key."""

  name: str
  batch: int = 1  # B
  heads: int = 8  # H
  key_heads: int = 8  # K
  width: int = 64  # D
  value_width: int = 64  # E
  queries: int = 4096  # T, tokens
  keys: int = 4096  # S, tokens
  causal: bool = True
  window: tuple[int, int] | None = None  # (left, right), tokens, both inclusive
  soft_cap: float | None = None
  softmax_scale: float | None = None  # None: D**-0.5
  sinks: bool = False  # one sink per query head
  documents: int = 1  # packed in every batch row, of equal length; T == S where more than one
  dtype: str = "float32"
  latent: bool = False  # whether values are the first E columns of the keys; forward only
  prefix: int = 0  # number of first keys that are the same in all batch rows
  score_mod: str | None = None  # of SCORE_MODS
  dropout: float = 0.0  # probability; by programs for TPUs only


# --- The table. ----------------------------------------------------------------------------------


def _model(name: str, heads: int, key_heads: int, width: int, tokens: int) -> Case:
  """A layer of a model."""
  return Case(name, 1, heads, key_heads, width, width, tokens, tokens, dtype="bfloat16")


# Layers of published models at a common prompt length; "_local" are the layers with a window of
# `w` tokens, including the query's own: (w - 1, 0).
_MODELS = (
    _model("llama3_8b", 32, 8, 128, 8192),
    _model("llama3_70b", 64, 8, 128, 8192),
    _model("llama3_8b_decode", 32, 8, 128, 8192)._replace(batch=8, queries=1),
    _model("mistral_7b", 32, 8, 128, 8192)._replace(window=(4095, 0)),
    _model("gemma2_9b", 16, 8, 256, 8192)._replace(soft_cap=50.0),
    _model("gemma2_9b_local", 16, 8, 256, 8192)._replace(soft_cap=50.0, window=(4095, 0)),
    _model("gemma2_27b", 32, 16, 128, 8192)._replace(soft_cap=50.0, softmax_scale=144**-0.5),
    _model("gemma3_4b", 8, 4, 256, 8192),
    _model("gemma3_4b_local", 8, 4, 256, 8192)._replace(window=(1023, 0)),
    _model("gemma3_27b_local", 32, 16, 128, 8192)._replace(
        window=(1023, 0), softmax_scale=168**-0.5),
    _model("gpt_oss", 64, 8, 64, 8192)._replace(sinks=True),
    _model("gpt_oss_local", 64, 8, 64, 8192)._replace(sinks=True, window=(127, 0)),
    _model("deepseek_v3", 128, 128, 192, 4096)._replace(value_width=128),
    _model("vit_b16", 12, 12, 64, 197)._replace(batch=8, causal=False),
    _model("vit_l14_336", 16, 16, 64, 577)._replace(batch=8, causal=False),
)

_DTYPES = {"f32": "float32", "bf16": "bfloat16"}

# B1 H8, by mask, dtype, width and length: "causal_f32_d64_t4096".
_GRID = tuple(
    Case(f"{mask}_{short}_d{width}_t{tokens}", 1, 8, 8, width, width, tokens, tokens,
         mask == "causal", dtype=_DTYPES[short])
    for mask, short, width, tokens in itertools.product(
        ("causal", "full"), _DTYPES, (64, 128), (512, 1024, 2048, 4096, 8192, 16384)))

_VARIANTS = tuple(
    case._replace(name=case.name.format(short), dtype=dtype)
    for short, dtype in _DTYPES.items() for case in (
        Case("gqa_{}_d64_t4096", key_heads=2),
        Case("window_{}_d64_t16384", queries=16384, keys=16384, window=(1023, 0)),
        Case("packed_{}_d64_t8192", queries=8192, keys=8192, documents=8)))

# One query per row and a full cache, by dtype and length: "decode_f32_s8192".
_DECODE = tuple(
    Case(f"decode_{short}_s{tokens}", 8, 32, 8, 128, 128, 1, tokens, dtype=dtype)
    for short, dtype in _DTYPES.items() for tokens in (4096, 8192, 16384, 32768))

# One absorbed query per row and a full cache of DeepSeek-V3's latent rows, with 16 of its heads.
_LATENT = tuple(
    Case(f"latent_decode_{short}_s4096", 8, 16, 1, 576, 512, 1, 4096, softmax_scale=192**-0.5,
         dtype=dtype, latent=True) for short, dtype in _DTYPES.items())

# Requests that share a prefix and have 128 tokens each, by dtype: "prefix_f32_s2176".
_PREFIX = tuple(
    Case(f"prefix_{short}_s2176", 64, queries=1, keys=2176, dtype=dtype, prefix=2048)
    for short, dtype in _DTYPES.items())

# Tokens and drafts that are verified together, by dtype and their number: "drafts_f32_q8".
_DRAFTS = tuple(
    Case(f"drafts_{short}_q{queries}", 16, 32, 8, 128, 128, queries, 1024, dtype=dtype)
    for short, dtype in _DTYPES.items() for queries in (1, 2, 4, 8))

# The grid's causal case with score mods, all of which add to the scores.
SCORE_MODS = ("alibi", "relative", "custom")
_SCORE_MODS = tuple(Case(f"causal_f32_d64_t4096_{name}", score_mod=name) for name in SCORE_MODS)

# Sequences that one block holds, as of vision models, encoders and small decoders, from 1 to 256
# rows and heads: "full_f32_d64_t197_b2_h12".
_SHORT = tuple(
    Case(f"{mask}_{short}_d{width}_t{tokens}_b{batch}_h{heads}", batch, heads, heads, width,
         width, tokens, tokens, mask == "causal", dtype=dtype)
    for batch, tokens, heads, width in (
        (8, 128, 12, 64), (2, 197, 12, 64), (1, 512, 8, 64), (32, 128, 8, 128), (256, 16, 1, 64),
        (1, 128, 1, 64), (4, 1, 8, 64))
    for mask, (short, dtype) in itertools.product(("causal", "full"), _DTYPES.items())
    if tokens > 1 or mask == "full")
SHORT_CASES = tuple(case.name for case in _SHORT)

# B * T = 16,384 tokens and H * D = 2,048, as in publications on GPU kernels, and variants with
# other features of models: "causal_bf16_d128_t4096_b4".
_GPU_TOKENS, _GPU_WIDTH = 16384, 2048


def _gpu(name: str, width: int, tokens: int) -> Case:
  """A case for GPUs."""
  heads, batch = _GPU_WIDTH // width, _GPU_TOKENS // tokens
  return Case(f"{name}_bf16_d{width}_t{tokens}_b{batch}", batch, heads, heads, width, width, tokens,
              tokens, name != "full", dtype="bfloat16")


_GPU_GRID = tuple(
    _gpu(mask, width, tokens)
    for tokens, mask, width in itertools.product(
        (4096, 16384, 2048, 8192, 1024, 512), ("causal", "full"), (128, 64, 256)))
_GPU_VARIANTS = (
    _gpu("window", 128, 16384)._replace(window=(1023, 0)),
    _gpu("packed", 128, 16384)._replace(documents=12),
    _gpu("gqa", 128, 8192)._replace(heads=32, key_heads=8),
    _gpu("sinks_soft_cap", 64, 8192)._replace(sinks=True, soft_cap=30.0))
GPU_CASES = tuple(case.name for case in (*_GPU_VARIANTS, *_GPU_GRID))  # most informative first

CASES = {case.name: case for case in (
    *_MODELS, *_GRID, *_VARIANTS, *_SCORE_MODS, *_DECODE, *_LATENT, *_PREFIX, *_DRAFTS, *_SHORT,
    *_GPU_GRID, *_GPU_VARIANTS)}


# --- Values derived from a case. -----------------------------------------------------------------


def scale(case: Case, max_heads: int | None, max_tokens: int | None,
          max_batch: int | None = None) -> Case:
  """Scales a case down, with the same ratios of query to key heads and of window to length.

  Args:
    case: any case.
    max_heads: largest number of query heads; the result has more only if one key head has more.
      None: unlimited.
    max_tokens: largest length, of T and S. None: unlimited.
    max_batch: largest number of batch rows. None: unlimited.

  Returns:
    A case of the same name; `case` itself if it is small enough.
  """
  group = case.heads // case.key_heads
  most = case.heads if max_heads is None else max_heads
  key_heads = max(n for n in range(1, case.key_heads + 1)
                  if case.key_heads % n == 0 and (n == 1 or n * group <= most))
  longest = max(case.queries, case.keys)
  ratio = 1 if max_tokens is None else min(1, max_tokens / longest)
  shrink = lambda tokens: max(1, int(tokens * ratio))
  # A side of a window counts the query's own token in addition.
  side_of = lambda side: side if side <= 0 else shrink(side + 1) - 1
  window = None if case.window is None else (side_of(case.window[0]), side_of(case.window[1]))
  queries = shrink(case.queries)
  batch = case.batch if max_batch is None else min(case.batch, max_batch)
  return case._replace(batch=batch, heads=key_heads * group, key_heads=key_heads, queries=queries,
                       keys=shrink(case.keys), window=window, prefix=int(case.prefix * ratio),
                       documents=min(case.documents, queries))


def segment_ids(case: Case) -> np.ndarray | None:
  """int32 [B, T]: the document of every token; None if there is one document."""
  if case.documents == 1:
    return None
  ids = np.arange(case.queries, dtype=np.int32) * case.documents // case.queries
  return np.broadcast_to(ids, (case.batch, case.queries))


def mask(case: Case, ids: jax.Array | np.ndarray | None = None) -> mask_lib.Mask:
  """The mask of a case, as a mask value.

  Args:
    case: any case.
    ids: `segment_ids(case)`, possibly traced; None: computed here.
  """
  found = constructors.causal() if case.causal else constructors.full()
  if case.window is not None:
    found = found & constructors.window(*case.window)
  if case.queries != case.keys and found != constructors.full():
    found = constructors.offset(found, case.keys - case.queries)
  if case.documents > 1:
    ids = segment_ids(case) if ids is None else ids
    assert ids is not None  # there are several documents
    found = found & constructors.segments(ids)
  return found


def _kerple(score: jax.Array, batch: jax.Array, head: jax.Array, query: jax.Array,
            key: jax.Array, rates: jax.Array) -> jax.Array:
  """Lowers scores by the logarithm of the distance; KERPLE, https://arxiv.org/abs/2205.09921."""
  return score - rates[head] * jnp.log1p(abs(query - key).astype(score.dtype))


def score_mod(case: Case) -> ScoreMod | None:
  """The score mod of a case; None: it has none."""
  slopes = score_mods.alibi_slopes(case.heads)
  if case.score_mod == "relative":
    table = np.sin(np.arange(32 * case.heads, dtype=np.float32)).reshape(32, case.heads)
    return score_mods.relative(table, bidirectional=False)
  return {"alibi": score_mods.alibi(slopes), None: None,
          "custom": score_mods.custom(_kerple, slopes)}[case.score_mod]


def _term(case: Case) -> ScoreMod | None:
  """The score mod of a case as kernels evaluate it."""
  mod = score_mod(case)
  shape = case.batch, case.heads, case.queries, case.keys
  return None if mod is None else lookups.before(mod.lower(shape), shape, case.dtype, None)


def mod_arrays(case: Case) -> tuple[jax.Array, ...]:
  """The arrays of a case's score mod, as kernels read them."""
  return tuple(map(jnp.asarray, jax.tree.leaves(_term(case))))


def dense_bias(case: Case) -> jax.Array | None:
  """The sum that the score mod of a case adds, float32 [1, H, T, S], for other libraries."""
  mod = score_mod(case)
  zeros = lambda: jnp.zeros((1, case.heads, case.queries, case.keys), jnp.float32)
  return None if mod is None else jax.jit(lambda: score_mods.apply(mod, zeros()))()


def spec(case: Case, structure: jax.tree_util.PyTreeDef) -> AttentionSpec:
  """The specification of a case, with `structure` the tree structure of its mask."""
  factor = case.width**-0.5 if case.softmax_scale is None else case.softmax_scale
  return AttentionSpec(structure, factor, case.soft_cap,
                       score_mod=jax.tree.structure(_term(case)))


def visible_pairs(case: Case) -> int:
  """Number of visible pairs of a query and a key, over all batch rows and heads."""
  position = np.arange(case.queries) + case.keys - case.queries
  first, last = np.zeros_like(position), np.full_like(position, case.keys - 1)
  if case.causal:
    last = np.minimum(last, position)
  if case.window is not None:
    first, last = (np.maximum(first, position - case.window[0]),
                   np.minimum(last, position + case.window[1]))
  row_ids = segment_ids(case)
  if row_ids is not None:
    ids = row_ids[0]
    first = np.maximum(first, np.searchsorted(ids, ids, "left"))
    last = np.minimum(last, np.searchsorted(ids, ids, "right") - 1)
  return case.batch * case.heads * int(np.maximum(last - first + 1, 0).sum())


def flops(case: Case, backward: bool) -> int:
  """Floating-point operations of the matrix products over visible pairs.

  Forward: 2 * pairs * (D + E), which is 4 * pairs * D if D == E. Forward and backward, with the
  scores recomputed as in every linear-memory kernel: 3.5 times that if D == E.
  """
  each = sum(work.flops_of_pair(case.width, case.value_width, direction)
             for direction in (False, True)[:1 + backward])
  return visible_pairs(case) * each


def visited_blocks(case: Case, block: tuple[int, int] = COUNTED_BLOCK) -> int:
  """Number of blocks of (query, key) tokens with a visible pair, over all batch rows and heads."""
  block_q, block_kv = (min(length, size) for length, size in zip(
      (case.queries, case.keys), block))
  kinds = block_map.block_kinds(
      mask(case), block_map.Sizes(case.queries, case.keys, block_q, block_kv))
  shape = (case.batch, case.heads, *kinds.shape[2:])
  repeats = math.prod(shape) // kinds.size
  return repeats * int((np.asarray(kinds) != block_map.EMPTY).sum())


def describe(case: Case) -> str:
  """The case in one line: "B1 H8/2 T4096 D64 float32 causal window (1023, 0)"."""
  heads = f"H{case.heads}" + (f"/{case.key_heads}" if case.heads != case.key_heads else "")
  tokens = f"T{case.queries}" + (f" S{case.keys}" if case.queries != case.keys else "")
  width = f"D{case.width}" + (f" E{case.value_width}" if case.width != case.value_width else "")
  words = [f"B{case.batch}", heads, tokens, width, case.dtype, "causal" if case.causal else "full"]
  words += [f"window {case.window}"] if case.window else []
  words += [f"soft cap {case.soft_cap:g}"] if case.soft_cap else []
  words += ["sinks"] if case.sinks else []
  words += ["latent rows"] if case.latent else []
  words += [f"prefix {case.prefix}"] if case.prefix else []
  words += [f"score mod {case.score_mod}"] if case.score_mod else []
  words += [f"{case.documents} documents"] if case.documents > 1 else []
  return " ".join(words)
