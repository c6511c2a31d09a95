# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh axes of dimensions, by their meaning: modes, shapes, meshes, reports of what is dropped."""

import itertools
import types

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata
from attn_core.mechanisms.context_parallel import ulysses
from attn_core.sharding import partition, partitioned, placement, varying_axes
from attn_core.sharding.mesh import create_mesh
from attn_core.sharding.partition import DroppedAxis, PartitionAxis, fit, resolve
from attn_core.types import DECODE_MODES, MODES

jax.config.update("jax_num_cpu_devices", 8)

QUERY = (partition.BATCH, partition.QUERY_LENGTH, partition.HEAD, partition.HEAD_DIM)
KEY = (partition.BATCH, partition.KV_LENGTH, partition.KV_HEAD, partition.KV_HEAD_DIM)
BATCH_AXES = ("fsdp", "dp")

# Every meaning's spec with the default PartitionAxis: (training and prefill, decoding).
DEFAULTS = {
    partition.BATCH: (BATCH_AXES, BATCH_AXES),
    partition.QUERY_LENGTH: ("sp", None),
    partition.KV_LENGTH: ("sp", "sp"),
    partition.LENGTH: ("sp", "sp"),
    partition.BIAS_KV_SEQ: (None, None),
    partition.HEAD: ("tp", "tp"),
    partition.KV_HEAD: ("tp", "tp"),
    partition.BIAS_HEAD_SEQ: (None, None),
    partition.HEAD_DIM: (None, None),
    partition.KV_HEAD_DIM: (None, None),
    partition.HIDDEN_STATE: ("tp", "tp"),
    partition.MLP_INTERMEDIATE: ("tp", "tp"),
    partition.VOCAB: ("tp", "tp"),
    partition.EXPERT: ("ep", "ep"),
    partition.EXPERT_GATE: (None, None),
    partition.DATA_PARALLEL: ("dp", "dp"),
    partition.FULLY_SHARDED_DATA_PARALLEL: ("fsdp", "fsdp"),
    partition.TENSOR_PARALLEL: ("tp", "tp"),
    partition.SEQUENCE_PARALLEL: ("sp", "sp"),
    partition.EXPERT_PARALLEL: ("ep", "ep"),
}


class PartitionAxisTest(parameterized.TestCase):

  def test_defaults(self):
    axes = PartitionAxis()
    self.assertLen(axes, 27)
    self.assertEqual(axes._fields[0], "data_parallel_axis")
    self.assertEqual(axes._fields[-1], "decode_attention_kv_dim_axis")
    self.assertEqual(axes.batch_axis, ("fsdp", "dp"))
    self.assertIsNone(axes.decode_query_sequence_axis)

  def test_every_field_has_a_meaning(self):
    fields = {field for pair in partition.SEMANTIC_AXES.values() for field in pair}
    self.assertCountEqual(fields, PartitionAxis._fields)

  def test_is_static_in_jit(self):
    traces = []

    @jax.jit
    def f(axes, x):
      traces.append(axes)
      return axes, x

    self.assertEqual(f(PartitionAxis(), 1.0)[0], PartitionAxis())
    f(PartitionAxis(), 2.0)
    self.assertLen(traces, 1)
    f(PartitionAxis(head_axis=None), 2.0)
    self.assertLen(traces, 2)


