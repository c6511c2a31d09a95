# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The leaves of masks: causal, window, chunk, prefix, segments, lengths, dense, custom, selected.

`Positions`, `Offset` and `Placed` wrap a mask and change the coordinates at which it is evaluated.
Each class implements `Mask.visible` and `Mask.bounds`; `constructors` checks arguments and makes
them.
"""

import functools
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import intervals
from attn_core.masks.mask import (BATCH, DENSE, KEY, QUERY, WHOLE, Array, Booleans, Bounds,
                                  Coordinates, Grid, Integers, Interval, Mask, NumpyModule)
from attn_core.masks.values import value_dataclass

_INT32 = np.iinfo(np.int32)


@value_dataclass
class Causal(Mask):
  """key position <= query position."""

  def visible(self, at: Coordinates) -> Booleans:
    return at.key_position <= at.query_position

  def bounds(self, grid: Grid) -> Bounds:
    query, key = grid.query_position, grid.key_position
    return key.low <= query.high, key.high <= query.low


@value_dataclass
class Window(Mask):
  """-left <= key position - query position <= right; None: unbounded."""

  left: int | None
  right: int | None

  def visible(self, at: Coordinates) -> Booleans:
    query, key, xp = at.query_position, at.key_position, _module(at.query_position)
    # Padding tokens may have positions at the ends of int32, where differences overflow.
    if at.given_positions or any(side is not None and abs(side) >= 2**30
                                 for side in (self.left, self.right)):
      visible: Booleans = np.True_
      if self.left is not None:
        visible = visible & _within_left(query, key, self.left, xp)
      return visible if self.right is None else visible & _within_right(query, key, self.right, xp)
    # With a bound on both sides, a difference that wraps around lands beyond the other side and
    # stays hidden; with one open side it would land inside, so the bound is added instead.
    if self.left is None and self.right is None:
      return np.True_
    if self.left is None:
      return key <= query + self.right
    if self.right is None:
      return key >= query - self.left
    distance = key - query
    return (distance >= -self.left) & (distance <= self.right)

  def bounds(self, grid: Grid) -> Bounds:
    query, key, xp = grid.query_position, grid.key_position, grid.xp
    possible = certain = xp.ones((1, 1, 1, 1), bool)
    if self.left is not None:
      possible = possible & _within_left(query.low, key.high, self.left, xp)
      certain = certain & _within_left(query.high, key.low, self.left, xp)
    if self.right is not None:
      possible = possible & _within_right(query.high, key.low, self.right, xp)
      certain = certain & _within_right(query.low, key.high, self.right, xp)
    return possible, certain


@value_dataclass
class Chunk(Mask):
  """Query and key positions fall into the same chunk of `size` positions."""

  size: int

  def visible(self, at: Coordinates) -> Booleans:
    return (_floor_divide(at.query_position, self.size)
            == _floor_divide(at.key_position, self.size))

  def bounds(self, grid: Grid) -> Bounds:
    query = Interval(*(x // self.size for x in grid.query_position))
    key = Interval(*(x // self.size for x in grid.key_position))
    return _overlap(query, key), _single_equal(query, key)


@value_dataclass
class Prefix(Mask):
  """key position < length: the keys of a prefix are visible to all queries."""

  length: int | None
  lengths: Array | None
  roles = {"lengths": BATCH}

  def visible(self, at: Coordinates) -> Booleans:
    return at.key_position < (self.length if self.lengths is None else self.lengths)

  def bounds(self, grid: Grid) -> Bounds:
    length: Integers = self.length if self.lengths is None else _per_row(self.lengths)
    return grid.key_position.low < length, grid.key_position.high < length


@value_dataclass
class Segments(Mask):
  """Equal ids are visible to each other; negative ids are padding and hidden."""

  query_ids: Array
  key_ids: Array
  roles = {"query_ids": QUERY, "key_ids": KEY}

  def visible(self, at: Coordinates) -> Booleans:
    # Padding gets ids that differ, by operations on rows and columns: one comparison a pair.
    query_ids = _module(self.query_ids).where(self.query_ids < 0, _INT32.min, self.query_ids)
    return query_ids == _module(self.key_ids).maximum(self.key_ids, -1)

  def bounds(self, grid: Grid) -> Bounds:
    query, key = grid.reduce_query(self.query_ids), grid.reduce_key(self.key_ids)
    certain = _single_equal(query, key) & (query.low >= 0)
    # Padding must not widen the interval of the visible ids.
    without_padding = lambda ids: grid.xp.where(ids < 0, _INT32.max, ids)
    query = query._replace(low=grid.reduce_query(without_padding(self.query_ids)).low)
    key = key._replace(low=grid.reduce_key(without_padding(self.key_ids)).low)
    return _overlap(query, key), certain


@value_dataclass
class Lengths(Mask):
  """query index < query length and key index < key length; None: unbounded."""

  query_lengths: Array | None
  key_lengths: Array | None
  roles = {"query_lengths": BATCH, "key_lengths": BATCH}

  def visible(self, at: Coordinates) -> Booleans:
    inside: Booleans = np.True_
    if self.query_lengths is not None:
      inside = inside & (at.query_index < self.query_lengths)
    if self.key_lengths is not None:
      inside = inside & (at.key_index < self.key_lengths)
    return inside

  def bounds(self, grid: Grid) -> Bounds:
    possible = certain = grid.xp.ones((1, 1, 1, 1), bool)
    for lengths, index in ((self.query_lengths, grid.query_index),
                           (self.key_lengths, grid.key_index)):
      if lengths is not None:
        length = _per_row(lengths)
        possible, certain = possible & (index.low < length), certain & (index.high < length)
    return possible, certain


@value_dataclass
class Dense(Mask):
  """A boolean array [B or 1, H or 1, T or 1, S or 1]."""

  array: Array
  roles = {"array": DENSE}

  def visible(self, at: Coordinates) -> Booleans:
    return self.array

  def bounds(self, grid: Grid) -> Bounds:
    return grid.reduce_dense(self.array)


@value_dataclass
class Custom(Mask):
  """predicate(batch, head, query position, key position, *operands), elementwise."""

  predicate: Callable[..., bool | Booleans]
  operands: tuple[Array, ...]
  roles = {"operands": WHOLE}

  def visible(self, at: Coordinates) -> Booleans:
    arguments = at.batch, at.head, at.query_position, at.key_position
    visible = self.predicate(*arguments, *self.operands)
    visible = np.bool_(visible) if isinstance(visible, bool) else visible
    # `~` of any other dtype would give a wrong result.
    if getattr(visible, "dtype", None) != bool:
      raise ValueError(f"custom: {self.predicate} returned "
                       f"{getattr(visible, 'dtype', type(visible).__name__)}; expected bool")
    shape = jnp.broadcast_shapes(*map(jnp.shape, arguments))
    try:
      fits = jnp.broadcast_shapes(visible.shape, shape) == shape
    except ValueError:
      fits = False
    if not fits:
      raise ValueError(f"custom: {self.predicate} returned bool{list(visible.shape)}; expected one "
                       f"number for each of its arguments together, {list(shape)}: a predicate is "
                       "elementwise")
    return visible

  def bounds(self, grid: Grid) -> Bounds:
    return intervals.bounds(self.predicate, grid, self.operands, ())


@value_dataclass
class Selected(Mask):
  """The key blocks that a list for each query block names; -1 names none."""

  indices: Array  # int32 [B or 1, heads or 1, num_query_blocks, k]
  block_q: int
  block_kv: int
  group: int  # query heads per head of `indices`
  roles = {"indices": WHOLE}

  def visible(self, at: Coordinates) -> Booleans:
    listed = self.blocks_of(at.batch, at.head, at.query_index)
    key = at.key_index // self.block_kv
    if not any(isinstance(x, jax.Array) for x in (listed, key)):
      return functools.reduce(np.logical_or, (listed[..., n] == key for n in range(
          listed.shape[-1])), np.zeros(np.broadcast_shapes(listed.shape[:-1], np.shape(key)), bool))
    return (listed == key[..., None]).any(-1)

  def blocks_of(self, batch: Integers, head: Integers, query_index: Integers) -> Array:
    """The lists [..., k] of queries, by global numbers of rows and of query heads."""
    rows, heads, blocks, _ = self.indices.shape
    number = query_index // self.block_q
    number = _module(number).minimum(number, blocks - 1)  # queries of padding
    xp = jnp if any(isinstance(x, jax.Array) for x in (batch, head, number)) else np
    return xp.asarray(self.indices)[batch if rows > 1 else 0,
                                    head // self.group if heads > 1 else 0, number]

  def bounds(self, grid: Grid) -> Bounds:
    everything = grid.xp.ones((1, 1, 1, 1), bool)
    possible = everything if grid.reduce_selected is None else grid.reduce_selected(
        self.indices, self.block_q, self.block_kv)
    return possible, ~everything


@value_dataclass
class Positions(Mask):
  """`mask`, evaluated at the given positions instead of row and column numbers."""

  mask: Mask
  query: Array | None
  key: Array | None
  roles = {"mask": None, "query": QUERY, "key": KEY}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates at which `mask` is evaluated."""
    if self.query is not None:
      at = at._replace(query_position=self.query, given_positions=True)
    return at if self.key is None else at._replace(key_position=self.key)

  def visible(self, at: Coordinates) -> Booleans:
    return self.mask.visible(self.move(at))

  def bounds(self, grid: Grid) -> Bounds:
    if self.query is not None:
      grid = grid._replace(query_position=grid.reduce_query(self.query))
    if self.key is not None:
      grid = grid._replace(key_position=grid.reduce_key(self.key))
    return self.mask.bounds(grid)


