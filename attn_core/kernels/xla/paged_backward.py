"""The backward of attention over pages in plain XLA: cotangents of queries, pages and sinks.

  dS = P * (d_out . value - sum(d_out * out) + d_lse), and from it d_query and d_key
  d_value = P^T . d_out

Requests outside, their key blocks next, query blocks inside. A key block is added to its pages
once, so pages that requests share sum over them, in the order of the requests: always the same
bits. Memory is that of the queries and of the pages in the dtype of the sums.

Letters: as in `paged`.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math as numbers, paged_blocks as paged, tile_ops as steps
from attn_core.sharding import varying_axes as vary
from attn_core.types import BlockSizes, PagedSpec


class Cotangents(NamedTuple):
  """What the backward adds up, and in the end returns."""

  query: Any  # [T, H, D]
  cache: Any  # as the cache; None where it is quantised
  sinks: Any = None  # [H] or None


def backward(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
             block_sizes: BlockSizes, residuals: Residuals, cotangents: Residuals) -> Cotangents:
  """The cotangents of query, pages and sinks.

  Args:
    operands: those of the forward.
    spec: what was computed.
    heads: the heads in the pages, without their padding.
    block_sizes: how fast.
    residuals: what `paged_forward.forward` returned.
    cotangents: of these.
  """
  query, cache = operands.query, operands.cache
  tokens = query.shape[0]
  block_q, block_pages = paged.sizes_of(operands, block_sizes, query.shape[1] // heads.key_heads)
  delta = jnp.einsum("the,the->th", cotangents.out, residuals.out,
                     preferred_element_type=spec.softmax_dtype)[..., None] - cotangents.lse
  moving = None if cache.key_scales is not None else cache
  sums = vary.start(query, Cotangents(*jax.tree.map(
      lambda x: jnp.zeros(x.shape, spec.softmax_dtype), (query, moving))))
  for first, end, block_q in paged.classes(operands, block_q):
    problem = paged.cut(operands, spec, heads, (block_q, block_pages))
    side = _QuerySide(*(paged.pad_tokens(x, block_q)
                        for x in (cotangents.out, residuals.lse, delta)))
    sums = sums._replace(query=paged.pad_tokens(sums.query, block_q))
    sums = steps.loop(first, end, lambda r, sums, problem=problem, side=side: _request(
        problem, side, r, sums), sums)
    sums = sums._replace(query=sums.query[block_q:block_q + tokens])
  d_sinks = None
  if operands.sinks is not None:
    share = jnp.exp(operands.sinks - steps.finite_lse(residuals.lse[..., 0]))
    d_sinks = -(share * delta[..., 0]).sum(0).astype(operands.sinks.dtype)
  return Cotangents(sums.query.astype(query.dtype),
                    jax.tree.map(lambda x, like: x.astype(like.dtype), sums.cache, moving), d_sinks)


class _QuerySide(NamedTuple):
  """What the backward reads a query, padded by Q tokens in front and behind."""

  d_out: Any  # [Q + T + Q, H, E]
  lse: Any  # [Q + T + Q, H, 1]
  delta: Any  # [Q + T + Q, H, 1]: sum(d_out * out) - d_lse


def _request(problem: paged.Problem, side: _QuerySide, request, sums: Cotangents) -> Cotangents:
  """Adds what one request's queries have to say."""
  first, end = paged.query_blocks(problem, request)

  def key_block(j, sums):
    key, value = map(steps.clean, paged.keys_and_values(problem, request, j))

    def query_block(i, carry):
      block = paged.query_block(problem, request, i)
      begin, stop = paged.key_blocks(problem, block)
      return lax.cond((begin <= j) & (j < stop),
                      lambda carry: _tile(problem, side, block, (j, key, value), carry),
                      lambda carry: carry, carry)

    zeros = lambda x: vary.start(x, jnp.zeros(x.shape, problem.dtype))
    d_query, d_key, d_value = steps.loop(
        first, end, query_block, (sums.query, zeros(key), zeros(value)))
    if sums.cache is None:
      return sums._replace(query=d_query)
    ids = paged.page_ids(problem, request, j)
    return sums._replace(query=d_query, cache=_add(sums.cache, ids, d_key, d_value))

  # The first block sees the lowest key, and the last one the highest.
  begin, _ = paged.key_blocks(problem, paged.query_block(problem, request, first))
  _, stop = paged.key_blocks(problem, paged.query_block(problem, request, end - 1))
  return steps.loop(begin, jnp.where(first < end, stop, begin), key_block, sums)


def _tile(problem, side, block, key_side, carry):
  """One query block by one key block: adds to d_query, d_key and d_value."""
  number, key, value = key_side
  d_query, d_key, d_value = carry
  rows, d_out, lse, delta = (paged.live_rows_of(problem, block, x)
                             for x in (problem.query, *side))
  rows = steps.clean(rows)
  logits, slope = paged.logits_of(problem, paged.scores_of(problem, rows, key),
                                  paged.visible(problem, block, number))
  weights = jnp.where(logits == -jnp.inf, 0, numbers.exp(logits - steps.finite_lse(lse)))
  d_weights = dot(problem, d_out, value, (2, 2))
  d_scores = jnp.where(logits == -jnp.inf, 0, weights * (d_weights - delta) * slope)
  narrow = lambda x: numbers.narrow(x, key.dtype)
  d_rows = dot(problem, narrow(d_scores), key, (2, 1))
  old = paged.rows_of(problem, block, d_query)
  return (paged.put_rows(problem, block, d_query, old + d_rows),
          d_key + dot(problem, narrow(d_scores), rows, (1, 1)),
          d_value + dot(problem, narrow(weights), d_out, (1, 1)))


def dot(problem, a, b, axes):
  """A product a head over an axis of each [K, x, y], summed in full."""
  return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0,), (0,))),
                         precision=problem.spec.precision, preferred_element_type=problem.dtype)


def _add(cache, ids, key, value):
  """Adds [K, C, D] and [K, C, E] to the pages they were read from."""
  count, size = ids.shape[0], pages.page_size(cache)
  if isinstance(cache, pages.PagesV1):
    shaped = lambda x: x.reshape(x.shape[0], count, size, x.shape[2])
    return cache._replace(key_pages=cache.key_pages.at[:, ids].add(shaped(key)),
                          value_pages=cache.value_pages.at[:, ids].add(shaped(value)))
  rows = pages.pad_rows(cache, pages.interleave(*(x.swapaxes(0, 1) for x in (key, value))))
  rows = rows.reshape(count, size, *cache.pages.shape[2:])
  return cache._replace(pages=cache.pages.at[ids].add(rows))
