# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that people make: other kinds of numbers, dtypes, names, modes, platforms and keywords."""

import functools
import importlib
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import (AttentionMechanism, AttnConfig, CacheMetadata, MaskInfo, OperationMetadata,
                       PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3, attention, caches,
                       explain, masks, page_attention, ragged_page_attention_v2,
                       ragged_page_attention_v3)
from attn_core.caches import dense, pages, window
from attn_core.config.other_names import OTHER_MECHANISM_NAMES
from attn_core.kernels.common import platform_guard

B, T, H, K, D = 2, 6, 4, 2, 8
TPU, HOPPER = (OperationMetadata(platform="tpu"),
               OperationMetadata(platform="gpu", compute_capability="9.0"))


def numbers(*shape, dtype=np.float32):
  return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


QUERY, KEY, VALUE = numbers(B, T, H, D), numbers(B, T, K, D), numbers(B, T, K, D) * 2
PACKED = {"query": QUERY[0], "key": KEY[0], "value": VALUE[0], "layout": "thd"}
CACHE = caches.dense.init(B, 16, (K, D), dtype="float32")
WINDOW = caches.window.init(B, 16, (K, D), dtype="float32")
HELD = pages.init(PagesV2, 4, 4, caches.pages.Heads(K, D, D), "float32")
HELD = pages.append(HELD, numbers(8, K, D), numbers(8, K, D) + 1, np.arange(8))
TABLES, CONTEXTS, STARTS = [[0, 1], [2, 3]], [5, 4], [0, 4, 6]
REQUESTS = PagesMetadata(np.int32(TABLES), np.int32(CONTEXTS), np.int32(STARTS))
CALL = {"cache": HELD, "num_tokens": 6}
# name -> (function of `pages_metadata`, its other arguments)
OF_REQUESTS = {
    "slots": (pages.slots, {"size": 4, "num_tokens": 6}),
    "to_dense": (pages.to_dense, {"cache": HELD}),
    "from_dense": (pages.from_dense, {"cache": HELD, "key": numbers(2, 8, K, D),
                                      "value": numbers(2, 8, K, D)}),
    "in_int32": (pages.in_int32, {}), "query_starts": (pages.query_starts, {}),
    "rows_in_use": (pages.rows_in_use, {}), "check": (caches.page_checks.check, CALL),
    "flag": (caches.page_checks.flag, CALL),
    "check_shapes": (caches.page_checks.check_shapes, CALL),
    "count": (caches.groups.count, {}), "stripe_count": (caches.groups.stripe_count, {}),
    "shapes_of_one": (caches.groups.shapes_of_one, {}),
    "whole": (caches.groups.whole, {"num_pages": 4}),
    "with_pool_ids": (caches.groups.with_pool_ids, {"num_pages": 4}),
    "slots_of_groups": (caches.groups.slots, CALL),
    "joined": (caches.groups.joined, {"num_pages": 4})}


def run(**arguments):
  given = {"query": QUERY, "key": KEY, "value": VALUE, **arguments}
  return attention(**given).attention_outputs


def over_pages(query=QUERY.reshape(-1, H, D)[:6], cache=HELD, requests=REQUESTS, **keywords):
  return ragged_page_attention_v2(query, cache, requests, **keywords).attention_outputs


