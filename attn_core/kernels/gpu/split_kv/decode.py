"""Decoding on Hopper: a few queries a row against a dense cache, of which live blocks are read.

Rows of products are keys, see `parts`. A row's blocks of keys are those that its mask leaves
visible; a part is some of them.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K, D query and
key width, E value width; R rows of a line (token-major: query r // G, head r % G of the group),
M lines of a key head, N parts of a line.
"""

import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu.split_kv import compute as fold, combine as merge, kernel as parts, quantized_kv as small
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.tile_inputs import Extras, Feed
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.block_list import Visits, visits_of
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import decode, tile_ops as steps
from attn_core.masks import leaves as algebra, block_map as blocks, tile as tiles
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

DTYPES = ("bfloat16", "float16")
MOST_QUERIES = 64


class Inputs(NamedTuple):
  """References in global memory."""

  query: Any  # [B, K, M * R, D]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  scales: tuple  # of keys and of values in 8 bits, as `small.packed` has them, or ()
  visits: Visits  # one block of all queries of all heads
  extras: Extras


class Cut(NamedTuple):
  """How a decode is cut; hashable."""

  shape: parts.Shape
  key_heads: int
  group: int
  lines: int  # M
  interpret: bool


class Place(NamedTuple):
  """Where a block of threads works; int32."""

  batch: Any
  part: Any
  line: Any  # below M
  head: Any  # of keys


class RowFeed(Feed):
  """A `Feed` whose queries are rows: the queries of every head of a group."""

  def pack(self, operands: Operands) -> Extras:
    roles = algebra.structure_roles(self.spec.mask)
    arrays = tuple(self._rows(x, role, operands)
                   for x, role in zip(operands.mask.arrays, roles))
    return super().pack(operands._replace(mask=operands.mask._replace(arrays=arrays)))

  def coordinates(self, extras: Extras, tile: tiles.Tile):
    mask, at = super().coordinates(extras, tile)
    first = tile.head * mosaic.int32(self.group)
    head, row = at.head - tile.head + first, at.query_index
    if self.group > 1:
      group = jnp.full_like(row, self.group)
      row, head = lax.div(row, group), head + lax.rem(row, group)
    return mask, at._replace(head=head, query_index=row, query_position=row)

  def _rows(self, x, role: str, operands: Operands):
    """An array of the mask with numbers of queries (and heads) as numbers of rows."""
    if role == algebra.QUERY and x.shape[1] > 1:
      return jnp.repeat(x, self.group, axis=1)
    if role != algebra.DENSE or x.shape[1] == x.shape[2] == 1:
      return x
    queries, heads = operands.query.shape[1:3]
    heads = heads if x.shape[1] > 1 else self.group  # or one group for all
    x = jnp.broadcast_to(x, (x.shape[0], heads, queries, x.shape[3]))
    x = x.reshape(x.shape[0], -1, self.group, *x.shape[2:])
    return x.swapaxes(2, 3).reshape(*x.shape[:2], -1, x.shape[4])


def cut_of(operands: Operands, requested: BlockSizes) -> Cut:
  """How to cut a decode.

  Args:
    operands: only shapes and dtypes count.
    requested: `block_kv`, tokens of a part; None: chosen. All queries of a group of heads are
      computed together, whatever the other sizes say.
  """
  (_, queries, heads, width), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  group = heads // key_heads
  stored = None
  if operands.key_scale is not None:
    stored = small.Small(jnp.dtype(operands.key.dtype).name, small.TOKEN, key_heads == 1)
  shape = parts.shape_of(queries * group, (width, operands.value.shape[3]),
                         cdiv(keys, parts.BLOCK), part_blocks(requested), stored)
  return Cut(shape, key_heads, group, cdiv(queries * group, shape.rows), mosaic.interpreted())


def part_blocks(requested: BlockSizes) -> int | None:
  """Blocks of a part, by `block_kv`, its tokens, rounded up; None: to be chosen."""
  part = requested.block_kv
  return None if part is None else cdiv(part, parts.BLOCK)


