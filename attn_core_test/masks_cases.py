# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks as recipes, which are evaluated twice: by the library and in numpy.

A recipe is a nested tuple such as ("and", ("causal",), ("window", 3, 0)). `build` makes its mask
with the library's functions; `seen` computes the visible pairs of queries and keys in numpy, from
the documentation alone.
"""

from typing import Any, NamedTuple

import numpy as np

from attn_core import masks
from attn_core.masks import block_map as block_map_lib, materialize


def rows(text: str) -> np.ndarray:
  """Reads rows of digits: "10 11" is [[True, False], [True, True]]."""
  return np.array([[digit == "1" for digit in row] for row in text.split()])


def dense(mask, shape=(1, 1, 3, 4)) -> np.ndarray:
  """Evaluates a mask by the library: bool [B, H, T, S]."""
  return np.asarray(materialize.to_dense(mask, shape))


def even_sum(batch, head, query, key):
  return (batch + head + query + key) % 2 == 0


def from_table(batch, head, query, key, table):
  return key >= table[head]


class At(NamedTuple):
  """Indices of rows, heads, queries and keys, and positions; they broadcast to [B, H, T, S]."""

  batch: Any
  head: Any
  query: Any
  key: Any
  query_position: Any
  key_position: Any


def seen(recipe, at: At):
  """Evaluates a recipe in numpy, from the documentation alone."""
  name, *rest = recipe
  if name == "full":
    return np.ones((1, 1, 1, 1), bool)
  if name == "causal":
    return at.query_position - at.key_position >= 0
  if name == "window":
    ahead = at.key_position - at.query_position
    least, most = -2**60 if rest[0] is None else -rest[0], 2**60 if rest[1] is None else rest[1]
    return (least <= ahead) & (ahead <= most)
  if name == "chunk":
    return np.floor(at.query_position / rest[0]) == np.floor(at.key_position / rest[0])
  if name == "prefix":
    return at.key_position < rest[0] + 0 * at.query_position
  if name == "prefix_rows":
    return at.key_position < rest[0].reshape(-1, 1, 1, 1)
  if name == "segments":
    query, key = rest[0][:, None, :, None], rest[1][:, None, None, :]
    return np.equal(query, key) & (query > -1) & (key > -1)
  if name == "lengths":
    valid = np.ones((1, 1, 1, 1), bool)
    if rest[0] is not None:
      valid = valid & (at.query < rest[0].reshape(-1, 1, 1, 1))
    if rest[1] is not None:
      valid = valid & (at.key < rest[1].reshape(-1, 1, 1, 1))
    return valid
  if name == "dense":
    return rest[0]
  if name == "custom":
    return np.mod(3 * at.query_position + at.key_position + at.batch + at.head, 5) > 1
  if name == "custom_table":
    return np.logical_or(at.key_position >= rest[0][at.head], at.query_position == at.key_position)
  if name == "positions":
    sub, query, key = rest
    if query is not None:
      at = at._replace(query_position=query.astype(np.int64)[:, None, :, None])
    if key is not None:
      at = at._replace(key_position=key.astype(np.int64)[:, None, None, :])
    return seen(sub, at)
  if name == "placed":
    query, key = rest[1][:, None, :, None], rest[2][:, None, None, :]
    return seen(rest[0], at._replace(query=query, key=key, query_position=query,
                                     key_position=key)) & (query < rest[3][0]) & (
                                         key <= rest[3][1] - 1)
  if name == "offset":
    return seen(rest[0], at._replace(query_position=at.query_position + rest[1]))
  if name == "offset_rows":
    return seen(rest[0], at._replace(
        query_position=at.query_position + rest[1].reshape(-1, 1, 1, 1)))
  if name == "not":
    return np.logical_not(seen(rest[0], at))
  combine = {"and": np.logical_and, "or": np.logical_or}[name]
  return combine(seen(rest[0], at), seen(rest[1], at))


def seen_by_all(recipe, shape) -> np.ndarray:
  """Evaluates a recipe at every row, head, query and key: bool [B, H, T, S]."""
  batch, head, query, key = np.ogrid[tuple(map(slice, shape))]
  return np.broadcast_to(seen(recipe, At(batch, head, query, key, query, key)), shape)


def modulo(batch, head, query, key):
  return (3 * query + key + batch + head) % 5 > 1


def _table(batch, head, query, key, table):
  return (key >= table[head]) | (query == key)


def build(recipe) -> masks.Mask:
  """Makes the mask of a recipe with the library's functions."""
  name, *rest = recipe
  rest = [build(x) if isinstance(x, tuple) else x for x in rest]
  if name == "positions":
    return masks.positions(rest[1], rest[2], rest[0])
  if name in ("and", "or", "not"):
    return {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "not": lambda a: ~a}[name](*rest)
  return {
      "custom": lambda: masks.custom(modulo),
      "custom_table": lambda table: masks.custom(_table, table),
      "prefix_rows": masks.prefix, "offset_rows": masks.offset,
  }.get(name, getattr(masks, name, None))(*rest)


