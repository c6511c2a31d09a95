# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of `attention` as text: what `explain` says, and the call that a mechanism would get."""

import collections
import functools
import importlib
import itertools
from typing import Any, Iterator
from unittest import mock

import jax
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, MaskInfo, OperationMetadata, PagesMetadata,
                       PagesV1, PagesV2, PagesV3, RingConfig, attention, caches,
                       explain, masks)
from attn_core.caches import pages
from attn_core.types import AttentionOutput, Call, Operands, output_width
from attn_core_test import random_calls
from attn_core_test.approved_text import REFUSALS, attempt, error, record, text

# The package's attribute of this name is the function, not the module.
attention_module = importlib.import_module("attn_core.attention")

RANDOM = 48  # random calls
PLATFORMS = (("cpu", None), ("gpu", None), ("gpu", "8.0"), ("gpu", "9.0"), ("tpu", None))


def explained(explanation: Any) -> Iterator[str]:
  """Yields the lines of an explanation, with mechanisms that answer alike together."""
  platform = f"{explanation.platform} {explanation.capability or ''}".strip()
  yield f"{explanation.chosen or 'nothing'} runs on {platform}, {text(explanation.block_sizes)}"
  same = collections.defaultdict(list)
  for verdict in explanation.verdicts:
    if "no cache_view in pages" not in str(verdict):
      same[str(verdict)].append(verdict.mechanism)
  yield from (f"{', '.join(names)}: {said}" for said, names in same.items())
  yield from (*explanation.spread, *explanation.axes)
  yield from (f"axis {d.axis!r} does not shard dimension {d.dimension} of {d.tensor}: {d.reason}"
              for d in explanation.replicated)


def as_run(operands: Any, *, static: Any) -> AttentionOutput:
  """Returns results of the right shapes, in place of a mechanism, and notes the call."""
  NOTED.append(f"{static.implementation.name} gets {_call(static.call)}")
  NOTED.extend(f"  {name}: {text(x)}" for name, x in operands._asdict().items()
               if x is not None and jax.tree.leaves(x))
  query, call = operands.query, static.call
  if isinstance(operands, Operands):
    (rows, queries, heads, _), width, columns = (
        query.shape, output_width(operands, call.spec), operands.key.shape[1])
    cache = None
  else:
    rows, (queries, heads, _), columns = 1, query.shape, 0
    width = (pages.heads_of(operands.cache).value_width if operands.value is None
             else operands.value.shape[2])
    cache = None if operands.key is None else operands.cache
  shape = rows, heads, queries
  return AttentionOutput(
      numbers(rows, queries, heads, width, dtype=query.dtype),
      numbers(*shape, columns) if call.return_weights else None,
      numbers(*shape) if call.return_lse else None, cache)


NOTED: list[str] = []


def _call(call: Call) -> str:
  return ", ".join(text(x) for x in (call.spec, call.block_sizes, call.placement))


def noted(function: Any) -> Iterator[str]:
  """Yields the call that a mechanism gets while a function runs, and the function's results."""
  NOTED.clear()
  with mock.patch.object(attention_module, "_execute", as_run):
    result = attempt(function)
  yield from NOTED
  yield f"-> {result}"


def random_ones() -> Iterator[str]:
  """Yields random calls by shapes."""
  for seed in range(RANDOM):
    call = random_calls.make(seed)
    yield f"{seed}: {', '.join(value for _, value in call.choices)}"
    with call.context():
      try:
        found = explain(*call.operands, **call.arguments)
        yield from (f"  {line}" for line in (
            str(found).splitlines() if seed % 11 == 2 else explained(found)))
      except REFUSALS as exception:
        record(exception)
        yield f"  {error(exception)}"
        continue
      leaves, structure = jax.tree.flatten(call.operands)
      run = lambda *x, call=call, structure=structure: attention(
          *jax.tree.unflatten(structure, x), **call.arguments)
      yield from (f"  {line}" for line in noted(lambda run=run, leaves=leaves: jax.tree.map(
          lambda x: x if x.size <= 24 else jax.ShapeDtypeStruct(x.shape, x.dtype),
          jax.eval_shape(run, *leaves))))


# --- One feature at a time. ----------------------------------------------------------------------

# B, T, S, H, K, D and E are different primes, or products of them.
B, T, S, H, K, D, E = 3, 5, 7, 22, 2, 13, 17


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def operands(dtype: str = "float32", width: int = D) -> tuple[jax.ShapeDtypeStruct, ...]:
  return (shape(B, T, H, width, dtype=dtype), shape(B, S, K, width, dtype=dtype),
          shape(B, S, K, width, dtype=dtype))


