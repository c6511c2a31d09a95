# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls where JAX promotes neither dtypes nor ranks, looks for NaN, or has 64-bit numbers.

Programs are traced and lowered, not run, except where NaN are looked for: what is refused is
refused then.
"""

import contextlib
import functools
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       RingConfig, attention, caches, masks, table)
from attn_core.caches import pages
from attn_core_test import property_cases, sampling
from attn_core_test.property_cases import BY_NAME

jax.config.update("jax_num_cpu_devices", 8)

CPU = ("vanilla", "sdpa", "blockwise", "autoregressive_decodeattn")
NARROW = OperationMetadata(runtime_softmax_dtype="bfloat16")
# name -> (dtype of the operands, dtype of bias and sinks, more arguments)
DTYPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": ("float32", "float32", {}), "bfloat16": ("bfloat16", "bfloat16", {}),
    "wide_floats": ("bfloat16", "float32", {}), "narrow_floats": ("float32", "bfloat16", {}),
    "narrow_softmax": ("bfloat16", "bfloat16", {"metadata": NARROW}),
    "narrow_softmax_of_float32": ("float32", "float32", {"metadata": NARROW}),
    "computed_narrow": ("float32", "float32", {"compute_dtype": "bfloat16"})}
QUICK = [(mechanism, case, "bfloat16") for mechanism in CPU
         for case in ("everything", "unnormalized", "causal_gqa", "bias_and_mask")] + [
             (mechanism, case, dtypes) for mechanism in CPU for case, dtypes in (
                 ("everything", "wide_floats"), ("sinks", "narrow_softmax"),
                 ("bias_full", "computed_narrow"))]
MESHED = [("flash_attn2", "tpu", "everything"), ("ring", "cpu", "segments"),
          ("autoregressive_decodeattn", "tpu", "segments")]
ALL = [(mechanism, case, dtypes) for mechanism in CPU for case in BY_NAME for dtypes in DTYPES]


@contextlib.contextmanager
def strict():
  """Promotes nothing; programs traced before are traced again."""
  jax.clear_caches()
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def supports(mechanism, platform, *features) -> bool:
  return set(features) <= table.TABLE[mechanism, platform].general.features


def derivatives(run, arrays):
  """Returns the values of a function, its gradient and its derivative along the arrays."""
  def loss(arrays):
    found = [x for x in jax.tree.leaves(run(arrays)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32).sum() for x in found)
  return run(arrays), jax.grad(loss)(arrays), jax.jvp(loss, (arrays,), (arrays,))[1]


def lowered(run, arrays, platform="cpu"):
  """Lowers values and derivatives."""
  return jax.jit(functools.partial(derivatives, run)).trace(arrays).lower(
      lowering_platforms=(platform,))


def case_of(mechanism, name, dtypes):
  """Returns (function of arrays -> outputs, arrays) of a case; None: it is not supported."""
  case, (dtype, floats, more) = BY_NAME[name], DTYPES[dtypes]
  arrays = {name: x if name in ("query", "key", "value") else x.astype(floats)
            for name, x in property_cases.operands(case, dtype).items()}
  return_lse = mechanism != "sdpa"  # it has no gradient there
  def run(arrays):
    output = attention(**property_cases.arguments(case, arrays), **more, mechanism=mechanism,
                       return_lse=return_lse)
    return output.attention_outputs, output.lse
  try:
    jax.eval_shape(run, arrays)
  except NotImplementedError:
    return None
  return run, arrays


class PromotionTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(QUICK, *(x for x in ALL if x not in QUICK)))
  def test_values_and_derivatives(self, *parameters):
    found = case_of(*parameters)
    if found is None:
      self.skipTest("refused by name")
    with strict():
      lowered(*found)

  @parameterized.parameters(
      *sampling.with_slow(MESHED, *((mechanism, platform, case)
          for mechanism in ("flash_attn2", "ring", "autoregressive_decodeattn")
          for platform in ("cpu", "tpu")
          for case in ("everything", "segments", "full")
          if (mechanism, platform, case) not in MESHED)))
  def test_kernels_over_a_mesh(self, mechanism, platform, case):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"),
                         axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rng, ids = np.random.default_rng(0), np.repeat(np.int32([[0, 1], [0, -1]]), 64, 1)
    shape = (2, 1 if mechanism == "autoregressive_decodeattn" else 128, 4, 64)
    arrays = {"query": rng.normal(size=shape), "key": rng.normal(size=(2, 128, 2, 64)),
              "value": rng.normal(size=(2, 128, 2, 64)), "softmax_aux": rng.normal(size=4)}
    more = {"query_offset": [127, 5]} if shape[1] == 1 else {}
    if case == "segments":
      more["mask"] = masks.segments(ids[:, :shape[1]] * 0, ids)
    if case == "everything":
      more |= dict(sliding_window=(70, 0), logits_soft_cap=3.0)
      if shape[1] > 1:
        more |= dict(dropout_prob=0.1, dropout_rng=np.uint32([1, 2]), deterministic=False)
        arrays["bias"] = rng.normal(size=(2, 4, 128, 128))
    if case == "full":
      more["causal"] = False
    arrays = {name: jnp.asarray(x, "bfloat16") for name, x in arrays.items()}
    metadata = OperationMetadata(mesh=mesh, platform=platform)
    run = lambda arrays: attention(**arrays, **more, mechanism=mechanism, metadata=metadata,
                                   return_lse=True)[::2]
    with strict():
      lowered(run, arrays, platform)

  @parameterized.parameters("contiguous", "zigzag", "striped")
  def test_token_orders_of_a_ring(self, order):
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    metadata = OperationMetadata(mesh=mesh, ring=RingConfig(layout=order))
    x = jnp.ones((1, 64, 2, 8), "bfloat16")
    with strict():
      lowered(lambda x: attention(x, x, x, mechanism="ring", metadata=metadata,
                                  sliding_window=(9, 0))[:1], x)


SCALES = {"int8": "token", "int4": "group"}  # of quantized pages


class CacheTest(parameterized.TestCase):
  """Caches and pages: their own functions, and attention to them."""

  @parameterized.product(kind=("dense", "window"), held=("float32", "bfloat16", "int8", "int4"),
                         tokens=(1, 3))
  def test_caches(self, kind, held, tokens):
    x = jnp.ones((2, tokens, 2, 8), "bfloat16" if held in SCALES else held)
    with strict():
      cache = getattr(caches, kind).init(2, 8, (2, 8), dtype=held)
      def run(query, cache=cache):
        output = attention(query, x, x, cache_view=cache, sliding_window=(4, 0),
                           cache_metadata=caches.CacheMetadata(lengths=[tokens, 1], starts=[0, 0]))
        cache = output.cache_view
        again = attention(query, None, None, cache_view=cache, sliding_window=(4, 0))
        return output.attention_outputs, again.attention_outputs
      lowered(run, x)
      if kind == "dense":
        prefilled = caches.dense.append(cache, x, x)
        attention(x, x, x, cache_view=prefilled,
                  cache_metadata=caches.CacheMetadata(slots=[1, 0]))
        window = caches.window.from_dense(prefilled, 4)
        caches.window.to_dense(window, 6)
        caches.concatenate(query=x, key=x, value=x, cache_view=cache,
                           mode="__prefill__").init_attention_bias()

  @parameterized.product(layout=(PagesV1, PagesV2, PagesV3),
                         held=("float32", "bfloat16", "int8", "int4"))
  def test_pages(self, layout, held):
    dtype = "bfloat16" if held in SCALES else held
    single, writes = layout is PagesV1, layout is PagesV3
    tokens = 2 if single else 5
    query, key = jnp.ones((tokens, 4, 128), dtype), jnp.ones((tokens, 2, 128), dtype)
    metadata = PagesMetadata([[0, 1], [2, 3]], [17, 9], None if single else [0, 1, 5])
    arrays = {"query": query, "softmax_aux": jnp.ones(4, dtype)}
    with strict():
      cache = pages.init(layout, 4, 16, Heads(2, 128, 128), held, SCALES.get(held))
      cache = pages.append(cache, key, key, pages.slots(metadata, 16, tokens))
      pages.from_dense(cache, *pages.to_dense(cache, metadata, dtype=dtype), metadata)
      if held == dtype:
        arrays["cache"] = cache
      def run(arrays, platform, cache=cache):
        whole = arrays.get("cache", cache)
        return attention(
            arrays["query"], *((key, key) if writes else (None, None)), layout="thd",
            cache_view=whole, cache_metadata=metadata, softmax_aux=arrays["softmax_aux"],
            sliding_window=(9, 0), logits_soft_cap=4.0, return_lse=True,
            metadata=OperationMetadata(platform=platform))[::2]
      for platform in ("cpu", "tpu")[:1 + (held == "bfloat16")]:
        lowered(functools.partial(run, platform=platform), arrays, platform)

  def test_stripes_of_pages(self):
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                         devices=jax.devices()[:4])
    metadata = PagesMetadata(np.int32([[[[0, 1]], [[1, 0]]]]), np.int32([[30]]),
                             np.int32([[0, 3]]))
    arrays = {"query": jnp.ones((3, 4, 8), "bfloat16"), "cache": pages.init(
        PagesV2, 4, 8, Heads(2, 8, 8), "bfloat16"), "sinks": jnp.ones(4, "bfloat16")}
    run = lambda arrays: attention(
        arrays["query"], None, None, layout="thd", cache_view=arrays["cache"],
        cache_metadata=metadata, softmax_aux=arrays["sinks"], return_lse=True,
        metadata=OperationMetadata(mesh=mesh))[::2]
    with strict():
      lowered(run, arrays)


@contextlib.contextmanager
def strict_with_64_bits():
  with strict(), jax.enable_x64(True):
    yield


def random(*shape, dtype="float32"):
  return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def dense_call(mechanism, dtype="float32", **more):
  """Returns (function of arrays -> outputs, arrays) of a call with a query that sees nothing."""
  arrays = {"query": random(2, 9, 4, 8, dtype=dtype), "key": random(2, 9, 2, 8, dtype=dtype),
            "value": random(2, 9, 2, 8, dtype=dtype)}
  arrays |= {name: more.pop(name) for name in ("bias", "softmax_aux") if name in more}
  more = {"query_offset": -2, "return_lse": mechanism != "sdpa"} | more
  run = lambda arrays: attention(**arrays, **more, mechanism=mechanism)[:3:2]
  return run, arrays


def cache_call(kind, dtype="float32", held=None):
  """Returns a call that fills a cache, decodes a token and takes other requests."""
  x = {"query": random(2, 5, 4, 8, dtype=dtype), "key": random(2, 5, 2, 8, dtype=dtype)}
  def run(arrays):
    query, key = arrays["query"], arrays["key"]
    cache = getattr(caches, kind).init(2, 8, (2, 8), dtype=held or dtype)
    if held:
      key = jax.lax.stop_gradient(key)
    def step(cache, tokens, **more):
      return attention(query[:, :tokens], key[:, :tokens], key[:, :tokens], cache_view=cache,
                       sliding_window=(4, 0), return_lse=True,
                       cache_metadata=caches.CacheMetadata(**more))
    prefill = step(cache, 5, lengths=[5, 0])
    decode = step(prefill.cache_view, 1)
    taken = step(decode.cache_view, 5, slots=[1, 0])
    return [x[:3:2] for x in (prefill, decode, taken)]
  return run, x


def pages_call(layout, dtype="float32", held=None):
  """Returns a call over pages, with a request of no tokens and unused rows."""
  single, writes = layout is PagesV1, layout is PagesV3
  tokens = 3 if single else 6
  new = random(tokens, 2, 8, dtype=dtype)
  requests = PagesMetadata([[0, 1], [2, 3], [0, 0]], [17, 9, 0],
                           None if single else [0, 1, 5, 5])
  cache = pages.init(layout, 4, 16, Heads(2, 8, 8), held or dtype, "token" if held else None)
  cache = pages.append(cache, *[random(64, 2, 8, dtype=dtype)] * 2, np.arange(64))
  arrays = {"query": random(tokens, 4, 8, dtype=dtype), "softmax_aux": random(4, dtype=dtype)}
  if not held:
    arrays["cache"] = cache
  def run(arrays):
    return attention(arrays["query"], *((new, new) if writes else (None, None)), layout="thd",
                     cache_view=arrays.get("cache", cache), cache_metadata=requests,
                     softmax_aux=arrays["softmax_aux"], sliding_window=(9, 0),
                     return_lse=True)[:3:2]
  return run, arrays


def loss_of(run):
  def loss(arrays):
    found = [x for x in jax.tree.leaves(run(arrays)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32).sum() for x in found)
  return loss


# (function that makes a call, its argument); the calls of every mechanism that runs on a CPU.
CALLS = {**{mechanism: functools.partial(dense_call, mechanism) for mechanism in CPU},
         **{f"cache_{kind}": functools.partial(cache_call, kind) for kind in ("dense", "window")},
         **{layout.__name__: functools.partial(pages_call, layout)
            for layout in (PagesV1, PagesV2, PagesV3)}}
OF_8_BITS = {"cache_int8": functools.partial(cache_call, "dense", held="int8"),
             "pages_int8": functools.partial(pages_call, PagesV3, held="int8")}
MODES = {"dtypes": lambda: jax.numpy_dtype_promotion("strict"),
         "ranks": lambda: jax.numpy_rank_promotion("raise"),
         "64_bits": lambda: jax.enable_x64(True), "all": strict_with_64_bits}
stacked = functools.partial(jax.tree.map, lambda x: jnp.stack([x, x]))
TRANSFORMATIONS: dict[str, Any] = {
    "vmap": lambda run, x: jax.vmap(run)(stacked(x)), "grad": lambda run, x: jax.grad(
        loss_of(run))(x),
    "grad_of_vmap": lambda run, x: jax.grad(loss_of(jax.vmap(run)))(stacked(x)),
    "vmap_of_grad": lambda run, x: jax.vmap(jax.grad(loss_of(run)))(stacked(x)),
    "forward_over_reverse": lambda run, x: jax.jvp(jax.grad(loss_of(run)), (x,), (x,)),
    "remat": lambda run, x: jax.grad(jax.checkpoint(loss_of(run)))(x),
    "scan": lambda run, x: jax.lax.scan(lambda carry, x: (carry, run(x)), 0, stacked(x))}
EACH = [(mode, call, way) for mode in MODES for call in CALLS for way in TRANSFORMATIONS]
SOME = [("all", call, way) for call in CALLS for way in ("vmap_of_grad", "forward_over_reverse")]


class ListsTest(parameterized.TestCase):

  @parameterized.product(platform=("cpu", "cuda", "tpu"), blocks=((1, 64), (128, 128)))
  def test_lists_of_blocks(self, platform, blocks):
    rows = -(-300 // blocks[0])
    indices = np.random.default_rng(0).integers(-1, 3, (2, 1, rows, 2)).astype(np.int32)
    mask = masks.causal() & masks.selected_blocks(indices, *blocks)
    place = OperationMetadata(platform="gpu", compute_capability="9.0") if platform == "cuda" else (
        OperationMetadata(platform=platform))
    run = lambda x: attention(x, x, x, mask=mask, mechanism="flash_attn2", metadata=place
                              ).attention_outputs
    with strict():
      jax.jit(jax.grad(loss_of(run))).trace(jnp.ones((2, 300, 2, 64), jnp.bfloat16)).lower(
          lowering_platforms=(platform,))


class TransformationTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(SOME, *(x for x in EACH if x not in SOME)))
  def test_modes(self, mode, call, transformation):
    run, arrays = CALLS[call]()
    jax.clear_caches()
    found = {}
    def transformed(arrays):
      found["shapes"] = jax.eval_shape(run, arrays)
      return TRANSFORMATIONS[transformation](run, arrays)
    with MODES[mode]():
      jax.jit(transformed).trace(arrays).lower(lowering_platforms=("cpu",))
    for x in jax.tree.leaves(found["shapes"]):
      self.assertEqual(x.dtype, jnp.float32)


class NanTest(parameterized.TestCase):
  """`jax_debug_nans`: legitimate calls raise nothing, op by op nor compiled."""

  def check(self, run, arrays, eager=False):
    ones = jax.tree.map(jnp.ones_like, arrays)
    loss = loss_of(run)
    def derivatives(arrays):
      return (run(arrays), jax.grad(loss)(arrays),
              jax.jvp(jax.grad(loss), (arrays,), (ones,))[1])
    with jax.debug_nans(True):
      jax.block_until_ready(derivatives(arrays) if eager else jax.jit(derivatives)(arrays))

  @parameterized.product(call=(*CALLS, *OF_8_BITS))
  def test_calls(self, call):
    self.check(*{**CALLS, **OF_8_BITS}[call]())

  @parameterized.parameters(*CALLS)
  @sampling.slow("strict_modes_test.NanTest.test_calls_op_by_op")
  def test_calls_op_by_op(self, call):
    for dtype in ("float32", "bfloat16"):
      self.check(*CALLS[call](dtype=dtype), eager=True)

  @parameterized.product(mechanism=("vanilla", "sdpa", "blockwise"),
                         name=("bias", "bias_causal", "sinks", "no_key", "dropout", "large"))
  def test_infinite_logits(self, mechanism, name):
    hidden = np.random.default_rng(0).random((2, 4, 9, 9)) < 0.5
    hidden[:, :, 3] = True
    bias = jnp.where(hidden, -jnp.inf, 0)
    more: dict[str, Any] = {
        "bias": {"bias": bias, "causal": False}, "bias_causal": {"bias": bias},
        "sinks": {"softmax_aux": jnp.full(4, -jnp.inf)},
        "no_key": {"mask": np.zeros((1, 1, 9, 9), bool)}, "large": {"softmax_scale": 1e4},
        "dropout": {"dropout_prob": 0.5, "dropout_rng": jax.random.key(0)}}[name]
    if mechanism == "sdpa" and name in ("sinks", "dropout"):
      self.skipTest("refused by name")
    self.check(*dense_call(mechanism, query_offset=0, **more))

  @parameterized.parameters(*CPU)
  def test_nan_in_padding(self, mechanism):
    run, arrays = dense_call(mechanism, mask=masks.lengths(None, [7, 4]))
    with_nan = {"query": arrays["query"].at[:, :2].set(jnp.nan),
                **{name: arrays[name].at[:, 7:].set(jnp.nan) for name in ("key", "value")}}
    self.check(run, with_nan)

  def test_a_nan_that_is_seen_raises(self):
    run, arrays = dense_call("blockwise")
    with self.assertRaises(FloatingPointError):
      self.check(run, {**arrays, "key": arrays["key"].at[0, 0, 0, 0].set(jnp.nan)})


if __name__ == "__main__":
  absltest.main()