class ResolveTest(parameterized.TestCase):

  @parameterized.product(axis=list(partition.SEMANTIC_AXES), mode=MODES)
  def test_defaults(self, axis, mode):
    spec, drops = resolve(PartitionAxis(), (axis,), mode)
    self.assertEqual(spec, P(DEFAULTS[axis][mode in DECODE_MODES]))
    self.assertEqual(drops, ())

  def test_defaults_cover_every_meaning(self):
    self.assertCountEqual(DEFAULTS, partition.SEMANTIC_AXES)

  @parameterized.parameters("__train__", "__prefill__")
  def test_query_of_training_and_prefill(self, mode):
    spec = resolve(PartitionAxis(), QUERY, mode).spec
    self.assertEqual(spec, P(("fsdp", "dp"), "sp", "tp", None))

  @parameterized.parameters(*DECODE_MODES)
  def test_none_does_not_inherit_when_decoding(self, mode):
    decode = {field: None for field in PartitionAxis._fields if field.startswith("decode_")}
    axes = PartitionAxis(attention_dim_axis="ep", attention_kv_dim_axis="ep", **decode)
    for tensor in (QUERY, KEY):
      self.assertEqual(resolve(axes, tensor, mode).spec, P(None, None, None, None))
    self.assertEqual(resolve(PartitionAxis(query_sequence_axis="sp"), QUERY, mode).spec[1], None)

  @parameterized.parameters("__train__", "__prefill__")
  def test_decode_fields_are_not_read_otherwise(self, mode):
    axes = PartitionAxis(decode_batch_axis="ep", decode_head_axis="ep")
    self.assertEqual(resolve(axes, QUERY, mode), resolve(PartitionAxis(), QUERY, mode))

  def test_none_is_not_sharded_and_tuples_of_one_are_names(self):
    axes = PartitionAxis(batch_axis=("dp",), head_axis=())
    spec = resolve(axes, (partition.BATCH, None, partition.HEAD), "__train__").spec
    self.assertEqual(tuple(spec), ("dp", None, None))

  @parameterized.parameters(
      # A dimension's size, its spec, and the dropped axes, on a mesh of dp=2, fsdp=2, tp=2.
      (8, ("fsdp", "dp"), ()),
      (4, ("fsdp", "dp"), ()),
      (6, "fsdp", ("dp",)),
      (2, "fsdp", ("dp",)),
      (3, None, ("dp", "fsdp")),
      (1, None, ("dp", "fsdp")),
  )
  def test_drops_from_the_right_until_the_size_divides(self, size, entry, dropped):
    mesh = create_mesh((2, 2, 1, 2, 1))
    spec, drops = resolve(
        PartitionAxis(), (None, partition.BATCH), "__train__", (5, size), mesh, "query")
    self.assertEqual(spec, P(None, entry))
    self.assertEqual(tuple(drop.axis for drop in drops), dropped)
    for drop in drops:
      self.assertEqual((drop.tensor, drop.dimension), ("query", 1))
      self.assertRegex(drop.reason, rf"fsdp=2.* does not divide the dimension's size {size}")

  def test_a_name_the_mesh_lacks_is_dropped_alone(self):
    mesh = create_mesh((2, 4), ("dp", "tp"))
    spec, drops = resolve(PartitionAxis(), QUERY, "__train__", (2, 8, 4, 16), mesh, "query")
    self.assertEqual(spec, P("dp", None, "tp", None))
    reason = "the mesh has the axes ('dp', 'tp') only"
    self.assertEqual(drops, (DroppedAxis("query", 0, "fsdp", reason),
                             DroppedAxis("query", 1, "sp", reason)))

  def test_without_a_shape_only_names_are_looked_at(self):
    mesh = create_mesh((2, 4), ("dp", "tp"))
    self.assertEqual(resolve(PartitionAxis(), QUERY, "__train__", None, mesh).spec,
                     P("dp", None, "tp", None))

  def test_abstract_mesh(self):
    mesh = create_mesh((2, 2, 1, 2, 1))
    for shape in ((4, 8, 2, 16), (3, 8, 2, 16)):
      self.assertEqual(
          resolve(PartitionAxis(), QUERY, "__train__", shape, mesh),
          resolve(PartitionAxis(), QUERY, "__train__", shape, mesh.abstract_mesh))

  def test_axes_that_the_caller_maps_are_dropped(self):
    mesh = create_mesh((2, 4), ("dp", "tp"))
    seen = []

    def local(x):
      seen.append(fit(P("dp", "tp"), x.shape, jax.sharding.get_abstract_mesh(), "x"))
      return x

    jax.jit(jax.shard_map(
        local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}))(np.ones((4, 4)))
    self.assertEqual(seen[0].spec, P(None, "tp"))
    self.assertEqual([(d.dimension, d.axis) for d in seen[0].drops], [(0, "dp")])
    self.assertIn("Manual", seen[0].drops[0].reason)

  def test_a_repeated_name_stays_once(self):
    axes = PartitionAxis(batch_axis=("dp", "sp", "dp"), attention_dim_axis="tp")
    spec, drops = resolve(axes, QUERY, "__train__", tensor="query")
    self.assertEqual(spec, P(("dp", "sp"), None, "tp", None))
    self.assertEqual(drops, (
        DroppedAxis("query", 0, "dp", "shards dimension 0 of query already"),
        DroppedAxis("query", 1, "sp", "shards dimension 0 of query already"),
        DroppedAxis("query", 3, "tp", "shards dimension 2 of query already")))

  def test_a_repeated_name_stays_with_the_same_meaning_in_every_layout(self):
    axes = PartitionAxis(head_axis="sp")
    bthd = resolve(axes, QUERY, "__train__")
    bhtd = resolve(axes, [QUERY[i] for i in (0, 2, 1, 3)], "__train__")
    self.assertEqual(bthd.spec, P(("fsdp", "dp"), "sp", None, None))
    self.assertEqual(bhtd.spec, P(("fsdp", "dp"), None, "sp", None))
    self.assertEqual([drop.dimension for drop in bthd.drops + bhtd.drops], [2, 1])

  @parameterized.parameters(1, 3, 4, 8)
  def test_specs_place_arrays(self, size):
    mesh = create_mesh((2, 2, 1, 2, 1))
    x = np.arange(size * 6 * size).reshape(size, 6, size)
    axes = (partition.BATCH, partition.QUERY_LENGTH, partition.HEAD)
    spec = resolve(PartitionAxis(), axes, "__train__", x.shape, mesh).spec
    np.testing.assert_array_equal(jax.device_put(x, NamedSharding(mesh, spec)), x)


