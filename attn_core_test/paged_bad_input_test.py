# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad calls of attention over pages: each is refused by a message that names the argument."""

import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

from attn_core import (Heads, PagesMetadata, PagesV1, PagesV2, PagesV3, attention, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import pages
from attn_core.caches.paged import validate
from attn_core_test.paged_cases import Case, plain


def broken(**changes):
  """Returns a function that replaces fields of the metadata."""
  return lambda metadata: metadata._replace(**{
      name: np.asarray(value, np.int32) for name, value in changes.items()})


def entry(row, column, value):
  """Returns a function that replaces a table entry by a page, or by the entry at (row, column)."""
  def change(metadata):
    tables = metadata.page_tables.copy()
    tables[row, column] = tables[value] if isinstance(value, tuple) else value
    return metadata._replace(page_tables=tables)
  return change


# name -> (change of the metadata of lengths (9, 4, 6) and queries (3, 0, 2), words of the message)
NUMBERS = {
    "page_past_the_pool": (entry(0, 2, 24), "page_tables: .*page ids from 0 to 23"),
    "page_below_the_pool": (entry(0, 0, -1), "page_tables: .*page ids from 0 to 23"),
    "page_twice_in_a_row": (entry(0, 0, (0, 2)),
                            "page_tables: .*different pages in a request's row"),
    "page_written_and_owned_twice": (entry(1, 0, (2, 1)),
                                     "page_tables: .*in one request's row only"),
    "length_beyond_the_table": (broken(context_lens=[9, 33, 6]),
                                "context_lens: .*from 0 to 32 tokens"),
    "length_negative": (broken(context_lens=[9, -1, 6]), "context_lens: .*from 0 to 32 tokens"),
    "more_queries_than_tokens": (broken(context_lens=[2, 4, 6]),
                                 "context_lens: .*at least as many"),
    "starts_fall": (broken(query_start_loc=[0, 3, 2, 5]), "query_start_loc: .*never decrease"),
    "starts_begin_late": (broken(query_start_loc=[1, 3, 3, 5]), "query_start_loc: .*start at 0"),
    "starts_end_late": (broken(query_start_loc=[0, 3, 3, 9]), "query_start_loc: .*8 tokens"),
    "too_many_requests": (broken(num_requests=[4]), "num_requests: got .4.*from 0 to the 3 rows"),
    "distribution_falls": (broken(distribution=[2, 1, 3]), "distribution: .*rising"),
    "decode_of_three": (broken(distribution=[1, 1, 3]),
                        "query_start_loc: .*one query for each request"),
}


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    case = Case((9, 4, 6), (3, 0, 2))
    self.query, self.cache, self.metadata = plain(case)

  @parameterized.parameters(*NUMBERS)
  def test_numbers(self, name):
    change, words = NUMBERS[name]
    wrong = change(self.metadata)
    with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
      ragged_page_attention_v2(self.query, self.cache, wrong)

  def test_numbers_under_jit(self):
    """In debug mode every wrong number is an error; without it nothing is checked."""
    def run(cache, metadata):
      validate.debug_check(cache, metadata, 8)
      return ragged_page_attention_v2(self.query, cache, metadata).attention_outputs
    checked = jax.jit(checkify.checkify(run))
    checked(self.cache, self.metadata)[0].throw()
    numbers = jax.jit(checkify.checkify(lambda metadata: validate.debug_check(
        self.cache, metadata, 8)))
    flag = jax.jit(lambda metadata: validate.flag(self.cache, metadata, 8))
    self.assertFalse(flag(self.metadata))
    for name, (change, words) in NUMBERS.items():
      wrong = change(self.metadata)
      self.assertTrue(flag(wrong), name)
      with self.assertRaisesRegex(Exception, f"(?s)cache_metadata.{words}"):
        numbers(wrong)[0].throw()
    with self.assertRaisesRegex(Exception, "(?s)cache_metadata.page_tables"):
      checked(self.cache, NUMBERS["page_past_the_pool"][0](self.metadata))[0].throw()

  def test_every_distribution_and_number_of_requests(self):
    metadata = PagesMetadata(np.int32([[0], [1], [2]]), np.int32([1, 1, 1]), np.int32([0, 1, 2, 3]))
    def accepted(**fields):
      try:
        validate.check(self.cache, metadata._replace(**fields), 3)
      except ValueError:
        return False
      return True
    for numbers in itertools.product(range(-1, 5), repeat=3):
      rises = numbers == tuple(sorted(numbers)) and numbers[0] >= 0 and numbers[2] <= 3
      self.assertEqual(accepted(distribution=np.int32(numbers)), rises, numbers)
    for number in range(-1, 5):
      self.assertEqual(accepted(num_requests=np.int32(number)), 0 <= number <= 3, number)

  def test_full_pages_may_be_shared(self):
    shared = entry(1, 0, (2, 0))(self.metadata)  # the first page of the third request
    validate.check(self.cache, shared, 8)

  def test_a_page_that_is_not_full_may_be_shared_by_requests_without_queries(self):
    metadata = PagesMetadata(*(np.array(x, np.int32) for x in (
        [[5, 1], [5, 2], [3, 0]], [2, 3, 4], [0, 0, 0, 4])))
    validate.check(self.cache, metadata, 8)
    with self.assertRaisesRegex(ValueError, "in one request's row only"):
      validate.check(self.cache, metadata._replace(query_start_loc=np.array(
          [0, 0, 1, 5], np.int32)), 8)

  def test_other_mechanisms_refuse_pages_by_name(self):
    for mechanism in ("flash_attn2", "autoregressive_decodeattn", "vanilla"):
      with self.assertRaisesRegex(
          NotImplementedError, f"mechanism='{mechanism}'.*a cache_view of PagesV2 .a cache in pages"
          ". is not supported.*mechanism='ragged_page_attention_v2' can"):
        attention(self.query, None, None, mechanism=mechanism, layout="thd", cache_view=self.cache,
                  cache_metadata=self.metadata)
    with self.assertRaisesRegex(ValueError, "mechanism='flash': expected one of"):
      attention(self.query, None, None, mechanism="flash", layout="thd", cache_view=self.cache,
                cache_metadata=self.metadata)

  def test_weights_over_pages_are_refused(self):
    with self.assertRaisesRegex(NotImplementedError, "return_weights=True"):
      attention(self.query, None, None, layout="thd", cache_view=self.cache,
                cache_metadata=self.metadata, return_weights=True)

  def test_scales_of_another_number_of_heads(self):
    quantised = pages.init(PagesV2, 24, 4, Heads(2, 6, 6), jnp.int8, "token")
    narrow = quantised._replace(key_scales=quantised.key_scales[..., :1],
                                value_scales=quantised.value_scales[..., :1])
    with self.assertRaisesRegex(ValueError, r"cache_view.key_scales: got float32\[24, 4, 1\]; "
                                r"expected float32 \[\] or \[24, 4, 2\]"):
      ragged_page_attention_v2(self.query, narrow, self.metadata)
    padded = pages.init(PagesV3, 24, 4, Heads(2, 6, 6), jnp.int8, "token")
    with self.assertRaisesRegex(ValueError, "key: got .*as many heads as the cache's key_scales"):
      ragged_page_attention_v3(self.query, self.query[:, :1], self.query[:, :1], padded,
                               self.metadata)

  def test_scales_of_another_number_of_groups(self):
    heads = Heads(2, 64, 34)
    for layout, wrong, words in (
        (PagesV1, 1, "2 groups of 32 columns"), (PagesV2, 3, "2 groups of 32 columns"),
        (PagesV3, 0, "from 1 to 4 groups of 32"), (PagesV3, 5, "from 1 to 4 groups of 32")):
      cache = pages.init(layout, 24, 4, heads, "int4", "group")
      validate.check_shapes(cache, self.metadata, len(self.query))
      for name in ("key_scales", "value_scales"):
        other = cache._replace(**{name: jnp.ones((24, 4, 2, wrong))})
        with self.assertRaisesRegex(ValueError, f"cache_view.{name}: got float32.24, 4, 2, "
                                    f"{wrong}.; expected float32 .24, 4, 2|K.*, {words}"):
          validate.check_shapes(other, self.metadata, len(self.query))
    stored = self.metadata._replace(stored_heads=pages.StoredHeads(2, 96, 34))
    with self.assertRaisesRegex(ValueError, "stored_heads: got .*96.*at most 64.* at most 64"):
      ragged_page_attention_v3(jnp.ones((len(self.query), 4, 96)), None, None,
                               pages.init(PagesV3, 24, 4, heads, "int4", "group"), stored)

  @parameterized.parameters(
      (lambda q, c, m: ragged_page_attention_v2(q, pages.convert(c, PagesV1), m),
       "cache_view: got PagesV1; expected a PagesV2"),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages[:, :, :3]), m),
       "cache_view: .*as many rows of values"),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages[0]), m),
       "cache_view: .*P, page"),
      *((lambda q, c, m, axis=axis: ragged_page_attention_v2(
          q, PagesV2(jax.lax.slice_in_dim(c.pages, 0, 0, axis=axis)), m),
         r"cache_view: got float32.*\b0\b.*P, page") for axis in range(4)),
      (lambda q, c, m: ragged_page_attention_v2(q, PagesV2(c.pages.astype(jnp.int8)), m),
       "cache_view.key_scales: got None"),
      (lambda q, c, m: ragged_page_attention_v2(q, c._replace(key_scales=jnp.float32(1)), m),
       "cache_view.key_scales: got float32.*None with pages of float32"),
      (lambda q, c, m: ragged_page_attention_v2(q.astype(jnp.bfloat16), c, m),
       "query: got bfloat16.*the dtype of the pages, float32"),
      (lambda q, c, m: ragged_page_attention_v2(q[:, :3], c, m), "query: got .*2 key heads"),
      (lambda q, c, m: ragged_page_attention_v2(q[..., :3], c, m), "query: got .*width"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(
          context_lens=m.context_lens + np.int64(2**32))),
       "context_lens: got numbers from 42949.*int32"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(
          query_start_loc=m.query_start_loc[1:])), "query_start_loc: got int32.3"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(
          page_tables=m.page_tables[:, :0])), r"cache_metadata.page_tables: got int32\[3, 0\]"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, None), "cache_metadata: got NoneType"),
      (lambda q, c, m: ragged_page_attention_v2(q, c, m._replace(query_start_loc=None)),
       "query_start_loc: got None with 8 queries and 3 requests"),
      (lambda q, c, m: page_attention(q, pages.convert(c, PagesV1), m),
       "query_start_loc: .*page_attention has one query"),
      (lambda q, c, m: ragged_page_attention_v3(q, q, q, pages.convert(c, PagesV3), m),
       "key: got .*K at most 2"),
      (lambda q, c, m: ragged_page_attention_v3(
          q, q[:, :2], q[:, :1], pages.convert(c, PagesV3), m), "value: got "),
      (lambda q, c, m: ragged_page_attention_v3(q, None, None, pages.convert(c, PagesV3), m),
       "key: got NoneType"),
      (lambda q, c, m: ragged_page_attention_v3(
          q, q[:, :2].astype(jnp.bfloat16), q[:, :2], pages.convert(c, PagesV3), m),
       "key: got bfloat16"),
      (lambda q, c, m: attention(q, None, None, layout="thd", cache_view=c, cache_metadata=m,
                                 mode="serve"), "mode: got 'serve'"),
      (lambda q, c, m: attention(q, None, None, cache_view=c, cache_metadata=m),
       "layout: got 'bthd'"),
      (lambda q, c, m: attention(q, q, q, layout="thd", cache_view=c, cache_metadata=m),
       "key: got .*caches.pages.append"),
      (lambda q, c, m: attention(q, None, None, layout="thd", cache_view=c, cache_metadata=m,
                                 cum_seqlens_q=m.query_start_loc), "cum_seqlens_q: "))
  def test_shapes(self, call, words):
    with self.assertRaisesRegex(ValueError, words):
      call(self.query, self.cache, self.metadata)


if __name__ == "__main__":
  absltest.main()
