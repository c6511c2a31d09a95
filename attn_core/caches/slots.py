"""What dense and window caches have in common: their fields, what they check and how they write.

Letters: B batch, T new tokens, S slots, K key heads, D key width, E value width; R requests.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import quantize

STORED = ("key", "value", "key_scale", "value_scale")  # the fields with a number for every slot


class CacheView(NamedTuple):
  """What a call reads of a cache; nothing is copied."""

  key: Any  # [B, S, K, D] as stored
  value: Any  # [B, S, K, E]
  starts: Any  # int32 [B]: position of a row's first token
  lengths: Any  # int32 [B]: position after its last one
  positions: Any  # int32 [B, S]: position of the token in every slot; -1: none
  key_scale: Any = None  # float32 [B, S, K] of keys in 8 bits
  value_scale: Any = None


def empty(kind, batch: int, slots: int, heads, *, dtype):
  """A cache without tokens.

  Args:
    kind: the NamedTuple to make.
    batch: rows B.
    slots: S of each row (tokens).
    heads: (K, D), or (K, D, E) where values have another width.
    dtype: floating-point, or int8 or float8_e4m3fn with scales beside.

  Raises:
    ValueError: a size that is no int >= 1, or another dtype.
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
  shape = (batch, slots, heads[0])
  scale = lambda: jnp.zeros(shape, jnp.float32) if quantize.is_quantized(dtype) else None
  row = lambda: jnp.zeros((batch,), jnp.int32)
  return kind(jnp.zeros((*shape, heads[1]), dtype), jnp.zeros((*shape, heads[-1]), dtype),
              row(), row(), jnp.zeros((batch,), bool), scale(), scale())


def like(cache, kind, batch: int, slots: int):
  """An empty cache of other sizes for the same keys and values."""
  heads = (cache.key.shape[2], cache.key.shape[3], cache.value.shape[3])
  return empty(kind, batch, slots, heads, dtype=cache.key.dtype)


def check_kind(cache, kind, argument: str = "cache") -> None:
  """Raises ValueError unless the cache is of the kind, DenseCache or WindowCache."""
  checks.require(isinstance(cache, kind), argument, type(cache).__name__, f"a {kind.__name__}")


def check_tokens(cache, key, value) -> None:
  """New keys [B, T, K, D] and values [B, T, K, E] fit the cache.

  Raises:
    ValueError: another shape, or numbers that are not floating-point.
  """
  for name, x, letters in (("key", key, "[B, T, K, D]"), ("value", value, "[B, T, K, E]")):
    checks.floating(name, x, 4, letters)
    stored = getattr(cache, name)
    batch, _, heads, width = stored.shape
    checks.require(x.shape[0] == batch and x.shape[2:] == (heads, width) and x.shape[1] > 0
                   and x.shape[1] == key.shape[1], name, checks.describe(x),
                   f"{letters} = [{batch}, {key.shape[1]}, {heads}, {width}], T >= 1, as the cache "
                   f"of {checks.describe(stored)} has them")


def check_rows(name: str, x, rows: int) -> None:
  """A number per row: int32 [rows].

  Raises:
    ValueError: anything else.
  """
  expected = f"int32 [{rows}], one number a row"
  checks.array(name, x, expected)
  checks.require(x.shape == (rows,) and jnp.issubdtype(x.dtype, jnp.integer), name,
                 checks.describe(x), expected)


def counts(lengths, batch: int, tokens: int):
  """How many of the new tokens of every row count: int32 [B].

  Raises:
    ValueError: `lengths` is no int32 [B], or is known to reach outside of 0..tokens.
  """
  if lengths is None:
    return np.full((batch,), tokens, np.int32)
  check_rows("lengths", lengths, batch)
  refuse_known("lengths", (lengths,), lambda x: (x < 0) | (x > tokens),
               f"0 to {tokens}: how many of the {tokens} new tokens of a row count")
  return checks.int32("lengths", lengths, f"int32 [{batch}]")


def refuse_known(argument: str, arrays: tuple, bad, expected: str) -> None:
  """Raises ValueError where bad(*arrays) is true and known already, as it is outside of jit."""
  if not any(isinstance(x, jax.core.Tracer) for x in arrays):
    arrays = [np.asarray(x) for x in arrays]  # what jax computes might be traced
    rows = np.flatnonzero(bad(*arrays)).tolist()
    got = " and ".join(str(x.tolist()) for x in arrays)
    checks.require(not rows, argument, f"{got} (see rows {rows})", expected)


def written(cache, key, value, write):
  """The cache with write(array, new) done to its keys, values and scales; nothing else changes."""
  fields = {}
  for name, x in (("key", key), ("value", value)):
    stored = getattr(cache, name)
    if quantize.is_quantized(stored.dtype):
      x, scales = quantize.quantize(x, stored.dtype)
      fields[f"{name}_scale"] = write(getattr(cache, f"{name}_scale"), scales)
    fields[name] = write(stored, x.astype(stored.dtype))
  return cache._replace(**fields)


def write_slots(array, new, slots):
  """`new` [B, T, ...] in the slots int32 [B, T] of `array` [B, S, ...]; those past S: nowhere.

  A scatter that drops, since lax.dynamic_update_slice would move what does not fit over older
  tokens.
  """
  return jax.vmap(lambda row, x, index: row.at[index].set(x, mode="drop"))(array, new, slots)


def insert(cache, slots, prefilled):
  """`dense.insert` and `window.insert`, for caches of one kind; of rings, those of one size.

  Raises:
    ValueError: as `dense.insert`.
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
  refuse_known("slots", (slots,), is_absent, f"rows of the cache, 0 to {batch - 1}")
  refuse_known("slots", (slots,), lambda x: (x == x[:, None]).sum(0) > 1, "different rows")
  slots = checks.int32("slots", slots, f"int32 [{requests}]")
  absent = is_absent(slots)
  slots = jnp.where(absent, batch, slots)
  claims = jnp.zeros((batch,), jnp.int32).at[slots].add(1, mode="drop")
  length = prefilled.key.shape[1]
  fields = {name: getattr(cache, name).at[slots, :length].set(
      getattr(prefilled, name), mode="drop") for name in STORED if getattr(cache, name) is not None}
  for name in ("starts", "lengths", "overflow"):
    fields[name] = getattr(cache, name).at[slots].set(getattr(prefilled, name), mode="drop")
  fields["overflow"] = fields["overflow"] | (claims > 1) | absent.any()
  return cache._replace(**fields)
