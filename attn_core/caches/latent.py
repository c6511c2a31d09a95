# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of latent attention: one row per token, which is key and value of all heads.

A row holds `latent` numbers, which are the value and the first part of the key, and `rope` numbers,
the rest of the key with rotary applied: 576 numbers a token for DeepSeek-V3, where keys and values
apart would be 1,088. In 8 bits only the latents are quantized, with one scale per token; the rotary
part has 16 bits, because every query multiplies it by numbers of full size.

Rows, lengths, overflow and donation are as in `caches.dense`.

>>> import jax.numpy as jnp
>>> from attn_core.caches import latent
>>> cache = latent.init(2, 4, (6, 2), dtype=jnp.float32)
>>> cache = latent.append(cache, jnp.ones((2, 3, 8)), jnp.array([3, 1]))
>>> cache.lengths
Array([3, 1], dtype=int32)
"""

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches import dense, device_parts, quantize, slots as slots_lib
from attn_core.caches.dense import DenseCache
from attn_core.caches.device_parts import Sharding
from attn_core.types import cdiv

__all__ = ["LatentCache", "LatentWidths", "append", "init", "init_like", "insert", "view"]


LANES = 128  # padded widths are multiples of this


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LatentWidths:
  """Widths of the two parts of a latent row."""

  latent: int  # the value, and the first part of the key
  rope: int  # the rest of the key


class LatentCache(NamedTuple):
  """Latent rows of B sequences of up to S tokens; made by `init`."""

  latents: jax.Array  # [B, S, latent + rope], or padded with zeros; in 8 bits [B, S, latent]
  starts: jax.Array  # int32 [B]: slots before it are padding
  lengths: jax.Array  # int32 [B]: slots starts..lengths - 1 hold tokens
  overflow: jax.Array  # bool [B]: a write did not fit and was dropped; reset when replaced
  rope: jax.Array | None = None  # [B, S, rope] where the latents have 8 bits, or padded
  scale: jax.Array | None = None  # float32 [B, S] of latents in 8 bits
  origins: jax.Array | None = None  # as in `DenseCache`
  sharding: device_parts.Kept | None = None  # as in `DenseCache`
  widths: LatentWidths | None = None  # of padded rows; None: they are not padded

  @property
  def indexs(self) -> jax.Array:
    """An alias of `lengths`: the slot that is written next."""
    return self.lengths

  @property
  def width(self) -> int:
    """The numbers of a row, latent + rope."""
    if self.widths is not None:
      return self.widths.latent + self.widths.rope
    return self.latents.shape[-1] + (0 if self.rope is None else self.rope.shape[-1])


def init(batch: int, slots: int, widths: tuple[int, int] | LatentWidths, *,
         dtype: DTypeLike = jnp.bfloat16, rope_dtype: DTypeLike = jnp.bfloat16,
         sharding: Sharding | None = None, padded: bool = False) -> LatentCache:
  """Creates an empty cache.

  Args:
    batch: rows B.
    slots: tokens S that a row can hold.
    widths: (latent, rope), such as (512, 64), or a LatentWidths.
    dtype: floating-point, or int8 or float8_e4m3fn with one scale per token.
    rope_dtype: floating-point, of the rotary part where `dtype` has 8 bits; others hold
      whole rows.
    sharding: of the rows [B, S, latent + rope]: a NamedSharding, or a PartitionSpec over the mesh
      of `jax.set_mesh`. Axes that shard S split the keys of decoding. None: not sharded.
    padded: whether rows are padded with zeros to a multiple of 128 numbers, such as 576 to 640: the
      kernel for TPUs reads no others. In 8 bits the rotary part is padded by itself.

  Returns:
    A cache whose rows are empty.

  Raises:
    ValueError: a size is not an int >= 1, a dtype is not supported, or the sharding is not one of
      these dimensions that it divides over an existing mesh.
  """
  parts = checked_widths(widths)
  given, rest = checked_dtypes(dtype, rope_dtype)
  whole = device_parts.named(sharding, "[B, S, latent + rope]", (batch, slots, None))
  if whole is not None:
    rows, tokens, numbers = device_parts.entries(whole, 3)
    checks.require(numbers is None, "sharding", repr(whole.spec),
                   "no mesh axis for the numbers of a row: every head reads all of them")
    whole = NamedSharding(whole.mesh, P(rows, tokens))
  apart = quantize.has_8_bits(given)
  stored = padded_width if padded else int
  heads = ((1, parts.latent, stored(parts.rope)) if apart else
           (1, stored(parts.latent + parts.rope), 0))
  return of_dense(slots_lib.empty(DenseCache, batch, slots, heads, dtype=given, sharding=whole,
                                  value_dtype=rest if apart else given),
                  parts if padded else None)


def padded_width(width: int) -> int:
  """The numbers of a padded row of `width`: whole lanes of a TPU."""
  return cdiv(width, LANES) * LANES


def init_like(like: jax.Array | jax.ShapeDtypeStruct, slots: int,
              widths: tuple[int, int] | LatentWidths, *,
              dtype: DTypeLike | None = None, rope_dtype: DTypeLike = jnp.bfloat16,
              padded: bool = False) -> LatentCache:
  """Creates an empty cache for the rows of a query or of latent rows, which is sharded as they are.

  >>> import jax.numpy as jnp
  >>> from attn_core.caches import latent
  >>> latent.init_like(jnp.ones((2, 1, 4, 192)), slots=32, widths=(512, 64)).latents.shape
  (2, 32, 576)

  Args:
    like: [B, T, H, D] in layout bthd, or [B, T, latent + rope]. Mesh axes that shard its rows of
      the batch shard those of the cache; heads do not. During tracing, shardings over axes of type
      Auto are not known and left to the partitioner.
    slots: tokens S that a row can hold.
    widths: see `init`.
    dtype: see `init`; None: that of `like`.
    rope_dtype: see `init`.
    padded: see `init`.

  Returns:
    A cache whose rows are empty.

  Raises:
    ValueError: `like` does not have three or four dimensions, or see `init`.
  """
  given, sharding = first_dimension(like, (3, 4), "[B, T, H, D] or [B, T, latent + rope]")
  return init(given.shape[0], slots, widths, dtype=given.dtype if dtype is None else dtype,
              rope_dtype=rope_dtype, sharding=sharding, padded=padded)


def first_dimension(like: jax.Array | jax.ShapeDtypeStruct, ranks: tuple[int, ...], letters: str
                    ) -> tuple[checks.Array | jax.ShapeDtypeStruct, NamedSharding | None]:
  """Returns an array, checked, and a sharding of its first dimension only; None: it is not known.

  Args:
    like: the array, or its jax.ShapeDtypeStruct.
    ranks: how many dimensions it may have.
    letters: these dimensions, as in an error.

  Raises:
    ValueError: another number of dimensions.
  """
  expected = f"an array {letters}, or its jax.ShapeDtypeStruct"
  given = like if isinstance(like, jax.ShapeDtypeStruct) else checks.array("like", like, expected)
  checks.require(len(given.shape) in ranks, "like", checks.describe(given), expected)
  sharding = device_parts.sharding_of(given)
  if sharding is not None:
    sharding = NamedSharding(sharding.mesh, P(*device_parts.entries(sharding, 1)))
  return given, sharding


def checked_widths(widths: tuple[int, int] | LatentWidths) -> LatentWidths:
  """Returns the widths of the parts of a row.

  Raises:
    ValueError: as `init`.
  """
  if not isinstance(widths, LatentWidths):
    checks.require(isinstance(widths, tuple) and len(widths) == 2, "widths", repr(widths),
                   "(latent, rope), the numbers of each part of a row, or a LatentWidths")
    widths = LatentWidths(*widths)
  for name, width in (("latent width", widths.latent), ("rope width", widths.rope)):
    checks.integer(name, width, "an int >= 1", lambda x: x >= 1)
  return widths


def checked_dtypes(dtype: DTypeLike, rope_dtype: DTypeLike) -> tuple[np.dtype, np.dtype]:
  """Returns the dtypes of rows and of a rotary part that is stored apart.

  Raises:
    ValueError: as `init`.
  """
  given = checks.dtype("dtype", dtype, "a floating-point dtype, int8 or float8_e4m3fn")
  checks.require(jnp.issubdtype(given, jnp.floating) or quantize.has_8_bits(given), "dtype",
                 given.name, "a floating-point dtype, int8 or float8_e4m3fn")
  rest = checks.dtype("rope_dtype", rope_dtype, "a floating-point dtype")
  checks.require(jnp.issubdtype(rest, jnp.floating) and rest.itemsize > 1, "rope_dtype", rest.name,
                 "a floating-point dtype of at least 16 bits")
  return given, rest


def append(cache: LatentCache, latents: jax.Array,
           lengths: ArrayLike | None = None) -> LatentCache:
  """Appends new tokens to each row.

  Args:
    cache: B rows.
    latents: float [B, T, latent + rope], rotary applied to the last part.
    lengths: int32 [B], number of valid tokens among a row's T tokens; None: all.

  Returns:
    The cache, sharded as before. Under jit a row without enough free slots, or with a wrong length,
    is unchanged and marked in `overflow`.

  Raises:
    ValueError: another kind of cache, shapes that do not fit, or, outside of jit, lengths outside
      of 0..T or too few free slots.
  """
  slots_lib.check_kind(cache, LatentCache)
  given = checks.floating("latents", latents, 3, "[B, T, latent + rope]")
  rows = jnp.asarray(given)[:, :, None]
  return of_dense(dense.append(as_dense(cache), *split_tokens(cache, rows), lengths), cache.widths)


def insert(cache: LatentCache, slots: ArrayLike, prefilled: LatentCache) -> LatentCache:
  """Replaces rows `slots` by the rows of another cache.

  Args:
    cache: B rows.
    slots: int32 [num_requests], different rows.
    prefilled: num_requests rows, with at most as many slots in each.

  Returns:
    The cache, sharded as before; rows that are claimed twice are marked in `overflow`, as in
    `dense.insert`.

  Raises:
    ValueError: another kind of cache, a `prefilled` that does not fit, or `slots` that are known to
      be out of range or not different.
  """
  slots_lib.check_kind(cache, LatentCache)
  slots_lib.check_kind(prefilled, LatentCache, "prefilled")
  checks.require(cache.widths == prefilled.widths, "prefilled",
                 f"a LatentCache of widths {prefilled.widths}", f"{cache.widths}, as the cache has")
  return of_dense(slots_lib.insert(as_dense(cache), slots, as_dense(prefilled)), cache.widths)


def view(cache: LatentCache) -> slots_lib.CacheView:
  """Returns the arrays that attention reads, as keys and values of one head.

  The keys are the latents, with the rotary part where it is stored with them; the values are what
  is stored apart: the rotary part of latents in 8 bits, else no numbers. Padded ones have zeros.
  """
  slots_lib.check_kind(cache, LatentCache)
  return dense.view(as_dense(cache))


def split_tokens(cache: LatentCache, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns new rows [B, T, 1, latent + rope] as the keys and values of `as_dense`.

  Raises:
    ValueError: rows of another width than the cache's.
  """
  checks.require(rows.shape[-1] == cache.width, "latents", checks.describe(rows[:, :, 0]),
                 f"[B, T, {cache.width}], latent + rope numbers a token as in the cache")
  width = cache.latents.shape[-1]
  apart = 0 if cache.rope is None else cache.rope.shape[-1]
  rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, width + apart - cache.width),))
  return rows[..., :width], rows[..., width:]


def as_dense(cache: LatentCache) -> DenseCache:
  """Returns the same arrays as a dense cache of one key head.

  Its keys are the latents, its values what is stored apart: the rotary part, or no numbers.
  """
  apart = cache.latents[..., :0] if cache.rope is None else cache.rope
  scale = None if cache.scale is None else cache.scale[:, :, None]
  return DenseCache(cache.latents[:, :, None], apart[:, :, None], cache.starts, cache.lengths,
                    cache.overflow, scale, None, cache.origins, cache.sharding)


def of_dense(cache: DenseCache, widths: LatentWidths | None) -> LatentCache:
  """Returns the inverse of `as_dense`; `widths` are those of padded rows."""
  scale = None if cache.key_scale is None else cache.key_scale[:, :, 0]
  rope = cache.value[:, :, 0] if cache.value.shape[-1] else None
  return LatentCache(cache.key[:, :, 0], cache.starts, cache.lengths, cache.overflow, rope, scale,
                     cache.origins, cache.sharding, widths)
