# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the tokens in pages, and trees of drafts: against dense attention in float64."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesV1, PagesV2,
                       PagesV3, attention, explain, masks, merge_partials, page_attention,
                       ragged_page_attention_v2, ragged_page_attention_v3, score_mods)
from attn_core.caches import drafts, page_checks, pages
from attn_core_test import sampling
from attn_core_test.paged_cases import BLOCKS, Case, plain, run_pages
from attn_core_test.tpu_interpret import interpreted

CASE = Case((9, 0, 17, 6, 24, 5), (4, 0, 6, 1, 5, 5), rest=2)
MOST = 6  # new tokens of a request
PARENTS = np.array([[-1, 0, 0, 1, -1, -1], [-1] * 6, [-1, -1, 0, 2, 1, 2], [-1] * 6,
                    [-1, 0, 1, 2, 3, -1], [-1, 0, 0, 0, 0, -1]])


def ancestors(parents, token):
  """Returns a token and its ancestors, by walking up."""
  return {token} if parents[token] < 0 else {token} | ancestors(parents, parents[token])


def dense(query, cache, metadata, sees, cap=None):
  """Computes each request alone, in float64.

  Args:
    query, cache, metadata: of the call.
    sees: sees(request, i, j, first) says whether query i sees the request's token j.
    cap: soft cap on the logits.

  Returns:
    out [tokens, H, E] and lse [H, tokens].
  """
  keys, values = (np.asarray(x, np.float64) for x in pages.to_dense(cache, metadata))
  out, lse, starts = [], [], metadata.query_start_loc
  for r, length in enumerate(metadata.context_lens):
    rows = np.asarray(query[starts[r]:starts[r + 1]], np.float64)
    count = len(rows)
    seen = np.array([sees(r, i, j, length - count) for i in range(count) for j in range(length)])
    key, value = (np.repeat(x[r, :length], rows.shape[1] // x.shape[2], 1) for x in (keys, values))
    logits = np.einsum("thd,shd->hts", rows, key) * rows.shape[2]**-0.5
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    logits = np.where(seen.reshape(count, length), logits, -np.inf)
    weights = np.exp(logits)
    total = weights.sum(-1, keepdims=True)
    out.append(np.einsum("hts,she->the", weights / np.where(total > 0, total, 1), value))
    with np.errstate(divide="ignore"):
      lse.append(np.log(total[..., 0]))
  return np.concatenate(out), np.concatenate(lse, 1)


def slots_seen(scope, options):
  """Returns which slots a query sees where drafts follow one another."""
  left, right = options.sliding_window or (None, None)
  def sees(r, i, j, first):
    del r
    return ((not options.causal or j <= first + i)
            and (left is None or j >= first + i - left)
            and (right is None or options.causal or j <= first + i + right)
            and {"all": True, "cached": j < first, "new": j >= first}[scope.value])
  return sees


class PropertiesTest(parameterized.TestCase):
  """Properties of every mechanism over pages; for latent rows see latent_pages_test."""

  def outcomes(self, mechanism, changes):
    """Returns (out, lse) of a call for each change of the metadata, and the requests."""
    case = CASE if mechanism != "v1" else Case((9, 17, 1), (1, 1, 1), rest=0)
    options = PagedOptions(sliding_window=(6, 0), logits_soft_cap=2.0, return_lse=True,
                           block_sizes=BLOCKS)
    run = jax.jit(lambda arrays: [run_pages(mechanism, case, arrays, options, **change)
                                  for change in changes])
    return run(case.arrays()[:3]), case

  @parameterized.parameters("v1", "v2", "v3")
  def test_parts_merge_to_the_whole(self, mechanism):
    (cached, new, whole), _ = self.outcomes(mechanism, [{"scope": pages.Scope(x)} for x in (
        "cached", "new", "all")])
    merged = merge_partials(*zip(cached, new), "thd")
    np.testing.assert_allclose(merged.out, whole[0], atol=2e-6)
    np.testing.assert_allclose(merged.lse, whole[1], rtol=1e-5, atol=2e-6)

  @parameterized.parameters("v2", "v3")
  def test_a_tree_is_its_mask(self, mechanism):
    ((out, lse),), case = self.outcomes(mechanism, [{"draft_mask": drafts.mask(PARENTS)}])
    options = PagedOptions(sliding_window=(6, 0))
    want_out, want_lse = dense(*plain(case), tree_seen(options), 2.0)
    np.testing.assert_allclose(out[:len(want_out)], want_out, atol=3e-6)
    np.testing.assert_allclose(lse[:, :len(want_out)], want_lse, rtol=1e-5, atol=3e-6)


class ScopeTest(parameterized.TestCase):

  @parameterized.product(scope=list(pages.Scope), options=(
      PagedOptions(), PagedOptions(causal=False), PagedOptions(sliding_window=(5, 0)),
      PagedOptions(causal=False, sliding_window=(3, 2)), PagedOptions(logits_soft_cap=2.0)))
  def test_equals_dense(self, scope, options):
    query, cache, metadata = plain(CASE)
    found = ragged_page_attention_v2(query, cache, metadata._replace(scope=scope), options._replace(
        return_lse=True, block_sizes=BLOCKS))
    out, lse = dense(query, cache, metadata, slots_seen(scope, options), options.logits_soft_cap)
    tokens = len(out)
    np.testing.assert_allclose(found.attention_outputs[:tokens], out, atol=2e-6)
    np.testing.assert_allclose(found.lse[:, :tokens], lse, rtol=1e-5, atol=2e-6)

  def test_parts_merge_to_the_whole_with_its_gradient(self):
    query, cache, metadata = plain(CASE)

    def loss(query, cache, scopes):
      found = [ragged_page_attention_v2(query, cache, metadata._replace(scope=scope), PagedOptions(
          return_lse=True, block_sizes=BLOCKS)) for scope in scopes]
      merged = merge_partials([x.out for x in found], [x.lse for x in found], "thd")
      lse = jnp.where(merged.lse == -jnp.inf, 0, merged.lse)
      return jnp.sin(merged.out).sum() + jnp.sin(lse).sum(), merged.out

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    parts = run(query, cache, (pages.Scope.CACHED, pages.Scope.NEW))
    whole = run(query, cache, (pages.Scope.ALL,))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), parts, whole)

  def test_one_query_a_request_and_pages_that_are_written(self):
    case = Case((9, 17, 1, 24), (1,) * 4, rest=0)
    query, key, value, _ = map(lambda x: None if x is None else jnp.nan_to_num(x), case.arrays())
    single = case.metadata(single=True)
    run = lambda scope: page_attention(
        query, PagesV1(key, value), single._replace(scope=scope), return_lse=True)
    cached, new, both = map(run, (pages.Scope.CACHED, pages.Scope.NEW, pages.Scope.ALL))
    merged = merge_partials([x.out for x in (cached, new)], [x.lse for x in (cached, new)], "thd")
    np.testing.assert_allclose(merged.out, both.attention_outputs, atol=1e-6)
    np.testing.assert_array_equal(cached.lse[:, 2], -np.inf)  # its only token is the new one

    heads = Heads(case.K, case.D, case.D)
    wide = pages.convert(PagesV1(key, value), PagesV3, heads)
    written = ragged_page_attention_v3(
        query, *jnp.ones((2, 4, case.K, case.D)), wide,
        case.metadata()._replace(scope=pages.Scope.NEW))
    np.testing.assert_allclose(written.attention_outputs, np.ones((4, case.H, case.D)), atol=1e-6)

  def test_bad_input(self):
    query, cache, metadata = plain(CASE)
    with self.assertRaisesRegex(ValueError, "cache_metadata.scope: got 'new'.*Scope.NEW"):
      ragged_page_attention_v2(query, cache, metadata._replace(scope="new"))

  def test_hopper_leaves_it_to_xla(self):
    for changes, argument in (({"scope": pages.Scope.NEW}, "cache_metadata.scope=Scope.NEW"),
                              ({"draft_mask": drafts.mask(PARENTS)}, "cache_metadata.draft_mask")):
      found = explained(changes, OperationMetadata(platform="gpu", compute_capability="9.0"))
      self.assertIn("paged.xla", found)
      self.assertIn(argument, found)

  def test_tpus_take_trees_of_32_tokens_without_score_mods(self):
    wide = jnp.zeros((6, 33, 33), bool)
    for changes, options, words in (
        ({"scope": pages.Scope.NEW}, {}, None), ({"draft_mask": wide[:, :32, :32]}, {}, None),
        ({"draft_mask": wide}, {}, "draft_mask of 33 tokens a request: .*trees of up to 32"),
        ({"draft_mask": wide[:, :6, :6]}, {"score_mod": score_mods.alibi(jnp.ones(4))},
         "score mod with cache_metadata.draft_mask, whose positions are those in the tree")):
      found = explained(changes, TPU, **options)
      self.assertIn("can, by paged.xla" if words else "can, by paged.tpu", found)
      self.assertRegex(found, words or "paged.tpu, which goes before paged.xla")


