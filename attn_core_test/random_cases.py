# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random whole calls of `attention`, as property cases: many features at once, and odd numbers.

The rows of a covering array say which features a call has: in any COVER rows after each other,
every two features occur together, each without the other, and neither. Dimensions are distinct
primes, positions and hidden keys differ between the rows of a batch, and keys that are hidden from
all hold NaN or infinity.
"""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attn_core import MaskInfo, masks
from attn_core_test import property_cases
from attn_core_test.property_cases import Case, Shape

FEATURES = ("causal", "window", "segments", "dense", "bias", "sinks", "cap", "dropout", "scale",
            "huge")
COVER = 6
# Of COVER numbers, the columns with half of them set that begin with one not set: any two differ,
# overlap and leave one free (Kleitman and Spencer).
_COLUMNS = [column for column in itertools.product((0, 1), repeat=COVER)
            if sum(column) == COVER // 2 and not column[0]]
_RNG = np.array([7, 11], np.uint32)
HEADS = ((4, 2), (6, 2), (6, 3), (3, 3), (5, 1))


class RandomCase(NamedTuple):
  """A property case and its arrays: as given, and with finite numbers for what is hidden."""

  case: Case
  arrays: dict[str, Any]
  clean: dict[str, Any]


def features_of(seed: int) -> set[str]:
  """Returns the features of a call: all for a negative seed, else a row of the covering array."""
  if seed < 0:
    return set(FEATURES)
  order = np.random.default_rng([0, seed // COVER]).permutation(len(FEATURES))
  return {FEATURES[i] for column, i in zip(_COLUMNS, order) if column[seed % COVER]}


def make(seed: int, without: frozenset[str] = frozenset(), dtype: str = "float64",
         shape: Shape | None = None) -> RandomCase:
  """Returns the call of a seed.

  Args:
    seed: negative: with all features.
    without: features that the call does not have.
    dtype: of the arrays.
    shape: None: a random one.
  """
  rng = np.random.default_rng([1, seed + 1000])
  features = features_of(seed) - without
  shape = shape or _shape(rng)
  hidden = rng.integers(0, shape.S, shape.B)  # of each row of the batch, a key that none sees
  rules, arguments, positions = _masks(rng, features, shape, hidden)
  floats = {}
  if "bias" in features:
    pairs = (shape.B, shape.H, shape.T, shape.S)
    kept = rng.permutation([True, True, False, False]) if rng.random() < 0.7 else [True] * 4
    floats["bias"] = tuple(n if keep else 1 for n, keep in zip(pairs, kept))
  if "sinks" in features:
    floats["softmax_aux"] = (shape.H,) if rng.random() < 0.5 else (shape.H, 3)
  if "cap" in features:
    arguments["logits_soft_cap"] = float(rng.uniform(0.5, 3))
  if "scale" in features:
    arguments["softmax_scale"] = float(rng.uniform(-0.9, -0.2))
  if "dropout" in features:
    arguments.update(dropout_prob=0.3, dropout_rng=_RNG, deterministic=False)
  case = Case(f"random_{seed}", shape, arguments,
              lambda *at: all(rule(*at) for rule in rules), floats,
              positions if "dropout" in features else None)
  clean = property_cases.operands(case, dtype, seed + 1000)
  if "huge" in features:  # in one row of the batch
    clean["query"] = clean["query"].at[-1].multiply(100 if dtype == "float64" else 10)
  arrays = dict(clean)
  for name in ("key", "value"):
    for row, key in enumerate(hidden):
      number = (np.nan, np.inf, -np.inf)[rng.integers(3)]
      arrays[name] = arrays[name].at[row, key].set(jnp.asarray(number, dtype))
  return RandomCase(case, arrays, clean)


def _shape(rng: np.random.Generator) -> Shape:
  heads, key_heads = HEADS[rng.integers(len(HEADS))]
  T, S, D, E = (int(x) for x in rng.choice((7, 11, 13, 17), 4, replace=False))
  return Shape(int(rng.integers(2, 4)), T, S, heads, key_heads, D, E)


def _masks(rng: np.random.Generator, features: set[str], shape: Shape,
           hidden: np.ndarray) -> tuple[list, dict[str, Any], np.ndarray]:
  """Returns what a query sees, as rules (b, h, t, s) -> bool, arguments, and query positions."""
  B, T, S = shape.B, shape.T, shape.S
  arguments: dict[str, Any] = {"causal": False}
  at = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  rules = []
  if "causal" in features or "window" in features:
    offset = rng.integers(-2, max(3, S - T + 3), B).astype(np.int32)
    at, arguments["query_offset"] = at + offset[:, None], offset
  if "causal" in features:
    arguments["causal"] = True
    rules.append(lambda b, h, t, s: s <= at[b, t])
  if "window" in features:
    left, right = map(int, rng.integers(2, 7, 2))
    if rng.random() < 0.5:
      arguments["sliding_window"] = (left, right)
      rules.append(lambda b, h, t, s: -left <= s - at[b, t] <= right)
    else:
      arguments["chunk_size"] = left
      rules.append(lambda b, h, t, s: s // left == at[b, t] // left)
  keys = np.sort(rng.integers(0, 2, (B, S)), 1) if "segments" in features else np.zeros((B, S))
  queries = np.sort(rng.integers(0, 2, (B, T)), 1) if "segments" in features else np.zeros((B, T))
  keys, queries = keys.astype(np.int32), queries.astype(np.int32)
  keys[np.arange(B), hidden] = -1
  queries[0, rng.integers(T)] = -1  # sees nothing
  arguments["mask_info"] = MaskInfo.from_segments(queries, keys)
  rules.append(lambda b, h, t, s: queries[b, t] == keys[b, s] >= 0)
  if "dense" in features:
    seen = rng.random((B, shape.H, T, S)) < 0.7
    prefix = int(rng.integers(1, 5))
    arguments["mask"] = masks.dense(seen) | masks.prefix(prefix)
    rules.append(lambda b, h, t, s: seen[b, h, t, s] or s < prefix)
  return rules, arguments, at
