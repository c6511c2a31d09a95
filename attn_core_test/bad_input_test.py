# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad calls of `attention`: each is refused before anything runs, by a message that helps.

One table: name, what is changed in a good call, the exception, and what its message must say.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import inspect
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, OperationMetadata, attention, explain, masks
from attn_core import CacheMetadata, blockwise_attn
from attn_core.caches import dense, window

door = sys.modules["attn_core.attention"]  # the package's attribute of that name is the function

B, T, H, K, D = 2, 8, 4, 2, 16


def floats(*shape, dtype=np.float32) -> np.ndarray:
  return np.ones(shape, dtype)


def ints(*shape) -> np.ndarray:
  return np.zeros(shape, np.int32)


GOOD = {"query": floats(B, T, H, D), "key": floats(B, T, K, D), "value": floats(B, T, K, D)}
LONG = {"key": floats(B, 12, K, D), "value": floats(B, 12, K, D)}  # S = 12, T = 8
WIDE = {"value": floats(B, T, K, 24)}
PACKED = {"query": floats(10, H, D), "key": floats(10, K, D), "value": floats(10, K, D),
          "layout": "thd", "cum_seqlens_q": np.array([0, 4, 10], np.int32)}
DECODING = {"mode": "__autoregressive__"}
CACHE = dense.init(B, 12, (K, D), dtype="float32")
CACHE_8_BITS = dense.init(B, 12, (K, D), dtype="int8")
RING = {**DECODING, "cache_view": window.init(B, 4, (K, D), dtype="float32")}
CACHED = {**DECODING, "cache_view": CACHE}
DROPPED = {"dropout_prob": 0.1, "deterministic": False}


def offsets(*numbers, dtype=np.int32) -> np.ndarray:
  return np.array(numbers, dtype)


