# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mask and shards of one step of a sharded sequence: a device's queries and the keys of a member.

Masks and dropout are functions of positions. Given the numbers of its rows and columns in the whole
sequence, a step computes the same values as one device would. T and S are the numbers of queries
and keys of one device.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import (block_map, constructors, leaves, mask as mask_lib,
                             position_range)
from attn_core.score_mods import score_mod
from attn_core.sharding import token_order, varying_axes
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionSpec, Operands


class Keys(NamedTuple):
  """Keys, values and the mask's arrays for them, which move around the ring together."""

  key: jax.Array  # [B, S, K, D]
  value: jax.Array  # [B, S, K, E]
  arrays: tuple[jax.Array, ...]  # of the mask, int32 [B or 1, S] each


def own_keys(operands: Operands, spec: AttentionSpec) -> Keys:
  """Returns the keys of this device."""
  roles = mask_lib.structure_roles(spec.mask)
  return Keys(operands.key, operands.value, tuple(
      x for x, role in zip(operands.mask.arrays, roles) if role == mask_lib.KEY))


def member(sequence: Sequence, like: jax.Array | None = None) -> jax.Array | int:
  """Returns the int32 number of this device's member.

  Args:
    sequence: the sharding of the sequence.
    like: inside a kernel, one of its arguments; see `varying_axes.as_untracked`.
  """
  if not sequence.key_axes:
    return 0
  index = lax.axis_index(sequence.key_axes).astype(np.int32)
  return index if like is None else varying_axes.as_untracked(index, like)


def coordinates(sequence: Sequence, like: jax.Array) -> jax.Array:
  """Returns this device's int32 index along every mesh axis; see `member`."""
  return jnp.stack([varying_axes.as_untracked(lax.axis_index(axis).astype(np.int32), like)
                    for axis in sequence.mesh_axes])


def attended(sequence: Sequence, operands: Operands, spec: AttentionSpec, keys: Keys,
             source: jax.Array | int | None = None) -> tuple[Operands, AttentionSpec]:
  """Returns the attention of this device's queries over some keys.

  Args:
    sequence: the sharding of the sequence.
    operands: those of the device; bias and dense masks have the columns of all keys.
    spec: that of the whole attention.
    keys: the keys of member `source`, or of all members in order if `source` is None.
    source: int32, may be traced.

  Returns:
    (operands, spec) of that attention.
  """
  key_arrays = iter(keys.arrays)
  arrays = tuple(
      next(key_arrays) if role == mask_lib.KEY
      else columns(x, keys, source) if role == mask_lib.DENSE else x
      for x, role in zip(operands.mask.arrays, mask_lib.structure_roles(spec.mask)))
  mask = jax.tree.unflatten(spec.mask, arrays)
  if not _is_position_independent(sequence, spec, mask):
    all_members = token_order.numbers(sequence.members)
    of = sequence.columns(source) if source is not None else np.concatenate(
        [sequence.columns(n) for n in all_members])
    # The keys of one member are those of a step, inside the kernel of the whole ring.
    me = member(sequence, None if source is None else operands.query)
    mask = leaves.PlacedRuns(mask, sequence.size, sequence.rows(me)[None], of[None],
                             sequence.runs(source is None), sequence.stride)
  found, structure = jax.tree.flatten(mask)
  mods = tuple(columns_of_mod(x, role, keys, source) for x, role in zip(
      operands.mods, score_mod.structure_roles(spec.score_mod)))
  return operands._replace(
      key=keys.key, value=keys.value, bias=columns(operands.bias, keys, source), mods=mods,
      mask=operands.mask._replace(arrays=tuple(map(jnp.asarray, found)))), spec._replace(
          mask=structure)


def _is_position_independent(sequence: Sequence, spec: AttentionSpec, mask: mask_lib.Mask) -> bool:
  """Whether positions do not affect the result, or rows and columns are in the natural order."""
  if sequence.members == 1 and sequence.is_natural:
    return True
  return (isinstance(mask, mask_lib.Full) and not spec.dropout_prob and not spec.has_score_mod
          and sequence.padded(sequence.keys) == sequence.keys)


def columns(x: jax.Array | None, keys: Keys,
            source: jax.Array | int | None) -> jax.Array | None:
  """Returns the columns of a member's keys in an array [B or 1, H or 1, T or 1, columns or 1].

  Args:
    x: the array, with the columns of all members; None: returned.
    keys: keys of one member.
    source: that member, int32; None: all members.
  """
  if x is None or source is None or x.shape[3] == 1:
    return x
  size = keys.key.shape[1]
  return lax.dynamic_slice_in_dim(x, source * size, size, 3)


def columns_of_mod(x: jax.Array, role: str, keys: Keys,
                   source: jax.Array | int | None) -> jax.Array:
  """Returns `columns` of an array of the score mod, all of it where it has no columns."""
  found = columns(x, keys, source) if role == score_mod.PAIR else x
  assert found is not None
  return found


@functools.lru_cache(maxsize=256)
def shifts(sequence: Sequence, structure: jax.tree_util.PyTreeDef) -> tuple[int, ...]:
  """Returns the steps of a ring that are needed, as distances in members that keys have moved.

  Step s brings the keys of member m - s to member m; step 0 is always needed. Steps whose keys are
  hidden from every query are left out where that follows from the static structure of the mask,
  such as a window or chunks, and not from its arrays.
  """
  members = range(sequence.members)
  mask = position_range.static_superset(jax.tree.unflatten(structure, range(structure.num_leaves)))
  seen = visible_members(sequence, mask)
  return (0, *(s for s in members[1:]
               if any(seen[m, (m - s) % sequence.members] for m in members)))


def visible_members(sequence: Sequence, mask: mask_lib.Mask) -> np.ndarray:
  """Returns which members' queries may see which members' keys, a bool [members, members]."""
  rows, cols = (np.concatenate([of(m) for m in token_order.numbers(sequence.members)])
                for of in (sequence.rows, sequence.columns))
  runs = sequence.shards * token_order.pieces(sequence.layout)
  kinds = block_map.host_kinds(
      constructors.placed(mask, rows[None], cols[None], sequence.size),
      block_map.Sizes(len(rows), len(cols), len(rows) // runs, len(cols) // runs))
  seen = (kinds != block_map.EMPTY).any((0, 1))
  return seen.reshape(sequence.members, -1, sequence.members, runs // sequence.members).any((1, 3))
