# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""OperationMetadata.get_shardings: the sharding rules of every tensor."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from attn_core.config.metadata import AttnShardingRules, OperationMetadata, dropped_axes
from attn_core.sharding.mesh import create_mesh
from attn_core.sharding.partition import DroppedAxis, PartitionAxis
from attn_core.types import DECODE_MODES, ARRAY_LAYOUTS, MODES

jax.config.update("jax_num_cpu_devices", 8)

# A different mesh axis for every field, so that the specs tell which one was read.
DISTINCT = PartitionAxis(
    batch_axis="b", query_sequence_axis="t", key_sequence_axis="s", head_axis="h", kv_head_axis="k",
    attention_dim_axis="d", attention_kv_dim_axis="e", bias_head_sequence_axis="bh",
    bias_key_sequence_axis="bs", decode_batch_axis="b_", decode_query_sequence_axis="t_",
    decode_key_sequence_axis="s_", decode_head_axis="h_", decode_kv_head_axis="k_",
    decode_attention_dim_axis="d_", decode_attention_kv_dim_axis="e_")

# Rules in the letters of DISTINCT. K and E stand for k and e, or h and d with qkv_mni_sharding;
# - stands for None.
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


if __name__ == "__main__":
  absltest.main()
