# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Combines all arguments of `attention` that hide keys into one `Mask`."""

from typing import NamedTuple, cast

import jax
from jax.typing import ArrayLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks import constructors, mask as mask_lib, selected
from attn_core.masks.info import MaskInfo
from attn_core.masks.mask import Mask
from attn_core.types import ArrayLayout, SlidingWindow, are_known

Shape = tuple[int, ...]


class MaskArguments(NamedTuple):
  """The arguments of `attention` that hide keys."""

  causal: bool
  sliding_window: SlidingWindow
  chunk_size: int | None
  mask: Mask | ArrayLike | None
  mask_info: MaskInfo
  query_offset: ArrayLike | None
  cum_seqlens_q: ArrayLike | None
  cum_seqlens_k: ArrayLike | None
  layout: ArrayLayout
  token_order: str | None  # `RingConfig.layout` of permuted tokens; None: tokens in their order
  columns: int  # S, or that of all shards where the call gets one of a split sequence
  reads_positions: bool = False  # whether something else than masks does


def make_mask(given: MaskArguments, shape: Shape) -> Mask:
  """Combines all arguments that hide keys, the positions outermost.

  Args:
    given: the arguments.
    shape: (B, H, T, S); in layout thd B is 1.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  batch, _, queries, keys = shape
  whole = (*shape[:3], given.columns)
  positional = _positional_mask(given.causal, given.sliding_window, given.chunk_size)
  by_position = given.reads_positions or positional != constructors.full()
  mask = positional & _explicit_mask(given.mask, given.layout, whole)
  info = _checked_info(given.mask_info, shape, whole)
  offset: int | jax.Array = 0
  has_positions = given.query_offset is not None or info.q_positions is not None
  if given.layout == "thd":
    _check_token_order(given.token_order)
    packed = _packed_info(given.cum_seqlens_q, given.cum_seqlens_k, (queries, keys),
                          by_position and not has_positions)
    _check_one_offset(given.query_offset, info)
    if given.query_offset is not None:
      sequences = len(cast(checks.Array, given.cum_seqlens_q)) - 1  # checked by `_packed_info`
      offset = _offset(given.query_offset, sequences)
    info, offset = _join_packed(info, packed, offset), 0
  else:
    _check_one_offset(given.query_offset, info)
    if given.query_offset is not None:
      offset = _offset(given.query_offset, batch)
    checks.require(
        not by_position or queries == keys or has_positions or 0 in (queries, keys),
        "query_offset and mask_info.q_positions", f"None for both with {queries} queries and "
        f"{keys} keys", "one of them, to say where the queries stand among the keys (query_offset: "
        f"0 for the top left, {keys - queries} for the bottom right), or "
        + ("no score_mod that reads positions" if given.reads_positions else "causal=False"
           if given.causal else "nothing that depends on positions")
        # Heads that stand where tokens do: more query heads than key heads.
        + ("; layout='bhtd' for arrays [B, H, T, D]"
           if given.layout == "bthd" and are_known(queries, keys) and 0 < keys < queries
           and queries % keys == 0 else ""))
  mask = info.to_mask(mask)
  if not (isinstance(offset, int) and offset == 0):
    mask = constructors.offset(mask, offset)
  _check_mask_arrays(mask, shape, whole)
  return selected.fitted(mask, whole)


def _positional_mask(causal: bool, sliding_window: SlidingWindow, chunk_size: int | None) -> Mask:
  """Combines the masks that compare positions only."""
  mask = constructors.causal() if causal else constructors.full()
  window = checks.window(sliding_window)
  if window != (None, None):
    mask = mask & constructors.window(*window)
  size = checks.chunk_size(chunk_size)
  return mask if size is None else mask & constructors.chunk(size)


def _explicit_mask(mask: Mask | ArrayLike | None, layout: ArrayLayout, shape: Shape) -> Mask:
  """Converts `mask`, a mask value or a boolean array."""
  if mask is None:
    return constructors.full()
  if isinstance(mask, Mask):
    return mask
  rank = 3 if layout == "thd" else 4
  expected = ("a Mask value, or a bool array (True = visible) "
              + ("[H or 1, T or 1, S or 1]" if rank == 3 else "[B or 1, H or 1, T or 1, S or 1]")
              + "; a 0/1 mask of another dtype is `mask.astype(bool)`, an additive float mask is a "
              "bias, a padding mask [B, S] goes through MaskInfo.from_attention_mask, a function "
              "through masks.custom")
  array = checks.array("mask", mask, expected)
  checks.require(array.dtype == bool and array.ndim == rank, "mask", checks.describe(array),
                 expected)
  array = array[None] if rank == 3 else array
  checks.broadcastable("mask", array, shape, "[B, H, T, S]")
  return constructors.dense(array)


def _checked_info(info: MaskInfo, shape: Shape, whole: Shape) -> MaskInfo:
  """Returns mask_info with int32 arrays, checked by the names the caller gave them.

  Args:
    info: the caller's.
    shape: (B, H, T, S).
    whole: the same with all columns of a boolean mask.
  """
  batch, _, queries, keys = shape
  for name, letter, length in (("q_segment_ids", "T", queries), ("kv_segment_ids", "S", keys),
                               ("q_positions", "T", queries), ("kv_positions", "S", keys)):
    if getattr(info, name) is not None:
      expected = f"int32 [B or 1, {letter}] = [{batch}, {length}]"
      x = checks.int32(f"mask_info.{name}", getattr(info, name), expected)
      checks.require(x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == length,
                     f"mask_info.{name}", checks.describe(x), expected)
      info = info._replace(**{name: x})
  if info.attention_mask is not None:
    name, expected = "mask_info.attention_mask", (
        "bool [B or 1, H or 1, T or 1, S or 1], True = visible; a 0/1 mask of another dtype is "
        "`mask.astype(bool)`, a padding mask [B, S] goes through MaskInfo.from_attention_mask, an "
        "additive float mask is a bias")
    mask = checks.array(name, info.attention_mask, expected)
    checks.require(mask.dtype == bool, name, checks.describe(mask), expected)
    if mask.shape[-1:] == (queries,) != whole[-1:]:
      expected += ("; with a cache S counts its slots, and padding before the tokens of a row is "
                   "cache_metadata=CacheMetadata(starts=...)")
    checks.broadcastable(name, mask, whole, f"{expected}; [B, H, T, S]")
  return info


def _check_token_order(order: str | None) -> None:
  checks.require(order is None, "layout", f"'thd' with metadata.ring.layout={order!r}",
                 "ring.layout 'contiguous', as cum_seqlens_q counts tokens in their own order; or "
                 "layout 'bthd' with the segment ids and positions of MaskInfo.from_cu_seqlens, "
                 "put through to_layout")


def _check_one_offset(query_offset: ArrayLike | None, info: MaskInfo) -> None:
  checks.require(query_offset is None or info.q_positions is None, "query_offset",
                 "mask_info.q_positions as well",
                 "one of the two: both say where the queries stand")


def _packed_info(cum_seqlens_q: ArrayLike | None, cum_seqlens_k: ArrayLike | None,
                 lengths: tuple[int, int], needs_positions: bool) -> MaskInfo:
  """Returns segment ids and positions of packed sequences.

  Args:
    cum_seqlens_q: int32 [B + 1], offsets of the queries.
    cum_seqlens_k: int32 [B + 1], offsets of the keys; None: those of the queries.
    lengths: (total number of queries, of keys).
    needs_positions: whether positions matter and the caller gave none.
  """
  queries, keys = lengths
  checks.require(cum_seqlens_q is not None, "cum_seqlens_q", "None with layout='thd'",
                 "int32 [B + 1] offsets of the packed sequences")
  q_offsets = checks.cum_seqlens("cum_seqlens_q", cum_seqlens_q, queries)
  if cum_seqlens_k is None:
    checks.require(keys == queries, "cum_seqlens_k", f"None with {queries} queries and {keys} keys",
                   "the offsets of the keys, since they are not those of the queries")
    return MaskInfo.from_cu_seqlens(q_offsets, queries)
  k_offsets = (q_offsets if cum_seqlens_k is cum_seqlens_q and keys == queries else
               checks.cum_seqlens("cum_seqlens_k", cum_seqlens_k, keys))
  checks.require(k_offsets.shape == q_offsets.shape, "cum_seqlens_k", checks.describe(k_offsets),
                 f"as many sequences as cum_seqlens_q, {checks.describe(q_offsets)}")
  checks.require(not needs_positions or _same_offsets(q_offsets, k_offsets), "query_offset",
                 "None with cum_seqlens_k of their own",
                 "where the queries of each sequence stand among its keys: int or int32 [B]; or "
                 "leave cum_seqlens_k out where both are packed alike")
  return MaskInfo.from_cu_seqlens(q_offsets, queries, k_offsets, keys)


def _same_offsets(first: checks.Array, second: checks.Array) -> bool:
  """Tells whether two arrays of offsets are known to be equal."""
  if first is second:
    return True
  traced = any(isinstance(x, jax.core.Tracer) for x in (first, second))
  return not traced and np.array_equal(first, second)


def _join_packed(info: MaskInfo, packed: MaskInfo, offset: int | jax.Array) -> MaskInfo:
  """Completes the caller's mask_info by that of packed sequences, and adds the query offset."""
  for name in ("q_segment_ids", "kv_segment_ids"):
    checks.require(getattr(info, name) is None, f"mask_info.{name}", "cum_seqlens_q as well",
                   "one of the two: offsets already say which tokens belong together")
  info = MaskInfo(*[mine if mine is not None else theirs for mine, theirs in zip(info, packed)])
  assert packed.q_segment_ids is not None and info.q_positions is not None
  if not isinstance(offset, int):
    offset = offset[jnp.minimum(jnp.maximum(packed.q_segment_ids, 0), offset.shape[0] - 1)]
  return info._replace(q_positions=info.q_positions + offset)


