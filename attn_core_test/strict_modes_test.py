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
    output = attention(**case.arguments, **arrays, **more, mechanism=mechanism,
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


class CacheTest(parameterized.TestCase):
  """Caches and pages: their own functions, and attention to them."""

  @parameterized.product(kind=("dense", "window"), held=("float32", "bfloat16", "int8"),
                         tokens=(1, 3))
  def test_caches(self, kind, held, tokens):
    x = jnp.ones((2, tokens, 2, 8), "bfloat16" if held == "int8" else held)
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

  @parameterized.product(layout=(PagesV1, PagesV2, PagesV3), held=("float32", "bfloat16", "int8"))
  def test_pages(self, layout, held):
    dtype = "bfloat16" if held == "int8" else held
    single, writes = layout is PagesV1, layout is PagesV3
    tokens = 2 if single else 5
    query, key = jnp.ones((tokens, 4, 128), dtype), jnp.ones((tokens, 2, 128), dtype)
    metadata = PagesMetadata([[0, 1], [2, 3]], [17, 9], None if single else [0, 1, 5])
    arrays = {"query": query, "softmax_aux": jnp.ones(4, dtype)}
    with strict():
      cache = pages.init(layout, 4, 16, Heads(2, 128, 128), held,
                         "token" if held == "int8" else None)
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


if __name__ == "__main__":
  absltest.main()
