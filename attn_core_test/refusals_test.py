# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every condition of a refusal, one wrong argument each: the message names it and what it got."""

import types

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
import numpy as np

from attn_core import (AttnConfig, Heads, MaskInfo, OperationMetadata, PagesMetadata, PagesV1,
                       PagesV2, PagesV3, RingConfig, Rope, apply_complex_rotary, apply_rotary,
                       attention, attention_arguments, build_cache_pos, checkpoint_policy,
                       from_dict, get_basic_rope, masks, page_attention, ragged_page_attention_v3,
                       repeat_key_value, rotary, rotary_table, shard_attention_prod, to_layout,
                       tpu_version_check, vanilla)
from attn_core.caches import dense, pages, window
from attn_core.caches.paged import validate
from attn_core.config.config import get_head_dim
from attn_core.config.validate import validated
from attn_core.sharding import mesh as mesh_lib
from attn_core_test.bad_input_cases import GOOD, floats, ints


def config(**fields):
  return lambda: validated(AttnConfig(**fields))


MODEL = AttnConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2)
CONFIG = (
    ("no_heads", lambda: get_head_dim(AttnConfig(hidden_size=64)),
     "head_dim: got None with hidden_size=64 and num_attention_heads=None"),
    ("extras_list", config(extras=[("a", "1")]), r"extras=\[\('a', '1'\)\]"),
    ("extras_set", config(extras=frozenset({("a", "1")})), "extras=frozenset"),
    ("extras_string", config(extras="ab"), "extras: got 'ab'"),
    ("extras_pair", config(extras=("ab",)), r"extras: got \('ab',\)"),
    ("extras_type", config(extras=(("a", 1),)), r"extras: got \(\('a', 1\),\)"),
    ("tuning_list", config(temperature_tuning=[0.1, 8]), r"temperature_tuning: got \[0.1, 8\]"),
    ("tuning_three", config(temperature_tuning=(0.1, 8, 1)), "temperature_tuning: got "),
    ("axes_none", config(sharding_axis_names=None), "sharding_axis_names.*None"),
    ("window_list", config(sliding_window=[1, 0]), r"sliding_window: got \[1, 0\]"),
    ("window_three", config(sliding_window=(1, 0, 0)), r"sliding_window: got \(1, 0, 0\)"),
    ("window_float", config(sliding_window=(1.0, 0)), r"sliding_window: got \(1.0, 0\)"),
    ("window_low", config(sliding_window=(-2, 0)), r"sliding_window: got \(-2, 0\)"),
    ("ropes_dict", config(layer_ropes={"full_attention": Rope()}), "layer_ropes: got {"),
    ("ropes_pair", config(layer_ropes=("full_attention",)), r"layer_ropes: got \('full"),
    ("ropes_three", config(layer_ropes=(("full_attention", Rope(), 1),)), "layer_ropes: got "),
    ("ropes_name", config(layer_ropes=(("full", Rope()),)), r"layer_ropes: got \(\('full', "),
    ("ropes_rope", config(layer_ropes=(("full_attention", 1e4),)), "layer_ropes: got "),
    ("without_rope_set", config(layers_without_rope={1}), "layers_without_rope: got {1}"),
    ("without_rope_bool", config(layers_without_rope=(True,)),
     r"layers_without_rope: got \(True,\)"),
    ("layer_mode", lambda: attention_arguments(MODEL, 0, mode="train"), "mode: got 'train'"),
    ("rope_dtype", lambda: get_basic_rope(MODEL, "float99", 16), "dtype: got 'float99'"),
    ("policy_targets", lambda: checkpoint_policy("save_only_these_names", (1,)),
     r"^targets: got \(1,\)"),
    ("reader_data", lambda: from_dict([("model_type", "llama")]), "data: got list"),
    ("no_rope_layers", lambda: from_dict(dict(
        model_type="llama4_text", num_hidden_layers=2, num_attention_heads=4, hidden_size=64,
        no_rope_layers=[1, 2])), r"no_rope_layers: got \[1, 2\]"),
    ("repeat_list", lambda: repeat_key_value([1.0], floats(1, 2, 2, 4), 2), "key: got list"),
    ("repeat_rank", lambda: repeat_key_value(floats(2, 2, 4), floats(1, 2, 2, 4), 2),
     r"key: got float32\[2, 2, 4\]"),
    ("cache_pos_list", lambda: build_cache_pos([[True]], "__prefill__"),
     "attention_mask: got list"),
    ("cache_pos_ints", lambda: build_cache_pos(ints(1, 1, 2, 2), "__prefill__"),
     r"attention_mask: got int32\[1, 1, 2, 2\]"),
    ("prod_list", lambda: shard_attention_prod([1.0], OperationMetadata(), "__train__"),
     "attn_output: got list"),
    ("version", lambda: tpu_version_check("v1"), "version: got 'v1'; expected one of"),
    ("device_kind", lambda: tpu_version_check("v4", types.SimpleNamespace(platform="tpu")),
     "device: got "),
    ("device_platform", lambda: tpu_version_check("v4", types.SimpleNamespace(device_kind="v4")),
     "device: got "),
    ("sinks_rank", lambda: OperationMetadata().get_shardings(
        "__train__", softmax_aux=floats(1, 2, 3)), "softmax_aux of shape"),
    ("sinks_scalar", lambda: OperationMetadata().get_shardings(
        "__train__", softmax_aux=np.float32(1)), "softmax_aux of shape"),
    ("layout", lambda: OperationMetadata().get_shardings("__train__", "BTHD"),
     "layout.*'BTHD'"),
    ("ring", lambda: OperationMetadata(ring={"variant": "ring"}), "ring.*expected|ring="),
    ("ring_variant", lambda: OperationMetadata(ring=RingConfig(variant="star")),
     "ring.variant.*'star'"),
    ("ring_transfer", lambda: OperationMetadata(ring=RingConfig(transfer="mail")),
     "ring.transfer.*'mail'"),
    ("ring_axis_number", lambda: OperationMetadata(
        ring=RingConfig(variant="hybrid", heads_axis_name=1)), "ring.heads_axis_name.*1"),
    ("ring_axis_empty", lambda: OperationMetadata(
        ring=RingConfig(variant="hybrid", heads_axis_name="")), "ring.heads_axis_name.*''"),
    ("ring_axis_unused", lambda: OperationMetadata(ring=RingConfig(heads_axis_name="tp")),
     "ring.heads_axis_name.*'tp'"),
)

