"""Block-wise attention in plain XLA: forward, backward and tangent in linear memory.

Loops over one batch row and a few key heads at a time, then over blocks; which
blocks are visited, and which of them evaluate the mask, the `BlockMap` says. The
G query heads of a key head are folded into the rows, so keys are never repeated.

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.

Letters: B batch, T query length, S key length, H query heads, K key heads,
G = H / K, D query and key width, E value width; N key heads computed together,
Q and C tokens of a query and a key block, R = Q * G rows (token-major).
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core import dropout
from attn_core.kernels import softmax
from attn_core.kernels.kernel import Kernel, Residuals
from attn_core.kernels.xla import tuned
from attn_core.masks import algebra, blocks, tiles
from attn_core.types import AttentionSpec, BlockSizes, Operands


class Problem(NamedTuple):
  """One attention, cut into blocks; query-side arrays are padded to whole blocks."""

  operands: Operands
  spec: AttentionSpec
  sizes: blocks.Sizes
  heads: int  # N
  visits: blocks.BlockMap  # of query blocks (forward) or of key blocks (backward)

  @property
  def group(self) -> int:
    return self.operands.query.shape[2] // self.operands.key.shape[2]

  @property
  def num_steps(self) -> int:
    """Pairs of a batch row and N key heads."""
    return self.operands.key.shape[0] * (self.operands.key.shape[2] // self.heads)

  @property
  def dtype(self):
    """The dtype of logits, sums and accumulators."""
    return self.spec.softmax_dtype


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  problem = _cut(operands, spec, block_sizes, backward=False)
  batch, length, heads, _ = problem.operands.query.shape
  width = operands.value.shape[-1]

  def step(n, results):
    place = _place(problem, n)
    keys, values = _keys_and_values(problem, place)

    def query_block(i, results):
      rows = _scaled_query(problem, place, i)

      def key_block(j, running, masked):
        start = j * problem.sizes.block_kv
        logits, _ = _logits(problem, place, rows, _block(keys, start, problem.sizes.block_kv),
                            (i, j, masked))
        return softmax.update(running, logits, lambda weights: _dot(
            _drop(problem, place, (i, j), weights).astype(values.dtype),
            _block(values, start, problem.sizes.block_kv), problem))

      running = softmax.start((problem.heads, rows.shape[1]), width, problem.dtype)
      running = _visit(problem, place, i, key_block, running)
      out, lse = softmax.finish(running, _row_sinks(problem, place))
      return Residuals(
          _write_rows(problem, place, i, results.out, out),
          _write_row_numbers(problem, place, i, results.lse, lse[..., 0]))

    return _loop(0, problem.sizes.num_query_blocks, query_block, results)

  results = Residuals(jnp.zeros((batch, length, heads, width), operands.query.dtype),
                      jnp.zeros((batch, heads, length), _lse_dtype(spec)))
  results = _loop(0, problem.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


def tangent(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
            residuals: Residuals, tangents: dict) -> Residuals:
  """The derivative of (out, lse) along `tangents`, block by block.

  d_lse = sum_s P * d_logits;  d_out = sum_s P * (d_logits * value + d_value) - d_lse * out
  """
  problem = _cut(operands, spec, block_sizes, backward=False)
  out, lse = _pad_residuals(problem, residuals)
  moved = operands._replace(**{**dict(bias=None, sinks=None), **tangents})
  moved = problem._replace(operands=_pad_queries(moved, problem.sizes))
  width = operands.value.shape[-1]

  def step(n, results):
    place = _place(problem, n)
    keys, values = _keys_and_values(problem, place)
    d_keys = _key_rows(moved.operands.key, problem, place) if "key" in tangents else None
    d_values = _key_rows(moved.operands.value, problem, place) if "value" in tangents else None
    tile_of = lambda x, j: _block(x, j * problem.sizes.block_kv, problem.sizes.block_kv)

    def query_block(i, results):
      rows = _scaled_query(problem, place, i)
      d_rows = _scaled_query(moved, place, i) if "query" in tangents else None
      row_lse = _row_numbers(problem, place, i, lse)[..., None]

      def d_logits_of(j, slope):
        total = 0.0
        if d_rows is not None:
          total = total + _scores(problem, d_rows, tile_of(keys, j))
        if d_keys is not None:
          total = total + _scores(problem, rows, tile_of(d_keys, j))
        total = total * _scale_parts(problem)[1]
        total = total if slope is None else total * slope
        if "bias" in tangents:
          total = total + _bias_tile(moved, place, (i, j)).astype(problem.dtype)
        return total

      def key_block(j, sums, masked):
        logits, slope = _logits(problem, place, rows, tile_of(keys, j), (i, j, masked))
        weights = jnp.exp(logits - _finite_lse(row_lse))
        # A hidden key has weight 0, and what its logit would have done must not be 0 * inf.
        d_logits = jnp.where(weights == 0, 0, d_logits_of(j, slope) * weights)
        d_lse, d_out = sums
        d_lse = d_lse + d_logits.sum(-1, keepdims=True)
        d_out = d_out + _dot(_drop(problem, place, (i, j), d_logits).astype(values.dtype),
                             tile_of(values, j), problem)
        if d_values is not None:
          d_out = d_out + _dot(_drop(problem, place, (i, j), weights).astype(values.dtype),
                               tile_of(d_values, j), problem)
        return d_lse, d_out

      sums = (jnp.zeros((problem.heads, rows.shape[1], 1), problem.dtype),
              jnp.zeros((problem.heads, rows.shape[1], width), problem.dtype))
      d_lse, d_out = _visit(problem, place, i, key_block, sums)
      if "sinks" in tangents:
        sinks = _row_sinks(problem, place)
        d_lse = d_lse + jnp.where(sinks == -jnp.inf, 0, jnp.exp(
            sinks - _finite_lse(row_lse)) * _row_sinks(moved, place))
      d_out = d_out - d_lse * _query_rows(out, problem, place, i).astype(problem.dtype)
      return Residuals(
          _write_rows(problem, place, i, results.out, d_out),
          _write_row_numbers(problem, place, i, results.lse, d_lse[..., 0]))

    return _loop(0, problem.sizes.num_query_blocks, query_block, results)

  results = Residuals(jnp.zeros_like(out), jnp.zeros_like(lse))
  results = _loop(0, problem.num_steps, step, results)
  queries = operands.query.shape[1]
  return Residuals(results.out[:, :queries], results.lse[..., :queries])


class _Sums(NamedTuple):
  """What the backward adds up; None: not asked for."""

  query: Any  # [N, D, T * G]: transposed and without the scale
  key: Any  # [N, C, D]
  value: Any  # [N, C, E]
  bias: Any  # like the bias, padded


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """The cotangents of the operands named in `wrt`.

  dS = P * (d_out . value - sum(d_out * out) + d_lse), and from it d_query, d_key, d_bias and
  d_sinks; d_value = P^T . d_out. Key blocks outside, query blocks inside, scores transposed
  [C, R], so that all five products are row-major matrix products without transposition.
  Every sum has a fixed order: the result is deterministic.
  """
  problem = _cut(operands, spec, block_sizes, backward=True)
  _, lse = _pad_residuals(problem, residuals)
  # sum(d_out * out), less the part of d_lse, since both enter dS in the same place.
  correction = jnp.einsum("bthe,bthe->bht", cotangents.out, residuals.out,
                          preferred_element_type=problem.dtype) - cotangents.lse
  padding = problem.operands.query.shape[1] - operands.query.shape[1]
  padded = Residuals(_pad_axis(cotangents.out, 1, padding), _pad_axis(correction, 2, padding))

  def step(n, results):
    place = _place(problem, n)
    queries = _clean(_scaled_query(problem, place, None))
    keys, values = (_clean(_key_rows(x, problem, place))
                    for x in (problem.operands.key, problem.operands.value))
    d_outs = _query_rows(padded.out, problem, place, None)
    row_lse, row_correction = (_row_numbers(problem, place, None, x) for x in (lse, padded.lse))

    def key_block(j, carry):
      sums, d_key, d_value = carry
      start, length = j * problem.sizes.block_kv, problem.sizes.block_kv
      key = _block(keys, start, length)
      side = _KeySide(key, key.transpose(0, 2, 1), _block(values, start, length),
                      queries, d_outs, row_lse, row_correction)
      sums = sums._replace(key=jnp.zeros(side.key.shape, problem.dtype),
                           value=jnp.zeros(side.value.shape, problem.dtype))
      sums = _visit(problem, place, j, lambda i, sums, masked: _backward_tile(
          problem, place, side, (i, j, masked), sums), sums)
      d_key = _write_key_rows(problem, place, j, d_key, sums.key * _scale_parts(problem)[1])
      d_value = _write_key_rows(problem, place, j, d_value, sums.value)
      return sums._replace(key=None, value=None), d_key, d_value

    d_query, d_key, d_value, d_bias = results
    sums = _Sums(jnp.zeros((problem.heads, keys.shape[-1], queries.shape[1]), problem.dtype),
                 None, None, d_bias)
    sums, d_key, d_value = _loop(
        0, problem.sizes.num_key_blocks, key_block, (sums, d_key, d_value))
    d_rows = sums.query.transpose(0, 2, 1) * jnp.asarray(spec.softmax_scale, problem.dtype)
    return _write_rows(problem, place, None, d_query, d_rows), d_key, d_value, sums.bias

  query, bias = problem.operands.query, problem.operands.bias
  padded_keys = _pad_axis(operands.key, 1, _key_padding(problem.sizes))
  padded_values = _pad_axis(operands.value, 1, _key_padding(problem.sizes))
  d_bias = jnp.zeros(bias.shape, problem.dtype) if "bias" in wrt else None
  d_query, d_key, d_value, d_bias = _loop(
      0, problem.num_steps, step, (jnp.zeros_like(query), jnp.zeros_like(padded_keys),
                                   jnp.zeros_like(padded_values), d_bias))
  found = {"query": d_query[:, :operands.query.shape[1]], "key": d_key[:, :operands.key.shape[1]],
           "value": d_value[:, :operands.value.shape[1]]}
  if "bias" in wrt:
    rows, columns = operands.bias.shape[2:]
    found["bias"] = d_bias[:, :, :rows, :columns].astype(operands.bias.dtype)
  if "sinks" in wrt:
    found["sinks"] = _d_sinks(operands.sinks, residuals.lse, correction)
  return tuple(found[name] for name in wrt)


class _KeySide(NamedTuple):
  """One key block, and all rows of its heads."""

  key: Any  # [N, C, D]
  key_transposed: Any  # [N, D, C], made once, outside the loop over queries
  value: Any  # [N, C, E]
  queries: Any  # [N, T * G, D], scaled
  d_outs: Any  # [N, T * G, E]
  lse: Any  # [N, T * G]
  correction: Any  # [N, T * G]


def _backward_tile(problem, place, side, tile, sums):
  """Adds what one query block and one key block contribute to the cotangents."""
  i, j, masked = tile
  length = problem.sizes.block_q * problem.group
  rows, d_out = (_block(x, i * length, length) for x in (side.queries, side.d_outs))
  lse, correction = (lax.dynamic_slice_in_dim(x, i * length, length, 1)[:, None]
                     for x in (side.lse, side.correction))
  logits, slope = _logits(problem, place, rows, side.key, (i, j, masked), transposed=True)
  weights = jnp.exp(logits - _finite_lse(lse))
  d_weights = _drop(problem, place, (i, j), _scores(problem, d_out, side.value, transposed=True),
                    transposed=True)
  d_logits = weights * (d_weights - correction)
  d_bias = sums.bias
  if d_bias is not None:
    d_bias = _add_bias_tile(problem, place, (i, j), d_bias, d_logits)
  d_logits = (d_logits if slope is None else d_logits * slope).astype(rows.dtype)
  kept = _drop(problem, place, (i, j), weights, transposed=True).astype(d_out.dtype)
  d_query = _dot(side.key_transposed, d_logits, problem)
  d_query = d_query + lax.dynamic_slice_in_dim(sums.query, i * length, length, 2)
  return _Sums(
      query=lax.dynamic_update_slice_in_dim(sums.query, d_query, i * length, 2),
      key=sums.key + _dot(d_logits, rows, problem),
      value=sums.value + _dot(kept, d_out, problem),
      bias=d_bias)


def _d_sinks(sinks, lse, correction):
  """d_sink[h] = -sum over b, t of exp(sink - lse) * correction; sinks [B or 1, H]."""
  weights = jnp.where(sinks[..., None] == -jnp.inf, 0, jnp.exp(sinks[..., None] - _finite_lse(lse)))
  total = -(weights * correction).sum(-1)
  return (total if sinks.shape[0] > 1 else total.sum(0, keepdims=True)).astype(sinks.dtype)


# --- The pieces of a step. -----------------------------------------------------------------------


class _Place(NamedTuple):
  """Which batch row and which heads a step computes."""

  batch: Any
  key_head: Any  # the first of N


def _cut(operands, spec, block_sizes, *, backward) -> Problem:
  """Chooses blocks, pads the query side to whole blocks and finds the blocks to visit."""
  (_, queries, query_heads, width), (_, keys, key_heads, value_width) = (
      operands.query.shape, operands.value.shape)
  mask = jax.tree.unflatten(spec.mask, operands.mask.arrays)
  sizes, heads = tuned.choose(
      (queries, keys, query_heads, key_heads, width, value_width),
      operands.query.dtype.itemsize, block_sizes, backward=backward)
  kinds = blocks.merge_heads(blocks.block_kinds(mask, sizes), heads * query_heads // key_heads)
  kinds = kinds.swapaxes(-1, -2) if backward else kinds
  return Problem(_pad_queries(operands, sizes, spec.mask), spec, sizes, heads,
                 blocks.block_map(kinds))


def _pad_queries(operands: Operands, sizes: blocks.Sizes, structure=None) -> Operands:
  """Pads the queries to whole blocks, and the bias and the mask's arrays on both sides."""
  rows = -sizes.queries % sizes.block_q
  columns = _key_padding(sizes)
  bias, mask = operands.bias, operands.mask
  if bias is not None:
    bias = _pad_axis(bias, 2, rows if bias.shape[2] > 1 else 0)
    bias = _pad_axis(bias, 3, columns if bias.shape[3] > 1 else 0)
  if structure is not None:
    mask = tiles.pad(structure, mask, rows, columns)
  return operands._replace(query=_pad_axis(operands.query, 1, rows), bias=bias, mask=mask)


