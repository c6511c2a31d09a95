"""What the computing warpgroup of a part does: it folds blocks of keys, as they come, into results.

Letters: as in `parts`.
"""

import functools
from typing import Any, Callable, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from attn_core.kernels.gpu import mosaic, wgmma as products
from attn_core.kernels.gpu.split_kv import kernel as parts, quantized_kv as small
from attn_core.kernels.gpu.flash.logits import Logits
from attn_core.kernels.common.online_softmax import LOG2E


class _Running(NamedTuple):
  """The softmax of the keys seen so far; see `kernels.softmax.Running`."""

  highest: Any  # [R]: logits times log2(e); -inf before the first visible key
  total: Any  # [C, R]: to be summed over C
  output: Any  # [E', R]


class Fold(NamedTuple):
  """Folds blocks of keys and values, as they arrive, into results of a part."""

  shape: parts.Shape
  logits: Logits
  extras: Any  # of `Logits`
  tile: Callable  # n -> tile of `Logits`: rows and the keys of the n-th block of the line
  scratch: parts.Scratch
  interpret: bool  # whether the kernel is interpreted
  scales: small.Scales | None = None  # of keys and values in 8 bits

  def run(self, visit: parts.Visit, out, lse):
    """From the first block to the copy of the results to references [E', R] and [R]."""
    shape = self.shape
    running = _Running(
        mosaic.filled(-jnp.inf, (shape.rows,), mosaic.COLUMNS),
        mosaic.filled(0, (parts.BLOCK, shape.rows), mosaic.TILE),
        mosaic.filled(0, (shape.value_rows, shape.rows), mosaic.TILE))
    plgpu.barrier_wait(self.scratch.query_full)
    bounds = visit.first, visit.first_full, visit.end_full, visit.end
    if visit.first_full is None:
      bounds = None, visit.first, visit.end_full, visit.end
    for first, end, masked in zip(bounds, bounds[1:], (True, False, True)):
      if first is not None:
        running = lax.fori_loop(first, end, functools.partial(
            lambda masked, n, x: self.step(n, n - visit.first, x, masked), masked), running)
    self.write(running, out, lse)

  def step(self, n, number, running: _Running, masked: bool) -> _Running:
    """Folds in the n-th block of the line, the `number`-th of the part."""
    scratch, unit = self.scratch, self.logits.unit
    slots = tuple(lax.rem(number, mosaic.int32(stages)) for stages in self.shape.stages)
    plgpu.barrier_wait(scratch.key_full.at[slots[0]])
    scores, spoilt, factors = (self.scores if self.scales is None else self.small_scores)(
        slots, masked)
    plgpu.barrier_arrive(scratch.key_free.at[slots[0]])
    scores = scores + 0.0 * scores  # NaN where not finite
    if spoilt is not None:
      scores = scores + parts.along(spoilt, scores.shape, 0)
    logits, _ = self.logits.of(self.extras, self.tile(n) if masked else None, scores, masked)
    highest = jnp.maximum(running.highest, logits.max(axis=0) * unit)
    # While a row has seen nothing, its highest is -inf, and -inf - -inf would be NaN.
    reference = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp2(logits * unit - parts.along(reference, logits.shape, 1))
    shrink = jnp.exp2(running.highest - reference)
    scaled = weights if factors is None else weights * parts.along(factors, weights.shape, 0)
    parts.store_turned(scratch.weights, scaled)
    plgpu.commit_smem()
    values = scratch.converted
    if self.scales is None:
      values = scratch.value.at[slots[1]]
      if not masked:
        plgpu.barrier_wait(scratch.value_full.at[slots[1]])
    def meanwhile():
      return (running.total * parts.along(shrink, running.total.shape, 1) + weights,
              running.output * parts.along(shrink, running.output.shape, 1))
    fresh, (total, output) = products.beside(values.T, scratch.weights.T, meanwhile)
    if self.scales is None:
      plgpu.barrier_arrive(scratch.value_free.at[slots[1]])
    return _Running(highest, total, output + fresh)

  def scores(self, slots, masked: bool):
    """(scores [C, R], NaN [C] for keys whose values are not finite or None, None)."""
    scratch, (key, value) = self.scratch, slots
    scores, _ = products.beside(scratch.key.at[key], scratch.query.T)
    if not masked:
      return scores, None, None
    plgpu.barrier_wait(scratch.value_full.at[value])
    return scores, self.shield(scratch.value.at[value]), None

  def small_scores(self, slots, masked: bool):
    """As `scores`, with factors [C] of the weights or None; converts the values."""
    scratch, scales, (key, value) = self.scratch, self.scales, slots
    def pieces():
      for columns, x in small.load(
          scratch.key.at[key], self.shape.width, scratch.query.dtype):
        yield x, scratch.query.at[:, columns].T
    def convert():
      plgpu.barrier_wait(scratch.value_full.at[value])
      # Until all warps are past the last product of values, it may read what is written now.
      plgpu.commit_smem()
      for columns, x in small.load(
          scratch.value.at[value], self.shape.value_width, scratch.converted.dtype):
        scratch.converted[:, columns] = x
      spoilt, factors = None, scales.rows(True, value)
      plgpu.barrier_arrive(scratch.value_free.at[value])
      if masked and scales.small.floats:
        plgpu.commit_smem()
        spoilt = self.shield(scratch.converted)
      if masked and factors is not None:
        zero = 0.0 * factors  # or NaN
        factors = jnp.where(zero == 0.0, factors, 0.0)
        spoilt = zero if spoilt is None else spoilt + zero
      return spoilt, factors
    scores = products.of_registers(
        (parts.BLOCK, self.shape.rows), pieces(), interpret=self.interpret)
    spoilt, factors = convert()
    rows = scales.rows(False, key)
    scores = scores * (scales.number(False) if rows is None else parts.along(rows, scores.shape, 0))
    return scores, spoilt, factors

  def shield(self, values):
    """Replaces values that are not finite by 0; returns NaN [C] for their keys, 0 for others.

    0 * NaN is NaN, and would reach those from whom the key is hidden.

    Args:
      values: reference [C, E'].
    """
    def columns(n, spoilt):  # few at a time, for the sake of registers
      part = values.at[:, pl.ds(n * parts.BLOCK, parts.BLOCK)]
      value = mosaic.load(part, mosaic.TILE).astype(jnp.float32)
      zero = self.within(0.0 * value, 1, n * parts.BLOCK)  # or NaN
      part[...] = jnp.where(zero == 0.0, value, 0.0).astype(values.dtype)
      return spoilt + zero.sum(axis=1)
    spoilt = lax.fori_loop(
        mosaic.int32(0), mosaic.int32(self.shape.value_rows // parts.BLOCK), columns,
        mosaic.filled(0, (parts.BLOCK,), mosaic.ROWS))
    plgpu.commit_smem()
    return spoilt

  def within(self, x, axis: int, first):
    """0 instead of what lies beyond the value width, along an axis that begins at `first`."""
    shape = self.shape
    if shape.value_rows == shape.value_width:
      return x
    numbers = plgpu.broadcasted_iota(
        jnp.int32, (x.shape[axis],), 0, layout=mosaic.COLUMNS if axis else mosaic.ROWS)
    numbers = parts.along(lax.optimization_barrier(numbers + first), x.shape, axis)
    return jnp.where(numbers < mosaic.int32(shape.value_width), x, 0.0)

  def write(self, running: _Running, out, lse):
    """Normalises and copies a part's results."""
    scratch, (highest, total, output) = self.scratch, running
    output, total = self.within(output, 0, 0), total.sum(axis=0)
    number = None if self.scales is None else self.scales.number(True)
    if number is not None:  # whatever it is, it is nothing to a row that saw nothing
      number = jnp.where(total == 0.0, 0.0, jnp.full_like(total, number))
      output = output * parts.along(number, output.shape, 1)
    # A row that saw a value which is not finite is NaN in all its columns, and in its lse.
    total = total + 0.0 * output.sum(axis=0)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    scratch.out[...] = output * parts.along(1 / total, output.shape, 1)
    scratch.lse[...] = jnp.where(empty, -jnp.inf, highest + jnp.log(total) * LOG2E)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out, out)
    plgpu.copy_smem_to_gmem(scratch.lse, lse)
    plgpu.wait_smem_to_gmem(0)
