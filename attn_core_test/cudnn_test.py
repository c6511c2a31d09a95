# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""sdpa and cudnn: the arguments that JAX passes to cuDNN, without a GPU, and values by XLA.

Programs are lowered for CUDA and read, with JAX's queries of the machine mocked. Values are those
of the same path through jax.nn, computed by XLA.
"""

import itertools
import json
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
import numpy as np

from attn_core import MaskInfo, OperationMetadata, attention, explain, masks
from attn_core.masks import banded, materialize
from attn_core.mechanisms import sdpa
from attn_core.references import oracle
from attn_core.types import AttentionSpec, Call, MaskOperands, Operands
from attn_core_test import device_suite_parts
from attn_core_test.property_cases import EVEN_CASES

jax.config.update("jax_num_cpu_devices", 4)

T = 96
CALL = re.compile(
    r'custom_call @__cudnn\$fmha(\w+)\(([^)]*)\).*?backend_config = "((?:[^"\\]|\\.)*)"')


def ints(*numbers):
  return np.array(numbers, np.int32)


def arrays(B=2, T=T, S=T, H=4, K=2, D=64, E=None, dtype=jnp.bfloat16):
  shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E or D)
  return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def metadata(capability="9.0", **fields):
  return OperationMetadata(platform="gpu", compute_capability=capability, **fields)


def lower(function, *operands) -> str:
  """Returns the program for CUDA; JAX's queries of the machine are mocked."""
  with (mock.patch.object(jax_cudnn, "check_cudnn_version", lambda: 91400),
        mock.patch.object(jax_cudnn, "check_compute_capability", lambda wanted: True)):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def value_and_gradients(**arguments):
  """Returns a function of query, key, value (and bias) that calls cuDNN forward and backward."""
  arguments = {"mechanism": "cudnn", "metadata": metadata(), **arguments}
  def loss(query, key, value, *bias):
    more = dict(zip(("bias",), bias))
    out = attention(query, key, value, **more, **arguments).attention_outputs
    return (out.astype(jnp.float32)**2).sum()
  return lambda *operands: jax.value_and_grad(loss, range(len(operands)))(*operands)


def calls(text: str) -> list[tuple]:
  """Returns (name, mask type, window, operands) of every call of cuDNN in a program."""
  found = []
  for name, operands, config in CALL.findall(text):
    config = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
    assert config["dropout_rate"] == 0 and config["max_seg_per_batch"] == 1, config
    found.append((name, config["mask_type"], config["sliding_window_length"],
                  operands.count("%")))
  return found


SHARED = np.ones((1, 1, T, T), bool)
LENGTHS = masks.lengths(ints(3, 96), ints(96, 5))
KEY_LENGTHS = masks.lengths(None, ints(96, 0))

# (name, arguments, shapes, mask type, window as cuDNN counts it, lengths among the operands)
BANDS = (
    ("full", dict(causal=False), {}, "NO_MASK", 0, 0),
    ("causal", {}, {}, "CAUSAL", 0, 0),
    ("causal_of_fewer_keys", dict(query_offset=0), dict(S=32), "CAUSAL", 0, 0),
    ("causal_of_more_keys", dict(query_offset=0), dict(T=32), "CAUSAL", 0, 0),
    ("window", dict(sliding_window=(7, 0)), {}, "CAUSAL", 8, 0),
    ("window_cut_by_causal", dict(sliding_window=7), {}, "CAUSAL", 8, 0),
    ("window_without_causal", dict(sliding_window=(7, 0), causal=False), {}, "CAUSAL", 8, 0),
    ("window_of_more_keys", dict(sliding_window=(7, 0), query_offset=0), dict(T=32), "CAUSAL", 8,
     0),
    ("window_that_hides_nothing", dict(sliding_window=200), {}, "CAUSAL", 0, 0),
    ("lengths", dict(mask=LENGTHS, causal=False), {}, "PADDING", 0, 2),
    ("key_lengths", dict(mask=KEY_LENGTHS, causal=False), {}, "PADDING", 0, 2),
    ("causal_lengths", dict(mask=LENGTHS & KEY_LENGTHS), {}, "PADDING_CAUSAL", 0, 2),
    ("float16", {}, dict(dtype=jnp.float16), "CAUSAL", 0, 0),
    ("width_256", {}, dict(D=256), "CAUSAL", 0, 0),
    ("optimized", dict(optimized=True), {}, "CAUSAL", 0, 0),
)

