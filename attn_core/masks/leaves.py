"""Masks as values: which keys a query sees.

A mask is a small tree of leaves combined with `&`, `|` and `~`. True means
visible. A mask is a pytree: its structure (kinds of leaves, static numbers,
predicates) is hashable and compared by value, so an equal mask never retraces;
its arrays (segment ids, lengths, positions, dense arrays) are ordinary operands.

Every leaf answers two questions, and nothing else in the library knows the
leaves apart:

* `visible(at)`: elementwise, for the coordinates of a tile; the leaf's own
  arrays have been cut to the tile by their role (see `cut` and `expand`).
* `bounds(grid)`: for every (query block, key block), whether some pair may be
  visible and whether all pairs certainly are. Conservative: `possible` is never
  False and `certain` never True by mistake.

Letters: B batch, H query heads, T query length, S key length.
"""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# How an array of a mask is laid out, and so how it is cut, padded and sharded.
QUERY = "query"  # [B or 1, T]: one number per query row
KEY = "key"  # [B or 1, S]: one number per key column
BATCH = "batch"  # [B or 1]: one number per batch row
DENSE = "dense"  # [B or 1, H or 1, T or 1, S or 1]
WHOLE = "whole"  # passed as it is to a custom predicate


def nodes(mask: "Mask"):
  """All masks that a mask is made of, itself first."""
  yield mask
  for name, role in mask.roles.items():
    if role is None:
      yield from nodes(getattr(mask, name))


class Coordinates(NamedTuple):
  """Where the elements of a tile are: integers that broadcast to the tile's shape.

  An index counts rows and columns of the arrays; a position is what causal,
  window, chunk and prefix compare, equal to the index unless the mask says
  otherwise (`offset`, `positions`). Batch and head are global numbers.
  """

  batch: Any
  head: Any
  query_index: Any
  key_index: Any
  query_position: Any
  key_position: Any
  far: bool = False  # whether query positions may stand at the ends of int32, as given ones may


class Interval(NamedTuple):
  """Smallest and largest value in every block (both inclusive)."""

  low: Any
  high: Any


class Grid(NamedTuple):
  """What `bounds` may ask about the blocks.

  Intervals of queries broadcast as [B or 1, 1, nq, 1], those of keys as
  [B or 1, 1, 1, nk].
  """

  xp: Any  # numpy on the host, jax.numpy inside jit
  reduce_query: Callable  # [B or 1, T] -> Interval
  reduce_key: Callable
  reduce_dense: Callable  # [B or 1, H or 1, T or 1, S or 1] -> (any, all) per block
  query_index: Interval
  key_index: Interval
  query_position: Interval
  key_position: Interval


class Mask:
  """Base of all mask values; made by the functions of this module."""

  roles = {}  # array field -> its role, in field order

  def visible(self, at: Coordinates):
    """Whether the query sees the key, elementwise; bool, broadcastable to the tile."""
    raise NotImplementedError

  def bounds(self, grid: Grid):
    """(possible, certain): bool, broadcastable to [B or 1, H or 1, nq, nk]."""
    raise NotImplementedError

  def __and__(self, other):
    if not isinstance(other, Mask):
      return NotImplemented
    if isinstance(self, Full):
      return other
    return self if isinstance(other, Full) else And(self, other)

  def __or__(self, other):
    return Or(self, other) if isinstance(other, Mask) else NotImplemented

  def __invert__(self):
    return Not(self)

  def __bool__(self):
    raise ValueError("a mask is neither true nor false: got one where a truth value is needed; "
                     "expected `&`, `|` and `~` between masks, where `and`, `or` and `not` would "
                     "drop one of them, or `mask is None`")

  def __eq__(self, other):
    if not isinstance(other, Mask):
      return NotImplemented
    (mine, structure), (theirs, other_structure) = map(jax.tree.flatten, (self, other))
    return structure == other_structure and all(map(_same_array, mine, theirs))

  def __hash__(self):
    return hash(jax.tree.structure(self))


def _same_array(a, b) -> bool:
  if a is b:
    return True
  if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
    return False  # values unknown while tracing
  return np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))


