# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pools of pages: their creation, and functions of whole pages on each device of a mesh.

Explicit mesh axes may shard the pages of the pool and the heads. See `caches.device_parts`.

Shapes: P pages of the pool, num_tokens tokens.
"""

from collections.abc import Callable
import functools
from typing import TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike
import jax.numpy as jnp

from attn_core import array_axes, checks
from attn_core.array_axes import Entry, axes_of, size_of
from attn_core.caches import device_parts, quantize
from attn_core.caches.device_parts import Sharding
from attn_core.caches.paged import latent_layout
from attn_core.caches.paged.layouts import (PAGES, Heads, Pages, PagesT, PagesV1, PagesV2,
                                            PagesV3, Widths, heads_of, packing)
from attn_core.caches.paged.rows import interleave
from attn_core.types import cdiv

Tree = TypeVar("Tree")


def init(layout: type[PagesT], num_pages: int, page_size: int, heads: tuple[int, ...],
         dtype: DTypeLike = jnp.bfloat16, scales: str | None = None, *,
         sharding: Sharding | None = None) -> PagesT:
  """Creates a pool of empty pages.

  Args:
    layout: PagesV1, PagesV2 or PagesV3.
    num_pages: P.
    page_size: tokens of a page.
    heads: Heads(K, D, E), or as in every cache (K, D), or (K, D, E) if values have another width;
      PagesV2 and PagesV3 pad the narrower of keys and values.
    dtype: of the pages; int8, float8_e4m3fn and int4 need scales.
    scales: "token": one per token and head; "tensor": one for all keys and one for all values;
      "group", with int4 only: one for every 32 columns per token and head; None: none.
    sharding: of `pages` [P, page_size, rows, ...], or of `key_pages` [K, P, page_size, D] in
      PagesV1: a NamedSharding, or a PartitionSpec over the mesh of `jax.set_mesh`. It may shard
      the pages and the heads; each device creates its own part only, and writes keep the sharding.
      None: not sharded.

  Returns:
    A cache of that layout, all zeros.

  Raises:
    ValueError: a size is not an int >= 1, `heads` is none of these, the layout or kind of scales is
      unknown, a dtype of one byte has no scales or int4 has others than "group", the dtype is not
      supported, a width is odd in a PagesV1 of int4, or the sharding does not fit.
  """
  checks.require(layout in PAGES, "layout", repr(layout), "PagesV1, PagesV2 or PagesV3; "
                 "caches.latent_pages.init makes a PagesLatent")
  heads = checked_heads(heads)
  dtype = checks.dtype("dtype", dtype, "16 or 32 bits, int8, float8_e4m3fn or int4")
  checks.one_of("scales", scales, (None, "token", "tensor", "group"))
  for name, size in (("num_pages", num_pages), ("page_size", page_size), *heads._asdict().items()):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  size, name = jnp.dtype(dtype).itemsize, jnp.dtype(dtype).name
  checks.require(name in quantize.LIMITS or size > 1 and (size <= 4 or layout is not PagesV3),
                 "dtype", name, "16 or 32 bits (64 except for PagesV3), int8, float8_e4m3fn or "
                 "int4")
  kinds = "'group'" if name == "int4" else "'token' or 'tensor'"
  checks.require(scales is not None or size > 1, "scales", f"None with pages of {name}",
                 f"{kinds}: quantized pages cannot be read without their scales")
  checks.require((scales == "group") == (name == "int4"), "scales", f"{scales!r} with pages of "
                 f"{name}", "'group' with pages of int4, 'token' or 'tensor' with those of 8 bits")
  of_token = (num_pages, page_size, heads.key_heads)
  if layout is PagesV1:
    shape: tuple[int, ...] = (heads.key_heads, num_pages, page_size,
                              quantize.stored_width(heads.key_width, dtype))
  else:
    rows, packed = (1 if name == "int4" else 2) * heads.key_heads, packing(dtype)
    width, widths = max(heads[1:]), widths_of(heads)
    shape = (num_pages, page_size, rows, width) if layout is PagesV2 else (
        num_pages, page_size, cdiv(rows, packed), packed, latent_layout.padded_width(width))
  whole, of_scales = _shardings(layout, sharding, shape, of_token)
  zeros = lambda shape: device_parts.full(shape, 0, quantize.stored_dtype(dtype), whole)
  def ones(width: int) -> jax.Array | None:
    if scales in (None, "tensor"):
      return None if scales is None else device_parts.full((), 1, jnp.float32, None)
    shape = quantize.scale_shape(of_token, width, dtype)
    return device_parts.full(shape, 1, jnp.float32, of_scales)
  of_heads = ones(heads.key_width), ones(heads.value_width)
  found: Pages
  if layout is PagesV1:
    found = PagesV1(zeros(shape), zeros((
        *shape[:3], quantize.stored_width(heads.value_width, dtype))), *of_heads)
  else:
    found = PagesV2(zeros(shape), *of_heads, widths) if layout is PagesV2 else PagesV3(
        zeros(shape), *of_heads)
  assert isinstance(found, layout)
  return found


def init_like(layout: type[PagesT], like: jax.Array | jax.ShapeDtypeStruct, num_pages: int,
              page_size: int, heads: tuple[int, ...] | None = None, *,
              dtype: DTypeLike | None = None, scales: str | None = None, groups: int = 1) -> PagesT:
  """Creates a pool of empty pages for the tokens of a query or key, sharded as they are.

  >>> import jax.numpy as jnp
  >>> from attn_core.caches import pages
  >>> query = jnp.ones((8, 4, 16))
  >>> pages.init_like(pages.PagesV2, query, 32, 4, heads=pages.Heads(2, 16, 16)).pages.shape
  (32, 4, 4, 16)

  Args:
    layout: see `init`.
    like: [T, K, D] or [T, H, D]. Mesh axes that shard its heads shard those of the pages, if they
      divide the key heads. During tracing, shardings over axes of type Auto are not known.
    num_pages: P.
    page_size: tokens of a page.
    heads: see `init`; None: those of `like`, which is a key then.
    dtype: of the pages; None: that of `like`.
    scales: see `init`.
    groups: number of groups of requests (`caches.groups`); mesh axes that shard the tokens of
      `like` and divide it shard the pages. 1: pages are not sharded by them.

  Returns:
    A cache of that layout, all zeros.

  Raises:
    ValueError: `like` does not have three dimensions, `groups` is not an int >= 1, or see `init`.
  """
  expected = "an array [T, K, D] or its jax.ShapeDtypeStruct"
  given = like if isinstance(like, jax.ShapeDtypeStruct) else checks.array("like", like, expected)
  checks.require(len(given.shape) == 3, "like", checks.describe(given), expected)
  checks.integer("groups", groups, "an int >= 1", lambda x: x >= 1)
  _, key_heads, width = given.shape
  heads = checked_heads((key_heads, width) if heads is None else heads)
  dtype = given.dtype if dtype is None else dtype
  made = functools.partial(init, layout, num_pages, page_size, heads, dtype, scales)
  sharding = device_parts.sharding_of(given)
  if sharding is None:
    return made()
  rows = jax.eval_shape(made)
  tokens, of_heads, _ = device_parts.entries(sharding, 3)
  pool = tokens if groups % size_of(sharding.mesh, tokens) == 0 else None
  divides = divides_heads(rows, heads.key_heads, size_of(sharding.mesh, of_heads))
  of_heads = of_heads if divides else None
  spec = P(of_heads, pool) if layout is PagesV1 else P(pool, None, of_heads)
  return made(sharding=NamedSharding(sharding.mesh, spec))


def divides_heads(cache: Pages, key_heads: int, devices: int) -> bool:
  """Whether each device gets whole key heads, in separate rows of a page.

  Args:
    cache: any layout; shapes are enough.
    key_heads: K, without padding.
    devices: how many devices share the heads.
  """
  held = heads_of(cache).key_heads
  rows = cache.pages.shape[2] if isinstance(cache, PagesV3) else devices
  return devices == 1 or (key_heads % devices == 0 and held == key_heads and rows % devices == 0)


def checked_heads(heads: tuple[int, ...]) -> Heads:
  """Returns heads given as a Heads, (K, D) or (K, D, E); ValueError for anything else."""
  checks.require(isinstance(heads, tuple) and len(heads) in (2, 3), "heads", repr(heads),
                 "Heads(key heads K, key width D, value width E), (K, D) or (K, D, E)")
  return Heads(heads[0], heads[1], heads[-1])


def widths_of(heads: Heads) -> Widths | None:
  """Returns the widths that a PagesV2 remembers: those of keys and values that differ."""
  return None if heads.key_width == heads.value_width else Widths(*heads[1:])


def _shardings(layout: type, sharding: Sharding | None, shape: tuple[int, ...],
               of_token: tuple[int, ...]) -> tuple[NamedSharding | None, NamedSharding | None]:
  """Returns the shardings of the pages and of scales [P, page_size, K]."""
  letters = "[K, P, page_size, D]" if layout is PagesV1 else "[P, page_size, rows, ...]"
  whole = device_parts.named(sharding, letters, shape)
  if whole is None:
    return None, None
  order = (1, 2, 0) if layout is PagesV1 else (0, 1, 2)
  sharded = {n for n, entry in enumerate(whole.spec) if axes_of(entry)}
  checks.require(sharded <= {order[0], order[2]}, "sharding", repr(whole.spec),
                 f"axes for the pages and for the heads of {letters} only")
  of_scales = device_parts.of_dimensions(whole, order)
  return whole, device_parts.named(of_scales, "[P, page_size, K]", of_token)


def interleaved(cache: PagesV2 | PagesV3, key: jax.Array, value: jax.Array) -> jax.Array:
  """Returns new tokens as the pages hold them: interleaved, padded and packed.

  Args:
    cache: its pages are [P, page_size, rows, ...].
    key: [num_tokens, K, D], with pages of 4 bits int8.
    value: [num_tokens, K, E].

  Returns:
    [num_tokens, rows, ...], with heads sharded as in the pages where they divide.
  """
  heads = key.shape[1]
  pairs = quantize.is_packed(cache.pages.dtype)
  padding = (1 if pairs else 2) * (heads_of(cache).key_heads - heads)

  def local(key: jax.Array, value: jax.Array) -> jax.Array:
    rows = interleave(key, value)
    rows = quantize.pack(rows[:, ::2], rows[:, 1::2]) if pairs else rows
    rows = jnp.pad(rows, ((0, 0), (0, padding), (0, cache.pages.shape[-1] - rows.shape[-1])))
    return rows.reshape(rows.shape[0], -1, *cache.pages.shape[3:])

  parts = array_axes.parts_of(cache.pages, key, value)
  if parts is None:
    return local(key, value)
  spec = P(None, head_entry(cache, parts, heads))
  return parts.run(local, (key, value), (spec, spec), spec)


def head_entry(cache: Pages, parts: array_axes.Parts, heads: int, unit: int = 1) -> Entry:
  """Returns the mesh axes of the heads in the pages; None if they do not divide `heads`.

  Args:
    cache: any layout.
    parts: how its pages are sharded.
    heads: number of heads, without padding.
    unit: heads that stay together.
  """
  entry = parts.spec[0 if isinstance(cache, PagesV1) else 2]
  size = size_of(parts.mesh, entry)
  return entry if heads == heads_of(cache).key_heads and heads % (size * unit) == 0 else None


def specs_of(layout: type, pool: Entry, heads: Entry, scales: int | None,
             widths: Widths | None) -> Pages:
  """Returns the PartitionSpec of each array of a cache.

  Args:
    layout: PagesV1, PagesV2 or PagesV3.
    pool: the mesh axes of the pages.
    heads: those of the heads.
    scales: rank of the scales; None: no scales.
    widths: those of a PagesV2.
  """
  of_scales = None if scales is None else P(pool, None, heads) if scales else P()
  make: Callable[..., Pages] = layout
  if layout is PagesV1:
    return make(P(heads, pool), P(heads, pool), of_scales, of_scales)
  of_pages = P(pool, None, heads), of_scales, of_scales
  return make(*of_pages, widths) if layout is PagesV2 else make(*of_pages)


def scale_rank(cache: Pages) -> int | None:
  """Returns the rank of the scales of a cache; None if it has none."""
  return None if cache.key_scales is None else jnp.ndim(cache.key_scales)


def on_each_device(compute: Callable[[Pages, Heads], Tree], cache: Pages, heads: Heads,
                   specs: Callable[[Entry, Entry], object], *, keeps_pool: bool,
                   unit: int = 1) -> Tree:
  """Runs a function of whole pages on the pages and heads of each device.

  Args:
    compute: (cache, heads) -> a tree of arrays.
    cache: any layout.
    heads: those that `compute` reads.
    specs: (mesh axes of the pages, those of the heads) -> the specs of its results.
    keeps_pool: whether a device computes its own pages only; False: all of them.
    unit: heads that stay together.
  """
  parts = array_axes.parts_of(cache.key_pages if isinstance(cache, PagesV1) else cache.pages)
  if parts is None:
    return compute(cache, heads)
  entry = head_entry(cache, parts, heads.key_heads, unit)
  pool = parts.spec[1 if isinstance(cache, PagesV1) else 0] if keeps_pool else None
  size = size_of(parts.mesh, entry)
  own = heads._replace(key_heads=heads.key_heads // size)
  of_cache = specs_of(type(cache), pool, entry, scale_rank(cache),
                      cache.widths if isinstance(cache, PagesV2) else None)
  return parts.run(lambda cache: compute(cache, own), (cache,), (of_cache,),
                   specs(pool, entry))