def _pad_residuals(problem, residuals) -> Residuals:
  padding = problem.operands.query.shape[1] - residuals.out.shape[1]
  return Residuals(_pad_axis(residuals.out, 1, padding), _pad_axis(residuals.lse, 2, padding))


def _pad_axis(x, axis, amount):
  if not amount:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, amount)
  return jnp.pad(x, widths)


def _key_padding(sizes: blocks.Sizes) -> int:
  return -sizes.keys % sizes.block_kv


def _place(problem, n) -> _Place:
  parts = problem.operands.key.shape[2] // problem.heads
  return _Place(n // parts, n % parts * problem.heads)


def _write_at(x, part, starts):
  return lax.dynamic_update_slice(x, part, tiles.int32s(starts))


def _loop(lower, upper, body, carry):
  """`lax.fori_loop` with an int32 counter, whatever jax_enable_x64 says."""
  lower, upper = (np.int32(x) if isinstance(x, int) else x for x in (lower, upper))
  return lax.fori_loop(lower, upper, body, carry)


def _visit(problem, place, row_block, step, carry):
  """Runs step(column block, carry, masked) over the blocks that `row_block` must visit."""
  visits = problem.visits
  b = place.batch if visits.num_full.shape[0] > 1 else 0
  h = place.key_head // problem.heads if visits.num_full.shape[1] > 1 else 0
  indices, num_full, num_visited = (jnp.asarray(x)[b, h, row_block] for x in visits)
  if visits.any_full:
    carry = _loop(0, num_full, lambda n, c: step(indices[n], c, False), carry)
  if visits.any_partial:
    carry = _loop(num_full, num_visited, lambda n, c: step(indices[n], c, True), carry)
  return carry


def _scale_parts(problem):
  """(what multiplies the query, what multiplies the logits): their product is the scale.

  A 16-bit query is multiplied by a power of two only, which rounds nothing.
  """
  scale = problem.spec.softmax_scale
  if problem.operands.query.dtype.itemsize >= 4 or scale == 0:
    return scale, 1.0
  mantissa, exponent = math.frexp(scale)
  return 2.0 ** (exponent - 1), 2 * mantissa


def _scaled_query(problem, place, block):
  rows = _query_rows(problem.operands.query, problem, place, block)
  return rows * jnp.asarray(_scale_parts(problem)[0], rows.dtype)


def _query_rows(x, problem, place, block):
  """[B, T, H, W] -> [N, R, W]: one query block (None: all queries) of this step's heads."""
  length = x.shape[1] if block is None else problem.sizes.block_q
  start = 0 if block is None else block * length
  group = problem.group
  x = tiles.slice_at(x, (place.batch, start, place.key_head * group, 0),
                        (1, length, problem.heads * group, x.shape[3]))
  x = x.reshape(length, problem.heads, group, -1).transpose(1, 0, 2, 3)
  return x.reshape(problem.heads, length * group, -1)


def _write_rows(problem, place, block, x, rows):
  """The inverse of `_query_rows`: writes [N, R, W] into [B, T, H, W]."""
  length = rows.shape[1] // problem.group
  start = 0 if block is None else block * length
  rows = rows.astype(x.dtype).reshape(problem.heads, length, problem.group, -1)
  rows = rows.transpose(1, 0, 2, 3).reshape(1, length, problem.heads * problem.group, -1)
  return _write_at(x, rows, (place.batch, start, place.key_head * problem.group, 0))


def _row_numbers(problem, place, block, x):
  """[B, H, T] -> [N, R]."""
  length = x.shape[2] if block is None else problem.sizes.block_q
  start = 0 if block is None else block * length
  group = problem.group
  x = tiles.slice_at(x, (place.batch, place.key_head * group, start),
                        (1, problem.heads * group, length))
  return x.reshape(problem.heads, group, length).transpose(0, 2, 1).reshape(problem.heads, -1)


def _write_row_numbers(problem, place, block, x, numbers):
  """The inverse of `_row_numbers`."""
  length, group = problem.sizes.block_q, problem.group
  numbers = numbers.astype(x.dtype).reshape(problem.heads, length, group).transpose(0, 2, 1)
  return _write_at(x, numbers.reshape(1, problem.heads * group, length),
                                  (place.batch, place.key_head * group, block * length))


def _key_rows(x, problem, place):
  """[B, S, K, W] -> [N, padded S, W]."""
  x = tiles.slice_at(x, (place.batch, 0, place.key_head, 0),
                        (1, x.shape[1], problem.heads, x.shape[3]))[0].transpose(1, 0, 2)
  return _pad_axis(x, 1, _key_padding(problem.sizes))


def _write_key_rows(problem, place, block, x, rows):
  rows = rows.astype(x.dtype).transpose(1, 0, 2)[None]
  return _write_at(
      x, rows, (place.batch, block * problem.sizes.block_kv, place.key_head, 0))


def _keys_and_values(problem, place):
  """Keys and values of this step, such that what is not finite reaches only those who see it.

  0 * NaN is NaN, so a hidden value would spoil the product. A key that is not finite, or whose
  value is not, becomes a NaN key with value 0: its logits are NaN where it is seen, and -inf
  where it is hidden.
  """
  keys, values = (_key_rows(x, problem, place)
                  for x in (problem.operands.key, problem.operands.value))
  finite = (jnp.isfinite(keys).all(-1) & jnp.isfinite(values).all(-1))[..., None]
  return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)


