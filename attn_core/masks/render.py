# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks: `show` as text, `picture` as an image.

Both draw one batch row and one head, divided into the blocks that a block-wise kernel would visit
or skip. If a mask has more elements than fit, each character or pixel is a cell of several
elements; a cell samples a bounded number of them, so that the work is bounded for any lengths.
"""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from attn_core.masks import block_map, mask as mask_lib
from attn_core.types import cdiv

HIDDEN, SOME, VISIBLE, SKIPPED = ".", "+", "#", " "  # characters of `show`
TEXT_ROWS, TEXT_COLUMNS = 64, 96  # characters of the largest text
PIXELS = 1024  # cells along each side of the largest picture
SAMPLES = 4096  # elements looked at along each side
UNBORDERED = 8  # interval of numbered cells where blocks have no borders
DEFAULT_BLOCK = 128  # tokens


class Cells(NamedTuple):
  """One batch row and one head of a mask, cut into blocks and, finer, into cells."""

  kinds: np.ndarray  # int8 [num_query_blocks, num_key_blocks]: EMPTY, PARTIAL or FULL
  query_edges: np.ndarray  # int [num_rows + 1]: cell row i is rows edges[i]..edges[i + 1]
  key_edges: np.ndarray  # int [num_columns + 1]
  query_blocks: np.ndarray  # int [num_rows]: the block of every row of cells
  key_blocks: np.ndarray  # int [num_columns]
  fraction: np.ndarray  # float [num_rows, num_columns]: visible share of each cell
  share: float  # visible share of all elements
  exact: bool  # whether every element was evaluated


def show(mask: mask_lib.Mask, queries: int, keys: int | None = None, *, block_q: int | None = None,
         block_kv: int | None = None, row: int = 0, head: int = 0) -> str:
  """Draws a mask and its blocks as text: `print(show(causal(), 16, block_q=4, block_kv=4))`.

  A character is one element, or a cell of several if they do not all fit: `#` visible, `.` hidden,
  `+` some of the cell visible, and a space where a kernel skips the block. Lines separate the
  blocks if there is space. If there are more blocks than characters, a character is several
  blocks: `#` all full, a space all empty, `+` anything else.

  Args:
    mask: any mask; its arrays must be concrete and fit the lengths.
    queries: number of queries (tokens).
    keys: number of keys (tokens); None: as many as queries.
    block_q: queries per block (tokens); None: 128.
    block_kv: keys per block (tokens); None: 128.
    row: the batch row to show.
    head: the head to show.

  Returns:
    Lines of at most about 110 characters: a title, the picture, and the number of blocks of each
    kind. Kinds are those that kernels read: a partial block may turn out to be empty or full.

  Raises:
    ValueError: a length or block is not an int >= 1, the row or head does not exist, or the mask's
      arrays do not fit.
  """
  sizes = _sizes(mask, queries, keys, block_q, block_kv)
  cells = _cells(mask, sizes, (row, head), (TEXT_ROWS, TEXT_COLUMNS))
  return "\n".join([_title(mask, sizes), *_drawing(cells), _legend(cells), summary(cells)])


def picture(mask: mask_lib.Mask, path: str | os.PathLike[str], queries: int,
            keys: int | None = None, *,
            block_q: int | None = None, block_kv: int | None = None, row: int = 0,
            head: int = 0) -> None:
  """Writes an image of a mask and its blocks; needs matplotlib, `pip install 'attn_core[plot]'`.

  Queries go down, keys to the right. Visible elements are dark, in blue where the block is full and
  in orange where it is partial; hidden elements of a partial block are pale orange, blocks that a
  kernel skips are white.

  Args:
    mask: any mask; its arrays must be concrete and fit the lengths.
    path: the file; its extension selects the format: .png, .svg, .pdf.
    queries: number of queries (tokens).
    keys: number of keys (tokens); None: as many as queries.
    block_q: queries per block (tokens); None: 128.
    block_kv: keys per block (tokens); None: 128.
    row: the batch row to draw.
    head: the head to draw.

  Raises:
    ValueError: see `show`.
    ImportError: matplotlib is not installed.
  """
  sizes = _sizes(mask, queries, keys, block_q, block_kv)
  cells = _cells(mask, sizes, (row, head), (PIXELS, PIXELS))
  figure = _figure(cells, sizes, _title(mask, sizes))
  figure.savefig(path, dpi=160)


def summary(cells: Cells) -> str:
  """Counts blocks by kind, with the share of visited blocks and of visible elements."""
  count = {kind: int((cells.kinds == kind).sum()) for kind in (0, 1, 2)}
  visited = 1 - count[block_map.EMPTY] / cells.kinds.size
  about = "" if cells.exact else "about "
  blocks = "1 block" if cells.kinds.size == 1 else f"{cells.kinds.size} blocks"
  return (f"{blocks}: {count[block_map.EMPTY]} empty, {count[block_map.PARTIAL]} "
          f"partial, {count[block_map.FULL]} full; visited {visited:.1%} of the blocks, "
          f"visible {about}{cells.share:.1%} of the elements")


def describe(mask: mask_lib.Mask) -> str:
  """Formats a mask as a formula, with the dtype and shape of its arrays."""
  if isinstance(mask, mask_lib.Not):
    return f"~{_operand(mask.mask)}"
  for kind, sign in ((mask_lib.And, "&"), (mask_lib.Or, "|")):
    if isinstance(mask, kind):
      sides = (describe(x) if isinstance(x, kind) else _operand(x) for x in (mask.left, mask.right))
      return f" {sign} ".join(sides)
  fields = dataclasses.fields(mask)  # type: ignore[arg-type]
  values = [(field.name, getattr(mask, field.name)) for field in fields]
  inner = [_field(name, value) for name, value in values if not _is_absent(name, value)]
  return f"{type(mask).__name__.lower()}({', '.join(inner)})"


def _operand(mask: mask_lib.Mask) -> str:
  text = describe(mask)
  return f"({text})" if isinstance(mask, (mask_lib.And, mask_lib.Or)) else text


def _is_absent(name: str, value: Any) -> bool:
  """Whether a field is not shown; None is shown for a window, where it means unbounded."""
  if isinstance(value, tuple):
    return not value
  if name == "group":  # of a list, which a call finds out
    return True
  return value is None and name not in ("left", "right")


def _field(name: str, value: Any) -> str:
  if isinstance(value, mask_lib.Mask):
    return describe(value)
  if isinstance(value, tuple) and not all(isinstance(x, int) for x in value):
    return ", ".join(_field(name, x) for x in value)
  if hasattr(value, "shape"):
    return f"{name} {value.dtype}{list(value.shape)}"
  return getattr(value, "__name__", f"{name}={value!r}")


def _title(mask: mask_lib.Mask, sizes: block_map.Sizes) -> str:
  return (f"{describe(mask)}\n{sizes.queries} queries x {sizes.keys} keys in blocks of "
          f"{sizes.block_q} x {sizes.block_kv}")


# --- Evaluation. ---------------------------------------------------------------------------------


def _sizes(mask: mask_lib.Mask, queries: int, keys: int | None, block_q: int | None,
           block_kv: int | None) -> block_map.Sizes:
  """Checks lengths and block sizes; clips block sizes to the lengths."""
  if not isinstance(mask, mask_lib.Mask):
    raise ValueError(f"mask: got {type(mask).__name__}; expected a Mask, such as masks.causal(), "
                     "or masks.dense(array) of a bool array [B or 1, H or 1, T or 1, S or 1]")
  keys = queries if keys is None else keys
  block_q = DEFAULT_BLOCK if block_q is None else block_q
  block_kv = DEFAULT_BLOCK if block_kv is None else block_kv
  for name, value in (("queries", queries), ("keys", keys), ("block_q", block_q),
                      ("block_kv", block_kv)):
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
      raise ValueError(f"{name}: got {value!r}; expected an int >= 1 (tokens)")
  lengths = {mask_lib.QUERY: (1, "queries", queries), mask_lib.KEY: (1, "keys", keys)}
  for x, role in zip(jax.tree.leaves(mask), mask_lib.leaf_roles(mask), strict=True):
    dense = [(2, "queries", queries), (3, "keys", keys)] if role == mask_lib.DENSE else []
    for axis, name, length in dense + ([lengths[role]] if role in lengths else []):
      if x.shape[axis] not in (1, length):
        raise ValueError(f"{name}: got {length}; expected {x.shape[axis]}, as an array of the mask "
                         f"({role}) has the shape {list(x.shape)}")
  return block_map.Sizes(queries, keys, min(block_q, queries), min(block_kv, keys))


def _cells(mask: mask_lib.Mask, sizes: block_map.Sizes, where: tuple[int, int],
           most: tuple[int, int]) -> Cells:
  """Evaluates (batch row, head) `where` of the mask in at most about `most` cells."""
  kinds = np.asarray(block_map.block_kinds(mask, sizes))
  kinds = kinds[_pick("row", where[0], kinds.shape[0]), _pick("head", where[1], kinds.shape[1])]
  query_edges, query_blocks = _edges(sizes.queries, sizes.block_q, most[0])
  key_edges, key_blocks = _edges(sizes.keys, sizes.block_kv, most[1])
  query_points, query_starts = _points(query_edges)
  key_points, key_starts = _points(key_edges)
  seen = _visible(mask, where, query_points, key_points)
  counts = np.add.reduceat(np.add.reduceat(seen, query_starts, 0, np.int64), key_starts, 1)
  looked = np.outer(*(np.diff(np.append(starts, len(points))) for starts, points in (
      (query_starts, query_points), (key_starts, key_points))))
  fraction = counts / looked
  share = np.average(fraction, weights=np.outer(np.diff(query_edges), np.diff(key_edges)))
  return Cells(kinds, query_edges, key_edges, query_blocks, key_blocks, fraction, float(share),
               exact=seen.size == sizes.queries * sizes.keys)


def _pick(name: str, index: int, size: int) -> int:
  """The index into an axis, 0 where the mask does not depend on that axis."""
  if index < 0 or 1 < size <= index:
    raise ValueError(f"{name}: got {index}; expected one of the mask's 0..{size - 1}")
  return index if size > 1 else 0


def _edges(length: int, block: int, most: int) -> tuple[np.ndarray, np.ndarray]:
  """Edges of the cells of one axis, and the block of each cell.

  Blocks are divided evenly into at most `most` cells together; if there are more blocks than that,
  a cell is several whole blocks.
  """
  count = cdiv(length, block)
  if count > most:
    group = cdiv(count, most)
    firsts = np.arange(0, count, group)
    return np.append(firsts * block, length), firsts
  each = min(block, most // count)
  starts = np.arange(count)[:, None] * block + np.arange(each) * block // each
  inside = starts.ravel() < length
  which = np.repeat(np.arange(count), each)[inside]
  return np.append(starts.ravel()[inside], length), which


def _points(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Evenly spaced elements of every cell with its first and last, and the start of each cell."""
  most = max(SAMPLES // (len(edges) - 1), 1)
  points = [np.arange(first, end) if end - first <= most
            else np.linspace(first, end - 1, most).astype(int) if most > 1
            else np.array([(first + end) // 2])
            for first, end in zip(edges[:-1], edges[1:])]
  return np.concatenate(points), np.cumsum([0] + [len(x) for x in points[:-1]])


def _visible(mask: mask_lib.Mask, where: tuple[int, int], query: np.ndarray,
             key: np.ndarray) -> np.ndarray:
  """Evaluates the mask at the given rows and columns: bool [num_rows, num_columns]."""
  row, head = where

  def at(x: np.ndarray, axis: int, index: np.ndarray) -> np.ndarray:
    return x if x.shape[axis] == 1 else np.take(x, index, axis)

  def slice_array(x: Any, role: str) -> Any:
    if role == mask_lib.WHOLE:
      return x
    x = np.asarray(x)
    x = x[_pick("row", row, x.shape[0])]
    if role == mask_lib.QUERY:
      return at(x, 0, query)[:, None]
    if role == mask_lib.KEY:
      return at(x, 0, key)[None, :]
    if role == mask_lib.DENSE:
      return at(at(x[_pick("head", head, x.shape[0])], 0, query), 1, key)
    return x

  arrays, structure = jax.tree.flatten(mask)
  mask = jax.tree.unflatten(structure, map(slice_array, arrays, mask_lib.leaf_roles(mask)))
  query_index, key_index = query.astype(np.int32)[:, None], key.astype(np.int32)[None, :]
  seen = mask.visible(mask_lib.Coordinates(
      np.int32(row), np.int32(head), query_index, key_index, query_index, key_index))
  return np.broadcast_to(np.asarray(seen), (len(query), len(key)))


# --- Drawing. ------------------------------------------------------------------------------------


def _cell_kinds(cells: Cells) -> np.ndarray:
  """The kind of every cell, int8 [num_rows, num_columns]; PARTIAL where its blocks differ."""
  low, high = cells.kinds, cells.kinds
  for axis, firsts in enumerate((cells.query_blocks, cells.key_blocks)):
    if len(firsts) < low.shape[axis]:
      low = np.minimum.reduceat(low, firsts, axis)
      high = np.maximum.reduceat(high, firsts, axis)
    else:
      low, high = np.take(low, firsts, axis), np.take(high, firsts, axis)
  return np.where(low == high, low, block_map.PARTIAL)


def _is_coarse(cells: Cells) -> bool:
  """Whether a cell holds several blocks."""
  return len(cells.query_blocks) < cells.kinds.shape[0] or (
      len(cells.key_blocks) < cells.kinds.shape[1])


def _drawing(cells: Cells) -> list[str]:
  """The lines of the picture, with the number of every block's first query and key."""
  characters = np.select([cells.fraction == 0, cells.fraction == 1], [HIDDEN, VISIBLE], SOME)
  kinds = _cell_kinds(cells)
  characters = np.where(kinds == block_map.EMPTY, SKIPPED, characters)
  characters = np.where(kinds == block_map.FULL, VISIBLE, characters)
  if _is_coarse(cells):
    characters = np.where(kinds == block_map.PARTIAL, SOME, characters)
  rows, columns = _starts(cells.query_blocks), _starts(cells.key_blocks)
  border = "+" + "".join("-" * n + "+" for n in np.diff([*columns, characters.shape[1]]))
  margin = len(str(cells.query_edges[-1]))
  numbered = rows if len(rows) > 1 else range(0, len(characters), UNBORDERED)
  lines = [" " * (margin + 1) + _ruler(cells, columns)]
  for i, line in enumerate(characters):
    if i in rows:
      lines.append(" " * (margin + 1) + border)
    number = str(cells.query_edges[i]) if i in numbered else ""
    parts = np.split(line, columns[1:])
    lines.append(f"{number:>{margin}} |" + "|".join(map("".join, parts)) + "|")
  return lines + [" " * (margin + 1) + border]


def _starts(which: np.ndarray) -> list[int]:
  """The first cell of every block drawn with borders; only cell 0 where a cell is a block."""
  starts = np.flatnonzero(np.append(True, which[1:] != which[:-1]))
  return starts.tolist() if len(starts) < len(which) else [0]


def _ruler(cells: Cells, columns: list[int]) -> str:
  """Key numbers above the first cell of every block, as far as they do not overlap."""
  borders = len(columns) > 1
  text = ""
  for n, cell in enumerate(columns if borders else range(0, len(cells.key_blocks), UNBORDERED)):
    place = 1 + cell + (n if borders else 0)
    if not text or place > len(text):
      text = f"{text:<{place}}{cells.key_edges[cell]}"
  return f"{text}  keys"


def _legend(cells: Cells) -> str:
  queries, keys = (int(np.diff(edges).max()) for edges in (cells.query_edges, cells.key_edges))
  if _is_coarse(cells):
    return (f"a character is {queries} queries x {keys} keys, several blocks: {VISIBLE} all full, "
            f"{SOME} some visited, space: all empty, skipped")
  of = f"{VISIBLE} visible, {HIDDEN} hidden, space: in an empty block, skipped"
  if queries == keys == 1:
    return of
  sampled = "" if cells.exact else ", sampled"
  return f"a character is {queries} queries x {keys} keys{sampled}: {of}, {SOME} some visible"


# (hidden, visible) colors, distinct for all kinds of color vision.
COLORS = {block_map.EMPTY: ("#ffffff", "#ffffff"), block_map.PARTIAL: ("#fdebc8", "#d55e00"),
           block_map.FULL: ("#0072b2", "#0072b2")}
GRID_COLOR = "#8c8c8c"
MOST_GRID_LINES = 64  # more lines would hide the elements


def _figure(cells: Cells, sizes: block_map.Sizes, title: str) -> Any:
  """Draws a separate matplotlib Figure, without pyplot and its global state."""
  try:
    from matplotlib import colors, figure, patches
    from matplotlib.backends import backend_agg
  except ImportError as error:
    raise ImportError("masks.picture draws with matplotlib, which is not installed: pip install "
                      "'attn_core[plot]'; masks.show works without it") from error
  drawing = figure.Figure(figsize=(7, 7.4), layout="constrained")
  backend_agg.FigureCanvasAgg(drawing)
  axes = drawing.add_subplot()
  kinds = _cell_kinds(cells)
  image = np.empty((*kinds.shape, 3))
  for kind, (hidden, visible) in COLORS.items():
    ends = [np.array(colors.to_rgb(color)) for color in (hidden, visible)]
    share = cells.fraction[..., None]
    image = np.where((kinds == kind)[..., None], ends[0] * (1 - share) + ends[1] * share, image)
  axes.pcolormesh(cells.key_edges - 0.5, cells.query_edges - 0.5, image, rasterized=True)
  axes.set(xlim=(-0.5, sizes.keys - 0.5), ylim=(sizes.queries - 0.5, -0.5), xlabel="key",
           ylabel="query", aspect="equal" if 0.2 < sizes.queries / sizes.keys < 5 else "auto")
  axes.xaxis.set_ticks_position("top")
  axes.xaxis.set_label_position("top")
  for count, block, line in ((sizes.num_query_blocks, sizes.block_q, axes.axhline),
                             (sizes.num_key_blocks, sizes.block_kv, axes.axvline)):
    for i in range(1, count if count <= MOST_GRID_LINES else 0):
      line(i * block - 0.5, color=GRID_COLOR, linewidth=0.6)
  drawing.suptitle(title, fontsize=9, wrap=True)
  entries = [patches.Patch(facecolor=COLORS[kind][side], edgecolor=GRID_COLOR, label=label)
             for kind, side, label in ((block_map.FULL, 1, "visible, full block"),
                                       (block_map.PARTIAL, 1, "visible, partial block"),
                                       (block_map.PARTIAL, 0, "hidden, partial block"),
                                       (block_map.EMPTY, 0, "empty block, skipped"))]
  drawing.legend(handles=entries, loc="outside lower center", ncols=2, fontsize=8, frameon=False,
                 title=summary(cells), title_fontsize=8)
  return drawing
