# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Row slots shared by dense and window caches: creation, checks and writes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import array_axes, checks
from attn_core.array_axes import Entry, size_of
from attn_core.caches import device_parts, quantize, tile_writes
from attn_core.caches.device_parts import Sharding

if TYPE_CHECKING:  # for annotations only: these modules import this one
  from attn_core.caches.dense import DenseCache
  from attn_core.caches.window import WindowCache

STORED = ("key", "value", "key_scale", "value_scale")  # fields with an entry per slot

Cache = TypeVar("Cache", "DenseCache", "WindowCache")


class CacheView(NamedTuple):
  """The arrays of a cache that attention reads, without a copy."""

  key: jax.Array  # [B, S, K, D] as stored
  value: jax.Array  # [B, S, K, E]
  starts: jax.Array  # int32 [B]: position of a row's first token
  lengths: jax.Array  # int32 [B]: position after a row's last token
  positions: jax.Array  # int32 [B, S]: number of the token in each slot, with padding; -1: empty
  # float32 [B, S, K] of keys in 8 bits, [B, S, K, groups] in 4
  key_scale: jax.Array | None = None
  value_scale: jax.Array | None = None
  origins: jax.Array | None = None  # int32 [B]: the number that is masks' position 0; None: starts


class CacheRows(NamedTuple):
  """The slots of a dense cache that rows of new queries have, int32 [B] each."""

  start: jax.Array  # of the first token; queries before it are padding
  end: jax.Array  # after the last token; queries from it on are padding
  first: jax.Array  # of the first query; others follow
  overflow: jax.Array  # bool [B]: the output of all queries is NaN


def nan_rows(x: jax.Array, overflow: jax.Array) -> jax.Array:
  """Returns x [B, ..] with NaN in the rows that overflowed, bool [B]."""
  return jnp.where(overflow.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)


def empty(kind: type[Cache], batch: int, slots: int, heads: tuple[int, ...], *,
          dtype: DTypeLike, sharding: Sharding | None = None,
          value_dtype: DTypeLike | None = None) -> Cache:
  """Creates an empty cache.

  Args:
    kind: the NamedTuple to make.
    batch: rows B.
    slots: S of each row (tokens).
    heads: (K, D), or (K, D, E) if values have another width.
    dtype: floating-point, or int8, float8_e4m3fn or int4 with scales.
    sharding: of [B, S, K, D]; None: not sharded.
    value_dtype: of values without scales, whose width may be 0, as a latent cache has them; None:
      as the keys.

  Raises:
    ValueError: a size is not an int >= 1, a width is odd with int4, the dtype is not supported, or
      the sharding does not fit.
  """
  dtype = checks.dtype("dtype", dtype, "a floating-point dtype or "
                       f"{' or '.join(quantize.LIMITS)}")
  checks.require(jnp.issubdtype(dtype, jnp.floating) or dtype.name in quantize.LIMITS, "dtype",
                 dtype.name, f"a floating-point dtype or {' or '.join(quantize.LIMITS)}")
  checks.require(isinstance(heads, tuple) and len(heads) in (2, 3), "heads", repr(heads),
                 "(key heads K, width D), or (K, D, E) where values have another width")
  numbers = dict(zip(("batch", "slots", "key heads", "width", "value width"),
                     (batch, slots, *heads)))
  for name, number in numbers.items():
    if name != "value width" or value_dtype is None:
      checks.integer(name, number, "an int >= 1", lambda x: x >= 1)
  shape: tuple[int, int, int] = (batch, slots, heads[0])
  of_values = dtype if value_dtype is None else value_dtype
  widths = quantize.stored_width(heads[1], dtype), quantize.stored_width(heads[-1], of_values)
  half = " / 2" if dtype.name == "int4" else ""
  whole = device_parts.named(sharding, f"[B, S, K, D{half}]", (*shape, widths[0]))
  device_parts.named(sharding, f"[B, S, K, E{half}]", (*shape, widths[1]))
  rank = lambda n: device_parts.of_dimensions(whole, range(n))
  zeros = lambda shape, dtype: device_parts.full(shape, 0, dtype, rank(len(shape)))
  def scale(width: int, dtype: DTypeLike) -> jax.Array | None:
    if not quantize.is_quantized(dtype):
      return None
    return device_parts.full(quantize.scale_shape(shape, width, dtype), 0, jnp.float32, rank(3))
  row = lambda: zeros((batch,), jnp.int32)
  return kind(zeros((*shape, widths[0]), quantize.stored_dtype(dtype)),
              zeros((*shape, widths[1]), quantize.stored_dtype(of_values)), row(), row(),
              zeros((batch,), bool), scale(heads[1], dtype), scale(heads[-1], of_values),
              sharding=device_parts.kept(whole))


