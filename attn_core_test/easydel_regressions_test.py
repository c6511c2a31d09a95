# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Defects that EasyDeL has in sinks, biases, masks and sharding, and this library has not.

Each test is for one defect and runs every mechanism that CPUs have; a mechanism that refuses must
say so by name. The expected values are those of the oracle in float64. easydel_arguments_test has
the defects in other arguments.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import MaskInfo, OperationMetadata, PartitionAxis, blockwise_attn, create_mesh, masks
from attn_core.masks import materialize
from attn_core_test.easydel_cases import (ALL, EACH, WITHOUT_SDPA, attend, close, loss, numbers,
                                          qkv, truth)

jax.config.update("jax_num_cpu_devices", 8)


class SinksTest(parameterized.TestCase):

  @parameterized.parameters(*WITHOUT_SDPA, "ring")
  def test_sinks_are_counted_once(self, mechanism):
    """EasyDeL counted them once per key block."""
    arrays, sinks = qkv(), numbers(4, seed=4) + 2
    found = attend(mechanism, *arrays, softmax_aux=sinks, return_lse=True)
    expected, lse, _ = truth(*arrays, sinks=sinks)
    close(found.attention_outputs, expected)
    close(found.lse, lse)
    self.assertGreater(abs(truth(*arrays, sinks=sinks + np.log(4))[1] - lse).min(), 0.02)

  @parameterized.parameters("vanilla", "flash_attn2")
  def test_several_sinks_of_a_head(self, mechanism):
    arrays, sinks = qkv(), numbers(4, 3, seed=5)
    found = attend(mechanism, *arrays, softmax_aux=sinks).attention_outputs
    close(found, truth(*arrays, sinks=np.log(np.exp(sinks.astype(np.float64)).sum(1)))[0])

  @parameterized.parameters("vanilla", "flash_attn2", "blocksparse")
  def test_sinks_have_a_gradient(self, mechanism):
    """EasyDeL silently returned zero."""
    arrays, sinks, target = qkv(), numbers(4, seed=4), numbers(2, 24, 4, 8, seed=6)
    found = jax.jit(jax.grad(lambda sinks: loss(attend(
        mechanism, *arrays, softmax_aux=sinks).attention_outputs, target=target)))(sinks)
    _, _, (expected,) = truth(*arrays, sinks=sinks, wrt=("sinks",), target=target)
    close(found, expected, 1e-4)
    self.assertGreater(abs(expected).min(), 0.1)

  @parameterized.parameters("vanilla", "flash_attn2")
  def test_a_head_without_sinks_among_heads_with_some(self, mechanism):
    """A sink of -inf has no effect and gradient 0, though its logsumexp would have NaN."""
    arrays, sinks = qkv(), numbers(4, 2, seed=5)
    sinks[1], sinks[2, 0] = -np.inf, -np.inf
    target = numbers(2, 24, 4, 8, seed=6)
    found = jax.jit(jax.grad(lambda sinks: loss(attend(
        mechanism, *arrays, softmax_aux=sinks).attention_outputs, target=target)))(sinks)
    with np.errstate(divide="ignore"):
      joint = np.log(np.exp(sinks.astype(np.float64)).sum(1))
    _, _, (expected,) = truth(*arrays, sinks=joint, wrt=("sinks",), target=target)
    share = np.exp(sinks - np.where(joint == -np.inf, 0, joint)[:, None])
    close(found, expected[:, None] * share, 1e-4)
    np.testing.assert_array_equal(found[1], 0)

  def test_sdpa_refuses_sinks(self):
    with self.assertRaisesRegex(NotImplementedError, "'sdpa'.*softmax_aux"):
      attend("sdpa", *qkv(), softmax_aux=numbers(4))