def _offset(offset: ArrayLike, batch: int) -> int | jax.Array:
  """Returns a static int, or int32 [B or 1]."""
  # Positions are added to it and must stay int32.
  expected = (f"an int, or int32 [{batch}] with one offset per batch row (tokens), below 2**30 in "
              "magnitude")
  if isinstance(offset, (int, np.integer)) and not isinstance(offset, bool):
    return checks.integer("query_offset", offset, expected, lambda x: abs(x) < 2**30)
  array = checks.int32("query_offset", offset, expected)
  checks.require(array.shape in ((), (1,), (batch,)), "query_offset", checks.describe(array),
                 expected)
  if isinstance(array, np.ndarray):
    checks.require((abs(array.astype(np.int64)) < 2**30).all(), "query_offset", array, expected)
  # Not a numpy array, which a traced number could not index.
  return jnp.asarray(array).reshape(-1)


def _check_mask_arrays(mask: Mask, shape: Shape, whole: Shape) -> None:
  """Checks that every array of the mask fits [B, H, T, S] by its role; `whole`: of all columns."""
  batch, _, queries, keys = shape
  expected: dict[str, Shape] = {
      mask_lib.QUERY: (batch, queries), mask_lib.KEY: (batch, keys), mask_lib.BATCH: (batch,)}
  dimensions = {mask_lib.QUERY: "[B or 1, T]", mask_lib.KEY: "[B or 1, S]",
                mask_lib.BATCH: "[B or 1]"}
  for x, role in zip(jax.tree.leaves(mask), mask_lib.leaf_roles(mask), strict=True):
    if role == mask_lib.DENSE:
      checks.broadcastable("a boolean array of the mask", x, whole, "[B, H, T, S]")
    elif role != mask_lib.WHOLE:
      full = expected[role]
      checks.require(x.ndim == len(full) and x.shape[0] in (1, batch) and x.shape[1:] == full[1:],
                     f"mask: an array per {role} (segment ids, positions, lengths or offsets)",
                     checks.describe(x), f"int32 {dimensions[role]} = {list(full)}")
