# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Signatures of attention, explain and each mechanism's function, and meanings of arguments."""

import inspect
import typing

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import (Heads, MaskInfo, OperationMetadata, PagesMetadata, PagesV2, attention,
                       explain, ragged_page_attention_v2)
from attn_core.arguments import normalize, outputs
from attn_core.arguments.arguments import AttentionArguments, AttentionOptions, Shaped
from attn_core.caches import pages, update
from attn_core.masks import block_map
from attn_core.sharding import token_order
from attn_core.types import AttentionOutput

FUNCTIONS = {
    "vanilla": "vanilla", "sdpa": "sdpa", "cudnn": "cudnn", "cuda_flash_attn2": "cuda_flash_attn2",
    "blockwise": "blockwise", "flash_attn2": "flash_attn2", "blocksparse": "blocksparse",
    "ring_attention": "ring", "autoregressive_decodeattn": "autoregressive_decodeattn"}
X = np.random.default_rng(0).normal(size=(2, 8, 2, 4)).astype(np.float32)
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def without_shapes(annotation: object) -> set[object]:
  """Returns the members of a union but `jax.ShapeDtypeStruct`, which only `explain` takes."""
  members = typing.get_args(annotation) or (annotation,)
  return {member for member in members if member is not jax.ShapeDtypeStruct}


class SignatureTest(parameterized.TestCase):

  def test_attention_explain_and_the_tuple_agree(self):
    one, other = (inspect.signature(function).parameters for function in (attention, explain))
    self.assertEqual(tuple(one), AttentionArguments._fields)
    self.assertEqual([(p.name, p.kind, p.default) for p in one.values()],
                     [(p.name, p.kind, p.default) for p in other.values()])
    fields = typing.get_type_hints(AttentionArguments)
    for name in one:
      self.assertEqual(other[name].annotation, fields[name], name)
      self.assertEqual(without_shapes(one[name].annotation), without_shapes(fields[name]), name)
    shaped = [name for name in fields if fields[name] in (Shaped, Shaped | None)]
    self.assertEqual(shaped, ["query", "key", "value", "bias", "softmax_aux"])

  def test_options_are_the_keywords_but_mechanism(self):
    parameters = inspect.signature(attention).parameters
    keywords = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(AttentionOptions)
    self.assertEqual(list(hints), [name for name in keywords if name != "mechanism"])
    self.assertEqual(AttentionOptions.__total__, False)
    for name, hint in hints.items():
      self.assertEqual(hint, parameters[name].annotation, name)

  @parameterized.named_parameters((name, name) for name in FUNCTIONS)
  def test_functions_of_mechanisms(self, name):
    function = getattr(attn_core, name)
    self.assertEqual(function.__name__, name)
    self.assertTrue(inspect.isfunction(function))
    self.assertIn("Raises:", function.__doc__)
    signature = inspect.signature(function)
    self.assertEqual(list(signature.parameters), ["query", "key", "value", "options"])
    self.assertEqual(signature.parameters["options"].annotation, typing.Unpack[AttentionOptions])
    self.assertIs(signature.return_annotation, attn_core.AttentionOutput)

  @parameterized.named_parameters((name, name) for name in FUNCTIONS)
  def test_mechanism_and_unknown_keywords_are_errors(self, name):
    function, mechanism = getattr(attn_core, name), FUNCTIONS[name]
    with self.assertRaisesRegex(TypeError, f"'mechanism'.*always runs '{mechanism}'.*attention"):
      function(X, X, X, mechanism="vanilla")
    with self.assertRaisesRegex(TypeError, "'window'.*sliding_window"):
      function(X, X, X, window=3)

  @parameterized.parameters("vanilla", "blockwise", "flash_attn2", "blocksparse", "ring_attention")
  def test_each_runs_its_mechanism(self, name):
    run = getattr(attn_core, name)
    want = attention(X, X, X, mechanism=FUNCTIONS[name], sliding_window=2).attention_outputs
    np.testing.assert_array_equal(run(X, X, value=X, sliding_window=2).attention_outputs, want)


class ExplainTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("bias", {"bias": jax.ShapeDtypeStruct((1, 2, 8, 8), jnp.float32)}, "bias"),
      ("mask", {"mask": jax.ShapeDtypeStruct((1, 1, 8, 8), jnp.bool)}, "dense"),
      ("sinks", {"softmax_aux": jax.ShapeDtypeStruct((2,), jnp.float32)}, "softmax_aux"),
      ("info", {"mask_info": MaskInfo(q_positions=jax.ShapeDtypeStruct((1, 8), jnp.int32))}, ""))
  def test_takes_shapes_for_arrays(self, changes, _):
    cpu = OperationMetadata(platform="cpu")
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), changes)
    self.assertEqual(str(explain(SHAPE, SHAPE, SHAPE, **changes, metadata=cpu)),
                     str(explain(X, X, X, **arrays, metadata=cpu)))

  def test_checks_shapes(self):
    with self.assertRaisesRegex(ValueError, r"bias: got float32\[8\]"):
      explain(SHAPE, SHAPE, SHAPE, bias=jax.ShapeDtypeStruct((8,), jnp.float32))