def refusal(dtype, widths: tuple[int, int], lengths: tuple[int, int],
            quantized: bool = False) -> str | None:
  """Why the kernel does not compute a call; None: it does.

  Args:
    dtype: of queries, keys and values.
    widths: (D, E).
    lengths: (T, S).
    quantized: whether keys and values are in 8 bits instead.
  """
  queries, keys = lengths
  dtype = jnp.dtype(dtype).name
  if dtype not in DTYPES:
    return f"dtype {dtype}: the kernel for Hopper computes {' and '.join(DTYPES)} only"
  if quantized and dtype != small.DTYPE:
    return (f"dtype {dtype} with keys and values in 8 bits: the kernel for Hopper computes these "
            f"with queries of {small.DTYPE}")
  known = [x for x in parts.WIDTHS if not quantized or x % small.WIDTH == 0]
  for name, width in zip(("head_dim", "value width"), widths):
    if width not in known:
      return (f"a {name} of {width}{' in 8 bits' * quantized}: the kernel for Hopper reads a cache "
              f"as it is, and computes {', '.join(map(str, known))}")
  if queries > MOST_QUERIES:
    return (f"{queries} queries a row: the kernel for Hopper keeps a result of every part of the "
            f"keys, of {MOST_QUERIES} queries at most")
  if keys % mosaic.COPIED_TOKENS:
    return (f"a cache of {keys} slots: the kernel for Hopper copies multiples of "
            f"{mosaic.COPIED_TOKENS}")
  return None


