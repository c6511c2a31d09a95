# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rings on meshes with other axes, inside shard_map and scan, and calls that they refuse."""

import functools
import itertools
import math

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, RingConfig, attention, create_mesh, explain,
                       from_layout, masks, ring_attention, to_layout)
from attn_core.sharding import token_order
from attn_core_test import sampling
from attn_core_test.ring_cases import (D, SHARDS, RNG, T, close, mesh_of, metadata_of, numbers,
                                       predicate)

# Those without sp come last and are slow: they run flash, whose meshes `shard_test` tests.
FACTORIZATIONS = sorted((sizes for sizes in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (
    1, 2, 4, 8)) if math.prod(sizes) == SHARDS), key=lambda sizes: sizes[-1] == 1)


class MeshTest(parameterized.TestCase):

  def loss(self, metadata, mechanism, layout="contiguous", shards=1):
    """Returns value and gradients of a call in which rows, heads and tokens could be mixed up."""
    arrays = {"query": numbers(4, 16, 4, D), "key": numbers(4, 16, 2, D, seed=1),
              "value": numbers(4, 16, 2, D, seed=2), "softmax_aux": numbers(4)}
    arguments = dict(mask=masks.custom(predicate), dropout_prob=0.3, dropout_rng=RNG,
                     deterministic=False)
    def loss(arrays):
      arrays = {name: to_layout(x, layout, shards) if x.ndim == 4 else x
                for name, x in arrays.items()}
      out = attention(**arrays, **arguments, mechanism=mechanism,
                      metadata=metadata).attention_outputs
      return jnp.sum(jnp.sin(from_layout(out, layout, shards)))
    return jax.jit(jax.value_and_grad(loss))(arrays)

  @functools.cached_property
  def want(self):
    return self.loss(None, "vanilla")

  @parameterized.named_parameters(*[
      ("_".join(f"{name}{n}" for name, n in zip(("dp", "fsdp", "tp", "sp"), sizes)), n, *sizes)
      for n, sizes in enumerate(FACTORIZATIONS) if sizes[-1] > 1 or sampling.chosen(repr(sizes))])
  def test_every_factorization(self, number, dp, fsdp, tp, sp):
    mesh = create_mesh((dp, fsdp, 1, tp, sp))
    variant = "ulysses" if sp * tp <= 4 and number % 2 else "ring"
    layout = token_order.TOKEN_ORDERS[number % 3]
    metadata = metadata_of(variant, layout, mesh)
    close(self.loss(metadata, "ring", layout, sp), self.want)

  def test_explicit_axes_with_padding(self):
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(AxisType.Explicit,) * 2,
                         devices=jax.devices()[:4])
    x = [numbers(2, 13, 2, D, seed=n) for n in range(3)]
    def gradients(mechanism):
      return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attention(
          *x, mechanism=mechanism).attention_outputs)), (0, 1, 2)))(*x)
    with jax.set_mesh(mesh):
      got = gradients("ring")
    close(got, gradients("vanilla"))

  @parameterized.parameters("ring", "all_gather")
  def test_what_does_not_divide_is_replicated(self, variant):
    """Checks one batch row over dp, three heads over tp, and a bias and sinks for all devices."""
    arrays = {"query": numbers(1, 16, 3, D), "key": numbers(1, 16, 3, D, seed=1),
              "value": numbers(1, 16, 3, D, seed=2), "softmax_aux": numbers(3),
              "bias": numbers(1, 1, 1, 16)}
    def gradients(mechanism, metadata):
      def loss(arrays):
        found = attention(**arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return jnp.sum(jnp.sin(found.attention_outputs)) + jnp.sum(found.lse**2)
      return jax.jit(jax.grad(loss))(arrays)
    metadata = metadata_of(variant, mesh=create_mesh((2, 1, 1, 2, 2)))
    close(gradients("ring", metadata), gradients("vanilla", None))

  def test_remat_and_scan_inside_the_callers_shard_map(self):
    """Checks two layers, each rematerialized, inside a shard_map over the batch."""
    mesh, x = create_mesh((4, 1, 1, 1, 2)), numbers(4, 16, 2, D)
    def model(x, **arguments):
      layer = lambda x, _: (attention(x, x, x, **arguments).attention_outputs, None)
      return jax.lax.scan(layer, x, None, length=2)[0]
    ring = functools.partial(model, mechanism="ring", metadata=OperationMetadata(mesh=mesh),
                             policy="nothing_saveable")
    inside = jax.shard_map(ring, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                           axis_names={"dp"}, check_vma=False)
    want = jax.grad(lambda x: jnp.sum(model(x, mechanism="vanilla")))(x)
    for run in (ring, inside):
      close(jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(x))))(x), want)

  def test_one_shard_is_flash(self):
    x = jnp.ones((2, 13, 2, D))
    run = lambda mechanism, metadata: jax.make_jaxpr(lambda x: attention(
        x, x, x, mechanism=mechanism, metadata=metadata).attention_outputs)(x)
    self.assertEqual(str(run("ring", None)), str(run("flash_attn2", None)))
    metadata = metadata_of("ring", "zigzag", create_mesh((8, 1, 1, 1, 1)))
    self.assertEqual(str(run("ring", metadata)), str(run("flash_attn2", metadata)))

  def test_the_sequence_goes_before_batch_and_heads(self):
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    metadata = metadata_of("ring", mesh=mesh)
    metadata = metadata.replace(partition_axis=metadata.partition_axis._replace(
        batch_axis="sp", head_axis=("tp", "sp"), kv_head_axis="tp"))
    x = jnp.asarray(numbers(4, 16, 8, D))
    out = jax.jit(lambda x: ring_attention(x, x, x, metadata=metadata).attention_outputs)(x)
    self.assertEqual(tuple(out.sharding.spec)[:3], (None, "sp", "tp"))
    explanation = explain(x, x, x, mechanism="ring", metadata=metadata)
    self.assertEqual((explanation.chosen, explanation.replicated), ("ring", ()))
    self.assertIn("can, by context_parallel.xla", str(explanation))


