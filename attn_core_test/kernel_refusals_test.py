# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of the kernels for GPUs and TPUs: a call beyond one is refused by name, its like runs."""

from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2,
                       explain, masks)
from attn_core.caches import pages
from attn_core.kernels.gpu.flash import tiling as gpu_tiling
from attn_core.kernels.gpu.split_kv import decode as gpu_decode, paged as gpu_paged
from attn_core.kernels.tpu.flash import tiling as tpu_tiling
from attn_core.kernels.tpu.ragged import paged_tiling as tpu_paged
from attn_core.kernels.xla import decode as xla_decode
from attn_core.types import AttentionSpec, MaskOperands, Operands

HOPPER = OperationMetadata(platform="gpu", compute_capability="9.0")
SPEC = AttentionSpec(jax.tree.structure(masks.causal()), 0.125)


def operands(width: int = 64, value_width: int | None = None, dtype: str = "bfloat16",
             length: int = 512) -> Operands:
  """Shapes of one row and head."""
  shape = lambda n: jax.ShapeDtypeStruct((1, length, 1, n), dtype)
  return Operands(shape(width), shape(width), shape(value_width or width), None,
                  MaskOperands(()), None, None)


def gpu_forward(requested: BlockSizes = BlockSizes(), **shape: Any) -> None:
  gpu_tiling.make_tiling(operands(**shape), SPEC, requested)


def gpu_backward(requested: BlockSizes = BlockSizes(), **shape: Any) -> None:
  gpu_tiling.make_backward_tilings(operands(**shape), SPEC, requested)


def gpu(requested: BlockSizes = BlockSizes(), **shape: Any) -> None:
  gpu_forward(requested, **shape)
  gpu_backward(requested, **shape)


def tpu(requested: BlockSizes = BlockSizes(), *, backward: bool = False, **shape: Any) -> None:
  found = tpu_tiling.make_tiling(operands(**shape), SPEC, requested, backward=backward)
  tpu_tiling.vmem_limit(requested, found, operands(**shape), backward=backward)


# (name, the call that is refused, its exception, words, the like of it that is taken)
TILINGS = (
    *((f"{tiled.__name__}_{name}", lambda tiled=tiled, shape=shape: tiled(**shape),
       NotImplementedError, words, lambda tiled=tiled, like=like: tiled(**like))
      for tiled in (gpu_forward, gpu_backward)
      for name, shape, words, like in (
          ("dtype", {"dtype": "float32"}, "query: dtype float32", {"dtype": "float16"}),
          ("width", {"width": 257}, "width 257", {"width": 256}),
          ("value_width", {"value_width": 264}, "value: width 264", {"value_width": 8}))),
    ("gpu_heads", lambda: gpu(BlockSizes(block_heads=2)), ValueError, "block_heads: got 2", gpu),
    ("gpu_block_q", lambda: gpu(BlockSizes(block_q=96)), ValueError, "block_q: got 96",
     lambda: gpu(BlockSizes(block_q=128))),
    ("gpu_block_q_0", lambda: gpu(BlockSizes(block_q=0)), ValueError, "block_q: got 0", gpu),
    ("gpu_block_kv", lambda: gpu(BlockSizes(block_kv=2**14)), ValueError, "block_kv: got 16384",
     lambda: gpu(BlockSizes(block_kv=64))),
    ("gpu_block_kv_backward", lambda: gpu(BlockSizes(block_kv_backward=192)), ValueError,
     "block_kv_backward: got 192", lambda: gpu(BlockSizes(block_kv_backward=128))),
    ("gpu_memory_backward", lambda: gpu(BlockSizes(block_kv_backward=128), width=256), ValueError,
     "block_kv_backward: 128 keys need .* KiB", lambda: gpu(
         BlockSizes(block_kv_backward=64), width=256)),
    ("gpu_memory", lambda: gpu(BlockSizes(block_kv=192), width=256), ValueError,
     "blocks of 128 queries and 192 keys need 260 KiB",
     lambda: gpu(BlockSizes(block_kv=128), width=256)),
    ("gpu_memory_of_values", lambda: gpu(BlockSizes(block_kv=128), width=192, value_width=256),
     ValueError, "blocks of 128 queries and 128 keys need 228 KiB",
     lambda: gpu(BlockSizes(block_kv=192), value_width=256)),
    ("tpu_block_q", lambda: tpu(BlockSizes(block_q=200)), ValueError, "block_q: got 200",
     lambda: tpu(BlockSizes(block_q=256))),
    ("tpu_block_kv", lambda: tpu(BlockSizes(block_kv=511)), ValueError, "block_kv: got 511",
     lambda: tpu(BlockSizes(block_kv=512))),
    ("tpu_heads", lambda: tpu(BlockSizes(block_heads=2)), ValueError, "block_heads: got 2", tpu),
    ("tpu_memory", lambda: tpu(BlockSizes(block_q=2**14, block_kv=2**14), length=2**14),
     ValueError, "MiB of vector memory", lambda: tpu(length=2**14)),
    ("tpu_memory_limit", lambda: tpu(BlockSizes(block_q=512, block_kv=512, vmem_limit_bytes=2**18)),
     ValueError, "MiB of vector memory", lambda: tpu(
         BlockSizes(block_q=512, block_kv=512, vmem_limit_bytes=2**25))),
)