@value_dataclass
class Offset(Mask):
  """`mask`, with `amount` (static) or `amounts` (per batch row) added to query positions."""

  mask: Mask
  amount: int | None
  amounts: Array | None
  roles = {"mask": None, "amounts": BATCH}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates at which `mask` is evaluated."""
    amount: Integers = self.amount if self.amounts is None else self.amounts
    query = at.query_position
    return at._replace(query_position=_saturating_add(query, amount, _module(query))
                       if at.given_positions else query + amount)

  def visible(self, at: Coordinates) -> Booleans:
    return self.mask.visible(self.move(at))

  def bounds(self, grid: Grid) -> Bounds:
    amount = self.amount if self.amounts is None else _per_row(self.amounts)
    position = Interval(*(_saturating_add(x, amount, grid.xp) for x in grid.query_position))
    return self.mask.bounds(grid._replace(query_position=position))


@value_dataclass
class Placed(Mask):
  """`mask` of a longer sequence, at some of its rows and columns, in any order.

  Unlike `Positions` it also changes the index. Rows and columns from `size` on are padding:
  hidden from all queries and keys.
  """

  mask: Mask
  size: tuple[int, int]
  query: Array
  key: Array
  roles = {"mask": None, "query": QUERY, "key": KEY}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates at which `mask` is evaluated."""
    return at._replace(query_index=self.query, query_position=self.query,
                       key_index=self.key, key_position=self.key)

  def visible(self, at: Coordinates) -> Booleans:
    queries, keys = self.size
    return self.mask.visible(self.move(at)) & (self.query < queries) & (self.key < keys)

  def bounds(self, grid: Grid) -> Bounds:
    query, key = grid.reduce_query(self.query), grid.reduce_key(self.key)
    possible, certain = self.mask.bounds(grid._replace(
        reduce_selected=None, query_index=query, query_position=query, key_index=key,
        key_position=key))
    queries, keys = self.size
    return (possible & (query.low < queries) & (key.low < keys),
            certain & (query.high < queries) & (key.high < keys))


