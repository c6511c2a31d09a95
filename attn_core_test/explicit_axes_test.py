# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings follow the arrays: Explicit axes, and Auto axes of any name, on 8 virtual devices.

On Explicit axes the output has the type of the query. On Auto axes the compiled program has no
collective where that of `jax.nn.dot_product_attention` has none.
"""

import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, PartitionAxis, attention, create_mesh, explain,
                       masks)

jax.config.update("jax_num_cpu_devices", 8)

B, T, H, K, D = 8, 16, 8, 2, 8
NAMES = ("dp", "fsdp", "tp")
MECHANISMS = ("vanilla", "sdpa", "blockwise", "flash_attn2", "blocksparse", "ring",
              "autoregressive_decodeattn", "auto")
SPECS = {
    "batch_and_heads": P(("dp", "fsdp"), None, "tp"), "one_of_two": P("dp", None, "tp"),
    "batch": P("dp"), "other_order": P(("fsdp", "dp")), "heads": P(None, None, "tp"), "none": P(),
    "batch_over_all": P(("tp", "dp", "fsdp")), "length": P("dp", "fsdp", "tp"),
    "width": P("dp", None, "fsdp", "tp"), "all_dimensions": P("dp", "fsdp", None, "tp")}


def mesh_of(names=NAMES, kind=AxisType.Explicit, sizes=None):
  sizes = sizes or (2,) * len(names)
  kinds = (kind,) * len(names) if isinstance(kind, AxisType) else kind
  return jax.make_mesh(sizes, names, axis_types=kinds)


def numbers(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(key_heads=H, heads=H, batch=B):
  return tuple(numbers(batch, T, h, D, seed=i) for i, h in enumerate((heads, key_heads, key_heads)))


def put(mesh, arrays, specs):
  return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


def spec_of(x):
  return jax.typeof(x).sharding.spec


def normal(x):
  """Returns the spec of a type with an entry for each dimension, as tuples."""
  entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec_of(x)]
  return entries + [()] * (x.ndim - len(entries))


def outputs(*arrays, **arguments):
  return [x for x in attention(*arrays, **arguments)[:3] if x is not None]


def with_gradients(function):
  """Returns a jitted function that returns its outputs and the gradients of all its arguments."""
  def loss(*arrays):
    found = function(*arrays)
    return sum(jnp.sin(x).sum() for x in found), found
  def run(*arrays):
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    (_, found), gradients = jax.value_and_grad(loss, floats, has_aux=True)(*arrays)
    return found, gradients
  return jax.jit(run)


def close(got, want):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5 * max(1, np.abs(y).max())), got, want)


class TypesTest(parameterized.TestCase):
  """The types of outputs and gradients on Explicit axes; nothing is computed."""

  @parameterized.product(mechanism=MECHANISMS, spec=tuple(SPECS))
  def test_output_and_gradients(self, mechanism, spec):
    mesh = mesh_of()
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32, sharding=NamedSharding(mesh, SPECS[spec]))
    metadata = OperationMetadata(sequence_axis_name="dp") if mechanism == "ring" else None
    def run(x):
      return x + attention(x, x, x, mechanism=mechanism, metadata=metadata).attention_outputs
    with jax.set_mesh(mesh):
      out = jax.eval_shape(run, x)
      gradient = jax.eval_shape(jax.grad(lambda x: run(x).sum()), x)
    self.assertEqual(out.sharding.spec, gradient.sharding.spec)
    entries = [*SPECS[spec], *[None] * 4][:4]
    self.assertEqual(tuple(out.sharding.spec), tuple(entries))

  @parameterized.parameters("bhtd", "thd")
  def test_layouts(self, layout):
    spec = P("dp", "tp", None, "fsdp") if layout == "bhtd" else P("dp", "tp")
    shape = (B, H, T, D) if layout == "bhtd" else (T, H, D)
    mesh = mesh_of()
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
    extra = {"cum_seqlens_q": np.array([0, 5, T], np.int32)} if layout == "thd" else {}
    def run(x):
      output = attention(x, x, x, layout=layout, return_lse=True, **extra)
      return x + output.attention_outputs, output.lse
    with jax.set_mesh(mesh):
      out, lse = jax.eval_shape(run, x)
    self.assertEqual(tuple(out.sharding.spec)[:2], tuple(spec)[:2])
    self.assertEqual(tuple(lse.sharding.spec),
                     ("dp", "tp", None) if layout == "bhtd" else ("tp", "dp"))

  def test_lse_weights_and_another_width(self):
    mesh = mesh_of()
    query, key = (jax.ShapeDtypeStruct((B, T, H, D), np.float32,
                                       sharding=NamedSharding(mesh, spec))
                  for spec in (P("dp", "fsdp", "tp"), P(None, None, None, "tp")))
    value = jax.ShapeDtypeStruct((B, T, H, 5), np.float32, sharding=NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
      out = jax.eval_shape(lambda *x: attention(*x, mechanism="vanilla", return_lse=True,
                                                return_weights=True), query, key, value)
    self.assertEqual(tuple(out.attention_outputs.sharding.spec), ("dp", "fsdp", "tp", None))
    self.assertEqual(tuple(out.attention_weights.sharding.spec), ("dp", "tp", "fsdp", None))
    self.assertEqual(tuple(out.lse.sharding.spec), ("dp", "tp", "fsdp"))

  @parameterized.parameters((("dp", "tp"), (1, 1)), (("data", "model"), (4, 1)), (("x",), (8,)))
  def test_other_names_and_axes_of_one_device(self, names, sizes):
    mesh = mesh_of(names, sizes=sizes)
    for spec in (P(names[0]), P(None, None, names[-1]), P(names)):
      x = jax.ShapeDtypeStruct((B, T, H, D), np.float32, sharding=NamedSharding(mesh, spec))
      with jax.set_mesh(mesh):
        out = jax.eval_shape(lambda x: attention(x, x, x).attention_outputs, x)
      self.assertEqual(out.sharding.spec, P(*[*spec, *[None] * 4][:4]))


class ExplicitValuesTest(parameterized.TestCase):
  """Values and gradients on Explicit axes are those of one device, and have the types of inputs."""

  def check(self, function, arrays, specs, mesh=None):
    want = with_gradients(function)(*arrays)
    mesh = mesh or mesh_of()
    with jax.set_mesh(mesh):
      placed = put(mesh, arrays, specs)
      got = with_gradients(function)(*placed)
    close(got, want)
    floats = [x for x in placed if jnp.issubdtype(x.dtype, jnp.floating)]
    self.assertEqual(list(map(normal, got[1])), list(map(normal, floats)))
    return got[0]

  @parameterized.parameters(*MECHANISMS)
  def test_keys_otherwise_and_axes_of_length_and_width(self, mechanism):
    metadata = OperationMetadata(sequence_axis_name="dp") if mechanism == "ring" else None
    specs = P("dp", None, "tp", "fsdp"), P(None, "dp"), P("fsdp", None, "tp")
    run = lambda *x: outputs(*x, mechanism=mechanism, metadata=metadata)
    out, = self.check(run, operands(K), specs)
    self.assertEqual(normal(out), [("dp",), (), ("tp",), ("fsdp",)])

  def test_broadcast_arrays_with_their_own_shardings(self):
    rng = np.random.default_rng(5)
    ids = np.sort(rng.integers(0, 3, (B, T))).astype(np.int32)
    arrays = (*operands(K), numbers(1, H, T, T), rng.random((B, 1, T, 1)) < 0.8, ids, numbers(H, 2))
    specs = (P("dp", None, ("tp", "fsdp")), P("dp"), P("dp"), P(None, "dp", "tp"),
             P("tp", None, "dp"), P("fsdp", "dp"), P("tp"))
    def run(query, key, value, bias, mask, ids, sinks):
      return outputs(query, key, value, bias=bias, mask=mask, mask_info=MaskInfo(None, ids, ids),
                     softmax_aux=sinks, return_lse=True)
    self.check(run, arrays, specs)

  def test_dropout_and_custom_masks_read_global_numbers(self):
    mask = masks.custom(lambda b, h, q, k: (b * 5 + h * 3 + q + k) % 4 != 0)
    run = lambda *x: outputs(
        *x, mask=mask, dropout_prob=0.4, dropout_rng=np.array([1, 2], np.uint32),
        mechanism="flash_attn2")
    self.check(run, operands(K), (P(("fsdp", "dp"), None, "tp"),) * 3)

  @parameterized.parameters("flash_attn2", "vanilla")
  def test_some_axes_are_auto(self, mechanism):
    mesh = mesh_of(kind=(AxisType.Explicit, AxisType.Auto, AxisType.Auto))
    run = lambda *x: [x[0] + attention(*x, mechanism=mechanism).attention_outputs]
    self.check(run, operands(K), (P("dp"),) * 3, mesh)

  def test_without_jit(self):
    mesh = mesh_of()
    with jax.set_mesh(mesh):
      x, = put(mesh, operands()[:1], [P(("dp", "fsdp"), None, "tp")])
      got = x + attention(x, x, x).attention_outputs
    self.assertEqual(normal(got), normal(x))
    x = operands()[0]
    close(got, x + attention(x, x, x).attention_outputs)

  def test_keys_of_a_decoding_step(self):
    run = lambda q, k, v: outputs(q[:, :1] if q.shape[1] > 1 else q, k, v, causal=False,
                                  mode="__autoregressive__")
    query, key, value = operands(K)
    specs = P("dp", None, "tp"), P("dp", "fsdp"), P("dp", "fsdp")
    self.check(run, (query[:, :1], key, value), specs)


class AutoValuesTest(parameterized.TestCase):
  """Values and gradients on Auto axes that no metadata names are those of one device."""

  def check(self, function, arrays, specs, mesh=None, set_mesh=True):
    want = function(*arrays)
    mesh = mesh or mesh_of(("data", "model"), AxisType.Auto, (4, 2))
    placed = put(mesh, arrays, specs)
    if set_mesh:
      with jax.set_mesh(mesh):
        close(function(*placed), want)
    else:
      close(function(*placed), want)

  @parameterized.named_parameters(
      ("as_heads", 8, P("data", None, "model"), P("data", None, "model")),
      ("one_key_head", 1, P("data", None, "model"), P("data")),
      ("not_divided", 2, P("model", None, "data"), P("model", None, "data")),
      ("over_all", 2, P(None, None, ("model", "data")), P()))
  def test_arrays_that_rows_and_heads_share(self, key_heads, spec, key_spec):
    """Gradients of shared arrays are summed over devices."""
    arrays = (*operands(key_heads), numbers(1, H, T, T), numbers(H), numbers(B, 1, 1, T))
    if key_spec != P() and key_heads == 2:
      key_spec = P("model")
    def run(query, key, value, bias, sinks, other):
      info = MaskInfo(other[:, :, :1] < 1)
      return outputs(query, key, value, bias=bias, softmax_aux=sinks, mask_info=info,
                     mechanism="flash_attn2", return_lse=True)
    self.check(with_gradients(run), arrays,
               (spec, key_spec, key_spec, P(None, "model"), P(), P("data")))

  @parameterized.parameters(True, False)
  def test_global_numbers(self, set_mesh):
    mask = masks.custom(lambda b, h, q, k: (b * 5 + h * 3 + q + k) % 4 != 0)
    run = jax.jit(lambda *x: outputs(
        *x, mask=mask, dropout_prob=0.4, dropout_rng=np.array([1, 2], np.uint32),
        mechanism="flash_attn2"))
    self.check(run, operands(K), (P("model", None, "data"), P("model"), P("data")),
               set_mesh=set_mesh)

  def test_the_batch_in_the_order_of_the_arrays(self):
    mesh = create_mesh((2, 2, 1, 2, 1))
    run = jax.jit(lambda *x: outputs(
        *x, dropout_prob=0.4, dropout_rng=np.array([1, 2], np.uint32), mechanism="flash_attn2"))
    for batch in (("dp", "fsdp"), ("fsdp", "dp"), "dp", ("tp", "fsdp")):
      self.check(run, operands(K), (P(batch),) * 3, mesh)

  def test_vmap_scan_and_remat(self):
    arrays = [np.stack([x, 2 * x, -x]) for x in operands(K, batch=4)]
    def layer(x, *rest):
      return jax.vmap(lambda *x: attention(*x, mechanism="flash_attn2").attention_outputs)(x, *rest)
    def run(query, *rest):
      step = jax.checkpoint(lambda x, _: (layer(x, *rest), None))
      return [jax.lax.scan(step, query, None, length=2)[0]]
    self.check(with_gradients(run), arrays, (P(None, "data", None, "model"), P(), P(None, "data")))

  def test_axes_of_vmap_stay_sharded(self):
    mesh = mesh_of(("data", "model"), AxisType.Auto, (4, 2))
    x, = put(mesh, [np.zeros((4, 2, T, H, D), np.float32)], [P("data", None, None, "model")])
    run = jax.jit(jax.vmap(lambda x: attention(x, x, x, mechanism="flash_attn2")[0]))
    with jax.set_mesh(mesh):
      self.assertEqual(run(x).sharding.spec, P("data", None, None, "model"))
      self.assertNotRegex(run.lower(x).compile().as_text(), "all-gather|all-to-all|all-reduce")

  def test_forward_mode_and_second_derivatives(self):
    def run(*x):
      f = lambda q: jnp.sin(attention(q, *x[1:], mechanism="flash_attn2").attention_outputs).sum()
      return jax.jvp(f, x[:1], x[:1]), jax.jvp(jax.grad(f), x[:1], x[:1])
    self.check(jax.jit(run), operands(batch=4), (P("data", None, "model"),) * 3)

  def test_arrays_that_are_not_sharded_take_the_metadata(self):
    """Also where several axes shard one dimension, which the arrays may order otherwise."""
    metadata = OperationMetadata(mesh=create_mesh((2, 2, 1, 2, 1)))
    run = jax.jit(lambda *x: attention(*x, metadata=metadata).attention_outputs)
    out = run(*operands())
    self.assertEqual(out.sharding.spec, P(("dp", "fsdp"), None, "tp"))
    close(out, attention(*operands()).attention_outputs)


class ExplainTest(parameterized.TestCase):

  def axes(self, mesh, spec, **arguments):
    sharding = NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32, sharding=sharding)
    with jax.set_mesh(mesh):
      said = explain(x, x, x, **arguments)
    for line in said.axes:
      self.assertIn(line, str(said))
    return {re.search(r"'(\w+)'", line)[1]: line for line in said.axes}

  def test_every_axis_of_several_devices(self):
    said = self.axes(mesh_of(sizes=(2, 1, 4)), P("dp"))
    self.assertEqual(list(said), ["dp", "tp"])
    self.assertIn("shards rows of the batch", said["dp"])
    self.assertIn("replicates the work", said["tp"])

  def test_the_partitioner(self):
    said = self.axes(mesh_of(("data", "fsdp"), AxisType.Auto, (4, 2)), P())
    self.assertIn("left to the partitioner", said["data"])
    self.assertIn("by default rows of the batch", said["fsdp"])

  def test_the_type_of_the_query_counts_where_no_mesh_is_in_force(self):
    x = np.zeros((B, T, H, D), np.float32)
    sharding = NamedSharding(mesh_of(("data", "fsdp"), AxisType.Auto, (4, 2)), P())
    said = explain(jax.device_put(x, sharding), x, x)
    self.assertIn("left to the partitioner", said.axes[0])

  def test_axes_that_the_metadata_names(self):
    said = self.axes(mesh_of(("dp", "tp"), AxisType.Auto, (2, 4)), P())
    self.assertIn("by default rows of the batch", said["dp"])
    self.assertIn("by default query heads and key heads", said["tp"])

  def test_the_sequence(self):
    mesh = mesh_of(("dp", "sp"), AxisType.Auto, (2, 4))
    said = self.axes(mesh, P(), mechanism="ring")
    self.assertIn("shards the sequence", said["sp"])

  def test_axes_of_the_caller(self):
    mesh, found = mesh_of(("dp", "tp"), AxisType.Auto, (2, 4)), []
    def inner(x):
      found.append(explain(x, x, x).axes)
      return x
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32)
    jax.eval_shape(jax.shard_map(inner, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                                 axis_names={"dp"}), x)
    self.assertIn("Manual", found[0][0])
    self.assertIn("shards query heads", found[0][1])


class RefusalsTest(parameterized.TestCase):
  """Axes that no metadata names are refused where the partitioner cannot place the call."""

  def check(self, mesh, platform=None, **arguments):
    x = jax.ShapeDtypeStruct((B, T, H, D), np.float32)
    run = lambda **fields: jax.eval_shape(lambda x: attention(
        x, x, x, metadata=OperationMetadata(platform=platform, **fields),
        **arguments).attention_outputs, x)
    with jax.set_mesh(mesh):
      with self.assertRaisesRegex(ValueError, "names no mesh axis 'data'.*PartitionAxis"):
        run()
      run(partition_axis=PartitionAxis(batch_axis="data"))

  def test_on_a_platform_without_a_partitioner(self):
    self.check(mesh_of(("data", "tp"), AxisType.Auto, (2, 4)), platform="tpu")

  def test_together_with_a_sharded_sequence(self):
    self.check(mesh_of(("data", "sp"), AxisType.Auto, (2, 4)), mechanism="ring")

  def test_together_with_explicit_axes(self):
    self.check(mesh_of(("data", "tp"), (AxisType.Auto, AxisType.Explicit), (2, 4)))


if __name__ == "__main__":
  absltest.main()
