# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of a ring over 8 virtual devices, and their meaning on one device in float64.

Expected results are the oracle's, in the natural token order, with masks as dense boolean arrays.
"""

import functools
import os
import re

# Devices wait for each other on threads of XLA's, of which there are otherwise as many as devices;
# one that waits in two collectives at a time needs two.
os.environ["NPROC"] = "16"

# pylint: disable=wrong-import-position
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, RingConfig, attention, from_layout,
                       masks, to_layout)
from attn_core.masks import dropout
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling

jax.config.update("jax_num_cpu_devices", 8)

SHARDS = 8
B, T, H, K, D, E = 2, 64, 8, 2, 4, 6
RNG = np.array([7, 11], np.uint32)
BLOCKS = BlockSizes(8, 8, 8, 8, 1)


def numbers(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@functools.cache
def mesh_of(variant, devices=SHARDS):
  """Returns a mesh of devices in a row; 4 groups of 2 for the hybrid."""
  shape, names = ((4, 2), ("sp", "heads")) if variant == "hybrid" else ((devices,), ("sp",))
  return jax.make_mesh(shape, names, devices=jax.devices()[:devices],
                       axis_types=(AxisType.Auto,) * len(names))


def metadata_of(variant, layout="contiguous", mesh=None, **fields):
  config = RingConfig(variant, layout, "heads" if variant == "hybrid" else None)
  return OperationMetadata(mesh=mesh or mesh_of(variant), ring=config, **fields)


def close(got, want, tolerance=1e-5):
  """Compares relative to the largest number of each array; -inf and NaN must coincide."""
  def one(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
    x, y = (np.where(np.isfinite(y), z, 0) for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))
  jax.tree.map(one, got, want)


class Case:
  """A call in natural token order, and its meaning: the visible keys, as loops over numbers."""

  def __init__(self, sees, shape=(B, T, T, H, K, D, E), floats=("bias", "softmax_aux"), cap=None,
               drop=0.0, arguments=None, arrays=None):
    b, t, s, h, k, d, e = self.shape = shape
    self.seen = np.array([[[[sees(*at) for at in ((n, m, i, j) for j in range(s))]
                            for i in range(t)] for m in range(h)] for n in range(b)])
    self.drop, self.cap = drop, cap
    self.arguments = dict(arguments or {}, logits_soft_cap=cap)
    if drop:
      self.arguments.update(dropout_prob=drop, dropout_rng=RNG, deterministic=False)
    self.arrays = arrays or (lambda permuted: {})  # arguments that are permuted
    self.floats = {"query": numbers(b, t, h, d, seed=1), "key": numbers(b, s, k, d, seed=2),
                   "value": numbers(b, s, k, e, seed=3)}
    if "bias" in floats:
      self.floats["bias"] = numbers(1, h, t, s, seed=4)
    if "softmax_aux" in floats:
      self.floats["softmax_aux"] = numbers(h, 2, seed=5)
    self.moved = {name: numbers(*x.shape, seed=9) for name, x in self.floats.items()}

  def derived(self, run, forward_mode=True):
    """Returns (out, lse), gradients of a weighted sum of both, and their JVP along `moved`."""
    found, along = jax.linearize(run, self.floats)
    weights = [jnp.asarray(numbers(*x.shape, seed=6), x.dtype) for x in found]
    weights[1] = jnp.where(jnp.isfinite(found[1]), weights[1], 0)
    gradients, = jax.linear_transpose(along, self.floats)(tuple(weights))
    if not forward_mode:
      return found, gradients
    out, lse = along(self.moved)
    return found, gradients, (out, jnp.where(jnp.isfinite(found[1]), lse, 0))

  @functools.cached_property
  def truth(self):
    with jax.enable_x64(True):
      dense, structure = jax.tree.flatten(masks.dense(self.seen))
      def run(arrays):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        sinks = wide.get("softmax_aux")
        operands = Operands(
            wide["query"], wide["key"], wide["value"], wide.get("bias"),
            MaskOperands(tuple(map(jnp.asarray, dense))),
            None if sinks is None else jax.nn.logsumexp(sinks, -1)[None],
            dropout.key_words(jnp.asarray(RNG)) if self.drop else None)
        found = oracle.attention(operands, AttentionSpec(
            structure, self.shape[5] ** -0.5, self.cap, self.drop))
        return found.attention_outputs, found.lse
      narrow, self.floats, self.moved = (self.floats, self.moved), *(
          {name: x.astype(np.float64) for name, x in values.items()}
          for values in (self.floats, self.moved))
      found = jax.tree.map(np.asarray, jax.jit(
          lambda: self.derived(run), compiler_options=sampling.LEAST)())
      self.floats, self.moved = narrow
    return found

  def check(self, metadata, shards=SHARDS, forward_mode=True, tolerance=1e-5):
    """Checks that a ring, permuted to the metadata's token order and back, gives `truth`."""
    truth = self.truth if forward_mode else self.truth[:2]
    close(self.spread(metadata, shards, forward_mode), truth, tolerance)

  def spread(self, metadata, shards, forward_mode):
    return jax.jit(lambda: self.derived(self.run(metadata, shards), forward_mode))()

  def run(self, metadata, shards, blocks=None):
    """Returns a ring as arrays -> (out, lse), permuted to the metadata's token order and back."""
    layout = metadata.ring.layout
    def permuted(x, *axes):
      for axis in axes:
        x = to_layout(x, layout, shards, axis)
      return x
    def run(arrays):
      arrays = {name: x if name == "softmax_aux" else permuted(x, 2, 3) if name == "bias"
                else permuted(x, 1) for name, x in arrays.items()}
      found = attention(**arrays, **self.arguments, **self.arrays(permuted), mechanism="ring",
                        metadata=metadata, return_lse=True, block_sizes=blocks or BLOCKS)
      return (from_layout(found.attention_outputs, layout, shards),
              from_layout(found.lse, layout, shards, 2))
    return run


SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (B, T)), -1).astype(np.int32)


@functools.cache
def everything():
  """Documents across shards, padding, a window, and everything that changes logits or weights."""
  return Case(
      lambda b, h, t, s: s <= t and t - s <= 40 and SEGMENTS[b, t] == SEGMENTS[b, s] >= 0,
      cap=3.0, drop=0.3, arguments=dict(sliding_window=(40, 0)),
      arrays=lambda permuted: dict(mask_info=MaskInfo.from_segments(permuted(SEGMENTS, 1))))


Q_POSITIONS = np.random.default_rng(1).integers(0, T, (B, T)).astype(np.int32)
K_POSITIONS = np.random.default_rng(2).integers(0, T, (1, T)).astype(np.int32)
DENSE = np.random.default_rng(3).random((B, H, T, T)) < 0.6
DENSE[:, :, 5:20] = False  # queries that see no key


def predicate(batch, head, query, key):
  return (batch * 5 + head * 3 + query + key) % 4 != 0


@functools.cache
def positions():
  """Positions from the caller, a mask for every pair, a predicate of row and head."""
  def sees(b, h, t, s):
    q, k = Q_POSITIONS[b, t], K_POSITIONS[0, s]
    return q // 24 == k // 24 and DENSE[b, h, t, s] and predicate(b, h, q, k)
  return Case(sees, floats=(), arguments=dict(causal=False, chunk_size=24), arrays=lambda permuted:
              dict(mask=masks.custom(predicate) & masks.dense(permuted(DENSE, 2, 3)),
                   mask_info=MaskInfo(q_positions=permuted(Q_POSITIONS, 1),
                                      kv_positions=permuted(K_POSITIONS, 1))))


@functools.cache
def padded():
  """Lengths that 8 shards do not divide, T != S, masks of size 1 along rows, columns and both."""
  lengths = np.array([30, 37], np.int32)
  def sees(b, h, t, s):
    return (s <= t - 7 or s < 9) and s < lengths[b]
  return Case(sees, (B, 61, 37, H, 8, D, D), arguments=dict(
      causal=False, query_offset=-7,
      mask=(masks.causal() | masks.prefix(9)) & masks.lengths(None, lengths)))


COLLECTIVE = re.compile(r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
                        r"(?:-start)?\(")


def compiled(run, metadata, shape=(1, 512, 8, 16), dtype=jnp.float32):
  spec = P(None, tuple(metadata.mesh.axis_names))
  x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(metadata.mesh, spec))
  platform = {"gpu": "cuda"}.get(metadata.platform, metadata.platform)
  lowered = jax.jit(run).trace(x, x, x).lower(
      **({} if platform is None else {"lowering_platforms": (platform,)}))
  return lowered.compile()


def gradients_of(run):
  return jax.grad(lambda *x: (run(*x).astype(jnp.float32)**2).sum(), (0, 1, 2))