class BiasAndMaskTest(parameterized.TestCase):

  @parameterized.product(mechanism=EACH, shape=((2, 4, 24, 24), (1, 4, 1, 24), (2, 1, 24, 1)))
  def test_bias_has_a_gradient(self, mechanism, shape):
    """EasyDeL silently returned zero."""
    arrays, bias, target = qkv(), numbers(*shape, seed=7), numbers(2, 24, 4, 8, seed=6)
    out, found = jax.jit(jax.value_and_grad(lambda bias: loss(attend(
        mechanism, *arrays, bias=bias, sliding_window=(9, 0)).attention_outputs,
        target=target)))(bias)
    expected, _, (gradient,) = truth(*arrays, masks.window(9, 0), bias=bias, wrt=("bias",),
                                     target=target)
    close(out, (expected * target).sum(), 1e-4)
    close(found, gradient, 1e-4)
    # The gradient is zero only for a bias that is the same for all keys of a query.
    self.assertEqual(abs(gradient).max() > 0.1, shape[3] > 1)

  @parameterized.parameters("blockwise_attn", "auto", "flash_attn2")
  def test_bias_gradient_by_other_names(self, mechanism):
    arrays, target = qkv(), numbers(2, 24, 4, 8, seed=6)
    run = functools.partial(attend, mechanism)
    if mechanism == "blockwise_attn":
      run = functools.partial(blockwise_attn, query_chunk_size=8, key_chunk_size=7)
    def value(bias):
      out = run(*arrays, bias=bias)
      return loss(getattr(out, "attention_outputs", out), target=target)
    found = jax.jit(jax.grad(value))(numbers(1, 4, 24, 24, seed=7))
    _, _, (expected,) = truth(*arrays, bias=numbers(1, 4, 24, 24, seed=7), wrt=("bias",),
                              target=target)
    close(found, expected, 1e-4)

  @parameterized.product(mechanism=(*ALL, "ring"), by=("mask", "mask_info"))
  def test_dense_mask_is_not_dropped(self, mechanism, by):
    """EasyDeL dropped it in blocksparse and ring."""
    arrays = qkv()
    array = np.random.default_rng(8).random((2, 4, 24, 24)) < 0.4
    given = {"mask": array} if by == "mask" else {"mask_info": MaskInfo(array)}
    causal = by == "mask"
    found = attend(mechanism, *arrays, causal=causal, **given).attention_outputs
    base = masks.causal() if causal else masks.full()
    close(found, truth(*arrays, base & masks.dense(array))[0])
    self.assertGreater(abs(found - truth(*arrays, base)[0]).max(), 0.5)

  @parameterized.parameters(*EACH)
  def test_mask_values_are_not_dropped(self, mechanism):
    arrays = qkv()
    mask = masks.chunk(5) | ~masks.window(12, 12) | masks.prefix(np.array([2, 0]))
    found = attend(mechanism, *arrays, mask=mask).attention_outputs
    close(found, truth(*arrays, masks.causal() & mask)[0])

  @parameterized.product(mechanism=EACH, kind=("dense", "value", "segments", "causal"))
  def test_bias_and_mask_both_apply(self, mechanism, kind):
    """EasyDeL ignored the mask where a bias was given."""
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    array = np.random.default_rng(9).random((2, 1, 24, 24)) < 0.5
    ids = np.sort(np.random.default_rng(10).integers(0, 4, (2, 24)), 1).astype(np.int32)
    given, mask = {
        "dense": ({"mask": array, "causal": False}, masks.dense(array)),
        "value": ({"mask": masks.chunk(6), "causal": False}, masks.chunk(6)),
        "segments": ({"mask_info": MaskInfo.from_segments(ids), "causal": False},
                     masks.segments(ids)),
        "causal": ({}, masks.causal())}[kind]
    found = attend(mechanism, *arrays, bias=bias, **given).attention_outputs
    close(found, truth(*arrays, mask, bias=bias)[0])
    self.assertGreater(abs(found - truth(*arrays, mask)[0]).max(), 0.1)
    self.assertGreater(abs(found - truth(*arrays, masks.full(), bias=bias)[0]).max(), 0.1)

  @parameterized.parameters(*EACH, "blocksparse")
  def test_fully_masked_rows_are_0(self, mechanism):
    """EasyDeL returned the mean of the values."""
    query, key, value = arrays = qkv()
    ids = np.zeros((2, 24), np.int32)
    ids[0, 5:9] = -1  # some queries and keys
    ids[1] = -1  # a whole row of the batch
    hidden = ids < 0
    target = numbers(2, 24, 4, 8, seed=6)
    def value_of(*arrays):
      found = attend(mechanism, *arrays, mask_info=MaskInfo.from_segments(ids),
                     return_lse=mechanism != "sdpa")
      weights = None if found.lse is None else np.ones((2, 4, 24))
      return loss(found.attention_outputs, found.lse, target, weights), found
    (_, found), gradients = jax.jit(jax.value_and_grad(value_of, (0, 1, 2), has_aux=True))(*arrays)
    out = np.asarray(found.attention_outputs)
    self.assertFalse(out[hidden].any())
    self.assertTrue(out[~hidden].any(-1).all())
    if found.lse is not None:
      self.assertTrue((np.asarray(found.lse).swapaxes(1, 2)[hidden] == -np.inf).all())
    mask = masks.causal() & masks.segments(ids)
    expected, lse, true_gradients = truth(
        *arrays, mask, wrt=("query", "key", "value"), target=target,
        lse_weights=None if found.lse is None else np.ones((2, 4, 24)))
    close(out, expected)
    if found.lse is not None:
      close(found.lse, lse)
    for gradient, true in zip(gradients, true_gradients):
      close(gradient, true, 1e-4)
      self.assertFalse(np.asarray(gradient)[hidden].any())

  @parameterized.parameters(*EACH)
  def test_hidden_tokens_may_be_nan_or_infinite(self, mechanism):
    """Padding that holds NaN or infinity affects no query that does not see it."""
    query, key, value = (x.copy() for x in qkv())
    ids = np.zeros((2, 24), np.int32)
    ids[:, 20:] = -1
    expected = truth(query, key, value, masks.causal() & masks.segments(ids))[0]
    key[:, 20:22], value[:, 21:] = np.nan, np.inf
    found = attend(mechanism, query, key, value, mask_info=MaskInfo.from_segments(ids))
    close(found.attention_outputs, expected)