def block_map_of(operands: Operands, spec: AttentionSpec) -> blocks.BlockMap:
  """The blocks of keys that a row visits, one list for all its queries and heads."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  kinds = blocks.block_kinds(steps.mask_of(operands, spec),
                             blocks.Sizes(queries, keys, queries, parts.BLOCK))
  return blocks.block_map(blocks.merge_heads(kinds, kinds.shape[1]))


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  cut = cut_of(operands, block_sizes)
  shape, (batch, queries, heads, _) = cut.shape, operands.query.shape
  keys, dtype = operands.key.shape[1], operands.query.dtype
  visits = visits_of(block_map_of(operands, spec))
  sizes = blocks.Sizes(queries * cut.group, keys, shape.rows, parts.BLOCK)
  feed = RowFeed(spec, sizes, transposed=True, group=cut.group)
  scales = () if shape.stored is None else tuple(
      small.packed(shape.stored, x) for x in (operands.key_scale, operands.value_scale))
  inputs = Inputs(_to_rows(cut, operands.query), operands.key, operands.value, scales, visits,
                  feed.pack(operands))
  lines = batch * cut.key_heads * cut.lines
  out, lse = mosaic.call(
      functools.partial(_kernel, cut, Logits(feed, False)), parts.partial_results(shape, lines),
      inputs, parts.scratch_of(shape, dtype), grid=lines * shape.parts, warpgroups=2,
      name="attn_core_decode")
  visited = jnp.repeat(_per_row(visits.num_visited, batch), lines // batch)
  sinks = operands.sinks
  if sinks is not None:
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, :, None],
                             (batch, queries, heads, 1))
    sinks = _to_rows(cut, sinks).reshape(lines, shape.rows)
  out, lse = merge.merge(shape, out, lse, sinks,
                         parts.live_parts(shape, jnp.zeros_like(visited), visited), dtype)
  return Residuals(_from_rows(cut, out, operands.query.shape),
                   _from_rows(cut, lse[..., None], operands.query.shape)[..., 0].swapaxes(1, 2))


def _per_row(number, batch: int):
  """int32 [B] of a number of `Visits`."""
  if not hasattr(number, "shape"):
    return jnp.full(batch, number.start, jnp.int32)
  return jnp.broadcast_to(number.reshape(-1), (batch,))


def _to_rows(cut: Cut, x):
  """[B, T, H, W] -> [B, K, M * R, W]."""
  batch, queries, _, width = x.shape
  x = x.reshape(batch, queries, cut.key_heads, cut.group, width).swapaxes(1, 2)
  x = x.reshape(batch, cut.key_heads, queries * cut.group, width)
  return steps.pad_axis(x, 2, cut.lines * cut.shape.rows - x.shape[2])


def _from_rows(cut: Cut, x, like):
  """[B * K * M, R, W] -> [B, T, H, W] of queries of shape `like`."""
  batch, queries, heads, _ = like
  x = x.reshape(batch, cut.key_heads, cut.lines * cut.shape.rows, x.shape[2])
  x = x[:, :, :queries * cut.group].reshape(batch, cut.key_heads, queries, cut.group, -1)
  return x.swapaxes(1, 2).reshape(batch, queries, heads, -1)


def _kernel(cut: Cut, logits: Logits, inputs: Inputs, outputs, scratch: parts.Scratch):
  shape, place = cut.shape, _place(cut)
  row = inputs.visits.of(place.batch, 0, 0)
  visit = parts.visit_of(shape, place.part, parts.Visit(
      mosaic.int32(0), None, row.num_full, row.num_visited))
  line = (place.batch * cut.key_heads + place.head) * cut.lines + place.line
  first = place.line * shape.rows
  warpgroup = lax.axis_index("warpgroup")

  @pl.when((warpgroup == 1) & (visit.first < visit.end))
  def _():
    plgpu.copy_gmem_to_smem(inputs.query.at[place.batch, place.head, pl.ds(first, shape.rows)],
                            scratch.query, scratch.query_full)
    def copy(_, block, values, target):
      stage, scales, full = target
      source, first = inputs.value if values else inputs.key, block * parts.BLOCK
      tokens = parts.together(shape, values, parts.BLOCK)
      for n in range(0, parts.BLOCK, tokens):
        plgpu.copy_gmem_to_smem(
            source.at[place.batch, pl.ds(first + n, tokens), place.head],
            stage.at[pl.ds(n, tokens)], full)
      if scales is not None:
        plgpu.copy_gmem_to_smem(small.quad(
            shape.stored, inputs.scales[values], (place.batch, pl.ds(first, parts.BLOCK)),
            place.head), scales, full)
    parts.copy_blocks(shape, scratch, visit, row.block, copy)

  @pl.when((warpgroup == 0) & (visit.first < visit.end))
  def _():
    tile = lambda n: tiles.Tile(place.batch, place.head, first, row.block(n) * parts.BLOCK, 1,
                                shape.rows, parts.BLOCK)
    out, lse = (x.at[line, place.part] for x in outputs)
    scales = shape.stored and small.Scales(shape.stored, scratch.scales, place.head)
    fold.Fold(shape, logits, inputs.extras, tile, scratch, cut.interpret, scales).run(
        visit, out, lse)


def _place(cut: Cut) -> Place:
  """Neighbours read the same tokens, each its own head."""
  block, found = lax.axis_index("block"), []
  for number in (cut.key_heads, cut.lines, cut.shape.parts):
    block, rest = (f(block, mosaic.int32(number)) for f in (lax.div, lax.rem))
    found.append(rest)
  head, line, part = found
  return Place(block, part, line, head)


# --- As the library's kernel. --------------------------------------------------------------------


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  del block_sizes
  query, value, quantized = operands.query, operands.value, operands.key_scale is not None
  reason = refusal(query.dtype if quantized else value.dtype, (query.shape[3], value.shape[3]),
                   (query.shape[1], value.shape[1]), quantized)
  if reason is None and algebra.WHOLE in algebra.structure_roles(spec.mask):
    reason = "masks.custom with operands: the kernel for Hopper cannot cut them into blocks"
  if reason is not None:
    raise NotImplementedError(f"autoregressive_decodeattn: {reason}")


KERNEL = Kernel("gpu_decode", forward, decode.backward, decode.tangent, decode.KERNEL, _check,
                mosaic.effects)
