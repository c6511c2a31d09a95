# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rings inside the caller's own shard_map, which has split the sequence: whole-step trainers."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, RingConfig, attention, explain, from_layout,
                       masks, ring_attention, to_layout)
from attn_core.sharding import context_parallel, token_order
from attn_core.types import RING_VARIANTS
from attn_core_test.ring_cases import RNG, close, numbers

B, T, H, K, D, SHARDS = 2, 16, 4, 2, 4, 4


@functools.cache
def mesh_of(variant, kind="Auto"):
  sizes, names = ((2, 2, 2), ("dp", "sp", "heads")) if variant == "hybrid" else (
      (2, 4), ("dp", "sp"))
  return jax.make_mesh(sizes, names, axis_types=(getattr(AxisType, kind),) * len(names))


def metadata_of(variant, layout="contiguous", **fields):
  return OperationMetadata(
      ring=RingConfig(variant, layout, "heads" if variant == "hybrid" else None), **fields)


def sequence_axes(variant):
  return ("sp", "heads") if variant == "hybrid" else "sp"


def arrays():
  """Returns arrays of a call in natural token order, and the axes along which they have tokens."""
  segments = np.minimum(np.arange(T) // 7, 1)[None].repeat(B, 0).astype(np.int32)
  found = {"query": numbers(B, T, H, D), "key": numbers(B, T, K, D, seed=1),
           "value": numbers(B, T, K, D, seed=2), "bias": numbers(1, H, T, T, seed=3),
           "softmax_aux": numbers(H), "segments": segments,
           "mask": np.random.default_rng(4).random((B, 1, T, T)) < 0.9}
  return found, {"bias": (2, 3), "mask": (2, 3), "softmax_aux": ()}


def call(x, **arguments):
  """Attends with most options that depend on the tokens' numbers."""
  out = attention(
      x["query"], x["key"], x["value"], bias=x["bias"], softmax_aux=x["softmax_aux"],
      mask=masks.dense(x["mask"]), mask_info=MaskInfo(
          q_segment_ids=x["segments"], kv_segment_ids=x["segments"]),
      sliding_window=(9, 0), dropout_prob=0.3, dropout_rng=RNG, return_lse=True, **arguments)
  return out.attention_outputs, out.lse


def loss(out, lse):
  return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)**2)


def value_and_gradients(run):
  found, _ = arrays()
  fixed = {name: found.pop(name) for name in ("segments", "mask")}
  with_outputs = lambda x: (lambda outs: (loss(*outs), outs))(run({**x, **fixed}))
  return jax.jit(jax.value_and_grad(with_outputs, has_aux=True))(found)


@functools.cache  # not a method of a test case, of which each test has its own
def wanted():
  return value_and_gradients(functools.partial(call, mechanism="flash_attn2"))


