# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""OperationMetadata: values, sharding rules, mesh and platform, JSON."""

import copy
import dataclasses
import enum
import json
import pickle
import types
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from attn_core.config.metadata import (AttnShardingRules, OperationMetadata, resolved_capability,
                                       resolved_mesh, resolved_platform, dropped_axes)
from attn_core.sharding.mesh import create_mesh
from attn_core.sharding.partition import DroppedAxis, PartitionAxis
from attn_core import AttnConfig, EasyMethod
from attn_core.types import (DECODE_MODES, ARRAY_LAYOUTS, MODES, AttentionMechanism, BlockSizes,
                             RingConfig)

jax.config.update("jax_num_cpu_devices", 8)

FIELDS = (
    "runtime_dtype", "runtime_softmax_dtype", "sequence_axis_name", "mesh", "platform", "backend",
    "partition_axis", "base_config", "scan_ring_attention", "softmax_scale", "dropout_prob",
    "blocksize_q", "blocksize_k", "blocksize_b", "operation_configs", "compute_capability", "ring")

# A different mesh axis for every meaning, so that the specs tell which one was read.
DISTINCT = PartitionAxis(
    batch_axis="b", query_sequence_axis="t", key_sequence_axis="s", head_axis="h", kv_head_axis="k",
    attention_dim_axis="d", attention_kv_dim_axis="e", bias_head_sequence_axis="bh",
    bias_key_sequence_axis="bs", decode_batch_axis="b_", decode_query_sequence_axis="t_",
    decode_key_sequence_axis="s_", decode_head_axis="h_", decode_kv_head_axis="k_",
    decode_attention_dim_axis="d_", decode_attention_kv_dim_axis="e_")

# The rules in letters of DISTINCT; K and E: k and e, or h and d with qkv_mni_sharding; -: none.
RULES = {
    "bthd": dict(
        query3d="b h d", query="b t h d", key="b s K E", value="b s K E", bias="b bh t bs",
        mask="b - t bs", output="b t h d", q_segment_ids="b t", kv_segment_ids="b s"),
    "bhtd": dict(
        query3d="b h d", query="b h t d", key="b K s E", value="b K s E", bias="b bh t bs",
        mask="b - t bs", output="b h t d", q_segment_ids="b t", kv_segment_ids="b s"),
    "thd": dict(
        query3d="b h d", query="t h d", key="s K E", value="s K E", bias="bh t bs",
        mask="- t bs", output="t h d", q_segment_ids="t", kv_segment_ids="s"),
}
SINKS = {None: None, 1: "h", 2: "h -"}


class Color(enum.Enum):
  RED = "red"


class Nested(NamedTuple):
  axes: PartitionAxis = PartitionAxis()
  sizes: tuple[BlockSizes, ...] = (BlockSizes(block_q=8), BlockSizes())


class Config(NamedTuple):
  """A base configuration of plain values."""

  attn_dtype: Any = np.dtype(jnp.bfloat16)
  attn_softmax_dtype: Any = np.dtype("float32")
  sequence_axis_name: str = "ring"
  mesh: Mesh | None = None
  platform: str | None = None
  backend: str | None = None
  partition_axis: PartitionAxis = PartitionAxis(batch_axis="dp")
  scan_ring_attention: bool = False
  blocksize_q: int = 128
  blocksize_k: int = 256
  blocksize_b: int = 1
  operation_configs: Any = (("ring", BlockSizes(block_q=64)),)
  theta: float = 1e6
  names: Any = ("a", ("b", None), 3)
  listed: Any = (1, 2)
  table: Any = None
  color: Color = Color.RED
  mechanism: AttentionMechanism = AttentionMechanism.RING
  nested: Nested = Nested()


def full(mesh=None):
  """Metadata without a default value."""
  return OperationMetadata(
      runtime_dtype=jnp.bfloat16, runtime_softmax_dtype="float16", sequence_axis_name="ring",
      mesh=mesh, platform="tpu", backend="tpu",
      partition_axis=PartitionAxis(batch_axis=("dp",), head_axis=("tp", "ep"), vocab_axis=None),
      base_config=Config(mesh=mesh, table={"x": [1, {"y": (2,)}]}), scan_ring_attention=False,
      softmax_scale=0.1, dropout_prob=0.3, blocksize_q=1, blocksize_k=2, blocksize_b=3,
      operation_configs={
          "ring": BlockSizes(block_q=64), "blocksparse": BlockSizes(8, 16, 32, 64, 2)},
      compute_capability="8.6", ring=RingConfig("hybrid", "zigzag", "inner"))


