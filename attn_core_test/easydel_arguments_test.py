# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Defects that EasyDeL has in its arguments, and this library has not.

See easydel_regressions_test.
"""

import functools
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import MaskInfo, OperationMetadata, attention, blockwise, blockwise_attn, masks
from attn_core_test.easydel_cases import EACH, attend, close, loss, numbers, qkv, truth


class NothingVanishesTest(parameterized.TestCase):

  # Arguments that change every result, besides those that easydel_regressions_test compares.
  CHANGES = {
      "chunk": {"chunk_size": 5},
      "positions": {"mask_info": MaskInfo(q_positions=np.arange(24, dtype=np.int32)[None] // 2)},
      "query_offset": {"query_offset": -3},
      "init_bias": {"init_bias": lambda: jnp.asarray(numbers(1, 4, 24, 24, seed=7))},
      "scale": {"softmax_scale": 1.7},
      "scale_of_the_metadata": {"metadata": OperationMetadata(softmax_scale=1.7)},
      "soft_cap": {"logits_soft_cap": 0.6},
      "dropout_of_the_metadata": {"metadata": OperationMetadata(dropout_prob=0.3),
                                  "dropout_rng": jax.random.PRNGKey(1), "deterministic": False},
      "unnormalized": {"normalize_output": False},
      "compute_dtype": {"compute_dtype": jnp.bfloat16},
      "softmax_dtype": {"metadata": OperationMetadata(runtime_softmax_dtype=jnp.bfloat16)},
  }

  @parameterized.product(mechanism=EACH, change=tuple(CHANGES))
  def test_every_argument_counts_or_is_refused(self, mechanism, change):
    """In EasyDeL unsupported arguments vanished into **ignore."""
    arrays = qkv()
    plain = attention(*arrays, mechanism=mechanism).attention_outputs
    try:
      found = attention(*arrays, mechanism=mechanism, **self.CHANGES[change]).attention_outputs
    except NotImplementedError as refusal:
      self.assertEqual(mechanism, "sdpa", refusal)
      self.assertIn(change, ("soft_cap", "dropout_of_the_metadata", "unnormalized",
                             "softmax_dtype"))
      return
    self.assertGreater(abs(np.asarray(found) - np.asarray(plain)).max(), 1e-4)
    self.assertEqual(found.dtype, np.float32)

  @parameterized.parameters(*EACH, "auto")
  def test_requested_results_are_returned(self, mechanism):
    arrays = qkv()
    for name, field in (("return_lse", "lse"), ("return_weights", "attention_weights")):
      self.assertIsNone(getattr(attention(*arrays, mechanism=mechanism), field))
      try:
        found = attention(*arrays, mechanism=mechanism, **{name: True})
      except NotImplementedError as refusal:
        self.assertIn(name, str(refusal))
        self.assertEqual((name, mechanism in ("vanilla", "auto")), ("return_weights", False))
      else:
        self.assertIsNotNone(getattr(found, field))

  def test_unknown_arguments_raise(self):
    for function in (attention, blockwise_attn):
      kinds = {p.kind for p in inspect.signature(function).parameters.values()}
      self.assertNotIn(inspect.Parameter.VAR_KEYWORD, kinds)
      with self.assertRaises(TypeError):
        function(*qkv(), segment_ids=None)

  @parameterized.parameters("vanilla", "flash_attn2", "auto")
  def test_dropout_is_active(self, mechanism):
    """In EasyDeL it never was."""
    arrays = qkv()
    run = lambda **kwargs: np.asarray(attend(
        mechanism, *arrays, dropout_prob=0.4, dropout_rng=jax.random.key(0),
        **kwargs).attention_outputs)
    off = run(deterministic=True)
    close(off, truth(*arrays)[0])
    on = run(deterministic=False)
    np.testing.assert_array_equal(run(), on)  # a probability and a key are enough
    self.assertTrue((abs(on - off).max(-1) > 1e-3).mean() > 0.5)
    # With one key visible, the first query's output is 0 or value / 0.6.
    ratio = on[:, 0] / np.repeat(arrays[2][:, 0], 2, axis=1)
    self.assertTrue((np.isclose(ratio, 0) | np.isclose(ratio, 1 / 0.6)).all())
    with self.assertRaisesRegex(ValueError, "dropout_rng"):
      attend(mechanism, *arrays, dropout_prob=0.4, deterministic=False)

  def test_dropout_of_blockwise_attn(self):
    arrays = qkv()
    run = functools.partial(blockwise_attn, *arrays, attn_pdrop=0.4, dropout_rng=jax.random.key(0),
                            query_chunk_size=8, key_chunk_size=7)
    close(run(), truth(*arrays)[0])
    expected = attention(*arrays, mechanism="vanilla", dropout_prob=0.4, deterministic=False,
                         dropout_rng=jax.random.key(0)).attention_outputs
    close(run(deterministic=False), expected)

  @parameterized.parameters(*EACH)
  def test_lse_is_returned(self, mechanism):
    """EasyDeL never returned it; here it has a gradient too."""
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    found = attend(mechanism, *arrays, bias=bias, sliding_window=(9, 0), return_lse=True).lse
    weights, wrt = numbers(2, 4, 24, seed=12), ("query", "key", "bias")
    mask = masks.window(9, 0)
    _, lse, expected = truth(*arrays, mask, bias=bias, wrt=wrt, lse_weights=weights)
    self.assertEqual((found.shape, found.dtype), ((2, 4, 24), np.float32))
    close(found, lse)
    if mechanism != "sdpa":  # its lse has no gradient, see bad_input_test
      gradients = jax.jit(jax.grad(lambda q, k, v, bias: loss(None, attend(
          mechanism, q, k, v, bias=bias, sliding_window=(9, 0), return_lse=True).lse,
          lse_weights=weights), (0, 1, 3)))(*arrays, bias)
      for gradient, true in zip(gradients, expected):
        close(gradient, true, 1e-4)


class BlockwiseTest(parameterized.TestCase):
  """In EasyDeL the name `blockwise` could not run."""

  def test_by_name_and_by_function(self):
    arrays = qkv(t=37, s=37)
    expected = truth(*arrays)[0]
    close(attention(*arrays, mechanism="blockwise").attention_outputs, expected)
    close(blockwise(*arrays).attention_outputs, expected)
    close(blockwise_attn(*arrays), expected)

  @parameterized.parameters((1, 1), (5, 37), (37, 5), (16, 16), (2048, 2048))
  def test_chunks_change_nothing(self, query_chunk_size, key_chunk_size):
    arrays = qkv(t=37, s=37)
    found = blockwise_attn(*arrays, query_chunk_size=query_chunk_size,
                           key_chunk_size=key_chunk_size)
    close(found, truth(*arrays)[0])

  def test_documented_arguments(self):
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    expected = truth(*arrays, masks.full(), bias=bias)[0]
    run = functools.partial(blockwise_attn, *arrays, bias=bias, causal=False, query_chunk_size=8,
                            key_chunk_size=7)
    close(run(), expected)
    close(run(policy="nothing_saveable", prevent_cse=False, precision="highest"), expected)
    close(run(policy=jax.checkpoint_policies.dots_saveable), expected)
    rough = run(dtype=jnp.bfloat16, float32_logits=False)
    self.assertEqual(rough.dtype, np.float32)
    close(rough, expected, 5e-2)
    self.assertGreater(abs(rough - expected).max(), 1e-4)

  def test_memory_is_linear(self):
    """Memory is linear, forward and backward: there are no arrays of T x S elements."""
    t = 512
    arrays = [jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)] * 3
    square = "512x(2x)?512"
    run = lambda *arrays: blockwise_attn(*arrays, query_chunk_size=64, key_chunk_size=64).sum()
    for function in (run, jax.grad(run, (0, 1, 2))):
      self.assertNotRegex(jax.jit(function).lower(*arrays).as_text(), square)
    dense = lambda *arrays: attention(*arrays, mechanism="vanilla").attention_outputs
    self.assertRegex(jax.jit(dense).lower(*arrays).as_text(), square)


class AccumulationTest(parameterized.TestCase):

  @parameterized.parameters(*EACH)
  def test_sums_are_not_made_in_bfloat16(self, mechanism):
    """One kernel of EasyDeL summed its softmax in bfloat16, where 256 + 1 is 256."""
    keys = 1024
    query = jnp.zeros((1, 2, 2, 8), jnp.bfloat16)
    key = jnp.ones((1, keys, 2, 8), jnp.bfloat16)
    value = jnp.arange(keys, dtype=jnp.float32).astype(jnp.bfloat16)[None, :, None, None]
    value = jnp.broadcast_to(value, (1, keys, 2, 8))
    found = attention(query, key, value, mechanism=mechanism, causal=False,
                      return_lse=mechanism != "sdpa")
    mean = np.asarray(value, np.float64).mean()
    np.testing.assert_allclose(np.asarray(found.attention_outputs, np.float64), mean, rtol=2**-8)
    if found.lse is not None:
      self.assertEqual(found.lse.dtype, np.float32)
      np.testing.assert_allclose(found.lse, np.log(keys), rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
