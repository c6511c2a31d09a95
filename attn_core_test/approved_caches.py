# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches, pages, their allocator and the arguments of adapters as text."""

import functools
import itertools
from typing import Any, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import CacheMetadata, MaskInfo, PagesMetadata, PagesV1, PagesV2, PagesV3, caches
from attn_core import masks
from attn_core.caches import allocator, pages, quantize, slots as slots_lib, update
from attn_core.caches.paged import layouts, page_stripes, request_groups, slot_mapping, validate
from attn_core.caches.paged.page_stripes import Stripe
from attn_core.types import MODES
from attn_core_test.approved_text import attempt, text, together
from attn_core_test.approved_values import alternatives

B, K, D, E, SLOTS = 3, 2, 3, 5, 11
HEADS = (K, D, E)
KINDS = {"dense": (caches.dense, SLOTS), "window": (caches.window, 5)}
LAYOUTS = (PagesV1, PagesV2, PagesV3)


def numbers(*sizes: int, first: int = 1) -> np.ndarray:
  """Returns whole numbers, exact in every floating-point dtype, few of them equal."""
  return (np.arange(int(np.prod(sizes))) * 7 % 61 + first).reshape(sizes).astype(np.float32)


def new(rows: int, tokens: int, first: int = 1) -> tuple[np.ndarray, np.ndarray]:
  return numbers(rows, tokens, K, D, first=first), numbers(rows, tokens, K, E, first=first + 1)


@functools.cache
def filled(kind: str, dtype: str = "float32") -> Any:
  """Returns a cache that holds 3, 1 and 2 tokens in its rows."""
  module, slots = KINDS[kind]
  return together(lambda: module.append(
      module.init(B, slots, HEADS, dtype=dtype), *new(B, 3), [3, 1, 2]))()


def traces() -> Iterator[str]:
  """Yields caches after each of several steps."""
  for kind, dtype in itertools.product(KINDS, ("float32", "int8")):
    module, _ = KINDS[kind]
    yield f"{kind} {dtype}: {text(filled(kind, dtype))}"
    cache = filled(kind, dtype)
    for tokens, lengths in ((2, None), (4, [4, 0, 1]), (3, [0, 2, 3]), (7, [1, 6, 0]),
                            (1, [1, 0, 1])):
      cache = together(lambda c=cache, a=(*new(B, tokens, tokens), lengths), m=module: m.append(
          c, *a))()
      yield f"  {tokens} {lengths}: {text(cache)}"
      if dtype == "float32":
        view = together(lambda c=cache, m=module: m.view(c))()
        yield f"    view {text(view.positions)} {text(view.starts)} {text(view.lengths)}"
    inserted = together(lambda c=cache, m=module, d=dtype: m.insert(c, [2, 0], m.append(m.init(
        2, m is caches.dense and 4 or 5, HEADS, dtype=d), *new(2, 4), [4, 2])))()
    yield f"  inserted: {text(inserted)}"
    yield f"  indices {text(cache.indexs)}"
  for given in ((filled("dense"), 5), (filled("dense"), 2), (filled("dense"), 1)):
    ring = together(lambda g=given: caches.window.from_dense(*g))()
    yield f"ring of {given[1]}: {text(ring)}"
    for slots in (11, 4, 2):
      yield f"  back {slots}: " + attempt(together(
          lambda r=ring, n=slots: caches.window.to_dense(r, n)))