class MetadataTest(parameterized.TestCase):

  def test_fields_and_defaults(self):
    metadata = OperationMetadata()
    self.assertEqual(tuple(field.name for field in dataclasses.fields(metadata)), FIELDS)
    self.assertEqual(metadata, OperationMetadata(
        np.dtype("float32"), np.dtype("float32"), "sp", None, None, None, PartitionAxis(), None,
        True, None, 0.0, None, None, None, (), None, RingConfig()))
    for field in FIELDS[:2]:
      self.assertIs(getattr(metadata, field), np.dtype("float32"))

  @parameterized.parameters(
      dict(runtime_dtype=jnp.bfloat16), dict(runtime_dtype="bfloat16"),
      dict(runtime_dtype=np.dtype(jnp.bfloat16)), dict(runtime_dtype=jnp.bfloat16.dtype))
  def test_dtypes_are_normalised(self, **fields):
    metadata = OperationMetadata(**fields)
    self.assertIs(metadata.runtime_dtype, np.dtype(jnp.bfloat16))
    self.assertEqual(hash(metadata), hash(OperationMetadata(runtime_dtype="bfloat16")))

  @parameterized.parameters(
      # Two ways to write the same.
      (dict(runtime_dtype=None, runtime_softmax_dtype=None, partition_axis=None), {}),
      (dict(operation_configs=None), dict(operation_configs={})),
      (dict(operation_configs={AttentionMechanism.RING: BlockSizes(1), "cudnn": BlockSizes()}),
       dict(operation_configs=[("cudnn", BlockSizes()), ("ring", BlockSizes(np.int64(1)))])),
      (dict(platform="CUDA", backend=""), dict(platform="gpu")),
      (dict(partition_axis=PartitionAxis(batch_axis=["a", "b"])),
       dict(partition_axis=PartitionAxis(batch_axis=("a", "b")))),
      (dict(softmax_scale=np.float64(0.5), dropout_prob=0), dict(softmax_scale=jnp.float32(0.5))),
      (dict(blocksize_q=np.int32(8), scan_ring_attention=np.True_), dict(blocksize_q=8)),
  )
  def test_equal_however_written(self, one, other):
    self.assertEqual(OperationMetadata(**one), OperationMetadata(**other))
    self.assertEqual(hash(OperationMetadata(**one)), hash(OperationMetadata(**other)))
    self.assertEqual(repr(OperationMetadata(**one)), repr(OperationMetadata(**other)))

  def test_is_immutable(self):
    metadata = OperationMetadata()
    with self.assertRaises(AttributeError):
      metadata.softmax_scale = 1.0
    with self.assertRaises(AttributeError):
      del metadata.mesh

  def test_replace(self):
    metadata = full(create_mesh())
    other = metadata.replace(runtime_dtype="float32", blocksize_q=None)
    self.assertIs(other.runtime_dtype, np.dtype("float32"))
    self.assertEqual(metadata.blocksize_q, 1)
    self.assertEqual(other.replace(runtime_dtype="bfloat16", blocksize_q=1), metadata)
    with self.assertRaisesRegex(ValueError, "dropout_prob=2"):
      metadata.replace(dropout_prob=2)

  def test_copies(self):
    metadata = full(None)
    self.assertEqual(copy.deepcopy(metadata), metadata)
    self.assertEqual(pickle.loads(pickle.dumps(metadata)), metadata)

  def test_is_static_in_jit(self):
    traces = []

    @jax.jit
    def f(metadata, x):
      traces.append(metadata)
      return metadata.replace(blocksize_b=7), x * metadata.dropout_prob

    mesh = create_mesh()
    out, _ = f(full(mesh), 1.0)
    self.assertEqual(out, full(mesh).replace(blocksize_b=7))
    f(full(mesh), 2.0)
    self.assertLen(traces, 1)
    f(full(mesh).replace(dropout_prob=0.2), 2.0)
    self.assertLen(traces, 2)
    self.assertEmpty(jax.tree.leaves(full(mesh)))

  def test_a_base_config_without_hash_is_fine(self):
    metadata = OperationMetadata.from_config(types.SimpleNamespace(attn_dtype="float16"))
    self.assertEqual(hash(metadata), hash(metadata.replace(base_config=None)))
    self.assertNotEqual(metadata, metadata.replace(base_config=None))
    jax.jit(lambda m, x: x)(metadata, 1.0)

  def test_get_operation_config(self):
    metadata = full()
    self.assertEqual(metadata.get_operation_config("ring"), BlockSizes(block_q=64))
    self.assertEqual(metadata.get_operation_config(AttentionMechanism.SPLASH).block_heads, 2)
    self.assertIsNone(metadata.get_operation_config("flash_attn2"))


