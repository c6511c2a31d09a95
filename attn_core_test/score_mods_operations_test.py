# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of functions of scores in the TPU and the GPU kernels, against float64."""

import functools
import os
import unittest

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import BlockSizes, OperationMetadata, attention, explain, score_mods
from attn_core import operations
from attn_core.benchmark.static import gpu as static_gpu, profile
from attn_core.kernels.gpu.flash import score_forms
from attn_core.score_mods import forms
from attn_core_test import gpu_cases, gpu_interpret, sampling, score_mods_operations as cases
from attn_core_test import tpu_interpret

TPU = OperationMetadata(platform="tpu")
METADATA = {"tpu": TPU, "gpu": OperationMetadata(platform="gpu", compute_capability="9.0")}
NAMES = ("kerple", *cases.OPERATIONS, "every")
SHAPES = {"query": (1, 150, 2, 16), "key": (1, 150, 1, 16), "value": (1, 150, 1, 16)}
# Names of numpy's for operations that are not named as its functions are.
OF_NUMPY = {"acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh",
            "atan": "arctan", "atanh": "arctanh", "is_finite": "isfinite", "pow": "power",
            "rem": "fmod"}
# Not of float32's inputs and results in float64: of other types, or their own derivatives.
OTHERS = ("add_any", "copy", "integer_pow", "stop_gradient")
ONE = np.concatenate([np.linspace(-40, 40, 2001), np.geomspace(1e-6, 1e4, 300),
                      -np.geomspace(1e-6, 1e4, 300), (0, np.inf, -np.inf, np.nan)]
                     ).astype(np.float32)
TWO = np.array([0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 1.7, -7.5, 100, np.inf, -np.inf, np.nan],
               np.float32)


def _arrays():
  rng = np.random.default_rng(0)
  return {"amount": cases.AMOUNT} | {
      name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def _run(name, arrays, **arguments):
  """Returns (out, lse) with a score mod that reads the number of `arrays`."""
  output = attention(arrays["query"], arrays["key"], arrays["value"], return_lse=True,
                     score_mod=cases.mod_of(name, arrays["amount"]), **arguments)
  return output.attention_outputs, output.lse


def _gradient(name, **arguments):
  """Returns a function of arrays to (gradients, (out, lse))."""
  def loss(arrays):
    found = _run(name, arrays, **arguments)
    return sum(jnp.sin(x).sum() for x in found), found
  return jax.jit(jax.grad(loss, has_aux=True))


class FormsTest(parameterized.TestCase):

  @parameterized.parameters(*(
      (kind, name) for kind, found in (("tpu", forms.COMMON), ("gpu", score_forms.FORMS))
      for name in found if name not in OTHERS and (kind == "tpu" or name not in forms.COMMON)))
  def test_equals_float64(self, kind, name):
    """Compares the form of an operation with numpy's, also at 0 and where it is not finite."""
    form = (score_forms.FORMS if kind == "gpu" else forms.COMMON)[name]
    given = [x.ravel() for x in np.meshgrid(TWO, TWO)] if name in ("pow", "rem") else [ONE]
    got = np.asarray(form(*map(jnp.asarray, given)), np.float64)
    wide, exact = [x.astype(np.float64) for x in given], getattr(np, OF_NUMPY.get(name, name))
    with np.errstate(all="ignore"):
      want, near = exact(*wide), exact(wide[0] * (1 + 2**-22), *wide[1:])
      narrow = want.astype(np.float32)
    finite = np.isfinite(narrow)
    np.testing.assert_array_equal(got[~finite], narrow[~finite])
    want, near = want[finite].astype(np.float64), near[finite].astype(np.float64)
    # Two roundings of the argument count, too: those of a large angle, or near a pole.
    moved = np.where(np.isfinite(near), abs(near - want), 0)
    np.testing.assert_array_less(
        abs(got[finite] - want), 3e-6 * np.maximum(1, abs(want)) + moved)

  def test_remainders_of_integers_are_exact(self):
    given = np.meshgrid(np.arange(-200, 200).astype(np.float32), np.arange(1.0, 30, dtype="f"))
    np.testing.assert_array_equal(score_forms.FORMS["rem"](*map(jnp.asarray, given)),
                                  np.fmod(*given))


  def test_remainders_of_large_quotients_are_in_range(self):
    x, y = np.float32([1e20, -1e20, 3e38, 1e38, 7]), np.float32([3, 3, 3, 1e-5, np.inf])
    rest = score_forms.FORMS["rem"](jnp.asarray(x), jnp.asarray(y))
    self.assertTrue((abs(rest) < y).all(), rest)
    self.assertEqual(rest[-1], 7)

  @parameterized.named_parameters(("tpu", forms.COMMON), ("gpu", score_forms.FORMS))
  def test_narrow_floats_are_computed_in_32_bits(self, of_platform):
    x = jnp.arange(1, 200, dtype=jnp.bfloat16)
    def run(x):
      return jnp.sin(x), jnp.cos(x), jnp.tan(x), jnp.log1p(x), x ** jnp.full_like(x, 9.5)
    traced = jax.make_jaxpr(run)(x)
    got = operations.evaluate(traced.jaxpr, traced.consts, [x], forms.binder(of_platform))
    for found, y in zip(got, run(np.arange(1, 200).astype(np.float64)), strict=True):
      self.assertEqual(found.dtype, jnp.bfloat16)
      np.testing.assert_allclose(np.asarray(found, np.float64), y, rtol=2**-8 + 1e-4)


class DerivativesTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in NAMES[:-1])
  def test_equals_float64(self, name):
    """Compares a function and its derivatives by a tile of scores and a number, in their forms."""
    rng, at = np.random.default_rng(0), [np.int32([[3]]), np.int32([[5]]), *(
        x.astype(np.int32) for x in np.meshgrid(np.arange(40), np.arange(45), indexing="ij"))]
    score, d_result = (rng.normal(size=(40, 45)).astype(np.float32) for _ in range(2))
    given, function = (score, np.full((40, 45), cases.AMOUNT)), cases.function_named(name)
    def of_tpu(function, given, d_result):
      result, pull = jax.vjp(lambda score, amount: function(score, *at, amount), *given)
      return result, *pull(d_result)
    def of_gpu(given, d_result):
      def both(given, tangents):
        return jax.jvp(lambda score, amount: function(score, *at, amount), given, tangents)
      found = []
      for tangents in ((1.0, 0.0), (0.0, 1.0)):
        arguments = given, tuple(jnp.full_like(score, x) for x in tangents)
        traced = jax.make_jaxpr(both)(*arguments)
        found.append(operations.evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(arguments),
                                         forms.binder(score_forms.FORMS)))
      return found[0][0], *(d_result * slope for _, slope in found)
    in_forms = functools.partial(of_tpu, forms.in_forms(function, forms.COMMON))
    got = jax.jit(lambda *x: (in_forms(*x), of_gpu(*x)))(given, d_result)
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda x: x.astype(np.float64), (given, d_result))
      want = jax.jit(functools.partial(of_tpu, function))(*wide)
    for found, platform in zip(got, METADATA, strict=True):
      for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(
            x, y, rtol=0, atol=2e-5 * max(1, abs(y).max()), err_msg=platform)


class TpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("kerple",)))
  def test_value_and_gradients(self, name):
    arrays = _arrays()
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(_gradient(
          name, mechanism="flash_attn2", metadata=TPU,
          block_sizes=BlockSizes(128, 128, 128, 128))(arrays))
    with jax.enable_x64(True):
      want = _gradient(name, mechanism="vanilla")(
          {k: np.asarray(x, np.float64) for k, x in arrays.items()})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x, y, rtol=0, atol=2e-5 * max(1, abs(y).max())), got, want)


@gpu_interpret.interprets
class GpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("kerple",)))
  def test_value_and_gradients(self, name):
    gpu_cases.check_gradients(cases.gpu_case(name))


class ExplainTest(parameterized.TestCase):

  @parameterized.product(name=NAMES, platform=[*METADATA])
  def test_the_kernels_take_them(self, name, platform):
    arrays = {k: jax.ShapeDtypeStruct((*x[:3], 64), jnp.bfloat16) for k, x in SHAPES.items()}
    found = explain(**arrays, score_mod=cases.mod_of(name), metadata=METADATA[platform])
    self.assertEqual(found.chosen, "flash_attn2", found)

  @parameterized.parameters(
      (lambda s, b, h, q, k: jax.lax.lgamma(1 + s * s), "which applies lgamma"),
      (lambda s, b, h, q, k: jax.lax.erf(s), "which applies erf"),
      (lambda s, b, h, q, k: _of_a_steep_rule(s), "whose derivative applies erf"),
      (lambda s, b, h, q, k: _of_no_rule(s), "which cannot be differentiated"))
  def test_names_others(self, function, reason):
    arrays = {k: jax.ShapeDtypeStruct((*x[:3], 64), jnp.bfloat16) for k, x in SHAPES.items()}
    for metadata in METADATA.values():
      found = explain(**arrays, score_mod=score_mods.custom(function), metadata=metadata)
      self.assertEqual(found.chosen, "blockwise")
      self.assertIn(reason, str(found))


@jax.custom_jvp
def _of_a_steep_rule(x):
  return 2 * x


_of_a_steep_rule.defjvp(lambda primals, tangents: (
    2 * primals[0], jax.lax.erf(primals[0]) * tangents[0]))


@jax.custom_jvp
def _of_no_rule(x):
  return 2 * x


@_of_no_rule.defjvp
def _(primals, tangents):
  raise TypeError("there is none")


@unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
class TpuCompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("kerple", "v6e")], *(("kerple", chip) for chip in ("v5e", "v5p", "tpu7x")),
      *((name, "v6e") for name in cases.OPERATIONS)))
  def test_compiles(self, name, chip):
    """Compiles forward and backward, without a chip."""
    place = SingleDeviceSharding(profile.devices(chip)[0])
    shapes = {k: jax.ShapeDtypeStruct(
        x.shape, x.dtype if k == "amount" else jnp.bfloat16, sharding=place)
              for k, x in _arrays().items()}
    text = _gradient(name, mechanism="flash_attn2", metadata=TPU).trace(shapes).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)
    self.assertNotIn(" while(", text)


@unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
class GpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES[:-1], ("kerple",)))
  def test_compiles(self, name):
    """Compiles forward and backward to machine code for Hopper."""
    kernels = static_gpu.measure(
        f"{cases.__name__}:gpu_programs", [f"{name}_forward", f"{name}_backward"])
    for kernel in kernels:
      self.assertNotIsInstance(kernel, dict, kernel)
    self.assertGreater(len(kernels), 3)


if __name__ == "__main__":
  absltest.main()
