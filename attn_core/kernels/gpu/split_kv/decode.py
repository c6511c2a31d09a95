# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding on Hopper: a few queries per row against a dense cache; only live blocks are read.

The keys are split over thread blocks, see `split_kv.kernel`. The blocks of keys of a batch row are
those that its mask leaves visible; a split is a range of them. The rows of a key head, token-major
(query row // G, head row % G of the group), are divided into row blocks of `num_rows`. Latent rows
are the keys of one head, and their first columns the values.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands, nonfinite
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash.block_list import BlockList, make_block_list
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.tile_inputs import TileInputLoader, TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.kernels.gpu.split_kv import combine, compute, kernel as split_kv, quantized_kv
from attn_core.masks import block_map, mask as mask_lib, tile as tile_lib
from attn_core.score_mods import score_mod, tables
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

DTYPES = ("bfloat16", "float16")
MAX_QUERIES = 64
# Queries and heads of a key head, where a table has a number for each of them and each key: no more
# bytes than a key of 64 numbers.
MAX_TABLE_ROWS = 32


class Inputs(NamedTuple):
  """References in global memory."""

  query: Ref  # [B, K, row_blocks * num_rows, D]
  key: Ref  # [B, S, K, D]
  # [B, S, K, E]; of int8 or fp8 latents the rotary part; None: the first columns of the keys.
  value: Ref
  scales: tuple[Ref, ...]  # of int8 or fp8 keys and values by `quantized_kv.pack_scales`, or ()
  block_list: BlockList  # of one block of all queries of all heads
  tile_inputs: TileInputs


class Tiling(NamedTuple):
  """Division of a decode into thread blocks; hashable."""

  params: split_kv.KernelParams
  key_heads: int
  group: int
  row_blocks: int  # of a key head, a multiple of the consumers of a thread block
  interpret: bool


class GridIndex(NamedTuple):
  """Position of a thread block in the grid; int32."""

  batch: jax.Array
  split: jax.Array
  row_block: jax.Array  # of its first consumer
  head: jax.Array  # of keys


class RowTileInputLoader(TileInputLoader):
  """A `TileInputLoader` whose queries are rows: the queries of every head of a group."""

  def pack(self, operands: Operands) -> TileInputs:
    roles = mask_lib.structure_roles(self.spec.mask)
    arrays = tuple(self._repeat_rows(x, role, operands)
                   for x, role in zip(operands.mask.arrays, roles))
    mods = tuple(self._repeat_rows(x, role, operands) for x, role in zip(
        operands.mods, score_mod.structure_roles(self.spec.score_mod)))
    return super().pack(operands._replace(
        mask=operands.mask._replace(arrays=arrays), mods=mods))

  def coordinates(self, tile_inputs: TileInputs,
                  tile: tile_lib.Tile) -> tuple[mask_lib.Mask, mask_lib.Coordinates]:
    mask, at = super().coordinates(tile_inputs, tile)
    first = tile.head * mosaic.int32(self.group)
    head, row = at.head - tile.head + first, at.query_index
    if self.group > 1:
      group = jnp.full_like(row, self.group)
      row, head = lax.div(row, group), head + lax.rem(row, group)
    return mask, at._replace(head=head, query_index=row, query_position=row)

  def _repeat_rows(self, x: jax.Array, role: str, operands: Operands) -> jax.Array:
    """Returns an array of a mask or score mod, its query (and head) axes expanded to rows."""
    if role == mask_lib.QUERY and x.shape[1] > 1:
      return jnp.repeat(x, self.group, axis=1)
    if role not in (mask_lib.DENSE, score_mod.PAIR) or x.shape[1] == x.shape[2] == 1:
      return x
    queries, heads = operands.query.shape[1:3]
    heads = heads if x.shape[1] > 1 else self.group  # or one group for all
    x = jnp.broadcast_to(x, (x.shape[0], heads, queries, x.shape[3]))
    x = x.reshape(x.shape[0], -1, self.group, *x.shape[2:])
    return x.swapaxes(2, 3).reshape(*x.shape[:2], -1, x.shape[4])


def make_tiling(operands: Operands, spec: AttentionSpec | None, requested: BlockSizes) -> Tiling:
  """Returns the division of a decode into thread blocks.

  Args:
    operands: only shapes and dtypes are read.
    spec: whether keys are latent rows, and whether there is a score mod; None: neither.
    requested: `block_kv`, tokens of a split; None: chosen here. All queries of a group of heads are
      computed together, whatever the other sizes are.
  """
  latent_width = None if spec is None else spec.latent_width
  (_, queries, heads, width), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  width = width if spec is None else spec.row_width or width
  group = heads // key_heads
  quantized = None
  if operands.key_scale is not None:
    quantized = quantized_kv.QuantizedKV(
        jnp.dtype(operands.key.dtype).name, quantized_kv.TOKEN, key_heads == 1)
  params = split_kv.make_kernel_params(
      queries * group, (width, latent_width or operands.value.shape[3]),
      cdiv(keys, split_kv.BLOCK_KV), split_blocks(requested), quantized,
      latent_heads=None if latent_width is None else heads,
      has_score_mod=spec is not None and spec.has_score_mod)
  return Tiling(params, key_heads, group, split_kv.row_blocks(params, queries * group),
                mosaic.interpreted())


def split_blocks(requested: BlockSizes) -> int | None:
  """Returns the blocks of a split of `block_kv` tokens, rounded up; None: to be chosen."""
  return None if requested.block_kv is None else cdiv(requested.block_kv, split_kv.BLOCK_KV)


def unsupported_reason(dtype: DTypeLike, widths: tuple[int, int], lengths: tuple[int, int],
                       quantized: bool = False, latent: bool = False,
                       rope: DTypeLike | None = None) -> str | None:
  """Returns the reason why the kernel does not support a call; None if it does.

  Args:
    dtype: of queries, keys and values.
    widths: (D, E).
    lengths: (T, S).
    quantized: whether keys and values are int8 or fp8 instead.
    latent: whether values are the first E columns of their keys.
    rope: of the rest of the keys, where it is stored apart; None: it is not.
  """
  queries, keys = lengths
  dtype = jnp.dtype(dtype).name
  reason = mosaic.unsupported_reason()
  if reason is not None:
    return reason
  if dtype not in DTYPES:
    return f"dtype {dtype}: the kernel for Hopper computes {' and '.join(DTYPES)} only"
  if quantized and dtype != quantized_kv.DTYPE:
    return (f"dtype {dtype} with quantized keys and values: the kernel for Hopper computes these "
            f"with queries of {quantized_kv.DTYPE}")
  if rope is not None and jnp.dtype(rope) != dtype:
    return (f"a rotary part of {jnp.dtype(rope).name} with latents in 8 bits: the kernel for "
            f"Hopper computes these with one of {dtype}, as the queries are")
  reason = _unsupported_latents(widths) if latent else _unsupported_widths(widths, quantized)
  if reason is not None:
    return reason
  if queries > MAX_QUERIES:
    return (f"{queries} queries a row: the kernel for Hopper keeps a result of every split of the "
            f"keys, of {MAX_QUERIES} queries at most")
  if keys % mosaic.TMA_TOKENS:
    return (f"a cache of {keys} slots: the kernel for Hopper copies multiples of "
            f"{mosaic.TMA_TOKENS}")
  return None


def _unsupported_widths(widths: tuple[int, int], quantized: bool) -> str | None:
  known = [x for x in split_kv.WIDTHS if not quantized or x % quantized_kv.WIDTH_MULTIPLE == 0]
  for name, width in zip(("head_dim", "value width"), widths):
    if width not in known:
      return (f"a {name} of {width}{', quantized' * quantized}: the kernel for Hopper reads a "
              f"cache without padding it, and computes {', '.join(map(str, known))}")
  return None


def _unsupported_latents(widths: tuple[int, int]) -> str | None:
  multiple, most = split_kv.LATENT_MULTIPLE, split_kv.LATENT_WIDTHS
  whole, latent = widths
  if whole % multiple or latent % multiple or whole > most[0] or latent > most[1]:
    return (f"latent rows of {latent} + {whole - latent} numbers: the kernel for Hopper computes "
            f"multiples of {multiple}, up to {most[1]} and {most[0]} together")
  return None


def unsupported_mod(structure: jax.tree_util.PyTreeDef, query: tuple[int, ...],
                    key_heads: int) -> str | None:
  """Returns why the kernel does not support a score mod that kernels can trace, or None.

  Args:
    structure: of its term, or that of a call without one.
    query: [B, T, H, D].
    key_heads: K.
  """
  rows = query[1] * query[2] // key_heads
  if rows > MAX_TABLE_ROWS and tables.find(structure):
    return (f"score_mod with a table looked up by distance, of {rows} queries and heads a key "
            "head: the kernel for Hopper reads a number for each of them and each key, of "
            f"{MAX_TABLE_ROWS} at most")
  return None


def block_map_of(operands: Operands, spec: AttentionSpec) -> block_map.BlockMap:
  """Returns the visible blocks of keys of a row: one list for all its queries and heads."""
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  kinds = block_map.block_kinds(dense_operands.mask_of(operands, spec),
                                block_map.Sizes(queries, keys, queries, split_kv.BLOCK_KV))
  return block_map.block_map(block_map.merge_heads(kinds, kinds.shape[1]))


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """Returns out [B, T, H, E] and lse [B, H, T]; see `contract.ForwardFn`."""
  dense_operands.assert_shapes(operands, spec.latent_width)
  tiling = make_tiling(operands, spec, block_sizes)
  params, (batch, queries, heads, _) = tiling.params, operands.query.shape
  keys, dtype = operands.key.shape[1], operands.query.dtype
  if tables.find(spec.score_mod):  # caches list positions, in any order
    structure, mods = tables.written_out(
        spec.score_mod, operands.mods, dense_operands.positions_of(operands, spec))
    spec, operands = spec._replace(score_mod=structure), operands._replace(mods=mods)
  block_list = make_block_list(block_map_of(operands, spec))
  sizes = block_map.Sizes(queries * tiling.group, keys, params.num_rows, split_kv.BLOCK_KV)
  loader = RowTileInputLoader(spec, sizes, transposed=True, group=tiling.group)
  scales = () if params.quantized is None else tuple(
      quantized_kv.pack_scales(params.quantized, x)
      for x in (operands.key_scale, operands.value_scale) if x is not None)
  query = nonfinite.infinite_to_nan(operands.query[..., :params.width])
  has_value = not params.latent or params.quantized is not None
  inputs = Inputs(_to_rows(tiling, query), operands.key,
                  operands.value if has_value else None, scales, block_list,
                  loader.pack(operands))
  num_row_blocks = batch * tiling.key_heads * tiling.row_blocks
  out, lse = mosaic.call(
      functools.partial(_kernel, tiling, Logits(loader, False)),
      split_kv.partial_results(params, num_row_blocks), inputs,
      split_kv.scratch_types(params, dtype),
      grid=num_row_blocks // params.consumers * params.num_splits,
      warpgroups=params.consumers + 1, name="attn_core_decode",
      reduction_bytes=split_kv.reduction_bytes(params))
  visited = jnp.repeat(_per_row(block_list.num_visited, batch), num_row_blocks // batch)
  sinks = operands.sinks
  if sinks is not None:
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, :, None],
                             (batch, queries, heads, 1))
    sinks = _to_rows(tiling, sinks).reshape(num_row_blocks, params.num_rows)
  live = split_kv.live_splits(params, jnp.zeros_like(visited), visited)
  if dense_operands.out_dtype(operands, spec) == dtype:
    out, lse = combine.combine(params, out, lse, sinks, live, dtype)
  else:
    out, lse = combine.combine_exactly(params, out, lse, sinks, live)
  out = _from_rows(tiling, out, operands.query.shape)
  lse = _from_rows(tiling, lse[..., None], operands.query.shape)
  return Residuals(out, lse[..., 0].swapaxes(1, 2))


