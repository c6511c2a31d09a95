# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of int8 and fp8 keys and values in shared memory to the 16 bits of the products.

  qk = key scale * (key . query),   out = sum over keys of (p * value scale) * value

Keys are the left operand of their product, which may come from registers, where they are converted.
Values are transposed for theirs, which the hardware does only with 16-bit numbers in shared memory:
they are converted there. A scale multiplies the row of a key in the products, so dequantized
numbers are never rounded: each 8-bit number is exact in bfloat16.

Scales of a single head are consecutive, and copied 32 at a time at least. Pages of fewer tokens are
copied with what follows them, each to a place of its own in shared memory: the piece that is n-th
of its block begins at 64 * (n % c) + 32 * (n // c), where c pieces have 32 tokens. So the scales of
every c-th piece are as far apart as their tokens, and c loads of a whole block, each from its own
place, have all of them.
"""

import functools
import math
from typing import Any, Iterator, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.mosaic import Ref

SCALE_HEADS = 4  # heads whose scales are copied together: TMA copies at least 16 bytes
SINGLE_HEAD_TOKENS = 32  # Mosaic GPU copies multiples of 128 bytes: so many scales of a single head
DTYPE = "bfloat16"  # of queries, and of products
WIDTH_MULTIPLE = 32  # of D and E: shared memory is swizzled over at least 32 bytes
CONVERTED_COLUMNS = 64  # columns converted at a time
LATENT_COLUMNS = 64  # the same of latents, whose width is a multiple of it
TOKEN, TENSOR = "token", "tensor"


class QuantizedKV(NamedTuple):
  """Static description of quantized keys and values; hashable."""

  dtype: str
  scale_kind: str  # TOKEN: one scale per token and head; TENSOR: one for all keys, one for values
  single_head: bool  # whether there is one key head, whose scales are contiguous in memory
  piece: int = SINGLE_HEAD_TOKENS  # consecutive tokens of a block, a power of two

  def scale_shapes(self, tokens: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the scales of some tokens in shared memory; [] if not held there."""
    if self.scale_kind == TENSOR:
      return []
    return [(tokens * self.loads,) if self.single_head else (tokens, SCALE_HEADS)]

  def scale_bytes(self, tokens: int) -> int:
    """Returns the bytes of the scales of some tokens in shared memory."""
    return sum(4 * math.prod(shape) for shape in self.scale_shapes(tokens))

  @property
  def loads(self) -> int:
    """The loads of a block's scales: several where its pieces have fewer than a copy."""
    copied = self.scale_kind == TOKEN and self.single_head
    return max(1, SINGLE_HEAD_TOKENS // self.piece) if copied else 1

  @property
  def is_floating(self) -> bool:
    """Whether the numbers are floating-point, and may be non-finite."""
    return jnp.issubdtype(self.dtype, jnp.floating)


class ScaleReader(NamedTuple):
  """Reads scales in a kernel."""

  quantized: QuantizedKV
  refs: tuple[Ref, ...]  # of keys and of values: `Scratch.scales_smem`, or [1] in global memory
  head: Any  # int32, the key head

  def per_token(self, values: bool, slot: jax.Array) -> jax.Array | None:
    """Returns float32 [block_kv] of the tokens in a stage; None with one scale per tensor."""
    if self.quantized.scale_kind == TENSOR:
      return None
    stage = self.refs[values].at[slot]
    if not self.quantized.single_head:
      stage = stage.at[:, lax.rem(self.head, mosaic.int32(SCALE_HEADS))]
    number, piece = self.quantized.loads, self.quantized.piece
    if number == 1:
      return mosaic.load(stage, mosaic.ROW_LAYOUT)
    tokens = stage.shape[0] // number
    found = [mosaic.load(stage.at[pl.ds(n * (tokens - piece), tokens)], mosaic.ROW_LAYOUT)
             for n in range(number)]
    token = plgpu.broadcasted_iota(jnp.int32, (tokens,), 0, layout=mosaic.ROW_LAYOUT)
    return functools.reduce(
        lambda x, n: jnp.where((token & (number - 1) * piece) == n * piece, found[n], x),
        range(1, number), found[0])

  def per_tensor(self, values: bool) -> jax.Array | None:
    """Returns the float32 scale of all tokens; None with one scale per token."""
    return self.refs[values][0] if self.quantized.scale_kind == TENSOR else None


def pack_scales(quantized: QuantizedKV, scales: jax.Array) -> jax.Array:
  """Returns scales [..., tokens, K] for TMA: K padded to SCALE_HEADS, or removed if single.

  Where a copy is longer than a piece, those of a single head are one row.
  """
  if quantized.loads > 1:
    scales = scales.reshape(-1)
    return dense_operands.pad_axis(scales, 0, max(0, SINGLE_HEAD_TOKENS - scales.shape[0]))
  return scales[..., 0] if quantized.single_head else dense_operands.pad_axis(
      scales, scales.ndim - 1, -scales.shape[-1] % SCALE_HEADS)


def page_copy(quantized: QuantizedKV, refs: tuple[Ref, Ref], place: tuple[jax.Array, jax.Array],
              piece: tuple[int, int, int], head: jax.Array) -> tuple[Ref, Ref]:
  """Returns the source and the destination of the copy of a piece's scales.

  Args:
    quantized: static description.
    refs: what `pack_scales` returned, in global memory, and a stage.
    place: int32, the page and the first of its tokens.
    piece: tokens of a page, tokens of a piece, and its number in the block of keys.
    head: int32, the key head.
  """
  (scales, stage), (page, token), (page_size, tokens, number) = refs, place, piece
  if quantized.loads == 1:
    source = slice_scales(quantized, scales, (page, pl.ds(token, tokens)), head)
    return source, stage.at[pl.ds(number * tokens, tokens)]
  # Behind the last page the copy has zeros.
  source = scales.at[pl.ds(page * mosaic.int32(page_size) + token, SINGLE_HEAD_TOKENS)]
  row, column = divmod(number, quantized.loads)
  start = column * (stage.shape[0] // quantized.loads) + row * SINGLE_HEAD_TOKENS
  return source, stage.at[pl.ds(start, SINGLE_HEAD_TOKENS)]


def slice_scales(quantized: QuantizedKV, scales: Ref, index: tuple[Any, ...],
                 head: jax.Array) -> Ref:
  """Returns a reference to the scales of some tokens, as `QuantizedKV.scale_shapes` has them.

  Args:
    quantized: static description.
    scales: reference to what `pack_scales` returned, in global memory.
    index: indices of its leading axes, the tokens' as the last one.
    head: int32, the key head.
  """
  if quantized.single_head:
    return scales.at[index]
  first = head - lax.rem(head, mosaic.int32(SCALE_HEADS))
  return scales.at[(*index, pl.ds(first, SCALE_HEADS))]


def load_converted(ref: Ref, width: int, dtype: DTypeLike) -> Iterator[tuple[Any, jax.Array]]:
  """Yields quantized numbers converted exactly to `dtype`, in the register layout of products.

  Args:
    ref: a stage [block_kv, columns].
    width: number of columns that are copied.
    dtype: of the result.

  Yields:
    (slice of columns, [block_kv, columns of the slice]); few at a time, to save registers.
  """
  columns = mosaic.tile_columns(width, ref.dtype)
  for first in range(0, width, columns):
    for start, x in load_converted_at(ref, first, columns, dtype):
      yield pl.ds(start, x.shape[1]), x


def load_converted_at(ref: Ref, first: jax.Array | int, columns: int,
                      dtype: DTypeLike) -> Iterator[tuple[jax.Array | int, jax.Array]]:
  """Yields (column, [block_kv, some columns]) of one tile of columns; see `load_converted`.

  Args:
    ref: a stage [block_kv, width].
    first: the first column of the tile.
    columns: those of a tile, `mosaic.tile_columns`.
    dtype: of the result.
  """
  x = mosaic.load(ref.at[:, pl.ds(first, columns)], mosaic.TILE_LAYOUT)
  if jnp.issubdtype(ref.dtype, jnp.integer):
    yield first, x.astype(dtype)
    return
  for start in range(0, columns, CONVERTED_COLUMNS):  # fp8 is converted by way of float32
    yield first + start, x[:, start:start + CONVERTED_COLUMNS].astype(jnp.float32).astype(dtype)
