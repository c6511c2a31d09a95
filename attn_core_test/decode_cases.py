# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of decoding from a dense cache, and their meaning in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, attention
from attn_core.caches import dense, quantize
from attn_core.masks import constructors
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

MODE = {"mode": "__autoregressive__", "mechanism": "autoregressive_decodeattn"}


class Case(NamedTuple):
  """One call of decoding; lengths include the queries' own tokens."""

  lengths: tuple[int, ...]
  T: int = 1
  S: int = 37
  H: int = 4
  K: int = 2
  D: int = 32
  E: int = 32
  starts: tuple[int, ...] | None = None
  sliding_window: tuple | None = None
  logits_soft_cap: float | None = None
  sinks: bool = False
  block: int | None = 8

  @property
  def arguments(self) -> dict:
    return dict(sliding_window=self.sliding_window, logits_soft_cap=self.logits_soft_cap,
                block_sizes=BlockSizes(block_kv=self.block), **MODE)


CASES = {
    "one_query": Case((37, 1, 16)),
    "rows_shorter_than_the_queries": Case((0, 1, 2), T=3),
    "window": Case((37, 5, 24), T=3, sliding_window=(9, 0)),
    "soft_cap_and_sinks": Case((37, 0, 9), logits_soft_cap=1.5, sinks=True),
    "starts": Case((37, 20, 9), starts=(30, 0, 9)),
    "one_head": Case((37, 12), T=3, H=1, K=1),
    "all_query_heads_share_a_key_head": Case((37, 12), T=2, H=8, K=1, D=16, E=48),
    "every_query_head_has_its_own": Case((37, 12), H=4, K=4, D=5, E=3),
    "many_rows": Case((37, 20), T=9, H=8),
    "one_block": Case((37, 20), T=2, block=None),
    "blocks_of_one_key": Case((5, 3), S=5, block=1),
    "one_slot": Case((1, 0), S=1, block=None),
    # Split into blocks of 512 keys, and the rest into blocks of 256.
    "large_blocks": Case((1100, 700, 300), S=1100, H=8, K=8, D=128, E=128, block=None),
}


# Of several devices.
SHARDED = Case((0, 1, 7, 16), T=3, S=16, H=4, K=2, sliding_window=(9, 0), logits_soft_cap=3.0,
               sinks=True, block=None)
# name: (case, dtype of the query, of the cache where it is in 8 bits, how transfers are executed)
ON_TPU = {
    "lengths_starts_window_sinks": (
        Case((293, 0, 131, 1), S=293, T=1, starts=(70, 0, 129, 0), sliding_window=(200, 0),
             logits_soft_cap=1.5, sinks=True, block=128), "float32", None, "on_wait"),
    "several_queries_16_bits": (
        Case((257, 130), S=260, T=3, H=8, K=2, D=128, E=64, block=128), "bfloat16", None, "eager"),
    "one_head": (Case((70, 2), S=71, T=2, H=1, K=1, D=256, E=128, block=128), "float32", None,
                 "on_wait"),
    "many_rows": (Case((150,), S=160, T=40, H=8, K=2, D=16, E=16), "bfloat16", None, "eager"),
    "int8": (Case((150, 77), S=160, H=8, K=4, D=16, E=8), "bfloat16", "int8", "on_wait"),
    "float8": (Case((150, 77), S=160, H=2, K=2), "float32", "float8_e4m3fn", "eager"),
}


def arrays(case: Case, dtype, seed=0):
  """Returns query, the cache's key and value, and sinks by name."""
  rng = np.random.default_rng(seed)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  batch = len(case.lengths)
  found = {"query": array(batch, case.T, case.H, case.D),
           "key": array(batch, case.S, case.K, case.D),
           "value": array(batch, case.S, case.K, case.E)}
  return {**found, "softmax_aux": array(case.H)} if case.sinks else found


