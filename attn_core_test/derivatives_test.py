# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every order and mixture, under every transformation, against the oracle."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, attention
from attn_core_test import property_cases, sampling

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)

CASE = next(case for case in property_cases.CASES if case.name == "everything")
SMALL = next(case for case in property_cases.CASES if case.name == "causal_gqa")


def run_of(case):
  """Returns the block-wise kernel on a case: differentiable arguments -> (output, lse)."""
  def run(arrays):
    output = attention(**case.arguments, **arrays, mechanism="flash_attn2", return_lse=True,
                       block_sizes=BlockSizes(4, 3, 5, 4, 1))
    return output.attention_outputs, output.lse
  return run


def both_of(case):
  """Returns (function, what compiles functions of it) of the kernel and of the oracle."""
  least = functools.partial(jax.jit, compiler_options=sampling.LEAST)
  return (run_of(case), jax.jit), (property_cases.reference(case), least)


def loss_of(run):
  def loss(arrays):
    out, lse = run(arrays)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    weight = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return (jnp.sin(out) * weight).sum() + (jnp.cos(jnp.arange(lse.size)).reshape(lse.shape)
                                            * lse**2).sum()
  return loss


def close(got, want):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8), got, want)


def random_tangents(arrays, seed=3):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), arrays)


def dot(a, b):
  return sum(jax.tree.leaves(jax.tree.map(lambda x, y: (x * y).sum(), a, b)))


MODES = {
    "jvp": lambda f, x, v: jax.jvp(f, (x,), (v,))[1],
    "grad": lambda f, x, v: jax.grad(f)(x),
    "forward_over_reverse": lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,)),
    "reverse_over_reverse": lambda f, x, v: jax.grad(lambda x: dot(jax.grad(f)(x), v))(x),
    "forward_over_forward": lambda f, x, v: jax.jvp(
        lambda x: jax.jvp(f, (x,), (v,))[1], (x,), (v,)),
    "reverse_over_forward": lambda f, x, v: jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x),
    "linearize": lambda f, x, v: jax.linearize(f, x)[1](v),
    "third_order_forward": lambda f, x, v: jax.jvp(
        lambda x: jax.jvp(jax.grad(f), (x,), (v,))[1], (x,), (v,))[1],
    "vmap_of_forward_over_reverse": lambda f, x, v: jax.vmap(
        lambda s: jax.jvp(jax.grad(f), (x,), (jax.tree.map(lambda t: s * t, v),))[1])(
            jnp.array([1.0, -2.0])),
}


class DerivativesTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(mode, mode) for mode in MODES])
  def test_mode(self, mode):
    arrays = property_cases.operands(CASE, "float64")
    along = random_tangents(arrays)
    got, want = (jitted(lambda x, v, f=loss_of(run): MODES[mode](f, x, v))(arrays, along)
                 for run, jitted in both_of(CASE))
    close(got, want)

  def test_some_operands_only(self):
    arrays = property_cases.operands(CASE, "float64")
    for name in arrays:
      along = random_tangents(arrays)[name]
      both = []
      for run, jitted in both_of(CASE):
        f = lambda x, run=run: loss_of(run)({**arrays, name: x})
        both.append(jitted(lambda x, f=f: (jax.grad(f)(x), jax.jvp(f, (x,), (along,))[1]))(
            arrays[name]))
      close(*both)

  def test_hessian_of_a_scalar_direction(self):
    arrays = property_cases.operands(SMALL, "float64")
    along = random_tangents(arrays)
    both = []
    for run, jitted in both_of(SMALL):
      line = lambda s, run=run: loss_of(run)(jax.tree.map(lambda x, v: x + s * v, arrays, along))
      both.append(jitted(jax.hessian(line))(0.1))
    close(*both)

  def test_scan_over_layers(self):
    arrays = property_cases.operands(SMALL, "float64")
    both = []
    for run, jitted in both_of(SMALL):
      def layers(arrays, run=run):
        step = lambda q, scale: (run({**arrays, "query": q * scale})[0], None)
        return jax.lax.scan(step, arrays["query"], jnp.array([1.0, 0.5, 2.0]))[0].sum()
      both.append(jitted(jax.grad(layers))(arrays))
    close(*both)

  def test_the_lse_alone_has_a_gradient(self):
    arrays = property_cases.operands(SMALL, "float64")
    got, want = (jitted(jax.grad(lambda x, run=run: (run(x)[1]**2).sum()))(arrays)
                 for run, jitted in both_of(SMALL))
    close(got, want)
    self.assertGreater(float(jnp.abs(got["query"]).max()), 0.1)

  def test_shard_map_of_the_caller(self):
    arrays = property_cases.operands(SMALL, "float64")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    want = jax.jit(jax.grad(loss_of(run_of(SMALL))))(arrays)
    for check_vma in (True, False):
      run = jax.shard_map(run_of(SMALL), mesh=mesh, in_specs=(spec,), out_specs=spec,
                          check_vma=check_vma)
      close(jax.jit(jax.grad(loss_of(run)))(arrays), want)
      close(jax.jit(lambda x: jax.jvp(jax.grad(loss_of(run)), (x,), (x,)))(arrays)[0], want)

  def test_shard_map_with_shared_keys(self):
    # All devices share the keys: their cotangents must be summed exactly once.
    arrays = property_cases.operands(SMALL, "float64")
    arrays = {"query": arrays["query"], **{k: arrays[k][:1] for k in ("key", "value")}}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    p = jax.sharding.PartitionSpec
    specs = {"query": p("x"), "key": p(), "value": p()}
    run = jax.shard_map(run_of(SMALL), mesh=mesh, in_specs=(specs,), out_specs=p("x"))
    def loop(arrays):
      outs = [run_of(SMALL)({**arrays, "query": arrays["query"][i:i + 1]}) for i in range(2)]
      return jax.tree.map(lambda *x: jnp.concatenate(x), *outs)
    close(jax.jit(jax.grad(loss_of(run)))(arrays), jax.jit(jax.grad(loss_of(loop)))(arrays))


  @parameterized.parameters("flash_attn2", "autoregressive_decodeattn")
  def test_vmap_over_nothing(self, mechanism):
    arrays = property_cases.operands(SMALL, "float64")
    nothing = jnp.zeros((0, *arrays["query"].shape))
    def loss(query, key):
      return attention(**{**arrays, "query": query, "key": key},
                       mechanism=mechanism).attention_outputs.sum()
    both = jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None))
    values, (d_query, d_key) = jax.jit(both)(nothing, arrays["key"])
    self.assertEqual(values.shape, (0,))
    self.assertEqual(d_query.shape, nothing.shape)
    self.assertEqual(d_key.shape, (0, *arrays["key"].shape))
    total = jax.grad(lambda key: jax.vmap(loss, (0, None))(nothing, key).sum())(arrays["key"])
    np.testing.assert_array_equal(total, jnp.zeros_like(arrays["key"]))

  @parameterized.parameters((0, 1), (1, 0), (2, 4))
  def test_vmap_of_one_operand(self, number, axis):
    """Checks a batch of one row, where the other two operands are not mapped."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, length, heads, 8)).astype(np.float32)
              for length, heads in ((5, 4), (6, 2), (6, 2))]
    mapped = rng.normal(size=(3, *arrays[number].shape)).astype(np.float32)
    run = lambda *x: attention(*x, mechanism="blockwise", causal=False).attention_outputs
    given = lambda x: [*arrays[:number], x, *arrays[number + 1:]]
    axes = [axis if n == number else None for n in range(3)]
    found = jax.jit(jax.vmap(run, axes))(*given(np.moveaxis(mapped, 0, axis)))
    one = jax.jit(run)
    np.testing.assert_allclose(found, [one(*given(x)) for x in mapped], rtol=1e-5, atol=1e-5)


class RematTest(parameterized.TestCase):

  def count(self, policy, primitive):
    arrays = property_cases.operands(SMALL, "float32")
    f = jax.checkpoint(loss_of(run_of(SMALL)), policy=policy)
    return str(jax.make_jaxpr(jax.grad(f))(arrays)).count(primitive + "[")

  def test_named_residuals_save_the_recomputation(self):
    names = jax.checkpoint_policies.save_only_these_names
    everything = ("attn_query", "attn_key", "attn_value", "attn_output", "attn_lse")
    self.assertEqual(self.count(names(*everything), "attention_forward"), 1)
    self.assertEqual(self.count(names("attn_output"), "attention_forward"), 2)
    self.assertEqual(self.count(jax.checkpoint_policies.nothing_saveable, "attention_forward"), 2)
    save_all = jax.checkpoint_policies.everything_saveable
    self.assertEqual(self.count(save_all, "attention_forward"), 1)
    self.assertEqual(self.count(names(*everything), "attention_backward"), 1)

  @parameterized.parameters("nothing_saveable", "everything_saveable", "dots_saveable")
  def test_gradients_stay(self, policy):
    arrays = property_cases.operands(SMALL, "float64")
    want = jax.jit(jax.grad(loss_of(run_of(SMALL))))(arrays)
    close(jax.jit(jax.grad(jax.checkpoint(
        loss_of(run_of(SMALL)), policy=getattr(jax.checkpoint_policies, policy))))(arrays), want)
    def by_argument(arrays):
      output = attention(**arrays, mechanism="flash_attn2", return_lse=True, policy=policy,
                         block_sizes=BlockSizes(4, 3, 5, 4, 1))
      return output.attention_outputs, output.lse
    close(jax.jit(jax.grad(loss_of(by_argument)))(arrays), want)


if __name__ == "__main__":
  absltest.main()
