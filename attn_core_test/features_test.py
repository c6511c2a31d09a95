# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Features that each argument of a call needs: its own, and no other."""

import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, LatentOptions, MaskInfo, OperationMetadata,
                       RingConfig, attention, create_mesh, masks, score_mods)
from attn_core.arguments import normalize
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches import dense
from attn_core.dispatch.capabilities import FEATURES

jax.config.update("jax_num_cpu_devices", 2)

IDS = np.zeros((2, 6), np.int32)
KEY = jax.random.key(0)
SEEN = np.ones((2, 1, 6, 6), bool)


def cache_of(dtype):
  return dense.init(2, 8, (4, 8), dtype=dtype)


def ring(layout):
  return OperationMetadata(mesh=create_mesh((1, 1, 1, 1, 2)), ring=RingConfig(layout=layout))


# name -> (arguments of a call that is not causal, the features that it needs)
NEEDS = {
    "plain": ({}, ""),
    "causal": ({"causal": True}, "causal"),
    "window": ({"sliding_window": (2, None)}, "window"),
    "window_without_bounds": ({"sliding_window": (-1, None)}, ""),
    "window_to_the_right": ({"sliding_window": (None, 0)}, "window"),
    "chunk": ({"chunk_size": 2}, "chunk"),
    "segments": ({"mask_info": MaskInfo.from_segments(IDS)}, "segments"),
    "query_positions": ({"mask_info": MaskInfo(q_positions=IDS)}, "positions"),
    "key_positions": ({"mask_info": MaskInfo(kv_positions=IDS)}, "positions"),
    "both": ({"mask_info": MaskInfo.from_segments(IDS, None, IDS, IDS)}, "segments positions"),
    "query_offset": ({"query_offset": 0}, "positions"),
    "mask_of_the_algebra": ({"mask": masks.prefix(2)}, "mask"),
    "mask_array": ({"mask": SEEN}, "mask"),
    "mask_in_mask_info": ({"mask_info": MaskInfo(attention_mask=SEEN)}, "mask"),
    "custom": ({"mask": masks.custom(lambda b, h, t, s: s <= t)}, "mask"),
    "custom_with_operands": ({"mask": ~masks.custom(lambda b, h, t, s, x: s <= x, np.int32(3))},
                             "mask mask_operands"),
    "selected_keys": ({"mask": ~masks.selected_keys(np.zeros((1, 6, 2), int))}, "mask selected"),
    "bias": ({"bias": np.ones((1, 1, 6, 6), np.float32)}, "bias"),
    "init_bias": ({"init_bias": lambda: np.ones((1, 1, 6, 6), np.float32)}, "bias"),
    "score_mod": ({"score_mod": score_mods.alibi(np.ones(4, np.float32))}, "score_mod"),
    "score_function": ({"score_mod": score_mods.alibi(np.ones(4, np.float32))
                        >> score_mods.soft_cap(3.0)}, "score_mod score_function"),
    "sinks": ({"softmax_aux": np.ones(4, np.float32)}, "sinks"),
    "soft_cap": ({"logits_soft_cap": 3.0}, "soft_cap"),
    "dropout": ({"dropout_prob": 0.5, "dropout_rng": KEY}, "dropout"),
    "dropout_of_the_metadata": ({"metadata": OperationMetadata(dropout_prob=0.5),
                                 "dropout_rng": KEY}, "dropout"),
    "dropout_that_is_off": ({"dropout_prob": 0.5, "dropout_rng": KEY, "deterministic": True}, ""),
    "lse": ({"return_lse": True}, "lse"),
    "weights": ({"return_weights": True}, "weights"),
    "unnormalized": ({"normalize_output": False}, "unnormalized"),
    "precision": ({"precision": "highest"}, "precision"),
    "softmax_dtype": ({"metadata": OperationMetadata(runtime_softmax_dtype="bfloat16")},
                      "softmax_dtype"),
    "block_sizes": ({"block_sizes": BlockSizes(2)}, "block_sizes"),
    "block_sizes_of_the_metadata": ({"metadata": OperationMetadata(blocksize_q=2)}, ""),
    "optimized": ({"optimized": True}, "optimized"),
    "vmem_limit_bytes": ({"vmem_limit_bytes": 9}, "vmem_limit_bytes"),
    # The cache knows the positions of its tokens, and which slots are empty.
    "cache": ({"cache_view": cache_of("float32"), "mode": "__prefill__", "causal": True},
              "causal cache segments positions"),
    "cache_metadata": ({"cache_view": cache_of("float32"), "mode": "__prefill__",
                        "cache_metadata": CacheMetadata(np.int32([1, 2]))},
                       "cache segments positions"),
    "quantized": ({"cache_view": cache_of("int8"), "mode": "__prefill__"},
                  "cache segments positions quantized"),
    "int4": ({"cache_view": cache_of("int4"), "mode": "__prefill__"},
             "cache segments positions quantized int4"),
    "zigzag": ({"metadata": ring("zigzag")}, "sequence_layout"),
    "contiguous": ({"metadata": ring("contiguous")}, ""),
    "zigzag_on_one_device": ({"metadata": OperationMetadata(ring=RingConfig(layout="zigzag"))}, ""),
    "other": ({"softmax_scale": 0.1, "policy": "nothing_saveable", "fused_backward": True,
               "mask_value": -1e30, "prevent_cse": False}, ""),
}


