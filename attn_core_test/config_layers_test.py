# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks and ropes of the layers of a configuration."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (AttnConfig, AttnMaskDetail, Rope, attention, attention_arguments,
                       get_basic_causal_mask, get_basic_frequencies, get_basic_inv_frequencies,
                       get_basic_rope, get_fcm_mask, get_mask_details,
                       granted_freq_max_position_embedding, granted_mask_max_position_embedding,
                       inverse_frequencies, masks, rotary, rotary_table)
from attn_core.masks import materialize
from attn_core.types import MaskOperands

LAYERED = AttnConfig(
    num_hidden_layers=3, layer_types=("full_attention", "sliding_attention", "chunked_attention"),
    sliding_window=(2, 1), chunk_size=4, max_position_embeddings=9)


def visible(mask, length: int):
  """Returns a mask as a boolean array [T, S]."""
  arrays, structure = jax.tree.flatten(mask)
  shape = (1, 1, length, length)
  return np.broadcast_to(np.asarray(materialize.visible(
      structure, MaskOperands(tuple(map(jnp.asarray, arrays))), shape)), shape)[0, 0]


class MasksTest(parameterized.TestCase):

  def test_details_describe_visible_keys(self):
    t, s = np.mgrid[:9, :9]
    expected = [s <= t, (s <= t) & (t - s <= 2), (s <= t) & (t // 4 == s // 4)]
    details = get_mask_details(LAYERED)
    self.assertEqual([details[i].size for i in range(3)], [None, 3, 4])
    key = jnp.eye(9)[None, :, None]  # the value of key i is the i-th unit vector
    for layer, mask in enumerate(expected):
      np.testing.assert_array_equal(visible(details[layer].to_mask(), 9), mask)
      out = attention(jnp.zeros_like(key), key, key, **attention_arguments(LAYERED, layer))
      np.testing.assert_array_equal(out.attention_outputs[0, :, 0] > 0, mask)
    both = AttnMaskDetail("sliding_attention", False, (2, -1))
    self.assertIsNone(both.size)
    np.testing.assert_array_equal(visible(both.to_mask(), 9), t - s <= 2)
    self.assertEqual(both._replace(sliding_window=(2, 1)).size, 4)

  def test_alike_layers(self):
    for changes, kind in (({}, "full_attention"), ({"sliding_window": (3, 0)}, "sliding_attention"),
                          ({"chunk_size": 4}, "chunked_attention")):
      config = AttnConfig(causal=False, **changes)
      self.assertIsNone(get_mask_details(config))
      arguments = attention_arguments(config, 17)  # any layer, since all are alike
      self.assertEqual((arguments["sliding_window"], arguments["chunk_size"], arguments["causal"]),
                       (config.sliding_window, config.chunk_size, False), kind)

  def test_causal(self):
    self.assertEqual(get_basic_causal_mask(AttnConfig()), masks.causal())
    np.testing.assert_array_equal(get_basic_causal_mask(LAYERED, dense=True)[0, 0],
                                  np.tri(9, dtype=bool))

  def test_lengths(self):
    config = AttnConfig(max_position_embeddings=8, freq_max_position_embeddings=16)
    self.assertEqual((granted_freq_max_position_embedding(config),
                      granted_mask_max_position_embedding(config)), (16, 8))
    for granted in (granted_freq_max_position_embedding, granted_mask_max_position_embedding,
                    lambda config: get_basic_causal_mask(config, dense=True)):
      with self.assertRaisesRegex(ValueError, "max_position_embeddings"):
        granted(AttnConfig())

  def test_forgetful_mask(self):
    config, key = AttnConfig(fcm_min_ratio=0.2, fcm_max_ratio=0.6), jax.random.key(0)
    mask = get_fcm_mask(config, 64, 500, False, key)
    self.assertEqual((mask.shape, mask.dtype), ((64, 1, 1, 500), bool))
    self.assertTrue(mask[..., 0].all())
    dropped = 1 - np.asarray(mask, float).mean((1, 2, 3))  # every row has its own share
    self.assertBetween(dropped.min(), 0.12, 0.3)
    self.assertBetween(dropped.max(), 0.5, 0.68)
    self.assertBetween(dropped.mean(), 0.35, 0.45)
    np.testing.assert_array_equal(mask, get_fcm_mask(config, 64, 500, False, key))
    self.assertTrue((mask != get_fcm_mask(config, 64, 500, False, jax.random.key(1))).any())
    x = jnp.ones((2, 7, 1, 4))
    few = get_fcm_mask(config._replace(fcm_min_ratio=0.6), 2, 7, False, key)
    weights = attention(x, x, x, mask=few, return_weights=True).attention_weights
    np.testing.assert_array_equal(weights > 0, np.tri(7, dtype=bool) & np.asarray(few))
    self.assertIsNone(get_fcm_mask(config, 2, 7, True))
    self.assertIsNone(get_fcm_mask(AttnConfig(), 2, 7, False))
    with self.assertRaisesRegex(ValueError, "key: got None.*fcm_max_ratio=0.6"):
      get_fcm_mask(config, 2, 7, False)
    with self.assertRaisesRegex(ValueError, "fcm_min_ratio: got 0.7; expected at most"):
      get_fcm_mask(config._replace(fcm_min_ratio=0.7), 2, 7, False, key)


class BasicRopeTest(absltest.TestCase):

  def test_are_those_of_the_configured_rope(self):
    rope = Rope("linear", factor=2.0, partial_rotary_factor=0.5)
    config = AttnConfig(hidden_size=64, num_attention_heads=4, rope=rope, max_position_embeddings=9)
    np.testing.assert_array_equal(get_basic_inv_frequencies(config), inverse_frequencies(rope, 16))
    np.testing.assert_array_equal(get_basic_inv_frequencies(config, rotary_dim=4, base=100.0),
                                  np.float32([0.5, 0.05]))
    self.assertEqual(get_basic_inv_frequencies(config, 32, partial_rotary_factor=0.25).shape, (4,))
    table = get_basic_frequencies(config)
    self.assertEqual((table.shape, table.dtype), ((9, 8), jnp.float32))
    cosine, sine = rotary_table(rope, np.arange(9), 16)
    np.testing.assert_array_equal(table, jnp.concatenate([cosine, sine], -1))
    with self.assertRaisesRegex(ValueError, "head_dim: got None"):
      get_basic_inv_frequencies(AttnConfig())

  def test_rotates_the_part_of_a_head_that_is_configured(self):
    config = AttnConfig(head_dim=192, rope_head_dim=64, max_position_embeddings=9)
    np.testing.assert_array_equal(get_basic_inv_frequencies(config),
                                  inverse_frequencies(Rope(), 64))
    self.assertEqual(get_basic_frequencies(config).shape, (9, 64))
    self.assertEqual(get_basic_inv_frequencies(config, 32).shape, (16,))

  def test_function(self):
    config = AttnConfig(rope=Rope(partial_rotary_factor=0.5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 20)), jnp.float32)
    positions = jnp.arange(5)[None]
    for rotary_dim, style, rope in (
        (None, None, config.rope), (6, True, Rope(partial_rotary_factor=0.3)),
        (6, False, Rope(partial_rotary_factor=0.3, interleaved=True))):
      turn = get_basic_rope(config, jnp.bfloat16, 20, rotary_dim, style)
      for mine, theirs in zip(turn(positions, x, x), rotary(x, x, positions, rope)):
        self.assertEqual(mine.dtype, jnp.bfloat16)
        np.testing.assert_array_equal(mine, theirs.astype(jnp.bfloat16))
    with self.assertRaisesRegex(ValueError, "head_dim: got 7"):
      get_basic_rope(config, jnp.float32, 20, rotary_dim=7)
    with self.assertRaisesRegex(ValueError, "rotary_dim: got 24; expected at most head_size=20"):
      get_basic_rope(config, jnp.float32, 20, rotary_dim=24)


if __name__ == "__main__":
  absltest.main()