# (name, changes to GOOD, words of the message in their order); all raise ValueError.
VALUES = (
    # query, key, value
    ("query_list", {"query": [[[[1.0]]]]}, "query: got list", r"array, \[B, T, H, D\]"),
    ("query_none", {"query": None}, "query: got NoneType", r"\[B, T, H, D\]"),
    ("query_rank", {"query": floats(B, T, D)}, r"query: got float32\[2, 8, 16\]",
     r"\[B, T, H, D\]"),
    ("query_ints", {"query": ints(B, T, H, D)}, r"query: got int32\[2, 8, 4, 16\]",
     "floating-point"),
    ("query_complex", {"query": floats(B, T, H, D, dtype=np.complex64)}, "query: got complex64",
     "floating-point"),
    ("query_bool", {"query": floats(B, T, H, D, dtype=bool)}, "query: got bool", "floating-point"),
    ("query_no_batch", {"query": floats(0, T, H, D)}, r"query: got float32\[0, 8", "size 0"),
    ("query_no_tokens", {"query": floats(B, 0, H, D)}, r"query: got float32\[2, 0", "size 0"),
    ("query_no_heads", {"query": floats(B, T, 0, D)}, r"query: got float32\[2, 8, 0", "size 0"),
    ("query_no_width", {"query": floats(B, T, H, 0), "key": floats(B, T, K, 0)}, "query: got",
     "size 0"),
    ("key_list", {"key": [1.0]}, "key: got list", r"array"),
    ("key_rank", {"key": floats(B, T, K, D, 1)}, r"key: got float32\[2, 8, 2, 16, 1\]",
     r"\[B, T, H, D\]"),
    ("key_ints", {"key": ints(B, T, K, D)}, "key: got int32", "floating-point"),
    ("key_dtype", {"key": floats(B, T, K, D, dtype=np.float16)}, "key: got float16",
     "query's dtype float32", "cast one of them"),
    ("key_batch", {"key": floats(3, T, K, D)}, r"key: got float32\[3, 8, 2, 16\]",
     r"\[2, S, K, 16\]", r"query float32\[2, 8, 4, 16\]"),
    ("key_width", {"key": floats(B, T, K, 8)}, r"key: got float32\[2, 8, 2, 8\]",
     r"\[2, S, K, 16\]"),
    ("key_empty", {"key": floats(B, 0, K, D), "value": floats(B, 0, K, D)},
     r"key: got float32\[2, 0", "size 0"),
    ("key_heads", {"key": floats(B, T, 3, D), "value": floats(B, T, 3, D)},
     r"key: got float32\[2, 8, 3, 16\]", "divides the 4 query heads"),
    ("key_more_heads", {"key": floats(B, T, 8, D), "value": floats(B, T, 8, D)}, "key: got",
     "divides the 4 query heads"),
    ("value_scalar", {"value": 1.0}, "value: got float", "array"),
    ("value_rank", {"value": floats(B, T, D)}, r"value: got float32\[2, 8, 16\]"),
    ("value_dtype", {"value": floats(B, T, K, D, dtype=np.float16)}, "value: got float16",
     "query's dtype float32"),
    ("value_length", {"value": floats(B, 7, K, D)}, r"value: got float32\[2, 7, 2, 16\]",
     r"\[2, 8, 2\] and any width", r"key float32\[2, 8, 2, 16\]"),
    ("value_heads", {"value": floats(B, T, H, D)}, r"value: got float32\[2, 8, 4, 16\]",
     r"\[2, 8, 2\]"),
    ("value_no_width", {"value": floats(B, T, K, 0)}, r"value: got float32\[2, 8, 2, 0\]",
     "size 0"),
    ("bhtd_read_as_bthd", {"layout": "bhtd"}, "key: got", "divides the 8 query heads|query"),
    # Names.
    ("mechanism", {"mechanism": "flash"}, "mechanism='flash'", "'flash_attn2'"),
    ("mechanism_none", {"mechanism": None}, "mechanism=None", "'auto'"),
    ("mechanism_number", {"mechanism": 3}, "mechanism=3", "'auto'"),
    ("metadata", {"metadata": {"mesh": None}}, "metadata: got dict",
     "an OperationMetadata or None"),
    ("mode", {"mode": "train"}, "mode: got 'train'", "'__train__', '__prefill__'"),
    ("mode_none", {"mode": None}, "mode: got None", "'__train__'"),
    ("layout", {"layout": "BTHD"}, "layout: got 'BTHD'", "'bthd', 'bhtd', 'thd'"),
    ("policy", {"policy": "save_nothing"}, "policy: got 'save_nothing'", "'nothing_saveable'"),
    ("policy_number", {"policy": 1}, "policy: got 1", "a remat policy"),
    ("policy_false", {"policy": False}, "policy: got False", "None, a remat policy"),
    ("precision", {"precision": "exact"}, "precision: got 'exact'", "PrecisionLike"),
    ("precision_number", {"precision": 7}, "precision: got 7", "PrecisionLike"),
    ("precision_triple", {"precision": ["high", "high", "high"]}, r"precision: got \('high'",
     "PrecisionLike"),
    ("compute_dtype", {"compute_dtype": "float99"}, "compute_dtype: got 'float99'",
     "a floating-point dtype or None"),
    ("compute_dtype_int", {"compute_dtype": jnp.int8}, "compute_dtype: got .*int8",
     "a floating-point dtype"),
    # Who is visible.
    ("causal_none", {"causal": None}, "causal: got None", "True or False"),
    ("causal_number", {"causal": 1}, "causal: got 1", "True or False"),
    ("mask_float", {"mask": floats(B, 1, T, T)}, r"mask: got float32\[2, 1, 8, 8\]",
     r"bool array \(True = visible\)", "is a bias"),
    ("mask_ints", {"mask": ints(B, 1, T, T)}, r"mask: got int32\[2, 1, 8, 8\]", "bool array"),
    ("mask_padding", {"mask": np.ones((B, T), bool)}, r"mask: got bool\[2, 8\]",
     "padding mask", "MaskInfo.from_attention_mask"),
    ("mask_rank_3", {"mask": np.ones((B, T, T), bool)}, r"mask: got bool\[2, 8, 8\]",
     r"\[B or 1, H or 1, T or 1, S or 1\]"),
    ("mask_key_heads", {"mask": np.ones((B, K, T, T), bool)}, r"mask: got bool\[2, 2, 8, 8\]",
     r"\[B, H, T, S\] = \[2, 4, 8, 8\]"),
    ("mask_length", {"mask": np.ones((1, 1, T, 9), bool)}, r"mask: got bool\[1, 1, 8, 9\]",
     r"\[2, 4, 8, 8\]"),
    ("mask_list", {"mask": [[[[True]]]]}, "mask: got list", "a Mask value, or a bool array"),
    ("mask_function", {"mask": masks.causal}, "mask: got function", "a Mask value"),
    ("mask_info_as_mask", {"mask": MaskInfo()}, "mask: got MaskInfo", "a Mask value"),
    ("mask_packed_rank", {**PACKED, "mask": np.ones((1, 1, 10, 10), bool)},
     r"mask: got bool\[1, 1, 10, 10\]", r"\[H or 1, T or 1, S or 1\]"),
    ("mask_value_segments", {"mask": masks.segments(ints(B, 7))}, "mask: an array per query",
     r"int32\[2, 7\]", r"\[B or 1, T\] = \[2, 8\]"),
    ("mask_value_lengths", {"mask": masks.lengths(None, ints(3))}, "mask: an array per batch",
     r"int32\[3\]", r"\[B or 1\] = \[2\]"),
    ("mask_value_dense", {"mask": masks.dense(np.ones((1, 1, 3, T), bool))},
     r"a boolean array of the mask: got bool\[1, 1, 3, 8\]", r"\[2, 4, 8, 8\]"),
    ("mask_info_array", {"mask_info": np.ones((B, T), bool)}, "mask_info: got ndarray",
     "a MaskInfo or None"),
    ("mask_info_float_mask", {"mask_info": MaskInfo(floats(B, 1, T, T))},
     r"mask_info.attention_mask: got float32\[2, 1, 8, 8\]", "bool", "bias"),
    ("mask_info_list", {"mask_info": MaskInfo([[[[True]]]])},
     "mask_info.attention_mask: got list", "array, bool"),
    ("mask_info_padding", {"mask_info": MaskInfo(np.ones((B, T), bool))},
     r"mask_info.attention_mask: got bool\[2, 8\]", "from_attention_mask"),
    ("mask_info_mask_size", {"mask_info": MaskInfo(np.ones((B, 1, T, 7), bool))},
     r"mask_info.attention_mask: got bool\[2, 1, 8, 7\]", r"\[2, 4, 8, 8\]"),
    ("segment_ids_float", {"mask_info": MaskInfo.from_segments(floats(B, T))},
     r"mask_info.q_segment_ids: got float32\[2, 8\]", r"int32 \[B or 1, T\] = \[2, 8\]"),
    ("segment_ids_bool", {"mask_info": MaskInfo.from_segments(np.ones((B, T), bool))},
     r"mask_info.q_segment_ids: got bool\[2, 8\]", "int32"),
    ("segment_ids_rank", {"mask_info": MaskInfo.from_segments(ints(T))},
     r"mask_info.q_segment_ids: got int32\[8\]", r"\[B or 1, T\] = \[2, 8\]"),
    ("segment_ids_length", {"mask_info": MaskInfo.from_segments(ints(B, T), ints(B, 9))},
     r"mask_info.kv_segment_ids: got int32\[2, 9\]", r"\[B or 1, S\] = \[2, 8\]"),
    ("segment_ids_batch", {"mask_info": MaskInfo.from_segments(ints(3, T))},
     r"mask_info.q_segment_ids: got int32\[3, 8\]", r"= \[2, 8\]"),
    ("segment_ids_list", {"mask_info": MaskInfo.from_segments([[0] * T] * B)},
     "mask_info.q_segment_ids: got list", "array"),
    ("segment_ids_too_large", {"mask_info": MaskInfo.from_segments(
        np.full((B, T), 2**40))}, "segments: query_ids holds numbers from 1099511627776", "int32"),
    ("segment_ids_of_queries", {"mask_info": MaskInfo(q_segment_ids=ints(B, T))},
     "mask_info: q_segment_ids is given and kv_segment_ids is None", "both or none"),
    ("segment_ids_of_keys", {"mask_info": MaskInfo(kv_segment_ids=ints(B, T))},
     "mask_info: kv_segment_ids is given and q_segment_ids is None", "both or none"),
    ("positions_float", {"mask_info": MaskInfo(q_positions=floats(B, T))},
     r"mask_info.q_positions: got float32\[2, 8\]", r"int32 \[B or 1, T\]"),
    ("positions_length", {"mask_info": MaskInfo(kv_positions=ints(B, 7))},
     r"mask_info.kv_positions: got int32\[2, 7\]", r"\[B or 1, S\] = \[2, 8\]"),
    # Where the queries stand.
    ("lengths_differ", LONG, "query_offset and mask_info.q_positions: got None for both with 8 "
     "queries and 12 keys", "0 for the top left, 4 for the bottom right", "causal=False"),
    ("one_query", {"query": floats(B, 1, H, D)}, "query_offset and mask_info.q_positions",
     "1 queries and 8 keys"),
    ("one_key", {"key": floats(B, 1, K, D), "value": floats(B, 1, K, D)}, "query_offset and",
     "8 queries and 1 keys"),
    ("window_lengths_differ", {**LONG, "causal": False, "sliding_window": 3},
     "query_offset and mask_info.q_positions", "8 queries and 12 keys"),
    ("chunk_lengths_differ", {**LONG, "causal": False, "chunk_size": 3},
     "query_offset and mask_info.q_positions", "8 queries and 12 keys"),
    ("key_positions_only", {**LONG, "mask_info": MaskInfo(kv_positions=ints(B, 12))},
     "query_offset and mask_info.q_positions", "8 queries and 12 keys"),
    ("offset_and_positions", {"query_offset": 0, "mask_info": MaskInfo(q_positions=ints(B, T))},
     "query_offset: got mask_info.q_positions as well", "one of the two"),
    ("offset_float", {"query_offset": 1.0}, "query_offset: got float", r"an int, or int32 \[2\]"),
    ("offset_bool", {"query_offset": True}, "query_offset: got bool", "an int"),
    ("offset_float_array", {"query_offset": floats(B)}, r"query_offset: got float32\[2\]", "int32"),
    ("offset_size", {"query_offset": ints(3)}, r"query_offset: got int32\[3\]", r"int32 \[2\]"),
    ("offset_rank", {"query_offset": ints(B, 1)}, r"query_offset: got int32\[2, 1\]",
     r"int32 \[2\]"),
    ("offset_list", {"query_offset": [0, 1]}, "query_offset: got list", "array"),
    ("offsets_too_large", {"query_offset": np.array([0, 2**40])},
     r"query_offset: got \[ +0 1099511627776\]", r"2\*\*30"),
    ("offset_too_large", {"query_offset": 2**31 - 1}, "query_offset: got 2147483647", "int32"),
    ("window_negative", {"sliding_window": (-2, 0)}, "sliding_window: got -2", r"\(left, right\)",
     "inclusive", "-1 or None for unbounded"),
    ("window_triple", {"sliding_window": (1, 2, 3)}, r"sliding_window: got \(1, 2, 3\)",
     r"pair \(left, right\)"),
    ("window_float", {"sliding_window": 4.0}, "sliding_window: got 4.0", "int"),
    ("window_bool", {"sliding_window": True}, "sliding_window: got True", "int"),
    ("window_string", {"sliding_window": "4"}, "sliding_window: got '4'", "int"),
    ("window_array", {"sliding_window": ints(2)}, r"sliding_window: got int32\[2\]", "static"),
    ("window_too_large", {"sliding_window": (2**40, 0)}, "sliding_window: got 1099511627776",
     "int32"),
    ("chunk_0", {"chunk_size": 0}, "chunk_size: got 0", "an int >= 1"),
    ("chunk_negative", {"chunk_size": -4}, "chunk_size: got -4", "an int >= 1"),
    ("chunk_float", {"chunk_size": 4.0}, "chunk_size: got 4.0", "static"),
    ("chunk_too_large", {"chunk_size": 2**40}, "chunk_size: got 1099511627776", "int32"),
    # Packed sequences.
    ("thd_without_offsets", {**PACKED, "cum_seqlens_q": None},
     "cum_seqlens_q: got None with layout='thd'", r"int32 \[B \+ 1\]"),
    ("thd_rank", {"layout": "thd", "cum_seqlens_q": offsets(0, 8)},
     r"query: got float32\[2, 8, 4, 16\]", r"\[total, heads, width\]"),
    ("offsets_in_bthd", {"cum_seqlens_q": offsets(0, 8)},
     r"cum_seqlens_q: got int32\[2\] with layout='bthd'", "layout='thd'", "mask_info"),
    ("offsets_k_in_bhtd", {"cum_seqlens_k": offsets(0, 8), "layout": "bhtd"},
     r"cum_seqlens_k: got int32\[2\] with layout='bhtd'", "layout='thd'"),
    ("offsets_fall", {**PACKED, "cum_seqlens_q": offsets(0, 6, 4, 10)},
     r"cum_seqlens_q: got \[0, 6, 4, 10\]", "never decrease", "total 10"),
    ("offsets_start", {**PACKED, "cum_seqlens_q": offsets(1, 10)},
     r"cum_seqlens_q: got \[1, 10\]", "start at 0"),
    ("offsets_end", {**PACKED, "cum_seqlens_q": offsets(0, 4, 9)},
     r"cum_seqlens_q: got \[0, 4, 9\]", "end at the total 10"),
    ("offsets_dtype", {**PACKED, "cum_seqlens_q": offsets(0, 10, dtype=np.int64)},
     r"cum_seqlens_q: got int64\[2\]", r"int32 \[B \+ 1\]"),
    ("offsets_float", {**PACKED, "cum_seqlens_q": floats(3)}, r"cum_seqlens_q: got float32\[3\]",
     "int32"),
    ("offsets_rank", {**PACKED, "cum_seqlens_q": ints(1, 3)}, r"cum_seqlens_q: got int32\[1, 3\]",
     r"\[B \+ 1\]"),
    ("offsets_short", {**PACKED, "cum_seqlens_q": offsets(10)}, r"cum_seqlens_q: got int32\[1\]",
     r"\[B \+ 1\]"),
    ("offsets_list", {**PACKED, "cum_seqlens_q": [0, 4, 10]}, "cum_seqlens_q: got list", "array"),
    ("offsets_k_missing", {**PACKED, "key": floats(12, K, D), "value": floats(12, K, D)},
     "cum_seqlens_k: got None with 10 queries and 12 keys", "offsets of the keys"),
    ("offsets_k_end", {**PACKED, "cum_seqlens_k": offsets(0, 4, 12)},
     r"cum_seqlens_k: got \[0, 4, 12\]", "total 10"),
    ("offsets_k_count", {**PACKED, "cum_seqlens_k": offsets(0, 10)},
     r"cum_seqlens_k: got int32\[2\]", "as many sequences as cum_seqlens_q"),
    ("offsets_k_where", {**PACKED, "cum_seqlens_k": offsets(0, 5, 10)},
     "query_offset: got None with cum_seqlens_k of their own", r"int or int32 \[B\]"),
    ("offsets_and_segments", {**PACKED, "mask_info": MaskInfo.from_segments(ints(1, 10))},
     "mask_info.q_segment_ids: got cum_seqlens_q as well", "one of the two"),
    # What is added, scaled, capped, dropped.
    ("bias_ints", {"bias": ints(1, 1, T, T)}, r"bias: got int32\[1, 1, 8, 8\]", "floating-point"),
    ("bias_bool", {"bias": np.ones((1, 1, T, T), bool)}, r"bias: got bool\[1, 1, 8, 8\]",
     "floating-point"),
    ("bias_rank", {"bias": floats(T, T)}, r"bias: got float32\[8, 8\]",
     r"\[B or 1, H or 1, T or 1, S or 1\]"),
    ("bias_heads", {"bias": floats(1, 2, T, T)}, r"bias: got float32\[1, 2, 8, 8\]",
     r"\[2, 4, 8, 8\]"),
    ("bias_list", {"bias": [[[[0.0]]]]}, "bias: got list", "array"),
    ("bias_packed", {**PACKED, "bias": floats(1, 1, 10, 10)}, r"bias: got float32\[1, 1, 10, 10\]",
     r"\[H or 1, T or 1, S or 1\]"),
    ("init_bias_array", {"init_bias": floats(1, 1, T, T)}, "init_bias: got", "a function"),
    ("init_bias_and_bias", {"bias": floats(1, 1, 1, T), "init_bias": lambda: None},
     "init_bias: got a bias as well", "one of bias and init_bias"),
    ("init_bias_returns", {"init_bias": lambda: floats(T, T)},
     r"what init_bias returned: got float32\[8, 8\]", "floating-point"),
    ("sinks_key_heads", {"softmax_aux": floats(K)}, r"softmax_aux: got float32\[2\]",
     r"floating-point \[4\] or \[4, num_sinks\]"),
    ("sinks_leading", {"softmax_aux": floats(1, H)}, r"softmax_aux: got float32\[1, 4\]",
     r"\[4\] or \[4, num_sinks\]"),
    ("sinks_rank", {"softmax_aux": floats(H, 1, 1)}, r"softmax_aux: got float32\[4, 1, 1\]",
     r"\[4, num_sinks\]"),
    ("sinks_scalar", {"softmax_aux": np.float32(0)}, "softmax_aux: got float32", r"\[4, num_sinks\]"),
    ("sinks_empty", {"softmax_aux": floats(H, 0)}, r"softmax_aux: got float32\[4, 0\]",
     r"\[4, num_sinks\]"),
    ("sinks_ints", {"softmax_aux": ints(H)}, r"softmax_aux: got int32\[4\]", "floating-point"),
    ("sinks_list", {"softmax_aux": [0.0] * H}, "softmax_aux: got list", "array"),
    ("scale_nan", {"softmax_scale": float("nan")}, "softmax_scale: got nan", "finite"),
    ("scale_inf", {"softmax_scale": np.float32("inf")}, "softmax_scale: got .*inf", "finite"),
    ("scale_array", {"softmax_scale": floats(1)}, r"softmax_scale: got float32\[1\]",
     "multiplies the query", "static"),
    ("scale_jax", {"softmax_scale": jnp.float32(1)}, r"softmax_scale: got float32\[\]", "static"),
    ("scale_complex", {"softmax_scale": 1j}, "softmax_scale: got 1j", "static"),
    ("scale_bool", {"softmax_scale": True}, "softmax_scale: got True", "static"),
    ("scale_string", {"softmax_scale": "0.1"}, "softmax_scale: got '0.1'", "static"),
    ("soft_cap_0", {"logits_soft_cap": 0.0}, "logits_soft_cap: got 0.0", "> 0"),
    ("soft_cap_negative", {"logits_soft_cap": -30.0}, "logits_soft_cap: got -30.0", "> 0"),
    ("soft_cap_inf", {"logits_soft_cap": float("inf")}, "logits_soft_cap: got inf", "finite"),
    ("soft_cap_nan", {"logits_soft_cap": float("nan")}, "logits_soft_cap: got nan", "finite"),
    ("soft_cap_jax", {"logits_soft_cap": jnp.float32(30)}, r"logits_soft_cap: got float32\[\]",
     "static"),
    ("dropout_1", {**DROPPED, "dropout_prob": 1.0, "dropout_rng": jax.random.key(0)},
     "dropout_prob: got 1.0", r"\[0, 1\)"),
    ("dropout_1_when_off", {"dropout_prob": 1}, "dropout_prob: got 1", r"\[0, 1\)"),
    ("dropout_negative", {"dropout_prob": -0.1}, "dropout_prob: got -0.1", r"\[0, 1\)"),
    ("dropout_nan", {"dropout_prob": float("nan")}, "dropout_prob: got nan", r"\[0, 1\)"),
    ("dropout_none", {"dropout_prob": None}, "dropout_prob: got None", "static"),
    ("dropout_without_key", DROPPED, "dropout_rng: got None", "jax.random.key",
     "deterministic=False and dropout_prob > 0"),
    ("dropout_without_key_by_metadata", {
        "deterministic": False, "metadata": OperationMetadata(dropout_prob=0.1)},
     "dropout_rng: got None", "jax.random.key"),
    ("dropout_key_seed", {**DROPPED, "dropout_rng": 0}, "dropout_rng: got 0", "jax.random.key"),
    ("dropout_key_dtype", {**DROPPED, "dropout_rng": ints(2)}, r"dropout_rng: got int32\[2\]",
     "jax.random.key"),
    ("dropout_keys", {**DROPPED, "dropout_rng": jax.random.split(jax.random.key(0), 3)},
     r"dropout_rng: got key<fry>\[3\]", "one key"),
    ("dropout_raw_keys", {**DROPPED, "dropout_rng": np.zeros((3, 2), np.uint32)},
     r"dropout_rng: got uint32\[3, 2\]", "one key"),
    ("dropout_raw_key_short", {**DROPPED, "dropout_rng": np.zeros(1, np.uint32)},
     r"dropout_rng: got uint32\[1\]", "one key"),
    ("dropout_key_when_off", {"dropout_rng": "seed"}, "dropout_rng: got 'seed'", "one key"),
    ("deterministic", {"deterministic": 1}, "deterministic: got 1", "None, True or False"),
    ("normalize_output", {"normalize_output": 0}, "normalize_output: got 0", "True or False"),
    ("mask_value_high", {"mask_value": -100.0}, "mask_value: got -100.0", "at most -1000000000",
     "bias"),
    ("mask_value_0", {"mask_value": 0}, "mask_value: got 0", "at most"),
    ("mask_value_nan", {"mask_value": float("nan")}, "mask_value: got nan", "at most"),
    # Caches.
    ("cache_object", {"cache_view": object(), **DECODING}, "cache_view: got object",
     "a DenseCache or a WindowCache"),
    ("cache_arrays", {"cache_view": (floats(B, 12, K, D),) * 2, **DECODING},
     "cache_view: got tuple", "a DenseCache"),
    ("cache_training", {"cache_view": CACHE}, "mode: got '__train__' with a cache",
     "__autoregressive__"),
    ("cache_packed", {**PACKED, **CACHED}, "layout: got 'thd' with cache_view", "'bthd'"),
    ("cache_offset", {**CACHED, "query_offset": 3}, "query_offset: got a number and cache_view",
     "None"),
    ("cache_positions", {**CACHED, "mask_info": MaskInfo(q_positions=ints(B, T))},
     "mask_info.q_positions: got an array and a cache", "CacheMetadata"),
    ("cache_segments", {**CACHED, "mask_info": MaskInfo.from_segments(ints(B, T))},
     "mask_info.q_segment_ids: got an array and a cache", "None"),
    ("cache_mask_of_new_tokens", {**CACHED, "mask": np.ones((1, 1, T, T), bool)},
     r"mask: got bool\[1, 1, 8, 8\]", r"\[2, 4, 8, 12\]"),
    ("cache_rows", {**CACHED, "cache_view": dense.init(3, 12, (K, D), dtype="float32")},
     r"key: got float32\[2, 8, 2, 16\]", r"\[3, 8, 2, 16\]"),
    ("cache_heads", {**CACHED, "cache_view": dense.init(B, 12, (H, D), dtype="float32")},
     r"key: got float32\[2, 8, 2, 16\]", r"\[2, 8, 4, 16\]"),
    ("cache_value_width", {**CACHED, **WIDE}, r"value: got float32\[2, 8, 2, 24\]",
     r"\[2, 8, 2, 16\]"),
    ("cache_dtype", {**CACHED, "cache_view": dense.init(B, 12, (K, D))},
     r"key: got bfloat16\[2, 12, 2, 16\]", "query's dtype float32", "a cache has that of its init"),
    ("cache_key_only", {**CACHED, "value": None}, "value: got NoneType", "array"),
    ("cache_lengths_differ", {**CACHED, **LONG}, r"key: got float32\[2, 12, 2, 16\]",
     r"\[2, 8\] rows and new tokens"),
    ("cache_overflow", {**CACHED, "cache_view": dense.init(B, 7, (K, D), dtype="float32")},
     r"tokens in the cache and new ones: got \[0, 0\] and \[8, 8\]", r"rows \[0, 1\]",
     "at most 7 slots", "larger"),
    ("cache_lengths", {**CACHED, "cache_metadata": CacheMetadata(np.array([9, 1]))},
     r"lengths: got \[9, 1\] \(see rows \[0\]\)", "0 to 8"),
    ("cache_lengths_shape", {**CACHED, "cache_metadata": CacheMetadata(ints(3))},
     r"lengths: got int32\[3\]", r"int32 \[2\]"),
    ("cache_starts", {**CACHED, "cache_metadata": CacheMetadata(starts=floats(B))},
     r"cache_metadata.starts: got float32\[2\]", r"int32 \[2\]"),
    ("cache_slots_to_append", {**CACHED, "cache_metadata": CacheMetadata(slots=ints(B))},
     r"cache_metadata.slots: got int32\[2\] in mode '__autoregressive__'", "'__insert__'"),
    ("cache_no_slots", {**CACHED, "mode": "__insert__"},
     "cache_metadata.slots: got None in mode '__insert__'", "rows"),
    ("cache_slots_out_of_range",
     {**CACHED, "mode": "__insert__", "cache_metadata": CacheMetadata(slots=np.array([0, 2]))},
     r"slots: got \[0, 2\] \(see rows \[1\]\)", "0 to 1"),
    ("cache_slots_twice",
     {**CACHED, "mode": "__insert__", "cache_metadata": CacheMetadata(slots=np.array([1, 1]))},
     r"slots: got \[1, 1\]", "different rows"),
    ("cache_read_to_insert",
     {**CACHED, "mode": "__insert__", "cache_metadata": CacheMetadata(slots=np.array([1, 0])),
      "key": None, "value": None}, "key and value: got None in mode '__insert__'", "requests"),
    ("cache_read_with_lengths", {**CACHED, "cache_metadata": CacheMetadata(ints(B)), "key": None,
                                 "value": None}, "cache_metadata.lengths: got lengths", "None"),
    ("ring_without_window", RING, "sliding_window: got no bound to the left", "at most 3 tokens"),
    ("ring_window_too_wide", {**RING, "sliding_window": (4, 0)}, "sliding_window: got 4 to the",
     "at most 3 tokens", "keeps 4"),
    ("ring_read_too_many", {**RING, "sliding_window": (3, 0), "key": None, "value": None},
     "query: got 8 tokens with a window of 3", "4 slots"),
    ("cache_metadata", {"cache_metadata": CacheMetadata()},
     "cache_metadata: got CacheMetadata without cache_view", "cache_view as well"),
    ("cache_metadata_dict", {**CACHED, "cache_metadata": {}}, "cache_metadata: got dict",
     "a CacheMetadata or None"),
    # How fast, and what is returned.
    ("block_sizes_pair", {"block_sizes": (128, 128)}, r"block_sizes: got \(128, 128\)",
     "a BlockSizes or None"),
    ("block_sizes_0", {"block_sizes": BlockSizes(block_q=0)}, "block_sizes.block_q: got 0", ">= 1"),
    ("block_sizes_float", {"block_sizes": BlockSizes(block_kv=64.0)},
     "block_sizes.block_kv: got 64.0", "int"),
    ("block_sizes_negative", {"block_sizes": BlockSizes(block_heads=-1)},
     "block_sizes.block_heads: got -1", ">= 1"),
    ("prevent_cse", {"prevent_cse": 1}, "prevent_cse: got 1", "True or False"),
    ("fused_backward", {"fused_backward": "yes"}, "fused_backward: got 'yes'", "True or False"),
    ("optimized", {"optimized": None}, "optimized: got None", "True or False"),
    ("vmem_limit_0", {"vmem_limit_bytes": 0}, "vmem_limit_bytes: got 0", ">= 1"),
    ("vmem_limit_float", {"vmem_limit_bytes": 1e6}, "vmem_limit_bytes: got 1000000.0", "int"),
    ("return_lse", {"return_lse": 1}, "return_lse: got 1", "True or False"),
    ("return_weights", {"return_weights": None}, "return_weights: got None", "True or False"),
)


