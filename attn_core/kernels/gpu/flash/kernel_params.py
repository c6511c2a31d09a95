# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Static parameters of the GPU kernels, and the position of a thread block in the grid."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.common import dense_operands, listed
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import list_bits
from attn_core.kernels.gpu.flash.block_list import BlockList, make_block_list
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.gpu.flash.tile_inputs import TileInputLoader, TileInputs
from attn_core.kernels.gpu.mosaic import Ref
from attn_core.masks import block_map as block_map_lib, mask as mask_lib, selected
from attn_core.types import AttentionSpec, Operands


class KernelParams(NamedTuple):
  """Static parameters that all parts of a kernel share; hashable."""

  tiling: Any  # `tiling.Tiling` or `tiling.BackwardTiling`
  logits: Logits
  heads: int  # H
  group: int  # G, query heads of a key head
  any_full: bool  # whether there may be blocks that need no mask
  any_partial: bool  # whether there may be blocks that need it
  interpret: bool

  @property
  def loader(self) -> TileInputLoader:
    return self.logits.loader

  @property
  def has_dropout(self) -> bool:
    return self.loader.spec.dropout_prob > 0


class GridIndex(NamedTuple):
  """Position of a thread block in the grid; int32."""

  batch: jax.Array
  head: jax.Array  # query head, or key head in a kernel that sums over queries
  block: jax.Array  # of queries, or of keys in a kernel that sums over queries


def make_kernel_params(operands: Operands, spec: AttentionSpec, tiling: Any,
                       by_keys: bool = False) -> tuple[KernelParams, BlockList, TileInputs]:
  """Returns the static parameters of a kernel, the blocks it visits, and its tile inputs.

  Args:
    operands: the arrays.
    spec: what is computed.
    tiling: `tiling.Tiling` or `tiling.BackwardTiling`.
    by_keys: whether the kernel sums over queries; its tiles are [keys, queries] then.
  """
  dense_operands.assert_shapes(operands)
  mask = local_mask(operands, spec)
  kinds, most = kinds_of(mask, tiling.sizes)
  block_map = block_map_lib.block_map(kinds.swapaxes(-1, -2) if by_keys else kinds)
  if most is not None and not by_keys:
    block_map = block_map._replace(indices=block_map.indices[..., :most])
  operands, spec = listed.without_lists(operands, spec)
  heads = operands.query.shape[2]
  group = heads // operands.key.shape[2]
  loader = TileInputLoader(spec, tiling.sizes, transposed=by_keys, group=group,
                           lists=list_bits.of_mask(mask, tiling.sizes, by_keys))
  tile_inputs = loader.pack(operands)._replace(
      lists=list_bits.pack(mask, tiling.sizes, by_keys))
  params = KernelParams(tiling, Logits(loader, operands.bias is not None), heads, group,
                        block_map.any_full, block_map.any_partial, mosaic.interpreted())
  return params, make_block_list(block_map), tile_inputs


def local_mask(operands: Operands, spec: AttentionSpec) -> mask_lib.Mask:
  """Returns the mask, with the lists of the batch rows and heads of a call."""
  return dense_operands.mask_of(*listed.of_local_rows(operands, spec))


def kinds_of(mask: mask_lib.Mask,
             sizes: block_map_lib.Sizes) -> tuple[block_map_lib.Array, int | None]:
  """Returns the kinds of blocks, and the most that a block of queries visits; None: no list says.

  Args:
    mask: as `local_mask` returns it.
    sizes: of the blocks.
  """
  lists, rest = selected.split(mask)
  kinds = listed.visited(
      block_map_lib.block_kinds(rest, sizes), lists, list_bits.layout(sizes))
  return kinds, listed.most_visited(mask, sizes.block_q, sizes.block_kv)


def grid_index_of(block: jax.Array, heads: int, num_blocks: int) -> GridIndex:
  """Returns the position of a thread block; blocks of one head are neighbors.

  Args:
    block: int32, the number of the thread block.
    heads: of a batch row.
    num_blocks: of a head.
  """
  per_row, per_head = mosaic.int32(heads), mosaic.int32(num_blocks)
  line = lax.div(block, per_head)
  return GridIndex(lax.div(line, per_row), lax.rem(line, per_row), lax.rem(block, per_head))


def reverse_blocks(grid: GridIndex, num_blocks: int) -> GridIndex:
  """Returns the position with blocks in reverse: under a causal mask the longest ones begin."""
  return grid._replace(block=mosaic.int32(num_blocks - 1) - grid.block)


def drain(consumed: Ref, num_stages: int, filled: jax.Array) -> None:
  """Waits until all stages of a pipeline are consumed.

  Args:
    consumed: barriers of the stages.
    num_stages: of the pipeline.
    filled: int32, how many times a stage was filled.
  """
  def wait(n: jax.Array, _: tuple) -> tuple:
    plgpu.barrier_wait(consumed.at[lax.rem(n, mosaic.int32(num_stages))])
    return ()
  lax.fori_loop(jnp.maximum(filled - num_stages, 0), filled, wait, ())