QUERY, PLACES = floats(1, 4, 2, 8), ints(1, 4)
SECTIONS = Rope(mrope_section=(2, 1, 1))
TABLE = floats(4, 4)
ROPE = (
    ("tokens", lambda: rotary_table(Rope(max_position_embeddings=0), PLACES, 8),
     "rope.max_position_embeddings: got 0"),
    ("section", lambda: rotary_table(Rope(mrope_section=(5, -1, 0)), PLACES, 8),
     r"rope.mrope_section: got \(5, -1, 0\)"),
    ("positions_list", lambda: rotary_table(Rope(), [0.5], 8), "positions: got"),
    ("positions_scalar", lambda: rotary_table(Rope(), np.array(3), 8), r"positions: got int32\[\]"),
    ("positions_float", lambda: rotary_table(Rope(), floats(4), 8), r"positions: got float32\[4\]"),
    ("positions_rank", lambda: rotary_table(SECTIONS, ints(3, 1, 1, 4), 8),
     r"positions: got int32\[3, 1, 1, 4\]"),
    ("positions_axes", lambda: rotary_table(SECTIONS, ints(2, 1, 4), 8),
     r"positions: got int32\[2, 1, 4\]"),
    ("layout", lambda: apply_rotary(QUERY, TABLE, TABLE, layout="BTHD"), "layout: got 'BTHD'"),
    ("table_list", lambda: apply_rotary(QUERY, [1.0], TABLE), "cosine: got list"),
    ("sine_ints", lambda: apply_rotary(QUERY, TABLE, ints(4, 4)), r"sine: got int32\[4, 4\]"),
    ("table_wide", lambda: apply_rotary(QUERY, floats(4, 5), floats(4, 5)),
     r"cosine: got float32\[4, 5\]"),
    ("table_long", lambda: apply_rotary(QUERY, floats(5, 4), floats(5, 4)),
     r"cosine: got float32\[5, 4\]"),
    ("table_batch", lambda: apply_rotary(QUERY, floats(2, 4, 4), floats(2, 4, 4)),
     r"cosine: got float32\[2, 4, 4\]"),
    ("table_rank", lambda: apply_rotary(QUERY, floats(4), floats(4)), r"cosine: got float32\[4\]"),
    ("complex_list", lambda: apply_complex_rotary([1.0], QUERY, floats(4, 1, 4) * 1j),
     "xq: got list"),
    ("complex_ints", lambda: apply_complex_rotary(QUERY, ints(1, 4, 2, 8), floats(4, 1, 4) * 1j),
     r"xk: got int32\[1, 4, 2, 8\]"),
    ("complex_odd", lambda: apply_complex_rotary(floats(1, 4, 2, 7), QUERY, floats(4, 1, 3) * 1j),
     r"xq: got float32\[1, 4, 2, 7\]"),
    ("complex_rank", lambda: apply_complex_rotary(QUERY, QUERY, floats(1, 1, 4, 1, 4) * 1j),
     r"freqs_cis: got complex\d+\[1, 1, 4, 1, 4\]"),
    ("complex_length", lambda: apply_complex_rotary(QUERY, QUERY, floats(3, 1, 4) * 1j),
     r"freqs_cis: got complex\d+\[3, 1, 4\]"),
    ("rotary_scalar", lambda: rotary(QUERY, QUERY, np.array(3), Rope()),
     r"positions: got int32\[\]"),
    ("rotary_width", lambda: rotary(QUERY, floats(1, 4, 2, 6), PLACES, Rope()),
     r"key: got float32\[1, 4, 2, 6\]"),
    ("rotary_rank", lambda: rotary(QUERY[0], QUERY, PLACES, Rope()),
     r"query: got float32\[4, 2, 8\]"),
)