@value_dataclass
class PlacedRuns(Placed):
  """`Placed` at runs of rows and of columns, whose first ones may be traced.

  Runs of rows have equal lengths, and so have those of columns; neighbors are `stride` apart.
  """

  runs: tuple[int, int]  # of the rows, and of the columns
  stride: int


def _per_row(x: Array) -> Integers:
  """[B or 1] -> [B or 1, 1, 1, 1]."""
  return x.reshape(-1, 1, 1, 1)


def _floor_divide(position: Integers, size: int) -> Integers:
  """position // size; for traced numbers without integer division or floor (kernels lack them)."""
  if not isinstance(position, jax.Array):
    return position // size
  if size & (size - 1) == 0:
    return position >> (size.bit_length() - 1)
  quotient: Integers = 0
  for _ in range(2):  # the second round corrects the rounding of float32
    rest = (position - quotient * size).astype(np.float32)
    quotient = quotient + (rest * np.float32(1 / size)).astype(np.int32)  # towards zero
  rest = position - quotient * size
  return quotient + (rest >= size).astype(np.int32) - (rest < 0).astype(np.int32)


def _module(position: Integers) -> NumpyModule:
  """jax.numpy for jax arrays, else numpy."""
  return jnp if isinstance(position, jax.Array) else np


def _saturating_add(position: Integers, amount: Integers, xp: NumpyModule) -> Integers:
  """position + amount (tokens), clipped to the range of int32 instead of wrapping around."""
  if not isinstance(amount, int):
    low, high = _INT32.min - xp.minimum(amount, 0), _INT32.max - xp.maximum(amount, 0)
    return xp.minimum(xp.maximum(position, low), high) + amount
  if not amount:
    return position
  return amount + (xp.maximum(position, _INT32.min - amount) if amount < 0 else
                   xp.minimum(position, _INT32.max - amount))


def _within_left(query: Integers, key: Integers, left: int, xp: NumpyModule) -> Booleans:
  """key - query >= -left for any int32, computed in int32."""
  if left >= 0:
    return key >= _saturating_add(query, -left, xp)
  return key > _saturating_add(query, -left - 1, xp)


def _within_right(query: Integers, key: Integers, right: int, xp: NumpyModule) -> Booleans:
  """key - query <= right for any int32, computed in int32."""
  if right >= 0:
    return key <= _saturating_add(query, right, xp)
  return key < _saturating_add(query, right + 1, xp)


def _overlap(a: Interval, b: Interval) -> Array:
  return (a.low <= b.high) & (b.low <= a.high)


def _single_equal(a: Interval, b: Interval) -> Array:
  """Whether both intervals hold one value, the same."""
  return (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
