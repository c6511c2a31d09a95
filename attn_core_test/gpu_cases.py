# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of the GPU kernels: what is compiled for a Hopper, and what is interpreted on the CPU."""

import functools
import itertools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention, masks, score_mods
from attn_core.caches import latent_pages, pages, quantize
from attn_core.kernels.common import paged_operands
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.gpu.flash import kernel as gpu_flash, tiling
from attn_core.kernels.gpu.split_kv import decode, paged as gpu_paged
from attn_core.kernels.xla import flash as xla_flash
from attn_core.masks import leaves, selected
from attn_core.references import oracle
from attn_core.types import (AttentionSpec, BlockSizes, MaskOperands, Operands, PagedSpec,
                             differentiable_names, operand, with_operands)
from attn_core_test import gpu_interpret, property_cases, sampling

KERNEL = gpu_flash.make_kernel(xla_flash.KERNEL)

HOPPER = OperationMetadata(platform="gpu", compute_capability="9.0")
# Of outputs and gradients.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


def property_call(name: str) -> tuple[property_cases.Case, dict[str, jax.Array], Callable]:
  """Returns (a property case, its arrays in bfloat16, arrays -> (out, lse) by the GPU kernels)."""
  case, = (case for case in property_cases.CASES if case.name == name)
  arrays = property_cases.operands(case, jnp.float32)
  arrays.update({key: jnp.asarray(np.asarray(arrays[key], jnp.bfloat16))
                 for key in ("query", "key", "value")})
  def run(arrays):
    output = attention(**arrays, **case.arguments, mechanism="flash_attn2", metadata=HOPPER,
                       return_lse=True)
    return output.attention_outputs, output.lse
  return case, arrays, run


IDS = np.repeat(np.array([[0, 1, 2, -1], [5, 5, 6, 7]], np.int32), 75, 1)
DENSE = np.random.default_rng(0).random((1, 2, 260, 260)) < 0.5
DENSE[:, :, 7] = False  # a query that sees nothing
DENSE[:, :, :, 100:200] |= True  # a block that all queries see


class Case(NamedTuple):
  """One call of the kernel."""

  mask: masks.Mask = masks.causal()
  B: int = 1
  T: int = 136
  S: int | None = None  # None: T
  H: int = 1
  K: int | None = None  # None: H
  D: int = 64
  E: int | None = None  # None: D
  dtype: str = "bfloat16"
  stored: str | None = None  # dtype of quantized keys and values; None: `dtype`, not quantized
  latent: int | None = None  # the first columns of a key, which are its value; None: E are apart
  spec: dict = {}  # fields of AttentionSpec
  extras: dict = {}  # of Operands: name -> (shape, dtype)
  blocks: BlockSizes = BlockSizes()
  mod: score_mods.ScoreMod | None = None

  @property
  def term(self) -> Any:
    """The score mod as kernels evaluate it; None: there is none."""
    shape = self.B, self.H, self.T, self.S or self.T
    return None if self.mod is None else self.mod.lower(shape)

  @property
  def shapes(self) -> Operands:
    """Operands that have only shapes and dtypes."""
    S, K, E = self.S or self.T, self.K or self.H, self.E or self.D
    E = 0 if self.latent else E
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
    extras = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
              for name, (shape, dtype) in self.extras.items()}
    leaves = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(self.mask))
    found = Operands(of(self.B, self.T, self.H, self.D), of(self.B, S, K, self.D),
                     of(self.B, S, K, E), mask=MaskOperands(leaves), **extras,
                     mods=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype)
                                for x in jax.tree.leaves(self.term)))
    return found if self.stored is None else jax.eval_shape(self._store, found)

  @property
  def residual_shapes(self) -> Residuals:
    """Shapes and dtypes of what `forward` returns for `shapes`."""
    return Residuals(
        jax.ShapeDtypeStruct((self.B, self.T, self.H, self.E or self.D), jnp.dtype(self.dtype)),
        jax.ShapeDtypeStruct((self.B, self.H, self.T), jnp.float32))

  def _store(self, operands: Operands) -> Operands:
    """Quantizes keys and values to the dtype `stored`, unless it is None."""
    if self.stored is None:
      return operands
    if self.latent is not None:  # the rest of a row keeps its dtype
      key, scale = quantize.quantize(operands.key[..., :self.latent], self.stored)
      return operands._replace(key=key, value=operands.key[..., self.latent:], key_scale=scale)
    key, value = (quantize.quantize(x, self.stored) for x in (operands.key, operands.value))
    return operands._replace(key=key[0], value=value[0], key_scale=key[1], value_scale=value[1])

  def operands(self) -> Operands:
    """Random numbers, and the arrays of the mask."""
    rng = np.random.default_rng(0)
    fill = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    leaves = tuple(map(jnp.asarray, jax.tree.leaves(self.mask)))
    found = self._replace(stored=None).shapes._replace(mask=None, mods=())
    return self._store(jax.tree.map(fill, found))._replace(
        mask=MaskOperands(leaves), mods=tuple(jax.tree.leaves(self.term)))

  @property
  def full_spec(self) -> AttentionSpec:
    return AttentionSpec(jax.tree.structure(self.mask), self.D**-0.5, latent_width=self.latent,
                         score_mod=jax.tree.structure(self.term), **self.spec)

  def forward(self, operands: Operands) -> tuple[Any, Any]:
    """Runs the kernel; returns (out, lse)."""
    return tuple(KERNEL.forward(operands, self.full_spec, self.blocks))

  def decode(self, operands: Operands) -> tuple[Any, Any]:
    """Runs the kernels that decode; returns (out, lse)."""
    return tuple(decode.forward(operands, self.full_spec, self.blocks))

  @property
  def wrt(self) -> tuple[str, ...]:
    """Names of the operands that have gradients."""
    return differentiable_names(self.shapes)

  def backward(self, operands: Operands, residuals: Residuals, cotangents: Residuals,
               wrt: tuple[str, ...] | None = None) -> dict:
    """Returns cotangents by the names in `wrt`; None: all."""
    wrt = self.wrt if wrt is None else wrt
    found = KERNEL.backward(operands, self.full_spec, self.blocks, residuals, cotangents, wrt)
    return dict(zip(wrt, found))

  def derivatives(self, operands: Operands, *,
                  rounds: bool = True) -> tuple[Residuals, Residuals, dict]:
    """Returns (residuals, random cotangents, the oracle's backward of these in float64).

    Args:
      operands: the arrays.
      rounds: whether the output has the dtype of the call; otherwise float32, so that sums over all
        pairs are exact.
    """
    rng = np.random.default_rng(1)
    dtype = operands.query.dtype
    def run(operands, arrays):
      output = oracle.attention(with_operands(operands, arrays), self.full_spec)
      return output.attention_outputs, output.lse
    def differentiate(operands, d_out, d_lse):
      wide = {name: operand(operands, name).astype(jnp.float64) for name in self.wrt}
      (out, lse), pull = jax.vjp(lambda arrays: run(operands, arrays), wide)
      d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0)
      expected, = pull((d_out.astype(jnp.float64), d_lse.astype(jnp.float64)))
      out = out.astype(dtype if rounds else jnp.float32)
      return Residuals(out, lse.astype(jnp.float32)), Residuals(d_out, d_lse), expected
    with jax.enable_x64(True):
      d_out, d_lse = (rng.normal(size=x.shape).astype(x.dtype) for x in self.residual_shapes)
      return jax.jit(differentiate, compiler_options=sampling.LEAST)(operands, d_out, d_lse)

  def oracle(self, operands: Operands) -> tuple[Any, Any]:
    """Returns (out, lse) in float32."""
    def run(operands):
      if self.stored is not None and self.latent is not None:
        latents = quantize.dequantize(operands.key, operands.key_scale)
        operands = operands._replace(key_scale=None, key=jnp.concatenate(
            [latents, operands.value.astype(latents.dtype)], -1))
      elif self.stored is not None:
        operands = operands._replace(
            key=quantize.dequantize(operands.key, operands.key_scale), key_scale=None,
            value=quantize.dequantize(operands.value, operands.value_scale), value_scale=None)
      if self.latent is not None:
        operands = operands._replace(value=operands.key[..., :self.latent])
      wide = {name: getattr(operands, name).astype(jnp.float32)
              for name in ("query", "key", "value")}
      output = oracle.attention(
          operands._replace(**wide), self.full_spec._replace(latent_width=None))
      return output.attention_outputs, output.lse
    return jax.jit(run, compiler_options=sampling.LEAST)(operands)