STATIC = (
    ("placed_three", lambda: masks.placed(masks.causal(), ints(1, 2), ints(1, 2), (2, 2, 2)),
     r"size=\(2, 2, 2\)"),
    ("placed_float", lambda: masks.placed(masks.causal(), ints(1, 2), ints(1, 2), (2.0, 2)),
     r"size=\(2.0, 2\)"),
    ("packed_total", lambda: MaskInfo.from_cu_seqlens(np.int32([0, 0]), -1), "got -1"),
    ("shards_bool", lambda: to_layout(floats(4), "zigzag", True, axis=0), "shards=True"),
    ("shards_float", lambda: to_layout(floats(4), "zigzag", 2.0, axis=0), "shards=2.0"),
    ("mesh_list", lambda: mesh_lib.mesh_to_dict([]), r"mesh=\[\]"),
    ("mesh_empty", lambda: mesh_lib.mesh_to_dict(Mesh(np.empty((), object), ())), "mesh=Mesh"),
    ("mesh_abstract", lambda: mesh_lib.mesh_to_dict(AbstractMesh((1,), ("x",))), "mesh=Abstract"),
    ("mesh_data", lambda: mesh_lib.mesh_from_dict([]), r"mesh=\[\]"),
)

B, T, P, SIZE = 3, 8, 24, 4
METADATA = PagesMetadata(np.arange(P, dtype=np.int32).reshape(B, 8), np.int32([9, 4, 6]),
                         np.int32([0, 3, 3, 5]))
ONE_EACH = METADATA._replace(query_start_loc=None)
WIDTHS = Heads(2, 16, 16)
V1, V2, V3 = (pages.init(kind, P, SIZE, WIDTHS, jnp.float32)
              for kind in (PagesV1, PagesV2, PagesV3))
EIGHT = pages.init(PagesV2, P, SIZE, WIDTHS, jnp.int8, "token")
TOKENS = floats(T, 4, 16)


def checked(cache, metadata=METADATA):
  return lambda: validate.check(cache, metadata, T)


def writes(key, value, cache=V3):
  return lambda: ragged_page_attention_v3(TOKENS, key, value, cache, METADATA)