def _per_row(counts: Any, batch: int) -> jax.Array:
  """Returns int32 [B] of the counts of a `BlockList`."""
  if not hasattr(counts, "shape"):
    return jnp.full(batch, counts.start, jnp.int32)
  return jnp.broadcast_to(counts.reshape(-1), (batch,))


def _to_rows(tiling: Tiling, x: jax.Array) -> jax.Array:
  """[B, T, H, width] -> [B, K, row_blocks * num_rows, width]."""
  batch, queries, _, width = x.shape
  x = x.reshape(batch, queries, tiling.key_heads, tiling.group, width).swapaxes(1, 2)
  x = x.reshape(batch, tiling.key_heads, queries * tiling.group, width)
  return dense_operands.pad_axis(
      x, 2, tiling.row_blocks * tiling.params.num_rows - x.shape[2])


def _from_rows(tiling: Tiling, x: jax.Array, query_shape: tuple[int, ...]) -> jax.Array:
  """[num_row_blocks, num_rows, width] -> [B, T, H, width]."""
  batch, queries, heads, _ = query_shape
  x = x.reshape(batch, tiling.key_heads, tiling.row_blocks * tiling.params.num_rows, x.shape[2])
  x = x[:, :, :queries * tiling.group].reshape(
      batch, tiling.key_heads, queries, tiling.group, -1)
  return x.swapaxes(1, 2).reshape(batch, queries, heads, -1)


