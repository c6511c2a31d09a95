"""One step of a sequence that is spread: a device's own queries and the keys of one member.

A mask is a function of positions, and so is dropout: with the numbers of its rows and columns in
the whole sequence, a step computes what one device would.

Letters: B batch, T and S queries and keys of one device, H query heads, K key heads, D and E
widths.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import leaves as algebra, block_map as blocks, position_range as reach
from attn_core.sharding import token_order as layouts
from attn_core.sharding.context_parallel import Sequence
from attn_core.types import AttentionSpec, Operands


class Keys(NamedTuple):
  """What belongs to keys, and travels with them."""

  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  arrays: tuple  # of the mask, int32 [B or 1, S] each


def own_keys(operands: Operands, spec: AttentionSpec) -> Keys:
  """The device's own."""
  roles = algebra.structure_roles(spec.mask)
  return Keys(operands.key, operands.value, tuple(
      x for x, role in zip(operands.mask.arrays, roles) if role == algebra.KEY))


def member(sequence: Sequence):
  """This device's member, int32."""
  return lax.axis_index(sequence.key_axes).astype(np.int32) if sequence.key_axes else 0


def attended(sequence: Sequence, operands: Operands, spec: AttentionSpec, keys: Keys,
             source=None) -> tuple[Operands, AttentionSpec]:
  """The device's own queries and some keys, as an attention of their own.

  Args:
    sequence: how it is spread.
    operands: the device's own; bias and dense masks have the columns of all keys.
    spec: of the whole.
    keys: of member `source`; None: of all of them in a row.
    source: int32, may be traced.
  """
  travelled = iter(keys.arrays)
  arrays = tuple(
      next(travelled) if role == algebra.KEY
      else columns(x, keys, source) if role == algebra.DENSE else x
      for x, role in zip(operands.mask.arrays, algebra.structure_roles(spec.mask)))
  mask = jax.tree.unflatten(spec.mask, arrays)
  if not _is_everywhere_alike(sequence, spec, mask):
    everyone = layouts.numbers(sequence.members)
    of = sequence.columns(source) if source is not None else np.concatenate(
        [sequence.columns(n) for n in everyone])
    mask = algebra.placed(mask, sequence.rows(member(sequence))[None], of[None], sequence.size)
  arrays, structure = jax.tree.flatten(mask)
  return operands._replace(
      key=keys.key, value=keys.value, bias=columns(operands.bias, keys, source),
      mask=operands.mask._replace(arrays=tuple(map(jnp.asarray, arrays)))), spec._replace(
          mask=structure)


def _is_everywhere_alike(sequence, spec, mask) -> bool:
  """Whether it does not matter where queries and keys stand, or they stand where they seem to."""
  if sequence.members == 1 and sequence.is_natural:
    return True
  return (isinstance(mask, algebra.Full) and not spec.dropout_prob
          and sequence.padded(sequence.keys) == sequence.keys)


def columns(x, keys: Keys, source):
  """The columns of some keys of an array [B or 1, H or 1, T or 1, S or 1] or None."""
  if x is None or source is None or x.shape[3] == 1:
    return x
  size = keys.key.shape[1]
  return lax.dynamic_slice_in_dim(x, source * size, size, 3)


@functools.lru_cache(maxsize=256)
def shifts(sequence: Sequence, structure) -> tuple[int, ...]:
  """The hops of a ring: how far keys have travelled, in members, where somebody sees them.

  Hop s brings the keys of member m - s to member m. Hop 0 is always one of them. What the mask's
  own arrays hide is not known on the host; what a window or chunks beside them hide is.
  """
  everyone = range(sequence.members)
  mask = reach.known(jax.tree.unflatten(structure, range(structure.num_leaves)))
  seen = visible_members(sequence, mask)
  return (0, *(s for s in everyone[1:]
               if any(seen[m, (m - s) % sequence.members] for m in everyone)))


def visible_members(sequence: Sequence, mask: algebra.Mask) -> np.ndarray:
  """Whether a query of a member may see a key of another: bool [members, members] on the host."""
  rows, cols = (np.concatenate([of(m) for m in layouts.numbers(sequence.members)])
                for of in (sequence.rows, sequence.columns))
  runs = sequence.shards * layouts.pieces(sequence.layout)
  kinds = blocks.host_kinds(
      algebra.placed(mask, rows[None], cols[None], sequence.size),
      blocks.Sizes(len(rows), len(cols), len(rows) // runs, len(cols) // runs))
  seen = (kinds != blocks.EMPTY).any((0, 1))
  return seen.reshape(sequence.members, -1, sequence.members, runs // sequence.members).any((1, 3))
