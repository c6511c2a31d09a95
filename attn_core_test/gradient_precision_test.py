# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients in 16 bits are at least as precise as those of `jax.nn.dot_product_attention`.

Measured against the oracle in float64, where attention is random, where it is peaked, and where
queries, keys and values are equal, so that nearly all weight is on one key: there the gradient of a
logit is a small difference of large numbers, d_out . value and delta, and precise only where both
are (see `kernels.xla.dense` and `autodiff.rounding`).
"""

import functools
import os

# See gpu_test.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagesMetadata, PagesV2, PagesV3,
                       attention, masks)
from attn_core.autodiff import rounding
from attn_core.caches import pages
from attn_core.kernels.gpu.flash import forward as gpu_forward
from attn_core.kernels.gpu.split_kv import decode as gpu_decode
from attn_core.kernels.tpu.flash import forward as tpu_forward
from attn_core.kernels.xla import decode, flash, plain
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import gpu_interpret, sampling, tpu_interpret

B, T, H, K, D = 2, 96, 4, 2, 64
KINDS = ("random", "peaked", "equal")
DTYPES = ("bfloat16", "float16")
# A gradient's relative error: that of jax.nn's times this, and a part of the dtype's epsilon.
# On a CPU, jax.nn does not round the gradients of logits to 16 bits, as the kernels do.
RATIO, FLOORS = 1.1, {"cpu": 1 / 4, "tpu": 3 / 8, "gpu": 3 / 8}
ALL = ("query", "key", "value", "bias", "sinks")
# Mechanism -> operands whose gradients it has.
MECHANISMS = {"vanilla": ALL, "blockwise": ALL, "flash_attn2": ALL, "sdpa": ALL[:4],
              "autoregressive_decodeattn": (*ALL[:3], "sinks")}
CASES = tuple((f"{mechanism}_{kind}_{dtype}", mechanism, kind, dtype)
              for mechanism in MECHANISMS for kind in KINDS for dtype in DTYPES
              if (mechanism, dtype) != ("sdpa", "float16"))  # refused on a CPU
# flash_attn2 on a CPU is the program of blockwise.
QUICK = tuple(case for case in CASES if case[1] != "flash_attn2" and (
    case[1:3] != ("sdpa", "random")))


@functools.cache
def inputs(kind: str, dtype: str, names: tuple[str, ...],
           tokens: int = T) -> tuple[dict, jax.Array]:
  """Returns the operands of these names, and the cotangent of the output."""
  rng = np.random.default_rng(KINDS.index(kind))
  normal = lambda *shape: rng.standard_normal(shape)
  found = {name: normal(B, tokens, heads, D) for name, heads in zip(ALL, (H, K, K))}
  found |= {"bias": normal(1, H, tokens, tokens), "sinks": normal(H)}
  if kind == "peaked":
    found["query"] *= 5
  if kind == "equal":
    found["key"] *= 1.5
    found["query"], found["value"] = found["key"].repeat(H // K, 2), found["key"]
  return ({name: jnp.asarray(found[name], dtype) for name in names},
          jnp.asarray(normal(B, tokens, H, D), dtype))


@functools.cache  # the same object, so that jax.jit compiles it once
def gradient_of(run):
  """Returns (arrays, cotangent) -> gradient of sum(run(arrays) * cotangent)."""
  loss = lambda arrays, cotangent: (run(arrays).astype(cotangent.dtype) * cotangent).sum(
      dtype=jnp.promote_types(cotangent.dtype, jnp.float32))
  return jax.grad(loss)


def gradients(run, arrays: dict, cotangent: jax.Array, evaluate=lambda f, *x: f(*x)) -> dict:
  """Returns gradients in float64 of sum(run(arrays) * cotangent), computed by evaluate(f, *x)."""
  found = evaluate(gradient_of(run), arrays, cotangent)
  return {name: np.asarray(x, np.float64) for name, x in found.items()}


def by_oracle(arrays):
  """Returns the oracle's output."""
  spec, sinks = AttentionSpec(jax.tree.structure(masks.causal()), D**-0.5), arrays.get("sinks")
  return oracle.attention(Operands(
      arrays["query"], arrays["key"], arrays["value"], arrays.get("bias"), MaskOperands(()),
      None if sinks is None else sinks[None]), spec).attention_outputs


exact_gradient = jax.jit(gradient_of(by_oracle), compiler_options=sampling.LEAST)


@functools.cache
def exact(kind: str, dtype: str, names: tuple[str, ...], tokens: int = T) -> dict:
  """Returns the oracle's gradients in float64."""
  with jax.enable_x64(True):
    widened = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)),
                           inputs(kind, dtype, names, tokens))
    return gradients(by_oracle, *widened, evaluate=lambda _, *x: exact_gradient(*x))