class FitTest(parameterized.TestCase):

  def test_fills_up_missing_entries(self):
    mesh = create_mesh((2, 4), ("dp", "tp"))
    spec, drops = fit(P("dp"), (4, 4, 4), mesh)
    self.assertEqual(tuple(spec), ("dp", None, None))
    self.assertEqual(drops, ())

  def test_counts_sizes_of_one_dimension_together(self):
    mesh = create_mesh((2, 4), ("dp", "tp"))
    self.assertEqual(fit(P(("dp", "tp")), (8,), mesh).spec, P(("dp", "tp")))
    self.assertEqual(fit(P(("dp", "tp")), (4,), mesh).spec, P("dp"))
    self.assertEqual(fit(P(("tp", "dp")), (4,), mesh).spec, P("tp"))

  def test_the_first_dimension_keeps_a_repeated_name(self):
    spec, drops = fit(P("dp", ("tp", "dp")), None, None)
    self.assertEqual(spec, P("dp", "tp"))
    self.assertEqual([(drop.dimension, drop.axis) for drop in drops], [(1, "dp")])
    mesh = create_mesh((2, 4), ("dp", "tp"))
    spec, drops = fit(P("dp", ("tp", "dp")), (4, 3), mesh)
    self.assertEqual(spec, P("dp", None))
    self.assertEqual([(drop.dimension, drop.axis) for drop in drops], [(1, "dp"), (1, "tp")])


