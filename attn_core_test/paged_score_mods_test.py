# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages with score mods: against the dense oracle, and refusals by name."""

import functools
import operator
import re
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, Heads, MaskInfo, OperationMetadata, PagedOptions, PagesMetadata,
                       PagesV1, PagesV2, PagesV3, attention, explain, masks,
                       ragged_page_attention_v2, ragged_page_attention_v3, score_mods)
from attn_core.benchmark.static import profile
from attn_core.caches import drafts, pages, prefixes
from attn_core.caches.paged import request_groups
from attn_core_test import paged_shard_cases, sampling
from attn_core_test.paged_cases import BLOCKS, Case, plain, run_pages
from attn_core_test.paged_shard_cases import mesh_of
from attn_core_test.tpu_interpret import interpreted

jax.config.update("jax_num_cpu_devices", 8)

NUMBERS = np.array([1, 0, 3], np.int32)


class Frozen(dict):
  __hash__ = object.__hash__


def gathered(score, batch, head, query, key, weights, numbers):
  """Returns scores of a custom score mod that reads every index."""
  return score * jnp.cos(weights[head]) + jnp.where(
      numbers[key % 3] > 0, weights[head] * jnp.sin(query - 0.5 * key).astype(score.dtype),
      0.1 * score * score) + batch.astype(score.dtype)


def mod_arrays(case, seed=3):
  """Returns the arrays of every kind of score mod, by name."""
  rng = np.random.default_rng(seed)
  tokens = sum(case.queries) + case.rest
  shapes = {"scale": (1, case.H, 1), "slopes": (case.H,), "table": (8, case.H),
            "distance": (6, 1), "near": (3 * 9, case.H), "weights": (case.H,),
            "per_query": (1, case.H, tokens), "times": (1, 1, tokens), "per_key": (1, case.H, 1)}
  return {name: jnp.asarray(0.3 * rng.normal(size=shape), case.dtype)
          for name, shape in shapes.items()}


# Every kind of score mod, of `mod_arrays`.
KINDS = (
    lambda a: score_mods.scale_by(a["scale"]), lambda a: score_mods.alibi(a["slopes"]),
    lambda a: score_mods.relative(a["table"], max_distance=9, bidirectional=False),
    lambda a: score_mods.soft_cap(2.5), lambda a: score_mods.by_distance(a["distance"], -5),
    lambda a: score_mods.grid(a["near"], (2, 5)),
    lambda a: score_mods.custom(gathered, a["weights"], NUMBERS),
    lambda a: score_mods.per_query(a["per_query"]),
    lambda a: score_mods.scale_by(1 + a["times"]), lambda a: score_mods.per_key(a["per_key"]))


def everything(a, kinds=KINDS):
  """Returns the composition of kinds of score mods."""
  return functools.reduce(operator.rshift, (kind(a) for kind in kinds))


def without_positions(a):
  return (score_mods.scale_by(a["scale"]) >> score_mods.soft_cap(1.5)
          >> score_mods.per_query(a["per_query"]))


def run(mechanism, case, arrays, mods, make=everything, **more):
  """Returns (output, lse) of the mechanism; v3 gets the new tokens as arguments, not in pages."""
  query, key, value, sinks = arrays
  options = case.options._replace(softmax_aux=sinks, block_sizes=BLOCKS, return_lse=True,
                                  score_mod=make(mods), **more)
  return run_pages(mechanism, case, (query, key, value), options, rest=0)


def oracle(case, arrays, mods, make=everything):
  """Returns (output, lse) by `references.paged`, request by request."""
  return case._replace(options=case.options._replace(score_mod=make(mods))).oracle(*arrays)


def both(function, case, arrays, mods):
  """Returns [output, lse] and the gradients of a scalar that uses both."""
  rows = sum(case.queries)
  weights = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
  def loss(arrays, mods):
    found = function(case, arrays, mods)
    out, lse = found[0][:rows].astype(jnp.float32), found[1][:, :rows].astype(jnp.float32)
    return (out * weights(out)).sum() + jnp.where(
        lse == -jnp.inf, 0, lse * weights(lse)).sum(), (out, lse)
  (_, found), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, mods)
  return found, gradients


def inputs(case, dtype="float32"):
  finite = lambda x: None if x is None else jnp.nan_to_num(x).astype(dtype)
  return tuple(map(finite, case.arrays())), {k: x.astype(dtype)
                                             for k, x in mod_arrays(case).items()}


