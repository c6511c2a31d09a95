# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores that look numbers up by row, head, query or key, each defined twice.

A definition is of all scores [B, H, T, S] and index grids that broadcast to them.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks, score_mods
from attn_core.score_mods import lookups
from attn_core.score_mods.score_mod import ScoreMod
from attn_core_test import gpu_cases

B, T, H = 2, 70, 2


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


SLOPES = 0.1 * abs(_numbers(H))
IDS = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)), axis=1).astype(np.int32)
TOKENS = np.random.default_rng(2).integers(-2**31, 2**31, T).astype(np.int32)
TOKENS[1::3] = TOKENS[0] + 1  # which float32 cannot tell from the first token


class Function(NamedTuple):
  """A function of scores."""

  function: Callable[..., jax.Array]
  operands: tuple[np.ndarray, ...]
  define: Callable[..., jax.Array]  # (scores, row, head, query, key, *operands)
  shapes: list[tuple[int, ...]]  # of the numbers that kernels get

  def mod(self, *operands: Any) -> ScoreMod:
    return score_mods.custom(self.function, *operands)


@jax.jit
def _kerple(score, row, head, query, key, first, second):
  distance = abs(query - key).astype(score.dtype)
  return score - first[head] * jnp.log1p(second.at[head].get(mode="clip") * distance)


def _documents(score, row, head, query, key, ids):
  same = ids[row, query] == ids[row, key]
  return jnp.where(same, score, 0.5 * score - 1)


def _features(score, row, head, query, key, table, weights):
  """Adds dot products of rows of a table, which depend on the query and the head."""
  found = jax.nn.relu(score) + (table[query % 7, head] * weights).sum(-1)
  return jnp.where(head == 1, found, found * weights[0])


def _features_defined(score, row, head, query, key, table, weights):
  found = jnp.maximum(score, 0) + table[query % 7, head] @ weights
  return jnp.where(head == 1, found, found * weights[0])


FUNCTIONS = {
    "slopes": Function(
        lambda score, row, head, query, key, slopes: score + slopes[head] * (key - query),
        (SLOPES,), lambda score, row, head, query, key, slopes: (
            score + slopes[head] * (key - query)), [(1, H, 1, 1)]),
    "captured": Function(
        lambda score, row, head, query, key: (
            score + jnp.take(SLOPES, head).astype(score.dtype) * (key - query)),
        (), lambda score, row, head, query, key: score + SLOPES[head] * (key - query),
        [(1, H, 1, 1)]),
    "kerple": Function(
        _kerple, (abs(_numbers(H, seed=3)), abs(_numbers(H, seed=4))),
        lambda score, row, head, query, key, first, second: (
            score - first[head] * jnp.log1p(second[head] * abs(query - key))),
        [(1, H, 1, 1)] * 2),
    "scales": Function(
        lambda score, row, head, query, key, rows, gate: score * rows[row] * gate[query, head],
        (1 + 0.1 * _numbers(B), _numbers(T, H)),
        lambda score, row, head, query, key, rows, gate: score * rows[row] * gate[query, head],
        [(B, 1, 1, 1), (1, H, T, 1)]),
    "keys": Function(
        lambda score, row, head, query, key, column, amount: score + amount * column[row, key],
        (_numbers(B, T), np.float32(0.7)),
        lambda score, row, head, query, key, column, amount: score + amount * column[row, key],
        [(B, 1, 1, T)]),
    "documents": Function(
        _documents, (IDS,), lambda score, row, head, query, key, ids: jnp.where(
            ids[row, query] == ids[row, key], score, 0.5 * score - 1),
        [(B, 1, T, 1)] * 2 + [(B, 1, 1, T)] * 2),
    "tokens": Function(
        lambda score, row, head, query, key, ids: score + 0.5 * (ids[query] == ids[key]),
        (TOKENS,), lambda score, row, head, query, key, ids: score + 0.5 * (ids[query] == ids[key]),
        [(1, 1, T, 1)] * 2 + [(1, 1, 1, T)] * 2),
    "scalars": Function(
        lambda score, row, head, query, key, rows, slopes, first, second: jnp.where(
            key < query, jnp.logaddexp(score, rows[row]) - slopes[head],
            first * second * abs(query - key)),
        (_numbers(B), SLOPES, np.float32(0.3), np.float32(1.5)),
        lambda score, row, head, query, key, rows, slopes, first, second: jnp.where(
            key < query, jnp.logaddexp(score, rows[row]) - slopes[head],
            first * second * abs(query - key)), [(B, 1, 1, 1), (1, H, 1, 1), (1, 1, 1, 1)]),
    "features": Function(
        _features, (_numbers(7, H, 3), _numbers(3)), _features_defined,
        [(1, H, T, 1), (1, 1, 1, 1)]),
}


def defined(name: str, scores: jax.Array, query: np.ndarray, key: np.ndarray,
            operands: tuple[jax.Array, ...]) -> jax.Array:
  """Returns scores [B, H, T, S] after a function, at positions [B or 1, T] and [B or 1, S]."""
  rows, heads = (np.arange(n) for n in scores.shape[:2])
  return FUNCTIONS[name].define(scores, rows[:, None, None, None], heads[:, None, None],
                                query[:, None, :, None], key[:, None, None], *operands)


def gpu_case(name: str) -> gpu_cases.Case:
  """A case of the GPU kernels, whose score mod has done its look-ups."""
  function = FUNCTIONS[name]
  case = gpu_cases.Case(masks.causal(), B=B, T=T, H=H, K=1, mod=function.mod(*function.operands))
  shape = B, H, T, T
  return case._replace(mod=lookups.before(case.mod.lower(shape), shape, case.dtype, case.mask))


@functools.cache
def gpu_programs() -> dict[str, tuple[Any, tuple]]:
  """The forward and all kernels of the backward, for `benchmark.static.gpu`."""
  return gpu_cases.programs_of({name: gpu_case(name) for name in FUNCTIONS})
