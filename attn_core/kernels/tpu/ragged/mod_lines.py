# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables by distance in the ragged kernel: a line of numbers for each row, which is read in order.

A row of a step is a query and a query head. Its line has the number of each distance between a key
and the first query of the step, moved by the place of its own query: all rows read the same part of
their lines for a block of keys. Beyond the table a line repeats its ends, so that the part may
begin anywhere.
"""

from typing import Callable, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu.ragged.common import Index, KernelRefs, Ref, StepShape, TileIndex
from attn_core.kernels.tpu.ragged.kv_layout import LANES
from attn_core.kernels.tpu.ragged.mod_form import ModArray
from attn_core.score_mods import tables
from attn_core.types import cdiv

MOST_BYTES = 4 * 2**20  # of vector memory, for the lines of all tables


def part_length(block_kv: int) -> int:
  """Returns how many numbers a block of keys reads: whole lanes, with one more to begin in."""
  return (cdiv(block_kv, LANES) + 1) * LANES


def length(sizes: Sequence[int], shape: StepShape) -> int:
  """Returns the length of the lines of tables of these sizes."""
  part = part_length(shape.layout.block_kv)
  return part + cdiv(max(sizes) + shape.block_q, LANES) * LANES + part


def make(of_tables: Sequence[tuple[jax.Array, int]], shape: StepShape,
         rows_of: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
  """Returns the lines, the bits of float32 [tables, head_groups, group_rows, length].

  Args:
    of_tables: (table [1, H or 1, n], distance of its first number).
    shape: static shape of a step.
    rows_of: see `row_mods.RowsOf`; it takes one array for all steps.
  """
  if not of_tables:
    return None
  assert shape.few_rows
  before = part_length(shape.layout.block_kv)
  size = length([x.shape[2] for x, _ in of_tables], shape)
  def line(table: jax.Array) -> jax.Array:
    found = tables.lines(table, shape.block_q, (before, size), rows_of)
    return found.reshape(shape.head_groups, shape.group_rows, size)
  return lax.bitcast_convert_type(jnp.stack([line(x) for x, _ in of_tables]), jnp.int32)


def read(k: KernelRefs, tile: TileIndex, lines: Ref, group: Index, x: ModArray) -> jax.Array:
  """Returns the numbers of a block of keys, the bits of [group_rows, block_kv]."""
  block, before = k.shape.layout.block_kv, part_length(k.shape.layout.block_kv)
  # The number of distance `first` is at place `before` of the line of the first query.
  start = tile.block * block - tile.step.query_begin - x.first + before
  start = jnp.clip(start, 0, before + x.size + k.shape.block_q)
  aligned = pl.multiple_of(lax.div(start, jnp.int32(LANES)) * LANES, LANES)
  found = lines[x.number, group, :, pl.ds(aligned, before)]
  return pltpu.roll(found, lax.rem(before - (start - aligned), jnp.int32(before)), 1)[:, :block]
