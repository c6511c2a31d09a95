# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings: frequencies against published numbers, rotations against their definition."""

import cmath
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core.rope.frequencies import (ROPE_TYPES, Rope, attention_factor, check_rope,
                                        inverse_frequencies, position_axes, rope_from_dict,
                                        rotary_width)
from attn_core.rope.rope import apply_complex_rotary, apply_rotary, rotary, rotary_table
from attn_core_test import optional_deps

SHORT = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
LONG = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)

# Parameters as model hubs write them, for a model of 256 tokens.
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_smooth": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64,
                    "truncate": False},
    "yarn_ratio": {"rope_type": "yarn", "original_max_position_embeddings": 64},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": list(SHORT),
                 "long_factor": list(LONG), "original_max_position_embeddings": 64},
    "proportional": {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.3},
}

# (case, length) -> attention factor and frequencies of a head of width 16 with base 10,000, from
# transformers 5.23.0 (modeling_rope_utils.ROPE_INIT_FUNCTIONS).
GOLDEN = {
    ("default", None): (1.0, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001,
                              0.0003162278]),
    ("linear", None): (1.0, [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025,
                             7.905695e-05]),
    ("dynamic", None): (1.0, [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001,
                              0.0003162278]),
    ("dynamic", 1000): (1.0, [1.0, 0.220131, 0.04845766, 0.01066703, 0.002348145, 0.0005168996,
                              0.0001137856, 2.504774e-05]),
    ("yarn", None): (1.138629436111989, [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695,
                                         0.00025, 7.905695e-05]),
    ("yarn_ratio", None): (1.138629436111989, [1.0, 0.2371708, 0.05, 0.007905695, 0.0025,
                                               0.0007905695, 0.00025, 7.905695e-05]),
    ("yarn_mscale", None): (1.0879546075066122, [1.0, 0.1620667, 0.0025, 0.0007905695, 0.00025,
                                                 7.905695e-05, 2.5e-05, 7.905694e-06]),
    ("yarn_smooth", None): (1.3465735902799727, [1.0, 0.1642706, 0.003893864, 0.0009882118,
                                                 0.0003125, 9.882118e-05, 3.125e-05,
                                                 9.882118e-06]),
    ("llama3", None): (1.0, [1.0, 0.2443846, 0.01304226, 0.003952847, 0.00125, 0.0003952847,
                             0.000125, 3.952847e-05]),
    ("longrope", None): (1.1547005383792517, [1.0, 0.2874798, 0.08333334, 0.02432521, 0.007142857,
                                              0.002108185, 0.000625, 0.0001860163]),
    ("longrope", 1000): (1.1547005383792517, [0.5, 0.1054092, 0.025, 0.006324556, 0.001666667,
                                              0.000451754, 0.000125, 3.513642e-05]),
    ("proportional", None): (1.0, [0.25, 0.07905694, 0, 0, 0, 0, 0, 0]),
}


def read(case: str, **changes) -> Rope:
  rope, unknown = rope_from_dict({**PARAMETERS[case], **changes}, max_position_embeddings=256)
  assert not unknown, unknown
  return rope


def rotated(x, angles, interleaved, factor=1.0):
  """Rotates one head's vector, pair by pair as complex numbers in Python's float64."""
  out, half = [float(v) for v in x], len(angles)
  for i, angle in enumerate(angles):
    a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
    z = complex(x[a], x[b]) * cmath.exp(1j * angle) * factor
    out[a], out[b] = z.real, z.imag
  return out