PAGES = (
    ("heads_tuple", lambda: pages.init(PagesV2, 1, 1, (2, 16, 16, 16)),
     r"heads: got \(2, 16, 16, 16\)"),
    ("dtype", lambda: pages.init(PagesV2, 1, 1, WIDTHS, "float99"), "dtype: got 'float99'"),
    ("append_rank", lambda: pages.append(V2, floats(T, 16), floats(T, 2, 16), np.arange(T)),
     r"key: got float32\[8, 16\]"),
    ("append_scales", lambda: pages.append(
        EIGHT, *[np.ones((T, 2, 16), np.int8)] * 2, np.arange(T), (ints(T, 2), floats(T, 2))),
     r"scales: got int32\[8, 2\]"),
    ("dense_rank", lambda: pages.from_dense(V2, floats(B, 2, 16), floats(B, 2, 16), METADATA),
     r"key: got float32\[3, 2, 16\]"),
    ("groups", lambda: pages.to_dense(V2, METADATA._replace(page_tables=ints(1, B, 8))),
     r"metadata.page_tables: got int32\[1, 3, 8\]"),
    ("cache", checked(dense.init(1, 4, (2, 16))), "cache_view: got DenseCache"),
    ("cache_list", checked(PagesV2([1.0])), "cache_view: got list"),
    ("cache_values", checked(V1._replace(value_pages=V1.value_pages[:, :8])),
     r"cache_view: got float32\[2, 8, 4, 16\]"),
    ("cache_dtypes", checked(V1._replace(value_pages=V1.value_pages.astype(jnp.bfloat16))),
     "cache_view: got bfloat16"),
    ("packing", checked(PagesV3(jnp.zeros((P, SIZE, 2, 2, 128)))),
     r"cache_view: got float32\[24, 4, 2, 2, 128\]"),
    ("odd_rows", checked(PagesV3(jnp.zeros((P, SIZE, 3, 1, 128)))),
     r"cache_view: got float32\[24, 4, 3, 1, 128\]"),
    ("lanes", checked(PagesV3(jnp.zeros((P, SIZE, 4, 1, 64)))),
     r"cache_view: got float32\[24, 4, 4, 1, 64\]"),
    ("tables_list", checked(V2, METADATA._replace(page_tables=[[0]])),
     r"cache_metadata.page_tables: got int32\[1, 1\]"),
    ("lengths_list", checked(V2, METADATA._replace(context_lens=[9, 4, 0.5])),
     "cache_metadata.context_lens: got"),
    ("no_columns", checked(V2, METADATA._replace(page_tables=ints(B, 0))),
     r"cache_metadata.page_tables: got int32\[3, 0\]"),
    ("requests_float", checked(V2, METADATA._replace(num_requests=np.float32([3]))),
     r"cache_metadata.num_requests: got float32\[1\]"),
    ("requests_two", checked(V2, METADATA._replace(num_requests=np.int32([3, 3]))),
     r"cache_metadata.num_requests: got int32\[2\]"),
    ("scales_list", checked(EIGHT._replace(key_scales=[1.0])), "cache_view.key_scales: got list"),
    ("scales_dtype", checked(EIGHT._replace(key_scales=EIGHT.key_scales.astype(jnp.bfloat16))),
     "cache_view.key_scales: got bfloat16"),
    ("scales_rank", checked(EIGHT._replace(key_scales=EIGHT.key_scales[0])),
     r"cache_view.key_scales: got float32\[4, 2\]"),
    ("scales_pages", checked(EIGHT._replace(key_scales=EIGHT.key_scales[:3])),
     r"cache_view.key_scales: got float32\[3, 4, 2\]"),
    ("scales_tokens", checked(EIGHT._replace(key_scales=EIGHT.key_scales[:, :3])),
     r"cache_view.key_scales: got float32\[24, 3, 2\]"),
    ("scales_differ", checked(EIGHT._replace(value_scales=jnp.float32(1))),
     r"cache_view.value_scales: got float32\[\]; expected the shape of key_scales"),
    ("query_ints", lambda: page_attention(ints(B, 4, 16), V1, ONE_EACH),
     r"query: got int32\[3, 4, 16\]"),
    ("query_empty", lambda: page_attention(floats(B, 0, 16), V1, ONE_EACH),
     r"query: got float32\[3, 0, 16\]"),
    ("new_value", writes(TOKENS[:, :2], None), "value: got NoneType"),
    ("new_value_ints", writes(TOKENS[:, :2], ints(T, 2, 16)), r"value: got int32\[8, 2, 16\]"),
    ("new_tokens", writes(TOKENS[:3, :2], TOKENS[:3, :2]), r"key: got float32\[3, 2, 16\]"),
    ("new_width", writes(TOKENS[:, :2, :8], TOKENS[:, :2, :8]), r"key: got float32\[8, 2, 8\]"),
    ("new_heads", writes(TOKENS[:, :0], TOKENS[:, :0]), r"key: got float32\[8, 0, 16\]"),
)

MODULES = {"dense": dense, "ring": window}