def close(got, want, tolerance=2e-5):
  for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want),
                          strict=True):
    scale = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale,
                               err_msg=jax.tree_util.keystr(path))


def by_parity(score, batch, head, query, key, amounts):
  """Returns scores of a custom score mod that kernels for TPUs evaluate."""
  return jnp.where(key & 1 == 0, score * amounts[head], score) + 0.1 * jnp.tanh(score) * (
      batch + 2 * head - query).astype(score.dtype)


# What the kernel for TPUs takes.
ON_TPU = (
    lambda a: score_mods.scale_by(a["scale"]), lambda a: score_mods.alibi(a["slopes"]),
    lambda a: score_mods.soft_cap(2.5),
    lambda a: score_mods.custom(by_parity, a["weights"]), *KINDS[7:],
    lambda a: score_mods.alibi(a["slopes"], symmetric=True))
FEW_ROWS = (*ON_TPU[:2], KINDS[2], *ON_TPU[2:4], KINDS[4], *ON_TPU[4:])
# name: (mechanism, case, block sizes)
TPU_CASES = {
    "window_sinks_cap": ("v2", Case(
        (9, 0, 17, 24, 5), (9, 0, 5, 1, 2), page=8, D=128, unused=1, sinks=True,
        options=PagedOptions(sliding_window=(11, 0), logits_soft_cap=2.0)), BlockSizes(4, 16)),
    "many_rows": ("v2", Case((47, 5), (31, 2), page=8, H=24, K=8, D=64), BlockSizes(32, 16)),
    "distribution": ("v3", Case((20, 11, 3), (1, 1, 3), page=8, H=16, K=8, D=128,
                                distribution=(2, 2, 3), unused=1), BlockSizes(4, 16)),
    "one_query": ("v1", Case((29, 0, 1, 17), (1,) * 4, page=4, H=6, K=3, rest=0),
                  BlockSizes(block_kv=8)),
    "padded_heads": ("v3", Case((13, 6), (4, 1), page=8, H=3, K=3, dtype="bfloat16"),
                     BlockSizes(4, 16)),
}


CASES = Frozen({
    "chunks_and_decoding": ("v2", Case((9, 0, 17, 5, 12), (9, 0, 5, 1, 3), sinks=True)),
    "window_cap": ("v2", Case((9, 0, 17, 5), (9, 0, 5, 1), options=PagedOptions(
        sliding_window=(6, 0), logits_soft_cap=1.5, softmax_scale=0.7))),
    "both_sides_one_head": ("v2", Case((9, 21), (9, 5), H=1, K=1, options=PagedOptions(
        sliding_window=(3, 2), causal=False))),
    "distribution": ("v2", Case((20, 11), (1, 5), distribution=(1, 1, 2), unused=2)),
    "writes": ("v3", Case((9, 17, 5), (9, 5, 1))),
    "one_query": ("v1", Case((9, 0, 32), (1,) * 3, rest=0, K=1, D=8, sinks=True)),
})


class OracleTest(parameterized.TestCase):

  @parameterized.parameters("chunks_and_decoding", "one_query", *sampling.with_slow(
      (), *(name for name in CASES if name not in ("chunks_and_decoding", "one_query"))))
  def test_value_lse_and_gradients(self, name):
    mechanism, case = CASES[name]
    got = both(functools.partial(run, mechanism), case, *inputs(case))
    with jax.enable_x64(True):
      want = both(oracle, case, *inputs(case, "float64"))
    close(got, want)

  @sampling.slow("paged_score_mods_tangents")
  def test_tangents_and_second_derivatives(self):
    case = Case((9, 5, 7), (4, 1, 7), sinks=True)
    def everything_of(function, dtype):
      given = inputs(case, dtype)
      moves = jax.tree.map(lambda x: jnp.cos(3 * x), given)
      return jax.jit(lambda x, dx: jax.jvp(lambda *x: both(function, case, *x), x, dx)[1])(
          given, moves)
    got = everything_of(functools.partial(run, "v2"), "float32")
    with jax.enable_x64(True):
      want = everything_of(oracle, "float64")
    close(got, want, 1e-4)

  def test_bfloat16(self):
    mechanism, case = CASES["chunks_and_decoding"]
    (out, _), gradients = both(functools.partial(run, mechanism), case, *inputs(case, "bfloat16"))
    with jax.enable_x64(True):
      rounded = jax.tree.map(lambda x: x.astype("float64"), inputs(case, "bfloat16"))
      (want, _), exact = both(oracle, case, *rounded)
    close(out, want, 2e-2)
    close(jax.tree.map(lambda x: x.astype("float32"), gradients), exact, 4e-2)


