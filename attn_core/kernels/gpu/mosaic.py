# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers around JAX's Mosaic GPU that all kernels for Hopper share.

Kernels are written for Hopper (sm_90a): warpgroups of 128 threads, matrix products (WGMMA) of
operands in shared memory or, on the left, in registers, and copies by the tensor memory accelerator
(TMA).
"""

from collections.abc import Set
import dataclasses
import inspect
from typing import Any, Callable

import jax
from jax import lax
from jax._src.lib import cuda_versions  # None without a plugin for CUDA
from jax.experimental.mosaic.gpu import LoweringSemantics
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from attn_core.kernels.common import platform_guard
from attn_core.types import cdiv

Ref = Any  # a Pallas reference

# Register layouts of a warpgroup: a product, and vectors along its rows and along its columns.
TILE_LAYOUT = plgpu.Layout.WGMMA
VECTOR_LAYOUTS = ROW_LAYOUT, COLUMN_LAYOUT = TILE_LAYOUT.reduce(1), TILE_LAYOUT.reduce(0)
WGMMA_ROWS = 64  # a warpgroup's product has a multiple of this number of rows
TMA_TOKENS = 8  # TMA copies arrays with a multiple of this number of tokens
SHARED_MEMORY_BYTES = 227 * 1024  # of a thread block
REDUCTION_BYTES = 2048  # of it, for reductions across warps
# From 12.8.0 until 12.9.1, CUDA's assembler miscompiles masks; JAX's attention on Mosaic GPU
# refuses causal masks by the same numbers.
MISCOMPILING_CUDA = range(12080, 12091)
_SWIZZLES = (128, 64, 32)  # bytes
_NOTHING = "attn_core_nothing"  # the kernel that shows whether kernels are interpreted
# Before jax 0.12 `load` takes an index, too.
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def effects() -> Set:
  """Returns JAX's effects of any kernel traced now: none, except in interpret mode."""
  shape = jax.core.ShapedArray((128,), jnp.float32)
  scratch = plgpu.SMEM((128,), jnp.float32)
  return jax.make_jaxpr(lambda x: call(
      lambda *_: None, shape, x, scratch, grid=1, name=_NOTHING))(shape).effects


def interpreted() -> bool:
  """Returns whether kernels traced now run on the CPU (`plgpu.force_gpu_interpret_mode`)."""
  return bool(effects())


def cuda_version() -> int | None:
  """Returns the version of the CUDA runtime, such as 12080 for 12.8; None: unknown."""
  if cuda_versions is None:
    return None
  try:
    return cuda_versions.cuda_runtime_get_version()
  except RuntimeError:  # the plugin finds no runtime
    return None


def unsupported_reason() -> str | None:
  """Returns the reason why no kernel of this back end can run here; None if they can."""
  version = cuda_version()
  if version is None or version not in MISCOMPILING_CUDA or interpreted():
    return None
  return (f"CUDA {version // 1000}.{version % 1000 // 10}: from 12.8.0 until 12.9.1 its "
          "assembler miscompiles the masks of the kernels for Hopper; install jax[cuda13]")


def call(body: Callable[[Any, tuple[Ref, ...], Any], None], outputs: Any, inputs: Any,
         scratch: Any, *, grid: int, name: str, warpgroups: int = 1,
         reduction_bytes: int = REDUCTION_BYTES) -> Any:
  """Runs body(input references, output references, scratch references) on every thread block.

  Args:
    body: the kernel.
    outputs: tuple of `jax.core.ShapedArray`s. Not ShapeDtypeStruct, which inside shard_map must
      name the mesh axes over which it varies.
    inputs: a tree of arrays.
    scratch: a tree of shared memory and barriers.
    grid: number of thread blocks; the axis is called "block".
    name: of the kernel, in profiles.
    warpgroups: number of warpgroups of a thread block; the axis is called "warpgroup".
    reduction_bytes: shared memory for reductions across warps.

  Returns:
    The outputs.
  """
  arrays, structure = jax.tree.flatten(inputs)
  parameters = plgpu.CompilerParams(
      approx_math=True, lowering_semantics=LoweringSemantics.Lane)
  if reduction_bytes != REDUCTION_BYTES:
    parameters = dataclasses.replace(parameters, reduction_scratch_bytes=reduction_bytes)
  if arrays and name != _NOTHING and not interpreted():
    arrays = [platform_guard.guarded(arrays[0], "gpu"), *arrays[1:]]
  def kernel(*refs: Ref) -> None:
    *results, memory = refs[len(arrays):]
    body(jax.tree.unflatten(structure, refs[:len(arrays)]), tuple(results), memory)
  kernel.__name__ = name
  return plgpu.kernel(
      kernel, out_type=outputs, scratch_types=[scratch], grid=(grid,), grid_names=("block",),
      num_threads=warpgroups, thread_name="warpgroup",
      compiler_params=parameters)(*arrays)


def operand_smem(shape: tuple[int, ...], dtype: DTypeLike, width: int | None = None) -> Any:
  """Returns shared memory for operands of products, tiled and swizzled for TMA and WGMMA.

  The swizzle covers the largest number of bytes that divides a row.

  Args:
    shape: [..., rows, columns].
    dtype: of the elements.
    width: the number of columns that are copied, the first ones; None: all.
  """
  columns = tile_columns(width or shape[-1], dtype)
  return plgpu.SMEM(shape, dtype, transforms=(
      # jax 0.12 declares an abstract method of both that they inherit.
      plgpu.TilingTransform((8, columns)),  # type: ignore[abstract]
      plgpu.SwizzleTransform(  # type: ignore[abstract]
          columns * jnp.dtype(dtype).itemsize)))


def tile_columns(width: int, dtype: DTypeLike) -> int:
  """Returns the columns of a tile of `operand_smem`, which can be sliced between tiles."""
  size = jnp.dtype(dtype).itemsize
  return next(x for x in _SWIZZLES if width * size % x == 0) // size


def full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
  """Returns float32 registers filled with a value."""
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def load(ref: Ref, layout: Any) -> jax.Array:
  """Loads global or shared memory into registers."""
  return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def accumulate(acc: jax.Array, left: jax.Array, right: Ref, *, interpret: bool) -> jax.Array:
  """Returns acc + left @ right.

  Args:
    acc: float32 [rows, columns], in registers.
    left: [rows, inner], in registers.
    right: reference [inner, columns] in shared memory.
    interpret: whether the kernel is interpreted, where WGMMA does not take registers.
  """
  if interpret:
    acc = acc + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()
    return acc
  return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right))(plgpu.ACC.init(acc))


def broadcast_along(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
  """Returns a vector along an axis of `shape`, repeated along the other axis."""
  return lax.broadcast_in_dim(x, shape, [axis])


def store_transposed(ref: Ref, x: jax.Array) -> None:
  """Stores a tile in registers to shared memory, rows as columns."""
  ref.T[...] = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def int32(x: int) -> np.int32:
  """Returns a number that jax_enable_x64 does not widen."""
  return np.int32(x)


def pad_for_tma(x: jax.Array, width: int) -> jax.Array:
  """Pads [B, tokens, heads, x_width] to a number of tokens that TMA can copy, and to `width`."""
  tokens = cdiv(x.shape[1], TMA_TOKENS) * TMA_TOKENS
  padding = ((0, 0), (0, tokens - x.shape[1]), (0, 0), (0, width - x.shape[3]))
  return jnp.pad(x, padding) if tokens > x.shape[1] or width > x.shape[3] else x
