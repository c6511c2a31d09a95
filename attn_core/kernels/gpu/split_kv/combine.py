"""The results of parts as one; see `parts`.

A block of threads merges 64 columns of a line, and asks for the results of several parts together.

Letters: as in `parts`.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.split_kv import kernel as parts
from attn_core.kernels.common.online_softmax import LOG2E

AT_ONCE = 8  # parts


class _Merged(NamedTuple):
  """References of the merge."""

  out: Any  # float32 [L, N, E', R]
  lse: Any  # float32 [L, N, R]
  sinks: Any  # float32 [L, R], or None
  first: Any  # int32 [L]: the first part of a line that there are results of
  end: Any  # int32 [L]: behind the last one


def merge(shape: parts.Shape, out, lse, sinks, live, dtype):
  """The results of all parts of every line as one.

  Args:
    out: float32 [L, N, E', R].
    lse: float32 [L, N, R], times log2(e).
    sinks: float32 [L, R], a logit per row without a value, or None.
    live: int32 [L] (first, end): of which parts there are results.
    dtype: of the output.

  Returns:
    (out [L, R, E], lse float32 [L, R], natural); 0 and -inf, or the sink, where nothing was seen.
  """
  lines, _, width, rows = out.shape
  out, lse = mosaic.call(
      functools.partial(_merge, shape),
      (jax.core.ShapedArray((lines, rows, width), dtype),
       jax.core.ShapedArray((lines, rows), jnp.float32)),
      _Merged(out, lse, sinks, *live),
      (mosaic.operand((rows, mosaic.ROW_TILE), dtype), plgpu.SMEM((rows,), jnp.float32)),
      grid=lines * (width // mosaic.ROW_TILE), name="attn_core_merge")
  return out[..., :shape.value_width], lse


def _merge(shape: parts.Shape, inputs: _Merged, outputs, scratch):
  tiles = mosaic.int32(shape.value_rows // mosaic.ROW_TILE)
  block = lax.axis_index("block")
  line, tile = lax.div(block, tiles), lax.rem(block, tiles)
  columns = pl.ds(tile * mosaic.ROW_TILE, mosaic.ROW_TILE)
  first, end = inputs.first[line], inputs.end[line]
  area = mosaic.ROW_TILE, shape.rows

  def fold(turn, running):
    highest, total, output = running
    numbers = [turn * AT_ONCE + n for n in range(min(AT_ONCE, shape.parts))]
    at = [jnp.clip(n, first, end - 1) for n in numbers]
    lses = [mosaic.load(inputs.lse.at[line, n], mosaic.COLUMNS) for n in at]
    outs = [mosaic.load(inputs.out.at[line, n, columns], mosaic.TILE) for n in at]
    lses = [jnp.where((n >= first) & (n < end), x, -jnp.inf) for n, x in zip(numbers, lses)]
    joint = functools.reduce(jnp.maximum, lses, highest)
    reference = jnp.where(joint == -jnp.inf, 0.0, joint)
    shrink = jnp.exp2(highest - reference)
    total, output = total * shrink, output * parts.along(shrink, area, 1)
    for x, y in zip(lses, outs):
      weight = jnp.exp2(x - reference)
      total, output = total + weight, output + y * parts.along(weight, area, 1)
    return joint, total, output

  start = (mosaic.filled(-jnp.inf, (shape.rows,), mosaic.COLUMNS),
           mosaic.filled(0, (shape.rows,), mosaic.COLUMNS), mosaic.filled(0, area, mosaic.TILE))
  turn = lambda n: lax.div(n, mosaic.int32(AT_ONCE))
  highest, total, output = lax.fori_loop(
      turn(first), turn(end + mosaic.int32(AT_ONCE - 1)), fold, start)
  if inputs.sinks is not None:
    sink = mosaic.load(inputs.sinks.at[line], mosaic.COLUMNS) * LOG2E
    joint = jnp.maximum(highest, sink)
    reference = jnp.where(joint == -jnp.inf, 0.0, joint)
    shrink = jnp.exp2(highest - reference)
    total = total * shrink + jnp.exp2(sink - reference)
    highest, output = joint, output * parts.along(shrink, area, 1)
  empty = total == 0.0
  total = jnp.where(empty, 1.0, total)
  results, numbers = scratch
  parts.store_turned(results, output * parts.along(1 / total, area, 1))
  numbers[...] = jnp.where(empty, -jnp.inf, (highest + jnp.log(total) * LOG2E) * (1 / LOG2E))
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(results, outputs[0].at[line, :, columns])
  pl.when(tile == 0)(lambda: plgpu.copy_smem_to_gmem(numbers, outputs[1].at[line]))
  plgpu.wait_smem_to_gmem(0)
