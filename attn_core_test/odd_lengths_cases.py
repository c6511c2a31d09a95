# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of queries and keys that fill no block, and attention over them by the definition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling

LENGTHS = (1, 64, 77, 200, 1000, 2047)
PAIRS = tuple(itertools.product(LENGTHS, LENGTHS))
BATCH, HEADS, KEY_HEADS = 2, 2, 1
NAMES = ("query", "key", "value")


def arrays(queries: int, keys: int, width: int) -> list[np.ndarray]:
  """Returns query, key and value of two query heads on one key head, in two rows."""
  rng = np.random.default_rng(queries + 3 * keys)
  return [rng.normal(size=(BATCH, length, heads, width)).astype(np.float32)
          for length, heads in ((queries, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS))]


def arguments(queries: int, keys: int, causal: bool) -> dict:
  """Returns arguments of a call in which the last query sees all keys."""
  return dict(causal=True, query_offset=keys - queries) if causal else dict(causal=False)


def cotangents(queries: int, keys: int, width: int, causal: bool) -> list[np.ndarray]:
  """Returns numbers like out and lse; 0 for an lse of -inf, which has no derivative."""
  rng = np.random.default_rng(0)
  out = rng.normal(size=(BATCH, queries, HEADS, width)).astype(np.float32)
  lse = rng.normal(size=(BATCH, HEADS, queries)).astype(np.float32)
  empty = causal & (np.arange(queries) < queries - keys)
  return [out, np.where(empty, 0, lse).astype(np.float32)]


def defined(operands: list[np.ndarray], causal: bool,
            *given: list[np.ndarray]) -> tuple[list[np.ndarray], ...]:
  """Returns [out, lse], and [d_query, d_key, d_value] for each of the given cotangents."""
  keys, queries = operands[1].shape[1], operands[0].shape[1]
  mask = masks.offset(masks.causal(), keys - queries) if causal else masks.full()
  leaves, structure = jax.tree.flatten(mask)
  spec = AttentionSpec(structure, operands[0].shape[3]**-0.5)

  def attend(*operands):
    found = oracle.attention(Operands(
        *operands, None, MaskOperands(tuple(map(jnp.asarray, leaves)))), spec)
    return [found.attention_outputs, found.lse]

  @functools.partial(jax.jit, compiler_options=sampling.LEAST)
  def everything(operands, given):
    found, pull = jax.vjp(attend, *operands)
    return found, *(list(pull(x)) for x in given)

  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (operands, given))
    return jax.tree.map(np.asarray, everything(*wide))


def close(found, expected, names, tolerance: float, message: str = "") -> None:
  """Compares arrays, relative to the largest number of each; infinities are equal."""
  for name, x, y in zip(names, found, expected, strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y)
    size = max(1.0, np.abs(np.where(np.isfinite(y), y, 0)).max())
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * size, err_msg=f"{name} {message}")
