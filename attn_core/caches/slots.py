# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Row slots shared by dense and window caches: creation, checks and writes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import quantize

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
  key_scale: jax.Array | None = None  # float32 [B, S, K] of keys in 8 bits
  value_scale: jax.Array | None = None
  origins: jax.Array | None = None  # int32 [B]: the number that is masks' position 0; None: starts


def empty(kind: type[Cache], batch: int, slots: int, heads: tuple[int, ...], *,
          dtype: DTypeLike) -> Cache:
  """Creates an empty cache.

  Args:
    kind: the NamedTuple to make.
    batch: rows B.
    slots: S of each row (tokens).
    heads: (K, D), or (K, D, E) if values have another width.
    dtype: floating-point, or int8 or float8_e4m3fn with scales.

  Raises:
    ValueError: a size is not an int >= 1, or the dtype is not supported.
  """
  dtype = checks.dtype("dtype", dtype, "a floating-point dtype or "
                       f"{' or '.join(quantize.LIMITS)}")
  checks.require(jnp.issubdtype(dtype, jnp.floating) or quantize.is_quantized(dtype), "dtype",
                 dtype.name, f"a floating-point dtype or {' or '.join(quantize.LIMITS)}")
  checks.require(isinstance(heads, tuple) and len(heads) in (2, 3), "heads", repr(heads),
                 "(key heads K, width D), or (K, D, E) where values have another width")
  numbers = dict(zip(("batch", "slots", "key heads", "width", "value width"),
                     (batch, slots, *heads)))
  for name, number in numbers.items():
    checks.integer(name, number, "an int >= 1", lambda x: x >= 1)
  shape: tuple[int, int, int] = (batch, slots, heads[0])
  scale = lambda: jnp.zeros(shape, jnp.float32) if quantize.is_quantized(dtype) else None
  row = lambda: jnp.zeros((batch,), jnp.int32)
  return kind(jnp.zeros((*shape, heads[1]), dtype), jnp.zeros((*shape, heads[-1]), dtype),
              row(), row(), jnp.zeros((batch,), bool), scale(), scale())


def empty_like(cache: "DenseCache | WindowCache", kind: type[Cache], batch: int,
               slots: int) -> Cache:
  """Creates an empty cache of other sizes with the heads, widths and dtype of `cache`."""
  heads = (cache.key.shape[2], cache.key.shape[3], cache.value.shape[3])
  return empty(kind, batch, slots, heads, dtype=cache.key.dtype)


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
    batch, _, heads, width = stored.shape
    checks.require(x.shape[0] == batch and x.shape[2:] == (heads, width) and x.shape[1] > 0
                   and x.shape[1] == key.shape[1], name, checks.describe(x),
                   f"{letters} = [{batch}, {key.shape[1]}, {heads}, {width}], T >= 1, as in the "
                   f"cache of {checks.describe(stored)}")


def check_rows(name: str, x: object, rows: int) -> None:
  """Checks that `x` is int32 [rows].

  Raises:
    ValueError: another type, shape or dtype.
  """
  expected = f"int32 [{rows}], one number per row"
  given = checks.array(name, x, expected)
  checks.require(given.shape == (rows,) and jnp.issubdtype(given.dtype, jnp.integer), name,
                 checks.describe(given), expected)


def counts(lengths: checks.Array | None, batch: int, tokens: int) -> checks.Array:
  """The number of valid new tokens of each row: int32 [B].

  Raises:
    ValueError: `lengths` is not int32 [B], or known to be outside of 0..tokens.
  """
  if lengths is None:
    return np.full((batch,), tokens, np.int32)
  check_rows("lengths", lengths, batch)
  check_concrete("lengths", (lengths,), lambda x: (x < 0) | (x > tokens),
               f"0 to {tokens}: the number of valid tokens among the {tokens} new tokens of a row")
  return checks.int32("lengths", lengths, f"int32 [{batch}]")


def check_concrete(argument: str, arrays: Sequence[checks.Array], bad: Callable[..., checks.Array],
                   expected: str) -> None:
  """Raises ValueError where bad(*arrays) is true, if the arrays are concrete (outside of jit)."""
  if not any(isinstance(x, jax.core.Tracer) for x in arrays):
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
      x, scales = quantize.quantize(x, stored.dtype)
      fields[f"{name}_scale"] = write(getattr(cache, f"{name}_scale"), scales)
    fields[name] = write(stored, x.astype(stored.dtype))
  return cache._replace(**fields)


def write_slots(array: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
  """Writes `new` [B, T, ...] to slots int32 [B, T] of `array` [B, S, ...]; drops slots past S.

  A scatter that drops, since lax.dynamic_update_slice would move tokens that do not fit over older
  ones.
  """
  return jax.vmap(lambda row, x, index: row.at[index].set(x, mode="drop"))(array, new, slots)


def insert(cache: Cache, slots: checks.Array, prefilled: Cache) -> Cache:
  """Implements `dense.insert` and `window.insert`; window caches must have the same window.

  Raises:
    ValueError: see `dense.insert`.
  """
  check_kind(prefilled, type(cache), "prefilled")
  batch, requests = cache.lengths.shape[0], prefilled.lengths.shape[0]
  check_rows("slots", slots, requests)
  for name in ("key", "value"):
    mine, theirs = getattr(cache, name), getattr(prefilled, name)
    checks.require(
        theirs.dtype == mine.dtype and theirs.shape[2:] == mine.shape[2:]
        and theirs.shape[1] <= mine.shape[1], "prefilled",
        f"a {type(prefilled).__name__} of {checks.describe(theirs)}",
        f"a {type(cache).__name__} that fits into {checks.describe(mine)}")
  is_absent = lambda slots: (slots < 0) | (slots >= batch)
  check_concrete("slots", (slots,), is_absent, f"rows of the cache, 0 to {batch - 1}")
  check_concrete("slots", (slots,), lambda x: (x == x[:, None]).sum(0) > 1, "different rows")
  given = checks.int32("slots", slots, f"int32 [{requests}]")
  absent = is_absent(given)
  rows = jnp.where(absent, batch, given)
  claims = jnp.zeros((batch,), jnp.int32).at[rows].add(1, mode="drop")
  length = prefilled.key.shape[1]
  fields: dict[str, Any] = {name: getattr(cache, name).at[rows, :length].set(
      getattr(prefilled, name), mode="drop") for name in STORED if getattr(cache, name) is not None}
  for name in ("starts", "lengths", "overflow"):
    fields[name] = getattr(cache, name).at[rows].set(getattr(prefilled, name), mode="drop")
  fields["overflow"] = fields["overflow"] | (claims > 1) | absent.any()
  if cache.origins is not None or prefilled.origins is not None:
    fields["origins"] = origins(cache).at[rows].set(origins(prefilled), mode="drop")
  return cache._replace(**fields)