class DeterministicTest(absltest.TestCase):

  def outputs(self, **arguments):
    return np.asarray(attention(X, X, X, causal=False, **arguments).attention_outputs)

  def test_three_values(self):
    key = jax.random.key(0)
    plain = self.outputs()
    dropped = self.outputs(dropout_prob=0.5, dropout_rng=key, deterministic=False)
    self.assertFalse(np.array_equal(dropped, plain))
    # Unset: active if both a key and a probability, of the call or of the metadata, are given.
    metadata = OperationMetadata(dropout_prob=0.5)
    np.testing.assert_array_equal(self.outputs(dropout_prob=0.5, dropout_rng=key), dropped)
    np.testing.assert_array_equal(self.outputs(metadata=metadata, dropout_rng=key), dropped)
    np.testing.assert_array_equal(self.outputs(dropout_prob=0.5), plain)
    np.testing.assert_array_equal(self.outputs(metadata=metadata), plain)
    np.testing.assert_array_equal(self.outputs(dropout_rng=key), plain)
    # True: off.
    np.testing.assert_array_equal(
        self.outputs(dropout_prob=0.5, dropout_rng=key, deterministic=True), plain)
    # False: a key is required.
    for arguments in ({"dropout_prob": 0.5}, {"metadata": metadata}):
      with self.assertRaisesRegex(ValueError, "dropout_rng: got None"):
        self.outputs(**arguments, deterministic=False)

  def test_a_mechanism_without_dropout_refuses_it(self):
    with self.assertRaisesRegex(NotImplementedError, "dropout_prob=0.5"):
      self.outputs(mechanism="sdpa", dropout_prob=0.5, dropout_rng=jax.random.key(0))


class InitBiasTest(absltest.TestCase):

  def paged(self, **arguments):
    cache = pages.init(PagesV2, 2, 4, Heads(2, 4, 4), dtype=jnp.float32)
    metadata = PagesMetadata(np.int32([[0]]), np.int32([2]), np.int32([0, 2]))
    query = np.ones((2, 2, 4), np.float32)
    return explain(query, None, None, layout="thd", cache_view=cache, cache_metadata=metadata,
                   **arguments)

  def test_is_called_with_pages(self):
    self.assertEqual(self.paged(init_bias=lambda: None).chosen, "ragged_page_attention_v2")
    refused = self.paged(init_bias=lambda: jnp.zeros((1, 1, 1)))
    self.assertIsNone(refused.chosen)
    self.assertIn("bias", str(refused))

  def test_is_called_without_pages(self):
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 8, 8)), jnp.float32)
    np.testing.assert_array_equal(
        attention(X, X, X, init_bias=lambda: bias).attention_outputs,
        attention(X, X, X, bias=bias).attention_outputs)


class PagedFunctionTest(absltest.TestCase):

  def test_options_reach_attention(self):
    cache = pages.init(PagesV2, 2, 4, Heads(2, 4, 4), dtype=jnp.float32)
    metadata = PagesMetadata(np.int32([[0]]), np.int32([2]), np.int32([0, 2]))
    with self.assertRaisesRegex(ValueError, "softmax_scale"):
      ragged_page_attention_v2(np.ones((2, 2, 4), np.float32), cache, metadata,
                               attn_core.PagedOptions(softmax_scale=float("inf")))


class PackedTest(parameterized.TestCase):
  """Packed sequences (layout thd) against one call for each of them."""

  QUERIES, KEYS = np.int32([0, 2, 2, 5, 6]), np.int32([0, 4, 7, 12, 13])

  @parameterized.named_parameters(
      ("one_for_each", np.int32([2, 0, -1, 0]), {}), ("one_for_all", np.int32([1]), {}),
      ("with_a_window", np.int32([2, 0, 1, -9]), {"sliding_window": (1, 1), "causal": False}),
      ("with_chunks", np.int32([3, 0, 2, 1]), {"chunk_size": 2}))
  def test_query_offsets(self, offsets, arguments):
    """Sequence i stands `query_offset[i]` tokens further among its own keys."""
    query, key, value = (
        np.random.default_rng(n).normal(size=shape).astype(np.float32)
        for n, shape in enumerate([(6, 2, 4), (13, 1, 4), (13, 1, 3)]))
    run = jax.jit(lambda *x: attention(
        *x, layout="thd", cum_seqlens_q=self.QUERIES, cum_seqlens_k=self.KEYS, query_offset=offsets,
        mechanism="vanilla", return_lse=True, **arguments))
    got = run(query, key, value)
    for i, offset in enumerate(np.broadcast_to(offsets, 4)):
      t, s = slice(*self.QUERIES[i:i + 2]), slice(*self.KEYS[i:i + 2])
      if t.start < t.stop:
        place = np.arange(t.stop - t.start)[:, None] + offset
        other = np.arange(s.stop - s.start)
        seen = np.ones((len(place), len(other)), bool)
        if "sliding_window" in arguments:
          seen &= abs(other - place) <= 1
        else:
          seen &= other <= place
        if "chunk_size" in arguments:
          seen &= other // 2 == place // 2
        want = attention(query[None, t], key[None, s], value[None, s], causal=False,
                         mask=seen[None, None], mechanism="vanilla", return_lse=True)
        np.testing.assert_allclose(got.attention_outputs[t], want.attention_outputs[0], atol=2e-6)
        np.testing.assert_allclose(got.lse[:, t], want.lse[0], atol=2e-6)


