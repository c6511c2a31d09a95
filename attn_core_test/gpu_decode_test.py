# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding by the GPU kernels: interpreted on a CPU against the oracle, and compiled for a Hopper.

See gpu_test for what the tests of all GPU kernels share.
"""

import os

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
import functools
import itertools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, LatentOptions, OperationMetadata, attention, explain, masks
from attn_core.caches import dense, latent, quantize
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.split_kv import decode, kernel as split_kv, quantized_kv
from attn_core.types import MaskOperands
from attn_core_test import gpu_cases, gpu_faults, gpu_interpret, gpu_machine_code, sampling
from attn_core_test.gpu_cases import Case
from attn_core_test.gpu_interpret import interpret

BLOCKS = BlockSizes(block_kv=128)
# The cases that differ most; the others are slow.
FEW = ("several_splits", "rows_beyond_one_line", "width_128",
       "group_of_32_soft_cap_sinks_float16", "width_128_float8",
       "latent_128_heads", "latent_128_heads_int8", "score_mods", "score_mods_128")
NAME = "autoregressive_decodeattn"
CPU = {"metadata": OperationMetadata(platform="cpu")}


CASES = gpu_cases.DECODED


@gpu_interpret.interprets
class InterpretTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in sampling.names(CASES, FEW))
  def test_equals_the_oracle(self, name):
    case = CASES[name]
    operands = case.operands()
    found = interpret(case.decode, operands)
    for what, x, y, tolerance in zip(("out", "lse"), found, case.oracle(operands),
                                     (gpu_cases.TOLERANCE[case.dtype], 1e-5)):
      np.testing.assert_allclose(np.float32(x), y, rtol=0, atol=tolerance, err_msg=what)


LENGTHS = np.array([200, 0, 65, 128])
STARTS = np.array([3, 0, 0, 70])


def arrays(rows, number=None):
  """Returns query, key, value of some rows of a batch; hidden slots hold `number` if given."""
  rng = np.random.default_rng(1)
  query, key, value = (rng.normal(size=(4, n, heads, 64))
                       for n, heads in ((1, 4), (200, 2), (200, 2)))
  if number is not None:
    slot = np.arange(200)
    seen = (slot >= STARTS[:, None]) & (slot < LENGTHS[:, None])
    key[~seen] = value[~seen] = number
  return [jnp.asarray(x[rows], jnp.bfloat16) for x in (query, key, value)]


def quantized_arrays(rows, dtype, with_nan=False):
  """Returns quantized arrays and scales; with_nan: hidden slots and their scales hold NaN."""
  query, *cache = arrays(np.arange(4))
  slot = np.arange(200)
  seen = ((slot >= STARTS[:, None]) & (slot < LENGTHS[:, None]))[..., None]
  (key, key_scale), (value, value_scale) = (quantize.quantize(x, dtype) for x in cache)
  if with_nan:
    key_scale, value_scale = (jnp.where(seen, x, jnp.nan) for x in (key_scale, value_scale))
    odd = jnp.full((), -128 if dtype == "int8" else jnp.nan, dtype)
    key, value = (jnp.where(seen[..., None], x, odd) for x in (key, value))
  return [x[rows] for x in (query, key, value, key_scale, value_scale)]


def cache_of(rows, key, value, *scales):
  starts, lengths = (jnp.asarray(x, jnp.int32)[rows] for x in (STARTS, LENGTHS))
  return dense.DenseCache(key, value, starts, lengths, jnp.zeros(lengths.shape, bool), *scales)


def decoded(rows, query, *cache, metadata=gpu_cases.HOPPER):
  """Returns (out, lse) of the entry point."""
  output = attention(
      query, None, None, cache_view=cache_of(rows, *cache), mechanism=NAME,
      mode="__autoregressive__", metadata=metadata, block_sizes=BLOCKS, return_lse=True)
  return output.attention_outputs, output.lse


@gpu_interpret.interprets
class RowsTest(parameterized.TestCase):

  def test_a_row_has_the_same_bits_in_every_batch_with_any_hidden_slots(self):
    rows, order = np.arange(4), np.arange(4)[::-1]
    whole = interpret(decoded, rows, *arrays(rows))
    # The first key is in a block that its query sees whole.
    self.same(whole, order, arrays(order, np.nan), ((1, 0, 100, 1), (2, 0, 199, 0)))
    self.same(whole, rows[2:3], arrays(rows[2:3], np.inf), ())

  def same(self, whole, order, given, places):
    """Checks that rows have the same bits, but NaN where a query sees NaN.

    Args:
      whole: the results of `decoded` for all rows.
      order: numbers of the given rows.
      given: arrays of these rows.
      places: (array, row, slot, head) of elements to set to NaN.
    """
    for name, row, slot, head in places:
      at = (list(order).index(row), slot, head, 5)[:given[name].ndim]
      given[name] = given[name].at[at].set(jnp.nan)
    for x, y in zip(whole, interpret(decoded, order, *given)):
      x, y = (np.array(z, np.float32).reshape(len(z), 2, 2, -1) for z in (x, y))
      for _, row, _, head in places:
        x[row, head] = np.nan
      np.testing.assert_array_equal(x[order], y, err_msg=f"{order} {places}")

  def test_quantized_rows_have_the_same_bits_too(self):
    for dtype in sampling.with_slow(("float8_e4m3fn",), "int8"):
      rows, order = np.arange(4), np.arange(4)[::-1]
      whole = interpret(decoded, rows, *quantized_arrays(rows, dtype))
      for x, y in zip(whole, decoded(rows, *quantized_arrays(rows, dtype), **CPU)):
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=1e-2)
      # The first scale is in a block that its query sees whole.
      scales = ((4, 0, 100, 1), (3, 2, 64, 0), (4, 2, 64, 1))
      numbers = ((2, 0, 199, 0), (1, 3, 100, 0)) if dtype != "int8" else ()
      given = quantized_arrays(order, dtype, with_nan=True)
      self.same(whole, order, given, scales + numbers)

  @sampling.slow("gradients of decoding on a GPU")
  def test_gradients_are_those_of_plain_xla(self):
    def loss(arrays, **more):
      out, lse = decoded(np.arange(1), *arrays, **more)
      return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(lse > -np.inf, lse, 0).sum()
    given = [x[:1] for x in arrays(np.arange(4))]
    found = interpret(jax.grad(loss), given)
    want = jax.grad(lambda x: loss(x, **CPU))(given)
    for x, y in zip(found, want):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=2e-2)


LATENT = "multi_latent_attention"
OPTIONS = LatentOptions(64, 64, 32)


def latent_arrays(rows, number=None):
  """Returns queries and latent rows of some batch rows; hidden slots hold `number` if given."""
  rng = np.random.default_rng(2)
  query, latents = rng.normal(size=(4, 1, 34, 128)), rng.normal(size=(4, 200, 128))
  if number is not None:
    slot = np.arange(200)
    latents[(slot < STARTS[:, None]) | (slot >= LENGTHS[:, None])] = number
  return [jnp.asarray(x[rows], jnp.bfloat16) for x in (query, latents)]


def latent_decoded(rows, query, latents, metadata=gpu_cases.HOPPER):
  """Returns (out, lse) of the entry point for latent rows."""
  starts, lengths = (jnp.asarray(x, jnp.int32)[rows] for x in (STARTS, LENGTHS))
  output = attention(
      query, None, None, mechanism=LATENT, latent_options=OPTIONS, mode="__autoregressive__",
      cache_view=latent.LatentCache(latents, starts, lengths, jnp.zeros(lengths.shape, bool)),
      metadata=metadata, block_sizes=BLOCKS, return_lse=True)
  return output.attention_outputs, output.lse


@gpu_interpret.interprets
class LatentTest(parameterized.TestCase):

  def test_hidden_numbers_reach_nothing_and_visible_ones_their_rows(self):
    order = np.array([3, 2, 0])
    query, rows = latent_arrays(order, np.nan)
    # Beyond the latents in a block that is partly hidden, and in one that is seen whole.
    given = rows.at[0, 125, 100].set(jnp.nan).at[2, 100, 5].set(jnp.nan)
    found = interpret(latent_decoded, order, query, given)
    want = jax.jit(functools.partial(latent_decoded, **CPU))(order, *latent_arrays(order))
    for x, y, tolerance in zip(found, want, (1e-2, 1e-5)):
      x, y = np.array(x, np.float32), np.array(y, np.float32)
      self.assertTrue(np.isnan(x[[0, 2]]).all())
      np.testing.assert_allclose(x[1], y[1], atol=tolerance)

  @parameterized.parameters("bfloat16", "float8_e4m3fn")
  def test_padded_rows_of_a_dense_cache(self, dtype):
    rng, widths = np.random.default_rng(5), (128, 64)
    query, rows = (jnp.asarray(rng.normal(size=(2, *shape, sum(widths))), "bfloat16")
                   for shape in ((1, 5), (136,)))
    cache = latent.append(
        latent.init(2, 136, widths, dtype=dtype, padded=True), rows, np.int32([129, 70]))
    parts = cache.latents, cache.rope, cache.scale  # two are None where rows are whole
    self.assertEqual(sum(x.shape[2] for x in parts[:2] if x is not None), 256)
    cache = cache._replace(**{name: x if x is None else x.at[0, 129:].set(jnp.nan)
                              for name, x in zip(("latents", "rope", "scale"), parts)})
    def run(query, cache, metadata=gpu_cases.HOPPER):
      output = attention(
          query, None, None, mechanism=LATENT, latent_options=LatentOptions(*widths, 32),
          cache_view=cache, metadata=metadata, block_sizes=BLOCKS, return_lse=True)
      return output.attention_outputs, output.lse
    found = interpret(run, query, cache)
    # Plain XLA rounds converted latents to the query's dtype.
    want = run(query if cache.scale is None else query.astype("float32"), cache, **CPU)
    for x, y, tolerance in zip(found, want, (1e-2, 1e-5)):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=tolerance)
    if sampling.chosen("gradients of padded latent rows on a GPU"):
      loss = lambda query, **more: sum(jnp.cos(x.astype(jnp.float32)).sum()
                                       for x in run(query, cache, **more))
      np.testing.assert_allclose(np.float32(interpret(jax.grad(loss), query)),
                                 np.float32(jax.grad(loss)(query, **CPU)), atol=2e-2)

  @sampling.slow("latent rows in every batch on a GPU")
  def test_a_row_has_the_same_bits_in_every_batch(self):
    whole = interpret(latent_decoded, np.arange(4), *latent_arrays(np.arange(4)))
    for rows in (np.arange(4)[::-1], np.array([2])):
      for x, y in zip(whole, interpret(latent_decoded, rows, *latent_arrays(rows, np.inf))):
        np.testing.assert_array_equal(np.float32(x)[rows], np.float32(y))

  @sampling.slow("gradients of decoding latent rows on a GPU")
  def test_gradients_are_those_of_plain_xla(self):
    def loss(arrays, **more):
      out, lse = latent_decoded(np.arange(1), *arrays, **more)
      return jnp.sin(out.astype(jnp.float32)).sum() + lse.sum()
    given = [x[:1] for x in latent_arrays(np.arange(4))]
    found = interpret(jax.grad(loss), given)
    for x, y in zip(found, jax.grad(lambda x: loss(x, **CPU))(given)):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=2e-2)

  def test_is_chosen_first_if_supported(self):
    def said(dtype="bfloat16", slots=200, widths=(512, 64), tokens=1, padded=False,
             rope="bfloat16", **more):
      cache = jax.eval_shape(lambda: latent.init(
          4, slots, widths, dtype=dtype, padded=padded, rope_dtype=rope))
      query = jax.ShapeDtypeStruct((4, tokens, 16, sum(widths)),
                                   "bfloat16" if dtype in quantize.LIMITS else dtype)
      explanation = explain(
          query, None, None, cache_view=cache, mechanism=LATENT, mode="__autoregressive__",
          latent_options=LatentOptions(*widths, 128), **{"metadata": gpu_cases.HOPPER, **more})
      return str(next(v for v in explanation.verdicts if v.mechanism == LATENT))
    for arguments in ({}, {"padded": True}, {"dtype": "int8"}, {"dtype": "float8_e4m3fn"},
                      {"dtype": "int8", "padded": True}):
      self.assertRegex(said(**arguments), "can, by latent.decode_gpu")
    self.assertRegex(said(dtype="float16", widths=(256, 64)), "can, by latent.decode_gpu")
    self.assertRegex(said(metadata=gpu_cases.HOPPER.replace(compute_capability="8.0")),
                     "can, by latent.decode")
    for arguments, words in (
        (dict(dtype="float32"), "dtype float32.*bfloat16 and float16"),
        (dict(dtype="int8", rope="float32"), "a rotary part of float32 with latents in 8 bits"),
        (dict(slots=201), "201 slots.*multiples of 8"),
        (dict(widths=(512, 32)), r"rows of 512 \+ 32 numbers.*multiples of 64"),
        (dict(widths=(512, 128)), r"rows of 512 \+ 128 numbers.*up to 512 and 576 together"),
        (dict(tokens=9), "9 queries"),
        (dict(precision="highest"), "precision")):
      self.assertRegex(said(**arguments), f"latent.decode_gpu: .*{words}")


LATENT_WIDTH, NOPE, VALUE_WIDTH = 64, 32, 48


def projected_arrays():
  """Returns queries of 4 heads, latent rows, key_up and value_up."""
  rng = np.random.default_rng(4)
  array = lambda *shape, scale=1.0: jnp.asarray(scale * rng.normal(size=shape), "bfloat16")
  return (array(2, 140, 4, NOPE + 16), array(2, 140, LATENT_WIDTH + 16),
          array(LATENT_WIDTH, 4, NOPE, scale=0.1), array(LATENT_WIDTH, 4, VALUE_WIDTH, scale=0.1))


def projected(query, rows, *up, metadata=gpu_cases.HOPPER):
  """Returns (out, lse) of a prefill whose keys are projected."""
  output = attention(
      query, rows, None, mechanism=LATENT, metadata=metadata,
      latent_options=LatentOptions(LATENT_WIDTH, 16, None, *up), sliding_window=(100, 0),
      softmax_aux=jnp.arange(4.0), return_lse=True)
  return output.attention_outputs, output.lse


@gpu_interpret.interprets
class ProjectedTest(parameterized.TestCase):
  """Keys and values of two heads at a time, by the block-wise kernels."""

  def test_value_and_lse(self):
    given = projected_arrays()
    found = interpret(projected, *given)
    want = jax.jit(functools.partial(projected, **CPU))(*given)
    for x, y, tolerance in zip(found, want, (1e-2, 1e-3)):
      np.testing.assert_allclose(np.float32(x), np.float32(y), atol=tolerance)

  @sampling.slow("gradients of projected latent rows on a GPU")
  def test_gradients(self):
    def gradients(given, **more):
      found, pull = jax.vjp(functools.partial(projected, **more), *given)
      return pull(jax.tree.map(lambda x: jnp.cos(x.astype(jnp.float32)).astype(x.dtype), found))
    given = projected_arrays()
    want = gradients([x.astype(jnp.float32) for x in given], **CPU)
    for x, y in zip(interpret(gradients, given), want):
      np.testing.assert_allclose(np.float32(x), y, atol=2e-2 * abs(y).max())


class ChoiceTest(parameterized.TestCase):

  def kernel(self, dtype="bfloat16", slots=200, width=64, value_width=64, capability="9.0",
             tokens=1, query=None, **more):
    cache = jax.eval_shape(lambda: dense.init(4, slots, (2, width, value_width), dtype=dtype))
    query = jax.ShapeDtypeStruct((4, tokens, 4, width), jnp.dtype(
        query or ("bfloat16" if dtype in quantize.LIMITS else dtype)))
    metadata = gpu_cases.HOPPER.replace(compute_capability=capability)
    explanation = explain(query, None, None, cache_view=cache, mechanism=NAME,
                          mode="__autoregressive__", metadata=metadata, **more)
    verdict, = (v for v in explanation.verdicts if v.mechanism == NAME)
    return str(verdict)

  def test_is_chosen_first_if_supported(self):
    self.assertRegex(self.kernel(), "can, by decode.gpu")
    self.assertRegex(self.kernel(capability="8.0"), "can, by decode.xla")
    for dtype in ("int8", "float8_e4m3fn"):
      self.assertRegex(self.kernel(dtype=dtype), "can, by decode.gpu")
    for arguments, words in (
        (dict(dtype="int4"), "a cache of dtype int4"),
        (dict(dtype="float32"), "dtype float32.*bfloat16 and float16"),
        (dict(dtype="int8", query="float16"), "float16 with quantized"),
        (dict(dtype="int8", width=80), "head_dim of 80, quantized"),
        (dict(slots=201), "201 slots.*multiples of 8"),
        (dict(width=72), "head_dim of 72"), (dict(value_width=72), "value width of 72"),
        (dict(tokens=65), "65 queries"),
        (dict(precision="highest"), "precision")):
      self.assertRegex(self.kernel(**arguments), f"by decode.xla, not by decode.gpu: .*{words}")

  @parameterized.parameters((BlockSizes(block_q=64), 8), (BlockSizes(block_kv=100), 2))
  def test_any_block_sizes_are_accepted(self, blocks, number):
    case = Case(T=1, S=1024)
    params = decode.make_tiling(case.shapes, case.full_spec, blocks).params
    self.assertEqual(params.split_blocks, number)

  def test_chosen_blocks_fit(self):
    kinds = (None, *(quantized_kv.QuantizedKV("int8", quantized_kv.TOKEN, single)
                     for single in (False, True)))
    for *widths, rows, stored in itertools.product(
        split_kv.WIDTHS, split_kv.WIDTHS, (1, 9, 40), kinds):
      params = split_kv.make_kernel_params(rows, tuple(widths), 64, None, stored)
      self.assertLessEqual(split_kv.shared_memory(params), mosaic.SHARED_MEMORY_BYTES, params)
      self.assertGreaterEqual(min(params.num_stages), 2, params)
    for heads, (*of_row,), stored in itertools.product(
        (1, 16, 24, 40, 128), ((576, 512), (128, 64)), kinds[::2]):
      params = split_kv.make_kernel_params(
          heads, tuple(of_row), 64, None, stored, latent_heads=heads)
      self.assertLessEqual(split_kv.shared_memory(params), mosaic.SHARED_MEMORY_BYTES, params)
      self.assertGreaterEqual(params.num_stages[0], 2, params)

  def test_only_live_blocks_are_read(self):
    """Checks visited blocks times their tokens against live keys, of which a row has thousands."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2048, 32768, 64).astype(np.int32)
    case = Case(masks.lengths(None, lengths), B=64, T=1, S=32768, H=32, K=8, D=128)
    operands = case.shapes._replace(mask=MaskOperands((jnp.asarray(lengths),)))
    found = decode.block_map_of(operands, case.full_spec)
    self.assertLessEqual(split_kv.BLOCK_KV * np.sum(found.num_visited) / lengths.sum(), 1.005)
    np.testing.assert_array_equal(found.num_visited[:, 0, 0], -(-lengths // split_kv.BLOCK_KV))


class LowerTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name, name) for name in sampling.names(gpu_cases.decoded(), FEW))
  def test_for_cuda(self, name):
    self.assertEqual(gpu_faults.check(*gpu_cases.decode_programs()[name]), 2)


class CompileTest(gpu_machine_code.CompileTestCase):
  programs = {"decode_programs": sampling.names(gpu_cases.decoded(), FEW)}

  @parameterized.named_parameters(
      (name, name) for name in sampling.names(gpu_cases.decoded(), FEW))
  def test_machine_code(self, name):
    case = gpu_cases.decoded()[name]
    self.check_split_kv(
        name, "decode", decode.make_tiling(case.shapes, case.full_spec, case.blocks).params)


if __name__ == "__main__":
  absltest.main()
