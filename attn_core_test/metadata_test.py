# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""OperationMetadata: fields, values, equality, from_config, and refused values."""

import copy
import dataclasses
import enum
import itertools
import pickle
import types
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core.config.metadata import OperationMetadata
from attn_core.sharding.mesh import create_mesh
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import (RING_TRANSFERS, RING_VARIANTS, AttentionMechanism, BlockSizes,
                             RingConfig)
from attn_core_test.metadata_cases import FIELDS, Config, full

jax.config.update("jax_num_cpu_devices", 8)


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
  def test_dtypes_are_normalized(self, **fields):
    metadata = OperationMetadata(**fields)
    self.assertIs(metadata.runtime_dtype, np.dtype(jnp.bfloat16))
    self.assertEqual(hash(metadata), hash(OperationMetadata(runtime_dtype="bfloat16")))

  @parameterized.parameters(
      # Two ways to write the same metadata.
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

  def test_variants_of_a_ring_that_send_by_remote_copies(self):
    accepted = set()
    for variant, transfer in itertools.product(RING_VARIANTS, RING_TRANSFERS):
      try:
        OperationMetadata(ring=RingConfig(
            variant, transfer=transfer, heads_axis_name="x" if variant == "hybrid" else None))
        accepted.add((variant, transfer))
      except ValueError as error:
        self.assertIn("ring.transfer='remote'", str(error))
    self.assertEqual(accepted, {*((variant, "collective") for variant in RING_VARIANTS),
                                ("ring", "remote"), ("hybrid", "remote")})

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
      (json_of(base_config={"enum": 3, "value": 3}), "base_config={'enum': 3,.*: expected what"),
      (lambda: OperationMetadata(base_config=object()).to_json(),
       r"base_config=<object.*: expected None or a NamedTuple .* metadata\.replace\(base_config="),
      (lambda: OperationMetadata(base_config=np.dtype(">f4")).to_json(), "base_config=dtype.*exp"),
      (lambda: OperationMetadata(base_config=np.dtype([("a", "f4")])).to_json(), "base_config=dty"),
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

  def test_classes_inside_functions_cannot_be_written(self):
    class Local(NamedTuple):
      x: int = 1

    with self.assertRaisesRegex(ValueError, "base_config is of class .*Local: expected a class"):
      OperationMetadata(base_config=Local()).to_json()


if __name__ == "__main__":
  absltest.main()
