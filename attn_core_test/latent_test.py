# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""multi_latent_attention against its definition in float64: every form, argument and cache."""

import functools
import inspect
from typing import NamedTuple
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, LatentOptions, MaskInfo, OperationMetadata,
                       attention, explain, masks, multi_latent_attention, score_mods)
from attn_core.arguments import latent as arguments_latent, normalize
from attn_core.arguments.arguments import AttentionArguments
from attn_core.benchmark.static import gpu as static_gpu, profile as static_profile
from attn_core.caches import latent, quantize
from attn_core.dispatch.latent import Widths, flops
from attn_core.kernels.tpu.ragged import common as tpu_common, decode as tpu_decode
from attn_core.references import latent as reference
from attn_core_test import program_text, sampling, tpu_interpret

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

B, L, R, NOPE, E = 2, 10, 4, 6, 5


class Case(NamedTuple):
  """One call; the queries are the last T tokens of the S that the rows are of."""

  T: int
  S: int = 37
  H: int = 3
  form: str = "absorbed"  # the implementation that must run
  up: bool = False
  arguments: dict = {}
  sinks: bool = False


def ids(*lengths):
  """Returns segment ids of both rows of the batch; the rest is padding."""
  row = np.repeat([*range(len(lengths)), -1], [*lengths, 37 - sum(lengths)])
  return np.stack([row, row[::-1]]).astype(np.int32)