class RandomTest(parameterized.TestCase):
  """Compositions of score mods, requests and masks against the dense oracle."""

  # One by one, so that no rotation takes many more than another.
  @parameterized.parameters(*sampling.with_slow(
      [(0, 0)], *((part, number) for part in range(1, 33) for number in range(4))))
  def test_one(self, part, number):
    rng = np.random.default_rng([19, part])
    *_, one = [self.choose(rng) for _ in range(number + 1)]
    if one is not None:
      self.check(*one)

  def choose(self, rng):
    """Returns a mechanism, a case and a function that makes a score mod; None without queries."""
    chosen = [KINDS[i] for i in rng.integers(len(KINDS), size=rng.integers(1, 4))]
    make = functools.partial(everything, kinds=chosen)
    page = int(rng.integers(1, 6))
    lengths = tuple(map(int, rng.integers(0, min(8 * page, 24) + 1, 3)))
    heads = ((4, 2), (4, 4), (3, 1), (1, 1))[rng.integers(4)]
    window = (None, (int(rng.integers(9)), 0), (3, 2))[rng.integers(3)]
    case = Case(lengths, tuple(int(rng.integers(n + 1)) for n in lengths), H=heads[0], K=heads[1],
                page=page, rest=int(rng.integers(3)), options=PagedOptions(
                    sliding_window=window, causal=bool(rng.integers(2))))
    if not sum(case.queries):
      return None
    return ("v2", "v3")[rng.integers(2)], case, make

  def check(self, mechanism, case, make):
    arrays, mods = inputs(case)
    got = jax.jit(functools.partial(run, mechanism, case, make=make))(arrays, mods)
    with jax.enable_x64(True):
      want = jax.jit(functools.partial(oracle, case, make=make))(*inputs(case, "float64"))
    close(got, want)


class TokensTest(parameterized.TestCase):

  def test_a_chunked_prefill_has_the_same_bits(self):
    """Positions are those of the request, in whatever parts it is computed."""
    case = Case((24,), (24,), rest=0)
    arrays, mods = inputs(case)
    mods = mods | {"per_query": mods["per_query"][..., :1], "times": mods["times"][..., :1]}
    whole = run("v2", case, arrays, mods)[0]
    query, *rest = arrays
    for first, last in ((0, 11), (11, 12), (12, 24)):
      part = case._replace(lengths=(last,), queries=(last - first,))
      tables = case.metadata().page_tables
      found = ragged_page_attention_v2(
          query[first:last], pages.convert(PagesV1(*rest[:2]), PagesV2),
          part.metadata()._replace(page_tables=tables), score_mod=everything(mods),
          block_sizes=BLOCKS).attention_outputs
      np.testing.assert_array_equal(found, whole[first:last])

  def test_drafts_have_the_positions_of_their_tree(self):
    parents = np.array([[-1, 0, 0, 1], [-1, 0, 1, -1]])
    case = Case((9, 17), (4, 3), rest=0)
    arrays, mods = inputs(case)
    query, key, value, _ = arrays
    metadata, mask = case.metadata(), np.asarray(drafts.mask(parents))
    cache = pages.convert(PagesV1(key, value), PagesV2)
    found = ragged_page_attention_v2(query, cache, metadata._replace(draft_mask=mask),
                                     score_mod=everything(mods), block_sizes=BLOCKS)
    start = 0
    for row, (length, number) in enumerate(zip(case.lengths, case.queries)):
      first = length - number
      of_key = np.arange(length, dtype=np.int32)
      of_key[first:] = first + mask[row, :number, :number].sum(1) - 1
      seen = np.concatenate([np.ones((number, first), bool), mask[row, :number, :number]], 1)
      own = mods | {name: mods[name][..., start:start + number] for name in ("per_query", "times")}
      dense = [x[row:row + 1, :length] for x in pages.to_dense(cache, metadata)]
      want = attention(query[None, start:start + number], *dense, causal=False, mechanism="vanilla",
                       mask=masks.dense(seen[None, None]), score_mod=everything(own), mask_info=
                       MaskInfo(q_positions=of_key[None, first:], kv_positions=of_key[None]))
      np.testing.assert_allclose(found.attention_outputs[start:start + number],
                                 want.attention_outputs[0], rtol=2e-5, atol=2e-5)
      start += number


class TpuTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("window_sinks_cap",)],
      *((name,) for name in TPU_CASES if name != "window_sinks_cap")))
  def test_equals_the_oracle(self, name):
    """Interprets the kernel; slots that may not be read hold NaN."""
    mechanism, case, blocks = TPU_CASES[name]
    make = functools.partial(everything, kinds=ON_TPU if name == "many_rows" else FEW_ROWS)
    (query, _, _, sinks), mods = inputs(case, case.dtype)
    mods = {name: x.astype("float32") for name, x in mods.items()}
    held = tuple(x.astype(case.dtype) for x in case.arrays()[1:3])
    options = case.options._replace(block_sizes=blocks, return_lse=True,
                                    metadata=OperationMetadata(platform="tpu"))
    run = lambda query, held, sinks, mods: run_pages(
        mechanism, case, (query, *held),
        options._replace(softmax_aux=sinks, score_mod=make(mods)), rest=0)
    with interpreted():
      found = jax.block_until_ready(jax.jit(run)(query, held, sinks, mods))
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), "float64"),
                          ((query, *map(jnp.nan_to_num, held), sinks), mods))
      want = jax.jit(functools.partial(oracle, case, make=make))(*wide)
    tokens = sum(case.queries)
    for x, y in zip(found, want):
      x, y = (np.asarray(x, np.float64)[tuple(slice(tokens) if n == len(query) else slice(None)
                                              for n in x.shape)] for x in (x, y))
      np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
      np.testing.assert_allclose(x, y, atol=5e-6 if case.dtype == "float32" else 2e-2)

  @sampling.slow("tpu_paged_score_mods_heads")
  def test_heads_over_devices_have_global_numbers(self):
    case = paged_shard_cases.Case(G=2, layout=PagesV3)
    arrays, metadata = case.arrays()[:4], case.metadata()
    mods = mod_arrays(Case(queries=(arrays[0].shape[0],), rest=0, H=case.H))
    run = lambda place: jax.jit(lambda arrays, mods: ragged_page_attention_v3(
        *arrays, metadata, block_sizes=BLOCKS, metadata=place,
        score_mod=everything(mods, FEW_ROWS)).out)(arrays, mods)
    with interpreted():
      found = jax.block_until_ready(run(OperationMetadata(mesh=mesh_of(dp=2, tp=2),
                                                          platform="tpu")))
    close(found, run(OperationMetadata(platform="cpu")), 5e-6)

  @unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
  @sampling.slow_parameters(*(
      ("v6e", "v2", (8, 4, 128), 64), ("v6e", "v3", (1, 8, 128), 16),
      ("v5e", "v3", (3, 1, 128), 32), ("v5p", "v1", (4, 2, 64), 16),
      ("tpu7x", "v2", (2, 5, 256), 64), ("v6e", "v2", (1, 8, 128), 2048)))
  def test_compiles(self, chip, mechanism, shape, tokens):
    """Compiles ahead of time, without a chip."""
    key_heads, group, width = shape
    place = SingleDeviceSharding(profile.devices(chip)[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    kind = {"v1": PagesV1, "v2": PagesV2, "v3": PagesV3}[mechanism]
    heads = Heads(key_heads, width, width)
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(
        lambda: pages.init(kind, 256, 16, heads, jnp.bfloat16)))
    starts = None if mechanism == "v1" else array(jnp.int32, 17)
    metadata = PagesMetadata(array(jnp.int32, 16, 64), array(jnp.int32, 16), starts)
    mods = {name: array(jnp.float32, *x.shape) for name, x in mod_arrays(
        Case(queries=(tokens,), rest=0, H=key_heads * group)).items()}
    new = (array(jnp.bfloat16, tokens, key_heads, width),) * 2 if mechanism == "v3" else (None,) * 2
    names = {"v1": "page_attention", "v2": "ragged_page_attention_v2",
             "v3": "ragged_page_attention_v3"}
    run = lambda query, new, cache, metadata, mods: attention(
        query, *new, layout="thd", mechanism=names[mechanism], cache_view=cache,
        cache_metadata=metadata, metadata=OperationMetadata(platform="tpu"),
        score_mod=everything(mods, FEW_ROWS if tokens <= 16 else ON_TPU)).attention_outputs
    text = jax.jit(run).trace(
        array(jnp.bfloat16, tokens, key_heads * group, width), new, cache, metadata, mods).lower(
            lowering_platforms=("tpu",)).compile().as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)


class MeshTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([(2, dict(dp=2, tp=2))], (4, dict(dp=2))))
  def test_groups_and_heads_over_devices(self, groups, sizes):
    """Heads have global numbers; groups have the tokens of their part of the call."""
    case = paged_shard_cases.Case(G=groups, layout=PagesV3)
    arrays, metadata = case.arrays()[:4], case.metadata()
    mods = mod_arrays(Case(queries=(arrays[0].shape[0],), rest=0, H=case.H))
    def both(mesh):
      def loss(arrays, mods):
        query, key, value, cache = arrays
        output = ragged_page_attention_v3(
            query, key, value, cache, metadata, score_mod=everything(mods), return_lse=True,
            block_sizes=BLOCKS, metadata=OperationMetadata(mesh=mesh))
        lse = jnp.where(output.lse == -jnp.inf, 0, output.lse)
        return jnp.sin(output.out).sum() + (lse**2).sum(), output.out
      return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, mods)
    close(both(mesh_of(**sizes)), both(None), 5e-6)

  def test_a_function_without_arrays_reads_global_heads(self):
    case = paged_shard_cases.Case(layout=PagesV3)
    query, key, value, cache = case.arrays()[:4]
    mod = score_mods.custom(lambda x, b, h, q, k: x + (h * (k - q)).astype(x.dtype))
    run = lambda mesh: ragged_page_attention_v3(
        query, key, value, cache, case.metadata(), score_mod=mod,
        metadata=OperationMetadata(mesh=mesh)).out
    close(run(mesh_of(tp=2)), run(None), 5e-6)

  @sampling.slow("paged_score_mods_stripes")
  def test_stripes_of_a_request_over_devices(self):
    rng, (stripes, requests, width) = np.random.default_rng(2), (2, 3, 2)
    one = np.stack([rng.permutation(requests * width).reshape(requests, width)
                    for _ in range(stripes)]).astype(np.int32)
    metadata = PagesMetadata(one[None], np.array([[13, 16, 3]], np.int32),
                             np.array([[0, 4, 5, 8]], np.int32))
    cache = pages.init(PagesV2, stripes * requests * width, 4, Heads(2, 8, 8), "float32")
    cache = cache._replace(pages=jnp.asarray(rng.normal(size=cache.pages.shape), jnp.float32))
    query = jnp.asarray(rng.normal(size=(8, 4, 8)), jnp.float32)
    mods = mod_arrays(Case(queries=(8,), rest=0))
    whole = jax.tree.map(lambda x: x[0], request_groups.whole(metadata, 12))
    def both(metadata, mesh):
      def loss(query, cache, mods):
        out = ragged_page_attention_v2(
            query, cache, metadata, score_mod=everything(mods),
            metadata=OperationMetadata(mesh=mesh)).attention_outputs
        return jnp.sin(out).sum(), out
      return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(query, cache, mods)
    want = both(whole, None)
    close(both(metadata, mesh_of(sp=2)), want, 5e-6)
    close(both(metadata, None), want, 5e-6)


class PrefixesTest(parameterized.TestCase):

  def test_mods_that_read_no_positions(self):
    tables = np.array([[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]], np.int32)
    lengths, starts = np.array([14, 16, 13], np.int32), np.array([0, 2, 5, 6], np.int32)
    alone = PagesMetadata(tables, lengths, starts)
    shared = alone._replace(prefixes=prefixes.find(
        tables, (lengths - np.diff(starts)) // 4, min_requests=2))
    self.assertGreater(shared.prefixes.page_counts.sum(), 0)
    case = Case(queries=(6,), rest=1)
    cache = plain(case)[1]
    query = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 6)), jnp.float32)
    mods = mod_arrays(case)
    def both(metadata):
      def loss(query, cache, mods):
        out = ragged_page_attention_v2(
            query, cache, metadata, score_mod=without_positions(mods)).attention_outputs
        return jnp.sin(out).sum(), out
      return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(query, cache, mods)
    close(both(shared), both(alone), 5e-6)
    with self.assertRaisesRegex(ValueError, "score_mod: got one that reads positions.*prefixes"):
      ragged_page_attention_v2(query, cache, shared, score_mod=score_mods.alibi(np.ones(4)))


