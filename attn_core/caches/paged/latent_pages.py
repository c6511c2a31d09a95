# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pure functions that create, write and read pages of latent rows; see `PagesLatent`.

Slots, tables, groups and stripes of requests are those of all pages, and so is the allocator;
`caches.pages.copy_pages` copies pages of latent rows, too.

>>> import jax.numpy as jnp
>>> from attn_core.caches import latent_pages, pages
>>> cache = latent_pages.init(4, 2, (6, 2), dtype=jnp.float32)
>>> requests = pages.PagesMetadata(jnp.array([[3, 0]]), jnp.array([3]), jnp.array([0, 3]))
>>> cache = latent_pages.append(cache, jnp.ones((3, 8)), pages.slots(requests, 2, 3))
>>> latent_pages.to_dense(cache, requests)[0, :, 0]
Array([1., 1., 1., 0.], dtype=float32)

Shapes: R requests, P pages of the pool, T new tokens; latent and rope are the widths of the parts
of a row.
"""

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.array_axes import axes_of, parts_of, size_of
from attn_core.caches import device_parts, latent as latent_cache, quantize
from attn_core.caches.device_parts import Sharding
from attn_core.caches.paged import device_pages, latent_layout, layouts, slot_mapping, token_writes
from attn_core.caches.paged.latent_layout import LatentWidths, PagesLatent
from attn_core.caches.paged.layouts import Array, PagesMetadata

__all__ = ["LatentWidths", "PagesLatent", "append", "from_dense", "init", "init_like", "to_dense"]


def init(num_pages: int, page_size: int, widths: tuple[int, int] | LatentWidths, *,
         dtype: DTypeLike = jnp.bfloat16, rope_dtype: DTypeLike = jnp.bfloat16,
         sharding: Sharding | None = None, padded: bool = False) -> PagesLatent:
  """Creates a pool of empty pages of latent rows.

  Args:
    num_pages: P.
    page_size: tokens of a page.
    widths: (latent, rope), such as (512, 64), or a LatentWidths.
    dtype: floating-point, or int8 or float8_e4m3fn with one scale per token.
    rope_dtype: floating-point, of the rotary part where `dtype` has 8 bits; others hold whole rows.
    sharding: of the pages [P, page_size, latent + rope]: a NamedSharding, or a PartitionSpec over
      the mesh of `jax.set_mesh`, which shards the first dimension only. None: not sharded.
    padded: whether rows are padded with zeros to a multiple of 128 numbers, such as 576 to 640: the
      kernel for TPUs reads no others. In 8 bits the rotary part is padded by itself, and the scales
      of a page to those of a multiple of 128 tokens, so that this kernel copies them from there.

  Returns:
    A cache, all zeros.

  Raises:
    ValueError: a size is not an int >= 1, a dtype is not supported, or the sharding does not fit.
  """
  for name, size in (("num_pages", num_pages), ("page_size", page_size)):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  parts = latent_cache.checked_widths(widths)
  given, rest = latent_cache.checked_dtypes(dtype, rope_dtype)
  checks.require(quantize.has_8_bits(given) or given.itemsize > 1, "dtype", given.name,
                 "a floating-point dtype of at least 16 bits, int8 or float8_e4m3fn")
  dimensions = "[P, page_size, latent + rope]"
  width = parts.latent + parts.rope
  whole = device_parts.named(sharding, dimensions, (num_pages, page_size, width))
  if whole is not None:
    pool, *others = device_parts.entries(whole, 3)
    checks.require(not any(map(axes_of, others)), "sharding", repr(whole.spec),
                   f"axes for the pages of {dimensions} only: every head reads whole rows")
    whole = NamedSharding(whole.mesh, PartitionSpec(pool))
  zeros = lambda dtype, numbers: device_parts.full(
      (num_pages, page_size, numbers), 0, dtype, whole)
  stored = latent_layout.padded_width if padded else int
  if not quantize.has_8_bits(given):
    return PagesLatent(zeros(given, stored(width)), parts)
  scales = device_parts.full((num_pages, stored(page_size)), 1, jnp.float32, whole)
  return PagesLatent(zeros(given, parts.latent), parts, zeros(rest, stored(parts.rope)), scales)


def init_like(like: jax.Array | jax.ShapeDtypeStruct, num_pages: int, page_size: int,
              widths: tuple[int, int] | LatentWidths, *, dtype: DTypeLike | None = None,
              rope_dtype: DTypeLike = jnp.bfloat16, groups: int = 1,
              padded: bool = False) -> PagesLatent:
  """Creates a pool of empty pages for the tokens of a query or of latent rows, sharded as they are.

  >>> import jax.numpy as jnp
  >>> from attn_core.caches import latent_pages
  >>> latent_pages.init_like(jnp.ones((8, 4, 192)), 32, 4, (512, 64)).pages.shape
  (32, 4, 576)

  Args:
    like: [T, H, D], or rows [T, latent + rope]. Its heads do not shard pages of latent rows.
    num_pages: P.
    page_size: tokens of a page.
    widths: see `init`.
    dtype: see `init`; None: that of `like`.
    rope_dtype: see `init`.
    groups: number of groups of requests (`caches.groups`); mesh axes that shard the tokens of
      `like` and divide it shard the pages. 1: pages are not sharded by them.
    padded: see `init`.

  Returns:
    A cache, all zeros.

  Raises:
    ValueError: `like` does not have two or three dimensions, or see `init`.
  """
  given, sharding = latent_cache.first_dimension(like, (2, 3), "[T, H, D] or [T, latent + rope]")
  checks.integer("groups", groups, "an int >= 1", lambda x: x >= 1)
  if sharding is not None and groups % size_of(sharding.mesh, sharding.spec[0]):
    sharding = NamedSharding(sharding.mesh, PartitionSpec())
  return init(num_pages, page_size, widths, rope_dtype=rope_dtype, sharding=sharding, padded=padded,
              dtype=given.dtype if dtype is None else dtype)


def append(cache: PagesLatent, latents: Array, mapping: Array) -> PagesLatent:
  """Writes one latent row per token.

  Args:
    cache: the pages.
    latents: float [T, latent + rope], rotary applied to the last part; in the dtype of the pages
      unless these have 8 bits.
    mapping: int32 [T] slots (see `caches.pages.slots`); tokens with a slot outside the pool are not
      written.

  Returns:
    The cache with the tokens written, sharded as before.

  Raises:
    ValueError: another kind of cache, shapes or dtypes that do not fit, or `mapping` is not
      integers [T].
    NotImplementedError: rows to be stored in 8 bits are differentiated.
  """
  _check_kind(cache)
  expected = f"[T, {cache.width}], latent {cache.widths.latent} + rope {cache.widths.rope}"
  given = checks.floating("latents", latents, 2, expected)
  checks.require(given.shape[1] == cache.width, "latents", checks.describe(given), expected)
  return _appended(cache, given, token_writes.int32_vector(
      "mapping", mapping, given.shape[0], "slots"))


@device_parts.one_program()
def _appended(cache: PagesLatent, rows: checks.Array, mapping: Array) -> PagesLatent:
  """Writes rows that fit the pages to the slots `mapping`."""
  rows, latent = jnp.asarray(rows), cache.widths.latent
  latent_layout.check_dtype(cache, rows)
  place = token_writes.places(cache, mapping)
  write = lambda held, new: device_pages.write(held, new, 0, *place)
  if cache.scales is None:
    return cache._replace(pages=write(cache.pages, latent_layout.pad(cache.pages, rows)))
  assert cache.rope is not None
  latents, scales = quantize.quantize(rows[:, :latent], cache.pages.dtype)
  rope = latent_layout.pad(cache.rope, rows[:, latent:].astype(cache.rope.dtype))
  return cache._replace(pages=write(cache.pages, latents), rope=write(cache.rope, rope),
                        scales=write(cache.scales, scales))


def to_dense(cache: PagesLatent, pages_metadata: PagesMetadata,
             dtype: DTypeLike | None = None) -> jax.Array:
  """Gathers the latent rows of all requests.

  Args:
    cache: the pages.
    pages_metadata: tables and lengths.
    dtype: of the result; None: that of the pages, float32 in 8 bits.

  Returns:
    [R, S, latent + rope] with S = max_pages * page_size; 0 past a request's last token and in pages
    outside the pool.

  Raises:
    ValueError: another kind of cache, or metadata of groups.
    NotImplementedError: rows in 8 bits are differentiated.
  """
  _check_kind(cache)
  if cache.scales is not None:
    dtype, cache = dtype or jnp.float32, quantize.constant(cache, "cache")
  pages_metadata = slot_mapping.of_one_pool(pages_metadata)
  requests, width = pages_metadata.page_tables.shape
  taken = layouts.take(cache, pages_metadata.page_tables.reshape(-1))
  rows = latent_layout.reader(taken, cache.pages.dtype if dtype is None else dtype)("key")
  live = slot_mapping.holds_tokens(pages_metadata, layouts.page_size(cache),
                                   layouts.num_pages(cache))
  return jnp.where(live[..., None], rows.reshape(requests, -1, cache.width), 0)


def from_dense(cache: PagesLatent, latents: Array, pages_metadata: PagesMetadata) -> PagesLatent:
  """Writes the first context_lens rows of every request into its pages.

  Args:
    cache: pages without a request are unchanged.
    latents: [R, S, latent + rope], S at most max_pages * page_size.
    pages_metadata: tables and lengths.

  Returns:
    The cache with the rows written.

  Raises:
    ValueError: metadata of groups, more rows than the tables' pages hold, or see `append`.
  """
  _check_kind(cache)
  given = checks.floating("latents", latents, 3, "[R, S, latent + rope]")
  mapping = slot_mapping.first_slots(pages_metadata, layouts.page_size(cache), "latents", given)
  rows, parts = jnp.asarray(given), parts_of(given)
  if parts is not None:
    rows = device_parts.match(rows, rows, (None, None, *parts.spec[2:]))
  return append(cache, rows.reshape(-1, rows.shape[2]), mapping)


def _check_kind(cache: object) -> None:
  checks.require(isinstance(cache, PagesLatent), "cache", type(cache).__name__,
                 "a PagesLatent; caches.pages has the functions of pages of keys and values")