def _node(cls):
  """Makes `cls` a frozen dataclass and a pytree; masks and fields with a role are data."""
  cls = dataclasses.dataclass(frozen=True, eq=False, repr=True)(cls)
  names = [field.name for field in dataclasses.fields(cls)]
  data = [name for name in names if name in cls.roles]
  static = [name for name in names if name not in cls.roles]

  def flatten(mask):
    # The class is part of the static data: jax holds the structures of two classes for equal when
    # their data are, and would run what was compiled for the one with the other.
    return ([(jax.tree_util.GetAttrKey(name), getattr(mask, name)) for name in data],
            (cls, *(getattr(mask, name) for name in static)))

  def unflatten(auxiliary, children):
    return cls(**dict(zip(static, auxiliary[1:])), **dict(zip(data, children)))

  jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
  return cls


@_node
class Full(Mask):
  """Every key is visible."""

  def visible(self, at):
    return np.True_

  def bounds(self, grid):
    everything = grid.xp.ones((1, 1, 1, 1), bool)
    return everything, everything


@_node
class Causal(Mask):
  """key position <= query position."""

  def visible(self, at):
    return at.key_position <= at.query_position

  def bounds(self, grid):
    query, key = grid.query_position, grid.key_position
    return key.low <= query.high, key.high <= query.low


@_node
class Window(Mask):
  """-left <= key position - query position <= right; None: unbounded."""

  left: int | None
  right: int | None

  def visible(self, at):
    query, key, xp = at.query_position, at.key_position, _module(at.query_position)
    # Tokens that are padding may stand at the ends of int32.
    if at.far or any(side is not None and abs(side) >= 2**30 for side in (self.left, self.right)):
      seen = np.True_
      if self.left is not None:
        seen = seen & _reaches_left(query, key, self.left, xp)
      return seen if self.right is None else seen & _reaches_right(query, key, self.right, xp)
    # A key's distance wraps around there: beyond the other side of a window, but into it where that
    # side is open.
    if self.left is None and self.right is None:
      return np.True_
    if self.left is None:
      return key <= query + self.right
    if self.right is None:
      return key >= query - self.left
    distance = key - query
    return (distance >= -self.left) & (distance <= self.right)

  def bounds(self, grid):
    query, key, xp = grid.query_position, grid.key_position, grid.xp
    possible = certain = xp.ones((1, 1, 1, 1), bool)
    if self.left is not None:
      possible = possible & _reaches_left(query.low, key.high, self.left, xp)
      certain = certain & _reaches_left(query.high, key.low, self.left, xp)
    if self.right is not None:
      possible = possible & _reaches_right(query.high, key.low, self.right, xp)
      certain = certain & _reaches_right(query.low, key.high, self.right, xp)
    return possible, certain