# name -> (function of integers, the integers); the same with all kinds of integers.
INTEGERS = {
    "cum_seqlens": (lambda x: run(**PACKED, cum_seqlens_q=x, cum_seqlens_k=x), [0, 2, T]),
    "query_offset": (lambda x: run(query_offset=x, causal=True), [3, -1]),
    "segment_ids": (lambda x: run(mask_info=MaskInfo.from_segments(x)), [[0, 0, 1, 1, -1, 2]] * B),
    "positions": (lambda x: run(mask_info=MaskInfo(q_positions=x, kv_positions=x)),
                  [[5, 1, 0, 2, 3, 4]] * B),
    "from_cu_seqlens": (lambda x: run(mask_info=MaskInfo.from_cu_seqlens(x, T)), [0, 2, T]),
    "masks_segments": (lambda x: run(mask=masks.segments(x)), [[0, 0, 1, 1, -1, 2]]),
    "masks_lengths": (lambda x: run(mask=masks.lengths(x, x)), [3, 6]),
    "masks_prefix": (lambda x: run(mask=masks.prefix(x), causal=False), [3, 6]),
    "masks_offset": (lambda x: run(mask=masks.offset(masks.causal(), x), causal=False), [3, 1]),
    "masks_positions": (lambda x: run(mask=masks.positions(x), causal=False),
                        [[5, 1, 0, 2, 3, 4]]),
    "cache_lengths": (lambda x: run(cache_view=CACHE, cache_metadata=CacheMetadata(x)), [2, 6]),
    "cache_starts": (lambda x: run(cache_view=CACHE, cache_metadata=CacheMetadata(starts=x)),
                     [2, 0]),
    "cache_slots": (lambda x: run(cache_view=CACHE, cache_metadata=CacheMetadata(slots=x)), [1, 0]),
    "append": (lambda x: caches.dense.append(CACHE, KEY, VALUE, x).key, [2, 6]),
    "append_window": (lambda x: caches.window.append(WINDOW, KEY, VALUE, x).key, [2, 6]),
    "insert": (lambda x: caches.dense.insert(CACHE, x, CACHE).lengths, [1, 0]),
    "page_tables": (lambda x: over_pages(requests=REQUESTS._replace(page_tables=x)), TABLES),
    "context_lens": (lambda x: over_pages(requests=REQUESTS._replace(context_lens=x)), CONTEXTS),
    "query_start_loc": (lambda x: over_pages(requests=REQUESTS._replace(query_start_loc=x)),
                        STARTS),
    "num_requests": (lambda x: over_pages(requests=REQUESTS._replace(num_requests=x)), 1),
    "slot_mapping": (lambda x: pages.append(HELD, numbers(2, K, D), numbers(2, K, D), x).pages,
                     [9, 3]),
    "slots": (lambda x: pages.slots(REQUESTS._replace(context_lens=x), 4, 6), CONTEXTS),
    "to_dense": (lambda x: pages.to_dense(HELD, REQUESTS._replace(page_tables=x))[0], TABLES),
    "copy_pages": (lambda x: pages.copy_pages(HELD, x, [2, 3]).pages, [0, 1]),
    "rotary": (lambda x: attn_core.rotary(QUERY, KEY, x, attn_core.Rope())[0], [0, 2, 3, 7, 8, 9])}


class IntegersTest(parameterized.TestCase):

  @parameterized.parameters(*INTEGERS)
  def test_every_kind(self, name):
    function, given = INTEGERS[name]
    want = function(np.int32(given))
    for x in (given, np.int64(given), jnp.asarray(given, jnp.int16)):
      np.testing.assert_array_equal(function(x), want)
    with jax.enable_x64(True):
      np.testing.assert_allclose(jax.jit(lambda: function(given))(), want, atol=1e-6)
      np.testing.assert_allclose(jax.jit(function)(jnp.asarray(given, jnp.int64)), want, atol=1e-6)
      wide = np.int64(given) + 2**32  # in 32 bits the same numbers
      for x in (wide, wide.tolist(), jnp.asarray(wide)):
        with self.assertRaisesRegex(ValueError, "got .*42949.*expected .*int32"):
          function(x)
    with self.assertRaisesRegex(ValueError, "(got|has dtype) .*expected .*int"):
      function(np.float32(given))