def under_jit() -> Iterator[str]:
  """Yields what numbers that are not known while tracing do: flags, and rows that are dropped."""
  for kind, (module, slots) in KINDS.items():
    held = filled(kind)
    shifted = held._replace(origins=jnp.int32([1, 0, 2]), starts=jnp.int32([1, 0, 1]))
    for name, cache in (("held", held), ("shifted", shifted)):
      append = jax.jit(lambda lengths, c=cache, m=module: m.append(c, *new(B, 9), lengths))
      for lengths in ([9, 0, 1], [8, 9, 9], [-1, 2, 10]):
        yield f"{kind} {name} append {lengths}: " + attempt(
            lambda f=append, n=lengths: f(jnp.int32(n)))
      for other in (held, shifted):
        insert = jax.jit(lambda rows, c=cache, o=other, m=module: m.insert(c, rows, o))
        for rows in ([2, 0, 1], [0, 0, 1], [3, 1, 0], [-1, 2, 1]):
          yield f"{kind} {name} insert {rows}: " + attempt(
              lambda f=insert, n=rows: f(jnp.int32(n)))
      reach = None if kind == "dense" else 3
      for metadata in (CacheMetadata(), CacheMetadata(starts=[1, 1, 2]), CacheMetadata([1, 0, 2])):
        for tokens in (new(B, 2), 2):
          yield f"{kind} {name} step {text(metadata)}: " + attempt(
              lambda a=(tokens, cache, metadata, "__prefill__", reach): _short(
                  update.update_cache(*a)))
      step = jax.jit(lambda lengths, rows, c=cache, r=reach: _short(update.update_cache(
          new(B, 2), c, CacheMetadata(lengths, slots=rows), "__insert__", r)))
      for lengths, rows in (([2, 1, 0], [1, 0, 2]), ([2, 3, 1], [0, 0, 5])):
        yield f"{kind} {name} rows {rows}: " + attempt(
            lambda f=step, a=(lengths, rows): f(*map(jnp.int32, a)))
    if kind == "window":
      yield f"dense of shifted: {attempt(lambda c=shifted: caches.window.to_dense(c, 7))}"
    else:
      yield f"ring of shifted: {attempt(lambda c=shifted: caches.window.from_dense(c, 4))}"


def steps() -> Iterator[str]:
  """Yields what an attention reads of a cache, and which metadata is refused."""
  metadatas = {
      "none": None, "lengths": CacheMetadata([2, 0, 1]), "starts": CacheMetadata(starts=[1, 0, 2]),
      "late starts": CacheMetadata(starts=[4, 1, 2]), "slots": CacheMetadata(slots=[2, 0, 1]),
      "both": CacheMetadata([1, 2, 0], [0, 1, 1]), "long": CacheMetadata([3, 1, 1]),
      "short": CacheMetadata([1, 1]), "negative": CacheMetadata([-1, 1, 1]),
      "other slots": CacheMetadata(slots=[0, 3, 1]), "twice": CacheMetadata(slots=[0, 0, 1]),
      "two slots": CacheMetadata(slots=[0, 1]), "a dict": {"lengths": [1]}}
  for kind, tokens, reach in (("dense", 2, None), ("dense", 0, 3), ("window", 2, 3),
                              ("window", 6, 2), ("window", 0, 4), ("window", 1, 5),
                              ("window", 2, None)):
    for (name, metadata), mode in itertools.product(metadatas.items(), (*update.MODES, None, "x")):
      if name not in ("none", "slots") and mode in ("__prefill__", None, "x") or (
          name in ("short", "negative", "other slots", "twice", "a dict", "two slots")
          and (kind, tokens) not in (("dense", 2), ("window", 0))) or (
              mode in ("__prefill__", "x") and tokens != 2):
        continue
      given = new(B, tokens) if tokens else 2
      yield f"{kind} {tokens or 'read'} {reach} {name} {mode}: " + attempt(
          lambda a=(given, filled(kind), metadata, mode, reach): _short(update.update_cache(*a)))
  for mode, (name, metadata), tokens in itertools.product(
      (*MODES, None), metadatas.items(), (1, 2)):
    yield f"mode {mode} {name} {tokens}: " + attempt(
        lambda a=(mode, metadata, tokens): update.mode_of(*a))
  infos = (MaskInfo(), MaskInfo.from_segments(np.zeros((B, 2), np.int32)),
           MaskInfo(q_positions=np.zeros((B, 2), np.int32)),
           MaskInfo(np.ones((B, 1, 2, SLOTS), bool)), MaskInfo(np.ones((B, 1, 1, 2), bool)))
  for info, mode, mask in itertools.product(infos, update.MODES, (
      None, masks.causal(), np.ones((B, 1, 1, 5), bool))):
    for kind in KINDS:
      said = attempt(lambda a=(filled(kind), mode, info, mask): update.check_masks_with_cache(*a))
      if said != "None":
        yield f"{kind} {mode} {text(info)} {text(mask)}: {said}"


def _short(step: Any) -> Any:
  """Returns a step without its cache's keys and values."""
  cache = step.cache._replace(key=None, value=None)
  return step._replace(cache=cache)


