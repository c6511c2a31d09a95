# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/equivalents.md, and the errors that name it."""

import inspect
import pathlib
import re

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import attention, explain, sdpa
from attn_core.arguments import other_keywords
from attn_core.arguments.arguments import AttentionOptions
from attn_core.caches import quantize

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "equivalents.md"
B, T, H, K, D = 2, 9, 4, 2, 8


def function(name):
  """Returns a function that the page defines."""
  names: dict = {}
  for code in re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
    if f"def {name}(" in code:
      exec(code, names)  # pylint: disable=exec-used
  return names[name]


def arrays():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return normal(B, T, H, D), normal(B, T, K, D), normal(B, T, K, D), normal


def weights_of(logits):
  return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -jnp.inf), -1)


def scores_of(query, key):
  return jnp.einsum("bthd,bshd->bhts", query, jnp.repeat(key, H // K, 2)) * D**-0.5


def weighted(weights, value):
  return jnp.einsum("bhts,bshe->bthe", weights, jnp.repeat(value, H // K, 2))


class EquivalentsTest(absltest.TestCase):

  def test_a_bias_before_the_soft_cap(self):
    query, key, value, normal = arrays()
    left, right = normal(B, T, H, 2), normal(B, T, K, 2)
    bias = jnp.einsum("bthn,bshn->bhts", left, jnp.repeat(right, H // K, 2))
    want = weighted(weights_of(2 * jnp.tanh((scores_of(query, key) + bias) / 2)), value)
    found = function("bias_before_cap")(query, key, value, bias, scale=D**-0.5, cap=2.0)
    np.testing.assert_allclose(found, want, atol=1e-5)
    after = attention(query, key, value, bias=bias, logits_soft_cap=2.0).attention_outputs
    self.assertGreater(float(jnp.abs(after - want).max()), 0.05)

  def test_partial_results(self):
    query, key, value, _ = arrays()
    part = lambda s: attention(query, key[:, s], value[:, s], causal=False, return_lse=True)
    out, lse = function("combined")(part(slice(0, 4)), part(slice(4, T)))
    whole = attention(query, key, value, causal=False, return_lse=True)
    np.testing.assert_allclose(out, whole.attention_outputs, atol=1e-5)
    np.testing.assert_allclose(lse, whole.lse, atol=1e-5)

  def test_quantized_keys_and_values(self):
    query, key, value, _ = arrays()
    stored = [quantize.quantize(x, jnp.int8) for x in (key, value)]
    (key8, key_scale), (value8, value_scale) = stored
    found = function("quantized")(query, key8, value8, key_scale, value_scale)
    want = attention(query, *(x * scale[..., None] for x, scale in stored)).attention_outputs
    np.testing.assert_allclose(found, want, atol=1e-5)
    with self.assertRaisesRegex(ValueError, "key: got int8.*DenseCache.*equivalents.md"):
      attention(query, key8, value8)

  def test_a_dropout_mask(self):
    query, key, value, normal = arrays()
    kept = normal(B, H, T, T) > 0
    want = weighted(jnp.where(kept, weights_of(scores_of(query, key)) * 2, 0), value)
    np.testing.assert_allclose(function("dropped")(query, key, value, kept, 0.5), want, atol=1e-5)
    with self.assertRaisesRegex(ValueError, "dropout_rng: got bool.*equivalents.md"):
      attention(query, key, value, dropout_prob=0.5, dropout_rng=kept)

  def test_keywords_of_other_libraries(self):
    """An error names what to write, which exists: a keyword, a name, or a title of the page."""
    query, key, value, _ = arrays()
    titles = re.findall("^## (.*)", PAGE.read_text(), re.MULTILINE)
    for name, text in other_keywords.EQUIVALENTS.items():
      self.assertNotIn(name, AttentionOptions.__annotations__)
      for keyword in re.findall(r"\b(\w+)=", text.split("(")[0]):
        self.assertIn(keyword, {"mechanism", *AttentionOptions.__annotations__})
      for title in re.findall("'(.*?)' in docs", text):
        self.assertTrue([x for x in titles if x.startswith(title)], title)
      wrong = f"got an unexpected keyword argument '{name}'; {re.escape('expected ' + text)}$"
      for function, start in ((attention, r"^attention\(\) "), (explain, r"^explain\(\) "),
                              (sdpa, "^mechanism 'sdpa': ")):
        with self.assertRaisesRegex(TypeError, start + wrong):
          function(query, key, value, **{name: None})
    with self.assertRaisesRegex(TypeError, "argument 'typo'; the keywords are in help"):
      attention(query, key, value, typo=1)
    self.assertEqual(list(inspect.signature(attention).parameters)[:4],
                     ["query", "key", "value", "mechanism"])


if __name__ == "__main__":
  absltest.main()