def dense_mask(T, S=37):
  seen = np.random.default_rng(7).random((B, 1, T, S)) < 0.5
  seen[1, :, T // 2:] = False  # rows that see nothing
  return seen


def listed(T, S=37, k=6):
  """Returns lists of keys, with -1 and repeated numbers among them, and one that names none."""
  found = np.random.default_rng(4).integers(-1, S, (B, T, k)).astype(np.int32)
  found[1, T // 2] = -1
  return found


SEGMENTS = MaskInfo.from_segments(ids(9, 20))
CASES = {
    "absorbed": Case(21),
    "absorbed_full": Case(21, arguments={"causal": False}),
    "one_query": Case(1, form="decode"),
    "a_few_queries": Case(5, form="decode"),
    "one_head": Case(3, H=1, form="decode"),
    "one_head_many_queries": Case(19, H=1),
    "many_rows": Case(7, H=9, form="decode"),
    "one_key": Case(1, S=1, form="decode"),
    "window": Case(21, arguments={"sliding_window": (5, 0)}),
    "window_in_decoding": Case(3, form="decode", arguments={"sliding_window": (5, 0)}),
    "sinks": Case(21, sinks=True),
    "sinks_in_decoding": Case(2, sinks=True, form="decode"),
    "soft_cap_and_chunk": Case(21, arguments={"logits_soft_cap": 1.5, "chunk_size": 8}),
    "segments": Case(37, arguments={"mask_info": SEGMENTS}),
    "lengths": Case(21, arguments={"mask": masks.lengths(None, np.int32([30, 0]))}),
    "lengths_in_decoding": Case(
        3, form="decode", arguments={"mask": masks.lengths(None, np.int32([36, 0]))}),
    "dense_mask": Case(20, arguments={"mask": dense_mask(20)}),
    "bias": Case(20, arguments={"bias": np.random.default_rng(3).normal(size=(1, 3, 20, 37))}),
    "dropout": Case(20, arguments={"dropout_prob": 0.4, "dropout_rng": jax.random.key(3)}),
    "score_mod": Case(20, arguments={"score_mod": score_mods.alibi(np.float64([0.1, 0.2, 0.4]))}),
    "selected_keys": Case(21, arguments={"mask": masks.selected_keys(listed(21))}),
    "selected_keys_of_one_query": Case(
        1, arguments={"mask": masks.selected_keys(listed(1)), "logits_soft_cap": 1.5}, sinks=True),
    "selected_blocks": Case(20, sinks=True, arguments={
        "mask": masks.selected_blocks(listed(5, 10, 3)[:, None], 4, 4), "dropout_prob": 0.4,
        "dropout_rng": jax.random.key(3)}),
    "unnormalized": Case(20, arguments={"normalize_output": False}),
    "up_one_query": Case(1, form="decode", up=True),
    "up_few_queries": Case(9, S=999, up=True),
    "up": Case(37, form="projected", up=True),
    "up_full": Case(37, form="projected", up=True, arguments={"causal": False}),
    "up_one_head": Case(37, H=1, form="projected", up=True),
    "up_more_queries_than_keys": Case(37, S=20, form="projected", up=True),
    "up_sinks_window": Case(37, H=4, form="projected", up=True, sinks=True,
                            arguments={"sliding_window": (5, 2)}),
    "up_segments": Case(37, form="projected", up=True, arguments={"mask_info": SEGMENTS}),
    "up_lengths": Case(37, form="projected", up=True,
                       arguments={"mask": masks.lengths(None, np.int32([30, 0]))}),
    "up_dense_mask": Case(37, up=True, arguments={"mask": dense_mask(37)}),
    "up_selected_keys": Case(37, up=True, arguments={"mask": masks.selected_keys(listed(37))}),
    "up_dropout": Case(37, up=True, arguments={
        "dropout_prob": 0.4, "dropout_rng": jax.random.key(3)}),
    "up_unnormalized": Case(37, form="projected", up=True, arguments={"normalize_output": False}),
}


def arrays(case, dtype=jnp.float64, seed=0):
  """Returns query and rows, and where the case has them up-projections and sinks, by name."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  found = {"query": array(B, case.T, case.H, (NOPE if case.up else L) + R),
           "rows": array(B, case.S, L + R)}
  if case.up:
    found |= {"key_up": array(L, case.H, NOPE), "value_up": array(L, case.H, E)}
  return found | ({"softmax_aux": array(case.H)} if case.sinks else {})


def call_of(case, x, **more):
  """Returns the keywords of `attention`."""
  options = LatentOptions(L, R, None if case.up else NOPE, x.get("key_up"), x.get("value_up"))
  offset = {} if case.T == case.S else {"query_offset": case.S - case.T}
  return {"query": x["query"], "key": x["rows"], "value": None, "latent_options": options,
          "softmax_aux": x.get("softmax_aux"), "return_lse": True,
          "mechanism": "multi_latent_attention", **offset, **case.arguments, **more}


def attended(case, x, **more):
  output = attention(**call_of(case, x, **more))
  return output.attention_outputs, output.lse


def defined(case, x):
  """Returns the same by the definition, compiled as one program."""
  @jax.jit
  def run(x):
    bound = inspect.signature(attention).bind(**call_of(case, x))
    bound.apply_defaults()
    given = arguments_latent.expand(AttentionArguments(**bound.arguments), None)
    call = normalize.normalize(given).call
    output = reference.attention(call.operands, call.spec)
    return output.attention_outputs, output.lse
  return run(x)


def with_gradients(function, x, seed=5):
  """Returns results and the gradients of a random function of them, compiled as one program."""
  @jax.jit
  def run(x):
    found, pull = jax.vjp(function, x)
    rng = np.random.default_rng(seed)
    # The lse of a row that sees nothing is -inf, and its cotangent must not be NaN.
    given = tuple(jnp.asarray(rng.normal(size=y.shape), y.dtype) for y in found)
    return found, pull(given)[0]
  return run(x)


def close(got, want, tolerance):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64),
                               rtol=tolerance, atol=tolerance)


def form_of(case, x):
  as_shapes = {name: y for name, y in call_of(case, x).items()}
  verdicts = explain(**as_shapes).verdicts
  return next(v for v in verdicts if v.mechanism == "multi_latent_attention")


class OracleTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(name, name) for name in CASES])
  def test_value_lse_and_gradients(self, name):
    case = CASES[name]
    x = arrays(case)
    self.assertEqual(form_of(case, x).kernel, f"latent.{case.form}")
    close(with_gradients(functools.partial(attended, case), x),
          with_gradients(functools.partial(defined, case), x), 1e-10)

  @parameterized.parameters("absorbed", "a_few_queries", "up")
  def test_float32_and_jit(self, name):
    case = CASES[name]
    x = arrays(case, jnp.float32)
    wide = jax.tree.map(lambda y: y.astype(jnp.float64), x)
    close(jax.jit(functools.partial(attended, case))(x), defined(case, wide), 3e-5)

  @parameterized.parameters("absorbed", "a_few_queries", "up")
  def test_bfloat16(self, name):
    case = CASES[name]
    x = arrays(case, jnp.bfloat16)
    out, lse = attended(case, x)
    self.assertEqual((out.dtype, lse.dtype), (jnp.bfloat16, jnp.float32))
    wide = jax.tree.map(lambda y: y.astype(jnp.float64), x)
    want, want_lse = defined(case, wide)
    # Absorbed queries, or keys and values, are rounded to bfloat16 by up-projections.
    tolerance = 0.15 if case.up else 2**-6
    np.testing.assert_allclose(out.astype(jnp.float64), want, atol=tolerance, rtol=2**-6)
    np.testing.assert_allclose(lse, want_lse, atol=tolerance)

  @parameterized.parameters("absorbed", "a_few_queries", "up", "up_few_queries")
  def test_second_derivatives_and_forward_mode(self, name):
    case = CASES[name]
    x, directions = arrays(case), arrays(case, seed=1)
    def curved(function, x):
      gradient = jax.grad(lambda x: (function(case, x)[0] ** 2).sum())
      return jax.jit(lambda x: jax.jvp(gradient, (x,), (directions,)))(x)
    close(curved(attended, x), curved(defined, x), 1e-8)

  @parameterized.parameters("absorbed", "one_query", "up")
  def test_vmap(self, name):
    case = CASES[name]
    several = [arrays(case, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *y: jnp.stack(y), *several)
    run = jax.jit(functools.partial(attended, case))
    close(jax.vmap(functools.partial(attended, case))(stacked),
          jax.tree.map(lambda *y: np.stack(y), *[run(x) for x in several]), 1e-12)

  @parameterized.parameters("dense_mask", "lengths_in_decoding", "lengths", "up_lengths")
  def test_nan_outside_the_mask_stays_there(self, name):
    """Keys that no query sees, and queries that see no key, may hold anything."""
    case = CASES[name]
    x = arrays(case)
    if name != "dense_mask":
      x["rows"] = x["rows"].at[0, 36:].set(jnp.nan).at[1].set(jnp.inf)
      if case.T > 8:
        x["rows"] = x["rows"].at[0, 30:].set(-jnp.inf)
    hidden = slice(10, None) if name == "dense_mask" else slice(None)
    poisoned = {**x, "query": x["query"].at[1, hidden].set(jnp.nan)}
    clean = jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), poisoned)
    got, gradients = with_gradients(functools.partial(attended, case), poisoned)
    want, wanted = with_gradients(functools.partial(defined, case), clean)
    close((got, gradients), (want, wanted), 1e-10)

  def test_ranks_are_not_promoted(self):
    with jax.numpy_rank_promotion("raise"):
      for name in ("absorbed", "a_few_queries", "up_sinks_window", "up_few_queries"):
        case = CASES[name]
        with_gradients(functools.partial(attended, case), arrays(case))

  @parameterized.parameters("absorbed", "up")
  def test_layouts(self, name):
    case = CASES[name]
    x = arrays(case)
    want = attended(case, x)[0]
    other = {**x, "query": x["query"].swapaxes(1, 2)}
    close(attended(case, other, layout="bhtd")[0].swapaxes(1, 2), want, 1e-12)
    several = {**x, "query": x["query"][:, None], "rows": x["rows"][:, None]}
    close(attended(case, several)[0][:, 0], want, 1e-12)

  def test_packed_sequences(self):
    case = CASES["segments"]
    x = arrays(case)
    packed = {"query": x["query"][0], "rows": x["rows"][0]}
    got = attended(case._replace(arguments={}), packed, layout="thd",
                   cum_seqlens_q=np.int32([0, 9, 29, 37]))[0]
    info = MaskInfo.from_segments(np.repeat([0, 1, 2], [9, 20, 8])[None].astype(np.int32))
    want = defined(case._replace(arguments={"mask_info": info}),
                   {name: y[:1] for name, y in x.items()})[0]
    close(got, want[0], 1e-10)


class ExplainTest(parameterized.TestCase):

  def test_default_widths_are_those_of_deepseek(self):
    self.assertEqual(LatentOptions(), LatentOptions(512, 64))

  @parameterized.parameters(("cpu", "latent.projected"), ("gpu", "latent.projected_gpu"),
                            ("tpu", "latent.projected_tpu"))
  def test_the_form_of_less_work_runs_and_is_named(self, platform, kernel):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    options = LatentOptions(key_up=shape(512, 16, 128), value_up=shape(512, 16, 128))
    metadata = OperationMetadata(platform=platform,
                                 compute_capability="9.0" if platform == "gpu" else None)
    for queries, keys in ((1, 4096), (64, 4096), (300, 4096), (4096, 4096), (16, 16)):
      case = Case(queries, keys, 16)
      call = {**call_of(case, {"query": shape(2, queries, 16, 192), "rows": shape(2, keys, 576)}),
              "latent_options": options, "metadata": metadata}
      work = flops(Widths(512, 64, 128, 128), queries, keys, 16)
      verdict = next(v for v in explain(**call).verdicts
                     if v.mechanism == "multi_latent_attention")
      if work.projected < work.absorbed:
        self.assertEqual(verdict.kernel, kernel)
      elif platform == "cpu" or queries > 8:  # decode kernels, which are asked first, take others
        self.assertNotEqual(verdict.kernel, kernel)
        self.assertIn(f"{kernel}: {work.projected:.3g} FLOPs", str(verdict))

  def test_the_work_of_both_forms(self):
    """Counts the multiplications of the definitions, of 2 queries, 3 keys and 5 heads."""
    widths = Widths(7, 2, 4, 3)
    absorb, weigh = 2 * 5 * 4 * 7 + 2 * 5 * 7 * 3, 2 * 3 * 5 * (7 + 2) + 2 * 3 * 5 * 7
    project, heads = 3 * 5 * 7 * (4 + 3), 2 * 3 * 5 * (4 + 2) + 2 * 3 * 5 * 3
    self.assertEqual(flops(widths, 2, 3, 5), (2 * (absorb + weigh), 2 * (project + heads)))

  def test_accelerators_run_plain_xla_where_their_kernels_refuse(self):
    for platform in ("tpu", "gpu"):
      metadata = OperationMetadata(
          platform=platform, compute_capability="9.0" if platform == "gpu" else None)
      for name, dtype, words in (
          ("absorbed", jnp.float32, "latent.absorbed, .*absorbed queries"),
          ("up_dropout", jnp.bfloat16, r"latent.absorbed, .*dropout_prob"),
          ("up_dense_mask", jnp.bfloat16, "latent.absorbed, .*a mask of kind Dense"),
          ("up", jnp.float64, f"latent.projected, not by .*latent.projected_{platform}: ")):
        case = CASES[name]
        said = explain(**call_of(case, arrays(case, dtype), metadata=metadata))
        self.assertEqual(said.chosen, "multi_latent_attention")
        self.assertRegex(str(said), f"can, by {words}")

  def test_auto_takes_it_and_others_refuse(self):
    case = CASES["absorbed"]
    x = arrays(case)
    close(attended(case, x, mechanism="auto"), attended(case, x), 0)
    with self.assertRaisesRegex(NotImplementedError, "latent rows in place of keys and values"):
      attended(case, x, mechanism="flash_attn2")
    with self.assertRaisesRegex(NotImplementedError, "no latent_options: it reads latent rows"):
      attention(x["query"], x["query"], x["query"], mechanism="multi_latent_attention")


class MemoryTest(parameterized.TestCase):

  @parameterized.parameters((1, False), (64, False), (2048, True))
  def test_values_are_not_copied(self, queries, up):
    """Temporary memory of a forward is below that of the latent part of all rows."""
    keys, heads, width = 8192 if queries < 65 else 2048, 16, 576
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    x = {"query": shape(1, queries, heads, 192 if up else width), "rows": shape(1, keys, width)}
    up_arrays = [shape(512, heads, 128)] * 2 if up else [None, None]
    def run(query, rows, *given):
      options = LatentOptions(nope_width=128, key_up=given[0], value_up=given[1])
      return attention(query, rows, None, latent_options=options,
                       query_offset=keys - queries).attention_outputs
    compiled = jax.jit(run).lower(*x.values(), *up_arrays).compile()
    found = compiled.memory_analysis().temp_size_in_bytes
    results = queries * heads * (128 if up else 512) * 4
    if up:  # queries and results in the order of the steps, and half of all heads' keys and values
      limit = queries * heads * 192 * 4 + 2 * results + keys * heads * (192 + 128) * 4 // 2
    else:
      limit = keys * 512 * 4 + results
    self.assertLess(found, limit)


class StepsTest(parameterized.TestCase):
  """Keys and values of a few heads at a time, whatever kernel attends to them."""

  def call(self, platform, shapes, **more):
    batch, queries, keys, heads = shapes
    dtype = jnp.bfloat16
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in (
        (batch, queries, heads, 192), (batch, keys, 576), (512, heads, 128), (512, heads, 128))]
    def run(query, rows, *up):
      return multi_latent_attention(
          query, rows, latent_options=LatentOptions(512, 64, None, *up),
          query_offset=keys - queries, metadata=OperationMetadata(
              platform=platform, compute_capability="9.0" if platform == "gpu" else None, **more)
          ).attention_outputs
    return run, given

  @parameterized.parameters(
      ("cpu", (1, 512, 512, 16), 8), ("tpu", (1, 512, 512, 16), 2), ("gpu", (1, 512, 512, 16), 2),
      ("tpu", (2, 512, 4096, 16), 4), ("gpu", (2, 512, 4096, 16), 4),
      ("gpu", (1, 16384, 16384, 128), 64), ("tpu", (1, 32, 32, 1), 1))
  def test_steps(self, platform, shapes, steps):
    """The backward computes keys and values again, and keeps the results of the forward.

    No array of either holds those of all heads, where it is not as large as the queries.
    """
    run, given = self.call(platform, shapes)
    gradient = jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))
    batch, queries, keys, heads = shapes
    for function in (run, gradient):
      program = jax.make_jaxpr(function)(*given)
      found = list(program_text.equations(program.jaxpr))
      self.assertIn(steps, [e.params["length"] for e in found if e.primitive.name == "scan"])
      self.assertLen([e for e in found if e.primitive.name == "attention_forward"], 1)
      if heads > 1 and keys != queries:
        self.assertLess(max(v.aval.size for e in found for v in e.outvars),
                        batch * keys * heads * 128)

  @sampling.slow_parameters(("tpu",), ("gpu",))
  def test_memory_of_compiled_programs(self, platform):
    """Temporary memory is below that of all heads' keys and values, in a forward below half."""
    missing = (static_gpu if platform == "gpu" else static_profile).missing()
    if missing:
      self.skipTest(f"nothing to compile with: {missing}")
    if platform == "tpu":
      device, kernel = static_profile.devices("v6e")[0], "tpu_custom_call"
    else:
      kernel, device = "mosaic_gpu", topologies.get_topology_desc(
          platform="cuda", topology="1x1x1", target_config=static_gpu.TARGET).devices[0]
    run, given = self.call(platform, (1, 512, 16384, 16))
    gradient = jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
             for x in given]
    of_heads = 16384 * 16 * (192 + 128) * 2
    for function, limit in ((run, of_heads // 2), (gradient, of_heads)):
      with jax.enable_x64(False):
        found = jax.jit(function).trace(*given).lower(
            lowering_platforms=("tpu" if platform == "tpu" else "cuda",)).compile()
      self.assertLess(found.memory_analysis().temp_size_in_bytes, limit)
      self.assertIn(f'custom_call_target="{kernel}', found.as_text())


class CacheTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(2)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape))
    self.query, self.rows = array(B, 30, 3, L + R), array(B, 30, L + R)
    self.options = LatentOptions(L, R, NOPE)

  def run_steps(self, cache, *ends, rows=None):
    """Appends the tokens between two ends after the other; returns all outputs and the cache."""
    step = jax.jit(lambda query, rows, cache: multi_latent_attention(
        query, rows, latent_options=self.options, cache_view=cache))
    found, rows = [], self.rows if rows is None else rows
    for begin, end in zip((0, *ends), ends):
      output = step(self.query[:, begin:end], rows[:, begin:end], cache)
      found, cache = [*found, output.attention_outputs], output.cache_view
    return jnp.concatenate(found, 1), cache

  def whole(self, rows):
    return multi_latent_attention(self.query, rows, latent_options=self.options).attention_outputs

  @parameterized.parameters(False, True)
  def test_steps_equal_the_whole(self, padded):
    cache = latent.init(B, 40, (L, R), dtype="float64", padded=padded)
    found, cache = self.run_steps(cache, 12, 13, 17, 30)
    close(found, self.whole(self.rows), 1e-12)
    width = 128 if padded else L + R
    self.assertEqual((cache.latents.shape, cache.rope, cache.width), ((B, 40, width), None, L + R))
    np.testing.assert_array_equal(cache.indexs, [30, 30])
    close(cache.latents[:, :30, :L + R], self.rows, 0)
    self.assertFalse(cache.latents[..., L + R:].any())

  @parameterized.parameters(("int8", True), ("float8_e4m3fn", False))
  def test_8_bits_with_a_16_bit_rotary_part(self, dtype, padded):
    cache = latent.init(B, 40, (L, R), dtype=dtype, padded=padded)
    self.assertEqual((cache.latents.shape[2], cache.rope.shape[2], cache.width),
                     (L, 128 if padded else R, L + R))
    self.assertEqual((cache.latents.dtype, cache.rope.dtype), (dtype, jnp.bfloat16))
    found, cache = self.run_steps(cache, 12, 13, 17, 30)
    stored, scale = quantize.quantize(self.rows[..., :L], dtype)
    rope = self.rows[..., L:].astype(jnp.bfloat16).astype(jnp.float64)
    held = jnp.concatenate([quantize.dequantize(stored, scale, jnp.float64), rope], -1)
    # Sums are in float64 here; dequantized latents are products of two float32 numbers.
    close(found, self.whole(held), 1e-6)
    # What 8 bits round off: at most half a step of each latent.
    limit = {"int8": 0.03, "float8_e4m3fn": 0.25}[dtype]
    self.assertLess(abs(found - self.whole(self.rows)).max(), limit)
    grad = lambda rows, query: jax.jit(jax.grad(lambda query: multi_latent_attention(
        query, None if rows is None else rows, latent_options=self.options, query_offset=None if
        rows is None else 29, cache_view=cache if rows is None else None
        ).attention_outputs.sum()))(query)
    close(grad(None, self.query[:, 29:]), grad(held, self.query[:, 29:]), 1e-6)
    with self.assertRaisesRegex(NotImplementedError, "gradients of quantized"):
      jax.grad(lambda rows: multi_latent_attention(
          self.query, rows, latent_options=self.options, cache_view=latent.init(
              B, 40, (L, R), dtype=dtype)).attention_outputs.sum())(self.rows)

  @parameterized.parameters(1, 12)
  def test_up_projections_from_a_cache(self, tokens):
    case = Case(tokens, 30, up=True)
    x = arrays(case)
    for dtype, tolerance, padded in (("float64", 1e-10, False), ("float64", 1e-10, True),
                                     ("int8", 0.1, True)):
      cache = latent.append(latent.init(B, 31, (L, R), dtype=dtype, padded=padded),
                            x["rows"][:, :30 - tokens])
      more = dict(key=x["rows"][:, 30 - tokens:], cache_view=cache)
      call = {**call_of(case, x, **more), "query_offset": None}
      close(attention(**call).attention_outputs, defined(case, x)[0], tolerance)

  @parameterized.parameters("float32", "int8")
  def test_init_like_and_view(self, dtype):
    for like in (self.query, self.rows):
      cache = latent.init_like(like, 40, (L, R), dtype=dtype)
      self.assertEqual(jax.tree.map(jnp.shape, cache), jax.tree.map(jnp.shape, latent.init(
          B, 40, (L, R), dtype=dtype)))
    self.assertEqual(latent.init_like(self.rows, 4, (L, R)).latents.dtype, jnp.float64)
    cache = latent.append(cache, self.rows, np.int32([30, 7]))._replace(starts=jnp.int32([2, 0]))
    view = latent.view(cache)
    np.testing.assert_array_equal(view.key[:, :, 0], cache.latents)
    self.assertEqual(view.value.shape, (B, 40, 1, R if dtype == "int8" else 0))
    slot = np.arange(40)
    np.testing.assert_array_equal(view.positions, [np.where((slot >= 2) & (slot < 30), slot, -1),
                                                   np.where(slot < 7, slot, -1)])
    self.assertEqual((view.key_scale is None, view.value_scale), (dtype == "float32", None))

  def test_lengths_slots_and_overflow(self):
    cache = latent.init(3, 16, (L, R), dtype="float64")
    options = {"latent_options": self.options}
    output = multi_latent_attention(
        self.query[:, :6], self.rows[:, :6], cache_view=cache, **options,
        cache_metadata=CacheMetadata(lengths=[6, 4], slots=[2, 0]))
    cache = output.cache_view
    np.testing.assert_array_equal(cache.lengths, [4, 0, 6])
    close(output.attention_outputs[0], self.whole(self.rows)[0, :6], 1e-12)
    self.assertFalse(output.attention_outputs[1, 4:].any())
    with self.assertRaisesRegex(ValueError, "together at most 16 slots"):
      latent.append(cache, jnp.zeros((3, 11, L + R)))
    full = jax.jit(lambda cache: latent.append(cache, jnp.zeros((3, 11, L + R))))(cache)
    np.testing.assert_array_equal(full.overflow, [False, False, True])
    np.testing.assert_array_equal(full.lengths, [15, 11, 6])
    other = latent.append(latent.init(1, 9, (L, R), dtype="float64"), self.rows[:1, :9])
    replaced = latent.insert(full, [2], other)
    np.testing.assert_array_equal(replaced.lengths, [15, 11, 9])
    np.testing.assert_array_equal(replaced.overflow, [False] * 3)
    close(replaced.latents[2, :9], self.rows[0, :9], 0)


class TpuTest(parameterized.TestCase):
  """The kernels for TPUs, interpreted from memory full of NaN with races watched."""

  @parameterized.parameters(*sampling.with_slow(
      [("up_sinks_window",)], ("up_full",), ("up_segments",), ("up_lengths",),
      ("up_more_queries_than_keys",)))
  def test_projected_value_lse_and_gradients(self, name):
    case = CASES[name]._replace(H=4)  # in two steps
    x = arrays(case, jnp.float32)
    metadata = OperationMetadata(platform="tpu")
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(with_gradients(
          functools.partial(attended, case, metadata=metadata), x))
    wide = jax.tree.map(lambda y: y.astype(jnp.float64), x)
    close(got, with_gradients(functools.partial(defined, case), wide), 1e-4)

  @parameterized.parameters(*sampling.with_slow(
      [("int8", "float32", 1, 3)], ("bfloat16", "bfloat16", 2, 3), ("float32", "float32", 4, 70),
      ("float32", "float32", 5, 64), ("int8", "bfloat16", 6, 64),
      ("float8_e4m3fn", "float32", 4, 70), ("float8_e4m3fn", "bfloat16", 1, 1),
      ("bfloat16", "bfloat16", 8, 33), ("float32", "float32", 10, 16),
      ("float32", "float32", 17, 16)))
  @mock.patch.object(tpu_common, "LATENT_PIECE", 64)
  def test_value_and_lse(self, held, dtype, tokens, heads):
    """Compares with plain XLA; rows have padding before them, and a cache NaN past their end."""
    rng, width = np.random.default_rng(3), 128
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    rows, query, sinks = array(B, 160, width + R), array(B, tokens, heads, width + R), array(heads)
    cache = latent.init(B, 288, (width, R), dtype=held, rope_dtype=dtype, padded=True)
    cache = latent.append(cache, rows, np.int32([160, 41]))._replace(starts=jnp.int32([33, 0]))
    past = np.arange(288)[None, :, None] >= np.array([160, 41])[:, None, None]
    if cache.rope is None:
      cache = cache._replace(latents=jnp.where(past, jnp.nan, cache.latents))
    else:
      cache = cache._replace(rope=jnp.where(past, jnp.nan, cache.rope),
                             scale=jnp.where(past[..., 0], jnp.nan, cache.scale))
    if held == "int8":
      bad = cache._replace(scale=cache.scale.at[0, 140].set(jnp.nan))
    else:
      bad = cache._replace(latents=cache.latents.at[0, 140, 2].set(jnp.nan))
    def run(cache, platform):
      found = multi_latent_attention(
          query, None, cache_view=cache, latent_options=LatentOptions(width, R, NOPE),
          softmax_aux=sinks, return_lse=True, sliding_window=(60, 0), logits_soft_cap=3.0,
          metadata=OperationMetadata(platform=platform))
      return found.attention_outputs, found.lse
    run = jax.jit(run, static_argnums=1)
    with tpu_interpret.interpreted():
      got, after = jax.block_until_ready((run(cache, "tpu"), run(bad, "tpu")))
    close(got, run(cache, "cpu"), 1e-5 if dtype == "float32" else 2**-5)
    self.assertTrue(np.isnan(np.asarray(after[0][0], np.float32)).all())
    self.assertTrue(np.isnan(after[1][0]).all())
    close((after[0][1], after[1][1]), (got[0][1], got[1][1]), 0)

  @parameterized.parameters(
      (17, 16, 2, 144), (61, 16, 4, 256), (19, 32, 4, 160), (5, 64, 2, 160), (8, 16, 1, 128),
      (1, 24, 1, 24), (4, 70, 1, 280))
  def test_groups_of_rows(self, tokens, heads, groups, rows):
    """A group of 16 rows would take as long as one of 256: queries that only pad avoid them."""
    shape = lambda *sizes: jax.ShapeDtypeStruct((B, *sizes), jnp.bfloat16)
    query = shape(tokens, heads, 640)
    layout = tpu_decode._make_layout(query, shape(4096, 1, 640), shape(4096, 1, 0), BlockSizes(),
                                     (False, 512))
    found = tpu_decode._step_shape(layout, query)
    self.assertEqual((found.head_groups, found.group_rows), (groups, rows))

  def test_the_kernel_is_chosen_where_it_computes_the_call(self):
    def said(dtype="bfloat16", held=None, padded=True, widths=(512, 64), slots=64, **changes):
      cache = jax.eval_shape(lambda: latent.init(
          B, slots, widths, dtype=held or dtype, padded=padded))
      query = jax.ShapeDtypeStruct((B, changes.pop("tokens", 1), 16, sum(widths)), dtype)
      return str(explain(query, None, None, cache_view=cache, mechanism="multi_latent_attention",
                         latent_options=LatentOptions(*widths, NOPE),
                         metadata=OperationMetadata(platform="tpu"), **changes))
    for held in (None, "int8", "float8_e4m3fn"):
      self.assertIn("can, by latent.decode_tpu", said(held=held))
    self.assertIn("can, by latent.decode_tpu", said("float32", widths=(10, 4), slots=8, tokens=8))
    # 64 queries of 16 heads are four groups of rows that pass by the keys.
    self.assertIn("can, by latent.decode_tpu", said(tokens=64))
    for changes, words in (
        ({"padded": False}, r"latent rows of 576 numbers: .*caches.latent.init\(padded=True\)"),
        ({"held": "int8", "padded": False}, "a rotary part of 64 numbers: .*padded=True"),
        ({"held": "int8", "widths": (10, 4)}, "latents of 10 numbers in int8"),
        ({"slots": 72}, "72 slots of bfloat16"),
        ({"held": "int8", "slots": 48}, "48 slots of int8"),
        ({"dtype": "float16"}, "float16"),
        ({"tokens": 65}, "65 queries a row: decoding is for up to 64"),
        ({"precision": "highest"}, "precision")):
      self.assertRegex(said(**changes), f"not by .*latent.decode_tpu: .*{words}")

  def traced(self, held="bfloat16"):
    """Returns the text of the program that decodes one query of a long cache."""
    cache = jax.eval_shape(lambda: latent.init(B, 4096, (512, 64), dtype=held, padded=True))
    program = program_text.program(lambda query, cache: multi_latent_attention(
        query, None, cache_view=cache, latent_options=LatentOptions(nope_width=128),
        metadata=OperationMetadata(platform="tpu")).attention_outputs, (
            jax.ShapeDtypeStruct((B, 1, 16, 576), jnp.bfloat16), cache))
    return "\n".join(program_text.text(program))

  def test_a_block_of_rows_is_one_transfer(self):
    self.assertRegex(self.traced(), r"dma_start\b(?!\*)")
    self.assertNotRegex(self.traced(), r"dma_start\*")

  def test_float8_numbers_are_multiplied_as_they_are(self):
    found = set()
    def dot(k, a, b, *axes):
      found.add(b.dtype.name)
      return tpu_dot(k, a, b, *axes)
    tpu_dot = tpu_common.dot
    with mock.patch.object(tpu_common, "dot", dot):
      self.traced("float8_e4m3fn")
    self.assertEqual(found, {"float8_e4m3fn", "bfloat16"})  # latents, and the rotary part

  @unittest.skipIf(static_profile.missing(), f"nothing compiles: {static_profile.missing()}")
  @sampling.slow_parameters(("v6e", "bfloat16", 1), ("v6e", "int8", 1),
                            ("tpu7x", "float8_e4m3fn", 8), ("v5e", "float32", 4))
  def test_decoding_copies_no_cache(self, chip, held, tokens):
    place = SingleDeviceSharding(static_profile.devices(chip)[0])
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    dtype = "float32" if held == "float32" else "bfloat16"
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(
        lambda: latent.init(8, 4096, (512, 64), dtype=held, padded=True)))
    def run(query, rows, cache):
      found = multi_latent_attention(
          query, rows, cache_view=cache, latent_options=LatentOptions(nope_width=128),
          metadata=OperationMetadata(platform="tpu"))
      return found.attention_outputs, found.cache_view
    with jax.enable_x64(False):
      found = jax.jit(run, donate_argnums=2).trace(
          array(dtype, 8, tokens, 16, 576), array(dtype, 8, tokens, 576), cache).lower(
              lowering_platforms=("tpu",)).compile()
    self.assertEqual(found.as_text().count('custom_call_target="tpu_custom_call"'), 1)
    memory, size = found.memory_analysis(), cache.latents.size * cache.latents.dtype.itemsize
    self.assertGreaterEqual(memory.alias_size_in_bytes, size)
    self.assertLess(memory.temp_size_in_bytes, size // 2)


HELD = latent.init(B, 8, (L, R), dtype="float64")
ABSORBED = LatentOptions(L, R, NOPE)
UP = jnp.ones((L, 3, NOPE)), jnp.ones((L, 3, E))


class BadInputTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"latent_options": LatentOptions(L, R)}, "softmax_scale: got None for absorbed queries"),
      ({"latent_options": LatentOptions(L + 1, R, NOPE)},
       r"latents \(key\): got latent rows of 14 numbers; expected 15 = latent_width 11"),
      ({"latent_options": (L, R)}, "latent_options: got tuple"),
      ({"latent_options": LatentOptions(0, R)}, "latent_options.latent_width: got 0"),
      ({"latent_options": LatentOptions(L, R, 0)}, "latent_options.nope_width: got 0"),
      ({"latent_options": LatentOptions(L, R, key_up=UP[0])}, "got one of the two"),
      ({"latent_options": LatentOptions(L, R, None, UP[0][1:], UP[1])}, "latent_options.key_up"),
      ({"latent_options": LatentOptions(L, R, 5, *UP)}, "nope_width: got 5; expected 6"),
      ({"latent_options": LatentOptions(L, R, None, *UP)}, "query: got .*nope 6 of key_up"),
      ({"latent_options": LatentOptions(L, R, None, UP[0][:, :2], UP[1]),
        "query": jnp.ones((B, 8, 3, NOPE + R))}, "latent_options.key_up: got .*heads of the query"),
      ({"value": jnp.ones((B, 8, L))}, "value: got .*None with latent_options"),
      ({"key": jnp.ones((B, 8, 1, L + R))}, r"latents \(key\): got .*\[B, S, latent \+ rope\]"),
      ({"key": jnp.ones((B, 8, L + R), jnp.int32)},
       r"latents \(key\): got int32.2, 8, 14.; expected .*\[B, S, latent \+ rope\] of a floating"),
      ({"key": jnp.ones((3, 8, L + R))}, r"latents \(key\): got .*B of the query"),
      ({"key": jnp.ones((B, 8, L + R), jnp.float32)},
       r"latents \(key\): got .*query's dtype float64"),
      ({"query": jnp.ones((B, 8, 3, L))}, "query: got .*absorbed queries of latent_width 10"),
      ({"latent_options": None, "key": jnp.ones((B, 8, 3, L + R)),
        "value": jnp.ones((B, 8, 3, L + R)), "cache_view": HELD}, "None with a LatentCache"),
      ({"cache_view": HELD._replace(latents=HELD.latents[..., 1:])}, "latents: got"))
  def test_errors(self, changes, message):
    call = {"query": jnp.ones((B, 8, 3, L + R)), "key": jnp.ones((B, 8, L + R)), "value": None,
            "latent_options": ABSORBED, **changes}
    with self.assertRaisesRegex(ValueError, message):
      attention(**call)

  @parameterized.parameters(
      ({"widths": 576}, "widths: got 576"), ({"widths": (512, 0)}, "rope width: got 0"),
      ({"dtype": "int4"}, "dtype"), ({"rope_dtype": "int8"}, "rope_dtype: got int8"),
      ({"slots": 0}, "slots: got 0"))
  def test_init(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      latent.init(**{"batch": 2, "slots": 4, "widths": (512, 64), **changes})

  def test_a_cache_without_tokens_of_its_own(self):
    with self.assertRaisesRegex(ValueError, "latents: got .* expected .*14"):
      latent.append(HELD, jnp.ones((B, 2, L)))
    with self.assertRaisesRegex(ValueError, "cache: got DenseCache"):
      latent.append(latent.as_dense(HELD), jnp.ones((B, 2, L + R)))


if __name__ == "__main__":
  absltest.main()
