"""Decoding in plain XLA: a few queries a row against many keys, each of which is read once.

One row of the batch after another, all its heads together, and of its keys only the blocks that
its mask leaves visible. So the time goes by the live keys of every row, and a row's result has the
same bits in any batch: the order of its sums depends on its own mask and on the block's size alone.

  scores[c, k, r] = sum over d of query[k, r, d] * key[c, k, d]

Few queries make products too thin for a matrix product to run at the memory's speed; on a CPU they
are sums that vectorise, and read every number where it lies in the cache. Flash-decoding,
https://pytorch.org/blog/flash-decoding/.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K, D query and
key width, E value width; C keys of a block, R = T * G rows of a key head (token-major).
"""

import functools
from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from attn_core.caches import quantize
from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.xla import flash as blockwise, tile_ops as steps, cpu_matvec as sums, tiling as tuned
from attn_core.masks import block_map as blocks, tile as tiles
from attn_core.types import AttentionSpec, BlockSizes, Operands


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  levels = _cut(operands, spec, block_sizes)
  batch, length, heads, _ = operands.query.shape
  problem, width = levels[-1], operands.value.shape[-1]

  def row(b, results):
    place = steps.Place(b, 0)
    rows = steps.scaled_query(problem, place, None)

    def key_block(problem, j, running, masked):
      block = _Block(problem, b, j)
      logits = _logits(block, rows)
      if masked:
        # 0 * NaN is NaN, so what may be hidden is taken out of the values.
        seen = _seen(problem, (b, j))
        if seen.shape[1:] == (1, 1, 1):  # who sees a key, all do
          kept = jnp.broadcast_to(seen[:, :, 0, 0], (problem.sizes.block_kv, problem.heads))
        else:
          kept = _finite(block)  # and spoils who sees its key
          logits = jnp.where(kept[..., None], logits, jnp.nan)
        block = block.with_shielded_values(kept)
        logits = _hide(problem, seen, logits)
      weigh = lambda weights: _weigh(block, weights[..., 0])[None]
      return softmax.update(
          running, logits[..., None], weigh,
          exp=lambda x: lax.optimization_barrier(steps.weights_of(problem, x)), axis=0,
          fold=sums.fold)

    running = softmax.start((1, problem.heads, rows.shape[1]), width, problem.dtype)
    for level in levels:
      running = steps.visit(level, place, 0, functools.partial(key_block, level), running)
    out, lse = (x[0] for x in softmax.finish(running, steps.row_sinks(problem, place)))
    # A mean of finite values is finite: who saw another one says so in all that it gives.
    finite = jnp.isfinite(out).all(-1, keepdims=True)
    out, lse = (jnp.where(finite, x, jnp.nan) for x in (out, lse))
    return Residuals(steps.write_rows(problem, place, None, results.out, out),
                     steps.write_row_numbers(problem, place, 0, results.lse, lse[..., 0]))

  return steps.loop(0, batch, row, Residuals(
      jnp.zeros((batch, length, heads, width), operands.query.dtype),
      jnp.zeros((batch, heads, length), steps.lse_dtype(spec))))