def _kernel(tiling: Tiling, logits: Logits, inputs: Inputs, outputs: tuple[Ref, ...],
            scratch: split_kv.Scratch) -> None:
  params, index = tiling.params, _grid_index(tiling)
  row_blocks = inputs.block_list.row_blocks(index.batch, 0, 0)
  blocks = split_kv.split_range(params, index.split, split_kv.BlockRange(
      mosaic.int32(0), None, row_blocks.num_full, row_blocks.num_visited))
  row_block = (index.batch * tiling.key_heads + index.head) * tiling.row_blocks + index.row_block
  first = index.row_block * params.num_rows
  warpgroup = lax.axis_index("warpgroup")

  # 1. The producer warpgroup copies queries, keys and values.
  @pl.when((warpgroup == params.consumers) & (blocks.first < blocks.end))
  def _() -> None:
    split_kv.begin_copies(params, scratch, first, lambda row: inputs.query.at[
        index.batch, index.head, pl.ds(row, params.num_rows)])
    split_kv.copy_blocks(params, scratch, blocks, row_blocks.block,
                         functools.partial(_copy, params, inputs, index))

  # 2. The consumer warpgroups compute.
  @pl.when((warpgroup < params.consumers) & (blocks.first < blocks.end))
  def _() -> None:
    own = split_kv.begin_consumer(params, warpgroup)
    first_row = first if own is None else first + own * params.num_rows
    tile = lambda n: tile_lib.Tile(
        index.batch, index.head, first_row, row_blocks.block(n) * split_kv.BLOCK_KV, 1,
        params.num_rows, split_kv.BLOCK_KV)
    out, lse = (x.at[row_block if own is None else row_block + own, index.split] for x in outputs)
    scales = params.quantized and quantized_kv.ScaleReader(
        params.quantized, scratch.scales_smem, index.head)
    compute.ConsumerWarpgroup(
        params, logits, inputs.tile_inputs, tile, scratch, tiling.interpret, scales,
        own).run(blocks, out, lse)