def check_gradients(case: Case) -> None:
  """Compares a case's interpreted kernels, forward and backward, with its oracle in float32."""
  operands = case.operands()
  residuals, cotangents, expected = case.derivatives(operands, rounds=False)
  (out, lse), found = gpu_interpret.interpret(
      lambda *x: (case.forward(x[0]), case.backward(*x)), operands, residuals, cotangents)
  np.testing.assert_allclose(lse, residuals.lse, rtol=0, atol=1e-5 * abs(residuals.lse).max())
  for name, y in (expected | {"out": residuals.out}).items():
    y = np.asarray(y, np.float32)
    np.testing.assert_allclose(
        np.asarray((found | {"out": out})[name], np.float32), y, rtol=0, err_msg=name,
        atol=TOLERANCE[case.dtype] * max(1, abs(y).max()))


def programs_of(cases: dict[str, Case]) -> dict[str, tuple[Any, tuple]]:
  """Returns the forward and all kernels of the backward of each, for `benchmark.static.gpu`."""
  found: dict[str, tuple[Any, tuple]] = {}
  for name, case in cases.items():
    residuals = case.residual_shapes
    found[f"{name}_forward"] = case.forward, (case.shapes,)
    found[f"{name}_backward"] = case.backward, (case.shapes, residuals, residuals)
  return found


SMALL = BlockSizes(128, 64)

# Several blocks along both sides, every width, and features that the short property cases miss.
INTERPRETED = {
    "causal_odd_length": Case(T=205, H=2, K=1, blocks=SMALL),
    "full_odd_lengths": Case(masks.full(), T=130, S=203),
    "window": Case(masks.causal() & masks.window(100, 0), T=333, blocks=SMALL),
    "empty_rows": Case(masks.offset(masks.causal(), -50), T=200, S=300, blocks=SMALL),
    "segments": Case(masks.causal() & masks.segments(IDS), B=2, T=300, blocks=SMALL),
    "placed": Case(masks.placed(masks.causal() & masks.window(150, 0),
                                *[np.arange(100, 300)[None]] * 2, (280, 290)), T=200, blocks=SMALL),
    "dense_per_head": Case(masks.dense(DENSE), T=260, H=2, blocks=SMALL),
    "two_tiles_a_warpgroup": Case(T=300, blocks=BlockSizes(256, 64)),
    "widths_80_48": Case(D=80, E=48),
    "widths_192_128": Case(D=192, E=128),
    "width_96_float16": Case(D=96, dtype="float16"),
    "width_256": Case(D=256),
}

