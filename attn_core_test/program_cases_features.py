# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs of masks by indices, score mods, latent attention, drafts and prefixes, cuDNN's calls.

Shapes are small, most dimensions differ and masks are not symmetric, so that a wrong
axis or operand changes the program; see program_cases.
"""

import functools
from typing import Any, Callable
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, Heads, LatentOptions, MaskInfo,
                       PagesMetadata, PagesV2, attention, create_mesh, masks, merge_partials,
                       multi_latent_attention, score_mods)
from attn_core.caches import drafts, latent, pages, prefixes
from attn_core_test import decode_cases, score_mods_cases, tpu_cases
from attn_core_test.gpu_cases import HOPPER
from attn_core_test.program_cases import (BLOCKS, CPU, Program, Programs, derivatives,
                                          second_derivatives)

B, T, S, H, K, D, E = 2, 22, 26, 6, 2, 5, 3
_KEY = np.uint32([3, 4])


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def call(mechanism: str, dtype: str = "float32", **arguments: Any) -> tuple[Callable, dict]:
  """Returns a call with sinks, arrays -> (out, lse), and its arrays by name."""
  def run(arrays: dict) -> tuple[jax.Array, jax.Array]:
    output = attention(**arrays, mechanism=mechanism, return_lse=True,
                       **{"metadata": CPU, "query_offset": S - T, **arguments})
    return output.attention_outputs, output.lse
  array = functools.partial(shape, dtype=dtype)
  return run, {"query": array(B, T, H, D), "key": array(B, S, K, D), "value": array(B, S, K, E),
               "softmax_aux": shape(H)}


def _lists(most: int, *sizes: int) -> np.ndarray:
  """Returns lists of numbers, of which some are -1."""
  return (np.arange(int(np.prod(sizes))) * 7 % (most + 1) - 1).reshape(sizes).astype(np.int32)


LISTS = {
    "blocks": masks.selected_blocks(_lists(7, B, K, 6, 3), 4, 4),
    "blocks of all heads": masks.selected_blocks(_lists(4, 1, 1, 3, 2), 10, 8),
    "keys": masks.selected_keys(_lists(S, B, T, 6)),
    "keys of query heads": masks.selected_keys(_lists(S, 1, H, T, 5)),
    "both": masks.selected_blocks(_lists(7, B, K, 6, 3), 4, 4) & masks.window(9, 2),
    "or": masks.selected_keys(_lists(S, B, T, 6)) | masks.prefix(3)}


def _by_indices() -> Programs:
  found = {}
  ids = [np.repeat(np.arange(3, dtype=np.int32), 9)[None, :n] for n in (T, S)]
  for name, mask in LISTS.items():
    more: dict[str, Any] = {"mask": mask, "causal": name != "or"}
    if name == "keys":
      more |= {"logits_soft_cap": 2.0, "dropout_prob": 0.25, "dropout_rng": _KEY,
               "mask_info": MaskInfo.from_segments(*ids)}
    dtype = "bfloat16" if name in ("blocks of all heads", "keys of query heads") else "float32"
    found[name] = derivatives(*call("blockwise", dtype, **more))
  run, arrays = call("blockwise", mask=LISTS["blocks"])
  found["blocks second derivatives"] = second_derivatives(run, arrays)
  run, arrays = call("vanilla", mask=LISTS["blocks"] & LISTS["keys"])
  found["vanilla"] = Program(run, (arrays,))
  traced = lambda arrays, lists: call("blockwise", mask=masks.selected_blocks(lists, 4, 8))[0](
      arrays)
  lists = shape(B, K, 6, 3, dtype="int32")
  found["traced"] = Program(traced, (arrays, lists))
  found["vmap"] = Program(jax.vmap(traced, (None, 0)), (arrays, shape(
      3, *lists.shape, dtype="int32")))
  return found


# Score mods one after the other -> mechanism.
COMPOSED = (
    (("scale_by_query", "alibi", "soft_cap", "custom"), "blockwise"),
    (("relative", "per_query", "dense"), "blockwise"),
    (("grid", "per_key"), "blockwise"),
    (("alibi_symmetric_per_row", "scale_by_head", "by_distance"), "vanilla"),
    (("relative_causal_one_head", "by_distance_causal", "custom"), "vanilla"),
    (("alibi", "per_query", "relative"), "sdpa"))


def _mods() -> Programs:
  found = {}
  for names, mechanism in COMPOSED:
    case = score_mods_cases.composed(*names)
    batch, tokens, heads, kinds, width = (
        getattr(score_mods_cases, name) for name in ("B", "T", "H", "K", "D"))
    def run(arrays: tuple, case: Any = case, mechanism: str = mechanism) -> tuple[Any, Any]:
      query, key, value, of_mod = arrays
      more = {"block_sizes": BLOCKS} if mechanism == "blockwise" else {}
      if mechanism == "blockwise":
        more["query_offset"] = np.int32([0, 3])
      output = attention(query, key, value, score_mod=case.make(**of_mod), metadata=CPU,
                         mechanism=mechanism, return_lse=mechanism != "sdpa", **more)
      lse = jnp.zeros(()) if output.lse is None else output.lse
      return output.attention_outputs, lse
    arrays = (shape(batch, tokens, heads, width), shape(batch, tokens, kinds, width),
              shape(batch, tokens, kinds, width + 2 * (mechanism != "sdpa")), {
                  name: shape(*sizes) for name, sizes in case.arrays.items()})
    forward_mode = mechanism not in ("sdpa",)
    found[f"{' '.join(names)} {mechanism}"] = derivatives(run, arrays, forward_mode)
  def on_tpu(arrays: dict) -> tuple[jax.Array, jax.Array]:
    tokens = {name: arrays[name] for name in ("query", "key", "value")}
    mod = (score_mods.scale_by(arrays["scale"]) >> score_mods.alibi(arrays["slopes"])
           >> score_mods.soft_cap(0.8) >> score_mods.custom(_by_parity, arrays["amount"])
           >> score_mods.per_key(arrays["column"]) >> score_mods.per_query(arrays["row"])
           >> score_mods.dense(arrays["bias"]))
    output = attention(**tokens, score_mod=mod, mechanism="flash_attn2", return_lse=True,
                       metadata=tpu_cases.TPU, query_offset=np.int32([3, 20]),
                       block_sizes=BlockSizes(128, 256, 256, 128))
    return output.attention_outputs, output.lse
  b, t, h = 2, 300, 4
  found["tpu"] = derivatives(on_tpu, {
      "query": shape(b, t, h, 16), "key": shape(b, t, 2, 16), "value": shape(b, t, 2, 24),
      "scale": shape(1, 1, t), "slopes": shape(h), "amount": shape(), "column": shape(b, 1, t),
      "row": shape(b, h, t), "bias": shape(1, h, t, t)}, False)
  def of_distances(arrays: dict) -> tuple[jax.Array, jax.Array]:
    tokens = {name: arrays[name] for name in ("query", "key", "value")}
    mod = score_mods.relative(arrays["table"], max_distance=90)
    output = attention(**tokens, score_mod=mod, mechanism="flash_attn2", return_lse=True,
                       metadata=tpu_cases.TPU, block_sizes=BlockSizes(128, 256, 256, 128))
    return output.attention_outputs, output.lse
  found["tpu relative"] = derivatives(of_distances, {
      "query": shape(b, t, h, 16), "key": shape(b, t, 2, 16), "value": shape(b, t, 2, 24),
      "table": shape(8, h)}, False)
  return found


def _by_parity(score: Any, batch: Any, head: Any, query: Any, key: Any, amount: Any) -> Any:
  row = (2 * batch + head - query).astype(score.dtype)
  return jnp.where((key & 1) == 0, score * amount, score) + 0.1 * jnp.tanh(score) * row


# name -> (queries, rows, heads, whether up-projections are given, arguments)
LATENT: dict[str, tuple[int, int, int, bool, dict[str, Any]]] = {
    "absorbed": (21, 37, 3, False, {"sliding_window": (5, 0), "logits_soft_cap": 1.5}),
    "decode": (3, 37, 9, False, {"mask": masks.lengths(None, np.int32([36, 0]))}),
    "one head": (1, 37, 1, False, {"chunk_size": 8}),
    "up": (19, 23, 4, True, {"sliding_window": (5, 2)}),
    "up few queries": (2, 300, 3, True, {}),
    "up dropout": (20, 37, 3, True, {"dropout_prob": 0.4, "dropout_rng": _KEY})}


def _of_latents() -> Programs:
  found = {}
  width, rotary, nope, out = 10, 4, 6, 5
  for name, (queries, rows, heads, up, arguments) in LATENT.items():
    def run(arrays: tuple, up: bool = up, arguments: Any = arguments,
            offset: int = rows - queries) -> tuple[jax.Array, jax.Array]:
      query, held, sinks, *given = arrays
      options = LatentOptions(width, rotary, None if up else nope, *given)
      output = attention(query, held, None, latent_options=options, softmax_aux=sinks,
                         mechanism="multi_latent_attention", return_lse=True, metadata=CPU,
                         query_offset=offset, **arguments)
      return output.attention_outputs, output.lse
    arrays = (shape(B, queries, heads, (nope if up else width) + rotary),
              shape(B, rows, width + rotary), shape(heads))
    if up:
      arrays += shape(width, heads, nope), shape(width, heads, out)
    found[name] = derivatives(run, arrays)
  for dtype, rest in (("float32", None), ("int8", "bfloat16")):
    cache = jax.eval_shape(lambda dtype=dtype, rest=rest: latent.init(
        B, 17, (width, rotary), dtype=dtype, **({"rope_dtype": rest} if rest else {})))
    def step(query: Any, rows: Any, cache: Any) -> Any:
      return tuple(multi_latent_attention(
          query, rows, latent_options=LatentOptions(width, rotary, nope), cache_view=cache,
          cache_metadata=CacheMetadata(lengths=np.int32([2, 1])), metadata=CPU))
    found[f"cache {dtype}"] = Program(step, (
        shape(B, 2, 3, width + rotary), shape(B, 2, width + rotary), cache))
  return found


_PARENTS = np.array([[-1, 0, 0, 1], [-1, -1, 1, 2], [-1] * 4], np.int32)
_METADATA = PagesMetadata(np.int32([[4, 0, 7], [2, 3, -1], [1, 5, 6]]), np.int32([9, 6, 11]),
                          np.int32([0, 4, 7, 8]))


def _of_pages() -> Programs:
  """Returns calls over pages with trees of drafts, parts of a context and shared prefixes."""
  found = {}
  cache = jax.eval_shape(lambda: pages.init(PagesV2, 24, 4, Heads(2, 5, 5), "float32"))
  arrays = shape(10, 6, 5), cache, shape(6)
  def run(arrays: tuple, metadata: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    query, cache, sinks = arrays
    output = attention(query, None, None, mechanism="ragged_page_attention_v2", layout="thd",
                       cache_view=cache, cache_metadata=metadata, return_lse=True, metadata=CPU,
                       softmax_aux=sinks, block_sizes=BlockSizes(block_q=2, block_kv=8), **options)
    return output.attention_outputs, output.lse
  tables = np.int32([[3, 9, 4, 20], [3, 9, 5, 21], [3, 8, 6, 22]])
  shared = PagesMetadata(tables, np.int32([15, 14, 13]), np.int32([0, 2, 5, 9]))
  shared = shared._replace(prefixes=prefixes.find(tables, np.int32([2, 2, 1]), 2, min_requests=2))
  for name, (metadata, options) in {
      "cached": (_METADATA._replace(scope=pages.Scope.CACHED), {"sliding_window": (7, 0)}),
      "new": (_METADATA._replace(scope=pages.Scope.NEW), {"causal": False}),
      "drafts": (_METADATA._replace(draft_mask=drafts.mask(_PARENTS)), {}),
      "drafts, not causal": (_METADATA._replace(draft_mask=drafts.mask(_PARENTS)), {
          "causal": False, "sliding_window": (4, 1)}),
      "prefixes": (shared, {"logits_soft_cap": 3.0})}.items():
    found[name] = derivatives(functools.partial(run, metadata=metadata, **options), arrays)
  table = jax.tree.map(lambda x: shape(*x.shape, dtype=str(x.dtype)), shared)
  found["traced prefixes"] = Program(run, (arrays, table))
  found["keep"] = Program(drafts.keep, (cache, jax.tree.map(
      lambda x: shape(*x.shape, dtype="int32"), _METADATA), shape(3, 4, dtype="int32")))
  return found


def _of_cudnn() -> Programs:
  """Returns calls as cuDNN gets them, where JAX's queries of the machine are answered here."""
  found = {}
  for name, (dtype, arguments) in {
      "bias": ("bfloat16", {"bias": np.ones((1, H, T, S), jnp.bfloat16), "causal": False}),
      "lengths": ("float16", {"mask": masks.lengths(np.int32([21, 9]), np.int32([25, 7])),
                              "causal": False}),
      "mask": ("bfloat16", {"mask": np.tri(T, S, 3, bool)[None, None], "causal": False}),
      "odd window": ("bfloat16", {"sliding_window": (7, 0)})}.items():
    def run(arrays: tuple, arguments: Any = arguments) -> jax.Array:
      with (mock.patch.object(jax_cudnn, "check_cudnn_version", lambda: 91400),
            mock.patch.object(jax_cudnn, "check_compute_capability", lambda wanted: True)):
        return attention(*arrays, mechanism="sdpa", metadata=HOPPER, **arguments).attention_outputs
    queries, keys = (T, S) if name != "odd window" else (T - 1, T - 1)
    found[name] = Program(run, ((shape(B, queries, H, 64, dtype=dtype),
                                 *[shape(B, keys, K, 64, dtype=dtype)] * 2),))
  return found


