# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cases of the property tests: small calls of `attention`, whose meaning is written by hand.

Every case states twice which keys are visible: in arguments of `attention`, and as a boolean array
made from loops over numbers, which shares no code with the library.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import MaskInfo, masks, score_mods, table
from attn_core.masks import constructors, dropout
from attn_core.references import oracle
from attn_core.score_mods import terms
from attn_core.types import NO_SCORE_MOD, AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling, score_mods_cases


# Quantile and largest relative error allowed: rounding of inputs and products to this dtype.
TOLERANCES = {"float32": (2e-6, 2e-5), "float16": (2e-3, 1e-2), "bfloat16": (1.5e-2, 6e-2)}


class Shape(NamedTuple):
  B: int = 2
  T: int = 13
  S: int = 13
  H: int = 4
  K: int = 2
  D: int = 5
  E: int = 5


class Case(NamedTuple):
  """One call and its meaning."""

  name: str
  shape: Shape
  arguments: dict  # of `attention`, beyond query, key, value
  sees: Callable  # (b, h, t, s) -> bool
  floats: dict = {}  # differentiable arguments: name -> shape ("bias", "softmax_aux")
  positions: Any = None  # int [B, T]: positions of the queries, for dropout and score mods
  mod: Any = None  # (arrays) -> the score mod; those of `mod_floats` are its own
  mod_floats: dict = {}  # their shapes by name
  formula: Any = None  # (score, batch, head, query position, key position, *arrays) -> the logit


def _ids(rows):
  return np.array(rows, np.int32)


def _dense(shape, seed=0):
  rng = np.random.default_rng(seed)
  array = rng.random((shape.B, shape.H, shape.T, shape.S)) < 0.5
  array[:, :, 2] = False  # a query that sees no key
  return array


def _predicate(batch, head, query, key):
  return (batch + 2 * head + query - key) % 3 != 0


_S = Shape()
_ODD = Shape(T=7, S=11, D=6, E=3)
_SEGMENTS = _ids([[0] * 5 + [1] * 6 + [-1] * 2, [3] * 13])
_DENSE = _dense(_S)
_Q_POSITIONS = _ids([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], list(range(2, 15))])
_K_POSITIONS = _ids([list(range(12, -1, -1)), list(range(13))])
_OFFSETS = _ids([0, 4])
_LENGTHS = _ids([4, 0])
_CU = _ids([0, 3, 4, 13])
_CU_SEGMENT = np.repeat([0, 1, 2], [3, 1, 9])
_CU_K = _ids([0, 5, 6, 17])
_CU_K_SEGMENT = np.repeat([0, 1, 2], [5, 1, 11])
_RNG = np.array([7, 11], np.uint32)
_BLOCKS = np.random.default_rng(1).integers(-1, 5, (2, 2, 4, 3)).astype(np.int32)
_KEYS = np.random.default_rng(2).integers(-1, 13, (1, 13, 4)).astype(np.int32)


def _added(score, batch, head, query, key, slopes, table, per_key):
  """Returns the logit of an additive score mod."""
  near = table[jnp.minimum(jnp.maximum(key - query, -2), 2) + 2, head]
  return score + slopes[head] * (key - query) + near + per_key[batch, 0, jnp.clip(key, 0, 12)]


def _composed(score, batch, head, query, key, scale, slopes, bias):
  """Returns the logit of a score mod of every kind."""
  score = 1.5 * jnp.tanh(score * scale[0, head, 0] / 1.5) - slopes[head] * abs(key - query)
  return _lowered_for_odd_keys(score, batch, head, query, key, bias)


def _lowered_for_odd_keys(score, batch, head, query, key, bias):
  row = jnp.asarray(batch).astype(score.dtype)
  return jnp.where(key % 2 == 1, score * bias[head] + row, score)


_BUCKETS = np.array([score_mods_cases.bucket(n, 8, 9, True) for n in range(-12, 13)])