# Backward: more features, and groups of heads in kernels of every kind.
_WORDS = {"dropout_key": ((1, 2), "uint32")}
GRADIENTS = {
    **{name: case for name, case in INTERPRETED.items() if name != "two_tiles_a_warpgroup"},
    "window": Case(masks.causal() & masks.window(70, 0), T=260),
    "dense_per_head": Case(masks.dense(DENSE[:1, :2, :150, :150]), T=150, H=2, K=1),
    "soft_cap": Case(T=200, spec={"logits_soft_cap": 3.0}),
    "dropout": Case(T=200, spec={"dropout_prob": 0.3}, extras=_WORDS),
    "bias_and_sinks": Case(T=140, H=2, extras={"bias": ((1, 2, 140, 140), "float32"),
                                               "sinks": ((1, 2), "float32")}),
    "group_of_shared_keys": Case(
        T=140, H=2, K=1, D=192, E=128, spec={"dropout_prob": 0.3, "logits_soft_cap": 3.0},
        extras=_WORDS),
    "width_128_group_float16": Case(T=140, H=2, K=1, D=128, dtype="float16"),
}

# Cotangents of biases alone: the dimensions they are summed over, and their dtypes.
_EARLY = masks.offset(masks.causal(), -20)  # queries that see nothing
BIASES = {
    "batch": Case(B=2, T=136, H=2, K=1, extras={"bias": ((1, 2, 136, 136), "float32")}),
    "heads_bfloat16": Case(masks.full(), B=2, T=70, S=130, H=2,
                           extras={"bias": ((2, 1, 70, 130), "bfloat16")}),
    "all_but_keys": Case(
        _EARLY, B=2, T=140, S=150, H=2, spec={"dropout_prob": 0.3, "logits_soft_cap": 3.0},
        extras={"bias": ((1, 1, 1, 150), "float32"), "sinks": ((1, 2), "float32"), **_WORDS}),
    "keys": Case(_EARLY, B=2, T=140, H=2, extras={"bias": ((2, 1, 140, 1), "float32"),
                                                  "sinks": ((1, 2), "float32")}),
    "all": Case(_EARLY, T=140, H=2, spec={"dropout_prob": 0.3, "logits_soft_cap": 3.0},
                extras={"bias": ((1, 1, 1, 1), "float32"), **_WORDS}),
}



def _normal(*shape: int) -> np.ndarray:
  return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def _by_parity(score, batch, head, query, key, amount):
  """A function of a score mod: of everything that it gets, and with branches."""
  row = (batch + head).astype(score.dtype)
  return jnp.where((key & 1) == 0, score * amount, score) + 0.1 * jnp.tanh(score) * row


def _steep(score, batch, head, query, key, amount):
  """Has an infinite derivative above the diagonal of a causal mask, and no value beyond that."""
  return score + 0.1 * jnp.sqrt(amount * (query - key + 1).astype(score.dtype))


def _steep_where_visible(score, batch, head, query, key, amount):
  """Equals `_steep` below the diagonal, with derivatives everywhere."""
  return score + 0.1 * jnp.sqrt(amount * jnp.maximum(query - key + 1, 1).astype(score.dtype))


def every_mod(heads: int, queries: int, keys: int) -> score_mods.ScoreMod:
  """Returns a score mod of each kind but those of all pairs."""
  return (score_mods.scale_by(_normal(1, 1, queries)) >> score_mods.alibi(0.1 * _normal(heads))
          >> score_mods.soft_cap(3.0) >> score_mods.per_query(_normal(1, heads, queries))
          >> score_mods.custom(_by_parity, _normal()) >> score_mods.per_key(_normal(1, 1, keys)))


def _tables() -> score_mods.ScoreMod:
  return (score_mods.by_distance(_normal(30, 2), -9) >> score_mods.soft_cap(3.0)
          >> score_mods.relative(_normal(8, 1), max_distance=40))


def _run(query: int, key: int, step: int) -> masks.Mask:
  """Returns a causal mask of 70 rows and columns from the given ones on, a step apart."""
  first = step * np.arange(70, dtype=np.int32)[None]
  return leaves.PlacedRuns(masks.causal(), (250, 200), query + first, key + first, (1, 1), step)


def _two_runs(*numbers: int) -> np.ndarray:
  """Returns rows of chunks of 128 tokens, as of a member of a ring of layout zigzag."""
  return np.concatenate([128 * n + np.arange(128, dtype=np.int32) for n in numbers])[None]


