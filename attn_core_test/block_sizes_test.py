# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block sizes reach the XLA kernels: the call's, else the mechanism's, else those for all."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, OperationMetadata, PagesMetadata, PagesV2, attention, explain
from attn_core.caches import dense

# Two query heads for each key head, so that a tile of (q, kv) tokens has 2 q rows and kv columns.
QUERY, KEY = (jax.ShapeDtypeStruct((1, 60, heads, 8), jnp.float32) for heads in (4, 2))
NUMBERS = (5, 7, 11, 13, 17, 19, 23, 29)  # block sizes; no other dimension has these lengths
GENERAL = {"blocksize_q": 5, "blocksize_k": 7}
OTHERS = {name: BlockSizes(29, 29, 29, 29) for name in ("vanilla", "autoregressive_decodeattn")}


def shapes_of_products(function, *arrays) -> set[tuple[int, ...]]:
  """Returns the shapes of the results of all matrix products of a function's program."""
  text = jax.jit(function).lower(*arrays).as_text()
  found = re.findall(r"stablehlo\.dot_general .*-> tensor<([\dx]+)xf32>", text)
  return {tuple(map(int, shape.split("x"))) for shape in found}


def tiles(mechanism: str, metadata: OperationMetadata, sizes: BlockSizes | None) -> set:
  """Returns the pairs (block_q, block_kv) of NUMBERS that a value and its gradient compute."""
  def run(query, key, value):
    return attention(query, key, value, mechanism=mechanism, metadata=metadata,
                     block_sizes=sizes).attention_outputs.sum()
  found = shapes_of_products(jax.value_and_grad(run, (0, 1, 2)), QUERY, KEY, KEY)
  return {(q, kv) for q in NUMBERS for kv in NUMBERS
          if any(2 * q in shape and kv in shape for shape in found)}


class OrderTest(parameterized.TestCase):

  def check(self, mechanism, sizes, forward, backward, **fields):
    """Checks (block_q, block_kv) of the forward and of the backward."""
    metadata = OperationMetadata(platform="cpu", **fields)
    self.assertEqual(tiles(mechanism, metadata, sizes), {forward, backward})
    told = explain(QUERY, KEY, KEY, mechanism=mechanism, metadata=metadata, block_sizes=sizes)
    self.assertEqual(told.block_sizes[:4], (*forward, *backward))

  def test_of_all_mechanisms(self):
    self.check("flash_attn2", None, (5, 7), (5, 7), **GENERAL, operation_configs=OTHERS)

  def test_of_the_mechanism_before_those_of_all(self):
    configs = {**OTHERS, "flash_attn2": BlockSizes(11, 13, None, 17)}
    self.check("flash_attn2", None, (11, 13), (5, 17), **GENERAL, operation_configs=configs)

  @parameterized.parameters("flash_attn2", "blockwise", "blocksparse", "ring")
  def test_of_the_call_before_all_others(self, mechanism):
    configs = {**OTHERS, mechanism: BlockSizes(11, 13, 17, None)}
    self.check(mechanism, BlockSizes(None, 19, 23, None), (11, 19), (23, 7), **GENERAL,
               operation_configs=configs)

  def test_auto_reads_those_of_the_mechanism_that_runs(self):
    configs = {**OTHERS, "flash_attn2": BlockSizes(11, 13, 17, 19), "blockwise": BlockSizes(29)}
    self.check("auto", None, (11, 13), (17, 19), operation_configs=configs)


class OtherKernelsTest(parameterized.TestCase):

  def test_keys_of_a_block_in_decoding(self):
    cache = jax.eval_shape(lambda: dense.init(1, 60, (2, 8), dtype="float32"))
    query = jax.ShapeDtypeStruct((1, 1, 16, 8), jnp.float32)
    metadata = OperationMetadata(platform="cpu", blocksize_k=16, operation_configs={
        "autoregressive_decodeattn": BlockSizes(block_q=3, block_kv=32)})
    for sizes, block in ((None, 32), (BlockSizes(block_kv=4), 4)):
      found = shapes_of_products(lambda cache, query, sizes=sizes: attention(
          query, None, None, cache_view=cache, mode="__autoregressive__", metadata=metadata,
          mechanism="autoregressive_decodeattn", block_sizes=sizes).attention_outputs, cache, query)
      self.assertEqual({n for shape in found for n in shape} & {4, 16, 32, 60}, {block}, found)

  def test_queries_and_pages_of_a_block(self):
    pages = jax.ShapeDtypeStruct((8, 4, 4, 8), jnp.float32)
    query = jax.ShapeDtypeStruct((20, 16, 8), jnp.float32)  # 8 heads for each key head
    metadata = PagesMetadata(np.arange(8, dtype=np.int32)[None], np.int32([30]),
                             np.int32([0, 20]))
    for fields, sizes, wanted in (({}, BlockSizes(5, 12), (5, 12)),
                                  ({"blocksize_q": 7, "blocksize_k": 16}, None, (7, 16)),
                                  ({"operation_configs": {
                                      "ragged_page_attention_v2": BlockSizes(3, 20)},
                                    "blocksize_q": 7}, None, (3, 20))):
      found = shapes_of_products(lambda query, pages, fields=fields, sizes=sizes: attention(
          query, None, None, layout="thd", cache_view=PagesV2(pages), cache_metadata=metadata,
          mechanism="ragged_page_attention_v2", block_sizes=sizes,
          metadata=OperationMetadata(platform="cpu", **fields)).attention_outputs, query, pages)
      tile = (8 * wanted[0], wanted[1])
      # Scores of few rows are a product of keys and rows.
      self.assertTrue([x for x in found if x[-2:] in (tile, tile[::-1])], (tile, found))


if __name__ == "__main__":
  absltest.main()
