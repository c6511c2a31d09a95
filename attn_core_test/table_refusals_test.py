# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Literal features and limits of every row of the table.

Tests that run calls take from the table which features to try, so that a feature that a row loses
would only turn them into skips. Here every row, feature and limit is a literal.
"""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import PagesMetadata, masks, table
from attn_core.caches.paged import layouts, ops
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import FEATURES, PagesRequest, Request
from attn_core.kernels.gpu import mosaic
from attn_core.sharding.paged import PagedShapes

# Mechanism -> {places: the kernels in the order in which they are asked}.
KERNELS = {
    "vanilla": {"cpu, gpu, tpu": "dense.vanilla"},
    "sdpa": {"cpu, tpu": "sdpa.xla", "gpu": "sdpa.cudnn"},
    "cudnn": {"gpu": "sdpa.cudnn"},
    "cuda_flash_attn2": {"gpu": "sdpa.cudnn", "gpu 9.0": "flash.gpu"},
    "blockwise": {"cpu, gpu, tpu": "flash.xla"},
    "flash_attn2": {"cpu": "flash.xla", "gpu": "sdpa.cudnn, flash.xla", "gpu 9.0": "flash.gpu",
                    "tpu": "flash.tpu"},
    "blocksparse": {"cpu": "flash.xla", "gpu": "sdpa.cudnn, flash.xla", "gpu 9.0": "flash.gpu",
                    "tpu": "flash.tpu"},
    "page_attention": {"cpu, gpu": "paged.xla", "gpu 9.0": "paged.gpu, paged.xla",
                       "tpu": "paged.tpu, paged.xla"},
    "ragged_page_attention_v2": {"cpu, gpu": "paged.xla", "gpu 9.0": "paged.gpu, paged.xla",
                                 "tpu": "paged.tpu, paged.xla"},
    "ragged_page_attention_v3": {
        "cpu, gpu": "paged.xla_writing", "gpu 9.0": "paged.gpu_writing, paged.xla_writing",
        "tpu": "paged.tpu_writing, paged.xla_writing"},
    "ring": {"cpu, gpu": "context_parallel.xla",
             "gpu 9.0": "context_parallel.gpu, context_parallel.xla",
             "tpu": "context_parallel.tpu_remote, context_parallel.tpu"},
    "autoregressive_decodeattn": {
        "cpu, gpu": "decode.xla, decode.dequantized",
        "gpu 9.0": "decode.gpu, decode.dequantized_gpu, decode.xla, decode.dequantized",
        "tpu": "decode.tpu, decode.dequantized_tpu, decode.xla, decode.dequantized"},
    "multi_latent_attention": {
        "cpu, gpu": "latent.projected, latent.decode, latent.absorbed",
        "gpu 9.0": "latent.decode_gpu, latent.projected_gpu, latent.projected, latent.decode, "
                   "latent.absorbed",
        "tpu": "latent.decode_tpu, latent.projected_tpu, latent.projected, latent.decode, "
               "latent.absorbed"},
    "multi_latent_ragged_page_attention": {
        "cpu, gpu": "latent.pages", "tpu": "latent.pages_tpu, latent.pages",
        "gpu 9.0": "latent.pages_gpu, latent.pages"},
}

# Kernel -> the features that it refuses; it supports all others.
REFUSED = {
    "dense.vanilla": (
        "block_sizes optimized vmem_limit_bytes sequence_layout quantized pages draft_mask scope "
        "prefixes stored_heads latent int4"),
    "sdpa.xla": (
        "value_width float16 float64 sinks soft_cap score_function dropout lse_gradient weights "
        "unnormalized precision softmax_dtype block_sizes optimized vmem_limit_bytes "
        "sequence_layout cache quantized pages draft_mask scope prefixes stored_heads latent int4"),
    "sdpa.cudnn": (
        "value_width float64 chunk segments score_mod score_function sinks soft_cap dropout lse "
        "lse_gradient weights unnormalized precision softmax_dtype block_sizes vmem_limit_bytes "
        "sequence_layout cache quantized pages draft_mask scope prefixes stored_heads latent "
        "selected int4"),
    "flash.xla": (
        "weights vmem_limit_bytes sequence_layout quantized pages draft_mask scope prefixes "
        "stored_heads latent int4"),
    "flash.gpu": (
        "float64 mask_operands weights precision softmax_dtype vmem_limit_bytes sequence_layout "
        "quantized pages draft_mask scope prefixes stored_heads latent int4"),
    "flash.tpu": (
        "float16 float64 mask_operands weights softmax_dtype sequence_layout quantized pages "
        "draft_mask scope prefixes stored_heads latent int4"),
    "paged.xla": (
        "segments positions mask mask_operands bias dropout weights "
        "unnormalized vmem_limit_bytes sequence_layout cache quantized latent selected"),
    "paged.gpu": (
        "float64 chunk segments positions mask mask_operands bias "
        "dropout weights unnormalized precision softmax_dtype vmem_limit_bytes sequence_layout "
        "cache quantized draft_mask scope latent selected int4"),
    "paged.tpu": (
        "float16 float64 chunk segments positions mask mask_operands bias dropout weights "
        "unnormalized precision softmax_dtype vmem_limit_bytes sequence_layout cache quantized "
        "latent selected int4"),
    "context_parallel.xla": (
        "weights vmem_limit_bytes cache quantized pages draft_mask scope prefixes stored_heads "
        "latent int4"),
    "context_parallel.gpu": (
        "float64 mask_operands weights precision softmax_dtype "
        "vmem_limit_bytes cache quantized pages draft_mask scope prefixes stored_heads latent "
        "selected int4"),
    "context_parallel.tpu": (
        "float16 float64 mask_operands weights softmax_dtype cache quantized pages "
        "draft_mask scope prefixes stored_heads latent selected int4"),
    "decode.xla": (
        "bias dropout weights vmem_limit_bytes sequence_layout pages "
        "draft_mask scope prefixes stored_heads latent selected"),
    "decode.gpu": (
        "float64 mask_operands bias dropout weights precision "
        "softmax_dtype vmem_limit_bytes sequence_layout pages draft_mask scope prefixes "
        "stored_heads latent selected int4"),
    "decode.tpu": (
        "float16 float64 bias dropout weights precision softmax_dtype "
        "vmem_limit_bytes sequence_layout pages draft_mask scope prefixes stored_heads latent "
        "selected int4"),
    "decode.dequantized": (
        "bias dropout weights vmem_limit_bytes sequence_layout pages "
        "draft_mask scope prefixes stored_heads latent selected"),
    "decode.dequantized_tpu": (
        "float16 float64 bias dropout weights softmax_dtype vmem_limit_bytes sequence_layout pages "
        "draft_mask scope prefixes stored_heads latent selected"),
    "decode.dequantized_gpu": (
        "float64 mask_operands bias dropout weights precision softmax_dtype vmem_limit_bytes "
        "sequence_layout pages draft_mask scope prefixes stored_heads latent selected"),
    "latent.projected": (
        "bias score_mod score_function dropout weights vmem_limit_bytes sequence_layout pages "
        "selected draft_mask scope prefixes stored_heads int4"),
    "latent.projected_tpu": (
        "float16 float64 bias score_mod score_function dropout weights softmax_dtype "
        "sequence_layout pages selected draft_mask scope prefixes stored_heads int4"),
    "latent.projected_gpu": (
        "float64 mask_operands bias score_mod score_function dropout weights precision "
        "softmax_dtype vmem_limit_bytes sequence_layout pages selected draft_mask scope prefixes "
        "stored_heads int4"),
    "latent.decode": (
        "bias score_mod score_function dropout weights vmem_limit_bytes sequence_layout pages "
        "draft_mask scope selected prefixes stored_heads int4"),
    "latent.decode_tpu": (
        "float16 float64 bias score_mod score_function dropout weights precision softmax_dtype "
        "vmem_limit_bytes sequence_layout pages draft_mask scope selected prefixes stored_heads "
        "int4"),
    "latent.decode_gpu": (
        "float64 mask_operands bias score_mod score_function dropout weights precision "
        "softmax_dtype vmem_limit_bytes sequence_layout pages draft_mask scope prefixes "
        "stored_heads selected int4"),
    "latent.absorbed": (
        "weights vmem_limit_bytes sequence_layout pages draft_mask scope prefixes stored_heads "
        "int4"),
    "latent.pages": (
        "value_width segments positions mask mask_operands bias score_mod score_function dropout "
        "weights unnormalized vmem_limit_bytes sequence_layout cache quantized selected "
        "stored_heads int4"),
    "latent.pages_tpu": (
        "float16 float64 value_width chunk segments positions mask mask_operands bias score_mod "
        "score_function dropout weights unnormalized precision softmax_dtype vmem_limit_bytes "
        "sequence_layout cache quantized selected stored_heads int4"),
    "latent.pages_gpu": (
        "float64 value_width chunk segments positions mask mask_operands bias score_mod "
        "score_function dropout weights unnormalized precision softmax_dtype vmem_limit_bytes "
        "sequence_layout cache quantized draft_mask scope selected stored_heads int4"),
}
# Mechanisms whose kernels for Hopper read one width only.
ONE_WIDTH = ("ragged_page_attention_v2", "ragged_page_attention_v3")

MEMORY = {"dense.vanilla": "quadratic", "sdpa.xla": "quadratic",
          "sdpa.cudnn": "linear without bias or mask written out"}  # others: "linear"

# What `accepted` tries.
DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDTHS = (8, 60, 64, 72, 80, 96, 128, 136, 192, 200, 256, 264, 384)
VALUE_WIDTHS = (64, 72, 256, 264)  # with D = 64
QUERIES = (1, 2, 64, 65, 4096)
SLOTS = (64, 100, 101, 104)
TPUS = (None, "v2", "v3", "v4", "v5e", "v7x")
TRANSFERS = ("collective", "remote")
TRIED = {"dtype": DTYPES, "width": WIDTHS, "value_width": VALUE_WIDTHS, "queries": QUERIES,
         "keys": SLOTS, "tpu_version": TPUS, "transfer": TRANSFERS}

HOPPER_WIDTHS = (64, 80, 96, 128, 192, 256)
CUDNN = {"dtype": ("float16", "bfloat16"), "width": (8, 64, 72, 80, 96, 128), "value_width": (64,)}
OF_HOPPER = {"dtype": ("float16", "bfloat16"), "width": WIDTHS[:-2], "value_width": (64, 72, 256)}
OF_TPU = {"dtype": ("bfloat16", "float32"), "tpu_version": (None, "v4", "v5e", "v7x")}
GRADIENTS = {**CUDNN, "queries": (2, 64, 4096), "keys": (64, 100, 104)}  # both are even

# (mechanisms, place, what is accepted of TRIED by the first kernel that is asked, all else: all).
LIMITS = (
    ("vanilla, blockwise, flash_attn2, blocksparse, autoregressive_decodeattn", "cpu", {}),
    ("ring", "cpu", {"transfer": ("collective",)}),
    ("sdpa", "cpu", {"dtype": ("bfloat16", "float32"), "value_width": (64,)}),
    ("sdpa, cudnn, cuda_flash_attn2", "gpu 8.0", CUDNN),
    ("sdpa, cudnn", "gpu 9.0", {**CUDNN, "width": (8, 64, 72, 80, 96, 128, 136, 192, 200, 256)}),
    ("sdpa, cudnn, flash_attn2", "gpu 7.5", {"dtype": ()}),
    ("flash_attn2, blocksparse", "gpu 8.0", GRADIENTS),
    ("flash_attn2, blocksparse, cuda_flash_attn2", "gpu 9.0", OF_HOPPER),
    ("ring", "gpu 9.0", {**OF_HOPPER, "transfer": ("collective",)}),
    ("autoregressive_decodeattn", "gpu 9.0", {
        "dtype": ("float16", "bfloat16"), "width": HOPPER_WIDTHS, "value_width": (64, 256),
        "queries": (1, 2, 64), "keys": (64, 104)}),
    ("flash_attn2, blocksparse", "tpu", OF_TPU),
    ("ring", "tpu", {**OF_TPU, "transfer": ("remote",)}),
    ("autoregressive_decodeattn", "tpu", {
        **OF_TPU, "width": (8, 60, 64, 72, 80, 96, 128, 256, 384), "value_width": (64, 72, 256),
        "queries": (1, 2, 64)}),
)

# Over pages: (dtype of the queries, dtype of the pages, kind of scales).
POOLS = (("float16", "float16", None), ("bfloat16", "bfloat16", None), ("float32", "float32", None),
         ("bfloat16", "int8", "token"), ("float16", "int8", "token"), ("float32", "int8", "tensor"),
         ("bfloat16", "float8_e4m3fn", "tensor"))
PAGE_SIZES = (4, 8, 12, 16)
PAGED_WIDTHS = (64, 72, 80, 128, 192, 256, 320, 384)
PAGED_LIMITS = (  # place, pools, page sizes, widths
    ("cpu", POOLS, PAGE_SIZES, PAGED_WIDTHS),
    ("gpu 9.0", (POOLS[0], POOLS[1], POOLS[3], POOLS[6]), (8, 16), (64, 80, 128, 192, 256)),
    ("tpu", (*POOLS[1:4], POOLS[5], POOLS[6]), PAGE_SIZES, (64, 72, 80, 128, 256, 384)),
)
ON_PAGES = {"page_attention": layouts.PagesV1, "ragged_page_attention_v2": layouts.PagesV2,
            "ragged_page_attention_v3": layouts.PagesV3}


def place_of(place: str) -> selection.Target:
  platform, _, capability = place.partition(" ")
  return selection.Target(platform, capability or None)


def request(place, *, dtype="bfloat16", width=64, value_width=None, queries=64, keys=64,
            features=(), **fields) -> Request:
  """Returns a request for one device with the features of its operands, and others."""
  value_width = width if value_width is None else value_width
  shape = lambda length, width: jax.ShapeDtypeStruct((1, length, 2, width), dtype)
  needed = {*features, *{"float16", "float64"} & {dtype},
            *(["value_width"] if value_width != width else [])}
  return Request(dict.fromkeys(needed, "given"), shape(queries, width), shape(keys, width),
                 shape(keys, value_width), jax.tree.structure(masks.full()),
                 capability=place_of(place).capability, **fields)


def paged_request(place, layout, pool, size, width) -> Request:
  """Returns a request over pages with 8 key heads and 16 query heads."""
  dtype, stored, scales = pool
  heads = layouts.Heads(8, width, width)
  cache = jax.eval_shape(lambda: ops.init(layout, 4, size, heads, stored, scales))
  metadata = PagesMetadata(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 2), (2,))))
  shapes = PagedShapes(jax.ShapeDtypeStruct((2, 16, width), dtype), cache, metadata, heads)
  return request(place, dtype=dtype, width=width, queries=2, features=("pages",),
                 pages=PagesRequest(layout.__name__, shapes))


def row_of(mechanism, place):
  return selection.find(table.RULES, mechanism, place_of(place))


class RefusalsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    # The kernels for Hopper are refused with some versions of CUDA; see table_test.
    self.enterContext(mock.patch.object(mosaic, "cuda_version", return_value=None))

  def test_the_rows(self):
    written = {(mechanism, place): tuple(kernels.split(", ")) for mechanism, rows in KERNELS.items()
               for places, kernels in rows.items() for place in places.split(", ")}
    self.assertEqual(written, {key: tuple(kernel.name for kernel in row.chain)
                               for key, row in table.TABLE.items()})

  @parameterized.named_parameters((f"{mechanism}_{place}", mechanism, place)
                                  for mechanism, place in table.TABLE)
  def test_features(self, mechanism, place):
    for kernel in row_of(mechanism, place).chain:
      name = kernel.name.removesuffix("_writing").removesuffix("_remote")
      refused = {*REFUSED[name].split(),
                 *(["value_width"] if mechanism in ONE_WIDTH and name == "paged.gpu" else [])}
      self.assertEqual(set(FEATURES) - kernel.features, refused, kernel.name)
      for feature in FEATURES:
        reasons = kernel.unsupported(request(place, features=(feature,)))
        words = f"given ({FEATURES[feature]}) is not supported"
        self.assertEqual(words in reasons, feature in refused, (kernel.name, feature))
      self.assertEqual(kernel.memory, MEMORY.get(kernel.name, "linear"))
      self.assertEqual(kernel.shards_sequence, mechanism == "ring")
      self.assertEqual(kernel.shards_keys, mechanism == "autoregressive_decodeattn"
                       or kernel.name in ("latent.decode", "latent.decode_tpu",
                                          "latent.decode_gpu"))

  @parameterized.named_parameters((f"{mechanism}_{place}", mechanism, place, limits)
                                  for mechanisms, place, limits in LIMITS
                                  for mechanism in mechanisms.split(", "))
  def test_limits(self, mechanism, place, limits):
    row = row_of(mechanism, place)
    fixed = {"transfer": "remote"} if limits.get("transfer") == ("remote",) else {}
    for name, tried in TRIED.items():
      accepted = [x for x in tried if not row.unsupported(request(place, **{**fixed, name: x}))]
      if limits.get("dtype", True):
        self.assertEqual(tuple(accepted), limits.get(name, tried), name)
      else:
        self.assertEmpty(accepted, name)

  @parameterized.product(mechanism=tuple(ON_PAGES), limits=PAGED_LIMITS)
  def test_limits_over_pages(self, mechanism, limits):
    place, *wanted = limits
    layout, row, first = ON_PAGES[mechanism], row_of(mechanism, place), [POOLS[1], 16, 128]
    for i, (tried, accepted) in enumerate(zip((POOLS, PAGE_SIZES, PAGED_WIDTHS), wanted)):
      found = [x for x in tried if not row.unsupported(
          paged_request(place, layout, *first[:i], x, *first[i + 1:]))]
      # The width of PagesV3 is padded to one that the kernel for TPUs computes.
      padded = tried is PAGED_WIDTHS and (place, layout) == ("tpu", layouts.PagesV3)
      self.assertEqual(tuple(found), tried if padded else accepted)
    other = next(each for each in ON_PAGES.values() if each is not layout)
    self.assertIn(f"{other.__name__}: it reads a {layout.__name__}", row.unsupported(
        paged_request(place, other, *first)))

  def test_quantized_keys_on_hopper_need_bfloat16_and_widths_of_32(self):
    row = row_of("autoregressive_decodeattn", "gpu 9.0")
    run = lambda **fields: row.unsupported(request("gpu 9.0", features=("quantized",), **fields))
    self.assertEqual([x for x in DTYPES if not run(dtype=x)], ["bfloat16"])
    self.assertEqual([x for x in WIDTHS if not run(width=x)], [64, 96, 128, 192, 256])

  def test_the_dtype_of_a_bias_on_gpus(self):
    for mechanism in ("sdpa", "cudnn", "flash_attn2"):
      accepted = [dtype for dtype in DTYPES if not row_of(mechanism, "gpu 8.0").unsupported(
          request("gpu 8.0", features=("bias",), bias_dtype=np.dtype(jnp.dtype(dtype))))]
      self.assertEqual(accepted, ["bfloat16"])

  def test_the_dtype_where_sdpa_returns_the_lse(self):
    for place in ("cpu", "tpu"):
      accepted = [dtype for dtype in DTYPES if not row_of("sdpa", place).unsupported(
          request(place, features=("lse",), dtype=dtype))]
      self.assertEqual(accepted, ["float32"])


if __name__ == "__main__":
  absltest.main()
