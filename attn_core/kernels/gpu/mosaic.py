"""What JAX's Mosaic GPU asks of a kernel, once for all of them.

Kernels are written for Hopper (sm_90a): warpgroups of 128 threads, matrix products of operands in
shared memory or, on the left, in registers, copies by the tensor memory accelerator (TMA).
"""

import inspect

import jax
from jax.experimental.mosaic.gpu import LoweringSemantics
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from attn_core.types import cdiv

# How a product of a warpgroup lies in its registers, and vectors along its rows and columns.
TILE = plgpu.Layout.WGMMA
ROWS, COLUMNS = TILE.reduce(1), TILE.reduce(0)
ROW_TILE = 64  # rows of a warpgroup's product are a multiple
COPIED_TOKENS = 8  # TMA copies arrays whose number of tokens is a multiple
SHARED_MEMORY = 227 * 1024  # bytes of a block
_SWIZZLES = (128, 64, 32)  # bytes
# Before jax 0.12 `load` takes an index, too.
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def effects():
  """Those of any kernel here where it is traced: none, but for what interpret mode does."""
  shape = jax.core.ShapedArray((128,), jnp.float32)
  scratch = plgpu.SMEM((128,), jnp.float32)
  return jax.make_jaxpr(lambda x: call(
      lambda *_: None, shape, x, scratch, grid=1, name="attn_core_nothing"))(shape).effects


def interpreted() -> bool:
  """Whether kernels traced now are interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
  return bool(effects())


def call(body, outputs, inputs, scratch, *, grid: int, name: str, warpgroups: int = 1):
  """Runs body(references of inputs, of outputs, of scratch) on every block of a grid.

  Args:
    outputs: tuple of `jax.core.ShapedArray`s. Not ShapeDtypeStruct, which inside shard_map must
      say over which axes of the mesh it varies.
    inputs: a tree of arrays.
    scratch: a tree of shared memory and barriers.
    grid: number of blocks; their axis is called "block".
    name: of the kernel, in profiles.
    warpgroups: of a block; their axis is called "warpgroup".

  Returns:
    The outputs.
  """
  arrays, structure = jax.tree.flatten(inputs)
  def kernel(*refs):
    *results, memory = refs[len(arrays):]
    body(jax.tree.unflatten(structure, refs[:len(arrays)]), tuple(results), memory)
  kernel.__name__ = name
  return plgpu.kernel(
      kernel, out_type=outputs, scratch_types=[scratch], grid=(grid,), grid_names=("block",),
      num_threads=warpgroups, thread_name="warpgroup",
      compiler_params=plgpu.CompilerParams(
          approx_math=True, lowering_semantics=LoweringSemantics.Lane))(*arrays)


def operand(shape, dtype, width: int | None = None):
  """Shared memory for operands of products, [..., rows, columns], as TMA and the products want it.

  Swizzled over as many bytes of a row as divide it.

  Args:
    shape: of it.
    dtype: of it.
    width: columns that are copied, the first ones; None: all.
  """
  columns = tile_columns(width or shape[-1], dtype)
  return plgpu.SMEM(shape, dtype, transforms=(
      plgpu.TilingTransform((8, columns)),
      plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)))


def tile_columns(width: int, dtype) -> int:
  """Columns of a tile of `operand`s, which can be cut between tiles."""
  size = jnp.dtype(dtype).itemsize
  return next(x for x in _SWIZZLES if width * size % x == 0) // size


def filled(value, shape, layout):
  """float32 registers."""
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def load(ref, layout):
  """Global or shared memory into registers."""
  return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def accumulate(total, left, right, *, interpret: bool):
  """total + left @ right.

  Args:
    total: float32 [R, N], in registers.
    left: [R, C], in registers.
    right: reference [C, N] in shared memory.
    interpret: whether the kernel is interpreted; there, no product takes registers.
  """
  if interpret:
    total = total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()
    return total
  return pl.run_state(lambda sums: plgpu.wgmma(sums, left, right))(plgpu.ACC.init(total))


def int32(x):
  """A number that jax_enable_x64 does not widen."""
  return np.int32(x)


def pack(x, width: int):
  """[B, tokens, heads, W] -> the same with tokens that TMA can copy and W padded to `width`."""
  tokens = cdiv(x.shape[1], COPIED_TOKENS) * COPIED_TOKENS
  padding = ((0, 0), (0, tokens - x.shape[1]), (0, 0), (0, width - x.shape[3]))
  return jnp.pad(x, padding) if tokens > x.shape[1] or width > x.shape[3] else x