R, TOKENS = 4, 8


def paged(kernel: str, *, kind: type = PagesV1, size: int = 32, key_heads: int = 4, width: int = 64,
          stored: str = "bfloat16", scales: str | None = None, query: str = "bfloat16",
          tokens: int = TOKENS, columns: int = 4) -> str | None:
  """Returns why a kernel refuses pages; None: it takes them."""
  heads = Heads(key_heads, width, width)
  cache = jax.eval_shape(lambda: pages.init(kind, R * columns, size, heads, stored, scales))
  metadata = PagesMetadata(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (
      (R, columns), (R,), (R + 1,))))
  queries = jax.ShapeDtypeStruct((tokens, 2 * key_heads, width), query)
  if kernel == "gpu":
    return gpu_paged.unsupported_reason(queries, cache, metadata, heads)
  return tpu_paged.unsupported_reason(queries, cache, metadata, heads, BlockSizes())


EIGHT = dict(stored="int8", scales="token")
# (name, kernel, arguments, words, arguments of the like that is taken)
PAGED = (
    ("dtype", "gpu", dict(query="float16"), "pages of bfloat16", {}),
    ("page", "gpu", dict(size=12), "pages of 12 tokens", dict(size=16)),
    ("width", "gpu", dict(width=72), "head_dim of 72", dict(width=80)),
    ("width_quantized", "gpu", dict(width=80, **EIGHT), "head_dim of 80, quantized",
     dict(width=96, **EIGHT)),
    ("query_quantized", "gpu", dict(query="float16", **EIGHT), "dtype float16 with quantized",
     EIGHT),
    ("scales_of_heads", "gpu", dict(key_heads=3, **EIGHT), "scales of 3 heads for", EIGHT),
    ("scales_of_one_head", "gpu", dict(key_heads=1, size=12, **EIGHT), "pages of 12 tokens",
     dict(key_heads=1, size=8, **EIGHT)),
    ("one_scale", "gpu", dict(key_heads=3, size=12, stored="int8", scales="tensor"),
     "pages of 12 tokens", dict(key_heads=3, size=16, stored="int8", scales="tensor")),
    ("splits", "gpu", dict(tokens=2**14, columns=2**14), "16384 queries and page tables of",
     dict(tokens=2**6, columns=2**6)),
    ("dtype", "tpu", dict(query="float32"), "queries of float32 and pages of bfloat16", {}),
    ("half", "tpu", dict(query="float16", stored="float16"), "queries of float16", {}),
    ("wide", "tpu", dict(width=192), "head_dim 192", dict(width=256)),
    ("page", "tpu", dict(size=2**15, width=256), "pages of 32768 tokens", dict(size=256)),
    ("page_of_scales", "tpu", dict(size=250, width=128, **EIGHT),
     "pages of 250 tokens: .* 64 pages", dict(size=100, **EIGHT)),
    ("tables", "tpu", dict(columns=2**16), "bytes of scalar memory", dict(columns=2**10)),
    ("query_8_bits", "tpu", dict(query="float16", **EIGHT), "queries of float16", EIGHT),
    ("v2", "tpu", dict(kind=PagesV2, width=160), "head_dim 160", dict(kind=PagesV2, width=128)),
)