# (name, arguments, shape of the bias or None): masks that cuDNN gets as a bias in memory.
WRITTEN = (
    ("mask", dict(mask=np.ones((1, 1, T, T), bool)), None),
    ("padding_mask", dict(mask_info=MaskInfo.from_attention_mask(np.ones((2, T), bool))), None),
    ("window_and_lengths", dict(mask=LENGTHS, sliding_window=(7, 0)), None),
    ("prefix", dict(mask=masks.causal() | masks.prefix(7), causal=False), None),
    ("bias", {}, (2, 4, T, T)),
    ("bias_broadcast", dict(causal=False), (1, 4, 1, T)),
    ("bias_and_mask", dict(mask=np.ones((1, 1, T, T), bool)), (1, 1, T, T)),
    ("bias_and_window", dict(sliding_window=(7, 0)), (1, 4, T, T)),
    ("bias_and_lengths", dict(mask=LENGTHS), (2, 1, T, T)),
)


class LoweringTest(parameterized.TestCase):

  @parameterized.named_parameters(*BANDS)
  def test_a_band_mask_takes_no_memory(self, arguments, shapes, mask_type, window, lengths):
    operands = arrays(**shapes)
    text = lower(value_and_gradients(**arguments), *operands)
    self.assertEqual(calls(text), [
        ("Softmax", mask_type, window, 3 + lengths),
        ("SoftmaxBackward", mask_type, window, 6 + lengths)])
    queries, keys = operands[0].shape[1], operands[1].shape[1]
    self.assertNotRegex(text, rf"x{queries}x{keys}x")

  @parameterized.named_parameters(*WRITTEN)
  def test_other_masks_are_passed_as_a_bias(self, arguments, bias):
    operands = arrays()
    if bias is not None:
      operands.append(jax.ShapeDtypeStruct(bias, jnp.bfloat16))
    text = lower(value_and_gradients(**arguments), *operands)
    mask_type = "CAUSAL" if bias == (2, 4, T, T) else "NO_MASK"
    self.assertEqual(calls(text), [("ScaleBiasSoftmax", mask_type, 0, 4),
                                   ("ScaleBiasSoftmaxBackward", mask_type, 0, 7)])

  def test_a_bias_and_its_gradient_are_passed_unbroadcast(self):
    bias = jax.ShapeDtypeStruct((1, 4, 1, T), jnp.bfloat16)
    text = lower(value_and_gradients(causal=False), *arrays(), bias)
    backward, = (line for line in text.splitlines() if "fmhaScaleBiasSoftmaxBackward" in line)
    taken, given = backward.rpartition(" : ")[2].split(" -> ")
    for side in (taken, given):
      self.assertIn(f"tensor<2x4x{T}x{T}xbf16>", side)
    self.assertIn("tensor<1x4x1x96xbf16>", text.partition("return")[0])

  @parameterized.parameters("flash_attn2", "blocksparse", "cuda_flash_attn2", "sdpa", "auto")
  def test_mechanisms_that_call_cudnn_on_ampere(self, mechanism):
    text = lower(value_and_gradients(mechanism=mechanism, metadata=metadata("8.0")), *arrays())
    self.assertLen(calls(text), 2)

  @parameterized.parameters("flash_attn2", "blocksparse", "auto")
  def test_mechanisms_that_call_xla_instead(self, mechanism):
    arguments = dict(mechanism=mechanism, metadata=metadata("8.0"))
    for change in (dict(mask=np.ones((1, 1, T, T), bool)), dict(logits_soft_cap=30.0),
                   dict(return_lse=True), dict(metadata=OperationMetadata(platform="gpu"))):
      text = lower(value_and_gradients(**{**arguments, **change}), *arrays())
      self.assertEmpty(calls(text))
      self.assertIn("dot_general", text)
    self.assertEmpty(calls(lower(value_and_gradients(**arguments), *arrays(T=95, S=95))))

  def test_under_a_mesh(self):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"),
                axis_types=(AxisType.Auto,) * 2)
    text = lower(value_and_gradients(metadata=metadata(mesh=mesh), mask=LENGTHS), *arrays())
    self.assertLen(calls(text), 2)
    self.assertIn("1x96x2x64xbf16", text)
    shared = dict(mask=SHARED, policy="nothing_saveable")
    text = lower(value_and_gradients(metadata=metadata(mesh=mesh), **shared), *arrays(B=4))
    self.assertLen(calls(text), 3)

  @parameterized.parameters((0, 0, 0, 0), (0, None, None, 0), (None, None, None, 0))
  def test_vmap_gives_a_gradient_for_each(self, *mapped):
    operands = [*arrays(), jax.ShapeDtypeStruct((1, 4, T, T), jnp.bfloat16)]
    stacked = [x if axis is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
               for x, axis in zip(operands, mapped)]
    text = lower(jax.vmap(value_and_gradients(), mapped), *stacked)
    self.assertLen(calls(text), 2)
    backward, = (line for line in text.splitlines() if "fmhaScaleBiasSoftmaxBackward" in line)
    self.assertEqual(backward.count(f"tensor<6x4x{T}x{T}xbf16>"), 2)

  def test_vmap_of_shared_keys(self):
    query, key, value = arrays()
    query = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    text = lower(jax.vmap(value_and_gradients(mask=LENGTHS), (0, None, None)), query, key, value)
    for line in text.splitlines():
      if "custom_call @__cudnn" in line:
        self.assertIn("tensor<6x96x2x64xbf16>", line)
        self.assertEqual(line.count("tensor<6xi32>"), 2)

  @parameterized.named_parameters(
      ("query", {}, (0, None, None), "6x96x4x64xbf16"),
      ("key", {}, (None, 0, None), "6x96x2x64xbf16"),
      ("value", {}, (None, None, 0), "6x96x2x64xbf16"),
      ("one_of_the_lengths", dict(mask=KEY_LENGTHS), (0, 0, 0), "6xi32"),
      ("mask", dict(mask=np.ones((2, 1, 1, T), bool)), (0, 0, 0), f"6x4x{T}x{T}xbf16"),
      ("mask_per_head", dict(mask=np.ones((2, 4, T, T), bool)), (0, 0, 0), f"6x4x{T}x{T}xbf16"),
      ("shared_mask", dict(mask=SHARED), (0, 0, 0), rf"\d+x1x{T}x{T}xbf16"))
  def test_vmap_of_a_sum_whose_cotangent_is_shared(self, arguments, mapped, tensor):
    def loss(*x):
      out = attention(*x, mechanism="cudnn", metadata=metadata(), **arguments).attention_outputs
      return out.astype(jnp.float32).sum()
    stacked = [x if axis is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
               for x, axis in zip(arrays(), mapped)]
    text = lower(jax.vmap(jax.grad(loss, (0, 1, 2)), mapped), *stacked)
    lines = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
    self.assertLen(lines, 2)
    for line in lines:
      self.assertRegex(line, f"tensor<{tensor}>")
      self.assertIn("tensor<6x96x4x64xbf16>", line)

  def test_vmap_of_masks(self):
    run = lambda mask, *x: attention(*x, mask=mask, mechanism="cudnn", metadata=metadata()
                                     ).attention_outputs
    stacked = lambda *shape: jax.ShapeDtypeStruct((3, *shape), bool)
    over = jax.vmap(run, (0, None, None, None))
    text = lower(over, stacked(2, 1, 1, T), *arrays())
    line, = (line for line in text.splitlines() if "custom_call @__cudnn" in line)
    self.assertIn(f"tensor<6x4x{T}x{T}xbf16>", line)
    with self.assertRaisesRegex(NotImplementedError, r"mask of shape \(1, 1, 96, 96\).*vmap.*use"):
      lower(over, stacked(1, 1, T, T), *arrays())

  def test_a_mask_that_a_batch_shares_is_written_once(self):
    text = lower(value_and_gradients(mask=SHARED), *arrays())
    for line in text.splitlines():
      if "custom_call @__cudnn" in line:
        self.assertIn(f"tensor<1x1x{T}x{T}xbf16>", line)
        self.assertFalse(f"tensor<2x4x{T}x{T}x" in line)


