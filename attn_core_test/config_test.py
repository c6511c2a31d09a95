# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""AttnConfig: documented fields, merges, JSON and files."""

import json
import math
import pathlib
import tempfile
import typing

from absl.testing import absltest, parameterized
import jax
from jax.sharding import PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core import (AttentionMechanism, AttnConfig, AttnConfigDict, BlockSizes, EasyMethod,
                       OperationMetadata, PartitionAxis, Rope, add_basic_configurations,
                       attach_custom_arguments, attention_arguments, create_mesh, extras_of,
                       extract_commit_hash, from_dict, from_pretrained, get_axis_dims,
                       get_axis_names, get_backend, get_basic_frequencies,
                       get_basic_inv_frequencies, get_basic_rope, get_fcm_mask, get_mask_details,
                       get_mesh, get_partition_rules, granted_freq_max_position_embedding,
                       layer_rope, read_basics_from_config, save_pretrained, set_model_mesh,
                       to_dict, to_diff_dict, to_json_file)
from attn_core.config.config import BASICS, LAYER_TYPES, get_head_dim
from attn_core.config.layers import mask_detail
from attn_core.config.validate import validated

jax.config.update("jax_num_cpu_devices", 8)

FULL, SLIDING, CHUNKED = LAYER_TYPES[:3]

# The arguments of the documented base configuration in order, with their defaults.
DOCUMENTED = {
    "sharding_axis_dims": (1, -1, 1, 1, 1), "sharding_dcn_axis_dims": None,
    "sharding_axis_names": ("dp", "fsdp", "ep", "tp", "sp"), "attn_mechanism": "vanilla",
    "decode_attn_mechanism": None, "blocksize_k": 128, "blocksize_q": 128, "blocksize_b": 1,
    "moe_tiling_size_batch": 4, "moe_tiling_size_seqlen": 128, "moe_tiling_size_dim": 128,
    "partition_axis": PartitionAxis(), "use_sharded_kv_caching": False,
    "use_sharding_constraint": False, "backend": None, "platform": None, "easy_method": "train",
    "bits": None, "scan_ring_attention": True, "scan_attention_layers": False,
    "use_scan_mlp": False, "scan_mlp_chunk_size": 1024, "sequence_axis_name": "sp",
    "gradient_checkpointing": "", "gradient_checkpointing_targets": None, "precompute_masks": True,
    "kv_cache_quantization_config": None, "quantization_config": None,
    "kv_cache_sharding_sequence_axis_name": "sp", "flash_attention_backward_pass_impl": "triton",
    "attn_dtype": jnp.bfloat16, "kvdtype": None, "attn_softmax_dtype": jnp.float32,
    "fcm_max_ratio": 0.0, "fcm_min_ratio": 0.0, "hardware_abstraction": False,
    "pallas_m_block_size": 128, "pallas_k_block_size": 128, "pallas_n_block_size": 128,
    "moe_method": "fused_moe", "moe_force_xla_gmm": False, "use_expert_tensor_mode": False,
    "use_ring_of_experts": False, "fsdp_is_ep_bound": True, "sp_is_ep_bound": True,
    "operation_configs": None,
}