def jax_nn(arrays: dict) -> jax.Array:
  """Computes causal attention by JAX; a sink is a key of its own without a value."""
  query, key, value, bias = (arrays.get(name) for name in ALL[:4])
  tokens = query.shape[1]
  mask, sinks = jnp.tril(jnp.ones((tokens, tokens), bool)), arrays.get("sinks")
  if sinks is not None:
    key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
    bias = jnp.zeros((1, H, tokens, tokens), query.dtype) if bias is None else bias
    sinks = jnp.broadcast_to(sinks[None, :, None, None], (1, H, tokens, 1))
    bias = jnp.concatenate([bias, sinks], -1)
    mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)
  return jax.nn.dot_product_attention(query, key, value, bias, mask[None, None],
                                      implementation="xla")


compiled_jax_nn = jax.jit(jax_nn)


@functools.cache
def errors_of_jax(kind: str, dtype: str, names: tuple[str, ...], tokens: int = T) -> dict:
  """Returns `errors` of jax.nn."""
  # Compiled for a CPU, JAX's function refuses float16; uncompiled, it computes it.
  run = jax_nn if dtype == "float16" else compiled_jax_nn
  return errors(gradients(run, *inputs(kind, dtype, names, tokens)),
                exact(kind, dtype, names, tokens))


def errors(found: dict, expected: dict) -> dict:
  """Returns (root mean square, maximum) of the errors, relative to those of the gradient."""
  return {name: (np.sqrt(((found[name] - y)**2).mean() / (y**2).mean()),
                 np.abs(found[name] - y).max() / np.abs(y).max()) for name, y in expected.items()}


class ComparingTest(parameterized.TestCase):

  def compare(self, found, floor, *of_inputs):
    theirs, dtype = errors_of_jax(*of_inputs), of_inputs[1]
    for name, ours in errors(found, exact(*of_inputs)).items():
      for what, x, y in zip(("mean", "maximum"), ours, theirs[name]):
        self.assertLessEqual(x, RATIO * y + floor * float(jnp.finfo(dtype).eps),
                             f"{what} relative error of the gradient of {name}; jax.nn's is {y}")


@functools.cache
def call(mechanism: str, platform: str):
  """Returns a mechanism's output of arrays by name, compiled once for all arrays of a shape."""
  metadata = OperationMetadata(platform=platform, compute_capability="9.0")
  return jax.jit(lambda arrays: attention(
      arrays["query"], arrays["key"], arrays["value"], mechanism=mechanism,
      bias=arrays.get("bias"), softmax_aux=arrays.get("sinks"),
      metadata=metadata).attention_outputs)


class GradientPrecisionTest(ComparingTest):

  def check(self, mechanism, kind, dtype, platform="cpu", names=None, tokens=T, **evaluate):
    of_inputs = kind, dtype, names or MECHANISMS[mechanism], tokens
    found = gradients(call(mechanism, platform), *inputs(*of_inputs), **evaluate)
    self.compare(found, FLOORS[platform], *of_inputs)

  @parameterized.named_parameters(*QUICK)
  def test_as_precise_as_jax(self, mechanism, kind, dtype):
    self.check(mechanism, kind, dtype)

  @sampling.slow_parameters(*(case for case in CASES if case not in QUICK), named=True)
  def test_as_precise_as_jax_slow(self, mechanism, kind, dtype):
    self.check(mechanism, kind, dtype)

  @parameterized.product(kind=KINDS, dtype=DTYPES, names=(ALL[:3], ALL[:4], ALL))
  def test_few_tokens(self, kind, dtype, names):
    """Checks rows of few keys: without a bias in one piece, with a bias in loops of one block."""
    self.check("blockwise", kind, dtype, names=names, tokens=16)

  @parameterized.parameters(*sampling.with_slow(
      [("flash_attn2", "equal")], ("flash_attn2", "peaked"),
      ("autoregressive_decodeattn", "equal")))
  def test_on_a_tpu(self, mechanism, kind):
    with tpu_interpret.interpreted():
      self.check(mechanism, kind, "bfloat16", "tpu")

  @sampling.slow_parameters(
      *((mechanism, "equal", dtype) for mechanism in ("flash_attn2", "autoregressive_decodeattn")
        for dtype in DTYPES))
  @gpu_interpret.interprets
  def test_on_a_gpu(self, mechanism, kind, dtype):
    self.check(mechanism, kind, dtype, "gpu", evaluate=gpu_interpret.interpret)


