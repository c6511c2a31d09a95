# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes of a few new rows of 8 bits to a cache on a TPU, by whole tiles.

XLA before libtpu 0.0.52 scatters rows of 8 bits in another layout than that in which a program gets
and kernels read them: it copies the whole cache there and back (libtpu 0.0.50.1, v6e and tpu7x). An
update of whole tiles of 32 tokens copies nothing.
"""

import functools
from importlib import metadata
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from attn_core.types import cdiv

LANES = 128  # numbers of a row of a tile
TILE = 32  # rows of 8 bits of a tile
MOST_TOKENS = 64  # of a row; more are a prefill, whose work exceeds that of a copy
_FIRST_WITHOUT_COPY = (0, 0, 52)  # version of libtpu


def scatter(array: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
  """Writes `new` [B, T, ...] to slots int32 [B, T] of `array` [B, S, ...]; drops slots past S."""
  return jax.vmap(lambda row, x, index: row.at[index].set(x, mode="drop"))(array, new, slots)


def write(array: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
  """Returns `scatter` of tokens of which each is one slot after the one before, or dropped.

  Several devices of a partitioner, and platforms other than a TPU, run `scatter`.
  """
  tokens, slot_count = new.shape[1], array.shape[1]
  if not (array.dtype.itemsize == 1 and array.ndim == 4 and array.shape[2] == 1
          and array.shape[3] % LANES == 0 and array.shape[3] > LANES and slot_count % TILE == 0
          and tokens <= MOST_TOKENS and _tiles(tokens) * TILE <= slot_count):
    return scatter(array, new, slots)
  varying = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in (array, new, slots)]
  if len(set(varying)) > 1:  # parts of a shard_map; the result would need a type of its own
    return scatter(array, new, slots)
  return _write_p.bind(array, new, slots)


def _tiles(tokens: int) -> int:
  """Returns the tiles that consecutive tokens are in, at most."""
  return cdiv(tokens - 1, TILE) + 1


def by_tiles(array: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
  """Implements `write` by reading, changing and writing the tiles of each row of the batch."""
  (batch, slot_count, _, width), tokens = array.shape, new.shape[1]
  count = _tiles(tokens)
  rows = count * TILE
  tiles = array.reshape(batch, slot_count // TILE, TILE, width)
  padded = jnp.pad(new[:, :, 0], ((0, 0), (rows, rows), (0, 0)))
  token = jnp.arange(tokens, dtype=jnp.int32)
  kept = slots < slot_count
  # The slot of token 0, which may be outside, and the range of the tokens that are written.
  base = jnp.min(jnp.where(kept, slots - token, slot_count), 1)
  begin = jnp.argmax(kept, 1).astype(jnp.int32)
  end = begin + kept.sum(1, dtype=jnp.int32)
  tile = jnp.clip(base // TILE, 0, slot_count // TILE - count)

  def step(row: jax.Array, tiles: jax.Array) -> jax.Array:
    zero = jnp.int32(0)
    place = (row, tile[row], zero, zero)
    first = tile[row] * TILE - base[row]  # the token of the first slot of these tiles
    at = first + jnp.arange(rows, dtype=jnp.int32).reshape(1, count, TILE, 1)
    written = lax.dynamic_slice(padded, (row, first + rows, zero), (1, rows, width))
    old = lax.dynamic_slice(tiles, place, (1, count, TILE, width))
    merged = jnp.where((at >= begin[row]) & (at < end[row]), written.reshape(old.shape), old)
    return lax.dynamic_update_slice(tiles, merged, place)

  return lax.fori_loop(jnp.int32(0), jnp.int32(batch), step, tiles).reshape(array.shape)


@functools.cache
def _copies() -> bool:
  """Returns True if this XLA copies what it scatters to."""
  try:
    version = metadata.version("libtpu")
  except metadata.PackageNotFoundError:
    return False
  return tuple(int(x) for x in version.split(".")[:3] if x.isdigit()) < _FIRST_WITHOUT_COPY


def _lower_tpu(ctx: Any, *arguments: Any) -> Any:
  axes = ctx.module_context.axis_context
  sizes = dict(axes.mesh.shape) if hasattr(axes, "mesh") else {}  # in a shard_map
  partitioned = [size for name, size in sizes.items() if name not in axes.manual_axes]
  several = getattr(axes, "num_devices", 1) != 1 or any(size > 1 for size in partitioned)
  compute = by_tiles if _copies() and not several else scatter
  return mlir.lower_fun(compute, multiple_results=False)(ctx, *arguments)


def _jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  array, new = (ad.instantiate_zeros(x) for x in tangents[:2])
  return write(*primals), scatter(array, new, primals[2])


def _batch(arguments: Any, dims: Any) -> tuple[jax.Array, int]:
  return jax.vmap(scatter, dims)(*arguments), 0


_write_p = Primitive("attn_core_write_tiles")
_write_p.def_impl(jax.jit(scatter))
_write_p.def_abstract_eval(lambda array, new, slots: array)
ad.primitive_jvps[_write_p] = _jvp
batching.primitive_batchers[_write_p] = _batch
mlir.register_lowering(_write_p, mlir.lower_fun(scatter, multiple_results=False))
mlir.register_lowering(_write_p, _lower_tpu, platform="tpu")