class FrequenciesTest(parameterized.TestCase):

  @parameterized.parameters(*GOLDEN)
  def test_are_the_published_ones(self, case, length):
    rope = read(case)
    factor, frequencies = GOLDEN[case, length]
    got = inverse_frequencies(rope, 16, length)
    self.assertEqual(got.dtype, np.float32)
    # transformers rounds to float32 at every step: 0.1054092 stands for 10^-0.5 / 3 = 0.10540926.
    np.testing.assert_allclose(got, frequencies, rtol=2e-6)
    self.assertAlmostEqual(attention_factor(rope), factor, places=14)
    if length is not None:  # a traced length gives the same
      traced = jax.jit(lambda n: inverse_frequencies(rope, 16, n))(jnp.int32(length))
      np.testing.assert_allclose(traced, frequencies, rtol=2e-6)

  def test_longer_sequences_change_only_the_types_by_length(self):
    for case in PARAMETERS:
      rope = read(case)
      at_original, beyond = (inverse_frequencies(rope, 16, n) for n in (64, 1000))
      self.assertEqual((at_original != beyond).any(), case in ("dynamic", "longrope"), case)
      np.testing.assert_array_equal(at_original, inverse_frequencies(rope, 16), case)

  @parameterized.parameters(("longrope", 64), ("dynamic", 256))
  def test_the_length_from_which_frequencies_change(self, case, longest):
    """Traced and static lengths agree up to the model's length, at it and beyond it."""
    rope = read(case)
    traced = jax.jit(jax.vmap(lambda n: inverse_frequencies(rope, 16, n)))
    lengths = np.array([0, 1, longest - 1, longest, longest + 1, 2 * longest], np.int32)
    for length, found in zip(lengths, traced(lengths)):
      static = inverse_frequencies(rope, 16, int(length))
      np.testing.assert_allclose(found, static, rtol=2e-6)
      changed = (static != inverse_frequencies(rope, 16)).any()
      self.assertEqual(changed, length > longest, length)
    # Positions 0 .. length - 1 make a sequence of that length.
    for length in (longest, longest + 1):
      cosine, _ = rotary_table(rope, np.arange(length, dtype=np.int32), 16)
      want, _ = rotary_table(rope, np.arange(length, dtype=np.int32), 16, length)
      np.testing.assert_allclose(cosine, want, atol=1e-4)

  @parameterized.product(theta=(1.5, 50.0, 1e4, 5e5), original=(8, 64, 32768, 10**9),
                         truncate=(True, False))
  def test_bounds_of_yarn(self, theta, original, truncate):
    """The ramp lies between dimensions 0 and rotary_dim - 1, by the paper's formula in Python."""
    width, factor = 16, 4.0
    rope = Rope("yarn", theta, factor, original_max_position_embeddings=original,
                truncate=truncate)
    low, high = (width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                 for turns in (32, 1))
    if truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    for i, found in enumerate(inverse_frequencies(rope, width)):
      plain = theta ** (-2 * i / width)
      ramp = (i - low) / (high - low if high != low else 0.001)
      share = min(max(ramp, 0), 1)
      np.testing.assert_allclose(found, plain * (1 - share) + plain / factor * share, rtol=1e-6)

  def test_every_fraction_of_a_head(self):
    """A factor n / width rotates n dimensions, however the quotient is rounded."""
    for width in range(2, 130):
      for n in range(2, width + 1, 2):
        self.assertEqual(rotary_width(Rope(partial_rotary_factor=n / width), width), n)

  @parameterized.parameters(("yarn", "yarn"), ("yarn", "deepseek_yarn"), ("longrope", "longrope"))
  def test_a_factor_that_is_left_out_is_the_ratio_of_the_lengths(self, case, rope_type):
    given, left_out = (read(case, rope_type=rope_type, factor=factor) for factor in (4.0, None))
    self.assertEqual(attention_factor(left_out), attention_factor(given))
    self.assertGreater(attention_factor(left_out), 1.1)
    for length in (None, 65):
      np.testing.assert_array_equal(*(inverse_frequencies(x, 16, length)
                                      for x in (left_out, given)))

  def test_deepseek_yarn(self):
    """Checks by hand: factor 40, mscale 1 and 0.5: (0.1 ln 40 + 1) / (0.05 ln 40 + 1)."""
    rope = read("yarn_mscale", rope_type="deepseek_yarn", mscale_all_dim=0.5)
    self.assertAlmostEqual(attention_factor(rope), 1.36888794541 / 1.18444397270, places=9)
    np.testing.assert_array_equal(inverse_frequencies(rope, 16),
                                  inverse_frequencies(read("yarn_mscale"), 16))
    # Without mscale_all_dim the divisor is 1; plain yarn ignores mscale alone.
    alone = rope._replace(mscale=0.5, mscale_all_dim=None)
    self.assertAlmostEqual(attention_factor(alone), 1.18444397270, places=9)
    self.assertAlmostEqual(attention_factor(alone._replace(rope_type="yarn")), 1.36888794541,
                           places=9)

  def test_no_type_shrinks_the_rotated_vectors(self):
    """Also where a factor below 1 makes the positions of a model denser."""
    for case in PARAMETERS:
      for factor in (0.5, 1.0):
        rope = read(case, factor=factor)
        self.assertEqual(attention_factor(rope), 1.0, case)

  def test_given_attention_factor_wins(self):
    for case in PARAMETERS:
      self.assertEqual(attention_factor(read(case, attention_factor=0.75)), 0.75)

  def test_partial_and_none(self):
    partial = read("default", partial_rotary_factor=0.5)
    np.testing.assert_array_equal(inverse_frequencies(partial, 32), inverse_frequencies(
        read("default"), 16))
    self.assertFalse(inverse_frequencies(Rope("none"), 16).any())

  def test_every_type_is_read_under_both_spellings(self):
    for case, parameters in PARAMETERS.items():
      older = dict(parameters)
      older["type"] = older.pop("rope_type")
      self.assertEqual(rope_from_dict(older, 10000.0, 256)[0], read(case))
    self.assertEqual(rope_from_dict({"type": "su", **{
        k: v for k, v in PARAMETERS["longrope"].items() if k != "rope_type"}}, 1e4, 256)[0],
                     read("longrope"))
    self.assertEqual(rope_from_dict(None, 5e5)[0], Rope(rope_theta=5e5))
    self.assertIn("mrope", ROPE_TYPES)
    rope, unknown = rope_from_dict({"type": "mrope", "mrope_section": [2, 3, 3], "beta": 2})
    self.assertEqual(rope.mrope_section, (2, 3, 3))
    self.assertEqual(unknown, {"beta": 2})

  @parameterized.parameters(
      ({"rope_type": "spiral"}, "rope_type: got 'spiral'.*'llama3'"),
      ({"rope_type": "linear"}, "rope.factor: got None.*linear"),
      ({"rope_type": "linear", "factor": 0.0}, "rope.factor: got 0.0"),
      ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
       "rope.low_freq_factor: got None"),
      ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 4.0, "high_freq_factor": 3.0}, "at least low_freq_factor=4.0"),
      ({"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings: got None"),
      ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings: got None"),
      ({"rope_type": "mrope"}, "rope.mrope_section: got None"),
      ({"rope_type": "mrope", "mrope_section": [8]}, "three ints"),
      ({"rope_type": "mrope", "mrope_section": 8}, "three ints"),
      ({"rope_type": "mrope", "mrope_section": [True, 2, 3]}, "three ints"),
      ({"rope_type": ["linear"]}, r"rope_type: got \['linear'\]"),
      ({"interleaved": "yes"}, "rope.interleaved: got 'yes'; expected True or False"),
      ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "truncate": 1}, "rope.truncate: got 1"),
      ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": "1", "mscale_all_dim": 1.0}, "rope.mscale: got '1'"),
      ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": -20.0, "mscale_all_dim": 1.0}, "rope.mscale: got -20.0"),
      ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": 3,
        "long_factor": [1.0]}, "rope.short_factor: got 3"),
      ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0],
        "long_factor": ["1"]}, "rope.long_factor: got '1'"),
      ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [0.0],
        "long_factor": [1.0]}, "rope.short_factor: got 0.0"),
      ({"rope_type": "longrope", "original_max_position_embeddings": 1, "short_factor": [1.0],
        "long_factor": [1.0]}, "more than 1 token"),
      ({"rope_theta": 1.0}, "rope.rope_theta: got 1.0"),
      ({"rope_theta": "big"}, "rope.rope_theta: got 'big'"),
      ({"partial_rotary_factor": 1.5}, "rope.partial_rotary_factor: got 1.5"),
      ("linear", "a mapping or None"),
  )
  def test_bad_parameters(self, parameters, message):
    with self.assertRaisesRegex(ValueError, message):
      rope_from_dict(parameters)

  @parameterized.parameters(
      ("default", {}, 15, "head_dim: got 15"),
      ("default", {"partial_rotary_factor": 0.01}, 16, "head_dim: got 16"),
      ("default", {}, 16.0, "head_dim: got 16.0"),
      ("default", {}, None, "head_dim: got None"),
      ("dynamic", {}, 2, "at least 4"),
      ("longrope", {}, 32, "rope.short_factor: got 8 numbers; expected 16"),
  )
  def test_bad_widths(self, case, changes, width, message):
    with self.assertRaisesRegex(ValueError, message):
      inverse_frequencies(read(case, **changes), width)

  def test_bad_lengths(self):
    for case in ("default", "dynamic", "longrope"):
      for length in ("long", -5, 2.5, jnp.arange(3), jnp.float32(3)):
        with self.subTest(f"{case}, {length}"), self.assertRaisesRegex(ValueError, "length: got"):
          inverse_frequencies(read(case), 16, length)
    with self.assertRaisesRegex(ValueError, "positions: got.*at least one.*'dynamic'"):
      rotary_table(read("dynamic"), np.zeros((1, 0), np.int32), 16)

  def test_a_step_where_the_bounds_of_llama3_are_equal(self):
    """Checks Llama 4 Scout by hand: 64 f / (2 pi) turns over 64 tokens, at least 1 or fewer."""
    got = inverse_frequencies(read("llama3", high_freq_factor=1.0), 16)
    default = inverse_frequencies(read("default"), 16)
    np.testing.assert_array_equal(got[:3], default[:3])  # 10.2, 3.2 and 1.02 turns
    np.testing.assert_allclose(got[3:], default[3:] / 8, rtol=1e-7)  # 0.32 turns and fewer

  def test_bad_sections(self):
    for section, interleaved, message in (
        ((2, 3, 4), False, "a sum of 8"), ((0, 4, 4), True, "interleaved")):
      rope = Rope("mrope", mrope_section=section, mrope_interleaved=interleaved)
      with self.assertRaisesRegex(ValueError, message):
        position_axes(rope, 16)
    with self.assertRaisesRegex(ValueError, "rope: got 'llama3'"):
      check_rope("llama3")


class RotationTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.query = rng.normal(size=(2, 5, 3, 16)).astype(np.float32)
    self.key = rng.normal(size=(2, 5, 1, 16)).astype(np.float32)
    self.positions = np.array([[0, 1, 2, 3, 4], [7, 300, 3, 63, 64]], np.int32)

  @parameterized.product(case=("default", "yarn", "llama3"), interleaved=(False, True),
                         share=(1.0, 0.5))
  def test_is_that_of_complex_numbers(self, case, interleaved, share):
    rope = read(case, interleaved=interleaved, partial_rotary_factor=share)
    frequencies = inverse_frequencies(rope, 16).astype(np.float64)
    query, key = rotary(self.query, self.key, self.positions, rope)
    for x, got in ((self.query, query), (self.key, key)):
      self.assertEqual((got.shape, got.dtype), (x.shape, x.dtype))
      expected = [[[rotated(head, position * frequencies, interleaved, attention_factor(rope))
                    for head in token] for token, position in zip(row, positions)]
                  for row, positions in zip(x, self.positions)]
      width = 2 * len(frequencies)
      np.testing.assert_allclose(got[..., :width], np.array(expected)[..., :width], atol=5e-5)
      np.testing.assert_array_equal(got[..., width:], x[..., width:])

  def test_layouts_and_jit_agree(self):
    rope = read("longrope")
    query, key = rotary(self.query, self.key, self.positions, rope)
    swapped = rotary(self.query.swapaxes(1, 2), self.key.swapaxes(1, 2), self.positions, rope,
                     layout="bhtd")
    np.testing.assert_array_equal(swapped[0].swapaxes(1, 2), query)
    packed = rotary(self.query[1], self.key[1], self.positions[1], rope, layout="thd")
    np.testing.assert_array_equal(packed[0], query[1])
    np.testing.assert_array_equal(packed[1], key[1])
    jitted = jax.jit(rotary, static_argnums=3)(self.query, self.key, self.positions, rope)
    np.testing.assert_allclose(jitted[0], query, atol=1e-5)
    one_row = rotary(self.query, self.key, self.positions[1], rope)
    np.testing.assert_array_equal(one_row[0][1], query[1])
    np.testing.assert_allclose(one_row[0][0], rotary(
        self.query[:1], self.key[:1], self.positions[1:], rope)[0][0], atol=1e-6)

  def test_only_the_distance_counts(self):
    for case in ("default", "llama3", "yarn"):
      for interleaved in (False, True):
        rope = read(case, interleaved=interleaved)
        def logits(shift, rope=rope):
          q, k = rotary(self.query, self.key, self.positions + shift, rope)
          return jnp.einsum("bthd,bskd->bhts", q, k)
        np.testing.assert_allclose(logits(0), logits(50), atol=2e-3)

  def test_positions_beyond_the_original_length(self):
    """Checks position 4,096 with llama3 of 64 original tokens against its formula."""
    positions = np.array([64, 256, 4096, 100_000], np.int32)
    for case in PARAMETERS:
      rope = read(case)
      cosine, sine = rotary_table(rope, positions, 16)
      angles = positions[:, None] * inverse_frequencies(rope, 16, 100_001).astype(np.float64)
      factor = attention_factor(rope)
      tolerance = 100_000 * 1.2e-7  # float32 holds an angle of 100,000 radians to 2^-8
      np.testing.assert_allclose(cosine, np.cos(angles) * factor, atol=tolerance)
      np.testing.assert_allclose(sine, np.sin(angles) * factor, atol=tolerance)
      self.assertEqual(cosine.dtype, jnp.float32)

  def test_lengths_of_queries_and_keys_both_count(self):
    """Checks that keys beyond the original length change the queries' frequencies too."""
    rope, near, far = read("longrope"), np.arange(5)[None], np.arange(100, 105)[None]
    query = self.query[:1]
    alone = rotary(query, query, near, rope)[0]
    together = rotary(query, query, near, rope, key_positions=far)[0]
    np.testing.assert_array_equal(together, apply_rotary(query, *rotary_table(rope, near, 16, 105)))
    self.assertGreater(np.abs(alone - together).max(), 0.1)

  def test_three_positions(self):
    """Checks that a frequency rotates by the position of its axis, in sections or in turns."""
    three = np.stack([self.positions, self.positions + 3, 2 * self.positions])
    chunked = [0, 0, 1, 1, 1, 2, 2, 2]
    in_turns = [0, 1, 2, 0, 1, 2, 0, 0]
    for interleaved, section, axes in ((False, (2, 3, 3), chunked), (True, (4, 2, 2), in_turns)):
      rope = Rope("mrope", mrope_section=section, mrope_interleaved=interleaved)
      np.testing.assert_array_equal(position_axes(rope, 16), axes)
      frequencies = inverse_frequencies(rope, 16)
      cosine, _ = rotary_table(rope, three, 16)
      for i, axis in enumerate(axes):
        np.testing.assert_allclose(cosine[..., i], np.cos(three[axis] * frequencies[i]), atol=1e-4)
      same = rotary_table(rope, self.positions, 16)
      np.testing.assert_array_equal(same[0], rotary_table(Rope(), self.positions, 16)[0])

  def test_complex(self):
    rope = Rope(interleaved=True)
    cosine, sine = rotary_table(rope, self.positions, 16)
    freqs_cis = jax.lax.complex(cosine, sine)[:, :, None, :]
    got = apply_complex_rotary(self.query, self.key, freqs_cis)
    for mine, theirs in zip(got, rotary(self.query, self.key, self.positions, rope)):
      np.testing.assert_array_equal(mine, theirs)
    low, _ = apply_complex_rotary(self.query.astype(jnp.bfloat16), self.key, freqs_cis)
    self.assertEqual(low.dtype, jnp.bfloat16)
    for bad, message in ((freqs_cis.real, "freqs_cis: got float32"),
                         (freqs_cis[..., :4], r"complex \[..., T, 1, 8\]"),
                         (freqs_cis[:, :4], "freqs_cis: .*leading dimensions of xq"),
                         (freqs_cis[..., 0, :], "freqs_cis: .*leading dimensions of xq")):
      with self.assertRaisesRegex(ValueError, message):
        apply_complex_rotary(self.query, self.key, bad)

  def test_half_precision_is_rounded_once(self):
    rope = read("default")
    query = self.query.astype(jnp.bfloat16)
    got, _ = rotary(query, query, self.positions, rope)
    exact, _ = rotary(query.astype(np.float32), query.astype(np.float32), self.positions, rope)
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))

  def test_gradient_rotates_back(self):
    """Checks that without a factor the map is orthogonal: its transpose is its inverse."""
    table = rotary_table(read("default"), self.positions, 16)
    turn = lambda x: apply_rotary(x, *table)
    _, back = jax.vjp(turn, jnp.asarray(self.query))
    np.testing.assert_allclose(back(turn(self.query))[0], self.query, atol=1e-5)

  def test_wider_numbers_are_rotated_in_their_own_precision(self):
    with jax.enable_x64(True):
      rng = np.random.default_rng(0)
      x, angles = rng.normal(size=(1, 5, 2, 8)), rng.normal(size=(5, 4))
      for interleaved in (False, True):
        found = apply_rotary(x, np.cos(angles), np.sin(angles), interleaved)
        want = [[rotated(head, angle, interleaved) for head in token]
                for token, angle in zip(x[0], angles)]
        self.assertEqual(found.dtype, "float64")
        np.testing.assert_allclose(found[0], want, rtol=1e-13, atol=1e-14)

  @parameterized.parameters(("longrope", 64), ("dynamic", 256))
  def test_the_last_position_of_queries_and_keys_is_the_length(self, case, longest):
    """Frequencies change with the first position beyond the model's length, of either."""
    rope, key = read(case), self.key[:1]
    for last in (longest - 1, longest):
      few, many = np.int32([[3, 0, 1, 7, 2]]), np.int32([[3, last, 1, 7, 2]])
      for positions, key_positions in ((few, many), (many, few)):
        found = rotary(self.query[:1], key, positions, rope, key_positions=key_positions)
        for x, place, got in zip((self.query[:1], key), (positions, key_positions), found):
          table = rotary_table(rope, place, 16, last + 1)
          np.testing.assert_allclose(got, apply_rotary(x, *table), atol=1e-4)
      self.assertEqual((inverse_frequencies(rope, 16, last + 1)
                        != inverse_frequencies(rope, 16)).any(), last == longest)

  def test_type_none_changes_nothing(self):
    got = rotary(self.query, self.key, self.positions, Rope("none"))
    self.assertIs(got[0], self.query)
    self.assertIs(got[1], self.key)

  def test_bad_input(self):
    good = {"query": self.query, "key": self.key, "positions": self.positions, "rope": Rope()}
    for changes, message in (
        ({"positions": np.ones((2, 5))}, "positions: got float64"),
        ({"positions": [1, 2]}, r"positions: got int32\[2\].*\[..., 5\]"),
        ({"positions": np.ones((4, 2, 5), int)}, r"cosine: got .*\[B or 1, T, rotary_dim / 2\]"),
        ({"positions": np.ones((3, 5), int)}, r"cosine: got float32\[3, 5, 8\].*B = 2"),
        ({"positions": np.ones((2, 1), int)}, r"positions: got int32\[2, 1\].*\[..., 5\]"),
        ({"positions": np.ones((2, 4), int)}, r"positions: got .*one for each query"),
        ({"key": np.ones((2, 7, 1, 16), np.float32)}, r"positions: .*each key .*`key_positions`"),
        ({"key_positions": np.ones((2, 4), int)}, r"key_positions: got .*one for each key"),
        ({"rope": Rope("none"), "layout": "tbhd"}, "layout: got 'tbhd'"),
        ({"query": [1.0]}, "query: got list"),
        ({"key": None}, "key: got NoneType"),
        ({"rope": {"rope_type": "default"}}, "rope: got .*rope_from_dict"),
        ({"layout": "tbhd"}, "layout: got 'tbhd'"),
        ({"layout": "thd"}, "query: got float32"),
        ({"key": np.ones((2, 5, 1, 8), np.float32)}, "key: got float32"),
        ({"query": np.ones((2, 5, 3, 16), int)}, "x: got int64")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        rotary(**{**good, **changes})

  def test_bad_tables(self):
    cosine, sine = rotary_table(Rope(), np.arange(5), 16)
    for bad, message in (((cosine[:4], sine[:4]), r"cosine: got float32\[4, 8\].*T = 5"),
                         ((cosine, sine[:, :2]), r"sine: got .*shape of the cosine"),
                         ((cosine, sine[:1]), r"sine: got float32\[1, 8\].*T = 5"),
                         ((cosine.astype(int), sine), "cosine: got int"),
                         ((jnp.stack([cosine] * 3), sine), r"cosine: got .*B = 2")):
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        apply_rotary(self.query, *bad)

  def test_three_positions_must_be_three(self):
    rope = Rope("mrope", mrope_section=(2, 3, 3))
    with self.assertRaisesRegex(ValueError, r"positions: got .*\[3, B, T\]"):
      rotary_table(rope, np.ones((2, 2, 5), np.int32), 16)


class TransformersTest(absltest.TestCase):
  """Compares with transformers, which writes the configurations, if it is installed."""

  def setUp(self):
    super().setUp()
    self.torch, self.transformers = optional_deps.torch_and_transformers(self)

  def test_frequencies(self):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    for case, parameters in PARAMETERS.items():
      if case in ("default", "yarn_ratio"):
        continue  # ROPE_INIT_FUNCTIONS has neither
      for theta in (1e4, 5e5):
        for length in (None, 64, 65, 1000):
          config = self.transformers.LlamaConfig(
              hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
              rope_parameters=dict(parameters, rope_theta=theta))
          theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
              config, None, seq_len=length)
          rope = read(case, rope_theta=theta)
          np.testing.assert_allclose(inverse_frequencies(rope, 16, length), theirs, rtol=2e-6)
          self.assertAlmostEqual(attention_factor(rope), factor, places=12)

  def test_three_positions(self):
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as chunked
    from transformers.models.qwen3_vl import modeling_qwen3_vl as in_turns
    positions = np.random.default_rng(0).integers(0, 500, (3, 2, 7)).astype(np.int32)
    for module, text, section in ((chunked.Qwen2_5_VLRotaryEmbedding, "Qwen2_5_VLTextConfig",
                                   (2, 3, 3)),
                                  (in_turns.Qwen3VLTextRotaryEmbedding, "Qwen3VLTextConfig",
                                   (4, 2, 2))):
      config = getattr(self.transformers, text)(
          hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
          rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                           "mrope_section": list(section)})
      theirs = module(config)(self.torch.zeros(1), self.torch.tensor(positions))
      rope = Rope("mrope", mrope_section=section,
                  mrope_interleaved="Qwen3" in text)
      for mine, other in zip(rotary_table(rope, positions, 16), theirs):
        np.testing.assert_allclose(mine, other[..., :8], atol=1e-4)


if __name__ == "__main__":
  absltest.main()