def cache_of(case: Case, key, value, **scales) -> dense.DenseCache:
  rows = len(case.lengths)
  return dense.DenseCache(key, value, jnp.array(case.starts or [0] * rows, jnp.int32),
                          jnp.array(case.lengths, jnp.int32), jnp.zeros(rows, bool), **scales)


def with_holes(case: Case, dtype, held):
  """Returns operands, the cache with NaN in unread slots, and the operands as kernels read them."""
  operands = arrays(case, dtype)
  slot = jnp.arange(case.S)
  starts = jnp.array(case.starts or [0] * len(case.lengths))
  live = (slot >= starts[:, None]) & (slot < jnp.array(case.lengths)[:, None])
  stored, scales, read = [], {}, dict(operands)
  for name in ("key", "value"):
    x, scale = operands[name], None
    if held is not None:
      x, scale = quantize.quantize(x, held)
      read[name] = quantize.dequantize(x, scale, dtype)
      scales[f"{name}_scale"] = jnp.where(live[:, :, None], scale, jnp.nan)
    if x.dtype != jnp.int8:
      x = jnp.where(live[:, :, None, None], x, jnp.asarray(jnp.nan, x.dtype))
    stored.append(x)
  cache = cache_of(case, *stored, **scales)
  return operands, cache, {name: x.astype(jnp.float32) for name, x in read.items()}


def decoded(case: Case, operands, **more):
  """Returns (out, lse) of the queries, which are the last tokens of their rows."""
  return from_cache(case, operands, cache_of(case, operands["key"], operands["value"]), **more)


def from_cache(case: Case, operands, cache, **more):
  """Returns (out, lse) of the queries, given the cache."""
  output = attention(operands["query"], None, None, cache_view=cache, return_lse=True,
                     softmax_aux=operands.get("softmax_aux"), **case.arguments, **more)
  return output.attention_outputs, output.lse


def shapes(case: Case, dtype, stored):
  """Returns operands and a cache, which is in 8 bits if `stored` is not None, as shapes."""
  def made():
    found = arrays(case, dtype)
    held = found["key"], found["value"]
    if stored is None:
      return found, cache_of(case, *held)
    (key, key_scale), (value, value_scale) = (quantize.quantize(x, stored) for x in held)
    return found, cache_of(case, key, value, key_scale=key_scale, value_scale=value_scale)
  return jax.eval_shape(made)


@functools.cache  # one object, which jax.jit compiles once
def compiled(case: Case):
  return jax.jit(functools.partial(decoded, case))


def defined(case: Case, operands):
  """Returns the same by the definition, from loops over numbers."""
  starts = case.starts or (0,) * len(case.lengths)
  left = np.inf if case.sliding_window is None else case.sliding_window[0]
  seen = np.array([[[start <= s <= length - case.T + t and s >= length - case.T + t - left
                     and length - case.T + t >= start for s in range(case.S)]
                    for t in range(case.T)] for start, length in zip(starts, case.lengths)])
  leaves, structure = jax.tree.flatten(constructors.dense(seen[:, None]))
  spec = AttentionSpec(structure, case.D**-0.5, case.logits_soft_cap)
  sinks = operands["softmax_aux"][None] if case.sinks else None
  out, _, lse, _ = oracle.attention(
      Operands(operands["query"], operands["key"], operands["value"], None,
               MaskOperands(tuple(map(jnp.asarray, leaves))), sinks), spec)
  return out, lse


@functools.cache
def expected(case: Case):
  """Returns `defined` in one program, which XLA optimizes little."""
  return jax.jit(functools.partial(defined, case), compiler_options=sampling.LEAST)


def with_gradients(run, case, options=None):
  """Returns a jitted function of the operands -> (value, gradients) of a loss of all outputs."""
  def loss(operands):
    out, lse = run(case, operands)
    return jnp.sin(out).sum() + (jnp.where(jnp.isfinite(lse), lse, 0)**2).sum(), (out, lse)
  return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=options)


def close(got, want, tolerance):
  for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want),
                          strict=True):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance,
                               err_msg=jax.tree_util.keystr(path))
