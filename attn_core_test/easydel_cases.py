# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs, oracle and loss of the tests of EasyDeL's known defects."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, OperationMetadata, attention, create_mesh, masks
from attn_core import table
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands

BLOCKWISE = ("blockwise", "flash_attn2", "blocksparse", "auto")
WITHOUT_SDPA = ("vanilla", *BLOCKWISE)
ALL = ("sdpa", *WITHOUT_SDPA)

# One name of each CPU implementation: names that share one need not all compile it.
EACH = tuple({table.TABLE[name, "cpu"]: name for name in reversed(ALL) if name != "auto"}.values())

# Small blocks, so that every sequence has several.
BLOCKS = BlockSizes(8, 7, 7, 8, 1)


def numbers(*shape, seed=0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(b=2, t=24, s=24, h=4, k=2, d=8):
  return numbers(b, t, h, d, seed=1), numbers(b, s, k, d, seed=2), numbers(b, s, k, d, seed=3)


def attend(mechanism, *arrays, **kwargs):
  """Calls `attention`, in small blocks where the mechanism has blocks; the ring on all devices."""
  if mechanism in (*BLOCKWISE, "ring"):
    kwargs = {"block_sizes": BLOCKS, **kwargs}
  if mechanism == "ring":
    kwargs["metadata"] = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, -1)))
  return attention(*arrays, mechanism=mechanism, **kwargs)


def truth(query, key, value, mask=masks.causal(), *, bias=None, sinks=None,
          wrt=(), target=None, lse_weights=None):
  """Returns output, lse, and gradients of `loss` for the names in `wrt`, of the float64 oracle."""
  arrays = (query, key, value, bias, sinks, target, lse_weights)
  question = (mask, wrt, *(None if x is None else (x.shape, x.tobytes()) for x in arrays))
  if question not in _answers:
    _answers[question] = _truth(query, key, value, mask, bias, sinks, wrt, target, lse_weights)
  return _answers[question]


_answers = {}  # shared by all mechanisms


def _truth(query, key, value, mask, bias, sinks, wrt, target, lse_weights):
  with jax.enable_x64(True):
    wide = lambda x: None if x is None else jnp.asarray(np.asarray(x, np.float64))
    arrays, structure = jax.tree.flatten(mask)
    operands = Operands(wide(query), wide(key), wide(value), wide(bias),
                        MaskOperands(tuple(map(jnp.asarray, arrays))),
                        None if sinks is None else wide(sinks)[None])
    spec = AttentionSpec(structure, query.shape[-1] ** -0.5)
    def run(moved):
      found = oracle.attention(operands._replace(**moved), spec)
      return loss(found.attention_outputs, found.lse, target, lse_weights), found
    moved = {name: getattr(operands, name) for name in wrt}
    # Not in jit: each operation is compiled once for all masks.
    (_, found), gradients = jax.value_and_grad(run, has_aux=True)(moved)
    gradients = [np.asarray(gradients[name]) for name in wrt]
    if sinks is not None and "sinks" in wrt:
      gradients[wrt.index("sinks")] = gradients[wrt.index("sinks")][0]
    return np.asarray(found.attention_outputs), np.asarray(found.lse), gradients


def loss(out, lse=None, target=None, lse_weights=None):
  total = 0.0 if target is None else (out * jnp.asarray(target, out.dtype)).sum()
  if lse_weights is not None:
    seen = jnp.isfinite(lse)
    total = total + (jnp.where(seen, lse, 0) * jnp.asarray(lse_weights, lse.dtype)).sum()
  return total


def close(found, expected, tolerance=2e-5, **kwargs):
  np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, **kwargs)