BAD = (
    ("axis_not_in_the_mesh", dict(metadata=dict(sequence_axis_name="seq")), {},
     r"sequence_axis_name='seq': expected an axis of the mesh, which has \('sp',\)"),
    ("heads_axis_not_in_the_mesh", dict(ring=RingConfig("hybrid", heads_axis_name="x")), {},
     r"ring.heads_axis_name='x': expected an axis of the mesh, which has \('sp',\)"),
    ("heads_axis_is_the_ring", dict(ring=RingConfig("hybrid", heads_axis_name="sp")), {},
     "ring.heads_axis_name='sp': expected another mesh axis"),
    ("zigzag", dict(ring=RingConfig(layout="zigzag")), dict(length=24),
     "query length=24: expected a multiple of 16 for layout 'zigzag' over 8 shards; the nearest "
     "are 16 or 32.*'contiguous', which is padded internally"),
    ("striped", dict(ring=RingConfig(layout="striped")), dict(length=7),
     "query length=7: expected a multiple of 8 .* the nearest are 8:"),
    ("ulysses", dict(ring=RingConfig("ulysses")), dict(heads=4),
     "ring.variant='ulysses': got 4 query heads a device for the 8 devices of mesh axis 'sp'; "
     "expected a multiple of 8; variants 'ring' and 'all_gather' take any number, or 'hybrid' with "
     "a heads axis of size 2 or 4"),
    ("one_side", {}, dict(mask_info=MaskInfo(q_segment_ids=np.zeros((1, 16), np.int32))),
     "mask_info: q_segment_ids is given and kv_segment_ids is None; expected both or none"),
)


class BadInputTest(parameterized.TestCase):

  @parameterized.named_parameters(*BAD)
  def test_refused_before_anything_runs(self, fields, arguments, message):
    fields = {"mesh": mesh_of("ring"), **fields, **fields.get("metadata", {})}
    fields.pop("metadata", None)
    metadata = OperationMetadata(**fields)
    arguments = dict(arguments)
    x = jnp.zeros((1, arguments.pop("length", 16), arguments.pop("heads", 8), D))
    for function in (ring_attention, functools.partial(explain, mechanism="ring")):
      with self.assertRaisesRegex(ValueError, message):
        function(x, x, x, metadata=metadata, **arguments)

  @parameterized.parameters(
      (dict(ring=7), "ring=7: expected a RingConfig, or None"),
      (dict(ring=RingConfig("deepspeed")), "ring.variant='deepspeed': expected one of 'ring',"),
      (dict(ring=RingConfig(layout="zag")), "ring.layout='zag': expected one of 'contiguous'"),
      (dict(ring=RingConfig("hybrid")), "ring.heads_axis_name=None: expected the name of a mesh"),
      (dict(ring=RingConfig(heads_axis_name="x")), "ring.heads_axis_name='x': .* None with any"))
  def test_metadata(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      OperationMetadata(**fields)

  @parameterized.parameters("flash_attn2", "vanilla", "autoregressive_decodeattn")
  def test_other_mechanisms_refuse_the_token_order(self, mechanism):
    x, metadata = numbers(1, T, 2, D), metadata_of("ring", "zigzag")
    with self.assertRaisesRegex(NotImplementedError, "ring.layout='zigzag'"):
      attention(x, x, x, mechanism=mechanism, metadata=metadata)
    self.assertEqual(explain(x, x, x, metadata=metadata).chosen, "ring")
    with self.assertRaisesRegex(ValueError, "layout: got 'thd' with.*'zigzag'.*from_cu_seqlens"):
      attention(*[x[0]] * 3, layout="thd", cum_seqlens_q=np.array([0, 9, T], np.int32),
                mechanism="ring", metadata=metadata)

  def test_weights_are_refused(self):
    x = jnp.zeros((1, 16, 8, D))
    with self.assertRaisesRegex(NotImplementedError, "mechanism='ring' .* return_weights=True"):
      ring_attention(x, x, x, return_weights=True, metadata=metadata_of("ring"))


if __name__ == "__main__":
  absltest.main()