class PagesTest(ComparingTest):
  """Gradients through pages, compared with those of jax.nn for the same keys gathered."""

  names = ("query", "key", "value", "sinks")
  requests = PagesMetadata(np.int32([[5, 0, 3], [1, 4, 2]]), np.int32([T] * B),
                           np.arange(B + 1, dtype=np.int32) * T)

  def check_pages(self, layout, kind, dtype, platform="cpu", **evaluate):
    metadata = OperationMetadata(platform=platform, compute_capability="9.0")
    def run(arrays):
      query, key, value = (arrays[name].reshape(B * T, -1, D) for name in self.names[:3])
      cache, new = pages.init(layout, 6, 32, Heads(K, D, D), dtype), (key, value)
      if layout is PagesV2:
        cache = pages.append(cache, *new, pages.slots(self.requests, 32, B * T))
        new = None, None
      return attention(query, *new, layout="thd", cache_view=cache, cache_metadata=self.requests,
                       softmax_aux=arrays["sinks"],
                       metadata=metadata).attention_outputs.reshape(B, T, H, D)
    found = gradients(jax.jit(run), *inputs(kind, dtype, self.names), **evaluate)
    self.compare(found, FLOORS[platform], kind, dtype, self.names)

  @parameterized.parameters(*sampling.with_slow(
      [(PagesV2, "equal", "bfloat16"), (PagesV3, "peaked", "bfloat16"),
       (PagesV2, "equal", "float16")],
      (PagesV3, "equal", "bfloat16"), (PagesV2, "peaked", "bfloat16"),
      *((layout, "random", dtype) for layout in (PagesV2, PagesV3) for dtype in DTYPES)))
  def test_pages(self, layout, kind, dtype):
    self.check_pages(layout, kind, dtype)

  @sampling.slow_parameters((PagesV2, "equal"), (PagesV3, "equal"))
  def test_pages_on_a_tpu(self, layout, kind):
    with tpu_interpret.interpreted():
      self.check_pages(layout, kind, "bfloat16", "tpu")

  @sampling.slow_parameters((PagesV2, "equal"), (PagesV3, "equal"))
  @gpu_interpret.interprets
  def test_pages_on_a_gpu(self, layout, kind):
    self.check_pages(layout, kind, "bfloat16", "gpu", evaluate=gpu_interpret.interpret)


class RoundingTest(parameterized.TestCase):

  @parameterized.parameters(*DTYPES)
  def test_what_is_split_and_joined_keeps_its_digits(self, dtype):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x = x * np.float32(10.0)**np.arange(-9, 1).repeat(100)
    out, rest, joined = jax.jit(lambda x: (*rounding.split(x, dtype), rounding.join(
        *rounding.split(x, dtype)[:1], x, rounding.split(x, dtype)[1]).out))(x)
    np.testing.assert_array_equal(out, x.astype(dtype))
    self.assertEqual(rest.dtype, dtype)
    normal = np.abs(x) >= float(jnp.finfo(dtype).tiny)
    self.assertGreater(normal.sum(), 400)
    info = jnp.finfo(dtype)
    np.testing.assert_allclose(joined[normal], x[normal],
                               rtol=float(info.eps) / 2**(info.nmant + 1))
    least = float(jnp.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(joined, x, atol=least, rtol=1e-3)

  @parameterized.parameters(*DTYPES)
  def test_what_is_not_finite(self, dtype):
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3e38])
    out, rest = jax.jit(rounding.split, static_argnums=1)(x, dtype)
    self.assertEqual(out.dtype, dtype)
    np.testing.assert_array_equal(np.float32(out), np.float32(x.astype(dtype)))
    np.testing.assert_array_equal(np.float32(rest[:3]), 0)
    np.testing.assert_array_equal(rounding.join(out, x, rest).out[:3], x[:3])

  @parameterized.named_parameters(
      ("plain", plain), ("flash", flash), ("decode", decode), ("tpu", tpu_forward),
      ("gpu", gpu_forward), ("gpu_decode", gpu_decode))
  def test_kernels_write_exact_outputs(self, kernel):
    x, ids = jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16"), jnp.zeros((1, 128), jnp.int32)
    arrays, structure = jax.tree.flatten(masks.segments(ids))
    operands = Operands(x, x, x, None, MaskOperands(tuple(arrays)))
    for spec, dtype in ((AttentionSpec(structure, 1.0), "bfloat16"),
                        (rounding.exact(AttentionSpec(structure, 1.0)), "float32")):
      found = jax.eval_shape(lambda x, spec=spec: kernel.forward(x, spec, BlockSizes()), operands)
      self.assertEqual((found.out.dtype, found.lse.dtype), (dtype, "float32"))

  def test_memory_of_what_is_kept(self):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), "bfloat16")
    run = lambda q, k, v: jax.linearize(
        lambda *a: attention(*a, mechanism="blockwise").attention_outputs, q, k, v)
    out, linear = jax.eval_shape(run, x, x, x)
    saved = sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(linear))
    # Query, key, value, output and its rest; an lse per query and head.
    self.assertLessEqual(saved, 5 * x.size * 2 + 256 * 4 * 4 + 4096)


if __name__ == "__main__":
  absltest.main()