def concatenated() -> Iterator[str]:
  """Yields what `concatenate` makes of its arguments."""
  key, value = new(B, 2)
  good = {"query": numbers(B, 2, 4, D), "key": key, "value": value, "mask_info": None,
          "mode": "__prefill__", "cache_view": filled("dense"), "cache_metadata": None,
          "sliding_window": None}
  more = {"mask_info": (MaskInfo.from_segments(np.int32([[0, 1]] * B)), MaskInfo(
      q_positions=np.int32([[0, 1]] * B))),
          "cache_view": (filled("window"),), "cache_metadata": (CacheMetadata([1, 0, 2]),),
          "sliding_window": ((1, 0), (3, 3)), "mode": MODES}
  run = lambda **given: [x for x in caches.concatenate(**given)[:3]]
  yield from alternatives(run, good, more, traced=True)
  for mode, kind, window in itertools.product((*update.MODES, None), KINDS, (None, (1, 0))):
    yield f"{mode} {kind} {window}: " + attempt(lambda a=(mode, kind, window): run(**{
        **good, "mode": a[0], "cache_view": filled(a[1]), "sliding_window": a[2],
        "cache_metadata": CacheMetadata(slots=[2, 0, 1]) if a[0] == "__insert__" else None}))
  for given in ({"cache_view": None}, {"sliding_window": (1, 0), "cache_view": None},
                {"cache_view": None, "mask_info": MaskInfo.from_segments(np.int32([[0, 1]] * B))}):
    found = attempt(lambda g=given: caches.concatenate(**{**good, **g}).init_attention_bias())
    yield f"{list(given)}: {attempt(lambda g=given: run(**{**good, **g}))} {found}"


def arguments() -> Iterator[str]:
  """Yields what the functions of caches make of other arguments."""
  for kind, (module, slots) in KINDS.items():
    size = "slots" if kind == "dense" else "window"
    key, value = new(B, 2)
    cases = {
        "init": (lambda module=module, **given: _init(module, **given), {
            "batch": B, size: slots, "heads": HEADS, "dtype": "float32", "sharding": None}),
        "init_like": (lambda module=module, **given: module.init_like(**given), {
            "like": numbers(B, 2, K, D), size: slots, "heads": (K, D), "dtype": None}),
        "append": (module.append, {"cache": filled(kind), "key": key, "value": value,
                                   "lengths": np.int32([2, 0, 1])}),
        "insert": (module.insert, {"cache": filled(kind), "slots": np.int32([2, 0, 1]),
                                   "prefilled": filled(kind)}),
        "view": (module.view, {"cache": filled(kind)})}
    for name, (function, good) in cases.items():
      more = {"cache": tuple(filled(k, d) for k in KINDS for d in ("float32", "int8")),
              "heads": ((K, D), (K, 0), (0, D), (K, D, 0), (K, D, E, 1), (K, "x")),
              "dtype": ("int4", "float8_e4m3fn"),
              "prefilled": tuple(filled(k, d) for k in KINDS for d in ("float32", "int8"))}
      for line in alternatives(lambda f=function, **given: f(**given), good, more, traced=True):
        yield f"{kind} {name}: {line}"
  for x, dtype in itertools.product((numbers(2, 3, 4), np.zeros((1, 3), np.float32), np.float32(
      [[1e-30, -2e-30], [np.inf, 1], [np.nan, 3], [-500, 0.1]])), (
          "int8", "float8_e4m3fn", "int4")):
    yield f"quantize {text(x)} {dtype}: " + attempt(lambda a=(x, dtype): quantize.quantize(*a))
    yield "  again " + attempt(lambda a=(x, dtype): quantize.dequantize(*quantize.quantize(*a)))
    yield "  bits " + attempt(lambda a=(x, dtype): quantize.bits(quantize.quantize(*a)[0]))
    yield "  unscaled " + attempt(lambda a=(x, dtype): quantize.unscaled(quantize.bits(
        quantize.quantize(*a)[0])))
  yield f"quantized {[quantize.is_quantized(d) for d in ('int8', 'float8_e4m3fn', 'bfloat16')]}"
  array, some = numbers(3, 5, 2), numbers(3, 2, 2, first=100)
  held = jnp.asarray(array)
  yield "write " + attempt(lambda: slots_lib.write_slots(
      held, some, jnp.int32([[0, 4], [5, 1], [2, 2]])))
  yield "read " + attempt(lambda: slots_lib.read_slots(
      held, jnp.int32([[0, -1], [4, 3], [-1, -1]])))
  yield "rows " + attempt(lambda: slots_lib.write_rows(held, some, jnp.int32([2, 0, 5])))


