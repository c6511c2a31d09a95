# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference that kernels are compared with, against loops over Python numbers."""

import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.masks import dropout
from attn_core.masks.mask import Coordinates
from attn_core.references import oracle, paged
from attn_core.types import AttentionSpec, MaskOperands, Operands, PagedSpec

B, T, S, H, K, D, E = 2, 4, 5, 4, 2, 3, 6
SCALE = 0.7


def array(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).normal(size=shape)


def by_hand(arrays, seen, *, cap=None, prob=0.0, keep=None, normalize=True):
  """Returns out [B, T, H, E], weights [B, H, T, S] and lse [B, H, T], number by number."""
  query, key, value = arrays["query"], arrays["key"], arrays["value"]
  out, weights, lse = np.zeros((B, T, H, E)), np.zeros((B, H, T, S)), np.zeros((B, H, T))
  for b, h, t in np.ndindex(B, H, T):
    logits = {}
    for s in np.flatnonzero(seen[b, h, t]):
      mine, other = key[b, s, h // (H // K)], value[b, s, h // (H // K)]
      x = SCALE * sum(float(q) * float(k) for q, k in zip(query[b, t, h], mine))
      x = cap * math.tanh(x / cap) if cap is not None else x
      x += float(arrays["bias"][b, h, t, s]) if "bias" in arrays else 0.0
      logits[s] = x if np.isfinite(mine).all() and np.isfinite(other).all() else math.nan
    total = sum(math.exp(x) for x in logits.values())
    total += math.exp(arrays["sinks"][b, h]) if "sinks" in arrays else 0.0
    lse[b, h, t] = math.log(total) if total else -math.inf
    for s, x in logits.items():
      kept = keep is None or keep[b, h, t, s]
      weights[b, h, t, s] = math.exp(x) / total / (1 - prob) if kept else 0.0
      out[b, t, h] += weights[b, h, t, s] * value[b, s, h // (H // K)]
    out[b, t, h] *= 1 if normalize else total
  return out, weights, lse


class OracleTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.arrays = {"query": array(B, T, H, D), "key": array(B, S, K, D), "value": array(B, S, K, E)}
    self.seen = array(B, H, T, S, seed=1) > -0.3
    self.seen[0, 1, 2] = self.seen[1, :, 0] = False  # queries that see nothing

  def check(self, spec_fields, words=None, **arguments):
    with jax.enable_x64(True):
      leaves, structure = jax.tree.flatten(masks.dense(self.seen))
      arrays = jax.tree.map(jnp.asarray, self.arrays)
      operands = Operands(arrays["query"], arrays["key"], arrays["value"], arrays.get("bias"),
                          MaskOperands(tuple(map(jnp.asarray, leaves))), arrays.get("sinks"), words)
      spec = AttentionSpec(structure, SCALE)._replace(**spec_fields)
      found = oracle.attention(operands, spec)
    for x, want in zip((found.attention_outputs, found.attention_weights, found.lse),
                       by_hand(self.arrays, self.seen, **arguments)):
      np.testing.assert_allclose(x, want, rtol=1e-12, atol=1e-13)

  def test_plain(self):
    self.check({})

  def test_gradients_are_those_of_differences(self):
    """Also where a query sees nothing, which contributes 0."""
    leaves, structure = jax.tree.flatten(masks.dense(self.seen))
    arrays = {**self.arrays, "bias": array(B, H, T, S)}
    with jax.enable_x64(True):
      def loss(arrays):
        found = oracle.attention(
            Operands(**arrays, mask=MaskOperands(tuple(map(jnp.asarray, leaves)))),
            AttentionSpec(structure, SCALE, 0.8))
        return jnp.sin(found.attention_outputs).sum() + jnp.where(
            found.lse == -jnp.inf, 0, found.lse).sum()
      arrays = jax.tree.map(jnp.asarray, arrays)
      both = jax.jit(jax.value_and_grad(loss))
      _, gradient = both(arrays)
      for name, x in arrays.items():
        move = array(*x.shape, seed=3)
        ahead, behind = (both({**arrays, name: x + step * move})[0] for step in (1e-5, -1e-5))
        self.assertAlmostEqual(float((gradient[name] * move).sum()),
                               float(ahead - behind) / 2e-5, places=7)

  def test_soft_cap_is_applied_before_the_bias(self):
    self.arrays["bias"] = 4 * array(B, H, T, S)
    self.check({"logits_soft_cap": 0.8}, cap=0.8)

  def test_sinks_and_not_normalized(self):
    self.arrays["sinks"] = array(B, H, seed=2)
    self.check({})
    self.check({"normalize_output": False}, normalize=False)

  def test_dropout(self):
    with jax.enable_x64(False):
      words = dropout.key_words(jax.random.key(3))
      b, h, t, s = np.ogrid[:B, :H, :T, :S]
      keep = dropout.keep_mask(words[0], Coordinates(b, h, t, s, t, s), 0.4)
    self.check({"dropout_prob": 0.4}, words, prob=0.4, keep=np.asarray(keep))

  @parameterized.product(name=("key", "value"), bad=(np.nan, -np.inf))
  def test_a_key_or_value_that_is_not_finite_makes_nan_of_those_that_see_it(self, name, bad):
    self.arrays[name][1, 3, 1, 2] = bad
    self.check({})


class PagedTest(parameterized.TestCase):

  @parameterized.parameters((True, 1, None), (False, 1, 1), (True, 0, 5))
  def test_windows(self, causal, left, right):
    """The queries of a request are the last ones of its tokens."""
    query, key, value = array(3, H, D), array(S, K, D), array(S, K, E)
    place, other = np.arange(S - 2, S)[:, None], np.arange(S)
    seen = np.ones((2, S), bool)
    for limit, allowed in ((causal, other <= place),
                           (left is not None, other - place >= -(left or 0)),
                           (right is not None, other - place <= (right or 0))):
      seen &= allowed if limit else True
    with jax.enable_x64(True):
      spec = PagedSpec(SCALE, None, causal, (left, right))
      out, lse = paged.attention(jnp.asarray(query), [(2, jnp.asarray(key), jnp.asarray(value))],
                                 spec)
      leaves, structure = jax.tree.flatten(masks.dense(seen[None, None]))
      want = oracle.attention(
          Operands(*(jnp.asarray(x)[None] for x in (query[:2], key, value)),
                   mask=MaskOperands(tuple(map(jnp.asarray, leaves)))),
          AttentionSpec(structure, SCALE))
    np.testing.assert_allclose(out, np.append(want.attention_outputs[0], np.zeros((1, H, E)), 0),
                               rtol=1e-12)
    np.testing.assert_allclose(lse, np.append(want.lse[0], np.full((H, 1), -np.inf), 1), rtol=1e-12)


if __name__ == "__main__":
  absltest.main()