class FromConfigTest(parameterized.TestCase):

  def test_reads_attributes(self):
    mesh = create_mesh()
    config = Config(mesh=mesh, backend="cpu")
    metadata = OperationMetadata.from_config(config)
    self.assertEqual(metadata, OperationMetadata(
        runtime_dtype="bfloat16", runtime_softmax_dtype="float32", sequence_axis_name="ring",
        mesh=mesh, backend="cpu", partition_axis=PartitionAxis(batch_axis="dp"), base_config=config,
        scan_ring_attention=False, blocksize_q=128, blocksize_k=256, blocksize_b=1,
        operation_configs={"ring": BlockSizes(block_q=64)}))
    self.assertIs(metadata.base_config, config)

  def test_absent_and_none_are_defaults(self):
    for config in (object(), types.SimpleNamespace(**{field: None for field in FIELDS})):
      metadata = OperationMetadata.from_config(config)
      self.assertEqual(metadata.replace(base_config=None), OperationMetadata())

  def test_scale_and_dropout(self):
    config = types.SimpleNamespace(softmax_scale=0.25, dropout_prob=0.5)
    metadata = OperationMetadata.from_config(config)
    self.assertEqual((metadata.softmax_scale, metadata.dropout_prob), (0.25, 0.5))

  @parameterized.parameters(
      ("jax", None), ("triton", "gpu"), ("Triton", "gpu"), ("tpu", "tpu"), ("rocm", "gpu"),
      (enum.Enum("Platform", {"CPU": "cpu"}).CPU, "cpu"))
  def test_platform(self, given, platform):
    metadata = OperationMetadata.from_config(types.SimpleNamespace(platform=given))
    self.assertEqual(metadata.platform, platform)


