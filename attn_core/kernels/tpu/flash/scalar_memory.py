# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scalar memory of a TPU kernel: what a call puts there, and calls that need more than there is.

The schedule, and numbers of batch rows and heads, are arrays of one axis, which are padded to whole
lanes only. Where the lists of all batch rows take more scalar memory than a chip has, the rows are
computed in groups, one after another, by one kernel.
"""

from typing import Any, Callable, Iterator, TypeVar

import jax
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.contract import RemoteCopy
from attn_core.kernels.tpu.flash import schedule
from attn_core.masks import mask as mask_lib
from attn_core.types import AttentionSpec, BlockSizes, Operands

KIBIBYTE = 2**10
# Of 1 MiB; the rest is for the compiler, which keeps numbers of its own there.
MOST_BYTES = 960 * KIBIBYTE


def needed(operands: Operands, spec: AttentionSpec, tiling: schedule.Tiling, *, by_keys: bool,
           groups: int = 1) -> int:
  """Returns the bytes of scalar memory that a kernel takes.

  Args:
    operands: only shapes and dtypes are used.
    spec: what is computed.
    tiling, by_keys: as in `schedule.build`.
    groups: number of groups of batch rows, of which a kernel computes one.
  """
  batch = operands.query.shape[0]
  rows = lambda leading: batch // groups if leading > 1 else 1
  mask = dense_operands.mask_of(operands, spec)
  batches, heads = schedule.num_lists(mask, tiling)
  steps = schedule.num_steps(mask, tiling, by_keys=by_keys)
  lists = rows(batches) * heads * (1 if by_keys else tiling.halves)
  words = [lists * steps] * tiling.word_sizes(by_keys).words
  words += [rows(x.shape[0]) for x in _per_batch_row(operands, spec, groups)]
  if spec.dropout_prob and operands.dropout_key is not None:
    words.append(rows(operands.dropout_key.shape[0]) * 2)
  if operands.sinks is not None and not by_keys:
    words.append(rows(operands.sinks.shape[0]) * operands.sinks.shape[1])
  words += [rows(x.shape[0]) * x.shape[1] for x in operands.mods if is_per_head(x)]
  return sum(4 * schedule.round_up(n, schedule.LANES) for n in words)


def is_per_head(x: jax.Array) -> bool:
  """Whether an array of a score mod is [B or 1, H or 1] or [B or 1, H or 1, 1, 1]."""
  return x.ndim == 2 or x.ndim == 4 and x.shape[2:] == (1, 1)


def _per_batch_row(operands: Operands, spec: AttentionSpec, groups: int) -> Iterator[Any]:
  """Yields the arrays with a number for each batch row."""
  roles = mask_lib.structure_roles(spec.mask)
  yield from (x for x, role in zip(operands.mask.arrays, roles) if role == mask_lib.BATCH)
  if operands.mask.head_offset is not None:
    yield operands.mask.head_offset
  if operands.mask.batch_index is not None:
    yield operands.mask.batch_index
  elif groups > 1:
    yield operands.query  # `in_groups` numbers the rows


def num_groups(operands: Operands, spec: AttentionSpec, tiling: schedule.Tiling, *,
               by_keys: bool, requested: BlockSizes = BlockSizes()) -> int:
  """Returns the least number of groups of batch rows for which a kernel fits.

  Args:
    operands, spec, tiling, by_keys: as in `needed`.
    requested: the blocks that the caller gave, of which those of `tiling` are made.

  Raises:
    ValueError: the schedule of one batch row needs more than MOST_BYTES.
  """
  size = lambda groups: needed(operands, spec, tiling, by_keys=by_keys, groups=groups)
  batch = operands.query.shape[0]
  for groups in (n for n in range(1, batch + 1) if batch % n == 0):
    if size(groups) <= MOST_BYTES:
      return groups
  raise ValueError(
      f"block_sizes: blocks of {tiling.block_q} queries and {tiling.block_kv} keys make a schedule "
      f"of {size(batch) / KIBIBYTE:.0f} KiB of scalar memory for each batch row"
      f"{' of the backward' if by_keys else ''}; expected at most {MOST_BYTES // KIBIBYTE}: "
      f"{_cure(requested, by_keys)}")


def _cure(requested: BlockSizes, by_keys: bool) -> str:
  """Returns what to give in place of blocks whose schedule is too long."""
  names = [f"{name}_backward" if by_keys else name for name in ("block_q", "block_kv")]
  if given := [name for name in names if getattr(requested, name) is not None]:
    return f"give a larger {' and a larger '.join(given)}, or None"
  # Those chosen are the largest that fit in vector memory.
  return 'give mechanism="blockwise", which has no schedule'


def fits(operands: Operands, spec: AttentionSpec, tiling: schedule.Tiling, *,
         by_keys: bool) -> bool:
  """Says if the schedule of one batch row fits; the arguments are those of `needed`."""
  batch, heads = operands.query.shape[0], operands.query.shape[2] // tiling.query_heads
  if 8 * heads * tiling.query_blocks * tiling.key_blocks <= MOST_BYTES // 2:
    return True  # whatever the mask is
  return needed(operands, spec, tiling, by_keys=by_keys, groups=batch) <= MOST_BYTES


Arrays = TypeVar("Arrays")  # a tree of arrays by batch row
Results = TypeVar("Results")  # a tree of arrays by batch row
# (operands, more arrays, transfer) -> (results, received arrays)
Run = Callable[[Operands, Arrays, RemoteCopy | None], tuple[Results, tuple[jax.Array, ...]]]


def in_groups(run: Run[Arrays, Results], operands: Operands, arrays: Arrays, groups: int,
              transfer: RemoteCopy | None) -> tuple[Results, tuple[jax.Array, ...]]:
  """Computes groups of batch rows one after another.

  Args:
    run: computes a group.
    operands: of all rows.
    arrays: a tree of more arrays [B, ...].
    groups: number of groups; divides B.
    transfer: arrays to copy to another device while the first group is computed; None: none.

  Returns:
    What `run` returns, for all rows.
  """
  if groups == 1:
    return run(operands, arrays, transfer)
  batch = operands.query.shape[0]
  if operands.mask.batch_index is None:
    # Dropout and predicates depend on the number of the row in the whole batch.
    index = jnp.arange(batch, dtype=jnp.int32)
    operands = operands._replace(mask=operands.mask._replace(batch_index=index))
  leaves, structure = jax.tree.flatten((operands, arrays))
  is_split = [x.shape[0] > 1 for x in leaves]  # others are shared by all rows
  split = [x.reshape(groups, -1, *x.shape[1:]) for x, is_row in zip(leaves, is_split) if is_row]

  def one(parts: list[jax.Array], transfer: RemoteCopy | None) -> tuple[Any, tuple]:
    of_group = iter(parts)
    found = [next(of_group) if is_row else x for x, is_row in zip(leaves, is_split)]
    operands, arrays = jax.tree.unflatten(structure, found)
    return run(operands, arrays, transfer)

  received: tuple[jax.Array, ...] = ()
  before: list[Any] = []
  if transfer is not None:
    first, received = one([x[0] for x in split], transfer)
    before, split = [first], [x[1:] for x in split]
  rest = jax.lax.map(lambda parts: one(parts, None)[0], split)
  rest = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rest)
  return jax.tree.map(lambda *x: jnp.concatenate(x), *before, rest), received
