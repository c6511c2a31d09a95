# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization policies: which values of an attention a gradient saves."""

import collections

from absl.testing import absltest, parameterized
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from attn_core import attention, checkpoint_policy
from attn_core.config import remat


class RematTest(parameterized.TestCase):

  def forwards(self, policy, mechanism="flash_attn2"):
    """Returns how often a layer's attention and its products run in a gradient."""
    def layer(w, x):
      hidden = checkpoint_name(jnp.einsum("btd,de->bte", x, w), "normed_input")
      heads = hidden.reshape(*hidden.shape[:2], 2, -1)
      return attention(heads, heads, heads, mechanism=mechanism).attention_outputs.sum()
    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
    jaxpr = jax.make_jaxpr(jax.grad(layer))(jnp.ones((8, 8)), jnp.ones((1, 4, 8)))
    found = collections.Counter()
    def visit(jaxpr):
      for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
          inner = getattr(inner, "jaxpr", inner)
          if hasattr(inner, "eqns"):
            visit(inner)
    visit(jaxpr.jaxpr)
    return found["attention_forward"], found["dot_general"]

  def test_saved_names_are_not_recomputed(self):
    named = lambda *names: checkpoint_policy("save_only_these_names", names)
    self.assertEqual(self.forwards(None), (1, 2))  # the product and its transpose
    self.assertEqual(self.forwards(checkpoint_policy("")), (1, 2))
    self.assertEqual(self.forwards(checkpoint_policy("everything_saveable")), (1, 2))
    self.assertEqual(self.forwards(checkpoint_policy("nothing_saveable")), (2, 3))
    self.assertEqual(self.forwards(named("attn_output")), (1, 3))
    self.assertEqual(self.forwards(named("attn_output", "attn_qkv")), (1, 2))
    self.assertEqual(self.forwards(named("attn_output", "normed_input")), (1, 2))
    self.assertEqual(self.forwards(named("normed_input")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy("dots_saveable")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy("checkpoint_dots")), (2, 2))
    self.assertEqual(self.forwards(checkpoint_policy(
        "save_any_names_but_these", ["attn_output"])), (2, 2))
    # Values without a name are saved, and so is the output before it gets its name.
    self.assertEqual(self.forwards(checkpoint_policy(
        "save_anything_except_these_names", ["attn_output"])), (1, 2))
    # The backward needs the lse too, which is why the policy of this library implies it.
    self.assertEqual(self.forwards(
        jax.checkpoint_policies.save_only_these_names("attn_output")), (2, 3))

  def test_mechanisms_name_their_residuals(self):
    residuals = {"attn_query", "attn_key", "attn_value", "attn_output", "attn_lse"}
    x = jnp.ones((1, 4, 2, 8))
    for mechanism, names in (("flash_attn2", residuals), ("vanilla", residuals | {"attn_weights"})):
      run = lambda x: attention(x, x, x, mechanism=mechanism, return_lse=True,
                                return_weights="attn_weights" in names)
      jaxpr = str(jax.make_jaxpr(jax.vjp, static_argnums=0)(run, x))
      self.assertEqual({name for name in remat.NAMES if f"name={name}" in jaxpr}, names, mechanism)
    for target, parts in (("attn_key_value", residuals - {"attn_query"}), ("attn_qkv", residuals)):
      self.assertContainsSubset(remat.IMPLIED[target], parts)
    kept = checkpoint_policy("save_only_these_names", (
        "attn_output", "attn_key_value", "attn_query"))
    self.assertEqual(self.forwards(kept), (1, 2))

  def test_every_name(self):
    for name in (*remat.POLICIES, *remat.TARGETED):
      targets = ("attn_output", "residual") if name in remat.TARGETED else None
      self.assertTrue(callable(checkpoint_policy(name, targets)), name)
    self.assertIsNone(checkpoint_policy("none"))
    x = jnp.ones((1, 4, 2, 8))
    for name in remat.POLICIES:
      loss = lambda x, name=name: attention(x, x, x, policy=name).attention_outputs.sum()
      self.assertTrue(jnp.isfinite(jax.eval_shape(jax.grad(loss), x).size))

  @parameterized.parameters(
      (("save_all",), r"^name: got 'save_all'.*'nothing_saveable'"),
      (("save_only_these_names",), "^targets: got None.*attn_lse"),
      (("save_only_these_names", "attn_output"), "targets: got attn_output"),
      (("save_only_these_names", [1]), r"targets: got \[1\]"),
      (("nothing_saveable", ["attn_output"]), "^targets: got .*None with name='nothing_"),
  )
  def test_bad_names(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      checkpoint_policy(*arguments)


if __name__ == "__main__":
  absltest.main()