class GetShardingsTest(parameterized.TestCase):

  def test_fields(self):
    self.assertEqual(AttnShardingRules._fields, (
        "query3d", "query", "key", "value", "bias", "mask", "output", "q_segment_ids",
        "kv_segment_ids", "softmax_aux"))

  @parameterized.product(mode=MODES, layout=ARRAY_LAYOUTS, mni=[False, True], rank=[None, 1, 2])
  def test_table(self, mode, layout, mni, rank):
    def spec(letters):
      if letters is None:
        return None
      for letter, plain, as_query in (("K", "k", "h"), ("E", "e", "d")):
        letters = letters.replace(letter, as_query if mni else plain)
      suffix = "_" if mode in DECODE_MODES else ""
      return P(*[None if name == "-" else name if name.startswith("b") and len(name) > 1
                 else name + suffix for name in letters.split()])

    sinks = None if rank is None else jnp.zeros((4, 2)[:rank])
    metadata = OperationMetadata(partition_axis=DISTINCT)
    expected = {tensor: spec(letters) for tensor, letters in RULES[layout].items()}
    self.assertEqual(metadata.get_shardings(mode, layout, mni, sinks),
                     AttnShardingRules(softmax_aux=spec(SINKS[rank]), **expected))
    self.assertEqual(dropped_axes(metadata, mode, layout, mni), ())

  def test_defaults(self):
    batch = ("fsdp", "dp")
    metadata = OperationMetadata()
    for mode in ("__train__", "__prefill__"):
      rules = metadata.get_shardings(mode)
      self.assertEqual(rules.query, P(batch, "sp", "tp", None))
      self.assertEqual(rules.key, P(batch, "sp", "tp", None))
      self.assertEqual(rules.mask, P(batch, None, "sp", None))
      self.assertIsNone(rules.softmax_aux)
    for mode in DECODE_MODES:
      rules = metadata.get_shardings(mode)
      self.assertEqual(rules.query, P(batch, None, "tp", None))
      self.assertEqual(rules.key, P(batch, "sp", "tp", None))
      self.assertEqual(rules.mask, P(batch, None, None, None))

  @parameterized.product(mode=MODES, layout=("bthd", "bhtd"))
  def test_every_tensor_has_the_same_batch(self, mode, layout):
    for axes in (("fsdp", "dp"), ("dp", "fsdp"), ("dp", "tp", "sp"), None):
      metadata = OperationMetadata(
          partition_axis=PartitionAxis(batch_axis=axes, decode_batch_axis=axes))
      rules = metadata.get_shardings(mode, layout)
      self.assertLen({spec[0] for spec in rules[:-1]}, 1)

  def test_masks_and_tensors_have_the_same_rows(self):
    mesh = create_mesh((2, 2, 1, 1, 2))
    rules = OperationMetadata(mesh=mesh).get_shardings("__train__")
    shapes = dict(query=(4, 2, 1, 1), key=(4, 2, 1, 1), bias=(4, 1, 2, 2), mask=(4, 1, 2, 2),
                  output=(4, 2, 1, 1), q_segment_ids=(4, 2), kv_segment_ids=(4, 2))
    rows = [
        {device: index[0] for device, index in
         NamedSharding(mesh, getattr(rules, name)).devices_indices_map(shape).items()}
        for name, shape in shapes.items()]
    for other in rows[1:]:
      self.assertEqual(other, rows[0])

  def test_none_is_not_inherited_when_decoding(self):
    axes = PartitionAxis(
        query_sequence_axis="sp", attention_dim_axis="ep", decode_head_axis=None,
        decode_kv_head_axis=None)
    rules = OperationMetadata(partition_axis=axes).get_shardings(
        "__autoregressive__", softmax_aux=jnp.zeros((4,)))
    self.assertEqual(rules.query, P(("fsdp", "dp"), None, None, None))
    self.assertEqual(rules.key, P(("fsdp", "dp"), "sp", None, None))
    self.assertEqual(rules.softmax_aux, P(None))

  def test_a_mesh_axis_for_two_dimensions(self):
    metadata = OperationMetadata(partition_axis=PartitionAxis(head_axis="sp"))
    for layout, (batch, length, head, _) in (("bthd", (0, 1, 2, 3)), ("bhtd", (0, 2, 1, 3))):
      rules = metadata.get_shardings("__train__", layout, softmax_aux=jnp.zeros((4, 1)))
      entries = [rules.query[i] for i in (batch, length, head)]
      self.assertEqual(entries, [("fsdp", "dp"), "sp", None])
      self.assertEqual(rules.q_segment_ids, P(("fsdp", "dp"), "sp"))
      self.assertEqual(rules.softmax_aux, P(None, None))
      self.assertEqual(dropped_axes(metadata, "__train__", layout), tuple(
          DroppedAxis(tensor, head, "sp", f"shards dimension {length} of {tensor} already")
          for tensor in ("query", "output")))

  def test_sinks_by_rank_only(self):
    metadata = OperationMetadata()
    for sinks in (jax.ShapeDtypeStruct((3,), jnp.float32), np.zeros(3)):
      self.assertEqual(metadata.get_shardings("__train__", softmax_aux=sinks).softmax_aux, P("tp"))
    jax.jit(lambda x: self.assertEqual(
        metadata.get_shardings("__train__", "thd", softmax_aux=x).softmax_aux, P("tp", None)))(
            jnp.zeros((3, 1)))

  def test_rules_are_static_in_jit(self):
    rules = OperationMetadata().get_shardings("__train__")
    self.assertEqual(jax.jit(lambda r, x: (r, x))(rules, 1.0)[0], rules)
    self.assertEqual(hash(rules), hash(OperationMetadata().get_shardings("__prefill__")))
    self.assertEqual(AttnShardingRules().query, P())


class MeshTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh, self.other, self.third = (
        create_mesh(dims, ("a", "b")) for dims in ((2, 4), (4, 2), (8, 1)))

  def test_order(self):
    config = types.SimpleNamespace(mesh=self.other)
    with jax.set_mesh(self.third):
      metadata = OperationMetadata(mesh=self.mesh, base_config=config)
      self.assertEqual(resolved_mesh(metadata), self.mesh)
      self.assertEqual(resolved_mesh(OperationMetadata(base_config=config)), self.other)
      config.mesh = None
      self.assertEqual(resolved_mesh(OperationMetadata(base_config=config)), self.third)
      self.assertEqual(resolved_mesh(OperationMetadata()), self.third)
    self.assertIsNone(resolved_mesh(OperationMetadata()))

  def test_in_jit(self):
    seen = []

    @jax.jit
    def f(x):
      seen.append(resolved_mesh(OperationMetadata()))
      return x

    f(1.0)
    with jax.set_mesh(self.mesh):
      f(1.0)
    self.assertEqual(seen, [None, self.mesh.abstract_mesh])

  def test_in_shard_map(self):
    seen = []

    def local(x):
      seen.append(resolved_mesh(OperationMetadata()))
      return x

    jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=P("a"), out_specs=P("a")))(np.ones(4))
    self.assertEqual(dict(seen[0].shape), {"a": 2, "b": 4})
    self.assertEqual(seen[0].axis_types, (AxisType.Manual,) * 2)

  def test_abstract_mesh(self):
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      self.assertEqual(resolved_mesh(OperationMetadata()), self.mesh.abstract_mesh)
    metadata = OperationMetadata(mesh=self.other.abstract_mesh)
    self.assertEqual(resolved_mesh(metadata), self.other.abstract_mesh)

  def test_an_empty_mesh_is_none(self):
    with jax.set_mesh(self.mesh):
      self.assertIsNone(resolved_mesh(OperationMetadata(mesh=Mesh(np.empty((), object), ()))))


class PlatformTest(parameterized.TestCase):

  @parameterized.parameters(
      ("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"))
  def test_default_backend(self, backend, platform):
    with mock.patch.object(jax, "default_backend", lambda: backend):
      self.assertEqual(resolved_platform(OperationMetadata()), platform)
      self.assertEqual(resolved_platform(OperationMetadata(platform="tpu")), "tpu")

  def test_order(self):
    mesh = create_mesh()
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
      for fields, platform in (
          (dict(platform="tpu", backend="rocm", mesh=mesh), "tpu"),
          (dict(backend="rocm", mesh=mesh), "gpu"), (dict(mesh=mesh), "cpu"),
          (dict(mesh=mesh.abstract_mesh), "cpu"), ({}, "gpu")):
        self.assertEqual(resolved_platform(OperationMetadata(**fields)), platform)

  def test_default_device(self):
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
      for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
          self.assertEqual(resolved_platform(OperationMetadata()), "cpu")
          self.assertEqual(resolved_platform(OperationMetadata(backend="cuda")), "gpu")

  def test_unknown(self):
    with mock.patch.object(jax, "default_backend", lambda: "abacus"):
      with self.assertRaisesRegex(ValueError, "'abacus': expected one of 'cpu', 'gpu', 'tpu'"):
        resolved_platform(OperationMetadata())


class CapabilityTest(parameterized.TestCase):

  @parameterized.parameters("9.0", "8.6", "gfx942")
  def test_that_of_the_attached_gpu_unless_said_otherwise(self, attached):
    device = types.SimpleNamespace(compute_capability=attached)
    with (mock.patch.object(jax, "default_backend", lambda: "gpu"),
          mock.patch.object(jax, "local_devices", lambda: [device])):
      self.assertEqual(resolved_capability(OperationMetadata()), attached)
      self.assertEqual(resolved_capability(OperationMetadata(compute_capability="10.3")), "10.3")
      self.assertIsNone(resolved_capability(OperationMetadata(mesh=create_mesh())))

  def test_that_of_the_default_device(self):
    first, second = (types.SimpleNamespace(platform="gpu", compute_capability=capability)
                     for capability in ("9.0", "8.0"))
    with mock.patch.object(jax, "local_devices", lambda backend=None: [first]):
      for chosen, capability in ((second, "8.0"), ("gpu", "9.0")):
        with mock.patch.object(jax, "config", mock.Mock(jax_default_device=chosen)):
          self.assertEqual(resolved_capability(OperationMetadata()), capability)

  def test_unknown_without_a_gpu(self):
    self.assertIsNone(resolved_capability(OperationMetadata(platform="gpu")))


class JsonTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("defaults", OperationMetadata), ("full", lambda: full(create_mesh((2, 2, 1, 2, 1)))),
      ("explicit", lambda: full(Mesh(
          np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y"),
          axis_types=(AxisType.Explicit,) * 2))),
      ("from_config", lambda: OperationMetadata.from_config(Config())),
      ("float8", lambda: OperationMetadata(runtime_dtype=jnp.float8_e4m3fn, softmax_scale=1 / 3)),
  )
  def test_round_trip(self, make):
    metadata = make()
    for back in (OperationMetadata.from_json(metadata.to_json()),
                 OperationMetadata.from_json(metadata.to_json(indent=2)),
                 OperationMetadata.from_json(json.dumps(metadata.to_dict(), sort_keys=True)),
                 OperationMetadata.from_dict(metadata.to_dict())):
      self.assertEqual(back, metadata)
      self.assertEqual(hash(back), hash(metadata))
      self.assertEqual(repr(back), repr(metadata))
      self.assertIs(type(back.base_config), type(metadata.base_config))
      if metadata.mesh is not None:
        self.assertEqual(list(back.mesh.devices.flat), list(metadata.mesh.devices.flat))
        self.assertEqual(back.mesh.axis_types, metadata.mesh.axis_types)

  def test_classes_have_public_addresses(self):
    config = AttnConfig(operation_configs=(("ring", BlockSizes(64)),))
    data = OperationMetadata.from_config(config).to_dict()["base_config"]
    self.assertEqual(data["named_tuple"], "attn_core.config:AttnConfig")
    self.assertEqual(data["fields"]["partition_axis"]["named_tuple"], "attn_core:PartitionAxis")
    self.assertEqual(data["fields"]["rope"]["named_tuple"], "attn_core:Rope")
    for method in (EasyMethod.TRAIN, AttentionMechanism.RING):
      written = OperationMetadata(base_config=method).to_dict()["base_config"]["enum"]
      self.assertIn(written, ("attn_core.config:EasyMethod", "attn_core:AttentionMechanism"))

  @parameterized.parameters(
      ("attn_core.config:AttnConfig", "attn_core.rope:Rope"),
      ("attn_core.config.config:AttnConfig", "attn_core.rope_frequencies:Rope"),
      ("attn_core:AttnConfig", "attn_core.rope.frequencies:Rope"))
  def test_reads_addresses_of_modules_that_have_moved(self, config, rope):
    metadata = OperationMetadata.from_config(AttnConfig(blocksize_q=64))
    text = metadata.to_json()
    text = text.replace("attn_core.config:AttnConfig", config).replace("attn_core:Rope", rope)
    self.assertIn(f'"{config}"', text)
    self.assertIn(f'"{rope}"', text)
    self.assertEqual(OperationMetadata.from_json(text), metadata)

  def test_is_plain(self):
    data = full(create_mesh((2, 2, 1, 2, 1))).to_dict()
    self.assertEqual(tuple(data), FIELDS)
    self.assertEqual(json.loads(json.dumps(data)), data)
    self.assertEqual(data["runtime_dtype"], "bfloat16")
    self.assertEqual(data["partition_axis"]["head_axis"], ["tp", "ep"])
    self.assertEqual(data["operation_configs"]["ring"]["block_q"], 64)

  def test_from_dict_of_some_fields_and_of_live_values(self):
    mesh = create_mesh()
    self.assertEqual(
        OperationMetadata.from_dict(dict(
            runtime_dtype=jnp.bfloat16, mesh=mesh, partition_axis={"head_axis": ["a", "b"]},
            operation_configs={"ring": {"block_q": 8}, "vanilla": BlockSizes(2)})),
        OperationMetadata(
            "bfloat16", mesh=mesh, partition_axis=PartitionAxis(head_axis=("a", "b")),
            operation_configs={"ring": BlockSizes(8), "vanilla": BlockSizes(2)}))
    self.assertEqual(OperationMetadata.from_dict({}), OperationMetadata())