class SplitTest(parameterized.TestCase):

  def split(self, variant, layout, **options):
    """Returns `call` inside a shard_map over the sequence."""
    axes, permuted = sequence_axes(variant), arrays()[1]
    rows = {"bias": P(None, None, axes), "mask": P(None, None, axes), "softmax_aux": P()}
    def run(x):
      for name in x:
        for axis in permuted.get(name, (1,)):
          x = {**x, name: to_layout(x[name], layout, SHARDS, axis)}
      specs = {name: rows.get(name, P(None, axes)) for name in x}
      inside = functools.partial(call, mechanism="ring", metadata=metadata_of(variant, layout))
      out, lse = jax.shard_map(
          inside, mesh=mesh_of(variant), in_specs=(specs,),
          out_specs=(P(None, axes), P(None, None, axes)), **options)(x)
      return from_layout(out, layout, SHARDS), from_layout(lse, layout, SHARDS, 2)
    return run

  @parameterized.parameters(*[
      (variant, layout, checked) for n, variant in enumerate(RING_VARIANTS)
      for m, layout in enumerate(token_order.TOKEN_ORDERS) for checked in (False, True)])
  def test_values_and_gradients(self, variant, layout, checked):
    """Checks all options; rows of the batch are on every device, or on an Auto axis of the mesh."""
    names = {"sp", "heads"} & set(mesh_of(variant).axis_names)
    only = {"axis_names": names} if variant in ("ring", "hybrid") else {}
    run = self.split(variant, layout, check_vma=checked, **only)
    close(value_and_gradients(run), wanted())

  @parameterized.product(checked=[False, True], kind=["Auto", "Explicit"])
  def test_a_whole_training_step(self, checked, kind):
    """Checks gradients taken inside the shard_map, of layers in a scan with remat."""
    metadata, x = metadata_of("ring", "zigzag"), numbers(4, T, H, D)
    def model(x, weight, **arguments):
      def layer(x, _):
        out = attention(x @ weight, x, x, policy="nothing_saveable", **arguments)
        return x + out.attention_outputs, None
      return jax.lax.scan(layer, x, None, length=2)[0]
    def step(x, weight):
      if checked:  # otherwise JAX sums the gradient of what all devices have in the backward
        weight = jax.lax.pcast(weight, ("dp", "sp"), to="varying")
      local = lambda x, weight: jnp.sum(jnp.sin(model(
          x, weight, mechanism="ring", metadata=metadata)))
      value, (d_x, d_weight) = jax.value_and_grad(local, (0, 1))(x, weight)
      return *jax.lax.psum((value, d_weight), ("dp", "sp")), d_x
    def whole(x, weight):
      weight = weight if kind == "Auto" else jax.sharding.reshard(weight, P())
      tokens = P("dp", "sp")
      value, d_weight, d_x = jax.shard_map(
          step, mesh=mesh_of("ring", kind), in_specs=(tokens, P()), out_specs=(P(), P(), tokens),
          check_vma=checked)(jax.sharding.reshard(x, tokens) if kind == "Explicit" else x, weight)
      return value, d_weight, d_x
    weight = numbers(D, D, seed=1)
    value, (d_x, d_weight) = jax.value_and_grad(lambda x, weight: jnp.sum(jnp.sin(
        model(x, weight, mechanism="flash_attn2"))), (0, 1))(x, weight)
    with jax.set_mesh(mesh_of("ring", kind)):
      value_, d_weight_, d_x_ = jax.jit(whole)(to_layout(x, "zigzag", SHARDS), weight)
    close((value_, d_weight_, from_layout(np.asarray(d_x_), "zigzag", SHARDS)),
          (value, d_weight, d_x))

  @parameterized.parameters(*RING_VARIANTS)
  def test_inside_a_checked_shard_map_over_the_batch(self, variant):
    mesh = mesh_of(variant)
    x = [numbers(B, T, n, D, seed=n) for n in (H, K, 1)]
    def gradients(run):
      return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(run(*x))), 0))((x[0], x[1], x[1]))
    ring = lambda *x: attention(*x, mechanism="ring", metadata=metadata_of(
        variant, mesh=mesh)).attention_outputs
    inside = jax.shard_map(ring, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                           axis_names={"dp"})
    plain = lambda *x: attention(*x, mechanism="flash_attn2").attention_outputs
    close(gradients(inside), gradients(plain))

  def test_what_runs(self):
    """Checks that a permuted order implies the ring, and what explain says about it."""
    x, metadata = numbers(B, T, H, D), metadata_of("ring", "zigzag")
    found = []
    def inside(x):
      found.append(explain(x, x, x, metadata=metadata))
      return attention(x, x, x, metadata=metadata).attention_outputs
    out = jax.jit(jax.shard_map(inside, mesh=mesh_of("ring"), in_specs=P("dp", "sp"),
                                out_specs=P("dp", "sp")))(to_layout(x, "zigzag", SHARDS))
    close(from_layout(np.asarray(out), "zigzag", SHARDS),
          attention(x, x, x, mechanism="flash_attn2").attention_outputs)
    self.assertEqual(found[0].chosen, "ring")
    self.assertIn("the sequence over sp=4", str(found[0]))

  @parameterized.parameters("flash_attn2", "vanilla", "sdpa", "autoregressive_decodeattn")
  def test_other_mechanisms_with_some_axes_manual(self, mechanism):
    """Checks a shard_map over the batch whose heads another, Auto axis shards."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x = [numbers(B, T, H, D, seed=n) for n in range(3)]
    run = lambda *x: attention(*x, mechanism=mechanism,
                               metadata=OperationMetadata(mesh=mesh)).attention_outputs
    gradients = lambda run: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(run(*x)))))(tuple(x))
    want = gradients(lambda *x: attention(*x, mechanism=mechanism).attention_outputs)
    for checked in (False, True):
      close(gradients(jax.shard_map(run, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                                    axis_names={"dp"}, check_vma=checked)), want)


class BadInputTest(parameterized.TestCase):

  def run_inside(self, names, **arguments):
    x, variant = jnp.zeros((B, T, H, D)), "hybrid"
    jax.eval_shape(jax.shard_map(
        lambda x: ring_attention(x, x, x, metadata=metadata_of(variant), **arguments)[0],
        mesh=mesh_of(variant), in_specs=P(None, tuple(names)), out_specs=P(None, tuple(names)),
        axis_names=set(names)), x)

  def test_one_of_two_axes(self):
    with jax.set_mesh(mesh_of("hybrid")), self.assertRaisesRegex(
        ValueError, "ring.heads_axis_name='heads': .*shard_map over 'sp' leaves out; expected both "
        "or none.*add 'heads', or leave 'sp' out"):
      self.run_inside(["sp"])

  def test_an_axis_of_one_device_may_be_left_out(self):
    config = RingConfig("hybrid", heads_axis_name="heads")
    of_size = lambda n: AbstractMesh((4, n), ("sp", "heads"),
                                     axis_types=(AxisType.Manual, AxisType.Auto))
    context_parallel.require_axes(config, "sp", of_size(1))
    with self.assertRaisesRegex(ValueError, "'heads': got an axis that the surrounding"):
      context_parallel.require_axes(config, "sp", of_size(2))

  def test_the_columns_of_one_shard(self):
    with self.assertRaisesRegex(ValueError, r"bias: .*float32\[1, 1, 4, 4\].*\[2, 4, 4, 16\]"):
      self.run_inside(["sp", "heads"], bias=jnp.zeros((1, 1, T // SHARDS, T // SHARDS)))


if __name__ == "__main__":
  absltest.main()