# (name, arguments, shapes, words of the refusal)
REFUSED = (
    ("window_to_the_right", dict(sliding_window=(3, 3), causal=False), {}, "sliding_window=(3, 3)",
     "causal", "`mask`"),
    ("window_left_without_causal", dict(sliding_window=(3, -1), causal=False), {},
     "sliding_window=(3, -1)"),
    ("window_of_fewer_keys", dict(sliding_window=(3, 0), query_offset=0), dict(S=32),
     "sliding_window", "no more queries than keys"),
    ("bottom_right", dict(query_offset=64), dict(T=32), "query_offset"),
    ("segments", dict(mask_info=MaskInfo.from_segments(ints(*[0] * T)[None])), {}, "segment"),
    ("chunk", dict(chunk_size=8), {}, "chunk_size=8"),
    ("soft_cap", dict(logits_soft_cap=30.0), {}, "logits_soft_cap=30.0"),
    ("sinks", dict(softmax_aux=np.zeros(4, np.float32)), {}, "softmax_aux"),
    ("dropout", dict(dropout_prob=0.1, dropout_rng=np.zeros(2, np.uint32), deterministic=False), {},
     "dropout_prob=0.1"),
    ("value_width", {}, dict(E=32), "value width 32"),
    ("lse", dict(return_lse=True), {}, "return_lse=True"),
    ("weights", dict(return_weights=True), {}, "return_weights=True"),
    ("precision", dict(precision="highest"), {}, "precision"),
    ("float32", {}, dict(dtype=jnp.float32), "dtype float32"),
    ("width_12", {}, dict(D=12), "head_dim 12", "multiple of 8"),
    ("width_264", {}, dict(D=264), "head_dim 264", "256"),
    ("width_256_on_ampere", dict(metadata=metadata("8.0")), dict(D=256), "head_dim 256", "128"),
    ("width_256_on_blackwell", dict(metadata=metadata("10.0")), dict(D=256), "head_dim 256", "128"),
    ("turing", dict(metadata=metadata("7.5")), {}, "compute capability 7.5", "8.0 or newer"),
    ("bias_float32", dict(bias=np.zeros((1, 4, T, T), np.float32)), {}, "bias of dtype float32"),
    ("optimized_mask", dict(optimized=True, mask=np.ones((1, 1, T, T), bool)), {}, "quadratic"),
)