def empty_like(cache: "DenseCache | WindowCache", kind: type[Cache], slots: int,
               tokens: jax.Array | None = None) -> Cache:
  """Creates an empty cache of other slots with the heads, widths and dtype of `cache`.

  Args:
    cache: the cache. Where Explicit axes shard its heads, they shard those of the new one.
    kind: the NamedTuple to make.
    slots: S of each row (tokens), which are not sharded.
    tokens: [B, ...], of which it has the rows, sharded alike; None: those of `cache`.
  """
  heads = (cache.key.shape[2], quantize.width_of(cache.key), quantize.width_of(cache.value))
  rows = cache.key if tokens is None else tokens
  parts = array_axes.parts_of(cache.key, rows)
  of_rows = array_axes.parts_of(rows, cache.key)
  of_values = None if cache.value_scale is not None else cache.value.dtype
  made = empty(kind, rows.shape[0], slots, heads, dtype=quantize.dtype_name(cache.key.dtype),
               value_dtype=of_values)
  if cache.sharding is not None and tokens is None:
    remembered = cache.sharding.spec
    made = made._replace(sharding=cache.sharding._replace(
        spec=P(remembered[0], None, *remembered[2:])))
  if parts is None or of_rows is None:
    return made
  used = set(parts.axes(2) + parts.axes(3))
  first = None if used & set(of_rows.axes(0)) else of_rows.spec[0]
  spec: tuple[Entry, ...] = (first, None, parts.spec[2], parts.spec[3])
  def rank(x: jax.Array) -> int:  # that of the tokens and heads for scales, which may have groups
    return x.ndim if made.key_scale is None or x.dtype != jnp.float32 else min(x.ndim, 3)
  return jax.tree.map(lambda x: device_parts.match(x, cache.key, spec[:rank(x)]), made)


def init_like(kind: type[Cache], like: jax.Array | jax.ShapeDtypeStruct, slots: int,
              heads: tuple[int, ...] | None, dtype: DTypeLike | None) -> Cache:
  """Implements `dense.init_like` and `window.init_like`.

  Raises:
    ValueError: see `dense.init_like`.
  """
  expected = "an array [B, T, K, D] or its jax.ShapeDtypeStruct"
  given = like if isinstance(like, jax.ShapeDtypeStruct) else checks.array("like", like, expected)
  checks.require(len(given.shape) == 4, "like", checks.describe(given), expected)
  batch, _, *held = given.shape
  heads = (held[0], held[1]) if heads is None else heads
  sharding = device_parts.sharding_of(given)
  if sharding is not None:
    rows, _, of_heads, _ = device_parts.entries(sharding, 4)
    size = size_of(sharding.mesh, of_heads)
    divides = isinstance(heads, tuple) and heads and heads[0] % size == 0
    sharding = jax.sharding.NamedSharding(sharding.mesh, P(
        rows, None, of_heads if divides else None))
  return empty(kind, batch, slots, heads, dtype=given.dtype if dtype is None else dtype,
               sharding=sharding)


def origins(cache: "DenseCache | WindowCache") -> jax.Array:
  """Returns the number of the token of each row from which masks count positions, int32 [B]."""
  return cache.starts if cache.origins is None else cache.origins


def check_kind(cache: object, kind: type, argument: str = "cache") -> None:
  """Raises ValueError unless the cache is a `kind`: DenseCache or WindowCache."""
  checks.require(isinstance(cache, kind), argument, type(cache).__name__, f"a {kind.__name__}")