class DtypesTest(parameterized.TestCase):

  @parameterized.product(held=("bfloat16", "float32", "float16"),
                         dtype=("bfloat16", "float32"), compute=("bfloat16", "float32"))
  def test_cache_of_another_dtype(self, held, dtype, compute):
    query, key, value = (x.astype(dtype) for x in (QUERY, KEY, VALUE))
    cache = caches.dense.init(B, 16, (K, D), dtype=held)
    if held != dtype:
      with self.assertRaisesRegex(ValueError, f"key: got {held}.*compute_dtype"):
        attention(query, key, value, cache_view=cache)
    output = attention(query, key, value, cache_view=cache, compute_dtype=compute)
    self.assertEqual(output.attention_outputs.dtype, dtype)
    self.assertEqual(output.cache_view.key.dtype, held)
    as_held = lambda x: x.astype(held).astype(compute)
    want = attention(query.astype(compute), as_held(key), as_held(value)).attention_outputs
    np.testing.assert_allclose(output.attention_outputs.astype("float32"),
                               want.astype(dtype).astype("float32"), rtol=1e-2, atol=1e-2)

  @parameterized.parameters("vanilla", "sdpa", "blockwise", "autoregressive_decodeattn")
  def test_operands_of_other_dtypes(self, mechanism):
    key, value = KEY.astype("bfloat16"), VALUE.astype("float16")
    with self.assertRaisesRegex(ValueError, "key: got bfloat16.*compute_dtype"):
      attention(QUERY, key, value, mechanism=mechanism)
    def loss(key, value):
      return (run(key=key, value=value, mechanism=mechanism, compute_dtype="float32")**2).sum()
    want = run(key=key.astype("float32"), value=value.astype("float32"), mechanism=mechanism)
    got = run(key=key, value=value, mechanism=mechanism, compute_dtype="float32")
    np.testing.assert_array_equal(got, want)
    d_key, d_value = jax.grad(loss, (0, 1))(key, value)
    self.assertEqual((d_key.dtype, d_value.dtype), (jnp.bfloat16, jnp.float16))
    want = jax.grad(loss, (0, 1))(key.astype("float32"), value.astype("float32"))
    np.testing.assert_allclose(d_key.astype("float32"), want[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(d_value.astype("float32"), want[1], rtol=1e-2, atol=1e-2)

  @parameterized.parameters("float32", "bfloat16")
  def test_pages_of_another_dtype(self, compute):
    query = QUERY.reshape(-1, H, D)[:6].astype("bfloat16")
    with self.assertRaisesRegex(ValueError, "query: got bfloat16.*compute_dtype"):
      over_pages(query)
    got = over_pages(query, compute_dtype=compute)
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = over_pages(query.astype("float32"))
    np.testing.assert_allclose(got.astype("float32"), want, rtol=2e-2, atol=2e-2)
    new = numbers(6, K, D, dtype="bfloat16")
    v3 = pages.convert(HELD, PagesV3)
    with self.assertRaisesRegex(ValueError, "key: got bfloat16.*compute_dtype"):
      ragged_page_attention_v3(query.astype("float32"), new, new, v3, REQUESTS)
    output = ragged_page_attention_v3(query, new, new, v3, REQUESTS, compute_dtype=compute)
    wide = ragged_page_attention_v3(*(x.astype("float32") for x in (query, new, new)), v3, REQUESTS)
    np.testing.assert_array_equal(output.cache_view.pages, wide.cache_view.pages)
    np.testing.assert_allclose(output.attention_outputs.astype("float32"), wide.attention_outputs,
                               rtol=2e-2, atol=2e-2)


class NamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("splash", "'blocksparse'"), ("flash", "'flash_attn2'"), ("flash_attention", "'flash_attn2'"),
      ("dot_product", "'sdpa' or 'vanilla'"), ("xla", "'sdpa' or 'blockwise'"),
      ("paged_attention", "'page_attention'"), ("cudnn_flash", "'cudnn'"),
      ("Flash-Attn2", "'flash_attn2'"), ("blockwize", "'blockwise'"), ("rings", "'ring'"),
      ("sdpa_attention", "'sdpa'"), ("fa3", "'flash_attn2'"),
      ("ragged", "'ragged_page_attention_v2' or 'ragged_page_attention_v3'"))
  def test_an_unknown_mechanism_suggests_the_right_one(self, name, meant):
    for function in (run, functools.partial(explain, QUERY, KEY, VALUE)):
      with self.assertRaisesRegex(ValueError, f"mechanism='{name}'.*did you mean {meant}\\?"):
        function(mechanism=name)
    with self.assertRaisesRegex(ValueError, f"attn_mechanism: got '{name}'.*mean {meant}\\?"):
      attn_core.attention_arguments(AttnConfig(attn_mechanism=name))
    with self.assertRaisesRegex(ValueError, f"'{name}'.*mean {meant}\\?"):
      OperationMetadata().get_operation_config(name)

  def test_no_suggestion_for_what_is_not_close(self):
    with self.assertRaisesRegex(
        ValueError, r"expected one of [^?]*'multi_latent_ragged_page_attention'$"):
      run(mechanism="quantum")
    with self.assertRaisesRegex(ValueError, "mode: got 'prefill'.*did you mean '__prefill__'"):
      run(mode="prefill")

  def test_suggested_names_exist(self):
    known = {mechanism.value for mechanism in AttentionMechanism}
    for other, names in OTHER_MECHANISM_NAMES.items():
      self.assertNotIn(other, known)
      self.assertContainsSubset(names, known)

  def test_top_level_names(self):
    for name in ("resolve", "from_dict", "to_dict", "Shapes", "Prediction", "Heads", "Operands",
                 "AttentionSpec", "to_layout", "from_layout", "extras_of", "concatenate"):
      self.assertNotIn(name, attn_core.__all__)
      self.assertNotIn(name, dir(attn_core))
      self.assertTrue(hasattr(attn_core, name), name)
    shown = {name for name in dir(attn_core) if not name.startswith("_")}
    self.assertEqual(shown, set(attn_core.__all__))
    self.assertContainsSubset({"attention", "explain", "caches", "masks", "OperationMetadata"},
                              shown)

  def test_modules_of_caches_are_imported_by_their_public_names(self):
    for name in attn_core.caches.__all__:
      if inspect.ismodule(module := getattr(attn_core.caches, name)):
        self.assertIs(importlib.import_module(f"attn_core.caches.{name}"), module)


class CuresTest(absltest.TestCase):

  def test_errors_of_first_calls(self):
    """Checks the cures for calls that users of other libraries write first."""
    x = jnp.ones((2, 4, 16, 8))
    self.assertEqual(attention(x, x[:, :0], x[:, :0]).out.shape, x.shape)
    with self.assertRaisesRegex(ValueError, r"; layout='bhtd' for arrays \[B, H, T, D\]"):
      attention(x, x[:, :2], x[:, :2])
    with self.assertRaisesRegex(ValueError, "alibi: slopes: got int64.*as alibi_slopes"):
      attn_core.score_mods.alibi(4)
    with self.assertRaisesRegex(TypeError, "'broadcast_dropout'; .*adapters.flax_attention_fn"):
      attention(x, x, x, dtype=None, broadcast_dropout=True)


class PredicateTest(parameterized.TestCase):

  @parameterized.parameters(
      (lambda b, h, q: q > 0, ()), (lambda b, h, q, k, x: q > x, ()),
      (lambda b, h, q, k: q > k, (1,)), (lambda *, q: q, ()))
  def test_arity(self, predicate, operands):
    with self.assertRaisesRegex(ValueError, "custom: predicate=.*with parameters.*expected [45]"):
      masks.custom(predicate, *operands)

  @parameterized.parameters("vanilla", "blockwise")
  def test_shape(self, mechanism):
    for predicate in (lambda b, h, q, k: jnp.ones(3, bool), lambda b, h, q, k: (q >= k)[None, None],
                      lambda b, h, q, k: jnp.ones((7, 1, 1, 1), bool)):
      with self.assertRaisesRegex(ValueError, r"custom: .*returned bool\[.*elementwise"):
        run(mask=masks.custom(predicate), mechanism=mechanism)
    with self.assertRaisesRegex(ValueError, "custom: .*returned int32; expected bool"):
      run(mask=masks.custom(lambda b, h, q, k: q - k), mechanism=mechanism)

  def test_other_callables(self):
    class Near:
      def __call__(self, batch, head, query, key, distance=2):
        return query - key < distance
    for near in (Near(), functools.partial(Near(), distance=2), Near().__call__):
      np.testing.assert_array_equal(run(mask=masks.custom(near)), run(sliding_window=(1, -1)))
    np.testing.assert_array_equal(run(mask=masks.custom(lambda *at: at[3] < 4)),
                                  run(mask=masks.prefix(4)))


class ModeTest(parameterized.TestCase):

  def test_the_mode_follows_from_the_call(self):
    one = {"query": QUERY[:, :1], "key": KEY[:, :1], "value": VALUE[:, :1]}
    for cache, more in ((CACHE, {}), (WINDOW, {"sliding_window": (15, 0)})):
      step = attention(QUERY, KEY, VALUE, cache_view=cache, **more)
      named = attention(QUERY, KEY, VALUE, cache_view=cache, mode="__prefill__", **more)
      jax.tree.map(np.testing.assert_array_equal, step, named)
      jax.tree.map(np.testing.assert_array_equal,
                   attention(**one, cache_view=step.cache_view, **more),
                   attention(**one, cache_view=step.cache_view, mode="__autoregressive__", **more))
      slots = {"cache_metadata": CacheMetadata(slots=[1, 0]), **more}
      jax.tree.map(np.testing.assert_array_equal,
                   attention(QUERY, KEY, VALUE, cache_view=step.cache_view, **slots),
                   attention(QUERY, KEY, VALUE, cache_view=step.cache_view, mode="__insert__",
                             **slots))
      with self.assertRaisesRegex(ValueError, "mode: got '__train__' with a cache"):
        attention(QUERY, KEY, VALUE, cache_view=cache, mode="__train__", **more)
    jax.tree.map(
        np.testing.assert_array_equal,
        caches.concatenate(query=QUERY, key=KEY, value=VALUE, cache_view=CACHE).attention_mask,
        caches.concatenate(query=QUERY, key=KEY, value=VALUE, cache_view=CACHE,
                           mode="__prefill__").attention_mask)

  @parameterized.parameters((1, "__autoregressive__"), (T, "__prefill__"), (None, "__train__"))
  def test_the_rules_are_those_of_the_mode(self, tokens, mode):
    seen = []
    class Spy(OperationMetadata):
      def get_shardings(self, mode, *args, **keywords):
        seen.append(mode)
        return super().get_shardings(mode, *args, **keywords)
    cache = {} if tokens is None else {"cache_view": CACHE}
    attention(*(x[:, :tokens] for x in (QUERY, KEY, VALUE)), metadata=Spy(), **cache)
    requests = REQUESTS if tokens != 1 else PagesMetadata(TABLES, CONTEXTS)
    if tokens is not None:
      over_pages(numbers(6 if tokens > 1 else 2, H, D), requests=requests, metadata=Spy())
    self.assertEqual(set(seen), {mode})


class PlatformTest(parameterized.TestCase):
  """Kernels for another platform than that of the program."""

  @parameterized.product(metadata=(TPU, HOPPER),
                         call=("flash_attn2", "autoregressive_decodeattn", "pages"))
  def test_running_them_is_our_own_error(self, metadata, call):
    dtype, cache = jnp.bfloat16, pages.init(PagesV2, 4, 16, caches.pages.Heads(2, 128, 128))
    if call == "pages":
      run = lambda x: ragged_page_attention_v2(
          x[0, :2], cache, PagesMetadata([[0], [1]], [3, 4], [0, 1, 2]), metadata=metadata)
    else:
      queries = 1 if call.startswith("auto") else 128
      run = lambda x: attention(x[:, :queries], x, x, mechanism=call, metadata=metadata,
                                query_offset=128 - queries)
    x = jnp.ones((1, 128, 2, 128), dtype)
    out = lambda x: run(x).attention_outputs
    gradient = jax.grad(lambda x: out(x).astype(jnp.float32).sum())
    for function in (out, jax.jit(out), gradient):
      with self.assertRaisesRegex(NotImplementedError, f"metadata.platform='{metadata.platform}': "
                                  "got a program for cpu.*platform='cpu' or None.*lowering"):
        function(x)
    platform = "tpu" if metadata is TPU else "cuda"
    text = jax.jit(out).trace(x).lower(lowering_platforms=(platform,)).as_text()
    self.assertIn("custom_call", text)
    with self.assertRaisesRegex(NotImplementedError, "got a program for cpu"):
      jax.export.export(jax.jit(out), platforms=("cpu", platform))(x)

  def test_the_same_error_without_jit(self):
    with jax.disable_jit(), self.assertRaisesRegex(NotImplementedError, "got a program for cpu"):
      platform_guard.guarded(jnp.ones(3), "tpu")

  def test_without_cudnn(self):
    x = jnp.ones((1, 16, 2, 64), jnp.bfloat16)
    with self.assertRaisesRegex(NotImplementedError, "platform='gpu'.*cuDNN.*platform=None"):
      attention(x, x, x, mechanism="cudnn", metadata=OperationMetadata(platform="gpu"))

  def test_plain_xla_runs_everywhere(self):
    np.testing.assert_array_equal(run(mechanism="blockwise", metadata=TPU),
                                  run(mechanism="blockwise"))


class PagesTest(parameterized.TestCase):

  def test_keywords_are_those_of_attention(self):
    more = dict(sliding_window=(2, 0), softmax_scale=0.3, logits_soft_cap=2.0,
                softmax_aux=numbers(H), return_lse=True, causal=True)
    query = QUERY.reshape(-1, H, D)[:6]
    cpu = OperationMetadata(platform="cpu")
    want = ragged_page_attention_v2(query, HELD, REQUESTS, PagedOptions(**more))
    for arguments in (dict(pages_metadata=REQUESTS), dict(metadata=REQUESTS),
                      dict(cache_metadata=REQUESTS), dict(cache_metadata=REQUESTS, metadata=cpu)):
      got = ragged_page_attention_v2(query, HELD, **arguments, **more)
      jax.tree.map(np.testing.assert_array_equal, got, want)
    got = attention(query, None, None, layout="thd", cache_view=HELD, cache_metadata=REQUESTS,
                    **more)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    v3 = pages.convert(HELD, PagesV3)
    new = numbers(6, K, D)
    jax.tree.map(np.testing.assert_array_equal,
                 ragged_page_attention_v3(query, new, new, v3, REQUESTS, **more),
                 ragged_page_attention_v3(query, new, new, v3, REQUESTS, PagedOptions(**more)))
    v1, single = pages.convert(HELD, PagesV1), REQUESTS._replace(query_start_loc=None)
    jax.tree.map(np.testing.assert_array_equal,
                 page_attention(query[:2], v1, single, **more),
                 page_attention(query[:2], v1, single, options=PagedOptions(**more)))

  @parameterized.parameters(
      (dict(pages_metadata=OperationMetadata()), ValueError,
       "pages_metadata: got an OperationMetadata.*`metadata=`"),
      (dict(pages_metadata=REQUESTS, metadata=REQUESTS), ValueError,
       "pages_metadata and metadata: got values for each"),
      (dict(pages_metadata=REQUESTS, options=OperationMetadata()), ValueError,
       "options: got OperationMetadata; expected a PagedOptions"),
      (dict(pages_metadata=REQUESTS, options=PagedOptions(), causal=False), ValueError,
       "options: got a PagedOptions and causal="),
      (dict(), ValueError, "cache_metadata: got NoneType; expected a PagesMetadata"),
      (dict(pages_metadata=REQUESTS, metadata=CacheMetadata()), ValueError,
       "metadata: got CacheMetadata; expected an OperationMetadata"),
      (dict(pages_metadata=REQUESTS, scale=1.0), TypeError, "unexpected keyword argument 'scale'"),
      (dict(pages_metadata=REQUESTS, cache_view=HELD), TypeError, "'cache_view'; the pages are"),
      (dict(pages_metadata=REQUESTS, mask=masks.prefix(2)), NotImplementedError, "mask"),
      (dict(pages_metadata=REQUESTS, layout="bthd"), ValueError, "layout: got 'bthd'"))
  def test_wrong_keywords(self, arguments, kind, words):
    with self.assertRaisesRegex(kind, words):
      ragged_page_attention_v2(QUERY.reshape(-1, H, D)[:6], HELD, **arguments)

  def test_one_name_for_the_metadata_of_pages(self):
    for function in (page_attention, ragged_page_attention_v2, ragged_page_attention_v3):
      self.assertIn("pages_metadata", inspect.signature(function).parameters)
    for module in (pages, caches.groups, caches.page_checks):
      for name, function in inspect.getmembers(module, inspect.isfunction):
        parameters = inspect.signature(function).parameters
        self.assertNotIn("metadata", parameters, name)
        for parameter in parameters.values():
          if not name.startswith("_") and "PagesMetadata" in str(parameter.annotation):
            self.assertIn(parameter.name, ("pages_metadata", "groups"), name)

  def test_other_kinds_of_arguments(self):
    lists = PagesMetadata(TABLES, CONTEXTS, STARTS)
    np.testing.assert_array_equal(pages.query_starts(lists), STARTS)
    np.testing.assert_array_equal(pages.query_starts(lists._replace(num_requests=1)), [0, 4, 4])
    self.assertEqual(pages.rows_in_use(lists), 2)
    wide = np.ones((2, K, D))  # float64, which JAX takes for float32
    np.testing.assert_array_equal(
        pages.append(HELD, wide, wide, [0, 1]).pages,
        pages.append(HELD, wide.astype("float32"), wide.astype("float32"), [0, 1]).pages)

  def test_heads_and_widths_are_given_alike_to_every_cache(self):
    like = np.ones((2, K, D), "float32")
    theirs = (jnp.ones((K, 4, 4, D), "float32"),) * 2
    for function in (lambda heads: pages.to_dense(HELD, PagesMetadata(TABLES, CONTEXTS), heads),
                     lambda heads: pages.convert(HELD, PagesV1, heads),
                     lambda heads: pages.init(PagesV2, 4, 4, heads, "float32"),
                     lambda heads: pages.init_like(PagesV3, like, 4, 4, heads),
                     lambda heads: caches.exchange.from_other("jax_v1", theirs, heads),
                     lambda heads: dense.init(2, 4, heads), lambda heads: window.init(2, 4, heads),
                     lambda heads: dense.init_like(like[None], 4, heads)):
      want = function(pages.Heads(K, D, D))
      for heads in ((K, D), (K, D, D)):
        self.assertEqual(str(function(heads)), str(want))
      for heads in ((K,), [K, D], K):
        with self.assertRaisesRegex(ValueError, r"heads: got .*expected .*\(K, D, E\)"):
          function(heads)
    for function in (lambda widths: caches.latent.init(2, 4, widths),
                     lambda widths: caches.latent.init_like(like, 4, widths, padded=True),
                     lambda widths: caches.latent_pages.init(2, 4, widths, dtype="int8"),
                     lambda widths: caches.latent_pages.init_like(like, 4, 4, widths)):
      self.assertEqual(str(function((6, 2))), str(function(caches.latent.LatentWidths(6, 2))))
      for widths in ((6,), [6, 2], caches.latent.LatentWidths(0, 2)):
        with self.assertRaisesRegex(ValueError, "width.*: got"):
          function(widths)

  @parameterized.parameters(*OF_REQUESTS)
  def test_the_earlier_keyword(self, name):
    function, arguments = OF_REQUESTS[name]
    requests = caches.groups.stack(REQUESTS) if function.__module__.endswith("groups") else REQUESTS
    want = function(pages_metadata=requests, **arguments)
    self.assertEqual(str(function(metadata=requests, **arguments)), str(want))
    with self.assertRaisesRegex(ValueError, "pages_metadata and metadata: got values for each"):
      function(metadata=requests, pages_metadata=requests, **arguments)


if __name__ == "__main__":
  absltest.main()