class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(*((name, arguments, shapes, words)
                                    for name, arguments, shapes, *words in REFUSED))
  def test_by_name(self, arguments, shapes, words):
    for mechanism in ("cudnn", "sdpa"):
      with self.assertRaises(NotImplementedError) as raised:
        jax.eval_shape(value_and_gradients(**arguments, mechanism=mechanism), *arrays(**shapes))
      for word in (f"mechanism='{mechanism}' on platform 'gpu'", *words,
                   "On this platform mechanism="):
        self.assertIn(word, str(raised.exception))

  @parameterized.named_parameters(
      ("band", {}), ("mask", dict(mask=np.ones((1, 1, 1, 95), bool))),
      ("bias", dict(bias=np.zeros((1, 1, 96, 95), jnp.bfloat16))))
  def test_odd_lengths_are_not_differentiated(self, arguments):
    with self.assertRaisesRegex(NotImplementedError, r"\(2, 95, 2, 64\).*even"):
      lower(value_and_gradients(**arguments, query_offset=0), *arrays(S=95))
    forward = lambda q, k, v: attention(q, k, v, mechanism="cudnn", metadata=metadata(),
                                        query_offset=0, **arguments).attention_outputs
    self.assertLen(calls(lower(forward, *arrays(S=95))), 1)

  def test_differentiable_for_even_numbers_of_queries_and_keys_only(self):
    for queries, keys in itertools.product((T, T - 1), (T, T - 1)):
      explanation = explain(*arrays(T=queries, S=keys), mechanism="flash_attn2", causal=False,
                            metadata=metadata("8.0"))
      verdicts = {verdict.mechanism: verdict for verdict in explanation.verdicts}
      even = queries % 2 == keys % 2 == 0
      self.assertEqual(verdicts["flash_attn2"].kernel, "sdpa.cudnn" if even else "flash.xla")

  def test_a_gpu_of_another_vendor(self):
    x = arrays()
    with mock.patch.object(jax, "default_backend", lambda: "rocm"):
      device = mock.Mock(compute_capability="gfx942")
      with mock.patch.object(jax, "local_devices", lambda: [device]):
        explanation = explain(*x)
    self.assertEqual(explanation[:3], ("flash_attn2", "gpu", "gfx942"))
    verdicts = {verdict.mechanism: verdict for verdict in explanation.verdicts}
    self.assertIn("gfx942: cuDNN runs on NVIDIA's only", str(verdicts["cudnn"]))
    self.assertEqual(verdicts["flash_attn2"].kernel, "flash.xla")