def explained(changes, place, **options):
  """Returns what `explain` says about a call with changed metadata."""
  query, cache, metadata = plain(CASE)
  return str(explain(
      query, None, None, mechanism="ragged_page_attention_v2", layout="thd", cache_view=cache,
      cache_metadata=metadata._replace(**changes), metadata=place, **options))


TPU = OperationMetadata(platform="tpu")
# Few rows of a key head and many, a tree and parts of the tokens.
ON_TPU = {
    "tree": (PagedOptions(), "tree", BlockSizes(4, 8)),
    "tree_in_one_block": (PagedOptions(sliding_window=(9, 0)), "tree", BlockSizes(None, 8)),
    "tree_window_many_rows": (PagedOptions(sliding_window=(2, 0)), "tree", BlockSizes(48, 8)),
    "tree_not_causal": (PagedOptions(causal=False, sliding_window=(2, 1)), "tree",
                        BlockSizes(4, 8)),
    "cached": (PagedOptions(sliding_window=(5, 0)), pages.Scope.CACHED, BlockSizes(4, 8)),
    "new_many_rows": (PagedOptions(causal=False), pages.Scope.NEW, BlockSizes(48, 8)),
    "new": (PagedOptions(), pages.Scope.NEW, BlockSizes(4, 8)),
}