_AMOUNT = np.abs(_normal())
# Score mods, forward and backward.
_SHIFTED = masks.offset(masks.causal(), np.array([3, -20], np.int32))  # queries that see nothing
_MODDED = Case(_SHIFTED, B=2, T=70, S=130, H=2, K=1)
MODS = {
    "every_kind": _MODDED._replace(E=48, mod=every_mod(2, 70, 130)),
    "alibi": _MODDED._replace(mod=score_mods.alibi(_normal(2))),
    "alibi_per_row_symmetric": _MODDED._replace(
        mod=score_mods.alibi(_normal(2, 2), symmetric=True)),
    "alibi_at_positions": Case(
        masks.positions(*[np.stack([7 * np.arange(70), 2**30 + np.arange(70)]).astype(np.int32)]
                        * 2),
        B=2, T=70, H=2, mod=score_mods.alibi(_normal(2), symmetric=True)),
    # As in a step of a ring: the queries of one member, the keys of another.
    "every_kind_placed": Case(
        masks.placed(masks.causal(), np.arange(60, 130)[None], np.arange(5, 75)[None], (130, 130)),
        T=70, H=2, K=1, mod=every_mod(2, 70, 70)),
    # As in a step of a ring of consecutive tokens, and of one of every third token.
    "tables_of_a_run": Case(_run(60, 5, 1), T=70, H=2, K=1, mod=_tables()),
    "tables_of_two_runs": Case(leaves.PlacedRuns(
        masks.causal(), (1024, 1024), _two_runs(0, 3), _two_runs(1, 2), (2, 2), 1),
        T=256, H=2, K=1, mod=_tables()),
    "tables_of_two_striped_runs_of_keys": Case(leaves.PlacedRuns(
        masks.causal(), (900, 900), *[np.concatenate(
            [n + 7 * np.arange(128, dtype=np.int32) for n in first])[None]
            for first in ((4,), (5, 0))], (1, 2), 7), T=128, S=256, H=2, K=1, mod=_tables()),
    "tables_of_every_third": Case(_run(61, 2, 3), B=2, T=70, H=2, K=1, mod=_tables()),
    "soft_cap_of_a_bias": _MODDED._replace(
        mod=score_mods.soft_cap(2.0), extras={"bias": ((2, 1, 70, 130), "float32"),
                                              "sinks": ((1, 2), "float32")}),
    "soft_cap_of_a_row_bias": _MODDED._replace(
        mod=score_mods.soft_cap(2.0), spec={"logits_soft_cap": 3.0},
        extras={"bias": ((1, 2, 70, 1), "float32")}),
    "by_distance": _MODDED._replace(
        mod=score_mods.by_distance(_normal(30, 2), -9) >> score_mods.soft_cap(3.0)
        >> score_mods.relative(_normal(8, 1), max_distance=40)),
    # Rows past the queries have distances that no pair has.
    "tables_of_nan_where_nothing_is": Case(T=130, mod=score_mods.by_distance(
        np.where(np.arange(521) < 130, np.nan, 0.01 * np.arange(521)).astype(np.float32)[:, None],
        -260)),
    "dense": _MODDED._replace(
        D=96, dtype="float16",
        mod=score_mods.dense(_normal(1, 2, 70, 130)) >> score_mods.soft_cap(3.0)),
    "dense_per_row_bfloat16": _MODDED._replace(
        mod=score_mods.dense(jnp.asarray(_normal(2, 1, 70, 130), jnp.bfloat16))),
    "dropout": _MODDED._replace(mod=every_mod(2, 70, 130), spec={"dropout_prob": 0.3},
                                extras=_WORDS),
    "every_kind_of_capped_scores": _MODDED._replace(
        mod=every_mod(2, 70, 130), spec={"dropout_prob": 0.3, "logits_soft_cap": 2.0},
        extras={"bias": ((1, 2, 70, 130), "float32"), **_WORDS}),
    "steep": Case(T=140, mod=score_mods.custom(_steep, _AMOUNT)),
    "huge": _MODDED._replace(mod=score_mods.scale_by(1e4 * _normal(1, 1, 70))
                             >> score_mods.per_key(1e4 * _normal(2, 2, 130))),
    "shared_keys": _MODDED._replace(D=192, E=128, mod=every_mod(2, 70, 130)),
    "wide": _MODDED._replace(D=256, mod=every_mod(2, 70, 130)),
    "wide_of_capped_scores": _MODDED._replace(
        D=256, mod=every_mod(2, 70, 130), spec={"logits_soft_cap": 2.0},
        extras={"bias": ((1, 2, 70, 130), "float32")}),
}


