"""Attention over pages: against the dense oracle, the public kernels' references, and itself.

Letters: R requests, N pages per request, P pages, T tokens of a call, H query heads, K key heads,
D width.
"""

import functools
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import checkify
from jax.experimental.pallas.ops.tpu.paged_attention import util as public_v1
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as public_v2
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       attention, explain, page_attention, ragged_page_attention_v2,
                       ragged_page_attention_v3)
from attn_core.caches import page_checks, pages
from attn_core.kernels.xla import paged
from attn_core.references import paged as reference
from attn_core.types import PagedSpec


class Case(NamedTuple):
  """Requests: how many tokens each has, and how many of them are queries of this call."""

  lengths: tuple = (9, 0, 17, 1, 24, 5)
  queries: tuple = (9, 0, 5, 1, 1, 2)
  options: PagedOptions = PagedOptions()
  H: int = 4
  K: int = 2
  D: int = 6
  page: int = 4
  rest: int = 3  # rows of the query behind the last request's
  unused: int = 0  # rows of the tables behind the last request
  distribution: tuple | None = None
  dtype: str = "float32"
  sinks: bool = False

  @property
  def pool(self):
    return 8 * len(self.lengths)

  def metadata(self, single=False) -> PagesMetadata:
    """Pages in random order; entries past a request's pages lie outside of the pool."""
    rng = np.random.default_rng(0)
    rows = len(self.lengths) + self.unused
    tables = np.full((rows, 8), 10**6, np.int32)
    free = rng.permutation(self.pool)
    for row, length in enumerate(self.lengths):
      used = -(-length // self.page)
      tables[row, :used], free = free[:used], free[used:]
    pad = lambda x, value: np.array([*x, *[value] * self.unused], np.int32)
    starts = np.cumsum([0, *self.queries])
    number = np.array([len(self.lengths)], np.int32) if self.unused else None
    if self.distribution is not None:
      number = None
    return PagesMetadata(
        tables, pad(self.lengths, 999), None if single else pad(starts, -5), number,
        None if self.distribution is None else np.array(self.distribution, np.int32))

  def arrays(self):
    """query [T, H, D], key and value pages [K, P, page, D], sinks [H]; NaN wherever nobody looks."""
    rng = np.random.default_rng(1)
    tokens = sum(self.queries) + self.rest
    query = rng.normal(size=(tokens, self.H, self.D))
    query[sum(self.queries):] = np.nan
    key, value = rng.normal(size=(2, self.K, self.pool, self.page, self.D))
    live = np.zeros((self.pool, self.page), bool)
    tables = self.metadata().page_tables
    for row, length in enumerate(self.lengths):
      for p in range(length):
        live[tables[row, p // self.page], p % self.page] = True
    key[:, ~live] = value[:, ~live] = np.nan
    sinks = rng.normal(size=self.H) if self.sinks else None
    return tuple(None if x is None else jnp.asarray(x, self.dtype)
                 for x in (query, key, value, sinks))

  def oracle(self, query, key, value, sinks):
    """(output [T, H, D], lse [H, T]), NaN and all."""
    tables, o = self.metadata().page_tables, self.options
    window = (None, None) if o.sliding_window is None else o.sliding_window
    spec = PagedSpec(o.softmax_scale or self.D**-0.5, o.logits_soft_cap, o.causal, window)
    requests = []
    for row, (length, number) in enumerate(zip(self.lengths, self.queries)):
      found = (None, None)
      if length:
        found = reference.tokens(key, value, tables[row], length)
      requests.append((number, *found))
    query = query.at[sum(self.queries):].set(0)
    return reference.attention(query, requests, spec, sinks)


RAGGED = {
    "window_sinks_cap": Case(sinks=True, options=PagedOptions(
        sliding_window=(6, 0), logits_soft_cap=1.5, softmax_scale=0.7)),
    "both_sides_large_logits": Case((9, 0, 21), (9, 0, 5), options=PagedOptions(
        sliding_window=(3, 2), causal=False, softmax_scale=300.0)),
    "itself_in_pages_of_one_token": Case((5, 3), (4, 3), page=1, options=PagedOptions(
        sliding_window=(0, 0))),
    "not_causal_one_head": Case((5, 17), (4, 1), H=1, K=1, D=1, options=PagedOptions(causal=False)),
    "unused_rows_odd_pages": Case((13, 1), (7, 1), page=3, unused=3, rest=7, K=1),
    "distribution": Case((7, 20, 4, 11), (1, 1, 4, 5), distribution=(2, 2, 4), unused=2),
}
BLOCKS = BlockSizes(block_q=4, block_kv=8)


def run(mechanism, case, query, key, value, sinks):
  """(output, lse) by the mechanism; v3 finds the queries' own tokens nowhere but in its arguments."""
  options = case.options._replace(softmax_aux=sinks, block_sizes=BLOCKS, return_lse=True)
  cache = PagesV1(key, value)
  metadata = case.metadata(single=mechanism == "v1")
  heads = Heads(case.K, case.D, case.D)
  if mechanism == "v1":
    output = page_attention(query, cache, metadata, options)
  elif mechanism == "v2":
    output = ragged_page_attention_v2(query, pages.convert(cache, PagesV2), metadata, options)
  else:
    mapping = pages.slots(metadata, case.page, query.shape[0])
    new = [jnp.where(mapping[:, None, None] < 0, jnp.nan, x.reshape(case.K, -1, case.D)[:, jnp.maximum(
        mapping, 0)].swapaxes(0, 1)) for x in (key, value)]
    holes = [x.reshape(case.K, -1, case.D).at[:, jnp.where(mapping < 0, 10**6, mapping)].set(
        np.nan, mode="drop").reshape(x.shape) for x in (key, value)]
    output = ragged_page_attention_v3(
        query, *new, pages.convert(PagesV1(*holes), PagesV3, heads), metadata, options)
  return output.attention_outputs, output.lse


def loss_of(function, rows):
  """A scalar of output and lse that every gradient reaches; rows of no request have no part."""
  def loss(*arrays):
    out, lse = function(*arrays)
    out, lse = out[:rows].astype(jnp.float32), lse[:, :rows].astype(jnp.float32)
    weights = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return (out * weights(out)).sum() + jnp.where(lse == -jnp.inf, 0, lse * weights(lse)).sum()
  return loss


def both(function, case, arrays):
  """[output, lse, gradients...]."""
  wanted = tuple(i for i, x in enumerate(arrays) if x is not None)
  gradient = jax.grad(loss_of(function, sum(case.queries)), wanted)
  return jax.jit(lambda *a: [*function(*a), *gradient(*a)])(*arrays)


@functools.cache
def expected_of(name, table):
  case = table[name]
  with jax.enable_x64(True):
    arrays = tuple(None if x is None else x.astype(jnp.float64) for x in case.arrays())
    return [np.asarray(x) for x in both(case.oracle, case, arrays)]


class Frozen(dict):
  __hash__ = object.__hash__


RAGGED = Frozen(RAGGED)
SINGLE = Frozen({
    "window_sinks_cap_mqa": Case((9, 0, 17, 1, 32), (1,) * 5, rest=0, K=1, sinks=True,
                                 options=PagedOptions(sliding_window=(6, 0), logits_soft_cap=2.0)),
    "one": Case((1,), (1,), rest=0, page=1),
})


class OracleTest(parameterized.TestCase):

  def check(self, mechanism, name, table):
    case = table[name]
    got = both(functools.partial(run, mechanism, case), case, case.arrays())
    rows = sum(case.queries)
    self.assertFalse(np.asarray(got[0][rows:]).any())
    self.assertTrue((np.asarray(got[1][:, rows:]) == -np.inf).all())
    for index, (mine, want) in enumerate(zip(got, expected_of(name, table), strict=True)):
      # An output's row of no request is 0, and what is not live has no gradient.
      self.assertFalse(np.isnan(mine).any(), index)
      same = np.isfinite(want)
      np.testing.assert_array_equal(np.asarray(mine)[~same], want[~same])
      scale = max(1.0, np.abs(want[same]).max())
      np.testing.assert_allclose(np.asarray(mine)[same], want[same], rtol=1e-5, atol=5e-6 * scale,
                                 err_msg=str(index))

  @parameterized.parameters(*RAGGED)
  def test_ragged(self, name):
    self.check("v2", name, RAGGED)

  @parameterized.parameters("window_sinks_cap", "unused_rows_odd_pages")
  def test_ragged_that_writes(self, name):
    self.check("v3", name, RAGGED)

  @parameterized.parameters(*SINGLE)
  def test_page_attention(self, name):
    self.check("v1", name, SINGLE)


if __name__ == "__main__":
  absltest.main()