class TpuTest(parameterized.TestCase):
  """The TPU kernel, interpreted, from memory full of NaN, with races watched."""

  @parameterized.parameters(*sampling.names(ON_TPU, (
      "tree_window_many_rows", "tree", "tree_in_one_block", "cached", "new_many_rows")))
  def test_equals_dense(self, name):
    options, tokens, sizes = ON_TPU[name]
    query, cache, metadata = plain(CASE)
    if tokens == "tree":
      changes, sees = {"draft_mask": drafts.mask(PARENTS)}, tree_seen(options)
    else:
      changes, sees = {"scope": tokens}, slots_seen(tokens, options)
    run = jax.jit(lambda metadata: ragged_page_attention_v2(
        query, cache, metadata, options._replace(return_lse=True, block_sizes=sizes, metadata=TPU)))
    with interpreted():
      found = jax.block_until_ready(run(metadata._replace(**changes)))
    out, lse = dense(query, cache, metadata, sees)
    np.testing.assert_allclose(found.attention_outputs[:len(out)], out, atol=5e-6)
    np.testing.assert_allclose(found.lse[:, :len(out)], lse, rtol=1e-5, atol=5e-6)

  def test_a_request_with_more_queries_than_the_mask_has_rows(self):
    """It is flagged, and the results of the others are their own."""
    query, cache, metadata = plain(CASE)
    metadata = metadata._replace(draft_mask=np.asarray(drafts.mask(PARENTS))[:, :4, :4])
    run = jax.jit(lambda metadata: (ragged_page_attention_v2(query, cache, metadata, PagedOptions(
        return_lse=True, block_sizes=BlockSizes(4, 8), metadata=TPU)),
                                    page_checks.flag(cache, metadata, len(query))))
    with interpreted():
      found, wrong = jax.block_until_ready(run(metadata))
    self.assertTrue(wrong)
    out, lse = dense(query, cache, metadata, tree_seen(PagedOptions()))
    for r in (0, 3):
      rows = slice(*CASE.metadata().query_start_loc[r:r + 2])
      np.testing.assert_allclose(found.attention_outputs[rows], out[rows], atol=5e-6)
      np.testing.assert_allclose(found.lse[:, rows], lse[:, rows], rtol=1e-5, atol=5e-6)

  def test_masks_that_are_no_trees(self):
    """A draft that sees later ones has a window of its own, of all columns of the mask."""
    query, cache, metadata = plain(CASE)
    metadata = metadata._replace(draft_mask=np.ones((len(CASE.lengths), 6, 6), bool))
    options = PagedOptions(causal=False, sliding_window=(15, 20), block_sizes=BlockSizes(72, 8))
    run = lambda options: jax.jit(lambda metadata: ragged_page_attention_v2(
        query, cache, metadata, options).attention_outputs)(metadata)
    with interpreted():
      found = jax.block_until_ready(run(options._replace(metadata=TPU)))
    np.testing.assert_allclose(found, run(options), atol=5e-6)