def _copy(params: split_kv.KernelParams, inputs: Inputs, index: GridIndex, _: jax.Array,
          block: jax.Array, values: bool, target: split_kv.CopyTarget) -> None:
  """Starts the copies of a block of keys or values, and of its scales."""
  source, first = inputs.value if values else inputs.key, block * split_kv.BLOCK_KV
  tokens = split_kv.tokens_per_copy(params, values, split_kv.BLOCK_KV)
  for n in range(0, split_kv.BLOCK_KV, tokens):
    at = index.batch, pl.ds(first + n, tokens), index.head
    plgpu.copy_gmem_to_smem(_columns(source, at, target.block.shape[1]),
                            target.block.at[pl.ds(n, tokens)], target.barrier)
    if target.rope is not None:
      plgpu.copy_gmem_to_smem(_columns(inputs.value, at, target.rope.shape[1]),
                              target.rope.at[pl.ds(n, tokens)], target.barrier)
  if target.scales is not None and params.quantized is not None:
    plgpu.copy_gmem_to_smem(quantized_kv.slice_scales(
        params.quantized, inputs.scales[values],
        (index.batch, pl.ds(first, split_kv.BLOCK_KV)), index.head), target.scales, target.barrier)


def _columns(source: Ref, index: tuple[Any, ...], width: int) -> Ref:
  """Returns a reference to the first columns of tokens; the others pad them."""
  return source.at[index if source.shape[-1] == width else (*index, pl.ds(0, width))]


def _grid_index(tiling: Tiling) -> GridIndex:
  """Neighboring thread blocks read the same tokens, each another head."""
  block, found, consumers = lax.axis_index("block"), [], tiling.params.consumers
  for number in (tiling.key_heads, tiling.row_blocks // consumers, tiling.params.num_splits):
    block, rest = (f(block, mosaic.int32(number)) for f in (lax.div, lax.rem))
    found.append(rest)
  head, row_block, split = found
  return GridIndex(block, split, split_kv.first_row_block(tiling.params, row_block), head)


# --- As the library's kernel. --------------------------------------------------------------------


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  del block_sizes
  query, value, quantized = operands.query, operands.value, operands.key_scale is not None
  reason = unsupported_reason(
      query.dtype if quantized else operands.key.dtype,
      (spec.row_width or query.shape[3], spec.latent_width or value.shape[3]),
      (query.shape[1], value.shape[1]),
      quantized, spec.latent_width is not None,
      value.dtype if quantized and spec.latent_width else None)
  if reason is None and mask_lib.WHOLE in mask_lib.structure_roles(spec.mask):
    reason = "masks.custom with operands: the kernel for Hopper cannot cut them into blocks"
  if reason is not None:
    name = "autoregressive_decodeattn" if spec.latent_width is None else "multi_latent_attention"
    raise NotImplementedError(f"{name}: {reason}")


@functools.cache
def make_kernel(fallback: Kernel) -> Kernel:
  """Returns the kernel; `fallback` computes all derivatives."""
  return Kernel("gpu_decode", forward, fallback.backward, fallback.tangent, fallback, _check,
                mosaic.effects)