def check_tokens(cache: "DenseCache | WindowCache", key: jax.Array, value: jax.Array) -> None:
  """Checks that new keys [B, T, K, D] and values [B, T, K, E] fit the cache.

  Raises:
    ValueError: another shape, or a dtype that is not floating-point.
  """
  for name, x, letters in (("key", key, "[B, T, K, D]"), ("value", value, "[B, T, K, E]")):
    checks.floating(name, x, 4, letters)
    stored = getattr(cache, name)
    batch, _, heads, _ = stored.shape
    width = quantize.width_of(stored)
    checks.require(x.shape[0] == batch and x.shape[2:] == (heads, width) and x.shape[1] > 0
                   and x.shape[1] == key.shape[1], name, checks.describe(x),
                   f"{letters} = [{batch}, {key.shape[1]}, {heads}, {width}], T >= 1, as in the "
                   f"cache of {checks.describe(stored)}")


def row_numbers(name: str, x: object, rows: int) -> checks.Array:
  """Returns integers as int32 [rows].

  Raises:
    ValueError: not integers, or another shape.
  """
  expected = f"int32 [{rows}], one number per row"
  given = checks.int32(name, x, expected)
  checks.require(given.shape == (rows,), name, checks.describe(given), expected)
  return given


def counts(lengths: ArrayLike | None, batch: int, tokens: int) -> checks.Array:
  """The number of valid new tokens of each row: int32 [B].

  Raises:
    ValueError: `lengths` is not int32 [B], or known to be outside of 0..tokens.
  """
  if lengths is None:
    return np.full((batch,), tokens, np.int32)
  given = row_numbers("lengths", lengths, batch)
  check_concrete("lengths", (given,), lambda x: (x < 0) | (x > tokens),
               f"0 to {tokens}: the number of valid tokens among the {tokens} new tokens of a row")
  return given


def check_concrete(argument: str, arrays: Sequence[checks.Array], bad: Callable[..., checks.Array],
                   expected: str) -> None:
  """Raises ValueError where bad(*arrays) is true, if the arrays are known.

  They are not during tracing, nor where other processes hold parts of them.
  """
  if all(isinstance(x, np.ndarray) or not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
         for x in arrays):
    known = [np.asarray(x) for x in arrays]  # jax operations might be traced
    rows = np.flatnonzero(bad(*known)).tolist()
    got = " and ".join(str(x.tolist()) for x in known)
    checks.require(not rows, argument, f"{got} (see rows {rows})", expected)


def write_tokens(cache: Cache, key: jax.Array, value: jax.Array,
                 write: Callable[[jax.Array, jax.Array], jax.Array]) -> Cache:
  """Applies write(array, new) to the keys, values and scales of a cache."""
  fields: dict[str, Any] = {}
  for name, x in (("key", key), ("value", value)):
    stored = getattr(cache, name)
    if quantize.is_quantized(stored.dtype):
      x, scales = quantize.quantize(x, quantize.dtype_name(stored.dtype))
      x = quantize.pack_columns(x) if quantize.is_packed(stored.dtype) else x
      fields[f"{name}_scale"] = write(getattr(cache, f"{name}_scale"), scales)
    fields[name] = write(stored, x.astype(stored.dtype))
  return cache._replace(**fields)