# One value other than the default for every documented field.
OTHERS = {
    "sharding_axis_dims": (2, 1, 1, 4, 1), "sharding_dcn_axis_dims": (1, 1, 1, 1, 1),
    "sharding_axis_names": ("dp", "fsdp", "ep", "tp", "seq"), "attn_mechanism": "ring",
    "decode_attn_mechanism": AttentionMechanism.REGRESSIVE_DECODE, "blocksize_k": 512,
    "blocksize_q": None, "blocksize_b": 2, "moe_tiling_size_batch": 8,
    "moe_tiling_size_seqlen": 64, "moe_tiling_size_dim": 256,
    "partition_axis": PartitionAxis(head_axis=("tp", "seq")), "use_sharded_kv_caching": True,
    "use_sharding_constraint": True, "backend": "cpu", "platform": "jax",
    "easy_method": EasyMethod.EVAL, "bits": 8, "scan_ring_attention": False,
    "scan_attention_layers": True, "use_scan_mlp": True, "scan_mlp_chunk_size": 2048,
    "sequence_axis_name": "seq", "gradient_checkpointing": "save_only_these_names",
    "gradient_checkpointing_targets": ["attn_output", "residual"], "precompute_masks": False,
    "kv_cache_quantization_config": {"dtype": "int8", "group": [1, 2]},
    "quantization_config": {"bits": 4}, "kv_cache_sharding_sequence_axis_name": ("sp", "tp"),
    "flash_attention_backward_pass_impl": "xla", "attn_dtype": "float16", "kvdtype": jnp.int8,
    "attn_softmax_dtype": jnp.bfloat16, "fcm_max_ratio": 0.5, "fcm_min_ratio": 0.25,
    "hardware_abstraction": True, "pallas_m_block_size": 64, "pallas_k_block_size": 64,
    "pallas_n_block_size": 64, "moe_method": "dense_moe", "moe_force_xla_gmm": True,
    "use_expert_tensor_mode": True, "use_ring_of_experts": True, "fsdp_is_ep_bound": False,
    "sp_is_ep_bound": False, "operation_configs": {"flash_attn2": BlockSizes(64, 128)},
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": [31, 0],
    "rope": Rope("linear", factor=2.0), "layer_ropes": {"sliding_attention": Rope()},
    "partition_rules": [["q/.*", PartitionSpec(("fsdp", "dp"), "tp")], [".*", PartitionSpec()]],
}


class FieldsTest(parameterized.TestCase):

  def test_every_documented_field_and_default(self):
    self.assertEqual(BASICS, tuple(DOCUMENTED))
    for name, value in DOCUMENTED.items():
      mine = AttnConfig._field_defaults[name]
      self.assertEqual(mine, () if name == "operation_configs" else value, name)

  def test_dictionary_type_has_all_and_requires_none(self):
    self.assertEqual(AttnConfigDict.__optional_keys__, set(AttnConfig._fields))
    self.assertEqual(typing.get_type_hints(AttnConfigDict), typing.get_type_hints(AttnConfig))
    self.assertEqual(typing.get_type_hints(AttnConfigDict)["blocksize_q"], int | None)

  def test_constants(self):
    self.assertEqual((EasyMethod.TRAIN, EasyMethod.SERVE, EasyMethod.EVAL, EasyMethod.CONVERT),
                     ("train", "serve", "serve", "convert"))

  def test_static_and_hashable(self):
    config = add_basic_configurations(AttnConfig(), **OTHERS)
    self.assertEqual(hash(config), hash(add_basic_configurations(AttnConfig(), **OTHERS)))
    self.assertEqual(jax.jit(lambda c, x: x * c.blocksize_k)(config, 1), 512)

  def test_metadata_reads_it(self):
    config = add_basic_configurations(AttnConfig(), **OTHERS)
    metadata = OperationMetadata.from_config(config)
    self.assertEqual(
        (metadata.runtime_dtype, metadata.runtime_softmax_dtype, metadata.sequence_axis_name,
         metadata.scan_ring_attention, metadata.blocksize_k, metadata.blocksize_q,
         metadata.partition_axis, metadata.get_operation_config("flash_attn2")),
        (jnp.float16, jnp.bfloat16, "seq", False, 512, None, config.partition_axis,
         BlockSizes(64, 128)))

  def test_accessors(self):
    config = AttnConfig(sharding_axis_dims=(2, 1, 1, 4, 1))
    self.assertEqual(get_axis_dims(config), (2, 1, 1, 4, 1))
    self.assertEqual(get_axis_names(config), ("dp", "fsdp", "ep", "tp", "sp"))
    self.assertEqual(get_backend(config), jax.default_backend())
    self.assertEqual(get_backend(AttnConfig(backend="tpu")), "tpu")
    self.assertEqual(dict(get_mesh(config).shape), {"dp": 2, "fsdp": 1, "ep": 1, "tp": 4, "sp": 1})
    mesh = create_mesh((8, 1), ("a", "b"))
    self.assertIs(get_mesh(set_model_mesh(config, mesh)), mesh)
    self.assertEqual(OperationMetadata.from_config(set_model_mesh(config, mesh)).mesh, mesh)
    with self.assertRaisesRegex(ValueError, "product 3.*8 devices"):
      get_mesh(AttnConfig(sharding_axis_dims=(3, 1, 1, 1, 1)))
    with self.assertRaisesRegex(NotImplementedError, "partition_rules="):
      get_partition_rules(config)
    rules = ((".*", PartitionSpec("tp")),)
    self.assertEqual(get_partition_rules(config._replace(partition_rules=rules)), rules)