def _init(module: Any, batch: Any, heads: Any, dtype: Any, sharding: Any, **size: Any) -> Any:
  return module.init(batch, *size.values(), heads, dtype=dtype, sharding=sharding)


# --- Pages. --------------------------------------------------------------------------------------


def allocations() -> Iterator[str]:
  """Yields the states of an allocator, step by step, and its errors."""
  for seed, (num_pages, size) in enumerate(((7, 3), (5, 4), (9, 1), (4, 8))):
    rng, state, count = np.random.default_rng(seed), allocator.create(num_pages, size), 0
    yield f"{num_pages} pages of {size}: {text(state)}"
    for _ in range(26):
      names = list(state.requests)
      name = names[rng.integers(len(names))] if names else "a0"
      choice = rng.integers(10)
      count += 1
      tokens = int(rng.integers(0, 2 * size + 2))
      action, function = {
          0: (f"add a{count}", lambda s=state, c=count: (allocator.add(s, f"a{c}"), ())),
          1: (f"fork {name} at {tokens}", lambda s=state, n=name, c=count, t=tokens: (
              allocator.fork(s, n, f"a{c}", t), ())),
          2: (f"release {name}", lambda s=state, n=name: (allocator.release(s, n), ())),
          3: (f"truncate {name} to {tokens}", lambda s=state, n=name, t=tokens: (
              allocator.truncate(s, n, t), ())),
          4: (f"release {name} before {tokens}", lambda s=state, n=name, t=tokens: (
              allocator.release_before(s, n, t), ())),
          5: (f"publish {tokens} of {name}", lambda s=state, n=name, t=tokens: (
              allocator.publish(s, n, range(t)), ())),
          6: (f"add a{count} with {tokens}", lambda s=state, c=count, t=tokens: (
              allocator.add(s, f"a{c}", range(t)), ()))}.get(
              int(choice), (f"extend {name} by {tokens}", lambda s=state, n=name, t=tokens: (
                  allocator.extend(s, n, t))))
      said = attempt(function)
      if "Error" not in said and "OutOfPages" not in said:
        state, copies = function()
        said = f"free {state.num_free} owners {state.owners.tolist()} copies {copies} " + " ".join(
            f"{n}={r.pages}:{r.length}" for n, r in state.requests.items())
      yield f"  {action}: {said}"
    yield f"  {allocator.statistics(state)}"
    yield f"  table {attempt(lambda s=state: allocator.table(s, list(s.requests), 4))}"
    yield f"  narrow {attempt(lambda s=state: allocator.table(s, list(s.requests), 1))}"
  state = allocator.extend(allocator.add(allocator.create(4, 3), "a"), "a", 4)[0]
  for name, function, good in (
      ("create", allocator.create, {"num_pages": 3, "page_size": 2}),
      ("add", allocator.add, {"allocator": state, "name": "b"}),
      ("fork", allocator.fork, {"allocator": state, "parent": "a", "name": "b", "length": 3}),
      ("extend", allocator.extend, {"allocator": state, "name": "a", "tokens": 2}),
      ("extend_all", allocator.extend_all, {"allocator": state, "tokens": {"a": 2}}),
      ("publish", allocator.publish, {"allocator": state, "name": "a", "tokens": [1, 2, 3]}),
      ("truncate", allocator.truncate, {"allocator": state, "name": "a", "length": 3}),
      ("truncate_all", allocator.truncate_all, {"allocator": state, "lengths": {"a": 3}}),
      ("release_before", allocator.release_before,
       {"allocator": state, "name": "a", "position": 3}),
      ("release", allocator.release, {"allocator": state, "name": "a"}),
      ("table", allocator.table, {"allocator": state, "names": ["a"], "width": 3})):
    for key in list(good)[1 if name != "create" else 0:]:
      more = {"name": ("a",), "parent": ("a",), "names": (["a", "a"], ["b"])}
      yield from (f"{name}: {line}" for line in alternatives(
          lambda f=function, g=good, k=key, **x: f(**{**g, **x}), {key: good[key]}, more))


