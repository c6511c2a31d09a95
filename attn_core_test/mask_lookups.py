# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicates of masks that look numbers up by row, head, query or key, and cases of kernels."""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import masks
from attn_core.arguments import mask_lookups
from attn_core_test import gpu_cases

B, T, H = 2, 70, 2

IDS = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)), axis=1).astype(np.int32)
KINDS = np.random.default_rng(2).integers(0, 3, (B, T)).astype(np.int8)
TOKENS = np.random.default_rng(3).integers(-2**31, 2**31, T).astype(np.int32)
TOKENS[1::3] = TOKENS[0] + 1  # which float32 cannot tell from the first token
TIMES = np.random.default_rng(4).normal(size=(B, T)).astype(np.float32)
TIMES[:, ::5] = np.nan
WEIGHTS = np.random.default_rng(7).normal(size=(B, T)).astype(np.float32)
ENDS = np.array([[3, 40], [T, 17]], np.int32)
GATES = np.random.default_rng(6).normal(size=(H, T)).astype(np.float32)
VALID = np.random.default_rng(5).random((B, T)) < 0.7


class Predicate(NamedTuple):
  """A predicate of a mask."""

  function: Callable[..., Any]  # of NumPy's arrays too
  operands: tuple[np.ndarray, ...]
  shapes: tuple[list, list, list, list]  # of the numbers of rows, queries, keys and heads

  def mask(self, *operands: Any) -> masks.Mask:
    return masks.custom(self.function, *(operands or self.operands))

  def seen(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns bool [B, H, T, S] at positions [B or 1, T] and [B or 1, S]."""
    rows, heads = (np.arange(n) for n in (B, H))
    return np.broadcast_to(self.function(
        rows[:, None, None, None], heads[:, None, None], query[:, None, :, None],
        key[:, None, None], *self.operands), (B, H, query.shape[1], key.shape[1]))


def _tokens():
  return jnp.asarray(TOKENS)


def _same_kind_or_before(row, head, query, key, kinds):
  """Images see all of themselves, and everything sees what is before it."""
  image = (kinds[row, query] == 1) & (kinds[row, key] == 1)
  return image | (key <= query)


PREDICATES = {
    "documents": Predicate(
        lambda row, head, query, key, ids: ids[row, query] == ids[row, key], (IDS,),
        ([], [(B, T)], [(B, T)], [])),
    "documents_of_a_head": Predicate(
        lambda row, head, query, key, ids: (head == 1) | (ids[row, query] == ids[row, key]), (IDS,),
        ([], [(B, T)], [(B, T)], [])),
    "tokens": Predicate(
        lambda row, head, query, key, tokens: tokens[query] != tokens[key] + 1, (TOKENS,),
        ([], [(1, T)], [(1, T)], [])),
    "windows": Predicate(
        lambda row, head, query, key, sizes, most: (query - key <= sizes[row]) & (key < most),
        (np.array([5, 30], np.int32), np.int32(60)), ([(B,)], [], [(1, T)], [])),
    "times": Predicate(
        lambda row, head, query, key, times: ~(times[row, query] < times[row, key]), (TIMES,),
        ([], [(B, T)], [(B, T)], [])),
    "valid": Predicate(
        lambda row, head, query, key, valid: valid[row, key] | (query == key), (VALID,),
        ([], [], [(B, T)], [])),
    "captured": Predicate(
        lambda row, head, query, key: jnp.asarray(VALID)[row, query] | (key < 9), (),
        ([], [(B, T)], [], [])),
    "captured_inside": Predicate(
        jax.jit(lambda row, head, query, key: _tokens()[query] >= _tokens()[key]), (),
        ([], [(1, T)], [(1, T)], [])),
    "kinds": Predicate(_same_kind_or_before, (KINDS,), ([], [(B, T)], [(B, T)], [])),
    "sums": Predicate(
        lambda row, head, query, key, table: (table[query % 7] * table[row]).sum(-1) > key - query,
        (np.random.default_rng(6).normal(size=(7, 3)).astype(np.float32),),
        ([], [(B, T)], [], [])),
    "windows_of_heads": Predicate(
        lambda row, head, query, key, sizes: query - key <= sizes[head],
        (np.array([5, 30], np.int32),), ([], [], [], [(1, H, 1, 1)])),
    "ends": Predicate(
        lambda row, head, query, key, ends: key < ends[row, head], (ENDS,),
        ([], [], [], [(B, H, 1, T)])),
    "gates": Predicate(
        lambda row, head, query, key, gates, ids: (gates[head, query] >= gates[head, key])
        & (ids[row, query] == ids[row, key]), (GATES, IDS),
        ([], [(B, T)], [(B, T)], [(1, H, T, 1), (1, H, 1, T)])),
    "gates_of_rows": Predicate(
        lambda row, head, query, key, gates: (gates[row, head, query] > 0) | (query - key < head),
        (np.random.default_rng(8).normal(size=(B, H, T)).astype(np.float32),),
        ([], [], [], [(B, H, T, 1)])),
}


def gpu_case(name: str) -> gpu_cases.Case:
  """A case of the GPU kernels, whose mask has done its look-ups."""
  mask = masks.causal() & PREDICATES[name].mask()
  return gpu_cases.Case(mask_lookups.before(mask, (B, H, T, T)), B=B, T=T, H=H, K=1)


def gpu_decode_case() -> gpu_cases.Case:
  """Decoding from a dense cache of two queries a row, at the end of the tokens."""
  queries, slots = 2, T + 2
  times = np.pad(TIMES, ((0, 0), (0, slots - T)))
  seen = masks.causal() & PREDICATES["times"].mask(times) & PREDICATES["windows_of_heads"].mask()
  mask = masks.offset(seen, T - queries)
  return gpu_cases.Case(mask_lookups.before(mask, (B, H, queries, slots)), B=B, T=queries, S=slots,
                        H=H, K=1)


@functools.cache
def gpu_programs() -> dict[str, tuple[Any, tuple]]:
  """The forward and all kernels of the backward, for `benchmark.static.gpu`; and decoding."""
  found = gpu_cases.programs_of({name: gpu_case(name) for name in PREDICATES})
  case = gpu_decode_case()
  return found | {"decode": (case.decode, (case.shapes,))}
