# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Generations of TPUs: what old ones refuse, and blocks for those with little vector memory."""

import itertools
import re
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (Heads, LatentOptions, OperationMetadata, PagesMetadata, PagesV2, attention,
                       explain)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import dense, pages
from attn_core.caches.paged import latent_pages
from attn_core_test import decode_cases, sampling


def metadata_of(version):
  """Returns the metadata of a call on TPUs that are described only."""
  mesh = AbstractMesh((1,), ("dp",), abstract_device=AbstractDevice(f"TPU {version}", 1, "tpu"))
  return OperationMetadata(platform="tpu", mesh=mesh)


class ChoiceTest(parameterized.TestCase):

  @parameterized.parameters(("v2", "blockwise"), ("v3", "blockwise"), ("v4", "flash_attn2"),
                            ("v5 lite", "flash_attn2"))
  def test_auto(self, version, chosen):
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    self.assertEqual(explain(x, x, x, metadata=metadata_of(version)).chosen, chosen)

  @parameterized.parameters("v2", "v3")
  def test_old_tpus_are_refused_by_name(self, version):
    words = f"a TPU {version}: the kernels for TPUs need a v4 or newer"
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.float32)
    with self.assertRaisesRegex(NotImplementedError, f"{words}.*mechanism='blockwise'"):
      jax.eval_shape(lambda x: attention(x, x, x, mechanism="flash_attn2",
                                         metadata=metadata_of(version)), x)
    query = jax.ShapeDtypeStruct((2, 1, 4, 128), jnp.bfloat16)
    cache = jax.eval_shape(lambda: dense.init(2, 512, (2, 128), dtype=jnp.bfloat16))
    found = str(explain(query, None, None, cache_view=cache, metadata=metadata_of(version),
                        **decode_cases.MODE))
    self.assertIn(f"by decode.xla, not by decode.tpu: {words}", found)
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 8, 16, Heads(2, 128, 128), jnp.bfloat16))
    tables = PagesMetadata(*(np.zeros(shape, np.int32) for shape in ((2, 4), (2,), (3,))))
    found = str(explain(jax.ShapeDtypeStruct((2, 4, 128), jnp.bfloat16), None, None, layout="thd",
                        cache_view=cache, cache_metadata=tables, metadata=metadata_of(version)))
    self.assertIn(f"by paged.xla, not by paged.tpu: {words}", found)

  def test_block_sizes_are_explained_as_requested(self):
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    self.assertFalse(any(explain(x, x, x, metadata=metadata_of("v4")).block_sizes))

  @parameterized.parameters((None, 2**24), (9_000_000, 9_000_000))
  def test_vector_memory_of_a_v4_is_limited_unless_the_call_says_it(self, given, limit):
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    lowered = jax.jit(lambda *x: attention(
        *x, mechanism="flash_attn2", vmem_limit_bytes=given, metadata=metadata_of("v4")
        ).attention_outputs).trace(x, x, x).lower(lowering_platforms=("tpu",))
    found = re.findall(r"size\\22: (\d+)", lowered.as_text())
    self.assertEqual(set(map(int, found)), {limit})


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):
  """Default blocks fit in the 16 MiB of a v4."""

  def metadata(self):
    return OperationMetadata(platform="tpu", mesh=Mesh(
        np.array(static_profile.devices("v4")[:1]), ("dp",)))

  @parameterized.parameters(*sampling.with_slow(
      [(False, "bfloat16")], (True, "bfloat16"), (False, "float32"), (True, "float32")))
  def test_attention(self, causal, dtype):
    """Compiles forward and backward."""
    metadata = self.metadata()
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), dtype, sharding=NamedSharding(metadata.mesh, P()))
    attend = lambda *x: attention(*x, mechanism="flash_attn2", causal=causal,
                                  metadata=metadata).attention_outputs
    def run(*x):
      out, pull = jax.vjp(attend, *x)
      return pull(out)
    jax.jit(run).trace(x, x, x).lower(lowering_platforms=("tpu",)).compile()

  @parameterized.parameters(*sampling.with_slow(
      [("pages", 1, (32, 8), "bfloat16"), ("dense", 8, (32, 8), "bfloat16")],
      *itertools.product(("pages", "dense"), (1, 8, 64), ((32, 8), (8, 1), (16, 16)),
                         ("bfloat16", "float32", "int8")),
      *itertools.product(("latent_rows",), (1, 8), ((16, 1), (128, 1)), ("bfloat16", "int8"))))
  def test_caches(self, kind, queries, heads, dtype):
    """Compiles one kernel over a cache, or says why plain XLA runs."""
    metadata, rows, (H, K) = self.metadata(), 4, heads
    place = NamedSharding(metadata.mesh, P())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    compute = "bfloat16" if dtype == "int8" else dtype
    about = PagesMetadata(*(array(jnp.int32, *x) for x in ((rows, 256), (rows,), (rows + 1,))))
    options = {"layout": "thd", "cache_metadata": about}
    query, new = array(compute, rows * queries, H, 128), None
    if kind == "dense":
      make = lambda: dense.init(rows, 4096, (K, 128), dtype=dtype)
      query, options = array(compute, rows, queries, H, 128), {}
    elif kind == "pages":
      make = lambda: pages.init(PagesV2, 1024, 16, Heads(K, 128, 128), dtype,
                                "tensor" if dtype == "int8" else None)
    else:
      make = lambda: latent_pages.init(1024, 64, (512, 64), dtype=dtype, padded=True)
      query, new = array(compute, rows * queries, H, 576), array(compute, rows * queries, 576)
      options |= {"latent_options": LatentOptions(512, 64), "softmax_scale": 0.1}
    cache = jax.tree.map(lambda x: array(x.dtype, *x.shape), jax.eval_shape(make))
    found = explain(query, new, None, cache_view=cache, metadata=metadata, **options)
    kernel = next(v for v in found.verdicts if v.mechanism == found.chosen)
    about = options.pop("cache_metadata", None)
    call = lambda query, new, cache, about: attention(
        query, new, None, cache_view=cache, metadata=metadata, cache_metadata=about,
        **options).attention_outputs
    text = jax.jit(call).trace(query, new, cache, about).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    is_kernel = kernel.kernel in ("decode.tpu", "paged.tpu", "latent.pages_tpu", "flash.tpu")
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), int(is_kernel))
    if not is_kernel:
      self.assertIn("bytes", str(kernel))
    elif dtype == "bfloat16":
      self.assertIn(kernel.kernel, ("decode.tpu", "paged.tpu", "latent.pages_tpu"))


if __name__ == "__main__":
  absltest.main()