class ValuesTest(parameterized.TestCase):
  """Band masks through jax.nn by XLA, against the oracle: values, gradients, padding."""

  @parameterized.named_parameters(
      ("nothing", masks.lengths(ints(0, 5), ints(9, 0)) & masks.causal()),
      ("causal_lengths", masks.lengths(ints(0, 8), ints(9, 5)) & masks.causal()),
      ("two_lengths", masks.lengths(None, ints(4, 9)) & masks.lengths(ints(7), ints(6, 2))),
      ("window", masks.causal() & masks.window(3, 5)),
      ("window_once_more", masks.window(8, 0) & masks.window(2, None)))
  def test_equals_the_oracle(self, mask):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 9, heads, 8)), jnp.float32)
                         for heads in (4, 2, 2))
    leaves, structure = jax.tree.flatten(mask)
    self.assertIsNotNone(banded.from_mask(mask, 9, 9))
    spec = AttentionSpec(structure, 8**-0.5)
    operands = MaskOperands(tuple(map(jnp.asarray, leaves)))
    want = lambda *x: oracle.attention(Operands(*x, mask=operands), spec)[0]
    got = lambda *x: attention(*x, mechanism="sdpa", causal=False, mask=mask).attention_outputs
    both = lambda run: jax.value_and_grad(lambda *x: jnp.sin(run(*x)).sum(), (0, 1, 2))
    # Non-finite numbers in the padding must not matter.
    hidden = ~np.asarray(dense_mask_of(mask)).any(1)
    with_nan = [x.at[np.nonzero(hidden)].set(jnp.nan) for x in (key, value)]
    wanted = jax.tree.leaves(both(want)(query, key, value))
    for other in ([key, value], with_nan):
      for x, y in zip(jax.tree.leaves(both(got)(query, *other)), wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)

  def test_a_nan_reaches_exactly_the_queries_of_a_window_that_see_it(self):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 9, heads, 8)), jnp.float32)
                         for heads in (4, 2, 2))
    number = np.arange(9)
    for left in (0, 3, 8):
      run = jax.jit(lambda *x, left=left: attention(
          *x, mechanism="sdpa", sliding_window=(left, 0)).attention_outputs)
      for n in range(9):
        out = run(query, key.at[0, n, 1, 2].set(jnp.nan), value)[0]
        expected = np.zeros((9, 4), bool)
        expected[:, 2:] = ((number >= n) & (number <= n + left))[:, None]
        np.testing.assert_array_equal(np.isnan(out).all(-1), expected)
        np.testing.assert_array_equal(np.isnan(out).any(-1), expected)

  @parameterized.product(
      low=((-np.inf, 1), (np.finfo(np.float32).min, 1), (-1e6, 3)),
      mask=(masks.causal(), masks.causal() & masks.window(3, 0), masks.causal() | masks.prefix(1)))
  def test_hidden_keys_never_outweigh_visible_ones_with_a_low_bias(self, low, mask):
    number, first = low
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in (
        (2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (1, 4, 1, 9))]
    arrays[3][..., :first] = number
    leaves, structure = jax.tree.flatten(mask)
    spec = AttentionSpec(structure, 8**-0.5)

    def want(query, key, value, bias):
      operands = MaskOperands(tuple(map(jnp.asarray, leaves)))
      return oracle.attention(Operands(query, key, value, bias=bias, mask=operands), spec)

    def got(query, key, value, bias, **more):
      return attention(query, key, value, bias=bias, mask=mask, causal=False, mechanism="sdpa",
                       **more)

    def both(run):
      def loss(*x):
        out = run(*x)[0]
        return jnp.sin(out).sum(), out
      return jax.grad(loss, (0, 1, 2, 3), has_aux=True)

    with jax.enable_x64(True):
      wide = [jnp.asarray(x, jnp.float64) for x in arrays]
      wanted, lse = jax.tree.leaves(both(want)(*wide)), want(*wide).lse
    for x, y in zip(jax.tree.leaves(both(got)(*arrays)), wanted, strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)
    np.testing.assert_allclose(got(*arrays, return_lse=True).lse, lse, rtol=1e-5)

  def test_a_low_bias_does_not_hide_nonfinite_keys(self):
    x = jnp.ones((1, 9, 1, 8))
    bias = jnp.zeros((1, 1, 1, 9)).at[..., 0].set(-jnp.inf)
    for mechanism in ("sdpa", "vanilla"):
      out = attention(x, x.at[:, 0].set(jnp.nan), x, bias=bias, mechanism=mechanism)
      self.assertTrue(np.isnan(out.attention_outputs).all(), mechanism)

  @parameterized.named_parameters(*((case.name, case) for case in EVEN_CASES))
  def test_equals_the_oracle_as_on_a_gpu(self, case):
    self.assertEqual(device_suite_parts.judge(case, "sdpa", "float32"), "right")

  def test_lengths_given_to_jax_are_clipped_to_one_and_the_end(self):
    leaves, structure = jax.tree.flatten(masks.lengths(ints(0, 55), ints(99, -1)))
    x = jnp.ones((2, 9, 1, 8))
    call = Call(Operands(x, x, x, mask=MaskOperands(tuple(map(jnp.asarray, leaves)))),
                AttentionSpec(structure, 1.0))
    with mock.patch.object(jax.nn, "dot_product_attention", return_value=x) as asked:
      out = sdpa.xla(call).attention_outputs
    np.testing.assert_array_equal(asked.call_args.kwargs["query_seq_lengths"], [1, 9])
    np.testing.assert_array_equal(asked.call_args.kwargs["key_value_seq_lengths"], [9, 1])
    np.testing.assert_array_equal(out, 0)

  def test_a_length_that_is_not_given_is_that_of_its_own_tokens(self):
    query, key = jnp.ones((2, 8, 1, 8)), jnp.ones((2, 12, 1, 8))
    for mask, of_queries, of_keys in ((masks.lengths(None, ints(5, 12)), [8, 8], [5, 12]),
                                      (masks.lengths(ints(3, 8)), [3, 8], [12, 12])):
      leaves, structure = jax.tree.flatten(mask)
      call = Call(Operands(query, key, key, mask=MaskOperands(tuple(map(jnp.asarray, leaves)))),
                  AttentionSpec(structure, 1.0))
      with mock.patch.object(jax.nn, "dot_product_attention", return_value=query) as asked:
        sdpa.cudnn(call)
      np.testing.assert_array_equal(asked.call_args.kwargs["query_seq_lengths"], of_queries)
      np.testing.assert_array_equal(asked.call_args.kwargs["key_value_seq_lengths"], of_keys)

  def test_a_nonfinite_key_reaches_the_queries_that_see_it(self):
    x = jnp.ones((1, 9, 1, 8))
    out = attention(x, x.at[:, 4].set(jnp.inf), x, mechanism="sdpa", sliding_window=(2, 0))
    np.testing.assert_array_equal(np.isnan(out.attention_outputs[0, :, 0, 0]),
                                  [4 <= t <= 6 for t in range(9)])

  def test_masks_that_are_not_bands(self):
    for mask, queries, keys in (
        (masks.window(3, 3), 9, 9), (masks.window(3, None), 9, 9), (masks.window(-1, 0), 9, 9),
        (masks.window(3, 0), 9, 8), (masks.window(3, 0) & masks.lengths(ints(3)), 9, 9),
        (masks.offset(masks.causal(), 1), 8, 9), (masks.causal() | masks.window(3, 0), 9, 9),
        (~masks.causal(), 9, 9), (masks.window(None, 7), 9, 9)):
      self.assertIsNone(banded.from_mask(mask, queries, keys), mask)
    self.assertEqual(banded.from_mask(masks.window(8, 8), 9, 9), banded.Band(False, None, (), ()))
    self.assertEqual(banded.from_mask(masks.window(7, 0), 9, 9), banded.Band(True, 7, (), ()))


def dense_mask_of(mask):
  """Returns a mask without heads as bool [B, T, S], for B = 2 and T = S = 9."""
  return materialize.to_dense(mask, (2, 1, 9, 9))[:, 0]


if __name__ == "__main__":
  absltest.main()