def _looked_up(score, batch, head, query, key, buckets, grid, per_query, written):
  """Returns the logit of score mods that look tables up, and of one written out."""
  row = jnp.clip(query // 5 - key // 5 + 2, 0, 4)
  column = jnp.clip(query % 5 - key % 5 + 4, 0, 8)
  score = score + buckets[jnp.asarray(_BUCKETS)[jnp.clip(key - query + 12, 0, 24)], head]
  score = (score + grid[row * 9 + column, head]) * per_query[batch, head, jnp.clip(query, 0, 12)]
  return score + written[0, head, jnp.clip(query, 0, 12), jnp.clip(key, 0, 12)]


CASES = (
    Case("causal_gqa", _S, {}, lambda b, h, t, s: s <= t),
    Case("full_odd_sizes_e_not_d", _ODD, dict(causal=False), lambda b, h, t, s: True),
    Case("one_head", Shape(B=1, H=1, K=1), {}, lambda b, h, t, s: s <= t),
    Case("one_query_bottom_right", Shape(T=1, S=17), dict(query_offset=16),
         lambda b, h, t, s: True),
    Case("one_query_top_left", Shape(T=1, S=17), dict(query_offset=0), lambda b, h, t, s: s == 0),
    Case("one_query_one_key", Shape(T=1, S=1, D=1, E=1), {}, lambda b, h, t, s: True),
    Case("one_key", Shape(T=5, S=1), dict(causal=False), lambda b, h, t, s: True),
    Case("window_left_inclusive", _S, dict(sliding_window=(3, 0)),
         lambda b, h, t, s: -3 <= s - t <= 0),
    Case("window_both_sides", _S, dict(sliding_window=(2, 1), causal=False),
         lambda b, h, t, s: -2 <= s - t <= 1),
    Case("window_int", _S, dict(sliding_window=2, causal=False),
         lambda b, h, t, s: abs(s - t) <= 2),
    Case("window_right_unbounded", _S, dict(sliding_window=(1, -1), causal=False),
         lambda b, h, t, s: s - t >= -1),
    Case("chunk", _S, dict(chunk_size=4), lambda b, h, t, s: s <= t and s // 4 == t // 4),
    Case("segments_with_padding", _S, dict(mask_info=MaskInfo.from_segments(_SEGMENTS)),
         lambda b, h, t, s: s <= t and _SEGMENTS[b, t] == _SEGMENTS[b, s] >= 0),
    Case("segments_interleaved", _S,
         dict(causal=False, mask_info=MaskInfo.from_segments(_SEGMENTS[:, ::-1] % 3, _SEGMENTS)),
         lambda b, h, t, s: _SEGMENTS[b, 12 - t] % 3 == _SEGMENTS[b, s] >= 0),
    Case("positions", _S, dict(mask_info=MaskInfo(q_positions=_Q_POSITIONS,
                                                  kv_positions=_K_POSITIONS)),
         lambda b, h, t, s: _K_POSITIONS[b, s] <= _Q_POSITIONS[b, t]),
    Case("offset_per_row", Shape(T=7, S=12), dict(query_offset=_OFFSETS),
         lambda b, h, t, s: s <= t + _OFFSETS[b]),
    Case("negative_offset_empty_rows", Shape(T=7, S=12), dict(query_offset=-3),
         lambda b, h, t, s: s <= t - 3),
    Case("dense_mask_per_head", _S, dict(mask=_DENSE, causal=False),
         lambda b, h, t, s: _DENSE[b, h, t, s]),
    Case("dense_mask_broadcast_and_causal", _S, dict(mask=_DENSE[:, :1, :1]),
         lambda b, h, t, s: s <= t and _DENSE[b, 0, 0, s]),
    Case("padding_mask", _S, dict(causal=False, mask_info=MaskInfo(
        (np.arange(13)[None] < np.array([[5], [13]]))[:, None, None])),
         lambda b, h, t, s: s < (5, 13)[b]),
    Case("lengths", _S, dict(mask=masks.lengths(_ids([13, 6]), _ids([9, 13])), causal=False),
         lambda b, h, t, s: t < (13, 6)[b] and s < (9, 13)[b]),
    Case("prefix_or_causal", _S, dict(causal=False, mask=masks.causal() | masks.prefix(_LENGTHS)),
         lambda b, h, t, s: s <= t or s < _LENGTHS[b]),
    Case("not_chunk", _S, dict(mask=~masks.chunk(5)),
         lambda b, h, t, s: s <= t and s // 5 != t // 5),
    Case("custom_predicate", _S, dict(mask=masks.custom(_predicate)),
         lambda b, h, t, s: s <= t and _predicate(b, h, t, s)),
    Case("selected_blocks", _S, dict(mask=masks.selected_blocks(_BLOCKS, 4, 3)),
         lambda b, h, t, s: s <= t and s // 3 in _BLOCKS[b, h // 2, t // 4]),
    Case("selected_keys", _S, dict(mask=masks.selected_keys(_KEYS), causal=False),
         lambda b, h, t, s: s in _KEYS[0, t]),
    Case("bias_full", _S, {}, lambda b, h, t, s: s <= t, dict(bias=(2, 4, 13, 13))),
    Case("bias_broadcast", _S, dict(causal=False), lambda b, h, t, s: True,
         dict(bias=(1, 4, 1, 13))),
    Case("bias_and_mask", _S, dict(mask=_DENSE, causal=False),
         lambda b, h, t, s: _DENSE[b, h, t, s], dict(bias=(2, 1, 13, 1))),
    Case("sinks", _S, dict(sliding_window=(2, 0)), lambda b, h, t, s: -2 <= s - t <= 0,
         dict(softmax_aux=(4,))),
    Case("sinks_several_empty_rows", _S, dict(mask=_DENSE, causal=False),
         lambda b, h, t, s: _DENSE[b, h, t, s], dict(softmax_aux=(4, 3))),
    Case("soft_cap", _S, dict(logits_soft_cap=0.7, softmax_scale=0.9), lambda b, h, t, s: s <= t),
    Case("everything", Shape(T=11, S=17, D=6, E=4),
         dict(query_offset=3, sliding_window=(6, 2), causal=False, logits_soft_cap=1.3,
              mask_info=MaskInfo(None, _SEGMENTS[:, :11] % 2,
                                 np.tile(_ids([[0, 1]]), (2, 9))[:, :17]),
              dropout_prob=0.25, dropout_rng=_RNG, deterministic=False),
         lambda b, h, t, s: -6 <= s - t - 3 <= 2 and _SEGMENTS[b, t] % 2 == s % 2,
         dict(bias=(1, 4, 11, 17), softmax_aux=(4, 2)), np.arange(11)[None] + 3 + np.zeros((2, 1))),
    Case("score_mod_added", _S, {}, lambda b, h, t, s: s <= t, mod_floats=dict(
        slopes=(4,), table=(5, 4), per_key=(2, 1, 13)), formula=_added,
         mod=lambda slopes, table, per_key: (
             score_mods.alibi(slopes) >> score_mods.by_distance(table)
             >> score_mods.per_key(per_key))),
    Case("score_mod", _S, dict(
        dropout_prob=0.4, dropout_rng=_RNG, deterministic=False, causal=False,
        mask_info=MaskInfo(q_positions=_Q_POSITIONS)), lambda b, h, t, s: True,
         positions=_Q_POSITIONS, formula=_composed,
         mod_floats=dict(scale=(1, 4, 1), slopes=(4,), odd=(4,)),
         mod=lambda scale, slopes, odd: (
             score_mods.scale_by(scale) >> score_mods.soft_cap(1.5)
             >> score_mods.alibi(slopes, symmetric=True)
             >> score_mods.custom(_lowered_for_odd_keys, odd))),
    Case("score_mod_tables", _S, dict(mask=_DENSE, causal=False),
         lambda b, h, t, s: _DENSE[b, h, t, s], formula=_looked_up,
         mod_floats=dict(buckets=(8, 4), grid=(45, 4), per_query=(2, 4, 13),
                         written=(1, 4, 13, 13)),
         mod=lambda buckets, grid, per_query, written: (
             score_mods.relative(buckets, max_distance=9) >> score_mods.grid(grid, (3, 5))
             >> score_mods.scale_by(per_query) >> score_mods.dense(written))),
    Case("dropout", _S, dict(dropout_prob=0.4, dropout_rng=_RNG, deterministic=False),
         lambda b, h, t, s: s <= t),
    Case("dropout_at_positions", _S,
         dict(dropout_prob=0.4, dropout_rng=_RNG, deterministic=False, causal=False,
              mask_info=MaskInfo(q_positions=_Q_POSITIONS)), lambda b, h, t, s: True,
         positions=_Q_POSITIONS),
    Case("unnormalized", _S, dict(normalize_output=False), lambda b, h, t, s: s <= t),
    Case("layout_bhtd", _S, dict(layout="bhtd", sliding_window=(4, 0)),
         lambda b, h, t, s: -4 <= s - t <= 0),
    Case("layout_thd", Shape(B=1), dict(layout="thd", cum_seqlens_q=_CU),
         lambda b, h, t, s: s <= t and _CU_SEGMENT[t] == _CU_SEGMENT[s]),
    Case("layout_thd_other_keys", Shape(B=1, S=17),
         dict(layout="thd", cum_seqlens_q=_CU, cum_seqlens_k=_CU_K, query_offset=2),
         lambda b, h, t, s: (_CU_SEGMENT[t] == _CU_K_SEGMENT[s]
                             and s - _CU_K[_CU_K_SEGMENT[s]] <= t - _CU[_CU_SEGMENT[t]] + 2)),
)

# For kernels with even lengths and widths of a multiple of 8 only.
_EVEN = Shape(T=24, S=24, D=16, E=16)
_EVEN_DENSE = _dense(_EVEN)
_EVEN_LENGTHS = _ids([20, 0]), _ids([7, 24])
EVEN_CASES = (
    Case("even_causal", _EVEN, {}, lambda b, h, t, s: s <= t),
    Case("even_full", _EVEN, dict(causal=False), lambda b, h, t, s: True),
    Case("even_window", _EVEN, dict(sliding_window=(5, 0)), lambda b, h, t, s: -5 <= s - t <= 0),
    Case("even_top_left", _EVEN._replace(T=8), dict(query_offset=0), lambda b, h, t, s: s <= t),
    Case("even_lengths", _EVEN, dict(mask=masks.lengths(*_EVEN_LENGTHS), causal=False),
         lambda b, h, t, s: t < _EVEN_LENGTHS[0][b] and s < _EVEN_LENGTHS[1][b]),
    Case("even_causal_key_lengths", _EVEN, dict(mask=masks.lengths(None, _EVEN_LENGTHS[0])),
         lambda b, h, t, s: s <= t and s < _EVEN_LENGTHS[0][b]),
    Case("even_dense", _EVEN, dict(mask=_EVEN_DENSE, causal=False),
         lambda b, h, t, s: _EVEN_DENSE[b, h, t, s]),
    Case("even_bias", _EVEN, {}, lambda b, h, t, s: s <= t, dict(bias=(2, 4, 24, 24))),
    Case("even_bias_broadcast_and_mask", _EVEN, dict(mask=_EVEN_DENSE),
         lambda b, h, t, s: s <= t and _EVEN_DENSE[b, h, t, s], dict(bias=(1, 4, 1, 24))),
)

# One name for every implementation that this machine can run; the others are the same object.
IMPLEMENTATIONS = {}
# These have tests of their own: what needs a GPU, what reads pages or latent rows, and what is
# flash_attn2's program as long as nothing is spread.
ON_GPU = (table.TABLE["cudnn", "gpu"].run, table.TABLE["flash_attn2", "gpu 9.0"].run)
for (_mechanism, _platform), _row in table.TABLE.items():
  _implementation = _row.general
  if not (_implementation.run in ON_GPU or {"pages", "latent"} & _implementation.features
          or _implementation.shards_sequence):
    IMPLEMENTATIONS.setdefault(_implementation.run, (_mechanism, _platform))
NAMES = tuple(IMPLEMENTATIONS.values())
PALLAS_TPU = ("flash_attn2", "tpu")  # the Pallas kernels

BY_NAME = {case.name: case for case in CASES}


def visible(case: Case) -> np.ndarray:
  """Returns bool [B, H, T, S] by the hand-written rule."""
  b, h, t, s = case.shape.B, case.shape.H, case.shape.T, case.shape.S
  return np.array([[[[bool(case.sees(i, j, k, l)) for l in range(s)] for k in range(t)]
                    for j in range(h)] for i in range(b)])


def operands(case: Case, dtype, seed: int = 0) -> dict:
  """Returns the differentiable arguments: query, key, value in the case's layout, `case.floats`."""
  rng = np.random.default_rng(seed)
  shape, layout = case.shape, case.arguments.get("layout", "bthd")
  shapes = {"query": (shape.B, shape.T, shape.H, shape.D),
            "key": (shape.B, shape.S, shape.K, shape.D),
            "value": (shape.B, shape.S, shape.K, shape.E), **case.floats, **case.mod_floats}
  arrays = {}
  for name, full in shapes.items():
    array = rng.normal(size=full)
    if name in ("query", "key", "value"):
      array = from_bthd(array, layout)
    arrays[name] = jnp.asarray(array, dtype)
  return arrays


def arguments(case: Case, arrays: dict) -> dict:
  """Returns the arguments of `attention` for arrays of `operands`."""
  given = {**case.arguments, **{k: x for k, x in arrays.items() if k not in case.mod_floats}}
  if case.mod is None:
    return given
  return {**given, "score_mod": case.mod(**{name: arrays[name] for name in case.mod_floats})}


def from_bthd(x, layout: str):
  """Converts [B, T, H, D] to another layout."""
  return {"bthd": x, "bhtd": x.transpose(0, 2, 1, 3), "thd": x[0]}[layout]


def to_bthd(x, layout: str):
  return {"bthd": lambda: x, "bhtd": lambda: x.transpose(0, 2, 1, 3), "thd": lambda: x[None]}[
      layout]()


@functools.cache
def _oracle(spec: AttentionSpec, layout: str, mods: tuple[str, ...]):
  """Returns a function: arrays of the mask, `operands` -> (output in the layout, lse)."""
  def run(mask, arrays):
    query, key, value = (to_bthd(arrays[name], layout) for name in ("query", "key", "value"))
    sinks = arrays.get("softmax_aux")
    if sinks is not None:
      sinks = (sinks if sinks.ndim == 1 else jax.nn.logsumexp(sinks, -1))[None]
    words = dropout.key_words(jnp.asarray(_RNG)) if spec.dropout_prob else None
    out, _, lse, _ = oracle.attention(
        Operands(query, key, value, arrays.get("bias"), MaskOperands(mask), sinks, words,
                 mods=tuple(arrays[name][None, None] for name in mods)), spec)
    return from_bthd(out, layout), lse[0] if layout == "thd" else lse
  return run


def reference(case: Case) -> jax.tree_util.Partial:
  """Returns the oracle: `operands` -> (output in the case's layout, lse).

  Given to a compiled function as an argument, it is the arrays of its mask: cases that differ only
  in these share the program.
  """
  a = case.arguments
  mask = constructors.dense(visible(case))
  if case.positions is not None:
    mask = constructors.positions(np.asarray(case.positions, np.int32), None, mask)
  leaves, structure = jax.tree.flatten(mask)
  spec = AttentionSpec(
      structure, a.get("softmax_scale", case.shape.D**-0.5), a.get("logits_soft_cap"),
      a.get("dropout_prob", 0.0), normalize_output=a.get("normalize_output", True),
      score_mod=NO_SCORE_MOD if case.formula is None else jax.tree.structure(
          terms.Custom(case.formula, tuple(case.mod_floats))))
  return jax.tree_util.Partial(_oracle(spec, a.get("layout", "bthd"), tuple(case.mod_floats)),
                               tuple(map(jnp.asarray, leaves)))


@functools.partial(jax.jit, compiler_options=sampling.LEAST)
def evaluate(run: jax.tree_util.Partial, arrays):
  """Computes `run(arrays)`, compiled once for all references that differ only in arrays."""
  return run(arrays)


def loss(run: Callable, weights: list) -> Callable:
  """A scalar that depends on every output in its own way (lse of -inf counts as 0), and them."""
  def value(arrays):
    out, lse = run(arrays)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    return (jnp.sin(out) * weights[0]).sum() + (finite**2 * weights[1]).sum(), (out, lse)
  return value


def _everything(run, arrays, moves, weights):
  gradient, value = jax.grad(loss(run, weights), has_aux=True)(arrays)
  return {"value": value, "gradient": gradient, "jvp": jax.jvp(run, (arrays,), (moves,))[1]}


_compiled = jax.jit(_everything)
_compiled_soon = jax.jit(_everything, compiler_options=sampling.LEAST)


def everything(run: Callable, arrays: dict, *, tested: bool = True) -> dict:
  """Computes value, gradient and jvp of arrays -> (output, lse).

  Args:
    run: the function.
    arrays: where to compute these.
    tested: whether it is what a test is about; else XLA optimizes it as little as it can.
  """
  rng = np.random.default_rng(1)
  def random(x):
    return np.asarray(rng.normal(size=x.shape), arrays["query"].dtype)
  moves = jax.tree.map(random, arrays)
  weights = jax.tree.map(random, list(jax.eval_shape(run, arrays)))
  compiled = _compiled if tested else _compiled_soon
  return compiled(jax.tree_util.Partial(run), arrays, moves, weights)