TABLES, CONTEXTS, STARTS = np.int32([[4, 0], [2, 3], [1, 5]]), np.int32([6, 5, 3]), np.int32(
    [0, 2, 3, 5])
REQUESTS = PagesMetadata(TABLES, CONTEXTS, STARTS)


@functools.cache
def pool(layout: Any, dtype: str = "float32", scales: str | None = None, width: int = D) -> Any:
  """Returns pages of 4 tokens, of which some are written."""
  cache = pages.init(layout, 6, 4, pages.Heads(K, width, width), dtype, scales)
  new_dtype = jnp.dtype("float32" if scales else dtype)
  return together(lambda: pages.append(
      cache, *(numbers(9, K, width, first=n).astype(new_dtype) for n in (1, 5)),
      np.arange(9, dtype=np.int32) * 2 + 1))()


def page_functions() -> Iterator[str]:
  """Yields what the functions of pages make of their arguments."""
  for layout, (dtype, scales) in itertools.product(
      LAYOUTS, (("float32", None), ("int8", "token"), ("float8_e4m3fn", "tensor"))):
    cache = pool(layout, dtype, scales)
    key, value = (numbers(3, 7, K, D, first=n).astype(
        jnp.dtype("float32" if scales else dtype)) for n in (1, 9))
    yield f"{layout.__name__} {dtype} {scales}"
    for name, function in {
        "pages": lambda c=cache: c, "dense": lambda c=cache: pages.to_dense(c, REQUESTS),
        "dense, heads": lambda c=cache: pages.to_dense(
            c, REQUESTS, pages.Heads(1, D, D), "float32"),
        "from dense": lambda c=cache, new=(key, value): pages.from_dense(c, *new, REQUESTS),
        "copied": lambda c=cache: pages.copy_pages(c, np.int32([0, 4]), np.int32([5, 1])),
        "copied, none": lambda c=cache: pages.copy_pages(c, np.int32([1, 2, 4]), np.int32(
            [0, -1, 6])),
        "facts": lambda c=cache: (pages.page_size(c), pages.num_pages(c), pages.heads_of(c),
                                  layouts.head_axis(c), pages.dtype_of(c),
                                  layouts.has_token_scales(c), layouts.packing(dtype)),
        "taken": lambda c=cache: layouts.take(c, jnp.int32([3, 0]))}.items():
      yield f"  {name}: {attempt(function if name == 'facts' else together(function))}"
    for other in LAYOUTS:
      yield f"  to {other.__name__}: " + attempt(together(
          lambda c=cache, o=other: pages.convert(c, o, pages.Heads(K, D, D))))
  good = {"cache": pool(PagesV2), "key": numbers(3, K, D), "value": numbers(3, K, D),
          "mapping": np.int32([1, -1, 7]), "scales": None}
  yield from (f"append: {line}" for line in alternatives(pages.append, good, {
      "cache": (pool(PagesV1), pool(PagesV2, "int8", "token"), pool(PagesV3))}, traced=True))
  good = {"layout": PagesV1, "num_pages": 5, "page_size": 4, "heads": pages.Heads(K, D, E),
          "dtype": "float32", "scales": None}
  yield from (f"init: {line}" for line in alternatives(pages.init, good, {
      "layout": LAYOUTS, "heads": (pages.Heads(K, 0, E), pages.Heads(0, D, D), (K, D, D)),
      "scales": ("token", "tensor"), "dtype": ("int4",)}, traced=True))
  held = pool(PagesV1)
  yield from (f"copy: {line}" for line in alternatives(lambda **x: pages.copy_pages(held, **x), {
      "sources": np.int32([0, 1]), "targets": np.int32([2, 3])}, traced=True))