def _clean(x):
  """Zeros instead of what is not finite; rows that saw it carry NaN in their lse."""
  return jnp.where(jnp.isfinite(x), x, 0)


def _block(x, start, length):
  return lax.dynamic_slice_in_dim(x, start, length, 1)


def _dot(a, b, problem):
  """[N, x, y] . [N, y, z] -> [N, x, z]."""
  return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=problem.spec.precision,
                         preferred_element_type=problem.dtype)


def _scores(problem, rows, keys, *, transposed=False):
  """rows [N, R, W] . keys [N, C, W] -> [N, R, C], or [N, C, R] when transposed."""
  left, right = (keys, rows) if transposed else (rows, keys)
  scores = lax.dot_general(left, right, (((2,), (2,)), ((0,), (0,))),
                           precision=problem.spec.precision, preferred_element_type=problem.dtype)
  return scores


def _logits(problem, place, rows, keys, tile, *, transposed=False):
  """Logits of a tile, -inf where hidden, and d logit / d score (None: 1).

  tile = (query block, key block, whether the mask must be evaluated).
  """
  i, j, masked = tile
  spec, rest = problem.spec, _scale_parts(problem)[1]
  logits, slope = _scores(problem, rows, keys, transposed=transposed), None
  logits = logits if rest == 1 else logits * jnp.asarray(rest, problem.dtype)
  if spec.logits_soft_cap is not None:
    capped = jnp.tanh(logits / spec.logits_soft_cap)
    logits, slope = capped * spec.logits_soft_cap, 1 - capped * capped
  if problem.operands.bias is not None:
    logits = logits + _bias_tile(problem, place, (i, j), transposed).astype(problem.dtype)
  if masked:
    mask, at = _mask_tile(problem, place, (i, j), transposed)
    seen = mask.visible(at)
    if _key_padding(problem.sizes):
      seen = seen & (at.key_index < problem.sizes.keys)
    logits = jnp.where(_per_element(seen, logits.shape, problem, transposed), logits, -jnp.inf)
  return logits, slope