def write_slots(array: jax.Array, new: jax.Array, slots: jax.Array, *,
                consecutive: bool = False) -> jax.Array:
  """Writes `new` [B, T, ...] to slots int32 [B, T] of `array` [B, S, ...]; drops slots past S.

  A scatter that drops, since lax.dynamic_update_slice would move tokens that do not fit over older
  ones.

  Args:
    array: of the cache.
    new: of the tokens.
    slots: of the tokens.
    consecutive: whether a token that is not dropped is one slot after the one before it.
  """
  write = tile_writes.write if consecutive else tile_writes.scatter
  parts = array_axes.parts_of(array, new, slots)
  if parts is None:
    return write(array, new, slots)
  def local(array: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    return write(array, new, device_parts.local_index(slots, array.shape[1], parts.axes(1)))
  batch, _, *rest = parts.spec
  return parts.run(local, (array, new, slots),
                   (P(*parts.spec), P(batch, None, *rest), P(batch)), P(*parts.spec))


def read_slots(array: jax.Array, slots: jax.Array) -> jax.Array:
  """Reads slots int32 [B, T] of `array` [B, S, ...]: [B, T, ...]; zeros where a slot is -1."""
  def read(array: jax.Array, slots: jax.Array) -> jax.Array:
    index = slots.reshape(*slots.shape, *[1] * (array.ndim - 2))
    found = jnp.take_along_axis(array, jnp.maximum(index, 0), axis=1)
    return jnp.where(index < 0, jnp.zeros((), array.dtype), found)

  parts = array_axes.parts_of(array, slots)
  if parts is None:
    return read(array, slots)
  batch, _, *rest = parts.spec
  whole = P(batch, None, *rest)
  return parts.run(read, (array, slots), (whole, P(batch)), whole)


def write_rows(array: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
  """Writes `new` [num_rows, T, ...] or [num_rows] to the first T slots of rows of `array`.

  Args:
    array: [B, S, ...] or [B].
    new: with T <= S.
    rows: int32 [num_rows]; those past B are dropped.
  """
  index = (slice(new.shape[1]),) if new.ndim > 1 else ()
  parts = array_axes.parts_of(array, new, rows)
  if parts is None:
    return array.at[rows, *index].set(new, mode="drop")

  def local(array: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    rows = device_parts.local_index(rows, array.shape[0], parts.axes(0))
    if array.ndim == 1 or not parts.axes(1):
      return array.at[rows, *index].set(new, mode="drop")
    slots = device_parts.local_index(jnp.arange(new.shape[1], dtype=jnp.int32), array.shape[1],
                                     parts.axes(1))
    return array.at[rows[:, None], slots[None]].set(new, mode="drop")

  return parts.run(local, (array, new, rows),
                   (P(*parts.spec), P(None, None, *parts.spec[2:]) if new.ndim > 1 else P(), P()),
                   P(*parts.spec))


def insert(cache: Cache, slots: ArrayLike, prefilled: Cache) -> Cache:
  """Implements `dense.insert` and `window.insert`; window caches must have the same window.

  Raises:
    ValueError: see `dense.insert`.
  """
  check_kind(prefilled, type(cache), "prefilled")
  batch, requests = cache.lengths.shape[0], prefilled.lengths.shape[0]
  given = row_numbers("slots", slots, requests)
  for name in ("key", "value"):
    mine, theirs = getattr(cache, name), getattr(prefilled, name)
    checks.require(
        theirs.dtype == mine.dtype and theirs.shape[2:] == mine.shape[2:]
        and theirs.shape[1] <= mine.shape[1], "prefilled",
        f"a {type(prefilled).__name__} of {checks.describe(theirs)}",
        f"a {type(cache).__name__} that fits into {checks.describe(mine)}")
  check_concrete("slots", (given,), lambda x: (x < 0) | (x >= batch),
                 f"rows of the cache, 0 to {batch - 1}")
  check_concrete("slots", (given,), lambda x: (x == x[:, None]).sum(0) > 1, "different rows")
  return _inserted(cache, given, prefilled)


@device_parts.one_program()
def _inserted(cache: Cache, slots: checks.Array, prefilled: Cache) -> Cache:
  """Replaces rows `slots` int32 [num_requests] of a cache."""
  batch = cache.lengths.shape[0]
  given = device_parts.match(slots, cache.lengths, (None,))
  absent = (given < 0) | (given >= batch)
  rows = jnp.where(absent, batch, given)
  claims = (rows[:, None] == jnp.arange(batch, dtype=jnp.int32)[None]).sum(0)
  fields: dict[str, Any] = {
      name: write_rows(getattr(cache, name), getattr(prefilled, name), rows)
      for name in (*STORED, "starts", "lengths", "overflow") if getattr(cache, name) is not None}
  bad = device_parts.match((claims > 1) | absent.any(), cache.overflow)
  fields["overflow"] = fields["overflow"] | bad
  if cache.origins is not None or prefilled.origins is not None:
    fields["origins"] = write_rows(origins(cache), origins(prefilled), rows)
  return device_parts.keep(cache._replace(**fields))
