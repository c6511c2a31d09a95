"""Keys and values in a TPU's memory: how they lie, and how a block of them comes to vector memory.

Pages come by transfers of their own, live ones only. How a block is read is in `block`.

Letters: K key heads, D and E widths, n pages of a key block, C its tokens, r rows of a token (its
heads, or 2K of keys and values alternating), w words of a token.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core.types import cdiv

LANES = 128
SUBLANES = 8
PAIRED = 2 * SUBLANES  # tokens


class Pool(NamedTuple):
  """How keys and values lie; static and hashable.

  Arrays of tokens, 8-bit numbers as int8:
    pages together: one array [P, page, 2K, D], keys in even rows and values in odd ones;
    pages not together: two arrays [P, page, K, D or E];
    neither: two arrays [B, S, K, D or E], of which a page is `page` tokens of a row.
  Where heads are `apart`, they are in front of the tokens: [P, 2K, page, D], [K, P, page, D or E],
  [B, K, S, D or E]. And two arrays of scales of the rows' tokens, float32 [rows, K', S'], as XLA
  keeps them: K' a multiple of SUBLANES, S' one of C, which is one of LANES.
  """

  together: bool
  apart: bool
  key_heads: int
  widths: tuple[int, ...]  # of every array of tokens
  dtype: Any  # of the numbers
  page: int  # tokens
  block_pages: int
  row_tokens: int = 0  # S; 0: pages
  scales: str | None = None  # "token", "tensor", or None
  slots: int = 2  # blocks that are in vector memory: one is computed, the others are on their way

  @property
  def block(self) -> int:
    """C."""
    return self.page * self.block_pages

  @property
  def rows(self) -> int:
    return 2 * self.key_heads if self.together else self.key_heads

  @property
  def packing(self) -> int:
    """Numbers of a word; 1: each is kept in 32 bits of its own."""
    packing = 4 // jnp.dtype(self.dtype).itemsize
    return packing if self.rows % packing == 0 else 1

  @property
  def words(self) -> int:
    """w."""
    return self.rows // self.packing

  @property
  def paired(self) -> bool:
    """Whether two numbers of a head are put in one word as they are read."""
    return self.packing == 2 and not self.apart and self.block % PAIRED == 0

  @property
  def split(self) -> bool:
    """Whether even tokens come before odd ones in the words, of every PAIRED tokens.

    Memory gives up to eight words at a stride, those of neighbours; pairs are of one even token
    and one odd one. Where a token's words are whole tiles, to lay them so costs nothing.
    """
    return self.paired and self.words % SUBLANES == 0

  def buffers(self) -> list:
    """Shapes of the arrays that blocks are transferred to, `slots` of each, and of the scales'."""
    shape = lambda width: (self.rows, self.page, width) if self.apart else (
        self.page, self.rows, width)
    stored = jnp.int8 if jnp.dtype(self.dtype).itemsize == 1 else self.dtype
    found = [((self.slots, self.block_pages, *shape(width)), stored) for width in self.widths]
    if self.scales == "token":
      found += [((self.slots, self.scale_rows, self.block), jnp.float32)] * 2
    return found

  @property
  def scale_rows(self) -> int:
    """K'."""
    return cdiv(self.key_heads, SUBLANES) * SUBLANES

  def spread(self) -> list:
    """Shapes of the arrays that hold a block's words, and its scales turned round."""
    dtype = jnp.uint32 if self.packing > 1 else jnp.float32
    found = [] if self.apart else [
        ((cdiv(width, LANES), self.block * self.words, min(width, LANES)), dtype)
        for width in self.widths]
    if self.scales == "token":
      found += [((self.block, self.scale_rows), jnp.float32)] * 2
    return found

  def bytes(self) -> int:
    """Vector memory of buffers and words."""
    def padded(shape, dtype):
      size = jnp.dtype(dtype).itemsize
      rows = cdiv(shape[-2], 4 // size) * (4 // size)
      return int(np.prod(shape[:-2])) * rows * cdiv(shape[-1], LANES) * LANES * size
    return sum(padded(*x) for x in (*self.buffers(), *self.spread()))


def heads_apart(rows: int, dtype) -> bool:
  """Whether XLA keeps [..., tokens, rows, W] with the rows in front of the tokens.

  It does where they do not fill its tiles; to pass them in that order copies nothing.
  """
  packing = 4 // jnp.dtype(dtype).itemsize
  return rows % SUBLANES != 0 and (rows % packing != 0 or rows // packing not in (1, 2, 4))


class Live(NamedTuple):
  """The tokens of a row of pages that may be read: start..stop - 1; anything else may be NaN."""

  start: Any
  stop: Any

  def pages(self, pool: Pool, number):
    """(first, end) of a block's pages, among these, that hold any of them."""
    begin = number * pool.block_pages
    first = jnp.clip(lax.div(self.start, jnp.int32(pool.page)) - begin, 0, pool.block_pages)
    end = lax.div(self.stop + (pool.page - 1), jnp.int32(pool.page)) - begin
    return first, jnp.clip(end, 0, pool.block_pages)

  def tokens(self, pool: Pool, number):
    """(first, end) of a block's tokens that may be read, among these."""
    begin = number * pool.block
    return self.start - begin, self.stop - begin


class Way(NamedTuple):
  """From where to where some transfers go."""

  sources: Any  # arrays
  buffers: Any  # one for each, of so many slots
  arrived: Any  # a semaphore for every slot
  slot: Any  # of the buffers


def transfer_blocks(pool: Pool, way: Way, row, number, *, start: bool):
  """Starts the transfers of a block's tokens of arrays [rows, r, S'], or awaits them."""
  sources, buffers, arrived, slot = way
  for source, buffer in zip(sources, buffers, strict=True):
    tokens = pl.ds(pl.multiple_of(number * pool.block, pool.block), pool.block)
    copy = pltpu.make_async_copy(source.at[row, :, tokens], buffer.at[slot], arrived.at[slot])
    (copy.start if start else copy.wait)()


def transfer(pool: Pool, way: Way, live: Live, number, locate, *, start: bool):
  """Starts the transfers of a block's live pages to a slot of the buffers, or awaits them.

  Args:
    way: of the arrays of tokens; see `Pool`.
    live: what may be read.
    number: of the block.
    locate: number of a page in its row -> its number in the pool, or that of the row of tokens.
  """
  sources, buffers, arrived, slot = way
  first, end = live.pages(pool, number)
  whole, rest = (first == 0) & (end == pool.block_pages), pool.row_tokens % pool.page
  if rest:
    whole = whole & ((number + 1) * pool.block <= pool.row_tokens)

  def copies(place, tokens):
    page = number * pool.block_pages + place
    where = locate(page)
    for source, buffer in zip(sources, buffers, strict=True):
      apart, target = pool.apart, buffer.at[slot, place]
      if pool.row_tokens:
        part = pl.ds(pl.multiple_of(page * pool.page, pool.page), tokens)
        source = source.at[where, :, part] if apart else source.at[where, part]
        if tokens < pool.page:
          target = target.at[:, pl.ds(0, tokens)] if apart else target.at[pl.ds(0, tokens)]
      else:
        source = source.at[:, where] if apart and not pool.together else source.at[where]
      copy = pltpu.make_async_copy(source, target, arrived.at[slot])
      (copy.start if start else copy.wait)()

  @pl.when(whole)
  def _():
    if start:  # one piece of code: pages do not wait for each other's addresses
      for place in range(pool.block_pages):
        copies(place, pool.page)
    else:  # semaphores count bytes: what came page by page may be awaited at once
      for buffer in buffers:
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

  @pl.loop(first, jnp.where(whole, first, end))
  def _(place):
    if not rest:
      copies(place, pool.page)
      return
    full = (number * pool.block_pages + place + 1) * pool.page <= pool.row_tokens
    pl.when(full)(lambda: copies(place, pool.page))
    pl.when(jnp.logical_not(full))(lambda: copies(place, rest))