@_node
class Chunk(Mask):
  """Query and key positions fall into the same chunk of `size` positions."""

  size: int

  def visible(self, at):
    return _chunk(at.query_position, self.size) == _chunk(at.key_position, self.size)

  def bounds(self, grid):
    query = Interval(*(x // self.size for x in grid.query_position))
    key = Interval(*(x // self.size for x in grid.key_position))
    return _overlap(query, key), _single_equal(query, key)


@_node
class Prefix(Mask):
  """key position < length: the keys of a prefix are visible to every query."""

  length: int | None
  lengths: Any
  roles = {"lengths": BATCH}

  def visible(self, at):
    return at.key_position < (self.length if self.lengths is None else self.lengths)

  def bounds(self, grid):
    length = self.length if self.lengths is None else _per_row(self.lengths)
    return grid.key_position.low < length, grid.key_position.high < length


@_node
class Segments(Mask):
  """Equal ids see each other; negative ids are padding and see nothing."""

  query_ids: Any
  key_ids: Any
  roles = {"query_ids": QUERY, "key_ids": KEY}

  def visible(self, at):
    return (self.query_ids == self.key_ids) & (self.query_ids >= 0)

  def bounds(self, grid):
    query, key = grid.reduce_query(self.query_ids), grid.reduce_key(self.key_ids)
    certain = _single_equal(query, key) & (query.low >= 0)
    # Padding must not widen the interval of the ids that can be seen.
    seen = lambda ids: grid.xp.where(ids < 0, _ENDS.max, ids)
    query = query._replace(low=grid.reduce_query(seen(self.query_ids)).low)
    key = key._replace(low=grid.reduce_key(seen(self.key_ids)).low)
    return _overlap(query, key), certain


@_node
class Lengths(Mask):
  """query index < query length and key index < key length; None: no bound."""

  query_lengths: Any
  key_lengths: Any
  roles = {"query_lengths": BATCH, "key_lengths": BATCH}

  def visible(self, at):
    inside = np.True_
    if self.query_lengths is not None:
      inside = inside & (at.query_index < self.query_lengths)
    if self.key_lengths is not None:
      inside = inside & (at.key_index < self.key_lengths)
    return inside

  def bounds(self, grid):
    possible = certain = grid.xp.ones((1, 1, 1, 1), bool)
    for lengths, index in ((self.query_lengths, grid.query_index),
                           (self.key_lengths, grid.key_index)):
      if lengths is not None:
        length = _per_row(lengths)
        possible, certain = possible & (index.low < length), certain & (index.high < length)
    return possible, certain


@_node
class Dense(Mask):
  """A boolean array [B or 1, H or 1, T or 1, S or 1]."""

  array: Any
  roles = {"array": DENSE}

  def visible(self, at):
    return self.array

  def bounds(self, grid):
    return grid.reduce_dense(self.array)


@_node
class Custom(Mask):
  """predicate(batch, head, query position, key position, *operands), elementwise."""

  predicate: Callable
  operands: tuple
  roles = {"operands": WHOLE}

  def visible(self, at):
    seen = self.predicate(at.batch, at.head, at.query_position, at.key_position, *self.operands)
    seen = np.bool_(seen) if isinstance(seen, bool) else seen
    # Anything else would come out wrong of `~`.
    if getattr(seen, "dtype", None) != bool:
      raise ValueError(f"custom: {self.predicate} returned "
                       f"{getattr(seen, 'dtype', type(seen).__name__)}; expected bool")
    return seen

  def bounds(self, grid):
    everything = grid.xp.ones((1, 1, 1, 1), bool)
    return everything, ~everything


@_node
class Positions(Mask):
  """`mask`, evaluated at the given positions instead of row and column numbers."""

  mask: Mask
  query: Any
  key: Any
  roles = {"mask": None, "query": QUERY, "key": KEY}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates under which `mask` is evaluated."""
    if self.query is not None:
      at = at._replace(query_position=self.query, far=True)
    return at if self.key is None else at._replace(key_position=self.key)

  def visible(self, at):
    return self.mask.visible(self.move(at))

  def bounds(self, grid):
    if self.query is not None:
      grid = grid._replace(query_position=grid.reduce_query(self.query))
    if self.key is not None:
      grid = grid._replace(key_position=grid.reduce_key(self.key))
    return self.mask.bounds(grid)


@_node
class Offset(Mask):
  """`mask`, with `amount` (static) or `amounts` (per batch row) added to query positions."""

  mask: Mask
  amount: int | None
  amounts: Any
  roles = {"mask": None, "amounts": BATCH}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates under which `mask` is evaluated."""
    amount = self.amount if self.amounts is None else self.amounts
    query = at.query_position
    return at._replace(query_position=_moved(query, amount, _module(query)) if at.far
                       else query + amount)

  def visible(self, at):
    return self.mask.visible(self.move(at))

  def bounds(self, grid):
    amount = self.amount if self.amounts is None else _per_row(self.amounts)
    moved = Interval(*(_moved(x, amount, grid.xp) for x in grid.query_position))
    return self.mask.bounds(grid._replace(query_position=moved))


@_node
class Placed(Mask):
  """`mask` of a longer sequence, at some of its rows and columns, in any order.

  Unlike `Positions` it moves the index too; rows and columns from `size` on are padding: they see
  nothing, and nobody sees them.
  """

  mask: Mask
  size: tuple[int, int]
  query: Any
  key: Any
  roles = {"mask": None, "query": QUERY, "key": KEY}

  def move(self, at: Coordinates) -> Coordinates:
    """The coordinates under which `mask` is evaluated."""
    return at._replace(query_index=self.query, query_position=self.query,
                       key_index=self.key, key_position=self.key)

  def visible(self, at):
    queries, keys = self.size
    return self.mask.visible(self.move(at)) & (self.query < queries) & (self.key < keys)

  def bounds(self, grid):
    query, key = grid.reduce_query(self.query), grid.reduce_key(self.key)
    possible, certain = self.mask.bounds(grid._replace(
        query_index=query, query_position=query, key_index=key, key_position=key))
    queries, keys = self.size
    return (possible & (query.low < queries) & (key.low < keys),
            certain & (query.high < queries) & (key.high < keys))


@_node
class And(Mask):
  """Visible in both."""

  left: Mask
  right: Mask
  roles = {"left": None, "right": None}

  def visible(self, at):
    return self.left.visible(at) & self.right.visible(at)

  def bounds(self, grid):
    (possible, certain), (other_possible, other_certain) = (
        self.left.bounds(grid), self.right.bounds(grid))
    return possible & other_possible, certain & other_certain


@_node
class Or(Mask):
  """Visible in one or both."""

  left: Mask
  right: Mask
  roles = {"left": None, "right": None}

  def visible(self, at):
    return self.left.visible(at) | self.right.visible(at)

  def bounds(self, grid):
    (possible, certain), (other_possible, other_certain) = (
        self.left.bounds(grid), self.right.bounds(grid))
    return possible | other_possible, certain | other_certain


@_node
class Not(Mask):
  """Visible where `mask` is not."""

  mask: Mask
  roles = {"mask": None}

  def visible(self, at):
    return ~self.mask.visible(at)

  def bounds(self, grid):
    possible, certain = self.mask.bounds(grid)
    return ~certain, ~possible


_ENDS = np.iinfo(np.int32)


def _per_row(x):
  """[B or 1] -> [B or 1, 1, 1, 1]."""
  return x.reshape(-1, 1, 1, 1)


def _chunk(position, size: int):
  """position // size; of traced numbers without a division or floor, which some kernels lack."""
  if not isinstance(position, jax.Array):
    return position // size
  if size & (size - 1) == 0:
    return position >> (size.bit_length() - 1)
  quotient = 0
  for _ in range(2):  # the second round divides what float32 rounded off
    rest = (position - quotient * size).astype(np.float32)
    quotient = quotient + (rest * np.float32(1 / size)).astype(np.int32)  # towards zero
  rest = position - quotient * size
  return quotient + (rest >= size).astype(np.int32) - (rest < 0).astype(np.int32)


def _module(position):
  """The module that computes with positions: jax.numpy of arrays of jax, else numpy."""
  return jnp if isinstance(position, jax.Array) else np


def _moved(position, amount, xp):
  """position + amount (tokens), at the ends of int32 where that is past them."""
  if not isinstance(amount, int):
    low, high = _ENDS.min - xp.minimum(amount, 0), _ENDS.max - xp.maximum(amount, 0)
    return xp.minimum(xp.maximum(position, low), high) + amount
  if not amount:
    return position
  return amount + (xp.maximum(position, _ENDS.min - amount) if amount < 0 else
                   xp.minimum(position, _ENDS.max - amount))


def _reaches_left(query, key, left: int, xp):
  """key - query >= -left of any int32, in int32."""
  if left >= 0:
    return key >= _moved(query, -left, xp)
  return key > _moved(query, -left - 1, xp)


def _reaches_right(query, key, right: int, xp):
  """key - query <= right of any int32, in int32."""
  if right >= 0:
    return key <= _moved(query, right, xp)
  return key < _moved(query, right + 1, xp)


def _overlap(a: Interval, b: Interval):
  return (a.low <= b.high) & (b.low <= a.high)


def _single_equal(a: Interval, b: Interval):
  return (a.low == a.high) & (b.low == b.high) & (a.low == b.low)


# --- The functions that make masks. --------------------------------------------------------------


def full() -> Mask:
  """Every query sees every key; the neutral element of `&`."""
  return Full()


def causal() -> Mask:
  """key position <= query position."""
  return Causal()


def window(left: int | None, right: int | None) -> Mask:
  """-left <= key position - query position <= right, both inclusive.

  Args:
    left: tokens before the query; None: unbounded. "W tokens, itself included" is (W - 1, 0).
    right: tokens after it; None: unbounded. A negative side leaves out the query itself and more:
      window(-1, 2) are the two tokens after it. Unlike `sliding_window`, -1 is not unbounded.

  Raises:
    ValueError: a side is neither an int (int32) nor None.
  """
  for name, value in (("left", left), ("right", right)):
    if value is not None and not _is_int(value):
      raise ValueError(f"window: {name}={value!r}; expected an int (tokens) or None for unbounded")
  return Window(*(None if side is None else int(side) for side in (left, right)))


def chunk(size: int) -> Mask:
  """Queries and keys of the same chunk of `size` positions see each other.

  Raises:
    ValueError: `size` is no static int >= 1 (tokens).
  """
  if not _is_int(size) or size < 1:
    raise ValueError(f"chunk: size={size!r}; expected an int >= 1 (tokens)")
  return Chunk(int(size))


def prefix(length) -> Mask:
  """Keys at positions below `length` (int, or int32 [B or 1]) are visible to every query.

  Raises:
    ValueError: `length` is something else.
  """
  return Prefix(*_static_or_array("prefix", "length", length))


def segments(query_ids, key_ids=None) -> Mask:
  """Equal ids see each other; negative ids are padding.

  Args:
    query_ids: int32 [B or 1, T].
    key_ids: int32 [B or 1, S]; None: `query_ids`.

  Raises:
    ValueError: ids of another rank or dtype.
  """
  key_ids = query_ids if key_ids is None else key_ids
  return Segments(_integers("segments", "query_ids", query_ids, 2),
                  _integers("segments", "key_ids", key_ids, 2))


def lengths(query_lengths=None, key_lengths=None) -> Mask:
  """Rows and columns below the lengths (int32 [B or 1], tokens) are valid; None: no bound.

  Raises:
    ValueError: no lengths at all, or of another rank or dtype.
  """
  if query_lengths is None and key_lengths is None:
    raise ValueError("lengths: query_lengths=None and key_lengths=None; expected at least one")
  return Lengths(*(None if x is None else _integers("lengths", name, x, 1) for name, x in
                   (("query_lengths", query_lengths), ("key_lengths", key_lengths))))


def positions(query, key=None, mask: Mask = Causal()) -> Mask:
  """`mask` (causal by default) evaluated at explicit positions.

  Args:
    query: int32 [B or 1, T] positions of the queries (tokens); None: row numbers.
    key: int32 [B or 1, S] positions of the keys (tokens); None: column numbers.
    mask: the mask whose causal, window, chunk, prefix and custom leaves read them. Dropout goes by
      them too, unless a part of the whole mask outside of this one reads positions of its own.

  Raises:
    ValueError: positions of another rank or dtype, or a `mask` that is none.
  """
  _check_mask("positions", mask)
  return Positions(mask, *(None if x is None else _integers("positions", name, x, 2)
                           for name, x in (("query", query), ("key", key))))


def offset(mask: Mask, amount) -> Mask:
  """`mask` with `amount` (int, or int32 [B or 1]) added to the query positions (tokens).

  Raises:
    ValueError: `mask` is none, or `amount` is something else.
  """
  _check_mask("offset", mask)
  return Offset(mask, *_static_or_array("offset", "amount", amount))


def placed(mask: Mask, query, key, size: tuple[int, int]) -> Mask:
  """`mask` of a longer sequence, at some of its rows and columns.

  Args:
    mask: of the whole; arrays with a number per query or key are cut to these rows and columns.
    query: int32 [B or 1, T]: the rows, in any order.
    key: int32 [B or 1, S]: the columns, in any order.
    size: (rows, columns) of the whole; those from there on are padding, which sees nothing and is
      seen by nobody.

  Raises:
    ValueError: `mask` is none, rows and columns of another rank or dtype, or a `size` that is no
      pair of ints.
  """
  _check_mask("placed", mask)
  if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(map(_is_int, size)):
    raise ValueError(f"placed: size={size!r}; expected (rows, columns) of the whole, ints")
  queries, keys = size
  return Placed(mask, (int(queries), int(keys)), _integers("placed", "query", query, 2),
                _integers("placed", "key", key, 2))


def dense(array) -> Mask:
  """A boolean array [B or 1, H or 1, T or 1, S or 1]; True is visible.

  Raises:
    ValueError: another rank or dtype.
  """
  array = _as_array(array)
  if array.dtype != bool or array.ndim != 4:
    raise ValueError(
        f"dense: array has dtype {array.dtype} and shape {array.shape}; expected bool "
        "[B or 1, H or 1, T or 1, S or 1], True = visible (an additive float mask is a bias)")
  return Dense(array)


def custom(predicate: Callable, *operands) -> Mask:
  """A predicate of (batch, head, query position, key position, *operands).

  Args:
    predicate: elementwise, traceable by jax, returns bool. Two masks are equal
      when their predicates are the same object: define it once, outside the step.
    *operands: arrays handed to the predicate as they are; what is traced must come this way.

  Raises:
    ValueError: `predicate` is no callable, or holds a traced array of its surroundings.
  """
  if not callable(predicate):
    raise ValueError(f"custom: predicate={predicate!r}; expected a callable of (batch, head, "
                     "query position, key position, *operands)")
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(_held(predicate))):
    raise ValueError(f"custom: predicate={predicate!r} holds a traced array; expected it among the "
                     "operands: custom(predicate, array) hands it to the predicate as its last "
                     "argument")
  return Custom(predicate, tuple(map(_as_array, operands)))


def _held(function) -> list:
  """What a function brings along: of its surroundings, its defaults, and what `partial` bound."""
  if isinstance(function, functools.partial):
    return [function.args, function.keywords, _held(function.func)]
  held = [getattr(function, "__defaults__", None)]
  for cell in getattr(function, "__closure__", None) or ():
    try:
      held.append(cell.cell_contents)
    except ValueError:  # not assigned yet
      pass
  return held


def _check_mask(function: str, mask) -> None:
  if not isinstance(mask, Mask):
    raise ValueError(f"{function}: mask is a {type(mask).__name__}; expected a mask, such as "
                     "causal()")


def _is_int(x) -> bool:
  """A static integer that int32 holds, as positions are."""
  return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and -2**31 <= x < 2**31


def _as_array(x):
  return x if isinstance(x, jax.Array) else np.asarray(x)


def _integers(function: str, name: str, x, rank: int):
  x = _as_array(x)
  if not np.issubdtype(x.dtype, np.integer) or x.ndim != rank:
    shape = {1: "[B or 1]", 2: "[B or 1, length]"}[rank]
    raise ValueError(f"{function}: {name} has dtype {x.dtype} and shape {x.shape}; "
                     f"expected int32 {shape}")
  if isinstance(x, np.ndarray) and x.size and not -2**31 <= x.min() <= x.max() < 2**31:
    raise ValueError(f"{function}: {name} holds numbers from {x.min()} to {x.max()}; expected "
                     "int32")
  return x.astype(np.int32)


def _static_or_array(function: str, name: str, value):
  """(int, None) for a static number, (None, array) for one per batch row."""
  if _is_int(value):
    return int(value), None
  value = _as_array(value)
  return None, _integers(function, name, value[None] if value.ndim == 0 else value, 1)


# --- Taking a mask apart. ------------------------------------------------------------------------


def leaf_roles(mask: Mask) -> tuple[str, ...]:
  """The role of every array of the mask, in the order of `jax.tree.leaves(mask)`."""
  roles = []
  for name, role in mask.roles.items():
    value = getattr(mask, name)
    if isinstance(value, Mask):
      roles.extend(leaf_roles(value))
    elif isinstance(value, tuple):
      roles.extend([role] * len(value))
    elif value is not None:
      roles.append(role)
  return tuple(roles)


def structure_roles(structure) -> tuple[str, ...]:
  """`leaf_roles` of a mask known only by its tree structure."""
  return leaf_roles(jax.tree.unflatten(structure, range(structure.num_leaves)))


_READ_POSITIONS = (Causal, Window, Chunk, Prefix, Custom, Placed, Positions, Offset)


def move_to_positions(mask: Mask, at: Coordinates) -> Coordinates:
  """The coordinates that dropout goes by: where the mask's positions or offset put all of it.

  Those around a part of a mask are as good as around the whole where no other part reads positions:
  positions(q, k, a) & segments(ids) is positions(q, k, a & segments(ids)). Else they move their own
  part only.
  """
  while True:
    if isinstance(mask, (Placed, Positions, Offset)):
      at, mask = mask.move(at), mask.mask
    elif isinstance(mask, Not):
      mask = mask.mask
    elif isinstance(mask, (And, Or)):
      parts = [part for part in (mask.left, mask.right)
               if any(isinstance(node, _READ_POSITIONS) for node in nodes(part))]
      if len(parts) != 1:
        return at
      mask, = parts
    else:
      return at
