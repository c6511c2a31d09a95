"""The grid of a TPU kernel: only blocks that have something to do, as lists in scalar memory.

A step works on one block of queries and one block of keys. Blocks are cut into
tiles; of every block the schedule says which tiles are hidden, visible or in
between, so that a block on the diagonal costs what it shows. Every row of blocks
has at least one step, which writes its result even where nothing is visible.

Letters: B batch, K key heads, N steps, nr and nc numbers of row and column blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import block_map as blocks
from attn_core.types import cdiv

LANES = 128
FIRST, LAST = 1, 2  # bits of `flags`
MOST_PATTERNS = 6
MOST_BYTES = 3 * 2**18  # of the 1 MiB of scalar memory


def round_up(length: int, multiple: int) -> int:
  return cdiv(length, multiple) * multiple


class Cut(NamedTuple):
  """How queries and keys are cut, in tokens. Tiles divide blocks, blocks are whole."""

  queries: int  # T
  keys: int  # S
  block_q: int
  block_kv: int
  tile_q: int
  tile_kv: int
  group: int = 1  # query heads of a key head
  heads: int = 1  # key heads of a step

  @property
  def query_heads(self) -> int:
    """Of a step."""
    return self.heads * self.group

  @property
  def padded_queries(self) -> int:
    return round_up(self.queries, self.block_q)

  @property
  def padded_keys(self) -> int:
    return round_up(self.keys, self.block_kv)

  @property
  def tiles_q(self) -> int:
    return self.block_q // self.tile_q

  @property
  def tiles_kv(self) -> int:
    return self.block_kv // self.tile_kv


class Schedule(NamedTuple):
  """What every step does: int32 [lines, N]; see `Lines`."""

  rows: Any  # the row block
  columns: Any  # the column block
  kinds: Any  # two bits for every tile: EMPTY, PARTIAL or FULL of `masks.blocks`
  flags: Any  # FIRST and LAST step of its row block

  def patterns(self, cut: Cut) -> tuple[tuple[int, ...], bool]:
    """The kinds for which a kernel has code of its own, and whether there are no others.

    All tiles FULL, where that occurs, and the most frequent others; where a mask's arrays are
    traced, only the former.
    """
    whole = sum(blocks.FULL << (2 * n) for n in range(cut.tiles_q * cut.tiles_kv))
    if not isinstance(self.kinds, np.ndarray):
      return (whole,), False
    found, counts = np.unique(self.kinds.view(np.uint32), return_counts=True)
    frequent = [int(found[n]) for n in np.argsort(-counts, kind="stable") if found[n]]
    patterns = tuple(dict.fromkeys([whole, *frequent] if whole in frequent else frequent))
    return patterns[:MOST_PATTERNS], len(patterns) <= MOST_PATTERNS

  @property
  def single(self) -> bool:
    """Whether every step is all there is of its row, and all steps show the same."""
    return (isinstance(self.kinds, np.ndarray) and bool((self.flags == FIRST | LAST).all())
            and bool((self.kinds == self.kinds.flat[0]).all()) and bool(self.kinds.flat[0]))


class Lines(NamedTuple):
  """Which lines of a schedule belong to a batch row and the heads of a step."""

  batches: int
  heads: int

  def of(self, batch, head):
    return (batch * self.heads if self.batches > 1 else 0) + (head if self.heads > 1 else 0)


def build(mask, cut: Cut, *, by_keys: bool,
          query_blocks: tuple[int, int] | None = None) -> tuple[Schedule, Lines]:
  """The steps of a mask.

  Args:
    mask: any mask; its arrays may be traced.
    cut: blocks and tiles; at most 16 tiles a block.
    by_keys: rows are blocks of keys (the backward) instead of queries.
    query_blocks: only the blocks [first, end) of queries, counted from `first`; None: all.

  Returns:
    (the schedule, its lines); arrays of numpy when the mask holds none.
  """
  kinds = blocks.block_kinds(
      mask, blocks.Sizes(cut.queries, cut.keys, cut.tile_q, cut.tile_kv))
  kinds = blocks.merge_heads(kinds, cut.query_heads)
  lines = Lines(*kinds.shape[:2])
  xp = np if isinstance(kinds, np.ndarray) else jnp
  tiles = (cut.padded_queries // cut.tile_q, cut.padded_keys // cut.tile_kv)
  padding = [(0, 0), (0, 0)] + [(0, n - m) for n, m in zip(tiles, kinds.shape[2:])]
  kinds = xp.pad(kinds, padding, constant_values=blocks.EMPTY).astype(np.int32)
  kinds = kinds.reshape(-1, tiles[0] // cut.tiles_q, cut.tiles_q,
                        tiles[1] // cut.tiles_kv, cut.tiles_kv)
  kinds = kinds if query_blocks is None else kinds[:, slice(*query_blocks)]
  # [lines, row blocks, column blocks, tiles]; tile (c, t) of a block is number c * tiles_q + t
  kinds = kinds.transpose((0, 3, 1, 4, 2) if by_keys else (0, 1, 3, 4, 2))
  kinds = kinds.reshape(*kinds.shape[:3], -1)
  return _compact(kinds, xp), lines


def check(mask, cut: Cut, *, by_keys: bool, query_blocks: tuple[int, int] | None = None) -> None:
  """Refuses a schedule that scalar memory does not hold; builds only its shape.

  Args:
    mask, cut, by_keys, query_blocks: as of `build`.

  Raises:
    ValueError: it needs more than MOST_BYTES.
  """
  visits = jax.eval_shape(
      lambda mask: build(mask, cut, by_keys=by_keys, query_blocks=query_blocks)[0], mask)
  size = sum(x.size * 4 for x in visits)
  if size > MOST_BYTES:
    lines, number = visits.rows.shape
    raise ValueError(
        f"block_sizes: blocks of {cut.block_q} queries and {cut.block_kv} keys make a schedule of "
        f"{number} steps for each of {lines} rows of the mask, {size / 2**10:.0f} KiB of scalar "
        f"memory; expected at most {MOST_BYTES // 2**10}: give larger block_q and block_kv")


def _compact(kinds, xp) -> Schedule:
  """kinds [lines, nr, nc, tiles] -> the steps of blocks with a visible tile."""
  _, rows, columns, tiles = kinds.shape
  visited = (kinds != blocks.EMPTY).any(-1)
  idle = ~visited.any(-1, keepdims=True) & (np.arange(columns) == 0)
  listed = (visited | idle).reshape(-1, rows * columns)
  count = listed.sum(-1, keepdims=True)
  order = xp.argsort(~listed, axis=-1, stable=True)
  longest = int(count.max()) if xp is np else rows * columns
  number = np.arange(longest)
  order = xp.take_along_axis(order, xp.minimum(number, count - 1), axis=-1)
  row, column = order // columns, order % columns
  edge = xp.ones_like(row[:, :1], bool)
  change = row[:, 1:] != row[:, :-1]
  first = xp.concatenate([edge, change], -1)
  last = xp.concatenate([change, edge], -1) | (number == count - 1)
  active = number < count
  bits = (kinds.astype(np.uint32) << (2 * np.arange(tiles, dtype=np.uint32))).sum(
      -1, dtype=np.uint32).reshape(-1, rows * columns)
  bits = xp.take_along_axis(bits, order, axis=-1)
  flags = (FIRST * first + LAST * last) * active
  return Schedule(row.astype(np.int32), column.astype(np.int32),
                  xp.where(active, bits, 0).astype(np.uint32).view(np.int32),
                  flags.astype(np.int32))