def sdpa(**changes):
  return {"mechanism": "sdpa", **changes}


# (name, changes, words): what is well-formed and not supported; all raise NotImplementedError.
REFUSED = (
    ("vmem_limit", {"vmem_limit_bytes": 2**20}, "platform 'cpu'", "vmem_limit_bytes=1048576",
     "no mechanism here can"),
    ("cache_view", {"cache_view": CACHE, **DECODING, "mechanism": "sdpa"}, "'sdpa'",
     "cache_view or cache_metadata", "'autoregressive_decodeattn'"),
    ("cache_8_bits", {"cache_view": CACHE_8_BITS, **DECODING, "mechanism": "vanilla"}, "'vanilla'",
     "a cache of dtype int8", "mechanism='autoregressive_decodeattn' can"),
    ("cudnn", {"mechanism": "cudnn"}, "'cudnn' on platform 'cpu'", "NVIDIA GPUs", "platform 'gpu'",
     "'flash_attn2'"),
    ("cuda_flash", {"mechanism": "cuda_flash_attn2"}, "'cuda_flash_attn2' on platform 'cpu'",
     "NVIDIA GPUs"),
    ("weights_flash", {"mechanism": "flash_attn2", "return_weights": True}, "'flash_attn2'",
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_blockwise", {"mechanism": "blockwise", "return_weights": True},
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_blocksparse", {"mechanism": "blocksparse", "return_weights": True},
     "return_weights=True", "mechanism='vanilla' can"),
    ("weights_and_blocks", {"return_weights": True, "block_sizes": BlockSizes(8)}, "'auto'",
     "flash_attn2: return_weights=True", "vanilla: block_sizes", "no mechanism here can"),
    ("optimized_vanilla", {"mechanism": "vanilla", "optimized": True}, "'vanilla'",
     "optimized=True", "linear-memory", "'flash_attn2'"),
    ("blocks_vanilla", {"mechanism": "vanilla", "block_sizes": BlockSizes(8)}, "'vanilla'",
     "block_sizes", "'blockwise'"),
    ("sdpa_soft_cap", sdpa(logits_soft_cap=30.0), "'sdpa'", "logits_soft_cap=30.0",
     "'flash_attn2'.*'vanilla'|'vanilla'.*'flash_attn2'"),
    ("sdpa_sinks", sdpa(softmax_aux=floats(H)), "'sdpa'", "softmax_aux", "'flash_attn2'"),
    ("sdpa_dropout", sdpa(**DROPPED, dropout_rng=np.zeros(2, np.uint32)), "'sdpa'",
     "dropout_prob=0.1", "'flash_attn2'"),
    ("sdpa_value_width", sdpa(**WIDE), "'sdpa'", "value width 24 and query width 16"),
    ("sdpa_weights", sdpa(return_weights=True), "return_weights=True", "'vanilla'"),
    ("sdpa_unnormalized", sdpa(normalize_output=False), "normalize_output=False"),
    ("sdpa_precision", sdpa(precision="highest"), "precision=highest"),
    ("sdpa_blocks", sdpa(block_sizes=BlockSizes(8)), "block_sizes"),
    ("sdpa_optimized", sdpa(optimized=True), "optimized=True"),
    ("sdpa_softmax_dtype", sdpa(metadata=OperationMetadata(runtime_softmax_dtype=jnp.bfloat16)),
     "runtime_softmax_dtype=bfloat16"),
    ("sdpa_several", sdpa(logits_soft_cap=30.0, softmax_aux=floats(H)), "softmax_aux",
     "logits_soft_cap=30.0"),
    ("sdpa_float16", sdpa(compute_dtype=jnp.float16), "dtype float16", "'flash_attn2'"),
    ("sdpa_float8", sdpa(compute_dtype=jnp.float8_e4m3fn), "dtype float8_e4m3fn", "'flash_attn2'"),
    ("sdpa_lse_bfloat16", sdpa(compute_dtype=jnp.bfloat16, return_lse=True), "return_lse",
     "bfloat16"),
) + tuple(
    (name, {"mechanism": name}, f"'{name}'", f"no cache_view in pages: it reads a {cache}")
    for name, cache in (("page_attention", "PagesV1"), ("ragged_page_attention_v2", "PagesV2"),
                        ("ragged_page_attention_v3", "PagesV3")))


class BadInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.run = self.enter_context(mock.patch.object(door, "_execute"))

  def refused(self, exception, words, call):
    """`call` raises, its message says the words in their order, and nothing has run."""
    with self.assertRaisesRegex(exception, "(?s)" + ".*?".join(words)) as raised:
      call()
    self.assertIs(type(raised.exception), exception)
    self.run.assert_not_called()
    return str(raised.exception)

  @parameterized.named_parameters(*((name, changes, words) for name, changes, *words in VALUES))
  def test_value_error(self, changes, words):
    argument, *rest = words
    message = self.refused(ValueError, [rf"\A{argument}", *rest],
                           lambda: attention(**{**GOOD, **changes}))
    self.assertIn("expected", message)
    self.assertRegex(message, "got|is given|holds|=")

  @parameterized.named_parameters(*((name, changes, words) for name, changes, *words in REFUSED))
  def test_not_implemented(self, changes, words):
    message = self.refused(NotImplementedError, words, lambda: attention(**{**GOOD, **changes}))
    self.assertRegex(message, "mechanism='.*' on platform 'cpu' refuses")
    self.assertRegex(message, "On this platform (mechanism=.* can|no mechanism here can)")

  @parameterized.named_parameters(
      ("softmax_scale", {"softmax_scale": 1.0}, r"softmax_scale: got float32\[\]",
       "traced scale multiplies the query"),
      ("logits_soft_cap", {"logits_soft_cap": 1.0}, r"logits_soft_cap: got float32\[\]", "static"),
      ("dropout_prob", {"dropout_prob": 0.5}, r"dropout_prob: got float32\[\]", "static"),
      ("sliding_window", {"sliding_window": 3}, r"sliding_window: got int32\[\]", "static"),
      ("chunk_size", {"chunk_size": 3}, r"chunk_size: got int32\[\]", "static"),
      ("causal", {"causal": True}, r"causal: got bool\[\]", "static"),
      ("deterministic", {"deterministic": True}, r"deterministic: got bool\[\]", "static"),
      ("mask_value", {"mask_value": -1e30}, r"mask_value: got float32\[\]", "static"))
  def test_traced(self, traced, *words):
    self.refused(ValueError, words, lambda: jax.jit(
        lambda traced: attention(**GOOD, **traced).attention_outputs)(traced))

  def test_arrays_are_checked_while_traced(self):
    call = jax.jit(lambda bias, q: attention(**{**GOOD, "query": q}, bias=bias))
    self.refused(ValueError, ["bias", r"got float32\[8, 8\]"],
                 lambda: call(floats(T, T), GOOD["query"]))
    self.refused(ValueError, ["query", r"got int32\[2, 8, 4, 16\]"],
                 lambda: call(floats(1, 1, T, T), ints(B, T, H, D)))

  def test_unknown_arguments(self):
    """Nothing vanishes into **kwargs."""
    for name in ("sinks", "attention_mask", "segment_ids", "window", "q_segment_ids", "dropout"):
      with self.assertRaisesRegex(TypeError, name):
        attention(**GOOD, **{name: None})
      with self.assertRaisesRegex(TypeError, name):
        explain(**GOOD, **{name: None})
    with self.assertRaises(TypeError):
      attention(*GOOD.values(), "vanilla")  # options go by name
    self.run.assert_not_called()

  def test_explain_refuses_the_same(self):
    for name, changes, *words in VALUES[::5]:
      if name.startswith("mechanism"):
        continue
      with self.subTest(name):
        self.refused(ValueError, words, lambda: explain(**{**GOOD, **changes}))
    with self.assertRaisesRegex(ValueError, "mechanism='flash'"):
      explain(**GOOD, mechanism="flash")

  def test_explain_tells_what_is_not_supported(self):
    for name, changes, *words in REFUSED:
      explanation = explain(**{**GOOD, **changes})
      if changes.get("mechanism", "auto") == "auto":
        continue
      with self.subTest(name):
        self.assertIsNone(explanation.chosen)
        reasons, = [v.reasons for v in explanation.verdicts if v.mechanism == changes["mechanism"]]
        self.assertNotEmpty(reasons)
    self.run.assert_not_called()

  def test_blockwise_attn(self):
    for changes, *words in (
        ({"query": floats(B, T, D)}, "query: got"), ({"bias": floats(T, T)}, "bias: got"),
        ({"query_chunk_size": 0}, "block_sizes.block_q: got 0"),
        ({"key_chunk_size": 1.5}, "block_sizes.block_kv: got 1.5"),
        ({"attn_pdrop": 1.0}, "dropout_prob: got 1.0"),
        ({"attn_pdrop": 0.1, "deterministic": False}, "dropout_rng: got None"),
        ({"dtype": jnp.int32}, "compute_dtype: got"), ({"policy": "none"}, "policy: got 'none'"),
        ({"causal": 1}, "causal: got 1"), (LONG, "query_offset and mask_info.q_positions")):
      self.refused(ValueError, words, lambda: blockwise_attn(**{**GOOD, **changes}))

  def test_every_argument_is_covered(self):
    """Every argument of the door is named by some message of the tables."""
    named = {word.split(":")[0].split("=")[0].split(".")[0]
             for _, _, *words in VALUES for word in words[:1]}
    named |= {argument for _, changes, *_ in REFUSED for argument in changes}
    self.assertEmpty(set(inspect.signature(attention).parameters) - named)

  def test_names_are_unique(self):
    for table in (VALUES, REFUSED):
      self.assertLen({row[0] for row in table}, len(table))


