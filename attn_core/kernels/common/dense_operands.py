# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of a dense attention: their mask, their padding to whole blocks, dtypes of results."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.caches import quantize
from attn_core.kernels.common.contract import BackwardResiduals
from attn_core.masks import block_map, mask as mask_lib, materialize, tile as tile_lib
from attn_core.masks.mask import Coordinates
from attn_core.score_mods import evaluate
from attn_core.types import (AttentionSpec, Operands, PagedOperands, PagedSpec, are_known,
                             at_least_float32, holds_pairs, operand)


def assert_shapes(operands: Operands, latent_width: int | None = None) -> None:
  """Asserts the shapes of query, key and value and of their scales while a kernel is traced.

  Args:
    operands: the arrays.
    latent_width: `AttentionSpec.latent_width`.

  Raises:
    AssertionError: query is not [B, T, H, D], key not [B, S, K, D] with H % K == 0, value not
      [B, S, K, E], or a scale not [B, S, K]; scales [B, S, K, groups], one for every 32 columns,
      go with keys and values of half the width.
  """
  import chex  # Takes 0.13 s, and is used only where a kernel is traced.
  chex.assert_rank([operands.query, operands.key, operands.value], 4)
  (batch, _, heads, width), keys, key_heads = operands.query.shape, *operands.key.shape[1:3]
  apart = 0 if latent_width is None else operands.value.shape[-1]
  held = 2 if holds_pairs(operands.key_scale, operands.key) else 1
  chex.assert_shape(operands.key, (batch, keys, key_heads, (width - apart) // held))
  chex.assert_shape(operands.value, (batch, keys, key_heads, None))
  chex.assert_is_divisible(heads, key_heads)
  dtype = "int4" if held == 2 else operands.key.dtype
  for scale, x in ((operands.key_scale, operands.key), (operands.value_scale, operands.value)):
    if scale is not None:
      chex.assert_shape(scale, quantize.scale_shape(
          (batch, keys, key_heads), held * x.shape[3], dtype))


def assert_operands(operands: Operands, latent_width: int | None = None) -> None:
  """Asserts ranks, shapes and dtypes of the operands while a kernel is traced.

  Args:
    operands: the arrays.
    latent_width: `AttentionSpec.latent_width`.

  Raises:
    AssertionError: see `assert_shapes`; or the query is not float, the bias not [B or 1, H or 1,
      T or 1, S or 1], or sinks not [B or 1, H].
  """
  import chex  # As in `assert_shapes`.
  assert_shapes(operands, latent_width)
  chex.assert_type(operands.query, float)
  (batch, queries, heads, _), keys = operands.query.shape, operands.key.shape[1]
  if operands.bias is not None:
    chex.assert_shape(operands.bias, ({batch, 1}, {heads, 1}, {queries, 1}, {keys, 1}))
  if operands.sinks is not None:
    chex.assert_shape(operands.sinks, ({batch, 1}, heads))


def assert_residuals(operands: Operands, *residuals: BackwardResiduals,
                     latent_width: int | None = None) -> None:
  """Asserts the shapes of results of a forward, of their tangents or of their cotangents.

  Args:
    operands: the arrays.
    *residuals: the results.
    latent_width: `AttentionSpec.latent_width`.

  Raises:
    AssertionError: out is neither None nor [B, T, H, E], or lse is not [B, H, T].
  """
  import chex  # As in `assert_shapes`.
  batch, queries, heads, _ = operands.query.shape
  held = 2 if holds_pairs(operands.value_scale, operands.value) else 1
  width = operands.value.shape[3] * held if latent_width is None else latent_width
  for out, lse in residuals:
    if out is not None:
      chex.assert_shape(out, (batch, queries, heads, width))
    chex.assert_shape(lse, (batch, heads, queries))


def assert_tangents(operands: Operands, residuals: BackwardResiduals,
                    tangents: dict[str, jax.Array], latent_width: int | None = None) -> None:
  """Asserts shapes of operands and residuals, and that tangents have those of their operands.

  Args:
    operands: the arrays.
    residuals: results of the forward.
    tangents: by the operands' names.
    latent_width: `AttentionSpec.latent_width`.

  Raises:
    AssertionError: see `assert_operands` and `assert_residuals`; or a tangent has another shape.
  """
  import chex  # As in `assert_shapes`.
  assert_operands(operands, latent_width)
  assert_residuals(operands, residuals, latent_width=latent_width)
  for name, x in tangents.items():
    chex.assert_equal_shape([operand(operands, name), x])


def mask_of(operands: Operands, spec: AttentionSpec) -> mask_lib.Mask:
  """Returns the mask: its structure from `spec`, its arrays from `operands`."""
  return jax.tree.unflatten(spec.mask, operands.mask.arrays)


def distances_of_runs(operands: Operands, spec: AttentionSpec, *,
                      continued: bool = True) -> jax.Array:
  """Returns the position of the first key minus that of the first query for each pair of runs.

  Positions must be in runs, see `evaluate.runs_of`.

  Args:
    operands: the arrays.
    spec: what is computed.
    continued: whether the first query and the first key are those of all, to which the positions
      of a run are continued; else those of the run.

  Returns:
    int32 [B or 1, runs of queries * of keys].
  """
  runs = evaluate.runs_of(mask_lib.of_structure(spec.mask))
  assert runs is not None
  count = {mask_lib.QUERY: runs.queries, mask_lib.KEY: runs.keys}
  def first(x: jax.Array, role: str) -> jax.Array:
    number = count.get(role, 1)
    return x if role not in count else x[:, :1] if number == 1 else x[:, ::x.shape[1] // number]
  arrays = tuple(first(x, role) for x, role in zip(
      operands.mask.arrays, mask_lib.structure_roles(spec.mask), strict=True))
  mask, at = materialize.expand(spec.mask, operands.mask._replace(arrays=arrays),
                                (operands.query.shape[0], 1, runs.queries, runs.keys))
  at, _ = evaluate.move_to_positions(mask, at)
  distance = at.key_position - at.query_position
  if continued and runs != evaluate.Runs():
    of_query, of_key = (np.arange(count, dtype=np.int32) * (runs.stride * (x.shape[1] // count))
                        for count, x in ((runs.queries, operands.query), (runs.keys, operands.key)))
    distance = distance - (of_key - of_query[:, None])
  return distance.reshape(distance.shape[0], -1)


def positions_of(operands: Operands, spec: AttentionSpec) -> Coordinates:
  """Returns coordinates whose positions are [B or 1, 1, T or 1, 1] and [B or 1, 1, 1, S or 1]."""
  batch, queries, heads, _ = operands.query.shape
  return evaluate.positions(
      spec.mask, operands.mask, (batch, heads, queries, operands.key.shape[1]))


pad_axis = tile_lib.pad_axis


def key_padding(sizes: block_map.Sizes) -> int:
  """Returns the number of keys to append for whole key blocks."""
  return sizes.key_padding


def has_key_padding(sizes: block_map.Sizes) -> bool:
  """Returns whether the last key block may extend past the keys."""
  return not are_known(sizes.keys) or bool(key_padding(sizes))


def pad_operands(operands: Operands, sizes: block_map.Sizes,
                 structure: jax.tree_util.PyTreeDef | None = None) -> Operands:
  """Pads queries, keys, values and the bias to whole blocks.

  Args:
    operands: the arrays.
    sizes: lengths and block sizes.
    structure: the mask's; its arrays are padded too. None: they stay as they are.
  """
  rows = sizes.query_padding
  columns = key_padding(sizes)
  bias, mask = operands.bias, operands.mask
  if bias is not None:
    bias = pad_axis(bias, 2, rows if bias.shape[2] != 1 else 0)
    bias = pad_axis(bias, 3, columns if bias.shape[3] != 1 else 0)
  if structure is not None:
    mask = tile_lib.pad_mask(structure, mask, rows, columns)
  key, value = (pad_axis(x, 1, columns) for x in (operands.key, operands.value))
  return operands._replace(query=pad_axis(operands.query, 1, rows), key=key, value=value,
                           bias=bias, mask=mask)


def out_dtype(operands: Operands | PagedOperands, spec: AttentionSpec | PagedSpec) -> DTypeLike:
  """Returns the dtype of the output."""
  return operands.query.dtype if spec.out_dtype is None else spec.out_dtype


def lse_dtype(spec: AttentionSpec | PagedSpec) -> jnp.dtype:
  """Returns the dtype of the lse: that of the softmax, at least float32."""
  return at_least_float32(spec.softmax_dtype)