# Feature -> arguments of `attention` besides query, key and value.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True, "query_offset": 2},
    "full, no offset": {"causal": False},
    "offsets": {"causal": True, "query_offset": np.array([2, 0, 1], np.int32)},
    "window": {"sliding_window": (3, 1), "query_offset": 2},
    "left": {"sliding_window": (3, 0), "causal": True, "query_offset": 2},
    "chunk": {"chunk_size": 4, "query_offset": 2},
    "segments": {"mask_info": MaskInfo.from_segments(np.zeros((B, T), np.int32),
                                                     np.zeros((1, S), np.int32))},
    "positions": {"mask_info": MaskInfo(q_positions=np.ones((B, T), np.int32)), "causal": True},
    "mask": {"mask": np.ones((1, 1, T, S), bool)},
    "mask per row": {"mask": np.ones((B, H, 1, S), bool)},
    "lengths": {"mask": masks.lengths(None, np.array([7, 3, 1], np.int32))},
    "predicate": {"mask": masks.custom(lambda b, h, q, k, n: k < n[0], np.ones(1, np.int32))},
    "predicate by head": {"mask": masks.custom(lambda b, h, q, k, n: k < n[h],
                                               np.ones(H, np.int32))},
    "predicate by pair": {"mask": masks.custom(lambda b, h, q, k, n: n[q, k],
                                               np.ones((T, S), bool))},
    "bias": {"bias": shape(1, H, T, S)}, "init_bias": {"init_bias": lambda: np.ones((1, 1, T, S),
                                                                                    np.float32)},
    "sinks": {"softmax_aux": shape(H)}, "joint sinks": {"softmax_aux": shape(H, 2)},
    "cap": {"logits_soft_cap": 30.0}, "scale": {"softmax_scale": 0.3},
    "dropout": {"dropout_prob": 0.25, "dropout_rng": np.zeros(2, np.uint32)},
    "no dropout": {"dropout_prob": 0.25, "dropout_rng": np.zeros(2, np.uint32),
                   "deterministic": True},
    "lse": {"return_lse": True}, "weights": {"return_weights": True},
    "numerator": {"normalize_output": False}, "highest": {"precision": "highest"},
    "compute": {"compute_dtype": "bfloat16"}, "half": {"compute_dtype": "float16"},
    "blocks": {"block_sizes": BlockSizes(128, 256, 64, 32)}, "memory": {"vmem_limit_bytes": 2**25},
    "optimized": {"optimized": True}, "policy": {"policy": "nothing_saveable"},
    "decoding": {"mode": "__autoregressive__"}, "prefill": {"mode": "__prefill__"}}
# Metadata of its own, or other operands.
SETTINGS: dict[str, dict[str, Any]] = {
    "softmax in bfloat16": {"runtime_softmax_dtype": "bfloat16"},
    "runtime in float16": {"runtime_dtype": "float16"}, "scaled": {"softmax_scale": 0.4},
    "drops": {"dropout_prob": 0.5}, "blocksizes": {"blocksize_q": 64, "blocksize_k": 32},
    "own blocksizes": {"operation_configs": {"blockwise": BlockSizes(16, 48)}, "blocksize_q": 64},
    "remote": {"ring": RingConfig(transfer="remote")}}


def by_feature() -> Iterator[str]:
  """Yields what mechanisms say to one feature, unless it is what they say to a plain call."""
  metadata = {f"{platform} {capability or ''}".strip(): OperationMetadata(
      platform=platform, compute_capability=capability) for platform, capability in PLATFORMS}
  plain: dict[tuple[str, str], str] = {}
  for name, (arguments, fields) in {
      **{name: (arguments, {}) for name, arguments in FEATURES.items()},
      **{f"metadata: {name}": ({}, fields) for name, fields in SETTINGS.items()}}.items():
    found: dict[tuple[str, str], str] = {}
    for (place, one), width in itertools.product(metadata.items(), (D, 64)):
      given = {"causal": False, "metadata": one.replace(**fields), **arguments}
      dtype = "float32" if fields else "bfloat16"
      found.update(_answers(f"{place} D={width}", given, operands(dtype, width)))
    yield name
    same = collections.defaultdict(lambda: collections.defaultdict(list))
    for (place, mechanism), said in found.items():
      if plain.get((place, mechanism)) != said:
        same[said][mechanism].append(place)
    for said, places in same.items():
      yield f"  {said}"
      yield from (f"    {mechanism}: {', '.join(where)}" for mechanism, where in places.items())
    plain = plain or found