class CausalTest(parameterized.TestCase):

  @parameterized.product(mechanism=("blockwise_attn", *ALL), sizes=((1, 24), (2, 2)))
  def test_a_single_head_keeps_causality(self, mechanism, sizes):
    """EasyDeL took shapes with one head for decoding."""
    batch, length = sizes
    arrays = qkv(batch, length, length, 1, 1)
    if mechanism == "blockwise_attn":
      found = blockwise_attn(*arrays, query_chunk_size=8, key_chunk_size=7)
    else:
      found = attend(mechanism, *arrays).attention_outputs
    close(found, truth(*arrays)[0])
    np.testing.assert_allclose(found[:, 0], arrays[2][:, 0], rtol=1e-5)

  @parameterized.product(mechanism=EACH, heads=((1, 1), (4, 2)))
  def test_one_query_changes_nothing(self, mechanism, heads):
    """T == 1 is not a mode: the position of the query must be given, and alone decides."""
    query, key, value = qkv(2, 24, 24, *heads)
    whole = truth(query, key, value)[0]
    with self.assertRaisesRegex(ValueError, "query_offset.*1 queries and 24 keys"):
      attend(mechanism, query[:, :1], key, value)
    run = jax.jit(lambda q, offset: attend(
        mechanism, q, key, value, query_offset=offset).attention_outputs)
    for t in (0, 1, 7, 8, 23):
      close(run(query[:, t:t + 1], jnp.full(2, t, jnp.int32)), whole[:, t:t + 1])
    close(attend(mechanism, query[:, :1], key, value, query_offset=0).attention_outputs,
          whole[:, :1])
    # One query and one key need no offset, and are causal like any others.
    close(attend(mechanism, query[:, :1], key[:, :1], value[:, :1]).attention_outputs, whole[:, :1])

  @parameterized.parameters("blockwise_attn", *EACH, "ring")
  def test_causal_is_kept_under_differentiation(self, mechanism):
    """EasyDeL's ring lost it, and changed the values too."""
    query, key, value = arrays = qkv()
    target = numbers(2, 24, 4, 8, seed=6)
    target[:, 11:] = 0
    if mechanism == "blockwise_attn":
      run = functools.partial(blockwise_attn, query_chunk_size=8, key_chunk_size=7)
    else:
      run = lambda *arrays: attend(mechanism, *arrays).attention_outputs
    def value_of(*arrays):
      out = run(*arrays)
      return loss(out, target=target), out
    (_, out), gradients = jax.jit(jax.value_and_grad(value_of, (0, 1, 2), has_aux=True))(*arrays)
    expected, _, true_gradients = truth(*arrays, wrt=("query", "key", "value"), target=target)
    close(out, expected)
    for gradient, true in zip(gradients, true_gradients):
      close(gradient, true, 1e-4)
    for gradient in gradients:  # tokens after the last query of the loss have no effect
      self.assertFalse(np.asarray(gradient)[:, 11:].any())
      self.assertTrue(np.asarray(gradient)[:, 1:11].any(-1).all())
    tangents = [np.zeros_like(query), key * 0, value * 0]
    tangents[1][:, 11:], tangents[2][:, 11:] = 1, 1
    moved = jax.jit(lambda *t: jax.jvp(run, arrays, t)[1])(*tangents)
    self.assertFalse(np.asarray(moved)[:, :11].any())
    self.assertTrue(np.asarray(moved)[:, 11:].any(-1).all())

  @parameterized.parameters(*ALL)
  def test_causal_false_is_not_causal(self, mechanism):
    """The compiled program of one is not used for the other."""
    arrays = qkv()
    for causal in (True, False, True):
      close(attend(mechanism, *arrays, causal=causal).attention_outputs,
            truth(*arrays, masks.causal() if causal else masks.full())[0])

  @parameterized.parameters(*EACH)
  def test_every_query_has_a_window_of_its_own(self, mechanism):
    """EasyDeL's prefill sliced the keys once, by the window of the last query."""
    query, key, value = qkv()
    for causal in (True, False):
      found = attend(mechanism, query, key, value, sliding_window=(4, 2), causal=causal)
      close(found.attention_outputs,
            truth(query, key, value, masks.window(4, 0 if causal else 2))[0])
    found = attend(mechanism, query[:, :10], key, value, sliding_window=(4, 0), query_offset=9)
    close(found.attention_outputs,
          truth(query[:, :10], key, value, masks.offset(masks.window(4, 0), 9))[0])


