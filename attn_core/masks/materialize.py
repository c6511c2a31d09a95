"""A mask written out as one boolean array: for the oracle, for dense mechanisms, for pictures."""

import jax
import jax.numpy as jnp

from attn_core.masks import leaves as algebra
from attn_core.types import MaskOperands


def expand(structure, operands: MaskOperands, shape):
  """The mask and the coordinates of the whole rectangle.

  Args:
    structure: the mask's tree structure.
    operands: its arrays.
    shape: (B, H, T, S).

  Returns:
    (mask, coordinates) that broadcast to [B, H, T, S].
  """
  shapes = {algebra.QUERY: (-1, 1, shape[2], 1), algebra.KEY: (-1, 1, 1, shape[3]),
            algebra.BATCH: (-1, 1, 1, 1)}
  roles = algebra.structure_roles(structure)
  mask = jax.tree.unflatten(structure, [
      x.reshape(shapes[role]) if role in shapes else x
      for x, role in zip(operands.arrays, roles, strict=True)])
  batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) for n in shape)
  batch = batch if operands.batch_index is None else operands.batch_index
  head, query, key = head.reshape(1, -1, 1, 1), query.reshape(1, 1, -1, 1), key.reshape(1, 1, 1, -1)
  if operands.head_offset is not None:
    head = head + operands.head_offset.reshape(-1, 1, 1, 1)
  return mask, algebra.Coordinates(batch.reshape(-1, 1, 1, 1), head, query, key, query, key)


def visible(structure, operands: MaskOperands, shape):
  """What every query sees: bool, broadcastable to `shape` = (B, H, T, S)."""
  mask, at = expand(structure, operands, shape)
  seen = jnp.asarray(mask.visible(at))
  return seen.reshape((1,) * (4 - seen.ndim) + seen.shape)


def to_dense(mask: algebra.Mask, shape) -> jax.Array:
  """The mask as bool [B, H, T, S].

  Args:
    mask: any mask.
    shape: (B, H, T, S); its arrays must fit.
  """
  arrays, structure = jax.tree.flatten(mask)
  seen = visible(structure, MaskOperands(tuple(map(jnp.asarray, arrays))), shape)
  return jnp.broadcast_to(seen, shape)
