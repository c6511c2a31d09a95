# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""OperationMetadata as JSON and back."""

import json

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import AxisType, Mesh
import jax.numpy as jnp
import numpy as np

from attn_core.config.metadata import OperationMetadata
from attn_core.sharding.mesh import create_mesh
from attn_core.sharding.partition import PartitionAxis
from attn_core import AttnConfig, EasyMethod
from attn_core.types import AttentionMechanism, BlockSizes
from attn_core_test.metadata_cases import FIELDS, Config, full

jax.config.update("jax_num_cpu_devices", 8)


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
  def test_reads_addresses_of_moved_modules(self, config, rope):
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


if __name__ == "__main__":
  absltest.main()