def json_of(**entries):
  return lambda: OperationMetadata.from_dict(entries)


def made(**fields):
  return lambda: OperationMetadata(**fields)


def shardings(*args):
  return lambda: OperationMetadata().get_shardings(*args)


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (made(runtime_dtype="int8"), "runtime_dtype='int8': expected a floating dtype, such as"),
      (made(runtime_dtype="number"), "runtime_dtype='number': expected a floating dtype"),
      (made(runtime_softmax_dtype=jnp.complex64), "runtime_softmax_dtype=.*complex64.*: expected"),
      (made(runtime_softmax_dtype=">f4"), "runtime_softmax_dtype='>f4': expected a floating dtype"),
      (made(sequence_axis_name=""), "sequence_axis_name='': expected the name of a mesh axis"),
      (made(sequence_axis_name=("a", "b")), "sequence_axis_name=.*: expected the name of a mesh"),
      (made(mesh=(1, 8)), r"mesh=\(1, 8\): expected a jax.sharding.Mesh, as create_mesh gives"),
      (made(platform="metal"), "platform='metal': expected None or one of 'cpu', 'gpu', 'cuda'"),
      (made(platform=3), "platform=3: expected None or one of"),
      (made(compute_capability=9.0), r"compute_capability=9.0: expected a string such as '9\.0'"),
      (made(compute_capability="sm_90"), "compute_capability='sm_90': expected a string such as"),
      (made(backend="abacus"), "backend='abacus': expected None or one of"),
      (made(partition_axis="tp"), "partition_axis='tp': expected a PartitionAxis, or None"),
      (made(partition_axis=PartitionAxis(vocab_axis=1)), r"partition_axis\.vocab_axis=1: expected"),
      (made(scan_ring_attention=1), "scan_ring_attention=1: expected True or False"),
      (made(softmax_scale=float("inf")), "softmax_scale=inf: expected None or a finite number"),
      (made(softmax_scale="0.5"), "softmax_scale='0.5': expected None or a finite number"),
      (made(softmax_scale=np.ones(2)), "softmax_scale=array.*: expected None or a finite number"),
      (made(dropout_prob=1.0), r"dropout_prob=1.0: expected a number in \[0, 1\)"),
      (made(dropout_prob=-0.1), r"dropout_prob=-0.1: expected a number in \[0, 1\)"),
      (made(dropout_prob=None), r"dropout_prob=None: expected a number in \[0, 1\)"),
      (made(dropout_prob=float("nan")), r"dropout_prob=nan: expected a number in \[0, 1\)"),
      (made(blocksize_q=0), "blocksize_q=0: expected an integer of at least 1, or None"),
      (made(blocksize_k=1.5), "blocksize_k=1.5: expected an integer of at least 1"),
      (made(blocksize_b=True), "blocksize_b=True: expected an integer of at least 1"),
      (made(operation_configs={"flash": BlockSizes()}),
       "operation_configs key='flash': expected a mechanism, one of 'auto', 'vanilla'"),
      (made(operation_configs={"ring": 128}), r"operation_configs\['ring'\]=128: expected a Block"),
      (made(operation_configs={"ring": BlockSizes(block_kv=0)}),
       r"operation_configs\['ring'\]\.block_kv=0: expected an integer of at least 1"),
      (made(operation_configs=(("ring", BlockSizes()), ("ring", BlockSizes(1)))),
       "operation_configs=.*: expected every mechanism once"),
      (made(operation_configs=7), "operation_configs=7: expected a mapping from mechanisms"),
      (lambda: OperationMetadata.from_config(None), "config=None: expected an object with"),
      (lambda: OperationMetadata.from_config(types.SimpleNamespace(platform="pallas")),
       "platform='pallas': expected"),
      (lambda: OperationMetadata().get_operation_config("flash"),
       "impl_name='flash': expected a mechanism, one of 'auto'"),
      (shardings("train"), "mode='train': expected one of '__train__', '__prefill__'"),
      (shardings("__train__", "tbhd"), "layout='tbhd': expected one of 'bthd', 'bhtd', 'thd'"),
      (shardings("__train__", "bthd", False, np.ones((1, 2, 3))),
       r"softmax_aux of shape=\(1, 2, 3\): expected \[H\] or \[H, num_sinks\]"),
      (shardings("__train__", "bthd", False, 1.0), r"softmax_aux of shape=\(\): expected \[H\]"),
      (json_of(runtime="float32"), r"data=\['runtime'\]: expected a mapping with keys among run"),
      (lambda: OperationMetadata.from_dict([]), "data='list': expected a mapping"),
      (lambda: OperationMetadata.from_json("{"), "json_str='{': expected text written by to_json"),
      (lambda: OperationMetadata.from_json("3"), "data='int': expected a mapping"),
      (lambda: OperationMetadata.from_json(3), "json_str=3: expected text written by to_json"),
      (lambda: OperationMetadata.from_json({}), "json_str={}: expected text.*from_dict takes"),
      (lambda: OperationMetadata.from_json(b"\xff"), "json_str=b.*: expected text written by"),
      (lambda: OperationMetadata.from_dict({3: 1, "a": 2}), r"data=\['a', 3\]: expected a mapping"),
      (json_of(mesh={"axis_names": ["a"]}), "mesh=.*: expected a dict of axis_names, axis_sizes"),
      (json_of(partition_axis={"heads": "a"}), r"partition_axis has the fields \['heads'\]: exp"),
      (json_of(ring={"kind": "zigzag"}), r"ring has the fields \['kind'\]: expected fields among"),
      (json_of(operation_configs={"ring": {"q": 1}}),
       r"operation_configs\['ring'\] has the fields \['q'\]: expected fields among block_q"),
      (json_of(base_config={"named_tuple": "no.such:Thing", "fields": {}}),
       "base_config is of class 'no.such:Thing': expected .* import that module first"),
      (json_of(base_config={"enum": "subprocess:Popen", "value": "true"}),
       "base_config is of class 'subprocess:Popen': expected a NamedTuple or Enum"),
      (json_of(base_config={"enum": "attn_core.config:attention", "value": "true"}),
       "base_config is of class 'attn_core.config:attention': expected a NamedTuple or Enum"),
      (json_of(base_config={"enum": "attn_core.config:EasyMethod", "value": "dream"}),
       "base_config has 'dream': expected the value of a member of EasyMethod, one of .'train'"),
      (json_of(base_config={"named_tuple": "builtins:tuple", "fields": {}}),
       "base_config is of class 'builtins:tuple': expected a NamedTuple"),
      (json_of(base_config={"x": 1}), r"base_config has a dict of \['x'\]: expected what to_dict"),
      (json_of(base_config={"tuple": 3}), "base_config={'tuple': 3}: expected what to_dict"),
      (json_of(base_config={"dtype": "number"}), "base_config={'dtype': 'number'}: expected"),
      (lambda: OperationMetadata(base_config=object()).to_json(),
       r"base_config=<object.*: expected None or a NamedTuple .* metadata\.replace\(base_config="),
      (lambda: OperationMetadata(base_config=Config(names=({1, 2},))).to_json(),
       r"base_config\.names\[0\]={1, 2}: expected"),
      (lambda: OperationMetadata(mesh=create_mesh().abstract_mesh).to_dict(), "without devices"),
  )
  def test_bad_call(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  def test_unknown_fields(self):
    for call in (OperationMetadata, OperationMetadata().replace):
      with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'softmax'"):
        call(softmax=1.0)

  def test_classes_inside_functions_cannot_be_found_again(self):
    class Local(NamedTuple):
      x: int = 1

    with self.assertRaisesRegex(ValueError, "base_config is of class .*Local: expected a class"):
      OperationMetadata(base_config=Local()).to_json()


if __name__ == "__main__":
  absltest.main()