class RefusalsTest(parameterized.TestCase):

  @parameterized.parameters(
      (score_mods.per_key(np.ones((1, 1, 24))), r"score_mod: got per_key with .*\[1, 1, 24\]"),
      (score_mods.soft_cap(2.0) >> score_mods.dense(np.ones((1, 1, 1, 3))),
       "score_mod: got dense with .*position in the request"),
      (score_mods.alibi(np.ones((3, 4))), r"alibi: slopes is .*sizes \[1, 4\] of the call"),
      (score_mods.per_query(np.ones((1, 1, 5))), r"per_query: array is .*sizes \[1, 4, 21\]"))
  def test_arrays_that_have_no_meaning(self, mod, message):
    query, cache, metadata = plain(Case())
    with self.assertRaisesRegex(ValueError, message):
      ragged_page_attention_v2(query, cache, metadata, score_mod=mod)

  def explained(self, metadata, *kinds, case=Case(), dtype="float32"):
    query, cache, pages_metadata = plain(case, dtype)
    return str(explain(query, None, None, cache_view=cache, cache_metadata=pages_metadata,
                       layout="thd", mechanism="ragged_page_attention_v2", metadata=metadata,
                       score_mod=everything(mod_arrays(case), kinds)))

  def test_the_kernels_name_what_they_leave_to_plain_xla(self):
    case = Case(page=8, D=64)
    for chips, name, metadata in (
        ("TPUs", "tpu", OperationMetadata(platform="tpu")),
        ("Hopper", "gpu", OperationMetadata(platform="gpu", compute_capability="9.0"))):
      said = functools.partial(self.explained, metadata, case=case, dtype="bfloat16")
      for kind, reason in zip(KINDS[5:7], (
          "a table looked up by distance (score_mods.grid)", "gathered with an operand [4]")):
        found = said(KINDS[1], kind)
        self.assertIn(f"by paged.xla, not by paged.{name}", found)
        self.assertRegex(found, f"{re.escape(reason)}.*the kernels for {chips} look nothing up")
      self.assertIn(f"by paged.{name}", said(*FEW_ROWS))

  def test_lines_of_a_table_that_the_kernel_for_hopper_leaves_to_plain_xla(self):
    case = Case(queries=(250,), lengths=(250,), page=32, D=64)
    query, cache, metadata = plain(case, "bfloat16")
    for count, words in ((66000, "of 250 queries and 4 heads: their numbers for every row of a "
                          "block take 271884288 bytes, of which"), (65000, "by paged.gpu, which")):
      self.assertIn(words, str(explain(
          query, None, None, cache_view=cache, cache_metadata=metadata, layout="thd",
          mechanism="ragged_page_attention_v2", block_sizes=BlockSizes(block_q=250),
          metadata=OperationMetadata(platform="gpu", compute_capability="9.0"),
          score_mod=score_mods.by_distance(np.ones((count, 1), np.float32)))))

  @parameterized.parameters(
      (dict(block_q=64), 8, "with 128 queries and heads a key head in a block: the TPU kernel "
       "looks tables up for up to 64"),
      (dict(block_q=16), 4096, "of 16 queries and 4 heads: lines of"), (dict(block_q=16), 8, None))
  def test_tables_that_the_kernel_for_tpus_leaves_to_plain_xla(self, sizes, count, reason):
    case = Case(queries=(80,), lengths=(90,), page=16)
    query, cache, metadata = plain(case)
    table = np.ones((count * (50 if count > 8 else 1), case.H), np.float32)
    found = str(explain(query, None, None, cache_view=cache, cache_metadata=metadata, layout="thd",
                        mechanism="ragged_page_attention_v2", block_sizes=BlockSizes(**sizes),
                        metadata=OperationMetadata(platform="tpu"),
                        score_mod=score_mods.by_distance(table, 0)))
    self.assertIn("by paged.tpu" if reason is None else "by paged.xla, not by paged.tpu", found)
    self.assertIn(reason or "by paged.tpu", found)


if __name__ == "__main__":
  absltest.main()