STATIC_LEAVES = ("full", "causal", "window", "chunk", "prefix", "custom")
ARRAY_LEAVES = ("prefix_rows", "segments", "lengths", "dense", "custom_table")
MOVES = ("positions", "placed", "offset", "offset_rows")


class Draw:
  """Draws recipes: `choices` decides all that is static, `numbers` the contents of the arrays."""

  def __init__(self, choices, numbers, shape):
    self.choices, self.numbers, self.shape = choices, numbers, shape

  def one_or(self, n: int) -> int:
    return int(self.choices.choice([1, n]))

  def recipe(self, depth: int, arrays: bool):
    kind = self.choices.integers(0, 6) if depth else 5
    if kind == 0:
      return "not", self.recipe(depth - 1, arrays)
    if kind < 4:
      name = "and" if kind == 1 else self.choices.choice(["and", "or"])
      return str(name), self.recipe(depth - 1, arrays), self.recipe(depth - 1, arrays)
    if kind == 4:
      move = str(self.choices.choice(MOVES)) if arrays else "offset"
      return move, self.recipe(depth - 1, arrays), *getattr(self, move)()
    leaf = str(self.choices.choice(ARRAY_LEAVES * 2 + STATIC_LEAVES if arrays else STATIC_LEAVES))
    return leaf, *getattr(self, leaf, tuple)()

  def window(self):
    left, right = (None if x < 0 else int(x) for x in self.choices.integers(-1, 12, 2))
    if self.choices.random() < 0.2 and left is not None:
      left, right = -int(self.choices.integers(0, 3)), left
    return left, right

  def chunk(self):
    return (int(self.choices.integers(1, 17)),)

  def prefix(self):
    return (int(self.choices.integers(0, self.shape[3] + 3)),)

  def offset(self):
    return (int(self.choices.integers(-8, 25)),)

  def offset_rows(self):
    return (self.numbers.integers(-8, 25, self.one_or(self.shape[0])),)

  def prefix_rows(self):
    return (self.numbers.integers(0, self.shape[3] + 3, self.one_or(self.shape[0])),)

  def segments(self):
    batch, _, queries, keys = self.shape
    lowest, highest = int(self.choices.choice([-1, 0])), int(self.choices.choice([1, 2, 6]))
    ids = [self.numbers.integers(lowest, highest, (self.one_or(batch), n)) for n in (queries, keys)]
    if self.choices.random() < 0.6:
      ids = [np.sort(x, axis=1) for x in ids]
      if self.choices.random() < 0.5:  # padding at the end instead of the beginning
        ids = [np.where(x == x.max(1, keepdims=True), -1, x) for x in ids]
    return tuple(ids)

  def lengths(self):
    batch, _, queries, keys = self.shape
    both = [self.numbers.integers(0, n + 2, self.one_or(batch)) for n in (queries, keys)]
    which = self.choices.integers(0, 3)
    return tuple(None if which == i else x for i, x in enumerate(both))

  def dense(self):
    shape = [self.one_or(n) for n in self.shape]
    array = self.numbers.random(shape) < self.choices.choice([0.1, 0.5, 0.9])
    if self.choices.random() < 0.5:  # large areas of one value
      array = np.maximum.accumulate(array, axis=3) & (np.arange(shape[2]) % 7 > 2)[:, None]
    return (array,)

  def custom_table(self):
    return (self.numbers.integers(0, self.shape[3] + 1, self.shape[1]),)

  def placed(self):
    batch, _, queries, keys = self.shape
    found = [self.numbers.integers(0, 2 * n, (self.one_or(batch), n)) for n in (queries, keys)]
    if self.choices.random() < 0.7:
      found = [np.sort(x, axis=1) for x in found]
    return *found, [int(self.choices.integers(1, 2 * n + 2)) for n in (queries, keys)]

  def positions(self):
    batch, _, queries, keys = self.shape
    found = []
    for n in (queries, keys):
      kind, size = self.choices.integers(0, 4), (self.one_or(batch), n)
      if kind == 0:
        found.append(None)
      elif kind == 1:
        found.append(self.numbers.integers(-5, n + 5, size))
      elif kind == 2:
        found.append(np.sort(self.numbers.integers(0, 2 * n, size), axis=1))
      else:  # the striped token order over 3 devices
        found.append(np.broadcast_to(np.argsort(np.arange(n) % 3, kind="stable"), size).copy())
    return tuple(found)


def draw_sizes(generator):
  """Draws (B, H, T, S) and block sizes, which need not divide the lengths."""
  shape = (*map(int, generator.integers(1, 4, 2)), *map(int, generator.integers(1, 41, 2)))
  return shape, block_map_lib.Sizes(shape[2], shape[3], *(
      int(generator.integers(max(1, n // 7), n + 4)) for n in shape[2:]))