def _answers(place: str, arguments: dict[str, Any],
             arrays: tuple[Any, ...]) -> Iterator[tuple[tuple[str, str], str]]:
  """Yields ((place, mechanism), its answer), and which one `auto` chooses."""
  try:
    found = explain(*arrays, **arguments)
  except REFUSALS as exception:
    record(exception)
    yield (place, "error"), error(exception)
    return
  yield (place, "auto"), f"chosen: {found.chosen}"
  for verdict in found.verdicts:
    yield (place, verdict.mechanism), str(verdict)


def rows() -> Iterator[str]:
  """Yields the rows of the table, with the limits that `python3 -m attn_core` prints."""
  from attn_core import __main__ as report
  for row in report.rows():
    yield f"{row.mechanism} on {', '.join(row.platforms)}: {row.runs}, memory {row.memory}"
    marks = collections.defaultdict(list)
    for feature, mark in row.marks.items():
      marks[mark].append(feature)
    yield from (f"  {mark}: {' '.join(features)}" for mark, features in marks.items())
    yield from (f"  refuses {limit}" for limit in row.limits)
  yield from report.text().splitlines()[-20:]


# --- Calls with numbers. -------------------------------------------------------------------------


def numbers(*sizes: int, dtype: Any = np.float32, first: int = 1) -> np.ndarray:
  """Returns whole numbers that differ from each other, exact in every dtype up to 256."""
  return (np.arange(int(np.prod(sizes))) * 7 % 61 + first).reshape(sizes).astype(dtype)


def with_numbers() -> Iterator[str]:
  """Yields the arrays and the description that a mechanism gets of calls with numbers."""
  query, key, value = numbers(B, T, H, D), numbers(B, S, K, D, first=2), numbers(B, S, K, E)
  given = {"causal": False, "metadata": OperationMetadata(platform="cpu")}
  for name, arguments in FEATURES.items():
    made = {key: _filled(x) for key, x in arguments.items()}
    call = {**given, **made}
    if any(word in name for word in ("weights", "memory")):
      call["mechanism"] = "vanilla"
    yield name
    yield from (f"  {line}" for line in noted(
        lambda call=call: attention(query, key, value, **call)))
  for name, fields in SETTINGS.items():
    call = {**given, "metadata": OperationMetadata(platform="cpu", **fields)}
    yield f"metadata: {name}"
    yield from (f"  {line}" for line in noted(
        lambda call=call: attention(query, key, value, **call)))
  for name, (arrays, arguments) in _layouts(query, key, value).items():
    yield name
    yield from (f"  {line}" for line in noted(
        lambda arrays=arrays, arguments=arguments: attention(
            *arrays, metadata=given["metadata"], **arguments)))