def _mask_tile(problem, place, tile, transposed):
  """Mask and coordinates of a tile, arrays oriented like the scores in four axes."""
  (i, j), sizes, group = tile, problem.sizes, problem.group
  where = tiles.Tile(place.batch, place.key_head * group, i * sizes.block_q, j * sizes.block_kv,
                     problem.heads * group, sizes.block_q, sizes.block_kv)
  return tiles.cut(problem.spec.mask, problem.operands.mask, where,
                   lambda x: _orient(x, problem, transposed))


def _orient(x, problem, transposed):
  """[heads or 1, Q or 1, C or 1] -> [N or 1, Q or 1, G or 1, C or 1] (transposed: N, C, Q, G)."""
  x = x.reshape(*((problem.heads, -1) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
  return x.transpose(0, 3, 2, 1) if transposed else x.transpose(0, 2, 1, 3)


def _per_element(x, shape, problem, transposed):
  """Something that broadcasts to the four axes of `_orient`, as an array of the scores' shape."""
  heads, (rows, keys) = shape[0], (shape[2], shape[1]) if transposed else shape[1:]
  rows = (rows // problem.group, problem.group)
  four = (heads, keys, *rows) if transposed else (heads, *rows, keys)
  return jnp.broadcast_to(x, four).reshape(shape)


def _bias_tile(problem, place, tile, transposed=False):
  """The bias of a tile, broadcast to the scores' shape."""
  bias, (i, j), sizes, group = problem.operands.bias, tile, problem.sizes, problem.group
  starts, lengths = _bias_slice(bias.shape, problem, place, tile)
  part = tiles.slice_at(bias, starts, lengths)[0]
  shape = (problem.heads, sizes.block_q * group, sizes.block_kv)
  shape = (shape[0], shape[2], shape[1]) if transposed else shape
  return _per_element(_orient(part, problem, transposed), shape, problem, transposed)


def _bias_slice(shape, problem, place, tile):
  (i, j), sizes, group = tile, problem.sizes, problem.group
  starts = (place.batch, place.key_head * group, i * sizes.block_q, j * sizes.block_kv)
  lengths = (1, problem.heads * group, sizes.block_q, sizes.block_kv)
  return (tuple(0 if n == 1 else start for n, start in zip(shape, starts)),
          tuple(1 if n == 1 else length for n, length in zip(shape, lengths)))


def _add_bias_tile(problem, place, tile, d_bias, d_logits):
  """Adds transposed d_logits [N, C, R] to the part of d_bias that the tile covers."""
  group, sizes = problem.group, problem.sizes
  starts, lengths = _bias_slice(d_bias.shape, problem, place, tile)
  part = d_logits.reshape(problem.heads, sizes.block_kv, sizes.block_q, group)
  part = part.transpose(0, 3, 2, 1).reshape(1, -1, sizes.block_q, sizes.block_kv)
  part = part.sum([a for a in range(4) if lengths[a] == 1], keepdims=True)
  return _write_at(
      d_bias, tiles.slice_at(d_bias, starts, lengths) + part.reshape(lengths), starts)


def _drop(problem, place, tile, weights, *, transposed=False):
  """Dropout on weights of a tile: what is kept is divided by the probability to be kept."""
  probability = problem.spec.dropout_prob
  if not probability:
    return weights
  words = problem.operands.dropout_key
  words = words[place.batch if words.shape[0] > 1 else 0]
  mask, at = _mask_tile(problem, place, tile, transposed)
  keep = dropout.keep_mask(words, algebra.move_to_positions(mask, at), probability)
  keep = _per_element(keep, weights.shape, problem, transposed)
  return jnp.where(keep, weights * (1 / (1 - probability)), 0)


def _row_sinks(problem, place):
  """The sinks of this step's rows: [N, R, 1], or None."""
  sinks = problem.operands.sinks
  if sinks is None:
    return None
  group = problem.group
  sinks = tiles.slice_at(
      sinks, (place.batch if sinks.shape[0] > 1 else 0, place.key_head * group),
      (1, problem.heads * group))
  sinks = sinks.reshape(problem.heads, 1, group, 1).astype(problem.dtype)
  shape = (problem.heads, problem.sizes.block_q, group, 1)
  return jnp.broadcast_to(sinks, shape).reshape(problem.heads, -1, 1)


def _finite_lse(lse):
  """+inf instead of -inf: the weights of a row that saw nothing are exp(logits - inf) = 0."""
  return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def _lse_dtype(spec):
  return jnp.promote_types(spec.softmax_dtype, jnp.float32)


KERNEL = Kernel("xla", forward, backward, tangent)