class MergeTest(parameterized.TestCase):

  def test_given_wins_and_the_rest_stays(self):
    base = add_basic_configurations(AttnConfig(), blocksize_q=64, attn_mechanism="ring")
    merged = add_basic_configurations(base, attn_mechanism="flash_attn2", kvdtype=None)
    self.assertEqual(merged, base._replace(attn_mechanism="flash_attn2"))
    self.assertEqual(base.attn_mechanism, "ring")
    self.assertEqual(add_basic_configurations(base), base)

  def test_every_field_can_be_given(self):
    self.assertContainsSubset(DOCUMENTED, OTHERS)
    merged = add_basic_configurations(AttnConfig(), **OTHERS)
    for name in OTHERS:
      self.assertNotEqual(getattr(merged, name), AttnConfig._field_defaults[name], name)

  def test_basics_of_another(self):
    source = add_basic_configurations(AttnConfig(), **OTHERS)._replace(head_dim=96)
    mine = AttnConfig(head_dim=64, sequence_axis_name="x")
    merged = read_basics_from_config(mine, source)
    self.assertEqual(merged[:len(BASICS)], source[:len(BASICS)])
    self.assertEqual(merged.head_dim, 64)
    class Other:
      attn_mechanism = AttentionMechanism.SDPA
      hidden_size = 7
    self.assertEqual(read_basics_from_config(mine, Other()), mine._replace(attn_mechanism="sdpa"))

  def test_bad_sources(self):
    for source in (None, {"bits": 3}):
      with self.assertRaisesRegex(ValueError, "source: got .*add_basic_configurations"):
        read_basics_from_config(AttnConfig(), source)
    with self.assertRaisesRegex(ValueError, "config: got NoneType; expected an AttnConfig"):
      add_basic_configurations(None, bits=3)

  def test_custom_arguments(self):
    config = attach_custom_arguments(AttnConfig(), head_dim=96, rotary="yes", sizes=[1, {"a": 2}])
    self.assertEqual(config.head_dim, 96)
    self.assertEqual(extras_of(config), {"rotary": "yes", "sizes": [1, {"a": 2}]})
    config = attach_custom_arguments(config, rotary="no")
    self.assertEqual(extras_of(config), {"rotary": "no", "sizes": [1, {"a": 2}]})
    self.assertEqual(from_dict(to_dict(config)), config)
    found = {add_basic_configurations(AttnConfig(), quantization_config=x)
             for x in ({"x": [1], "y": 2}, {"y": 2, "x": [1]})}
    self.assertLen(found, 1)  # whatever the order of a dictionary
    with self.assertRaisesRegex(ValueError, "attach_custom_arguments: f is not JSON"):
      attach_custom_arguments(config, f=len)
    with self.assertRaisesRegex(ValueError, "attach_custom_arguments: f is not JSON"):
      attach_custom_arguments(config, f=[math.nan])
    with self.assertRaisesRegex(ValueError, r"\['rotary'\].*attach_custom_arguments"):
      add_basic_configurations(config, rotary="no")

  @parameterized.parameters(
      ({"attn_mechanism": "flash"}, "attn_mechanism: got 'flash'.*'flash_attn2'"),
      ({"decode_attn_mechanism": 3}, "decode_attn_mechanism: got 3"),
      ({"attn_dtype": "brain"}, "attn_dtype: got 'brain'"),
      ({"attn_softmax_dtype": None}, "attn_softmax_dtype: got None"),
      ({"blocksize_q": 0}, "blocksize_q=0"),
      ({"moe_tiling_size_dim": 1.5}, "moe_tiling_size_dim: got 1.5"),
      ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads: got 3.*=8"),
      ({"easy_method": "dream"}, "easy_method: got 'dream'"),
      ({"moe_method": "sparse"}, "moe_method: got 'sparse'"),
      ({"flash_attention_backward_pass_impl": "c"}, "got 'c'.*'triton', 'xla'"),
      ({"gradient_checkpointing": "some"}, "gradient_checkpointing: got 'some'"),
      ({"gradient_checkpointing": "save_only_these_names"}, "targets: got None"),
      ({"gradient_checkpointing_targets": ("residual",)}, "targets: got .'residual',."),
      ({"precompute_masks": 1}, "precompute_masks: got 1"),
      ({"fcm_min_ratio": 0.5, "fcm_max_ratio": 0.25}, "fcm_min_ratio: got 0.5.*0.25"),
      ({"fcm_max_ratio": 1.0}, "fcm_max_ratio: got 1.0"),
      ({"softmax_scale": -1.0}, "softmax_scale: got -1.0"),
      ({"sharding_axis_dims": 8}, "sharding_axis_dims: got 8; expected a tuple"),
      ({"sharding_axis_names": "sp"}, "sharding_axis_names: got 'sp'; expected a tuple"),
      ({"sharding_dcn_axis_dims": -1}, "sharding_dcn_axis_dims: got -1; expected a tuple"),
      ({"kv_cache_sharding_sequence_axis_name": -1},
       "kv_cache_sharding_sequence_axis_name=-1: expected the name of a mesh axis"),
      ({"quantization_config": object()}, "quantization_config=.*expected .*JSON-serializable"),
      ({"kv_cache_quantization_config": math.nan}, "kv_cache_quantization_config=nan"),
      ({"model_type": 3}, "model_type: got 3"),
      ({"extras": {"a": [1]}}, "extras: got .*attach_custom_arguments"),
      ({"layer_types": 3}, "layer_types: got 3; expected a tuple"),
      ({"layer_ropes": 3}, "layer_ropes: got 3; expected pairs"),
      ({"layer_ropes": {FULL: {"factor": 2.0}}}, "layer_ropes: got .*expected pairs"),
      ({"layer_ropes": {"dense": Rope()}}, "layer_ropes: got .*layer types of full"),
      ({"layers_without_rope": -1}, "layers_without_rope: got -1"),
      ({"layers_without_rope": (2,), "num_hidden_layers": 2},
       r"layers_without_rope: got \(2,\); expected layer indices, from 0 to 2 - 1"),
      ({"partition_rules": 5}, "partition_rules=5: expected pairs"),
      ({"partition_rules": (("(", PartitionSpec()),)}, "partition_rules=.*unterminated"),
      ({"partition_rules": (("a", "tp"),)}, "partition_rules has the spec 'tp'"),
      ({"sharding_axis_dims": (1, 2)}, r"sharding_axis_dims: got \(1, 2\)"),
      ({"mesh": "8"}, "mesh='8'"),
      ({"platform": "vulkan"}, "platform='vulkan'"),
      ({"operation_configs": {"flash": BlockSizes()}}, "operation_configs key='flash'"),
      ({"partition_axis": PartitionAxis(head_axis=3)}, "partition_axis.head_axis=3"),
      ({"rope": Rope("spiral")}, "rope_type: got 'spiral'"),
      ({"sliding_window": 128}, "sliding_window: got 128.*W - 1, 0"),
      ({"sliding_window": (-2, 0)}, r"sliding_window: got \(-2, 0\)"),
      ({"temperature_tuning": 0.1}, "temperature_tuning: got 0.1; expected .strength, step"),
      ({"temperature_tuning": (-1.0, 8)}, "temperature_tuning: got -1.0; expected a finite stren"),
      ({"temperature_tuning": (0.1, 0)}, "temperature_tuning: got 0; expected a step >= 1"),
      ({"sliding_window": (127, 0), "chunk_size": 64}, "chunk_size=64, no layer_types"),
      ({"layer_types": ("dense",)}, "layer_types: got 'dense'"),
      ({"layer_types": (FULL,) * 3, "num_hidden_layers": 4}, "3 of them.*num_hidden_layers=4"),
      ({"layer_types": (FULL, SLIDING)}, "sliding_window: got None.*1 of 2 layer_types"),
      ({"layer_types": (FULL, CHUNKED)}, "chunk_size: got None.*1 of 2 layer_types"),
      ({"layer_types": (FULL,), "sliding_window": (127, 0)},
       r"got \(127, 0\); expected None.*0 of 1"),
  )
  def test_bad_values(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      add_basic_configurations(AttnConfig(), **given)

  def test_every_field_checks_its_type(self):
    # None is their default, whatever that is.
    by_default = {"attn_mechanism", "partition_axis", "sequence_axis_name", "operation_configs",
                  "kv_cache_sharding_sequence_axis_name"}
    for name, kind in typing.get_type_hints(AttnConfig).items():
      allows_none = name in by_default or type(None) in typing.get_args(kind)
      for value in (object(), *([] if allows_none else [None])):
        with self.subTest(name), self.assertRaisesRegex(ValueError, name):
          validated(AttnConfig()._replace(**{name: value}))
      if allows_none:
        self.assertIsNotNone(validated(AttnConfig()._replace(**{name: None})), name)

  def test_other_types(self):
    for function in (validated, layer_rope, mask_detail, attention_arguments, get_mask_details,
                     extras_of, get_mesh, get_axis_dims, get_axis_names, get_backend,
                     get_partition_rules, get_basic_inv_frequencies, get_basic_frequencies,
                     granted_freq_max_position_embedding, attach_custom_arguments,
                     lambda x: get_basic_rope(x, "float32", 8),
                     lambda x: get_fcm_mask(x, 1, 8, False)):
      with self.assertRaisesRegex(ValueError, "config: got dict; expected an AttnConfig"):
        function({})
    with self.assertRaisesRegex(ValueError, "head_dim: got None with hidden_size=100"):
      get_head_dim(AttnConfig(hidden_size=100, num_attention_heads=3))

  @parameterized.parameters("a", None, 1.0, True, -1, 2)
  def test_bad_layers(self, layer):
    for config in (AttnConfig(num_hidden_layers=2), AttnConfig(layer_types=(FULL,) * 2)):
      for function in (layer_rope, mask_detail, attention_arguments):
        with self.assertRaisesRegex(
            ValueError, f"layer: got {layer!r}; expected a number from 0 to 2 - 1"):
          function(config, layer)

  def test_bad_sizes(self):
    config = AttnConfig(head_dim=8, fcm_max_ratio=0.5, max_position_embeddings=4)
    key = jax.random.key(0)
    for call, message in ((lambda: get_fcm_mask(config, "a", 8, False, key), "batch_size: got 'a'"),
                          (lambda: get_fcm_mask(config, 1, None, False, key), "seq_length: got N"),
                          (lambda: get_fcm_mask(config, 1, 8, False, 3), "key: got 3; expected"),
                          (lambda: get_basic_frequencies(config, base="a"), "base: got 'a'"),
                          (lambda: get_basic_inv_frequencies(config, "a"), "head_dim: got 'a'")):
      with self.assertRaisesRegex(ValueError, message):
        call()


class JsonTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.config = add_basic_configurations(AttnConfig(), **OTHERS)

  def test_exact_round_trips(self):
    mesh = create_mesh()
    for config in (AttnConfig(), self.config, set_model_mesh(self.config, mesh)):
      for write in (to_dict, to_diff_dict):
        data = json.loads(json.dumps(write(config)))
        self.assertEqual(data, write(config))  # which is plain
        self.assertEqual(from_dict(data), validated(config))
    self.assertEqual(to_diff_dict(AttnConfig()), {"attn_core_format": 1})
    self.assertEqual(to_diff_dict(AttnConfig(blocksize_q=64)),
                     {"attn_core_format": 1, "blocksize_q": 64})
    metadata = OperationMetadata.from_config(self.config)
    self.assertEqual(OperationMetadata.from_json(metadata.to_json()), metadata)

  def test_numpy_numbers_are_written_as_those_of_python(self):
    config = AttnConfig(
        softmax_scale=np.float32(0.5), dropout_prob=np.float64(0.25), head_dim=np.int64(64),
        sharding_axis_dims=tuple(np.array([1, -1, 1, 1, 1])),
        temperature_tuning=(np.float32(0.5), np.int32(8)), num_hidden_layers=np.int8(2),
        layer_ropes=((FULL, Rope(rope_theta=np.float64(1e4))),),
        layer_head_dims=((FULL, np.int32(32)),), blocksize_q=np.int64(128),
        operation_configs=(("flash_attn2", BlockSizes(block_q=np.int32(64))),))
    data = json.loads(json.dumps(to_dict(config)))
    self.assertEqual(from_dict(data), validated(config))
    self.assertEqual(data["dropout_prob"], 0.25)

  def test_files(self):
    save_pretrained(self.config, self.folder / "a" / "b")
    for path in (self.folder / "a" / "b", str(self.folder / "a" / "b" / "config.json")):
      self.assertEqual(from_pretrained(path), self.config)
    self.assertEqual(from_pretrained(self.folder / "a", subfolder="b", local_files_only=True,
                                     revision="main"), self.config)
    to_json_file(self.config, self.folder / "whole.json", use_diff=False)
    self.assertEqual(from_pretrained(self.folder / "whole.json"), self.config)
    self.assertLess(set(json.loads((self.folder / "a/b/config.json").read_text())),
                    set(json.loads((self.folder / "whole.json").read_text())))

  def test_overrides(self):
    save_pretrained(self.config, self.folder)
    self.assertEqual(from_pretrained(self.folder, blocksize_k=7), self.config._replace(
        blocksize_k=7))
    config, unused = from_pretrained(self.folder, return_unused_kwargs=True, foo=False, bits=4)
    self.assertEqual((config.bits, unused), (4, {"foo": False}))
    with self.assertRaisesRegex(ValueError, r"\['foo'\]"):
      from_pretrained(self.folder, foo=False)

  def test_network_arguments_are_refused_by_name(self):
    for name in ("meta-llama/Llama-3.1-8B", "gpt2"):
      with self.assertRaisesRegex(NotImplementedError, f"'{name}'.*hub.*config.json"):
        from_pretrained(name)
    save_pretrained(self.config, self.folder)
    for given in ({"token": "x"}, {"revision": "v2"}, {"cache_dir": "x"}, {"force_download": True}):
      with self.assertRaisesRegex(NotImplementedError, next(iter(given))):
        from_pretrained(self.folder, **given)
    with self.assertRaisesRegex(NotImplementedError, "push_to_hub"):
      save_pretrained(self.config, self.folder, push_to_hub=True)

  def test_bad_files(self):
    for path in (self.folder, self.folder / "x.json", "./none/such/folder"):
      with self.assertRaisesRegex(FileNotFoundError, "config.json"):
        from_pretrained(path)
    for text, message in (("{", "is not JSON"), ("[]", "data: got list"),
                          ('{"a": 1}', "model_type: got None"),
                          ('{"attn_core_format": 2}', "attn_core_format: got 2"),
                          ('{"attn_core_format": 1, "blocks": 2}', r"\['blocks'\]"),
                          ('{"attn_core_format": 1, "rope": {"speed": 2}}', "speed")):
      (self.folder / "config.json").write_text(text)
      with self.assertRaisesRegex(ValueError, message):
        from_pretrained(self.folder)
    (self.folder / "config.json").write_bytes(b"\xff\xfe")
    with self.assertRaisesRegex(ValueError, "config.json is not JSON: .*in UTF-8"):
      from_pretrained(self.folder)
    for call, message in (
        (lambda: to_json_file(self.config, 3), "json_file_path: got 3; expected the path"),
        (lambda: save_pretrained(self.config, None), "save_directory: got None; expected the path"),
        (lambda: from_pretrained(self.folder, 3), "subfolder: got 3; expected the path"),
        (lambda: from_dict({"attn_core_format": 1, 3: 4, "a": 1}), r"keys \['a', 3\]; expected")):
      with self.assertRaisesRegex(ValueError, message):
        call()
    for name in (None, 3):
      with self.assertRaisesRegex(ValueError, f"pretrained_model_name_or_path: got {name}"):
        from_pretrained(name)

  def test_commit_hash(self):
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = f"/cache/models--a--b/snapshots/{commit}/config.json"
    self.assertEqual(extract_commit_hash(path, None), commit)
    self.assertEqual(extract_commit_hash(path, "known"), "known")
    for other in (None, "/cache/config.json", path.replace("0", "z"), path[:-20]):
      self.assertIsNone(extract_commit_hash(other, None))
    with self.assertRaisesRegex(ValueError, "resolved_file: got 3"):
      extract_commit_hash(3, None)


if __name__ == "__main__":
  absltest.main()
