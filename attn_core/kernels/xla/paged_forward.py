"""Attention over pages in plain XLA, forward: blocks of keys, folded into a running softmax.

A few rows (decoding) are computed with the tokens outermost, as they lie in the pages: on a CPU
every key and every value is then read once. Many rows are products of matrices, heads outermost.

Letters: as in `paged`.
"""

from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math as numbers, paged_blocks as paged, tile_ops as steps, cpu_matvec as sums
from attn_core.sharding import varying_axes as vary
from attn_core.types import BlockSizes, PagedSpec


def forward(operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
            block_sizes: BlockSizes) -> Residuals:
  """out [T, H, E] in the query's dtype and lse [T, H, 1].

  Tokens that belong to no request have output 0 and lse -inf.
  """
  tokens, query_heads, _ = operands.query.shape
  block_q, block_pages = paged.sizes_of(operands, block_sizes, query_heads // heads.key_heads)
  out = jnp.zeros((tokens, query_heads, heads.value_width), operands.query.dtype)
  lse = jnp.full((tokens, query_heads, 1), -jnp.inf, spec.softmax_dtype)
  for first, end, block_q in paged.classes(operands, block_q):
    problem = paged.cut(operands, spec, heads, (block_q, block_pages))
    results = vary.start(problem.query, Residuals(
        paged.pad_tokens(out, block_q), paged.pad_tokens(lse, block_q)))
    results = steps.loop(first, end, lambda r, results, problem=problem: _request(
        problem, r, results), results)
    out, lse = (x[block_q:block_q + tokens] for x in results)
  return Residuals(out, lse)


def _request(problem: paged.Problem, request, results: Residuals) -> Residuals:
  """Computes all queries of a request."""

  def step(number, results):
    block = paged.query_block(problem, request, number)
    rows = paged.live_rows_of(problem, block, problem.query)
    order = _Few(problem, rows) if sums.suit(*rows.shape[1:]) else _Many(problem, rows)

    def fold(number, running):
      ids = paged.page_ids(problem, request, number)
      seen = paged.visible(problem, block, number)

      def attempt(state):
        first, _, _ = state
        taken = lax.cond(first, lambda: pages.take(problem.cache, ids),
                         lambda: _shielded(pages.take(problem.cache, ids), problem))
        found = order.fold(running, _reader(taken, problem), seen)
        return jnp.zeros_like(first), first & ~jnp.isfinite(found.output).all(), found

      # What is not finite shows in the output, and to look there costs a fraction of looking at all
      # keys and values. One piece of code computes both attempts, so both round alike.
      yes = vary.start(rows, jnp.bool_(True))
      return lax.while_loop(lambda state: state[1], attempt, (yes, yes, running))[2]

    running = steps.loop(*paged.key_blocks(problem, block), fold, vary.start(rows, order.start()))
    out, lse = order.finish(running)
    return Residuals(paged.put_rows(problem, block, results.out, out),
                     paged.put_rows(problem, block, results.lse, lse))

  return steps.loop(*paged.query_blocks(problem, request), step, results)


def _reader(cache, problem: paged.Problem):
  return pages.reader(cache, problem.heads, problem.query.dtype)


def _shielded(cache, problem: paged.Problem):
  """Pages whose keys and values reach only those who see them; see `steps.shield`."""
  part, size = _reader(cache, problem), pages.page_size(cache)
  finite = steps.finite_keys(part("key"), part("value"))  # [C, K, 1]
  more = pages.heads_of(cache).key_heads - problem.heads.key_heads
  finite = jnp.pad(finite, ((0, 0), (0, more), (0, 0)), constant_values=True)
  finite = finite.reshape(-1, size, *finite.shape[1:])  # [pages, size, K, 1]

  def key_of(finite, x):
    return jnp.where(finite, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

  def value_of(finite, x):
    return jnp.where(finite, x, jnp.zeros((), x.dtype))

  if pages.has_token_scales(cache):
    kept = finite[:, :, :cache.key_scales.shape[2], 0]
    cache = cache._replace(key_scales=key_of(kept, cache.key_scales),
                           value_scales=value_of(kept, cache.value_scales))
  if isinstance(cache, pages.PagesV1):
    finite = finite.transpose(2, 0, 1, 3)
    return cache._replace(key_pages=key_of(finite, cache.key_pages),
                          value_pages=value_of(finite, cache.value_pages))
  rows = cache.pages.reshape(*finite.shape[:3], 2, -1)
  rows = jnp.stack([key_of(finite, rows[..., 0, :]), value_of(finite, rows[..., 1, :])], 3)
  return cache._replace(pages=rows.reshape(cache.pages.shape))


def _logits(problem: paged.Problem, scores, seen):
  """Logits like the scores: -inf where hidden, NaN where they are seen and not finite."""
  return paged.logits_of(problem, jnp.where(jnp.isfinite(scores), scores, jnp.nan), seen)[0]


def _wide(problem: paged.Problem):
  """The dtype of sums."""
  return jnp.promote_types(problem.dtype, jnp.float32)


class _Many(NamedTuple):
  """Rows [K, M, D], whose logits are [K, M, C]."""

  problem: paged.Problem
  rows: Any

  def start(self) -> softmax.Running:
    return softmax.start(self.rows.shape[:2], self.problem.heads.value_width, self.problem.dtype)

  def fold(self, running, part, seen) -> softmax.Running:
    """Folds in keys and values by `part`, of which the rows see bool [M, C]."""
    scores = paged.scores_of(self.problem, self.rows, part("key").transpose(1, 0, 2))

    def weigh(weights):  # rounded to the values' dtype, summed in full
      value = part("value").transpose(1, 0, 2)
      return lax.dot_general(
          numbers.narrow(weights, value.dtype), value, (((2,), (1,)), ((0,), (0,))),
          precision=self.problem.spec.precision, preferred_element_type=self.problem.dtype)

    return softmax.update(running, _logits(self.problem, scores, seen), weigh, exp=numbers.exp)

  def finish(self, running):
    """(out [K, M, E], lse [K, M, 1])."""
    return softmax.finish(running, paged.row_sinks(self.problem))


class _Few(NamedTuple):
  """Rows [K, M, D], whose logits are [C, K, M]; see `sums`."""

  problem: paged.Problem
  rows: Any

  def start(self) -> softmax.Running:
    shape = (1, *self.rows.shape[:2])
    return softmax.start(shape, self.problem.heads.value_width, self.problem.dtype)

  def fold(self, running, part, seen) -> softmax.Running:
    """Folds in keys and values by `part`, of which the rows see bool [M, C]."""
    logits = _logits(self.problem, self._scores(part), seen.T[:, None])
    return softmax.update(
        running, logits[..., None], lambda weights: self._weigh(weights[..., 0], part)[None],
        exp=lambda x: lax.optimization_barrier(numbers.exp(x)), axis=0, fold=sums.fold)

  def finish(self, running):
    """(out [K, M, E], lse [K, M, 1])."""
    return (x[0] for x in softmax.finish(running, paged.row_sinks(self.problem)))

  def _scores(self, part):
    """[C, K, M]."""
    summed = lambda rows: sums.scores(rows.astype(_wide(self.problem)), lambda i: part(
        "key", columns=slice(i, i + sums.LANES))).astype(self.problem.dtype)
    dots = lambda rows: jnp.einsum(
        "kmd,ckd->ckm", rows, part("key"), precision=self.problem.spec.precision,
        preferred_element_type=self.problem.dtype)
    return lax.platform_dependent(self.rows, cpu=summed, default=dots)

  def _weigh(self, weights, part):
    """Weights [C, K, M] times values: [K, M, E]."""
    problem, dtype = self.problem, _wide(self.problem)
    widened = pages.dtype_of(problem.cache).itemsize < dtype.itemsize
    summed = lambda weights: sums.weigh(
        weights.astype(dtype), lambda first, length: part("value", slice(first, first + length)),
        problem.heads.value_width, widened=widened).astype(problem.dtype)

    def dots(weights):  # rounded to the values' dtype, summed in full
      value = part("value")
      return jnp.einsum(
          "ckm,cke->kme", numbers.narrow(weights, value.dtype), value,
          precision=problem.spec.precision, preferred_element_type=problem.dtype)

    return lax.platform_dependent(weights, cpu=summed, default=dots)