def page_numbers() -> Iterator[str]:
  """Yields slots of tokens, stripes, groups, and the checks of metadata."""
  cases = {"plain": REQUESTS, "one query": REQUESTS._replace(query_start_loc=None),
           "two": REQUESTS._replace(num_requests=2), "none": REQUESTS._replace(num_requests=0),
           "distribution": REQUESTS._replace(distribution=np.int32([1, 2, 3])),
           "hole": REQUESTS._replace(page_tables=np.int32([[4, -1], [9, 3], [1, 5]]))}
  for name, one in cases.items():
    yield f"{name}: {text(layouts.query_starts(one))} {text(layouts.rows_in_use(one))}"
    for tokens, size in ((5, 4), (3, 3)):
      yield f"  slots {tokens} {size}: " + attempt(
          lambda a=(one, size, tokens): slot_mapping.slots(*a)) + " " + attempt(
              lambda a=(one, size, tokens): slot_mapping.slots(*a, Stripe(1, 2, 4)))
  for stripe in (None, Stripe(0, 1, 4), Stripe(0, 3, 2), Stripe(2, 3, 2), Stripe(1, 2, 5)):
    at = np.arange(17)
    yield f"{text(stripe)}: held {page_stripes.held(stripe, at).tolist()} at " + str(
        page_stripes.position_of(stripe, at).tolist())
  stacked = request_groups.stack(REQUESTS, REQUESTS._replace(context_lens=CONTEXTS - 1))
  striped = REQUESTS._replace(page_tables=np.stack([TABLES % 3, TABLES % 2]))
  both = request_groups.stack(striped, striped)
  for name, one in (("one", REQUESTS), ("stacked", stacked), ("striped", striped), ("both", both)):
    yield name
    for function in (request_groups.count, request_groups.stripe_count,
                     request_groups.shapes_of_one, lambda x: request_groups.whole(x, 6),
                     lambda x: request_groups.with_pool_ids(x, 6),
                     lambda x: request_groups.joined(x, 6),
                     lambda x: request_groups.slots(pool(PagesV2), x, 10),
                     lambda x: request_groups.slots(pool(PagesV2), x, 5),
                     lambda x: request_groups.slots(pool(PagesV2), x, 5, Stripe(1, 2, 4)),
                     slot_mapping.of_one_pool, layouts.in_int32):
      yield f"  {attempt(lambda f=function, x=one: f(x))}"
    for tokens in (5, 10, 4):
      for layout in (PagesV1, PagesV2):
        yield f"  check {tokens}: " + attempt(lambda a=(pool(layout), one, tokens): validate.check(
            *a)) + " " + attempt(lambda a=(pool(layout), one, tokens): validate.flag(*a))
  good = {"page_tables": TABLES, "context_lens": CONTEXTS, "query_start_loc": STARTS,
          "num_requests": 3, "distribution": np.int32([1, 2, 3])}
  more = {"context_lens": (np.int32([1, 5, 3]), np.int32([9, 5, 3])), "query_start_loc": (
      np.int32([0, 3, 2, 5]), np.int32([1, 2, 3, 5]), np.int32([0, 2, 3, 4]))}
  run = lambda **given: (validate.check(pool(PagesV2), PagesMetadata(**given), 5),
                         validate.flag(pool(PagesV2), PagesMetadata(**given), 5))
  yield from alternatives(run, good, more)
  for given in (None, 3, {"page_tables": TABLES}, tuple(REQUESTS), PagesMetadata(None, CONTEXTS)):
    yield f"checked {text(given)}: {attempt(lambda g=given: layouts.checked(g))}"
  cache = pool(PagesV2, "int8", "token")
  for layout in LAYOUTS:
    one = pool(layout)
    for field in one._fields:
      for value in (None, 3, numbers(3), jnp.zeros((6, 4, K, D)), jnp.zeros((6, 4, 2 * K, D, 1)),
                    cache.key_scales):
        said = attempt(lambda o=one, f=field, v=value: validate.check(o._replace(**{f: v}),
                                                                      REQUESTS, 5))
        yield f"{layout.__name__}.{field}={text(value)[:30]}: {said}"
  for value in (None, jnp.zeros((6, 4, 1)), jnp.float32(2), jnp.int32(2), jnp.zeros(3)):
    yield f"scales {text(value)[:30]}: " + attempt(lambda v=value: validate.check(
        cache._replace(key_scales=v), REQUESTS, 5))


FILES = {"caches_traces": traces, "caches_under_jit": under_jit, "caches_steps": steps,
         "caches_concatenate": concatenated,
         "caches_arguments": arguments, "pages_allocator": allocations,
         "pages_functions": page_functions, "pages_numbers": page_numbers}
