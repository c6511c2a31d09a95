# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Score mods stated twice: as values of the library, and number by number."""

import math
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp
import numpy as np

from attn_core import masks, score_mods

B, T, H, K, D = 2, 13, 4, 2, 5
IDS = np.random.default_rng(3).integers(0, 3, (B, T)).astype(np.int32)


class ModCase(NamedTuple):
  """A score mod with arrays, and what it computes."""

  arrays: dict[str, tuple[int, ...]]  # name -> shape
  make: Callable[..., score_mods.ScoreMod]  # of the arrays by name
  # (score, b, h, query position, key position, row, column, arrays) -> the score after it
  number: Callable[..., Any]


def bucket(distance: int, buckets: int, most: int, both: bool) -> int:
  """Returns T5's bucket of key position - query position, by its definition."""
  first = 0
  if both:
    buckets //= 2
    first, distance = (buckets if distance > 0 else 0), abs(distance)
  else:
    distance = max(-distance, 0)
  exact = buckets // 2
  if distance < exact:
    return first + distance
  share = math.log(distance / exact) / math.log(most / exact)
  return first + min(exact + int(share * (buckets - exact)), buckets - 1)


def _clip(x: int, most: int) -> int:
  return max(0, min(x, most))


def _grid(q: int, k: int, height: int, width: int) -> int:
  row = _clip(q // width - k // width + height - 1, 2 * height - 2)
  return row * (2 * width - 1) + _clip(q % width - k % width + width - 1, 2 * width - 2)


def same_document(score, batch, head, query, key, weights, ids):
  """Returns scores of a custom score mod that gathers from floats and from integers."""
  known = ids[batch, jnp.clip(key, 0, T - 1)] > 0
  return score * jnp.cos(weights[head]) + jnp.where(
      known, weights[head] * (query - key).astype(score.dtype), 0.1 * score * score)


CASES = {
    "alibi": ModCase(
        {"slopes": (H,)}, lambda slopes: score_mods.alibi(slopes),
        lambda x, b, h, q, k, t, s, a: x + a["slopes"][h] * (k - q)),
    "alibi_symmetric_per_row": ModCase(
        {"slopes": (B, H)}, lambda slopes: score_mods.alibi(slopes, symmetric=True),
        lambda x, b, h, q, k, t, s, a: x - a["slopes"][b, h] * abs(k - q)),
    "relative": ModCase(
        {"table": (8, H)}, lambda table: score_mods.relative(table, max_distance=9),
        lambda x, b, h, q, k, t, s, a: x + a["table"][bucket(k - q, 8, 9, True), h]),
    "relative_causal_one_head": ModCase(
        {"table": (6, 1)},
        lambda table: score_mods.relative(table, max_distance=11, bidirectional=False),
        lambda x, b, h, q, k, t, s, a: x + a["table"][bucket(k - q, 6, 11, False), 0]),
    "by_distance": ModCase(
        {"table": (5, H)}, lambda table: score_mods.by_distance(table),
        lambda x, b, h, q, k, t, s, a: x + a["table"][_clip(k - q + 2, 4), h]),
    "by_distance_causal": ModCase(
        {"table": (9, H)}, lambda table: score_mods.by_distance(table, -8),
        lambda x, b, h, q, k, t, s, a: x + a["table"][_clip(k - q + 8, 8), h]),
    "grid": ModCase(
        {"table": (5 * 9, H)}, lambda table: score_mods.grid(table, (3, 5)),
        lambda x, b, h, q, k, t, s, a: x + a["table"][_grid(q, k, 3, 5), h]),
    "per_query": ModCase(
        {"x": (B, H, T)}, lambda x: score_mods.per_query(x),
        lambda x, b, h, q, k, t, s, a: x + a["x"][b, h, t]),
    "per_key": ModCase(
        {"x": (B, 1, T)}, lambda x: score_mods.per_key(x),
        lambda x, b, h, q, k, t, s, a: x + a["x"][b, 0, s]),
    "scale_by_query": ModCase(
        {"x": (1, 1, T)}, lambda x: score_mods.scale_by(x),
        lambda x, b, h, q, k, t, s, a: x * a["x"][0, 0, t]),
    "scale_by_head": ModCase(
        {"x": (1, H, 1)}, lambda x: score_mods.scale_by(x),
        lambda x, b, h, q, k, t, s, a: x * a["x"][0, h, 0]),
    "dense": ModCase(
        {"bias": (1, H, T, T)}, lambda bias: score_mods.dense(bias),
        lambda x, b, h, q, k, t, s, a: x + a["bias"][0, h, t, s]),
    "soft_cap": ModCase(
        {}, lambda: score_mods.soft_cap(0.8),
        lambda x, b, h, q, k, t, s, a: 0.8 * np.tanh(x / 0.8)),
    "custom": ModCase(
        {"x": (H,)}, lambda x: score_mods.custom(same_document, x, IDS),
        lambda x, b, h, q, k, t, s, a: x * np.cos(a["x"][h]) + (
            a["x"][h] * (q - k) if IDS[b, _clip(k, T - 1)] > 0 else 0.1 * x * x)),
}
ADDITIVE = ("alibi", "alibi_symmetric_per_row", "relative", "relative_causal_one_head",
            "by_distance", "by_distance_causal", "grid", "per_query", "per_key", "dense")
POSITIONED = ("alibi", "relative", "by_distance", "grid", "custom")


def composed(*names: str) -> ModCase:
  """Returns the composition of cases, in this order; array x of case n is named x.n."""
  cases = [CASES[name] for name in names]

  def of(arrays: dict, n: int) -> dict:
    return {name.partition(".")[0]: x for name, x in arrays.items() if name.endswith(f".{n}")}

  def make(**arrays):
    mod = cases[0].make(**of(arrays, 0))
    for n, case in enumerate(cases[1:], 1):
      mod = mod >> case.make(**of(arrays, n))
    return mod

  def number(x, *where):
    *where, arrays = where
    for n, case in enumerate(cases):
      x = case.number(x, *where, of(arrays, n))
    return x

  return ModCase({f"{name}.{n}": shape for n, case in enumerate(cases)
                  for name, shape in case.arrays.items()}, make, number)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).normal(size=shape)


def arrays_of(case: ModCase, seed: int = 0) -> dict[str, np.ndarray]:
  return {name: numbers(*shape, seed=seed + n) for n, (name, shape) in enumerate(
      case.arrays.items())}


def by_hand(case: ModCase, scores: np.ndarray, arrays: dict, positions: tuple | None = None):
  """Returns all scores after the score mod, number by number.

  Args:
    case: the score mod.
    scores: [B, H, T, S].
    arrays: those of the case.
    positions: of queries [B, T] and keys [B, S]; None: rows and columns.
  """
  found = np.zeros(scores.shape)
  for b, h, t, s in np.ndindex(scores.shape):
    q, k = (t, s) if positions is None else (int(positions[0][b, t]), int(positions[1][b, s]))
    found[b, h, t, s] = case.number(scores[b, h, t, s], b, h, q, k, t, s, arrays)
  return found


def random_mask(rng: np.random.Generator) -> masks.Mask:
  """Returns a mask of the algebra."""
  chosen = (masks.causal(), masks.window(4, 2), masks.chunk(5), masks.full(),
            masks.prefix(3) | masks.causal(), masks.segments(np.sort(IDS, 1)),
            masks.lengths(np.array([13, 6], np.int32), np.array([9, 13], np.int32)))
  first, second = rng.choice(len(chosen), 2)
  return chosen[first] & chosen[second] if rng.random() < 0.5 else chosen[first]
