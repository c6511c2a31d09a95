# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks and dropout in a tile of a TPU kernel, [keys, queries]: which pairs count."""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attn_core.kernels.tpu.flash.schedule import LANES, Tiling
from attn_core.kernels.tpu.flash.tile_inputs import (
    KernelRefs, Reader, Ref, TileIndex, TileInputs)
from attn_core.masks import dropout, mask as mask_lib, tile as tile_lib
from attn_core.types import AttentionSpec, Operands


class MaskReader(NamedTuple):
  """Readers of the arrays of a mask; `visible` evaluates the mask on one tile."""

  structure: Any  # tree structure of the mask
  readers: tuple[Reader, ...]
  batch_index: Reader | None
  head_offset: Reader | None
  tiling: Tiling
  lists: tuple[Reader, ...]  # by which more is hidden, see `list_bits`

  def coordinates(self, refs: KernelRefs,
                  tile: TileIndex) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
    """Returns the mask with the tile's part of its arrays, and the coordinates of the tile."""
    tiling, shape = self.tiling, tile.shape
    broadcast = lambda x: jnp.broadcast_to(x, shape) if getattr(x, "ndim", 0) else x
    arrays = [broadcast(read(refs, tile)) for read in self.readers]
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + (
        tile.grid.key_block * tiling.block_kv + tile.keys.start)
    query = lax.broadcasted_iota(jnp.int32, shape, 1) + (
        tile.grid.query_block * tiling.block_q + tile.queries.start)
    batch = tile.grid.batch if self.batch_index is None else self.batch_index(refs, tile)
    head = tile.grid.head_group * tiling.query_heads + tile.head
    head = head if self.head_offset is None else head + self.head_offset(refs, tile)
    return (jax.tree.unflatten(self.structure, arrays),
            mask_lib.Coordinates(batch, head, query, key, query, key))

  def visible(self, refs: KernelRefs, tile: TileIndex, *, which: int) -> jax.Array:
    """Returns bool [keys, queries]; see `masks.tile.visible`."""
    mask, coordinates = self.coordinates(refs, tile)
    visible = jnp.broadcast_to(
        tile_lib.visible(mask, coordinates, which=which), tile.shape)
    for read in self.lists:
      visible = visible & read(refs, tile)
    if self.tiling.key_length % self.tiling.tile_kv:
      visible = visible & (coordinates.key_index < self.tiling.key_length)
    return visible


def mask_reader(inputs: TileInputs, operands: Operands, structure: Any,
                lists: tuple[Reader, ...]) -> MaskReader:
  """Adds the arrays of a mask to the inputs of a kernel; see `MaskReader.lists`."""
  add: dict[str, Callable[[jax.Array], Reader]] = {
      mask_lib.QUERY: inputs.add_per_query, mask_lib.KEY: inputs.add_per_key,
      mask_lib.BATCH: inputs.add_per_batch, mask_lib.DENSE: functools.partial(_add_dense, inputs)}
  mask = operands.mask
  readers = tuple(add[role](x) for x, role in zip(
      mask.arrays, mask_lib.structure_roles(structure)))
  optional = lambda x: None if x is None else inputs.add_per_batch(x)
  return MaskReader(structure, readers, optional(mask.batch_index), optional(mask.head_offset),
                    inputs.tiling, lists)


def _add_dense(inputs: TileInputs, x: jax.Array) -> Reader:
  """Adds bool or int32 [B or 1, H or 1, T or 1, S or 1]; see `TileInputs.add_per_pair`."""
  if x.dtype != bool:
    return inputs.add_per_pair(x)
  read = inputs.add_per_pair(x.astype(jnp.int8))
  return lambda refs, tile: read(refs, tile).astype(jnp.int32) != 0


class DropoutReader(NamedTuple):
  """Evaluates the dropout mask of a tile."""

  words: Callable[[KernelRefs], Ref] | None  # of the dropout key; None: no dropout
  num_keys: int  # B, or 1: all batch rows share a dropout key
  probability: float
  mask: MaskReader

  def drop(self, refs: KernelRefs, tile: TileIndex, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """Returns `weights` [keys, queries], of 16 or 32 bits, with zeros where they are dropped."""
    if self.words is None:
      return weights
    key_words = self.words(refs)
    b = tile.grid.batch if self.num_keys > 1 else 0
    words = [key_words[2 * b + i].astype(jnp.uint32) for i in range(2)]
    mask, coordinates = self.mask.coordinates(refs, tile)
    at = dropout.move_to_positions(mask, coordinates)
    if at is coordinates:
      bits = self._bits(words, at, tile)
      least = dropout.least_kept(self.probability)
      return tuple(
          jnp.where(bits >= jnp.int16(least) if x.dtype.itemsize == 2
                    else bits.astype(jnp.int32) >= least, x, jnp.zeros_like(x)) for x in weights)
    keep = dropout.keep_mask(words, at, self.probability)
    return tuple(jnp.where(keep, x, jnp.zeros_like(x)) for x in weights)

  def _bits(self, words: list[jax.Array], at: mask_lib.Coordinates, tile: TileIndex) -> jax.Array:
    """Returns random bits of a tile whose positions are those of its tokens, int16.

    Two keys of a pair are one word of 16-bit numbers in vector memory: they are hashed at once.
    """
    (keys, queries), tiling = tile.shape, self.mask.tiling
    row = dropout.row_numbers(words, at._replace(query_position=at.query_position[:1]))
    first = (tile.grid.key_block * tiling.block_kv + tile.keys.start) >> 1
    pair = dropout.pair_numbers(
        (lax.broadcasted_iota(jnp.int32, (keys // 2, LANES), 0) + first).astype(jnp.uint32))
    pair = jnp.concatenate([pair] * (queries // LANES), 1)  # the same numbers along the lanes
    return pltpu.bitcast(dropout.pair_bits(row, pair), jnp.int16)

  @property
  def scale(self) -> float:
    """`dropout.kept_scale`; applied once to the sum that the weights enter."""
    return dropout.kept_scale(self.probability)


def dropout_reader(inputs: TileInputs, operands: Operands, spec: AttentionSpec,
                   mask: MaskReader) -> DropoutReader:
  """Adds the dropout key to the inputs of a kernel, if the spec asks for dropout."""
  words = operands.dropout_key
  if not spec.dropout_prob or words is None:
    return DropoutReader(None, 1, 0.0, mask)
  in_scalar_memory = inputs.add_scalars(lax.bitcast_convert_type(words, jnp.int32).reshape(-1))
  return DropoutReader(in_scalar_memory, words.shape[0], spec.dropout_prob, mask)
