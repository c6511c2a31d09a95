"""Forward mode of attention over pages in plain XLA: how out and lse move with what is moved.

  dS    = slope * (d_query . key + query . d_key)
  d_lse = sum over s of P * dS
  d_out = sum over s of P * dS * value + P * d_value, less d_lse * out

The loops are those of the forward; memory is that of the queries.

Letters: as in `paged`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math as numbers, paged_blocks as paged, paged_backward, tile_ops as steps
from attn_core.sharding import varying_axes as vary
from attn_core.types import BlockSizes, PagedSpec


class Moved(NamedTuple):
  """Tangents; None: it does not move."""

  query: Any = None  # [T, H, D]
  cache: Any = None  # as the cache
  sinks: Any = None  # [H]


def tangent(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
            block_sizes: BlockSizes, residuals: Residuals, moved: Moved) -> Residuals:
  """The tangents of out and lse.

  Args:
    operands: those of the forward; quantised pages do not move.
    spec: what was computed.
    heads: the heads in the pages, without their padding.
    block_sizes: how fast.
    residuals: what `paged_forward.forward` returned.
    moved: how the operands move.
  """
  query = operands.query
  tokens = query.shape[0]
  sizes = paged.sizes_of(operands, block_sizes, query.shape[1] // heads.key_heads)
  sums = vary.start(query, Residuals(*(jnp.zeros(x.shape, spec.softmax_dtype) for x in residuals)))
  still = moved.query is None and moved.cache is None
  for first, end, block_q in () if still else paged.classes(operands, sizes[0]):
    problem = paged.cut(operands, spec, heads, (block_q, sizes[1]))
    padded = lambda x, block_q=block_q: None if x is None else paged.pad_tokens(x, block_q)
    lse, side = padded(residuals.lse), moved._replace(query=padded(moved.query))
    sums = steps.loop(
        first, end, lambda r, sums, problem=problem, lse=lse, side=side: _request(
            problem, side, lse, r, sums), Residuals(*map(padded, sums)))
    sums = Residuals(*(x[block_q:block_q + tokens] for x in sums))
  d_lse = sums.lse
  if moved.sinks is not None:
    share = jnp.exp(operands.sinks[:, None] - steps.finite_lse(residuals.lse))
    d_lse = d_lse + share * moved.sinks[:, None]
  d_out = sums.out - d_lse * residuals.out
  return Residuals(d_out.astype(residuals.out.dtype), d_lse.astype(residuals.lse.dtype))


def _request(problem: paged.Problem, moved: Moved, lse, request, sums: Residuals) -> Residuals:
  """The two sums over the keys of all queries of a request."""

  def step(number, sums):
    block = paged.query_block(problem, request, number)
    rows, row_lse = (paged.live_rows_of(problem, block, x) for x in (problem.query, lse))
    rows, d_rows = steps.clean(rows), None
    if moved.query is not None:
      d_rows = paged.live_rows_of(problem, block, moved.query)

    def fold(j, running):
      key, value = map(steps.clean, paged.keys_and_values(problem, request, j))
      d_key, d_value = None, None
      if moved.cache is not None:
        d_key, d_value = paged.keys_and_values(problem._replace(cache=moved.cache), request, j)
        d_key, d_value = steps.shield(d_key, d_value, steps.finite_keys(d_key, d_value))
      logits, slope = paged.logits_of(problem, paged.scores_of(problem, rows, key),
                                      paged.visible(problem, block, j))
      weights = jnp.where(logits == -jnp.inf, 0, numbers.exp(logits - steps.finite_lse(row_lse)))
      d_scores = sum(paged.scores_of(problem, *pair) for pair in ((d_rows, key), (rows, d_key))
                     if pair[0] is not None and pair[1] is not None)
      share = jnp.where(logits == -jnp.inf, 0, weights * d_scores * slope)
      out = running.out + _weigh(problem, share, value)
      if d_value is not None:
        out = out + _weigh(problem, weights, d_value)
      return Residuals(out, running.lse + share.sum(-1, keepdims=True))

    shapes = (x.shape[-1] for x in sums)
    zeros = vary.start(rows, Residuals(*(
        jnp.zeros((*rows.shape[:2], width), problem.dtype) for width in shapes)))
    found = steps.loop(*paged.key_blocks(problem, block), fold, zeros)
    return Residuals(*(paged.put_rows(problem, block, x, y) for x, y in zip(sums, found)))

  return steps.loop(*paged.query_blocks(problem, request), step, sums)


def _weigh(problem: paged.Problem, weights, value):
  """Weights [K, M, C] times values [K, C, E], which they are rounded to."""
  return paged_backward.dot(problem, numbers.narrow(weights, value.dtype), value, (2, 1))