def _listed(shape: tuple[int, ...], most: int, count: int, blocks: tuple[int, int],
            rows: int, heads: int) -> masks.Mask:
  """Returns `count` random blocks below `most`, or none, for each block of queries."""
  indices = np.random.default_rng(shape).integers(
      -1, most, (rows, heads, -(-shape[2] // blocks[0]), count)).astype(np.int32)
  return selected.fitted(masks.selected_blocks(indices, *blocks), shape)


# Lists of blocks, forward and backward.
LISTS = {
    "lists_of_rows_and_heads": Case(
        masks.causal() & _listed((2, 2, 300, 300), 3, 2, (128, 128), 2, 1), B=2, T=300, H=2, K=1),
    "lists_with_a_mod_and_segments": Case(
        masks.segments(IDS[:1]) & _listed((1, 2, 300, 300), 3, 1, (256, 128), 1, 2), T=300, H=2,
        mod=score_mods.alibi(_normal(2)), spec={"dropout_prob": 0.3}, extras=_WORDS),
    "lists_alone_with_a_bias": Case(
        _listed((1, 2, 140, 400), 2, 1, (128, 256), 1, 1), T=140, S=400, H=2, D=256,
        extras={"bias": ((1, 2, 140, 400), "float32"), "sinks": ((1, 2), "float32")}),
    # Blocks that are no multiples of 128 tokens.
    "a_list_a_token": Case(
        masks.causal() & _listed((2, 2, 300, 300), 5, 2, (1, 64), 2, 1), B=2, T=300, H=2, K=1),
    "keys_of_tokens": Case(
        masks.segments(IDS[:1, :140], IDS[:1, :200]) & _listed(
            (1, 4, 140, 200), 200, 40, (1, 1), 1, 2), T=140, S=200, H=4, K=2,
        mod=score_mods.alibi(_normal(4)), spec={"dropout_prob": 0.3}, extras=_WORDS),
    "small_blocks_with_a_bias": Case(
        _listed((1, 2, 140, 200), 25, 6, (8, 8), 1, 2), T=140, S=200, H=2, D=192, E=128,
        extras={"bias": ((1, 2, 140, 200), "float32"), "sinks": ((1, 2), "float32")}),
    "uneven_blocks": Case(
        masks.causal() & _listed((1, 4, 420, 420), 5, 2, (26, 96), 1, 4) & _listed(
            (1, 4, 420, 420), 2, 1, (256, 256), 1, 2), T=420, H=4, K=2),
    "pairs_of_keys": Case(masks.causal() & masks.window(200, 0) & _listed(
        (1, 1, 260, 260), 130, 9, (2, 2), 1, 1), T=260, blocks=BlockSizes(256, 256)),
    "three_keys": Case(_listed((1, 1, 200, 200), 67, 12, (1, 3), 1, 1), T=200),
}
# For the oracle, in place of those with infinite derivatives, which multiply zeros there.
TOTAL_MODS = {"steep": score_mods.custom(_steep_where_visible, _AMOUNT)}

_DECODED_BLOCKS = BlockSizes(block_kv=128)
_rng = np.random.default_rng(0)
_DECODED_DENSE = _rng.random((1, 4, 2, 136)) < 0.5
_DECODED_DENSE[:, 1, 0] = False  # a query of one head that sees no key
# Positions of a ring buffer, in no order.
_RING = np.stack([_rng.permutation(136), np.arange(136)]).astype(np.int32)
_LAST = np.array([[135], [90]], np.int32)

# Two queries a row, which see blocks whole and in parts.
_IN_ORDERS = masks.positions(_LAST - np.array([1, 0], np.int32), _RING, masks.causal())


def every_mod_of_few(heads: int, queries: int, keys: int) -> score_mods.ScoreMod:
  """Returns a score mod of each kind that decoding takes for few queries."""
  return (every_mod(heads, queries, keys) >> score_mods.by_distance(_normal(9, heads), -80)
          >> score_mods.dense(_normal(1, heads, queries, keys))
          >> score_mods.relative(_normal(8, 1), max_distance=40, bidirectional=False))


def every_mod_of_pages(heads: int, tokens: int) -> score_mods.ScoreMod:
  """Returns a score mod of each kind that the kernel over pages takes."""
  return (score_mods.scale_by(_normal(1, 1, tokens)) >> score_mods.alibi(0.1 * _normal(heads))
          >> score_mods.soft_cap(3.0) >> score_mods.per_query(_normal(1, heads, tokens))
          >> score_mods.custom(_by_parity, _normal()) >> score_mods.by_distance(
              _normal(90, heads), -80) >> score_mods.per_key(_normal(1, heads, 1))
          >> score_mods.relative(_normal(8, 1), max_distance=40, bidirectional=False))


# Decoding, to be interpreted: various blocks and widths, of which those below 64 are refused.
DECODED = {
    "lengths": Case(masks.lengths(None, np.array([129, 0, 1], np.int32)), B=3, T=1, S=136, H=4, K=2,
                    blocks=_DECODED_BLOCKS),
    "ring_window_cap_sinks": Case(
        masks.positions(_LAST, _RING, masks.causal() & masks.window(70, 0))
        & masks.segments(np.zeros((2, 1), np.int32), np.where(_RING == 80, -1, 0)), B=2, T=1, S=136,
        H=2, K=1, E=128, spec={"logits_soft_cap": 3.0}, extras={"sinks": ((1, 2), "float32")},
        blocks=_DECODED_BLOCKS),
    "rows_beyond_one_line": Case(masks.positions(np.arange(59, 64, dtype=np.int32)[None]), T=5,
                                 S=64, H=7, K=1, D=80, E=64, dtype="float16"),
    "dense_per_head": Case(masks.dense(_DECODED_DENSE), T=2, S=136, H=4, K=2, D=96, E=64),
    "by_head": Case(masks.custom(lambda b, h, q, k: (k + h) % 3 == q), T=2, S=64, H=6, K=2),
    "several_splits": Case(masks.full(), B=2, T=1, S=200, H=1, E=96, blocks=_DECODED_BLOCKS),
    "wide": Case(masks.full(), T=1, S=72, H=1, D=256),
    "width_192": Case(masks.offset(masks.causal(), 60), T=3, S=64, H=3, K=1, D=192),
    "width_80": Case(masks.lengths(None, np.array([71, 0], np.int32)), B=2, T=3, S=72, H=6, K=2,
                     D=80),
    "one_head_int8": Case(masks.lengths(None, np.array([71, 0], np.int32)), B=2, T=1, S=72, H=3,
                          K=1, D=128, stored="int8"),
    "widths_128_96_int8": Case(masks.full(), T=5, S=136, H=28, K=4, D=128, E=96, stored="int8",
                               spec={"logits_soft_cap": 3.0}),
    "lengths_float8": Case(masks.lengths(None, np.array([129, 0, 70], np.int32)), B=3, T=1, S=136,
                           H=5, K=5, D=192, E=96, stored="float8_e4m3fn", blocks=_DECODED_BLOCKS),
    "wide_float8": Case(masks.offset(masks.causal(), 60), T=3, S=64, H=3, K=1, D=256,
                        stored="float8_e4m3fn", extras={"sinks": ((1, 3), "float32")}),
    # One consumer; two, of which the last has rows of no query; and two thread blocks of two.
    "latent": Case(masks.lengths(None, np.array([129, 0, 70], np.int32)), B=3, T=1, S=136, H=5, K=1,
                   D=192, latent=128, blocks=_DECODED_BLOCKS),
    "latent_many_heads_window_cap_sinks": Case(
        masks.positions(_LAST, _RING, masks.causal() & masks.window(70, 0)), B=2, T=1, S=136, H=40,
        K=1, D=256, latent=192, spec={"logits_soft_cap": 3.0},
        extras={"sinks": ((1, 40), "float32")}, blocks=_DECODED_BLOCKS),
    "latent_row_blocks_float16": Case(masks.offset(masks.causal(), 60), T=3, S=64, H=30, K=1, D=128,
                                      latent=64, dtype="float16"),
    "latent_576": Case(masks.full(), T=1, S=136, H=4, K=1, D=576, latent=512),
    "latent_float8": Case(masks.lengths(None, np.array([129, 0, 70], np.int32)), B=3, T=1, S=136,
                          H=40, K=1, D=256, latent=192, stored="float8_e4m3fn",
                          extras={"sinks": ((1, 40), "float32")}, blocks=_DECODED_BLOCKS),
    "latent_int8": Case(masks.offset(masks.causal(), 60), T=3, S=136, H=5, K=1, D=128, latent=64,
                        stored="int8"),
    "score_mods": Case(
        _IN_ORDERS, B=2, T=2, S=136, H=6, K=2, mod=every_mod_of_few(6, 2, 136),
        spec={"logits_soft_cap": 4.0}, extras={"sinks": ((1, 6), "float32")},
        blocks=_DECODED_BLOCKS),
    "score_mods_of_rows_and_heads": Case(
        _IN_ORDERS, B=2, T=2, S=136, H=3, K=3, D=80, E=64, dtype="float16",
        mod=score_mods.alibi(_normal(2, 3), symmetric=True) >> score_mods.per_key(
            _normal(2, 3, 136)) >> score_mods.soft_cap(2.0) >> score_mods.dense(
                _normal(2, 1, 2, 136)) >> score_mods.scale_by(_normal(1, 1, 1))),
    "score_mods_without_positions_of_many_rows": Case(
        masks.offset(masks.causal(), 130), T=5, S=136, H=14, K=2, D=128,
        mod=every_mod(14, 5, 136) >> score_mods.relative(_normal(8, 14), max_distance=40)),
    "score_mods_one_head_int8": Case(
        masks.lengths(None, np.array([71, 0], np.int32)), B=2, T=1, S=72, H=1, stored="int8",
        mod=every_mod_of_few(1, 1, 72)),
}

LENGTH, HEADS = 1024, 4
_LONG_IDS = np.zeros((2, LENGTH), np.int32)
_PAIRS = (1, HEADS, LENGTH, LENGTH)
_DOCUMENTS = masks.causal() & masks.segments(_LONG_IDS)

FEATURES = {
    "window": Case(masks.causal() & masks.window(200, 0)),
    "segments": Case(_DOCUMENTS),
    "chunk": Case(masks.causal() & masks.chunk(256)),
    "chunk_of_any_size": Case(masks.causal() & masks.chunk(300)),
    "positions": Case(masks.positions(_LONG_IDS, _LONG_IDS)),
    "dense": Case(masks.dense(np.zeros((2, HEADS, LENGTH, LENGTH), bool))),
    "bias": Case(extras={"bias": (_PAIRS, "float32")}),
    "bias_row": Case(extras={"bias": ((1, HEADS, 1, LENGTH), "float32")}),
    "sinks": Case(extras={"sinks": ((1, HEADS), "float32")}),
    "soft_cap": Case(spec={"logits_soft_cap": 30.0}),
    "dropout": Case(spec={"dropout_prob": 0.1}, extras=_WORDS),
    "alibi": Case(mod=score_mods.alibi(np.ones(HEADS, np.float32))),
    "by_distance": Case(mod=score_mods.by_distance(_normal(33, HEADS))),
    "every_mod": Case(mod=every_mod(HEADS, LENGTH, LENGTH)),
    "everything": Case(
        _DOCUMENTS & masks.window(200, 100), spec={"dropout_prob": 0.1, "logits_soft_cap": 30.0},
        extras={"bias": (_PAIRS, "float32"), "sinks": ((1, HEADS), "float32"), **_WORDS}),
}


# The cases of `lowered` that differ most: the narrowest and the widest, each kind of operand, and
# all together.
COMPILED = ("causal_64", "causal_128", "causal_192_256", "full_128", "float16_256", "window_128",
            "dense_128", "dropout_256", "every_mod_128", "everything_128", "everything_256")


@functools.cache
def lowered() -> dict[str, Case]:
  """Returns every width, dtype and kind of mask of the tuned table, and every feature.

  The slow ones are every feature of every width and dtype: 40 minutes if they are compiled.
  """
  found = {f"causal_{width}": Case(D=width) for width in tiling.WIDTHS}
  found["causal_192_128"] = Case(D=192, E=128)
  found["causal_192_256"] = Case(D=192, E=256)  # takes the most shared memory
  found["causal_long_64"] = Case(T=tiling.LONG, D=64)
  found.update({f"full_{width}": Case(masks.full(), D=width) for width in (64, 128, 256)})
  found.update({f"float16_{width}": Case(D=width, dtype="float16") for width in (64, 256)})
  found.update({f"{name}_128": case._replace(D=128) for name, case in FEATURES.items()})
  found.update({f"{name}_256": FEATURES[name]._replace(D=256) for name in (
      "segments", "chunk", "chunk_of_any_size", "bias", "soft_cap", "dropout", "everything")})
  widths = [(width, width) for width in tiling.WIDTHS] + [(192, 128)]
  features = {"causal": Case(), "full": Case(masks.full()), **FEATURES}
  slow = {f"{name}_{width}_{value_width}_{dtype}":
              case._replace(D=width, E=value_width, dtype=dtype)
          for (name, case), (width, value_width), dtype in itertools.product(
              features.items(), widths, tiling.DTYPES)}
  found.update({name: case for name, case in slow.items() if sampling.chosen(name)})
  found = {name: case._replace(B=2, T=max(LENGTH, case.T), H=HEADS) for name, case in found.items()}
  alike = {}  # of cases with the same program, the first
  for name, case in found.items():
    alike.setdefault(repr((case.shapes, case.full_spec)), name)
  return {name: found[name] for name in alike.values()}


@functools.cache
def compiled() -> dict[str, Case]:
  """Returns the cases of `lowered` whose machine code is read; each takes seconds."""
  found = lowered()
  return {name: found[name] for name in sampling.names(found, COMPILED)}


@functools.cache
def compiled_backward() -> dict[str, Case]:
  """Returns the cases of `compiled` that differ in the backward, with groups of heads."""
  # The same backwards as without sinks, as float16_256, and as causal_64.
  same = ("sinks", "float16_64", "causal_long")
  slow = tuple(name for name in ("everything_256", "causal_128", "full_128")
               if not sampling.chosen(f"backward {name}"))
  return {name: case._replace(K=HEADS // 2) for name, case in compiled().items()
          if not name.startswith(same + slow)}


@functools.cache
def programs() -> dict[str, tuple[Any, tuple]]:
  """Forwards, for `benchmark.static.gpu`."""
  return {name: (case.forward, (case.shapes,)) for name, case in compiled().items()}


@functools.cache
def backward_programs() -> dict[str, tuple[Any, tuple]]:
  """Cotangents of queries, keys and values, by two kernels, for `benchmark.static.gpu`."""
  return {name: _backward_program(case) for name, case in compiled_backward().items()}


def _backward_program(case: Case) -> tuple[Any, tuple]:
  residuals = case.residual_shapes
  run = lambda *args: KERNEL.backward(
      args[0], case.full_spec, case.blocks, *args[1:], ("query", "key", "value"))
  return run, (case.shapes, residuals, residuals)


@functools.cache
def crowded() -> dict[str, Case]:
  """Returns cases whose backward takes nearly all registers."""
  common = Case(B=2, T=LENGTH, H=HEADS, K=HEADS // 2, D=256)
  every, everything = every_mod(HEADS, LENGTH, LENGTH), FEATURES["everything"]
  features = common._replace(spec=everything.spec, extras=everything.extras)
  listed = features._replace(
      mask=_DOCUMENTS & _listed((2, HEADS, LENGTH, LENGTH), LENGTH, 64, (1, 1), 2, HEADS))
  cap = FEATURES["soft_cap"].spec
  found = {"every_mod_soft_cap": common._replace(mod=every, spec=cap),
           "every_mod_bias_soft_cap": common._replace(
               mod=every, spec=cap, extras=FEATURES["bias"].extras),
           "every_mod_of_documents": features._replace(mod=every, mask=everything.mask),
           "every_mod_everything": features._replace(mod=every),
           "lists_everything": listed, "lists_every_mod_everything": listed._replace(mod=every),
           "two_blocks": Case(B=2, T=70, H=2, K=1)}
  return {name: found[name] for name in sampling.names(
      found, ("every_mod_soft_cap", "lists_every_mod_everything", "two_blocks"))}


@functools.cache
def crowded_programs() -> dict[str, tuple[Any, tuple]]:
  """The backwards of `crowded`, by two kernels."""
  return {name: _backward_program(case) for name, case in crowded().items()}


@functools.cache
def constant_copy_programs() -> dict[str, tuple[Any, tuple]]:
  """Backwards of one head, whose copies have constant coordinates."""
  return {name: _backward_program(GRADIENTS[name]) for name in ("width_256",)}


@functools.cache
def bias_programs() -> dict[str, tuple[Any, tuple]]:
  """Cotangents of a bias, by a kernel of its own, for `benchmark.static.gpu`."""
  shapes = {"pairs": _PAIRS, "batch": (2, *_PAIRS[1:]), "keys": (1, HEADS, 1, LENGTH)}
  every = itertools.product(FEATURES, tiling.WIDTHS, shapes)
  quick = itertools.product(("everything",), (64, 256), ("pairs", "keys"))
  chosen = sampling.names(["{}_{}_{}".format(*x) for x in every],
                          ["{}_{}_{}".format(*x) for x in quick])
  def program(case):
    residuals = case.residual_shapes
    run = lambda *args: case.backward(*args, ("bias",))
    return run, (case.shapes, residuals, residuals)
  def case_of(name, width, kind):
    case = FEATURES[name]._replace(B=2, T=LENGTH, H=HEADS, K=HEADS // 2, D=width)
    return case._replace(extras={**case.extras, "bias": (shapes[kind], "float32")})
  return {f"{name}_{width}_{kind}": program(case_of(name, width, kind))
          for name, width, kind in itertools.product(FEATURES, tiling.WIDTHS, shapes)
          if f"{name}_{width}_{kind}" in chosen}


@functools.cache
def table_programs() -> dict[str, tuple[Any, tuple]]:
  """Cotangents of a table by distance, by a kernel of its own, for `benchmark.static.gpu`."""
  table = score_mods.by_distance(_normal(257, HEADS), -200)
  mods = {"table": table, "table_and_every_mod": table >> every_mod(HEADS, LENGTH, LENGTH)}
  def program(mod: score_mods.ScoreMod, width: int) -> tuple[Any, tuple]:
    case = Case(B=2, T=LENGTH, H=HEADS, K=HEADS // 2, D=width, mod=mod)
    residuals = case.residual_shapes
    run = lambda *args: case.backward(*args, ("mods.0",))
    return run, (case.shapes, residuals, residuals)
  every = {f"{name}_{width}": program(mod, width)
           for name, mod in mods.items() for width in tiling.WIDTHS}
  return {name: every[name] for name in sampling.names(
      every, ("table_128", "table_and_every_mod_256"))}


@functools.cache
def decoded() -> dict[str, Case]:
  """Returns calls of the decoding kernel, with the mask of a cache."""
  zeros = lambda *shape: np.zeros(shape, np.int32)
  query, key = zeros(8, 1), zeros(8, 4096)
  mask = masks.positions(query, key) & masks.segments(query, key)
  common = Case(mask, B=8, T=1, S=4096, H=32, K=8)
  return {**{f"width_{n}": common._replace(D=n) for n in (64, 128, 256)},
          "widths_192_128": common._replace(D=192, E=128),
          "group_of_16": common._replace(D=128, K=2),
          **{f"width_{n}_int8": common._replace(D=n, stored="int8") for n in (64, 128, 256)},
          **{f"width_{n}_float8": common._replace(D=n, stored="float8_e4m3fn")
             for n in (64, 128, 192)},
          "width_96_float8": common._replace(D=96, stored="float8_e4m3fn"),
          "width_80": common._replace(D=80), "width_96": common._replace(D=96),
          "group_of_16_int8": common._replace(D=128, K=2, stored="int8"),
          "group_of_16_float8": common._replace(D=64, K=1, H=16, stored="float8_e4m3fn"),
          **{f"latent_{n}_heads": common._replace(H=n, K=1, D=576, latent=512)
             for n in (16, 32, 128)},
          "latent_128_heads_int8": common._replace(
              H=128, K=1, D=576, latent=512, stored="int8"),
          "latent_16_heads_float8": common._replace(
              H=16, K=1, D=576, latent=512, stored="float8_e4m3fn"),
          "group_of_32_soft_cap_sinks_float16": common._replace(
              D=128, K=1, dtype="float16", spec={"logits_soft_cap": 30.0},
              extras={"sinks": ((1, 32), "float32")}),
          "alibi_64": common._replace(mod=score_mods.alibi(_normal(32))),
          "score_mods_128": common._replace(D=128, mod=every_mod_of_few(32, 1, 4096)),
          "score_mods_256": common._replace(D=256, mod=every_mod_of_few(32, 1, 4096)),
          "score_mods_192_128": common._replace(D=192, E=128, mod=every_mod_of_few(32, 1, 4096)),
          "score_mods_group_of_16": common._replace(D=128, K=2, mod=every_mod_of_few(32, 1, 4096)),
          "score_mods_group_of_32": common._replace(D=256, K=1, mod=every_mod_of_few(32, 1, 4096)),
          **{f"score_mods_{dtype}": common._replace(
              D=128, stored=dtype, mod=every_mod_of_few(32, 1, 4096))
             for dtype in ("int8", "float8_e4m3fn")}}


@functools.cache
def decode_programs() -> dict[str, tuple[Any, tuple]]:
  """Decoding: a kernel for splits and one that combines them, for `benchmark.static.gpu`."""
  return {name: (case.decode, (case.shapes,)) for name, case in decoded().items()}


def _paged_term(tokens: int) -> score_mods.ScoreMod:
  return every_mod_of_pages(32, tokens).lower((1, 32, tokens, 1))


@functools.cache
def paged() -> dict[str, tuple[paged_operands.PagedOperands, pages.Heads]]:
  """Returns calls of the kernel for pages, as shapes."""
  def case(layout, page, key_heads, width, tokens=8, stored=("bfloat16", None)):
    array = lambda shape, dtype="int32": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    heads = pages.Heads(key_heads, width, width)
    cache = jax.eval_shape(lambda: pages.init(layout, 64, page, heads, *stored))
    metadata = pages.PagesMetadata(array((8, 4096 // page)), array((8,)), array((9,)))
    query = array((tokens, 32, width), "bfloat16")
    return paged_operands.PagedOperands(query, cache, metadata), heads
  def latent(page, heads, padded, stored="bfloat16"):
    operands, _ = case(pages.PagesV2, page, 1, 576)
    cache = jax.eval_shape(lambda: latent_pages.init(
        64, page, (512, 64), dtype=stored, padded=padded))
    query = jax.ShapeDtypeStruct((8, heads, 576), jnp.bfloat16)
    return operands._replace(query=query, cache=cache), pages.Heads(1, 576, 512)
  def with_mod(case):
    operands, heads = case
    mods = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype)
                 for x in jax.tree.leaves(_paged_term(operands.query.shape[0])))
    return operands._replace(mods=mods), heads
  int8, float8 = ("int8", "token"), ("float8_e4m3fn", "tensor")
  return {"latent_pages_of_64_128_heads": latent(64, 128, False),
          "padded_latent_pages_of_16_16_heads": latent(16, 16, True),
          "padded_float8_latent_pages_of_32_128_heads": latent(32, 128, True, "float8_e4m3fn"),
          "int8_latent_pages_of_64_16_heads": latent(64, 16, False, "int8"),
          "int8_latent_pages_of_16_128_heads": latent(16, 128, False, "int8"),
          "padded_float8_latent_pages_of_16_16_heads": latent(16, 16, True, "float8_e4m3fn"),
          "int8_latent_pages_of_8_128_heads": latent(8, 128, False, "int8"),
          "v1_pages_of_16": case(pages.PagesV1, 16, 8, 128),
          "v2_pages_of_32_few_queries": case(pages.PagesV2, 32, 8, 64, 32),
          "v2_pages_of_48": case(pages.PagesV2, 48, 8, 80),
          "v2_pages_of_128": case(pages.PagesV2, 128, 8, 128),
          "v3_pages_of_64": case(pages.PagesV3, 64, 8, 256),
          "v2_int8_pages_of_16": case(pages.PagesV2, 16, 8, 128, stored=int8),
          "v1_int8_pages_of_32_one_head": case(pages.PagesV1, 32, 1, 64, stored=int8),
          "v1_int8_pages_of_16_one_head": case(pages.PagesV1, 16, 1, 64, stored=int8),
          "v2_float8_pages_of_8": case(pages.PagesV2, 8, 8, 128, stored=("float8_e4m3fn", "token")),
          "v3_float8_pages_of_64": case(pages.PagesV3, 64, 8, 128, stored=float8),
          **{f"v2_score_mods_{width}": with_mod(case(pages.PagesV2, 16, 8, width, 32))
             for width in (64, 128, 256)},
          **{f"v2_score_mods_int8_{tokens}_tokens": with_mod(
              case(pages.PagesV2, 16, 8, 128, tokens, int8)) for tokens in (8, 32)},
          "v3_score_mods_one_query": with_mod(case(pages.PagesV3, 64, 8, 128))}


def paged_spec(operands: paged_operands.PagedOperands) -> PagedSpec:
  """Returns what is computed for a case of `paged`."""
  term = _paged_term(operands.query.shape[0]) if operands.mods else None
  return PagedSpec(0.1, window=(1000, None), score_mod=jax.tree.structure(term))


@functools.cache
def paged_programs() -> dict[str, tuple[Any, tuple]]:
  """Decoding from pages with a window, by two kernels, for `benchmark.static.gpu`."""
  def program(operands, heads):
    spec = paged_spec(operands)
    return lambda x: tuple(gpu_paged.forward(x, spec, heads, BlockSizes())), (operands,)
  return {name: program(*case) for name, case in paged().items()}