class KernelRefusalsTest(parameterized.TestCase):

  @parameterized.named_parameters(*TILINGS)
  def test_blocks(self, refused, exception, words, taken):
    with self.assertRaisesRegex(exception, words):
      refused()
    taken()

  @parameterized.named_parameters(*[(f"{case[1]}_{case[0]}", *case[1:]) for case in PAGED])
  def test_pages(self, kernel, refused, words, taken):
    self.assertRegex(paged(kernel, **refused) or "", words)
    self.assertIsNone(paged(kernel, **taken))

  @parameterized.parameters(
      (dict(dtype="float32"), "dtype float32"), (dict(widths=(72, 64)), "a head_dim of 72"),
      (dict(widths=(64, 72)), "a value width of 72"), (dict(lengths=(65, 64)), "65 queries a row"),
      (dict(lengths=(1, 68)), "a cache of 68 slots"),
      (dict(dtype="float16", quantized=True), "dtype float16 with quantized"),
      (dict(widths=(80, 80), quantized=True), "a head_dim of 80, quantized"),
      (dict(widths=(64, 80), quantized=True), "a value width of 80, quantized"))
  def test_caches(self, change, words):
    good = dict(dtype="bfloat16", widths=(64, 96), lengths=(64, 72), quantized=False)
    self.assertIsNone(gpu_decode.unsupported_reason(**good))
    self.assertRegex(gpu_decode.unsupported_reason(**good | change) or "", words)

  def test_widths_of_both_operands_count(self):
    """The kernel is told both; where it refuses, another mechanism of the platform runs."""
    def reasons(width, value_width, mechanism, tokens=64):
      shape = lambda n: jax.ShapeDtypeStruct((1, tokens, 4, n), jnp.bfloat16)
      found = explain(shape(width), shape(width), shape(value_width), mechanism=mechanism,
                      metadata=HOPPER)
      return str(next(x for x in found.verdicts if x.mechanism == mechanism))
    for widths in ((64, 320), (320, 64)):
      self.assertIn("head_dim of 320", reasons(*widths, "cuda_flash_attn2"))
    self.assertNotIn("head_dim of", reasons(64, 256, "cuda_flash_attn2"))

  @parameterized.parameters("cpu", "gpu", "tpu")
  def test_mechanisms_over_pages_need_pages(self, platform):
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    said = explain(x, x, x, metadata=OperationMetadata(platform=platform))
    over_pages = [v for v in said.verdicts if "page" in v.mechanism]
    self.assertLen(over_pages, 4)
    for verdict in over_pages:
      self.assertRegex(", ".join(verdict.reasons),
                       "no cache_view in pages: it reads a Pages(V[123]|Latent)$")

  def test_a_cache_and_a_mask_with_operands_of_its_own(self):
    kernel = gpu_decode.make_kernel(xla_decode.KERNEL)
    mask = masks.custom(lambda batch, head, query, key, limit: key < limit, np.int32(9))
    whole = operands()._replace(mask=MaskOperands((mask.operands[0],)))
    whole = whole._replace(query=jax.ShapeDtypeStruct((1, 1, 1, 64), "bfloat16"))
    kernel.check(whole._replace(mask=MaskOperands(())), SPEC, BlockSizes())
    with self.assertRaisesRegex(NotImplementedError, "masks.custom with operands"):
      kernel.check(whole, SPEC._replace(mask=jax.tree.structure(mask)), BlockSizes())


if __name__ == "__main__":
  absltest.main()
