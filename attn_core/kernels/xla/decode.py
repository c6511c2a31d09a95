"""Decoding in plain XLA: a few queries a row against many keys, each of which is read once.

One row of the batch after another, all its heads together, and of its keys only the blocks that
its mask leaves visible. So the time goes by the live keys of every row, and a row's result has the
same bits in any batch: the order of its sums depends on its own mask and on the block's size alone.

  scores[c, k, r] = sum over d of query[k, r, d] * key[c, k, d]

Few queries make products too thin for a matrix product to run at the memory's speed; on a CPU they
are sums that vectorise. Flash-decoding, https://pytorch.org/blog/flash-decoding/.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K, D query and
key width, E value width; C keys of a block, R = T * G rows of a key head (token-major).
"""

import functools

from jax import lax
import jax.numpy as jnp

from attn_core.caches import quantize
from attn_core.kernels import softmax
from attn_core.kernels.kernel import Kernel, Residuals
from attn_core.kernels.xla import blockwise, steps, tuned
from attn_core.masks import blocks, tiles
from attn_core.types import AttentionSpec, BlockSizes, Operands

# From so many rows on, a matrix product is as fast on a CPU, too.
MANY_ROWS = 8
# Products that are summed side by side; a width that none of them divides takes a matrix product.
LANES = (32, 16)
# So many parts of an array are combined at once where it is reduced elementwise.
FAN = 16


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  problem = _cut(operands, spec, block_sizes)
  batch, length, heads, _ = operands.query.shape
  width = operands.value.shape[-1]

  def row(b, results):
    place = steps.Place(b, 0)
    rows = steps.scaled_query(problem, place, None)

    def key_block(j, running, masked):
      keys, values = (functools.partial(_cut_out, problem, name, (b, j))
                      for name in ("key", "value"))
      logits = _logits(problem, rows, keys(0, problem.sizes.block_kv))
      if masked:
        # 0 * NaN is NaN: a value that is not finite is taken out, and spoils who sees its key.
        value = values(0, problem.sizes.block_kv)
        finite = jnp.isfinite(value).all(-1, keepdims=True)
        value = jnp.where(finite, value, 0)
        values = lambda first, length: value[first:first + length]
        logits = _hide(problem, (b, j), jnp.where(finite, logits, jnp.nan))
      weigh = lambda weights: _weigh(problem, weights[..., 0], values)[None]
      return softmax.update(
          running, logits[..., None], weigh,
          exp=lambda x: steps.weights_of(problem, x), axis=0, fold=_fold)

    running = softmax.start((1, problem.heads, rows.shape[1]), width, problem.dtype)
    running = steps.visit(problem, place, 0, key_block, running)
    out, lse = (x[0] for x in softmax.finish(running, steps.row_sinks(problem, place)))
    # A mean of finite values is finite: who saw another one says so in all that it gives.
    finite = jnp.isfinite(out).all(-1, keepdims=True)
    out, lse = (jnp.where(finite, x, jnp.nan) for x in (out, lse))
    return Residuals(steps.write_rows(problem, place, None, results.out, out),
                     steps.write_row_numbers(problem, place, 0, results.lse, lse[..., 0]))

  return steps.loop(0, batch, row, Residuals(
      jnp.zeros((batch, length, heads, width), operands.query.dtype),
      jnp.zeros((batch, heads, length), steps.lse_dtype(spec))))


def _cut(operands, spec, block_sizes) -> steps.Problem:
  """One block of queries, and the blocks of keys that each row must visit. Nothing is padded."""
  (_, queries, _, _), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  elements = key_heads * max(operands.key.shape[-1], operands.value.shape[-1])
  block_kv = min(keys, block_sizes.block_kv or tuned.decode_block(keys, elements))
  if block_kv > FAN:  # another size would be folded part by part
    block_kv -= block_kv % FAN
  sizes = blocks.Sizes(queries, keys, queries, block_kv)
  kinds = blocks.block_kinds(steps.mask_of(operands, spec), sizes)
  kinds = blocks.merge_heads(kinds, kinds.shape[1])
  return steps.Problem(operands, spec, sizes, key_heads, blocks.block_map(kinds))


def _start(sizes: blocks.Sizes, j):
  """The first key of a block; the last block begins earlier where it would reach past the keys."""
  return jnp.minimum(j * sizes.block_kv, sizes.keys - sizes.block_kv)


def _cut_out(problem, name, block, first, length):
  """Keys or values first..first + length - 1 of a block, dequantised: [length, K, D or E]."""
  (b, j), operands = block, problem.operands
  x, scale = getattr(operands, name), getattr(operands, f"{name}_scale")
  start = _start(problem.sizes, j) + first
  sizes = (1, length, problem.heads)
  # XLA:CPU takes the bits of a whole float8 cache before the loop: a copy in 8 bits, but to cut a
  # block out of a float8 array and take its bits then is several times as slow.
  part = tiles.slice_at(quantize.bits(x), (b, start, 0, 0), (*sizes, x.shape[-1]))[0]
  if scale is None:
    return part
  scale = tiles.slice_at(scale, (b, start, 0), sizes)[0]
  return quantize.dequantize(part, scale, _dtype(problem))