class ShardingTest(parameterized.TestCase):

  @parameterized.product(
      mechanism=EACH, batch_axis=(("fsdp", "dp"), ("dp", "fsdp")))
  def test_masks_are_sharded_as_tensors_are(self, mechanism, batch_axis):
    """In EasyDeL ("dp", "fsdp") against ("fsdp", "dp") mixed up the rows of the batch."""
    arrays = qkv(b=8, t=16, s=16)
    metadata = OperationMetadata(mesh=create_mesh((2, 2, 1, 2, 1)),
                                 partition_axis=PartitionAxis(batch_axis=batch_axis))
    generator = np.random.default_rng(11)
    array = generator.random((8, 4, 16, 16)) < 0.6
    ids = np.sort(generator.integers(0, 3, (8, 16)), 1).astype(np.int32)
    places = np.stack([generator.permutation(16) for _ in range(8)]).astype(np.int32)
    lengths = np.arange(9, 17).astype(np.int32)
    bias = numbers(8, 4, 16, 16, seed=7)
    mask = masks.causal() & masks.lengths(None, lengths) & masks.segments(ids)
    mask = masks.positions(places, places, mask & masks.dense(array))
    found = attend(mechanism, *arrays, mask=masks.lengths(None, lengths), bias=bias,
                   metadata=metadata, mask_info=MaskInfo(array, ids, ids, places, places))
    expected = truth(*arrays, mask, bias=bias)[0]
    close(found.attention_outputs, expected)
    self.assertLen(found.attention_outputs.sharding.device_set, 8)
    # Every row of the batch has a different mask, so that an exchange would be seen.
    visible = np.asarray(materialize.to_dense(mask, (8, 4, 16, 16))).reshape(8, -1)
    self.assertLen(np.unique(visible, axis=0), 8)


if __name__ == "__main__":
  absltest.main()