class GoodInputTest(parameterized.TestCase):
  """What the bad calls are made of runs: it is the change that is refused."""

  @parameterized.named_parameters(
      ("good", {}), ("packed", PACKED), ("long", {**LONG, "query_offset": 4}),
      ("wide", WIDE), ("no_positions", {**LONG, "causal": False}),
      ("offset_at_its_limit", {"query_offset": 2**30 - 1, "causal": False,
                               "sliding_window": (-1, 5)}),
      ("window_at_its_limit", {"sliding_window": (2**31 - 1, None)}),
      ("numbers_of_numpy", {"softmax_scale": np.float32(1), "sliding_window": np.int32(3),
                            "chunk_size": np.int64(4), "query_offset": np.int32(0),
                            "causal": np.True_, "logits_soft_cap": np.float64(3)}),
      ("precision", {"precision": ["high", "default"]}),
      ("mask_value", {"mask_value": -1e9}),
      ("dropped", {**DROPPED, "dropout_rng": jax.random.key(0)}),
      ("init_bias", {"init_bias": lambda: floats(1, 1, 1, T)}),
      ("init_bias_none", {"init_bias": lambda: None}))
  def test_runs(self, changes):
    arguments = {**GOOD, **changes}
    out = attention(**arguments).attention_outputs
    self.assertEqual(out.shape, (*arguments["query"].shape[:-1], arguments["value"].shape[-1]))
    self.assertTrue(np.isfinite(out).all())

  def test_empty_sequences_among_packed_ones(self):
    out = attention(**{**PACKED, "cum_seqlens_q": offsets(0, 0, 10, 10)}).attention_outputs
    np.testing.assert_allclose(out, 1, rtol=1e-6)

  @parameterized.named_parameters(("row", np.int32([3, 1])), ("scalar", np.asarray(2)))
  def test_offsets_of_numpy_beside_traced_sequences(self, offset):
    def run(sequences, offset):
      return attention(**{**PACKED, "cum_seqlens_q": sequences}, query_offset=offset,
                       sliding_window=(2, 1), return_lse=True)
    got = jax.jit(lambda sequences: run(sequences, offset))(PACKED["cum_seqlens_q"])
    want = run(PACKED["cum_seqlens_q"], jnp.asarray(offset, jnp.int32))
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)

  @parameterized.product(
      mask=("causal", "full", "window"), argument=("query", "key", "bias"))
  def test_gradient_of_the_lse_of_sdpa(self, mask, argument):
    """Refused, since it would be wrong; the value itself is fine, and so is d lse / d value = 0."""
    changes = {"causal": {}, "full": {"causal": False}, "window": {"sliding_window": 3}}[mask]
    arguments = {**GOOD, "bias": floats(1, H, 1, T), **changes}
    def lse(x, argument):
      return attention(**{**arguments, argument: x}, mechanism="sdpa", return_lse=True).lse.sum()
    message = "(?s)return_lse=True.*sdpa.*flash_attn2"
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.grad(lse)(arguments[argument], argument)
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jit(jax.grad(lse), static_argnums=1)(arguments[argument], argument)
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jvp(lambda x: lse(x, argument), (arguments[argument],), (arguments[argument],))
    if argument == "query":
      self.assertTrue(np.isfinite(lse(arguments[argument], argument)))
      self.assertFalse(jax.grad(lse)(arguments["value"], "value").any())

  def test_a_platform_without_the_mechanism(self):
    with self.assertRaisesRegex(NotImplementedError, "'cudnn' on platform 'tpu' refuses.*NVIDIA"):
      attention(**GOOD, mechanism="cudnn", metadata=OperationMetadata(platform="tpu"))


if __name__ == "__main__":
  absltest.main()