def tree_seen(options):
  """Returns what queries see by walking up the trees; positions are depths."""
  left, right = options.sliding_window or (None, None)
  def sees(r, i, j, first):
    place = lambda t: first + len(ancestors(PARENTS[r], t)) - 1
    query, key = place(i), j if j < first else place(j - first)
    return ((j < first or j - first in ancestors(PARENTS[r], i))
            and (left is None or key >= query - left)
            and (right is None or options.causal or key <= query + right))
  return sees


class DraftsTest(parameterized.TestCase):

  @parameterized.product(causal=(True, False), window=(None, (2, 0), (9, 0)), sizes=(
      BLOCKS, BlockSizes(3, 4)))
  def test_equals_dense(self, causal, window, sizes):
    query, cache, metadata = plain(CASE)
    options = PagedOptions(causal=causal, sliding_window=window, return_lse=True, block_sizes=sizes)
    found = ragged_page_attention_v2(
        query, cache, metadata._replace(draft_mask=drafts.mask(PARENTS)), options)
    out, lse = dense(query, cache, metadata, tree_seen(options))
    np.testing.assert_allclose(found.attention_outputs[:len(out)], out, atol=2e-6)
    np.testing.assert_allclose(found.lse[:, :len(out)], lse, rtol=1e-5, atol=2e-6)

  @parameterized.parameters(True, False)
  def test_a_token_that_does_not_see_itself_keeps_its_position(self, causal):
    query, cache, metadata = plain(CASE)
    mask = np.asarray(drafts.mask(PARENTS)) & ~np.eye(MOST, dtype=bool)
    options = PagedOptions(causal=causal, sliding_window=(3, 0), return_lse=True)
    found = ragged_page_attention_v2(
        query, cache, metadata._replace(draft_mask=mask), options._replace(block_sizes=BLOCKS))
    sees = tree_seen(options)
    out, lse = dense(query, cache, metadata, lambda r, i, j, first: (
        j - first != i and sees(r, i, j, first)))
    np.testing.assert_allclose(found.attention_outputs[:len(out)], out, atol=2e-6)
    np.testing.assert_allclose(found.lse[:, :len(out)], lse, rtol=1e-5, atol=2e-6)

  def test_gradients_are_those_of_dense_attention(self):
    query, cache, metadata = plain(Case((9, 7), (4, 5), rest=0))
    parents = PARENTS[[0, 2], :5]
    keys, values = pages.to_dense(cache, metadata)
    trees = metadata._replace(draft_mask=drafts.mask(parents))
    weight = np.random.default_rng(2).normal(size=query.shape)

    def paged(query, keys, values):
      held = pages.from_dense(cache, keys, values, metadata)
      return (ragged_page_attention_v2(query, held, trees, block_sizes=BLOCKS).out * weight).sum()

    def one_by_one(query, keys, values):
      total, start = 0.0, 0
      for r, (length, count) in enumerate(((9, 4), (7, 5))):
        seen = np.array([[j < length - count or j - length + count in ancestors(parents[r], i)
                          for j in range(length)] for i in range(count)])
        rows = slice(start, start + count)
        found = attention(query[None, rows], keys[r, None, :length], values[r, None, :length],
                          mechanism="vanilla", causal=False, mask=masks.dense(seen[None, None]))
        total, start = total + (found.out[0] * weight[rows]).sum(), start + count
      return total

    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(query, keys, values) for f in (paged, one_by_one))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, want)

  def test_a_chain_is_the_usual_order(self):
    query, cache, metadata = plain(CASE)
    chain = drafts.mask(np.tile(np.arange(-1, MOST - 1), (6, 1)))
    run = jax.jit(lambda metadata: ragged_page_attention_v2(
        query, cache, metadata, block_sizes=BLOCKS, sliding_window=(3, 0)).attention_outputs)
    np.testing.assert_array_equal(run(metadata._replace(draft_mask=chain)), run(metadata))

  def test_the_mask_holds_a_token_and_its_ancestors(self):
    found = np.asarray(drafts.mask(PARENTS))
    for r, i in np.ndindex(PARENTS.shape):
      self.assertEqual(set(np.flatnonzero(found[r, i])), ancestors(PARENTS[r], i), (r, i))
    np.testing.assert_array_equal(drafts.depths(PARENTS), found.sum(2) - 1)

  def test_trees_that_are_not_trees(self):
    for parents in ([[0, 0]], [[-1, 2, 1]], [[-2, 0]]):
      with self.assertRaisesRegex(ValueError, "parents: got .*before the child"):
        drafts.mask(np.array(parents))
      self.assertFalse(jax.jit(drafts.is_forest)(np.array(parents)))
    self.assertTrue(jax.jit(drafts.is_forest)(PARENTS))
    for parents, expected in (([-1, 0], "a row for each request"), ([[0.5]], "int .R, q")):
      with self.assertRaisesRegex(ValueError, f"parents: got .*{expected}"):
        drafts.mask(np.array(parents))

  def test_bad_masks(self):
    query, cache, metadata = plain(CASE)
    good = drafts.mask(PARENTS)
    for wrong, words in (
        (good.astype(int), "draft_mask: got int32.*expected bool .R, q, q.; caches.drafts.mask"),
        (good[:4], "draft_mask: got bool.*R = 6"), (good[:, :3], "draft_mask: got bool"),
        (good[:, :3, :3], "query_start_loc: got .*at most 3 queries of a request")):
      with self.assertRaisesRegex(ValueError, f"cache_metadata.{words}"):
        ragged_page_attention_v2(query, cache, metadata._replace(draft_mask=wrong))
    flag = jax.jit(lambda mask: page_checks.flag(
        cache, metadata._replace(draft_mask=mask), query.shape[0]))
    self.assertFalse(flag(good))
    self.assertTrue(flag(good[:, :3, :3]))

  @parameterized.product(layout=(PagesV1, PagesV2, PagesV3), scales=(None, "token"))
  def test_accepted_tokens_move_to_the_front(self, layout, scales):
    _, cache, metadata = plain(CASE)
    heads = Heads(CASE.K, CASE.D, CASE.D)
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.normal(size=(2, CASE.pool * CASE.page, CASE.K, CASE.D)), jnp.float32)
    cache = pages.init(layout, CASE.pool, CASE.page, heads, "int8" if scales else "float32", scales)
    cache = pages.append(cache, *tokens, np.arange(CASE.pool * CASE.page))
    accepted = np.array([[0, 2, -1], [-1] * 3, [1, 4, 5], [0, -1, -1], [-1] * 3, [0, 3, 9]])
    moved = jax.jit(drafts.keep)(cache, metadata, accepted)
    before, after = (np.array(pages.to_dense(x, metadata, heads)) for x in (cache, moved))
    for r, length in enumerate(CASE.lengths):
      first = length - CASE.queries[r]
      for place, number in enumerate(accepted[r]):
        if 0 <= number < CASE.queries[r]:
          after_this = after[:, r, first + place]
          np.testing.assert_array_equal(after_this, before[:, r, first + number])
          after[:, r, first + place] = before[:, r, first + place]
    np.testing.assert_array_equal(after, before)  # nothing else has changed

  def test_a_tree_is_each_of_its_paths(self):
    """A branch of a tree gives what the same tokens give in the order of a chain."""
    query, cache, metadata = plain(CASE)
    trees = metadata._replace(draft_mask=drafts.mask(PARENTS))
    whole = ragged_page_attention_v2(query, cache, trees, block_sizes=BLOCKS).attention_outputs
    path, first, start = [0, 2, 3], CASE.lengths[2] - 6, int(metadata.query_start_loc[2])
    kept = drafts.keep(cache, metadata, np.array([[-1] * 3] * 2 + [path] + [[-1] * 3] * 3))
    chain = metadata._replace(
        page_tables=metadata.page_tables[2:3], context_lens=np.int32([first + 3]),
        query_start_loc=np.int32([0, 3]))
    alone = ragged_page_attention_v2(query[start + np.array(path)], kept, chain, block_sizes=BLOCKS)
    np.testing.assert_allclose(alone.out, whole[start + np.array(path)], atol=2e-6)


if __name__ == "__main__":
  absltest.main()