def cache_cases(kind):
  """Bad calls of the functions of a cache's module; rows B, 4 slots, heads (2, 16)."""
  module = MODULES[kind]
  cache = module.init(B, 4, (2, 16), dtype=jnp.float32)
  key = floats(B, 3, 2, 16)
  insert = lambda slots, prefilled: lambda: module.insert(cache, slots, prefilled)
  one = lambda slots=4, heads=(2, 16), dtype=jnp.float32: module.init(1, slots, heads, dtype=dtype)
  return (
      ("dtype", lambda: module.init(B, 4, (2, 16), dtype="float99"), "dtype: got 'float99'"),
      ("heads_list", lambda: module.init(B, 4, [2, 16]), r"heads: got \[2, 16\]"),
      ("heads_one", lambda: module.init(B, 4, (2,)), r"heads: got \(2,\)"),
      ("slots", lambda: module.init(B, 0, (2, 16)), ": got 0; expected an int >= 1"),
      ("kind", lambda: module.append(V2, key, key), "cache: got PagesV2"),
      ("ints", lambda: module.append(cache, ints(B, 3, 2, 16), key), r"key: got int32"),
      ("no_tokens", lambda: module.append(cache, key[:, :0], key[:, :0]),
       r"key: got float32\[3, 0, 2, 16\]"),
      ("fewer_values", lambda: module.append(cache, key, key[:, :2]), r"value: got float32\[3, 2"),
      ("lengths_list", lambda: module.append(cache, key, key, [1, 1, 0.5]), "lengths: got"),
      ("lengths_float", lambda: module.append(cache, key, key, floats(B)),
       r"lengths: got float32\[3\]"),
      ("slots_list", insert([0.5], one()), "slots: got"),
      ("slots_float", insert(floats(1), one()), r"slots: got float32\[1\]"),
      ("insert_kind", insert(np.int32([0]), V2), "prefilled: got PagesV2"),
      ("insert_dtype", insert(np.int32([0]), one(dtype=jnp.bfloat16)), "prefilled: got .*bfloat16"),
      ("insert_heads", insert(np.int32([0]), one(heads=(1, 16))),
       r"prefilled: got .*\[1, 4, 1, 16\]"),
      ("insert_slots", insert(np.int32([0]), one(slots=5)), "prefilled: got "),
  )


CACHES = tuple((f"{kind}_{name}", call, words)
               for kind in MODULES for name, call, words in cache_cases(kind)) + (
    ("to_dense", lambda: window.to_dense(window.init(B, 4, (2, 16)), 0), "slots: got 0"),
    ("to_dense_of_text", lambda: window.to_dense(window.init(B, 4, (2, 16)), "4"),
     "slots: got '4'"),
)


class RefusalsTest(parameterized.TestCase):

  @parameterized.named_parameters(*[
      (f"{kind}_{name}", call, words)
      for kind, cases in (("config", CONFIG), ("rope", ROPE), ("static", STATIC), ("pages", PAGES),
                          ("caches", CACHES)) for name, call, words in cases])
  def test_refused(self, call, words):
    with self.assertRaisesRegex(ValueError, words):
      call()

  def test_numbers_of_heads_are_compared_where_both_are_given(self):
    self.assertEqual(validated(AttnConfig(num_key_value_heads=2)).num_key_value_heads, 2)
    self.assertEqual(validated(AttnConfig(num_attention_heads=3)).num_attention_heads, 3)
    with self.assertRaisesRegex(ValueError, "num_key_value_heads: got 2"):
      validated(AttnConfig(num_attention_heads=3, num_key_value_heads=2))

  def test_an_unknown_keyword_of_a_mechanism(self):
    with self.assertRaisesRegex(TypeError, "'vanilla': got an unexpected keyword .*'windows'"):
      vanilla(**GOOD, windows=3)
    with self.assertRaisesRegex(TypeError, "'mechanism'; this function always runs 'vanilla'"):
      vanilla(**GOOD, mechanism="ring")

  def test_packed_keys_of_their_own_need_no_positions_where_none_matter(self):
    query, key = floats(5, 4, 16), floats(7, 2, 16)
    arguments = dict(layout="thd", cum_seqlens_q=np.int32([0, 2, 5]),
                     cum_seqlens_k=np.int32([0, 6, 7]))
    output = attention(query, key, key, causal=False, **arguments).attention_outputs
    self.assertEqual(output.shape, query.shape)
    with self.assertRaisesRegex(ValueError, "query_offset: got None with cum_seqlens_k"):
      attention(query, key, key, **arguments)


if __name__ == "__main__":
  absltest.main()
