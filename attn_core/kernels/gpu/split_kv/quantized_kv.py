"""Keys and values in 8 bits, on their way from shared memory to products of 16 bits.

  scores = key scale * (key . query),   output = sum over keys of (weight * value scale) * value

Keys are the left operand of their product, which may come from registers, where they are converted.
So could values, were they not to be turned round, which the hardware does with numbers of 16 bits
in shared memory only: they are converted there. A scale multiplies what a key's row has of the
products, so no dequantised number is rounded: each in 8 bits is one in bfloat16.

Letters: C keys of a block.
"""

import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.xla import tile_ops as steps

QUAD = 4  # heads whose scales come together: TMA copies no less than 16 bytes
ALONE_TOKENS = 32  # of a head by itself, in any place in shared memory that TMA copies to
DTYPE = "bfloat16"  # of queries, and of products
WIDTH = 32  # widths are multiples: bytes that shared memory is swizzled over, at least
PIECE = 64  # columns
TOKEN, TENSOR = "token", "tensor"


class Small(NamedTuple):
  """What is static of keys and values in 8 bits; hashable."""

  dtype: str
  scales: str  # TOKEN: one per token and head; TENSOR: one for all keys and one for all values
  alone: bool  # whether there is one key head, whose scales lie side by side

  def scale_shapes(self, tokens: int) -> list[tuple[int, ...]]:
    """The shape of the scales of some tokens in shared memory; none: they are not there."""
    if self.scales == TENSOR:
      return []
    return [(tokens,) if self.alone else (tokens, QUAD)]

  def scale_bytes(self, tokens: int) -> int:
    """Bytes of these."""
    return sum(4 * math.prod(shape) for shape in self.scale_shapes(tokens))

  @property
  def floats(self) -> bool:
    """Whether they are floating-point numbers, which may be something else than finite."""
    return jnp.issubdtype(self.dtype, jnp.floating)


class Scales(NamedTuple):
  """Where a running kernel reads scales."""

  small: Small
  arrays: tuple  # of keys and of values: `parts.Scratch.scales`, or [1] in global memory
  head: Any  # int32

  def rows(self, values: bool, slot):
    """float32 [C] of the tokens in a stage; None: see `number`."""
    if self.small.scales == TENSOR:
      return None
    stage = self.arrays[values].at[slot]
    if not self.small.alone:
      stage = stage.at[:, lax.rem(self.head, mosaic.int32(QUAD))]
    return mosaic.load(stage, mosaic.ROWS)

  def number(self, values: bool):
    """float32, for all tokens; None: see `rows`."""
    return self.arrays[values][0] if self.small.scales == TENSOR else None


def packed(small: Small, scales):
  """Scales [..., tokens, K] as TMA copies them: K a multiple of QUAD, or not an axis."""
  return scales[..., 0] if small.alone else steps.pad_axis(
      scales, scales.ndim - 1, -scales.shape[-1] % QUAD)


def quad(small: Small, scales, where: tuple, head):
  """What `Small.scale_shapes` has of some tokens.

  Args:
    scales: reference to what `packed` returned, in global memory.
    where: indices of its axes, the tokens' as the last one.
    head: int32.
  """
  if small.alone:
    return scales.at[where]
  first = head - lax.rem(head, mosaic.int32(QUAD))
  return scales.at[(*where, pl.ds(first, QUAD))]


def load(ref, width: int, dtype):
  """Yields numbers in 8 bits as those of `dtype`, exactly, in registers as products lie there.

  Args:
    ref: a stage [C, W].
    width: columns that are copied.
    dtype: of the result.

  Yields:
    (some columns, [C, columns]); few at a time, for the sake of registers.
  """
  columns = mosaic.tile_columns(width, ref.dtype)
  for first in range(0, width, columns):
    x = mosaic.load(ref.at[:, pl.ds(first, columns)], mosaic.TILE)
    if jnp.issubdtype(ref.dtype, jnp.integer):
      yield pl.ds(first, columns), x.astype(dtype)
      continue
    for start in range(0, columns, PIECE):  # there is no shorter way for them than by float32
      piece = x[:, start:start + PIECE].astype(jnp.float32).astype(dtype)
      yield pl.ds(first + start, piece.shape[1]), piece
