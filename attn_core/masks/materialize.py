# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a mask as one boolean array, for the oracle, dense mechanisms and pictures."""

import jax
import jax.numpy as jnp

from attn_core.masks import mask as mask_lib
from attn_core.types import MaskOperands

Shape = tuple[int, int, int, int]  # (B, H, T, S)


def expand(structure: jax.tree_util.PyTreeDef, operands: MaskOperands,
           shape: Shape) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
  """Broadcasts a mask's arrays and the coordinates to all queries and keys.

  Args:
    structure: the mask's tree structure.
    operands: its arrays.
    shape: (B, H, T, S).

  Returns:
    (mask, coordinates) that broadcast to [B, H, T, S].
  """
  shapes = {mask_lib.QUERY: (-1, 1, shape[2], 1), mask_lib.KEY: (-1, 1, 1, shape[3]),
            mask_lib.BATCH: (-1, 1, 1, 1)}
  roles = mask_lib.structure_roles(structure)
  mask = jax.tree.unflatten(structure, [
      x.reshape(shapes[role]) if role in shapes else x
      for x, role in zip(operands.arrays, roles, strict=True)])
  batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) for n in shape)
  batch = batch if operands.batch_index is None else operands.batch_index
  head, query, key = head.reshape(1, -1, 1, 1), query.reshape(1, 1, -1, 1), key.reshape(1, 1, 1, -1)
  if operands.head_offset is not None:
    head = head + operands.head_offset.reshape(-1, 1, 1, 1)
  return mask, mask_lib.Coordinates(batch.reshape(-1, 1, 1, 1), head, query, key, query, key)


def visible(structure: jax.tree_util.PyTreeDef, operands: MaskOperands,
            shape: Shape) -> jax.Array:
  """Evaluates a mask: bool, broadcastable to `shape` = (B, H, T, S)."""
  mask, at = expand(structure, operands, shape)
  result = jnp.asarray(mask.visible(at))
  return result.reshape((1,) * (4 - result.ndim) + result.shape)


def to_dense(mask: mask_lib.Mask, shape: Shape) -> jax.Array:
  """Evaluates a mask as bool [B, H, T, S].

  Args:
    mask: any mask; its arrays must fit the shape.
    shape: (B, H, T, S).
  """
  arrays, structure = jax.tree.flatten(mask)
  result = visible(structure, MaskOperands(tuple(map(jnp.asarray, arrays))), shape)
  return jnp.broadcast_to(result, shape)
