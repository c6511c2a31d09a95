# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""AttentionOutput: a tuple and a pytree of results that refuses to be used as an array."""

import copy
import inspect
import operator
import pickle

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import AttentionOutput, attention

X = np.ones((1, 4, 2, 8), np.float32)
OUTPUT = AttentionOutput(jnp.asarray(X), lse=jnp.zeros((1, 2, 4)))
BINARY = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
          operator.mod, operator.pow, operator.matmul, operator.and_, operator.or_, operator.xor,
          operator.lshift, operator.rshift, divmod, operator.iadd, operator.imul, operator.lt,
          operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
USES = {
    "neg": lambda x: -x, "abs": abs, "reshape": lambda x: x.reshape(-1), "shape": lambda x: x.shape,
    "astype": lambda x: x.astype("bfloat16"), "T": lambda x: x.T, "sum": jnp.sum,
    "asarray": jnp.asarray, "numpy": np.asarray, "gelu": jax.nn.gelu,
    "einsum": lambda x: jnp.einsum("bthd->bt", x), "tuple": lambda x: x + (1,),
    "tuple_before": lambda x: (1,) + x, "index": lambda x: x[..., 0], "rows": lambda x: x[:, 0],
    "jit": jax.jit(lambda x: jnp.ones(3) * x), "numpy_sum": np.sum, "numpy_exp": np.exp,
    "where": lambda x: jnp.where(x > 0, x, 0), "max": lambda x: max(x, 0),
    "sum_of_two": lambda x: sum([x, x]), "numpy_in_place": lambda x: operator.iadd(X.copy(), x)}


class ArithmeticTest(parameterized.TestCase):

  @parameterized.product(operation=BINARY, kind=("int", "float", "array"))
  def test_binary_operations_are_refused(self, operation, kind):
    other = {"int": 2, "float": 2.5, "array": X}[kind]
    with self.assertRaisesRegex(TypeError, r"attention\(\.\.\.\)\.attention_outputs.*`\.out`"):
      operation(OUTPUT, other)
    for array in (jnp.asarray(other), np.asarray(other)):
      with self.assertRaisesRegex(TypeError, "attention_outputs"):
        operation(array, OUTPUT)

  @parameterized.parameters(*USES)
  def test_other_uses_are_refused(self, name):
    with self.assertRaisesRegex(TypeError, "attention_outputs"):
      USES[name](OUTPUT)

  @parameterized.parameters(jax.grad, jax.value_and_grad)
  def test_the_gradient_of_a_function_that_returns_it(self, transformation):
    with self.assertRaisesRegex(TypeError, "only defined for scalar-output.*AttentionOutput") as e:
      transformation(attention)(X, X, X)
    self.assertIn("`attention(...).attention_outputs`", str(e.exception.__cause__))

  def test_an_attribute_that_no_array_has(self):
    with self.assertRaisesRegex(AttributeError, "^'AttentionOutput' object has no .* 'foo'$"):
      OUTPUT.foo  # pylint: disable=pointless-statement,no-member

  def test_debuggers_may_read_every_attribute(self):
    self.assertContainsSubset(["out", "lse", "_replace"], dict(inspect.getmembers(OUTPUT)))

  def test_hasattr_answers(self):
    self.assertFalse(hasattr(OUTPUT, "shape"))
    self.assertFalse(hasattr(OUTPUT, "foo"))


class TupleTest(absltest.TestCase):

  def test_out_is_attention_outputs(self):
    output = attention(X, X, X)
    self.assertIs(output.out, output.attention_outputs)

  def test_remains_a_named_tuple(self):
    out, weights, lse, cache = OUTPUT
    self.assertIs(out, OUTPUT.out)
    self.assertIs(lse, OUTPUT[2])
    self.assertIsNone(weights or cache)
    self.assertIsInstance(OUTPUT, tuple)
    self.assertLen(OUTPUT, 4)
    self.assertIsNone(OUTPUT._replace(lse=None).lse)

  def test_compares_with_tuples_and_with_what_is_no_array(self):
    specs = AttentionOutput("data", None)
    self.assertEqual(specs, AttentionOutput("data"))
    self.assertEqual(specs, ("data", None, None, None))
    self.assertNotEqual(specs, AttentionOutput("model"))
    self.assertEqual(OUTPUT, OUTPUT)
    self.assertNotIn(OUTPUT, (None, "data", specs))
    self.assertEqual({specs: 1}[AttentionOutput("data")], 1)

  def test_remains_a_pytree(self):
    doubled = jax.tree.map(lambda x: 2 * x, OUTPUT)
    self.assertIsInstance(doubled, AttentionOutput)
    np.testing.assert_array_equal(doubled.out, 2 * X)
    for moved in (jax.jit(lambda x: x)(OUTPUT), jax.device_get(OUTPUT), copy.deepcopy(OUTPUT),
                  pickle.loads(pickle.dumps(OUTPUT)), jax.block_until_ready(OUTPUT)):
      self.assertIsInstance(moved, AttentionOutput)
      np.testing.assert_array_equal(moved.out, X)
    self.assertEqual(jax.vmap(lambda x: x.out)(OUTPUT).shape, X.shape)
    self.assertEqual(jax.eval_shape(lambda x: x, OUTPUT).out.shape, X.shape)


if __name__ == "__main__":
  absltest.main()