def _cut(operands, spec, block_sizes) -> list[steps.Problem]:
  """One block of queries, and the blocks of keys that each row must visit. Nothing is padded.

  Keys that are visible all together are cut into large blocks, which take less time each; what is
  left into small ones, so that a row computes few keys that it does not see. Who fixes the size of
  a block has blocks of that size only.
  """
  (_, queries, _, _), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  elements = key_heads * max(operands.key.shape[-1], operands.value.shape[-1])
  block_kv = min(keys, block_sizes.block_kv or tuned.decode_block(keys, elements))
  if block_kv > sums.FAN:  # another size would be folded part by part
    block_kv -= block_kv % sums.FAN
  sizes = blocks.Sizes(queries, keys, queries, block_kv)
  kinds = blocks.block_kinds(steps.mask_of(operands, spec), sizes)
  kinds = blocks.merge_heads(kinds, kinds.shape[1])
  # XLA:CPU takes the bits of a whole float8 cache before the loop: a copy in 8 bits, but to cut a
  # block out of a float8 array and take its bits then is several times as slow.
  operands = operands._replace(
      key=quantize.bits(operands.key), value=quantize.bits(operands.value))
  problem = lambda sizes, visits: steps.Problem(operands, spec, sizes, key_heads, visits)
  large = tuned.decode_large_block(keys, elements)
  if block_sizes.block_kv or large <= block_kv:
    return [problem(sizes, blocks.block_map(kinds))]
  joined, left = blocks.join_full(kinds, large // block_kv)
  return [problem(sizes._replace(block_kv=large), blocks.full_map(joined)),
          problem(sizes, blocks.block_map(left))]


def _start(sizes: blocks.Sizes, j):
  """The first key of a block; the last block begins earlier where it would reach past the keys."""
  return jnp.minimum(j * sizes.block_kv, sizes.keys - sizes.block_kv)


class _Block(NamedTuple):
  """One block of a row's keys, cut out of the cache wherever it is read."""

  problem: steps.Problem
  batch: Any
  number: Any
  values: Any = None  # [C, K, E] and
  value_scale: Any = None  # [C, K]: taken instead of the cache's; None: the cache's

  def cut(self, name: str, keys: tuple[int, int], columns: tuple[int, int]):
    """[length, K, width] of "key" or "value", by (first, number) of either axis."""
    if name == "value" and self.values is not None:
      return self.values[keys[0]:sum(keys), :, columns[0]:sum(columns)]
    x = getattr(self.problem.operands, name)
    start = _start(self.problem.sizes, self.number) + keys[0]
    if sums.WIDENS_WHOLE and x.dtype == jnp.bfloat16:
      x, start = lax.optimization_barrier((x, start))  # so `x` is another one in every step
    return tiles.slice_at(x, (self.batch, start, 0, columns[0]),
                          (1, keys[1], self.problem.heads, columns[1]))[0]

  def scales(self, name: str):
    """[C, K] of a cache in 8 bits, or None."""
    if name == "value" and self.value_scale is not None:
      return self.value_scale
    scale = getattr(self.problem.operands, f"{name}_scale")
    sizes = self.problem.sizes
    return scale if scale is None else tiles.slice_at(
        scale, (self.batch, _start(sizes, self.number), 0),
        (1, sizes.block_kv, self.problem.heads))[0].astype(_dtype(self.problem))

  def part(self, name: str, keys: tuple[int, int], columns: tuple[int, int]):
    """`cut` in the dtype of sums, without its scales."""
    return quantize.unscaled(self.cut(name, keys, columns)).astype(_dtype(self.problem))

  def whole(self, name: str):
    """[C, K, D or E], dequantised."""
    width = getattr(self.problem.operands, name).shape[-1]
    x, scale = self.cut(name, (0, self.problem.sizes.block_kv), (0, width)), self.scales(name)
    if scale is not None:
      return quantize.dequantize(x, scale, _dtype(self.problem))
    return quantize.unscaled(x).astype(self.problem.operands.query.dtype)

  def with_shielded_values(self, kept):
    """Zeros instead of the values that are not `kept`, bool [C, K]."""
    width, keys = self.problem.operands.value.shape[-1], self.problem.sizes.block_kv
    values, scale = self.cut("value", (0, keys), (0, width)), self.scales("value")
    # The barrier keeps the choice out of the products: XLA:CPU would compile these twice, for
    # blocks with and without zeros, and round them in different ways.
    values = lax.optimization_barrier(jnp.where(kept[..., None], values, 0))
    return self._replace(
        values=values, value_scale=scale if scale is None else jnp.where(kept, scale, 0))


def _finite(block: _Block):
  """bool [C, K]: whether a value is finite."""
  width, keys = block.problem.operands.value.shape[-1], (0, block.problem.sizes.block_kv)
  def whole():
    return jnp.isfinite(block.whole("value")).all(-1)

  def summed():
    scale = block.scales("value")
    def nothing(i):  # 0, or NaN
      x = block.part("value", keys, (i, sums.LANES))
      return x - x if scale is None else (x - x) * scale[..., None]
    return sums.over_width(width, nothing) == 0

  return lax.platform_dependent(cpu=whole if width % sums.LANES else summed, default=whole)


def _logits(block: _Block, rows):
  """Logits [C, K, R] of rows [K, R, D], NaN where they are not finite."""
  problem = block.problem
  spec, rest = problem.spec, steps.scale_parts(problem)[1]
  logits = _scores(block, rows).astype(problem.dtype)
  logits = jnp.where(jnp.isfinite(logits), logits, jnp.nan)
  logits = logits if rest == 1 else logits * jnp.asarray(rest, problem.dtype)
  if spec.logits_soft_cap is not None:
    logits = jnp.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
  return logits


def _seen(problem, tile):
  """What the mask shows, bool [C or 1, K or 1, T or 1, G or 1], of a block's own keys.

  The last block has keys of the block before, where they are not multiples of its size.
  """
  (b, j), sizes, heads, group = tile, problem.sizes, problem.heads, problem.group

  def orient(x):  # [H or 1, T or 1, C or 1] -> [C or 1, K or 1, T or 1, G or 1]
    x = x.reshape(*((heads, group) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
    return x.transpose(3, 0, 2, 1)

  where = tiles.Tile(b, 0, 0, _start(sizes, j), heads * group, sizes.queries, sizes.block_kv)
  mask, at = tiles.cut(problem.spec.mask, problem.operands.mask, where, orient)
  seen = mask.visible(at)
  if steps.key_padding(sizes):
    seen = seen & (at.key_index >= j * sizes.block_kv)
  return seen


def _hide(problem, seen, logits):
  """-inf where `seen` hides a key; logits [C, K, R]."""
  four = (*logits.shape[:2], problem.sizes.queries, problem.group)
  return jnp.where(jnp.broadcast_to(seen, four).reshape(logits.shape), logits, -jnp.inf)


# --- The two products, and reductions over the keys. ---------------------------------------------


def _dtype(problem):
  """The dtype of sums."""
  return jnp.promote_types(problem.dtype, jnp.float32)


def _scores(block: _Block, rows):
  """rows [K, R, D] . keys [C, K, D] -> [C, K, R]."""
  problem = block.problem
  def dots(rows):
    return jnp.einsum("krd,ckd->ckr", rows, block.whole("key"), precision=problem.spec.precision,
                      preferred_element_type=_dtype(problem))

  def summed(rows):
    found = sums.scores(rows.astype(_dtype(problem)), lambda i: block.part(
        "key", (0, problem.sizes.block_kv), (i, sums.LANES)))
    scale = block.scales("key")
    return found if scale is None else found * scale[..., None]

  if not sums.suit(rows.shape[1], rows.shape[2]):
    return dots(rows)
  return lax.platform_dependent(rows, cpu=summed, default=dots)


def _weigh(block: _Block, weights):
  """weights [C, K, R] . values [C, K, E] -> [K, R, E]."""
  problem, width = block.problem, block.problem.operands.value.shape[-1]
  def dots(weights):
    value = block.whole("value")
    return jnp.einsum("ckr,cke->kre", weights.astype(value.dtype), value,
                      precision=problem.spec.precision, preferred_element_type=_dtype(problem))

  def summed(weights):
    scale, weights = block.scales("value"), weights.astype(_dtype(problem))
    weights = weights if scale is None else weights * scale[..., None]
    widened = problem.operands.value.dtype.itemsize < weights.dtype.itemsize
    return sums.weigh(weights, lambda first, length: block.part(
        "value", (first, length), (0, width)), width, widened=widened)

  many = weights.shape[2] >= sums.MANY_ROWS
  found = dots(weights) if many else lax.platform_dependent(weights, cpu=summed, default=dots)
  return found.astype(problem.dtype)


# --- Derivatives: those of block-wise attention. -------------------------------------------------


def _dequantized(operands: Operands) -> Operands:
  """The whole keys and values in the query's dtype: derivatives are no part of serving."""
  if operands.key_scale is None:
    return operands
  dtype = operands.query.dtype
  return operands._replace(
      key=quantize.dequantize(operands.key, operands.key_scale, dtype),
      value=quantize.dequantize(operands.value, operands.value_scale, dtype),
      key_scale=None, value_scale=None)


def backward(operands: Operands, *rest):
  """The cotangents of operands; see `kernel.Kernel`."""
  return blockwise.backward(_dequantized(operands), *rest)


def tangent(operands: Operands, *rest):
  """The derivative of (out, lse); see `kernel.Kernel`."""
  return blockwise.tangent(_dequantized(operands), *rest)


KERNEL = Kernel("decode", forward, backward, tangent)