class NormalizeTest(parameterized.TestCase):

  @parameterized.product(prob=(0.0, 0.25, 0.5), default=(0.0, 0.3),
                         deterministic=(None, True, False), has_key=(True, False))
  def test_dropout(self, prob, default, deterministic, has_key):
    """The call's probability counts before the metadata's; a key turns it on where nothing says."""
    found = normalize.normalize_dropout_prob(prob, default, deterministic, has_key)
    is_on = has_key if deterministic is None else not deterministic
    self.assertEqual(found, (prob if prob > 0 else default) if is_on else 0)

  def test_several_sinks_weigh_as_one(self):
    """Also heads without a sink, all of whose logits are -inf: they have gradient 0."""
    absent = -np.inf
    sinks = np.float32([[1, 2, 3], [absent, 0.5, absent], [absent] * 3, [80, -80, 80]])
    found, pull = jax.vjp(lambda x: normalize.normalize_sinks(x, 4), jnp.asarray(sinks))
    with np.errstate(divide="ignore"):
      total = np.exp(sinks.astype(np.float64)).sum(1)
      np.testing.assert_allclose(found, np.log(total)[None], rtol=1e-6)
    share = np.exp(sinks) / np.where(total, total, 1)[:, None]
    np.testing.assert_allclose(pull(jnp.ones((1, 4)))[0], share, rtol=1e-5, atol=1e-9)


class OutputsTest(absltest.TestCase):

  def test_rows_that_overflow_are_nan(self):
    overflow = np.array([True, False, True])
    shapes = {"attention_outputs": (3, 4, 2, 5), "attention_weights": (3, 2, 4, 6),
              "lse": (3, 2, 4)}
    step = update.Step(*[None] * 5, cache="after", overflow=jnp.asarray(overflow))
    given = {name: jnp.ones(shape) for name, shape in shapes.items()}
    found = outputs.with_cache(AttentionOutput(**given), step)
    for name in shapes:
      x = np.asarray(getattr(found, name))
      np.testing.assert_array_equal(np.isnan(x), np.broadcast_to(
          overflow.reshape(-1, *[1] * (x.ndim - 1)), x.shape), name)
    self.assertEqual(found.cache_view, "after")
    few = outputs.with_cache(AttentionOutput(given["attention_outputs"]), step)
    self.assertEqual((few.attention_weights, few.lse), (None, None))


class StrictShapesTest(parameterized.TestCase):
  """Under jax_numpy_rank_promotion="raise" a call has the result that it has without."""

  @parameterized.named_parameters(
      ("dense", "autoregressive_decodeattn", {
          "cache_view": attn_core.caches.dense.init(2, 8, (2, 4), dtype="int8")}),
      ("window", "flash_attn2", {
          "cache_view": attn_core.caches.window.init(2, 8, (2, 4), dtype="float32"),
          "sliding_window": (4, 0)}),
      ("lengths", "sdpa", {"mask": attn_core.masks.lengths(np.array([2, 3], np.int32),
                                                           np.array([3, 1], np.int32))}))
  def test_ranks_are_not_promoted(self, mechanism, arguments):
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 4)).astype(np.float32)
    mode = "__autoregressive__" if "cache_view" in arguments else "__train__"
    run = lambda: attention(x, x, x, mechanism=mechanism, mode=mode, **arguments).attention_outputs
    expected = run()
    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"):
      np.testing.assert_array_equal(run(), expected)

  @parameterized.parameters("contiguous", "zigzag", "striped")
  def test_token_order(self, order):
    shards = jnp.arange(4, dtype=jnp.int32)
    expected = token_order.tokens_of(order, 16, 4, shards)
    with jax.numpy_rank_promotion("raise"):
      np.testing.assert_array_equal(token_order.tokens_of(order, 16, 4, shards), expected)

  def test_block_map_with_a_part_of_a_block(self):
    segments = jnp.zeros((1, 20), jnp.int32)
    mask = attn_core.masks.causal() & attn_core.masks.segments(segments, segments)
    sizes = block_map.Sizes(20, 20, 8, 8)
    expected = block_map.block_kinds(mask, sizes)
    with jax.numpy_rank_promotion("raise"):
      np.testing.assert_array_equal(block_map.block_kinds(mask, sizes), expected)


if __name__ == "__main__":
  absltest.main()