def needs(dtype="float32", shapes=((2, 6, 4, 8),) * 3, **arguments) -> set[str]:
  """Returns the features of a call with zeros."""
  bound = inspect.signature(attention).bind(
      *(jnp.zeros(shape, dtype) for shape in shapes), **{"causal": False, **arguments})
  bound.apply_defaults()
  values = {name: bound.arguments[name] for name in AttentionArguments._fields}
  return set(normalize.normalize(AttentionArguments(**values)).request.features)


class FeaturesTest(parameterized.TestCase):

  @parameterized.parameters(*NEEDS)
  def test_of_an_argument(self, name):
    arguments, features = NEEDS[name]
    self.assertEqual(needs(**arguments), set(features.split()))

  @parameterized.parameters("bfloat16", "float16", "float32", "float64")
  def test_of_a_dtype(self, dtype):
    with jax.enable_x64(True):
      self.assertEqual(needs(dtype), {dtype} & {"float16", "float64"})
      self.assertEqual(needs("float32", compute_dtype=dtype), {dtype} & {"float16", "float64"})

  def test_of_shapes(self):
    query = (2, 6, 4, 8)
    for heads, width in ((4, 8), (2, 8), (1, 8), (4, 4), (4, 16), (2, 12)):
      key, value = (2, 6, heads, 8), (2, 6, heads, width)
      self.assertEqual(needs(shapes=(query, key, value)),
                       {*["gqa"] * (heads != 4), *["value_width"] * (width != 8)})

  def test_of_packed_sequences(self):
    packed = ((6, 4, 8),) * 3
    self.assertEqual(needs(shapes=packed, layout="thd", cum_seqlens_q=np.int32([0, 2, 6])),
                     {"segments"})

  def test_of_latent_rows(self):
    rows = ((2, 6, 4, 8), (2, 6, 1, 8), (2, 6, 1, 0))  # as `arguments.latent` expands them
    self.assertEqual(needs(shapes=rows, latent_options=LatentOptions(6, 2, 4)), {"gqa", "latent"})

  def test_every_feature_is_here(self):
    found = {"gqa", "value_width", "float16", "float64", "latent"}
    found.update(*(features.split() for _, features in NEEDS.values()))
    # paged_bad_input_test has the feature of pages; the derivative shows only while it is taken.
    self.assertEqual(set(FEATURES) - found, {
        "pages", "draft_mask", "scope", "prefixes", "stored_heads", "lse_gradient"})


if __name__ == "__main__":
  absltest.main()