def _on_accelerators() -> Programs:
  """Returns rows of one block, several kernels, ranges of queries, placements and mapped arrays."""
  found = {}
  one_block = tpu_cases.Case({}, B=2, T=200, H=4, K=2, D=32, E=16, dtype="bfloat16", blocks=None)
  wide = {"causal": False, "softmax_scale": 0.3}
  for name, case in {
      "one block": one_block, "one float32 block": one_block._replace(
          dtype="float32", arguments=wide, T=130, S=250),
      "ranges": tpu_cases.Case({"sliding_window": (5000, 0)}, T=2**16, H=8, K=1, D=128,
                               dtype="bfloat16", blocks=None),
      "dimensions of 1": one_block._replace(
          T=300, floats={"bias": (2, 1, 1, 300)}, blocks=BlockSizes(128, 256, 256, 128)),
      "bias of a query": one_block._replace(
          T=300, floats={"bias": (1, 4, 300, 1)},
          blocks=BlockSizes(256, 128, 128, 256))}.items():
    found[f"tpu {name}"] = derivatives(case.call, case.shapes(), False)
  ids = lambda arrays, ids: attention(
      **arrays, mechanism="flash_attn2", metadata=tpu_cases.TPU, dropout_prob=0.2,
      dropout_rng=_KEY, mask_info=MaskInfo.from_segments(ids), return_lse=True)[:4]
  many = tpu_cases.Case({}, B=1024, T=4096, H=2, K=1)
  found["tpu groups of rows"] = Program(ids, (
      many.shapes(), shape(many.B, many.T, dtype="int32")))
  mapped = tpu_cases.Case({}, B=2, T=140, H=4, K=2, D=32)
  arrays = {**mapped.shapes(), "softmax_aux": shape(3, 4),
            "bias": shape(3, 2, 1, 1, 140)}
  axes = ({name: 0 if name in ("softmax_aux", "bias") else None for name in arrays},)
  found["tpu vmap"] = derivatives(jax.vmap(mapped.call, axes), arrays, False)
  mesh = create_mesh((2, 1, 1, 2, 2))
  for name, metadata in {"tpu": tpu_cases.TPU, "gpu": HOPPER}.items():
    run, arrays = call("flash_attn2", "bfloat16", metadata=metadata.replace(mesh=mesh),
                       dropout_prob=0.2, dropout_rng=_KEY, mask=masks.custom(
                           lambda b, h, q, k: (b + 2 * h + q - k) % 3 != 0))
    found[f"{name} on a mesh"] = derivatives(run, {
        x: y if x == "softmax_aux" else shape(
            *y.shape[:2], *((4, 64) if x == "query" else (2, 64)), dtype="bfloat16")
        for x, y in {**arrays, "softmax_aux": shape(4)}.items()}, False)
  for name, case, dtype in (
      ("three heads", decode_cases.Case(
          (250, 131), T=80, S=256, H=6, K=3, D=128, E=128, block=128), "bfloat16"),
      ("five heads", decode_cases.Case(
          (250, 131), T=2, S=256, H=5, K=5, D=128, E=128, block=128), "float32")):
    found[f"tpu decode {name}"] = Program(functools.partial(
        decode_cases.from_cache, case, metadata=tpu_cases.TPU), decode_cases.shapes(
            case, dtype, None))
  return found


def features() -> Programs:
  """Features of newer mechanisms, each with its derivatives."""
  return {f"{room}: {name}": program for room, programs in (
      ("selected", _by_indices()), ("mods", _mods()), ("latent", _of_latents()),
      ("pages", _of_pages()), ("cudnn", _of_cudnn()), ("parts", _of_parts()),
      ("accelerators", _on_accelerators()))
          for name, program in programs.items()}


def _of_parts() -> Programs:
  parts = [shape(B, T, H, D)] * 3, [shape(B, H, T)] * 3
  return {layout: Program(lambda out, lse, layout=layout: tuple(merge_partials(
      out, lse, layout)), (
          [shape(*(x.shape[i] for i in order)) for x in parts[0]],
          parts[1] if layout != "thd" else [shape(H, T)] * 3)) for layout, order in {
              "bthd": (0, 1, 2, 3), "bhtd": (0, 2, 1, 3), "thd": (1, 2, 3)}.items()}