class PlacementTest(parameterized.TestCase):

  def test_devices_that_exchange_heads_get_the_key_heads_of_their_query_heads(self):
    """Each query head finds its key head, and no more are sent than evenly divided runs need."""
    for group, each, key_heads in itertools.product((2, 3, 4, 8), range(1, 7), range(1, 13)):
      heads = group * each
      if heads % key_heads:
        continue
      needed = ulysses.key_heads_needed(heads, key_heads, group)
      own = np.arange(heads) // (heads // key_heads)
      found = needed.repeat(heads // len(needed))
      np.testing.assert_array_equal(found, own, f"{heads} over {key_heads} on {group}")
      self.assertEqual(len(needed) % group, 0)
      fewer = [n for n in range(group, len(needed), group) if heads % n == 0
               and (own.reshape(n, -1) == own.reshape(n, -1)[:, :1]).all()]
      self.assertEmpty(fewer)

  @parameterized.product(heads=(4, 8, 12), key_heads=(1, 2, 4), x=(1, 2, 4))
  def test_key_heads_are_sharded_as_the_query_heads_or_replicated(self, heads, key_heads, x):
    """Sharded otherwise, a device would not have the key heads of its query heads."""
    mesh = create_mesh((8 // 2 // x, 2, x), ("dp", "tp", "x"))
    axis = PartitionAxis(head_axis=("tp", "x"), kv_head_axis=("tp", "x"))
    rules = OperationMetadata(partition_axis=axis).get_shardings("__train__")
    shapes = (4, 6, heads, 8), (4, 6, key_heads, 8)
    placed = placement.place(rules, mesh, *shapes)
    devices = placed.size(placed.heads)
    self.assertEqual(devices, max(n for n in (1, 2, 2 * x) if heads % n == 0))
    self.assertEqual(placed.key_heads, placed.heads if key_heads % devices == 0 else ())
    query, key = placement.local_shapes(placed, *shapes)
    self.assertEqual(query, (4 // placed.size(placed.batch), 6, heads // devices, 8))
    group = heads // key_heads
    for first in range(0, heads, query[2]):
      needed = {head // group for head in range(first, first + query[2])}
      self.assertGreaterEqual(key[2], len(needed))

  def test_keys_of_a_device_that_decodes(self):
    mesh = create_mesh((2, 1, 4), ("dp", "tp", "sp"))
    rules, query, key = OperationMetadata().get_shardings("__autoregressive__"), (4, 1, 8, 16), (
        4, 24, 2, 16)
    for shard_keys, keys in ((True, 6), (False, 24)):
      placed = placement.place(rules, mesh, query, key, shard_keys=shard_keys)
      self.assertEqual(placement.local_shapes(placed, query, key),
                       ((2, 1, 8, 16), (2, keys, 2, 16)))

  def test_axes_of_the_sequence_shard_neither_rows_nor_heads(self):
    mesh = create_mesh((2, 2, 2), ("dp", "tp", "sp"))
    axis = PartitionAxis(batch_axis=("dp", "sp"), head_axis=("sp", "tp"), kv_head_axis=("sp", "tp"))
    rules = OperationMetadata(partition_axis=axis).get_shardings("__train__")
    shapes = (4, 6, 8, 8), (4, 6, 8, 8)
    whole, kept = (placement.place(rules, mesh, *shapes, reserved) for reserved in ((), ("sp",)))
    self.assertEqual(whole.batch, ("dp", "sp"))
    self.assertEqual((kept.batch, kept.heads, kept.key_heads), (("dp",), ("tp",), ("tp",)))
    self.assertEqual(kept.drops, ())

  def test_axes_that_the_caller_has_split_over_shard_nothing(self):
    """One device for each part of them needs no placement."""
    mesh, found = create_mesh((2, 4), ("dp", "tp")), []
    rules = OperationMetadata().get_shardings("__train__")
    def inner(x):
      found.append(placement.place(rules, mesh, x.shape, x.shape))
      return x
    x = jax.ShapeDtypeStruct((4, 6, 8, 8), np.float32)
    for axes in ({"dp", "tp"}, {"dp"}):
      jax.eval_shape(jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes,
                                   check_vma=False), x)
    self.assertIsNone(found[0])
    self.assertEqual((found[1].batch, found[1].heads), ((), ("tp",)))


class ChosenAxesTest(absltest.TestCase):

  def test_axes_of_a_dimension_in_any_order(self):
    mesh = create_mesh((2, 2, 2), ("a", "b", "c"))
    for count in range(4):
      for axes in itertools.permutations("abc", count):
        for spec in (P(axes), P(None, axes)):
          sharding = NamedSharding(mesh, spec)
          slices = sharding.devices_indices_map((8, 16))
          numbered = {i: slices[device] for i, device in enumerate(mesh.devices.flat)}
          found = partitioned.axes_of(types.SimpleNamespace(
              shape=(8, 16), sharding=types.SimpleNamespace(
                  shard_shape=sharding.shard_shape, devices_indices_map=lambda _: numbered)),
              mesh.abstract_mesh)
          self.assertEqual(found, [partition.axis_names(entry, "x")
                                   for entry in (*spec, None)[:2]], spec)


class VaryingAxesTest(absltest.TestCase):

  def test_an_array_varies_over_the_axes_of_all(self):
    """Whichever of them varies, in whichever order."""
    mesh, found = create_mesh((2, 4), ("dp", "tp")), {}
    def inner(x, y, z):
      axes = lambda *arrays: [set(jax.typeof(x).manual_axis_type.varying) for x in arrays]
      for names, arrays in (("xyz", (x, y, z)), ("zyx", (z, y, x)), ("zx", (z, x)), ("z", (z,))):
        found[names] = axes(*varying_axes.unify(arrays)), varying_axes.of(arrays)
      found["over"] = axes(*varying_axes.over((z, x), ("tp",)), *varying_axes.over((z,), ("tp",)))
      found["carry"] = axes(varying_axes.initial_carry((z, y), z))
      return x
    one = jax.ShapeDtypeStruct((8,), np.float32)
    jax.eval_shape(jax.shard_map(inner, mesh=mesh, in_specs=(P("dp"), P("tp"), P()),
                                 out_specs=P("dp")), one, one, one)
    both = {"dp", "tp"}
    self.assertEqual(found, {
        "xyz": ([both] * 3, both), "zyx": ([both] * 3, both), "zx": ([{"dp"}] * 2, {"dp"}),
        "z": ([set()], set()), "over": [both, both, set()], "carry": [{"tp"}]})


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("meaning", lambda: resolve(PartitionAxis(), ("batch", "time"), "__train__"),
       r"axes=\('batch', 'time'\) of tensor: 'time' is not a meaning; .*'batch', 'query_length'"),
      ("meanings", lambda: resolve(PartitionAxis(), "batch", "__train__"),
       r"axes='batch' of tensor: expected a tuple of meanings"),
      ("no meanings", lambda: resolve(PartitionAxis(), None, "__train__"), r"axes=None of tensor"),
      ("list as meaning", lambda: resolve(PartitionAxis(), (["batch"],), "__train__"),
       r"\['batch'\] is not a meaning"),
      ("axis", lambda: resolve(None, QUERY, "__train__"),
       r"partition_axis=None: expected a PartitionAxis"),
      ("mesh", lambda: resolve(PartitionAxis(), QUERY, "__train__", mesh="8"),
       r"mesh='8': expected a jax.sharding.Mesh"),
      ("mode", lambda: resolve(PartitionAxis(), QUERY, "train"),
       r"mode='train': expected one of '__train__', '__prefill__', '__autoregressive__'"),
      ("field", lambda: resolve(PartitionAxis(head_axis=3), QUERY, "__train__"),
       r"partition_axis\.head_axis=3: expected the name of a mesh axis"),
      ("name in field", lambda: resolve(PartitionAxis(batch_axis=("dp", None)), QUERY, "__train__"),
       r"partition_axis\.batch_axis=\('dp', None\): expected"),
      ("empty name", lambda: resolve(PartitionAxis(batch_axis=""), QUERY, "__train__"),
       r"partition_axis\.batch_axis='': expected"),
      ("rank", lambda: resolve(PartitionAxis(), QUERY, "__train__", (2, 3), tensor="key"),
       r"key has shape \(2, 3\) and 4 named dimensions"),
      ("spec", lambda: fit(P(P.UNCONSTRAINED), (2,), None, "bias"),
       r"the spec of bias=.*: expected the name of a mesh axis"),
  )
  def test_bad_call(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  def test_shapes_of_lower_rank_than_axes_and_of_higher(self):
    for shape in ((2, 3, 4), (2, 3, 4, 5, 6)):
      with self.assertRaisesRegex(ValueError, "4 named dimensions"):
        resolve(PartitionAxis(), QUERY, "__train__", shape)


if __name__ == "__main__":
  absltest.main()