def _filled(x: Any) -> Any:
  return numbers(*x.shape, dtype=x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def _layouts(query: Any, key: Any, value: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
  """Returns name -> (arrays, arguments) of calls in other layouts, and with other batches."""
  swap = lambda x: x.transpose(0, 2, 1, 3)
  two = lambda x: np.concatenate([x, x[::-1]]).reshape(2, 3, *x.shape[1:])
  offsets = {"cum_seqlens_q": np.array([0, 2, 2, 5], np.int32),
             "cum_seqlens_k": np.array([0, 3, 4, 7], np.int32)}
  packed = query[0], key[0], value[0]
  return {
      "bhtd": (tuple(map(swap, (query, key, value))), {
          "layout": "bhtd", "query_offset": 2, "return_lse": True, "softmax_aux": numbers(H)}),
      "no batch": ((query[0], key[0], value[0]), {
          "query_offset": 1, "bias": numbers(H, T, S), "return_lse": True,
          "mask_info": MaskInfo.from_segments(np.arange(T, dtype=np.int32) % 2,
                                              np.arange(S, dtype=np.int32) % 2)}),
      "two batches": (tuple(map(two, (query, key, value))), {
          "query_offset": np.arange(6, dtype=np.int32).reshape(2, 3), "return_lse": True,
          "bias": numbers(1, 3, H, 1, S), "mask": np.arange(S) % numbers(2, 3, 1, T, 1) < 3}),
      "packed": (packed, {"layout": "thd", **offsets, "query_offset": 1, "return_lse": True}),
      "packed, offsets": (packed, {"layout": "thd", **offsets, "sliding_window": (1, 0),
                                   "query_offset": np.array([1, 0, 2], np.int32)}),
      "packed, full": (packed, {"layout": "thd", **offsets, "causal": False,
                                "mask": np.ones((1, T, S), bool), "bias": numbers(1, T, 1)}),
      "packed alike": ((query[0], key[0][:T], value[0][:T]), {
          "layout": "thd", "cum_seqlens_q": [0, 1, 4, 5]}),
      "no queries": ((query[:, :0], key, value), {"return_lse": True, "softmax_aux": numbers(H)}),
      "no keys": ((query, key[:, :0], value[:, :0]), {"return_lse": True, "return_weights": True,
                                                      "mechanism": "vanilla"}),
      "no rows": ((query[:0], key[:0], value[:0]), {"causal": False})}


# --- Calls with caches and pages. ----------------------------------------------------------------


def with_caches() -> Iterator[str]:
  """Yields the keys and values that queries get of a cache, and the updated cache."""
  heads = (K, D, E)
  new = numbers(B, 2, K, D), numbers(B, 2, K, E, first=3)
  query = numbers(B, 2, H, D)
  given = {"metadata": OperationMetadata(platform="cpu")}
  for (kind, module, slots), stored in itertools.product(
      (("dense", caches.dense, 11), ("window", caches.window, 5)), ("float32", "int8")):
    cache = module.append(module.init(B, slots, heads, dtype=stored), numbers(B, 3, K, D),
                          numbers(B, 3, K, E), [3, 1, 2])
    window = {"sliding_window": (3, 0)} if kind == "window" else {}
    more = {"append": {}, "lengths": {"cache_metadata": CacheMetadata([2, 0, 1])},
            "starts": {"cache_metadata": CacheMetadata(starts=[1, 0, 2])},
            "slots": {"cache_metadata": CacheMetadata([1, 2], slots=[2, 0])},
            "reads": {"read": True}, "reads, starts": {
                "read": True, "cache_metadata": CacheMetadata(starts=[0, 1, 0])},
            "past the end": {"again": 5}}
    for name, options in more.items():
      read, again = options.pop("read", False), options.pop("again", 1)
      rows = 2 if name == "slots" else B
      yield f"{kind} {stored}: {name}"
      held = cache
      for _ in range(again):
        NOTED.clear()
        arrays = (query[:rows], *((None, None) if read else (x[:rows] for x in new)))
        with mock.patch.object(attention_module, "_execute", as_run):
          try:
            output = attention(*arrays, cache_view=held, **given, **window, **options)
            held, said = output.cache_view, text(output)
          except REFUSALS as exception:
            record(exception)
            said = error(exception)
      yield from (f"  {line}" for line in (*NOTED, f"-> {said}"))


def over_pages() -> Iterator[str]:
  """Yields the calls over pages that a mechanism gets."""
  page, groups = 4, ((PagesV1, "page_attention"), (PagesV2, "ragged_page_attention_v2"),
                     (PagesV3, "ragged_page_attention_v3"))
  tables, contexts = np.int32([[4, 0], [2, 3], [1, 5]]), np.int32([6, 5, 3])
  for (layout, mechanism), (stored, scales) in itertools.product(
      groups, (("float32", None), ("int8", "token"), ("float8_e4m3fn", "tensor"))):
    cache = pages.init(layout, 6, page, pages.Heads(K, D, D), stored, scales)
    cache = pages.append(cache, numbers(9, K, D), numbers(9, K, D, first=5),
                         np.arange(9, dtype=np.int32) * 2 + 1)
    one = mechanism == "page_attention"
    starts = None if one else np.int32([0, 2, 3, 5])
    tokens = 3 if one else 5
    new = (None, None) if layout is not PagesV3 else (numbers(tokens, K, D), numbers(tokens, K, D))
    options = {"plain": {}, "window": {"sliding_window": (4, 0), "logits_soft_cap": 5.0},
               "chunk": {"chunk_size": 4, "return_lse": True}, "full": {"causal": False},
               "wrong window": {"sliding_window": (2, 2), "mask": masks.causal()},
               "lines": {"softmax_aux": numbers(H), "compute_dtype": "bfloat16"}}
    for name, given in options.items():
      yield f"{layout.__name__} {stored}: {name}"
      call = functools.partial(
          attention, numbers(tokens, H, D), *new, layout="thd", mechanism=mechanism,
          metadata=OperationMetadata(platform="cpu"), cache_view=cache,
          cache_metadata=PagesMetadata(tables, contexts, starts), **given)
      yield from (f"  {line}" for line in noted(call))


FILES = {"calls_random": random_ones, "calls_by_feature": by_feature, "calls_rows": rows,
         "calls_with_numbers": with_numbers, "calls_with_caches": with_caches,
         "calls_over_pages": over_pages}