def _logits(problem, rows, key):
  """Logits [C, K, R] of rows [K, R, D], NaN where they are not finite."""
  spec, rest = problem.spec, steps.scale_parts(problem)[1]
  logits = _scores(problem, rows, key).astype(problem.dtype)
  logits = jnp.where(jnp.isfinite(logits), logits, jnp.nan)
  logits = logits if rest == 1 else logits * jnp.asarray(rest, problem.dtype)
  if spec.logits_soft_cap is not None:
    logits = jnp.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
  return logits


def _hide(problem, tile, logits):
  """-inf where the mask hides a key, and where the block before the last one had it already."""
  (b, j), sizes, heads, group = tile, problem.sizes, problem.heads, problem.group

  def orient(x):  # [H or 1, T or 1, C or 1] -> [C or 1, K or 1, T or 1, G or 1]
    x = x.reshape(*((heads, group) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
    return x.transpose(3, 0, 2, 1)

  where = tiles.Tile(b, 0, 0, _start(sizes, j), heads * group, sizes.queries, sizes.block_kv)
  mask, at = tiles.cut(problem.spec.mask, problem.operands.mask, where, orient)
  seen = mask.visible(at)
  if steps.key_padding(sizes):
    seen = seen & (at.key_index >= j * sizes.block_kv)
  four = (sizes.block_kv, heads, sizes.queries, group)
  return jnp.where(jnp.broadcast_to(seen, four).reshape(logits.shape), logits, -jnp.inf)


# --- The two products, and reductions over the keys. ---------------------------------------------


def _dtype(problem):
  """The dtype of sums."""
  return jnp.promote_types(problem.dtype, jnp.float32)


def _scores(problem, rows, key):
  """rows [K, R, D] . key [C, K, D] -> [C, K, R]."""
  def dots(rows, key):
    return jnp.einsum("krd,ckd->ckr", rows, key, precision=problem.spec.precision,
                      preferred_element_type=_dtype(problem))

  lanes = next((n for n in LANES if key.shape[-1] % n == 0), None)
  def sums(rows, key):
    rows, key = (x.astype(_dtype(problem)) for x in (rows, key))
    total = functools.reduce(jnp.add, [
        rows[None, :, :, i:i + lanes] * key[:, :, None, i:i + lanes]
        for i in range(0, key.shape[-1], lanes)])
    while total.shape[-1] > 2:
      half = total.shape[-1] // 2
      total = total[..., :half] + total[..., half:]
    return total[..., 0] + total[..., 1]

  if rows.shape[1] >= MANY_ROWS or lanes is None:
    return dots(rows, key)
  return lax.platform_dependent(rows, key, cpu=sums, default=dots)


def _weigh(problem, weights, values):
  """weights [C, K, R] . values [C, K, E] -> [K, R, E]; values(first, length) cuts some of them."""
  count = weights.shape[0]
  def dots(weights):
    value = values(0, count)
    return jnp.einsum("ckr,cke->kre", weights.astype(value.dtype), value,
                      precision=problem.spec.precision, preferred_element_type=_dtype(problem))

  def sums(weights):
    # Every part is cut out of the cache by itself, so that it is read where it is multiplied: what
    # several parts share would be copied first.
    length = count // FAN if count % FAN == 0 else count
    products = [weights[i:i + length, ..., None].astype(_dtype(problem))
                * values(i, length)[:, :, None].astype(_dtype(problem))
                for i in range(0, count, length)]
    return _fold_cpu(jnp.add, functools.reduce(jnp.add, products))[0]

  many = weights.shape[2] >= MANY_ROWS
  found = dots(weights) if many else lax.platform_dependent(weights, cpu=sums, default=dots)
  return found.astype(problem.dtype)


def _fold(combine, x):
  """`x` reduced over its first axis, which is kept, by jnp.maximum or jnp.add."""
  reduce = jnp.max if combine is jnp.maximum else jnp.sum
  return lax.platform_dependent(x, cpu=functools.partial(_fold_cpu, combine),
                                default=lambda x: reduce(x, 0, keepdims=True))


def _fold_cpu(combine, x):
  """`_fold` by elementwise steps, which XLA:CPU vectorises and spreads over threads."""
  while x.shape[0] % FAN == 0:
    x = functools.reduce(combine, jnp.split(x, FAN))
  return functools.reduce(combine, jnp.split(x, x.shape[0]))


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
