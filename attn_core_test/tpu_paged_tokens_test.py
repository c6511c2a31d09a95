# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Queries that the TPU kernel over pages copies by itself, and results that it copies back.

Interpret mode starts from memory full of NaN and watches for races; every result is compared with
that of plain XLA. Tokens of no request are NaN, and slots of pages that may not be read, too.
"""

import functools
from typing import NamedTuple
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV2,
                       PagesV3, attention, ragged_page_attention_v2)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import pages
from attn_core_test import sampling
from attn_core_test.tpu_interpret import interpreted

TPU = OperationMetadata(platform="tpu")
REQUESTS, TOKENS, ROW_PAGES, PAGE = 5, 23, 4, 8


class Form(NamedTuple):
  """Static properties of a call."""

  heads: tuple[int, int]  # H, K
  block_q: int
  dtype: str = "float32"
  width: int = 8
  distribution: bool = False
  window: int | None = None
  transfers: str = "on_wait"


FORMS = {
    "three_heads_of_a_key_head": Form((3, 1), 4),
    "blocks_longer_than_the_call": Form((4, 2), 32, "bfloat16", 128),
    "some_of_one_query": Form((2, 2), 5, distribution=True, transfers="eager"),
    "many_rows": Form((20, 1), 8, "bfloat16", window=5),
    "one_query_a_block": Form((2, 1), 1, distribution=True, window=9),
    "five_heads_of_a_key_head": Form((10, 2), 6, "bfloat16", distribution=True),
}
CHOSEN = sampling.names(FORMS, ("three_heads_of_a_key_head", "blocks_longer_than_the_call",
                                "some_of_one_query"))

# (queries, tokens) of every request, and where the queries of the first one begin.
CALLS = (
    (((9, 9), (0, 5), (1, 31), (7, 20), (6, 7)), 0),  # all tokens are queries
    (((1, 1), (1, 32), (1, 8), (1, 9), (5, 30)), 0),
    (((2, 12), (4, 4), (0, 0), (3, 19), (0, 8)), 3),  # the first three tokens are not queries
    (((0, 3), (0, 0), (0, 0), (0, 1), (0, 9)), 0),  # none is
)


def metadata_of(requests, first: int, distribution: bool) -> PagesMetadata:
  """Returns metadata in pages of random order; unused entries are outside of the pool."""
  queries, lengths = np.array(requests).T
  tables = np.random.default_rng(3).permutation(REQUESTS * ROW_PAGES).reshape(REQUESTS, -1)
  tables[np.arange(ROW_PAGES) >= -(-lengths // PAGE)[:, None]] = 10**6
  ones = int((np.cumprod(queries == 1)).sum())
  array = lambda x: jnp.asarray(x, jnp.int32)
  return PagesMetadata(
      array(tables), array(lengths), array(first + np.cumsum([0, *queries])),
      distribution=array([ones, ones, REQUESTS]) if distribution else None)


def operands_of(form: Form, requests, metadata: PagesMetadata):
  """Returns query and cache; NaN where nothing may be read."""
  rng, (heads, key_heads) = np.random.default_rng(4), form.heads
  query = rng.normal(size=(TOKENS, heads, form.width))
  starts = np.asarray(metadata.query_start_loc)
  token = np.arange(TOKENS)
  query[(token < starts[0]) | (token >= starts[-1])] = np.nan
  held = np.full((2, key_heads, REQUESTS * ROW_PAGES, PAGE, form.width), np.nan)
  for row, (_, length) in enumerate(requests):
    for number in range(length):
      page = int(metadata.page_tables[row, number // PAGE])
      held[:, :, page, number % PAGE] = rng.normal(size=(2, key_heads, form.width))
  key, value = (jnp.asarray(x, form.dtype) for x in held)
  return jnp.asarray(query, form.dtype), PagesV2(pages.interleave(
      *(x.transpose(1, 2, 0, 3) for x in (key, value))))


def attend(form: Form, platform: OperationMetadata | None, query, cache, metadata):
  options = PagedOptions(
      metadata=platform, return_lse=True, block_sizes=BlockSizes(form.block_q, 16),
      sliding_window=None if form.window is None else (form.window, 0))
  found = ragged_page_attention_v2(query, cache, metadata, options)
  return found.attention_outputs, found.lse


@functools.cache
def programs(form: Form):
  """Returns the call, compiled for the interpreted kernel and for plain XLA."""
  metadata = metadata_of(*CALLS[0], form.distribution)
  operands = (*operands_of(form, CALLS[0][0], metadata), metadata)
  with interpreted(form.transfers):
    kernel = jax.jit(functools.partial(attend, form, TPU)).lower(*operands).compile()
  return kernel, jax.jit(functools.partial(attend, form, None)).lower(*operands).compile()


class InterpretTest(parameterized.TestCase):

  @parameterized.parameters(*CHOSEN)
  def test_equals_plain_xla(self, name):
    form, atol = FORMS[name], 2e-2 if FORMS[name].dtype == "bfloat16" else 5e-6
    kernel, xla = programs(form)
    for requests, first in CALLS:
      metadata = metadata_of(requests, first, form.distribution)
      operands = (*operands_of(form, requests, metadata), metadata)
      with interpreted(form.transfers):
        out, lse = jax.block_until_ready(kernel(*operands))
      expected = xla(*operands)
      for x, y in zip((out, lse), expected):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol)
      token, starts = np.arange(TOKENS), np.asarray(metadata.query_start_loc)
      others = (token < starts[0]) | (token >= starts[-1])
      np.testing.assert_array_equal(np.asarray(out, np.float64)[others], 0)
      np.testing.assert_array_equal(np.asarray(lse)[:, others], -np.inf)

  def test_an_infinite_query_is_nan_and_no_other(self):
    form = FORMS["three_heads_of_a_key_head"]
    metadata = metadata_of(*CALLS[0], False)
    query, cache = operands_of(form, CALLS[0][0], metadata)
    kernel, _ = programs(form)
    with interpreted():
      before, after = (np.array(jax.block_until_ready(kernel(x, cache, metadata))[0])
                       for x in (query, query.at[10, 1, 3].set(-jnp.inf)))
    self.assertTrue(np.isnan(after[10, 1]).all())
    after[10, 1] = before[10, 1]
    np.testing.assert_array_equal(after, before)


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters((8, 1, False), (8, 4, True))
  def test_nothing_brings_queries_to_blocks(self, heads, key_heads, distribution):
    """Without an lse, XLA does not copy queries or results, and does not look for blocks."""
    tokens, requests, device = 256, 9, static_profile.devices("v6e")[0]
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(
        shape, dtype, sharding=SingleDeviceSharding(device))
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(
        lambda: pages.init(PagesV3, 64, 16, Heads(key_heads, 128, 128), jnp.bfloat16)))
    numbers = functools.partial(array, jnp.int32)
    metadata = PagesMetadata(numbers(requests, 16), numbers(requests), numbers(requests + 1),
                             distribution=numbers(3) if distribution else None)
    new = array(jnp.bfloat16, tokens, key_heads, 128)
    def run(cache, query, key, value, metadata):
      return attention(query, key, value, mechanism="ragged_page_attention_v3", layout="thd",
                       cache_view=cache, cache_metadata=metadata, metadata=TPU)[::3]
    text = jax.jit(run, donate_argnums=0).trace(
        cache, array(jnp.bfloat16, tokens, heads, 128), new, new, metadata).lower(
            lowering_platforms=("tpu",)).compile().as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1 + distribution)
    self.assertFalse([name for name in (" gather(", " scatter(", " reduce-window(")
                      if name in text])
    made = f"bf16[{tokens},{heads},128]"  # XLA makes no array of queries or results
    self.assertFalse([line for line in text.splitlines()
                      if f" = {made}" in line and " fusion(" in line])


if __name__ == "__main__":
  absltest.main()
