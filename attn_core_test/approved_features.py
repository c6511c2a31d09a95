# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes, drafts, score mods, the partitioner's rules and written values as text."""

import itertools
import types
from typing import Any, Iterator
from unittest import mock

import jax
from jax._src.core import extend_axis_env_nd
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from attn_core import (LatentOptions, MaskInfo, OperationMetadata, PagesMetadata, PagesV1, PagesV2,
                       PagesV3, attention, create_mesh, masks, score_mods)
from attn_core.autodiff import partition_rules
from attn_core.caches import allocator, drafts, latent, pages, prefixes
from attn_core.caches.paged import layouts, page_pool, validate
from attn_core.config import metadata_json
from attn_core.plan import measured
from attn_core.sharding import partitioned
from attn_core.types import AttentionMechanism
from attn_core_test.approved_text import attempt, text, together
from attn_core_test.approved_values import alternatives

TABLES = np.int32([[3, 9, 4, 20], [3, 9, 5, 21], [3, 8, 6, 22], [3, 9, 4, 7], [1, 2, 10, 11]])
COUNTS = np.int32([3, 3, 2, 3, 1])
PARENTS = np.int32([[-1, 0, 0, 1], [-1, -1, 1, 2], [-1, -1, -1, -1]])
METADATA = PagesMetadata(np.int32([[4, 0, 7], [2, 3, -1], [1, 5, 6]]), np.int32([9, 6, 11]),
                         np.int32([0, 4, 7, 8]))


def trees() -> Iterator[str]:
  """Yields the groups of requests that share pages, trees of drafts, and their checks."""
  for levels, least in itertools.product((1, 2, 3), (2, 3)):
    found = prefixes.find(TABLES, COUNTS, levels, least)
    for agrees in (np, jnp)[:1 + (levels == least == 2)]:
      tables = np.where(np.arange(4) == 1, TABLES[::-1], TABLES)
      yield f"{levels} levels of {least}: {text(found)} pages " + attempt(
          lambda f=found, xp=agrees: prefixes.pages_of_requests(f, xp)) + " agree " + "; ".join(
              attempt(lambda f=found, t=t, xp=agrees: prefixes.agree(f, xp.asarray(t), xp))
              for t in (TABLES, tables))
  good = {"page_tables": TABLES, "page_counts": COUNTS, "num_levels": 2, "min_requests": 2}
  yield from alternatives(prefixes.find, good)
  for parents in (PARENTS, PARENTS[:, ::-1], np.where(PARENTS == 2, -2, PARENTS), PARENTS[0],
                  np.where(PARENTS == 2, 3, PARENTS), PARENTS.astype(np.float32)):
    yield f"drafts {parents.tolist()}: " + "; ".join(attempt(
        lambda f=f, p=parents: f(p)) for f in (drafts.mask, drafts.depths, drafts.is_forest))
  for layout in (PagesV1, PagesV2, PagesV3):
    cache = pages.init(layout, 8, 4, pages.Heads(2, 3, 3), "float32")
    cache = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), cache)
    accepted = np.int32([[0, 1, 3, -1], [1, 2, -1, -1], [0, -1, -1, -1]])
    yield f"kept {layout.__name__}: " + attempt(together(
        lambda c=cache, a=accepted: drafts.keep(c, METADATA, a)))
  good = {"pages_metadata": METADATA, "accepted": accepted}
  yield from (f"keep {line}" for line in alternatives(
      lambda **x: drafts.keep(cache, **x), good, traced=True))
  one = PagesMetadata(TABLES[:3], np.int32([15, 14, 13]), np.int32([0, 2, 5, 9]))
  shared = one._replace(prefixes=prefixes.find(TABLES[:3], np.int32([2, 2, 1]), 2, 2))
  held = pages.init(PagesV2, 24, 4, pages.Heads(2, 3, 3), "float32")
  mask = np.asarray(drafts.mask(PARENTS))
  for name, metadata in {
      "shared": shared, "late": shared._replace(context_lens=np.int32([9, 9, 9])),
      "other pages": shared._replace(page_tables=TABLES[2:]), "drafts": one._replace(
          draft_mask=mask), "few drafts": one._replace(draft_mask=mask[:, :2, :2]),
      "flat": one._replace(draft_mask=mask[0]), "other": one._replace(draft_mask=mask[:, :3]),
      "numbers": one._replace(draft_mask=mask.astype(np.int32)), "scope": one._replace(
          scope="new"), "stripes": shared._replace(page_tables=np.stack([TABLES[:3]] * 2)),
      "a tuple": one._replace(prefixes=tuple(shared.prefixes)), **{
          f"{field} of one more": shared._replace(prefixes=shared.prefixes._replace(**{
              field: np.concatenate([x, x[:1]])}))
             for field, x in shared.prefixes._asdict().items()}}.items():
    yield f"{name}: {attempt(lambda m=metadata: layouts.checked(m))[:300]}; " + "; ".join(attempt(
        lambda f=f, m=metadata: f(held, m, 9)) for f in (validate.check, validate.flag))


def pools() -> Iterator[str]:
  """Yields an allocator that runs out of pages and evicts published ones, and pages like others."""
  state, copies = allocator.create(6, 2), None
  steps = (
      ("add a", lambda s: (allocator.add(s, "a"), None)),
      ("extend a", lambda s: allocator.extend(s, "a", 5)),
      ("publish a", lambda s: (allocator.publish(s, "a", [1, 2, 3, 4, 5]), None)),
      ("fork b", lambda s: (allocator.fork(s, "a", "b", 5), None)),
      ("extend b", lambda s: allocator.extend(s, "b", 3)),
      ("truncate a", lambda s: (allocator.truncate(s, "a", 2), None)),
      ("extend a again", lambda s: allocator.extend(s, "a", 1)),
      ("release a", lambda s: (allocator.release(s, "a"), None)),
      ("add c of a's tokens", lambda s: (allocator.add(s, "c", [1, 2, 3, 4, 9]), None)),
      ("release b", lambda s: (allocator.release(s, "b"), None)),
      ("release c", lambda s: (allocator.release(s, "c"), None)),
      ("add d of all idle", lambda s: (allocator.add(s, "d", [1, 2, 3]), None)),
      ("extend d", lambda s: allocator.extend(s, "d", 9)),
      ("publish d", lambda s: (allocator.publish(s, "d", range(11)), None)),
      ("release d before", lambda s: (allocator.release_before(s, "d", 5), None)),
      ("add e", lambda s: (allocator.add(s, "e"), None)),
      ("extend e", lambda s: allocator.extend(s, "e", 4)),
      ("extend e too far", lambda s: allocator.extend(s, "e", 9)))
  for name, step in steps:
    said = attempt(lambda f=step, s=state: f(s))
    if "Error" not in said and "OutOfPages" not in said:
      state, copies = step(state)
      said = f"free {state.num_free} owners {state.owners.tolist()} copies {copies} " + " ".join(
          f"{n}={r.pages}:{r.length}" for n, r in state.requests.items())
    yield f"{name}: {said} {text(allocator.statistics(state))}"
  yield f"digests {page_pool.next_digest(page_pool.digest_of(b'x'), [1, 2]).hex()[:12]}"
  mesh = _explicit((2, 2), ("dp", "tp"))
  for layout, spec in itertools.product((PagesV1, PagesV2, PagesV3), (
      None, P("dp", "tp"), P(("dp", "tp")), P(None, ("dp", "tp")))):
    like = jax.ShapeDtypeStruct((12, 4, 16), "bfloat16",
                                sharding=None if spec is None else NamedSharding(mesh, spec))
    for groups, heads in ((1, None), (2, pages.Heads(2, 16, 8)), (8, None)):
      yield f"like {layout.__name__} {text(spec)} {groups} {text(heads)}: " + attempt(
          lambda a=(layout, like, 8, 4), g=groups, h=heads: jax.tree.map(
              lambda x: x.shape if spec is None else text(x.sharding.spec), pages.init_like(
                  *a, groups=g, heads=h)))
  good = {"layout": PagesV2, "like": np.zeros((3, 4, 8), np.float32), "num_pages": 8,
          "page_size": 4, "heads": None, "dtype": None, "scales": None, "groups": 2}
  yield from alternatives(lambda **x: pages.init_like(**x), good, traced=True)
  good = {"batch": 3, "slots": 5, "widths": (4, 2), "dtype": "int8", "rope_dtype": "bfloat16"}
  yield from alternatives(lambda **x: latent.init(**x), good, traced=True)


def _explicit(sizes: tuple[int, ...], names: tuple[str, ...],
              kind: Any = jax.sharding.AxisType.Explicit) -> Mesh:
  devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
  return Mesh(devices, names, axis_types=(kind,) * len(sizes))


class _ByNumber:
  """A sharding over devices that are only numbers, as the partitioner has it."""

  def __init__(self, sharding: NamedSharding):
    self.shard_shape, self.sharding = sharding.shard_shape, sharding

  def devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, Any]:
    return {device.id: x for device, x in self.sharding.devices_indices_map(shape).items()}


# What the partitioner has chosen: axes of the query, by its digits.
CHOSEN = (P("digit0"), P(None, None, "digit1"), P("digit0", None, ("digit1", "digit2")),
          P(("digit2", "digit0")), P(None, "digit0", ("digit2", "digit1")), P())


def partitions() -> Iterator[str]:
  """Yields the rules by which a compiler shards primitives, and what each device computes."""
  mesh = _explicit((2, 2, 2), ("dp", "tp", "sp"), jax.sharding.AxisType.Auto)
  noted: list[str] = []
  def operation(results: Any, rule: Any, planner: Any, of: Any) -> Any:
    digits = partitioned._digits(of)
    on = Mesh(mesh.devices, digits.axis_names)
    def run(*arguments: Any) -> Any:
      noted.append(f"{rule.text} {rule.replicated} {rule.sizes}")
      for spec in CHOSEN:
        noted.append(f"  {text(spec)}: {attempt(lambda s=spec: planned(s, arguments))}")
      return [jnp.zeros(x.shape, x.dtype) for x in results]
    def planned(spec: P, arguments: Any) -> Any:
      made = lambda x, s: types.SimpleNamespace(
          shape=x.shape, dtype=x.dtype, ndim=x.ndim, sharding=_ByNumber(NamedSharding(on, s)))
      plan = planner(digits, [made(x, P() if n else spec) for n, x in enumerate(arguments)],
                     [made(x, P(None, "digit0") if n else P()) for n, x in enumerate(results)])
      shapes = [jax.ShapeDtypeStruct(NamedSharding(on, P(*[axes or None for axes in of_x])
                                                   ).shard_shape(x.shape), x.dtype)
                for x, of_x in zip(arguments, plan.arguments)]
      with extend_axis_env_nd(list(on.shape.items())):
        local = jax.make_jaxpr(plan.local)(*shapes)
      sums = [sorted(e.params["axes"]) for e in local.eqns if e.primitive.name.startswith("psum")]
      return plan.arguments, plan.results, f"sums {sums} of {[x.shape for x in local.out_avals]}"
    return run
  for name, (heads, key_heads, arguments, mapped) in {
      "plain": (8, 4, {}, 0), "one key head": (8, 1, {"softmax_aux": (8,)}, 0),
      "same heads": (4, 4, {"bias": (1, 4, 6, 6)}, 0), "mapped": (8, 2, {"bias": (4, 1, 6, 6)}, 3),
      "masks": (8, 2, {"mask": np.tri(6, dtype=bool)[None, None] | np.ones((4, 1, 1, 1), bool)}, 0),
      "segments": (8, 2, {"mask_info": MaskInfo.from_segments(
          np.arange(24, dtype=np.int32).reshape(4, 6) // 3), "dropout_prob": 0.2,
                          "dropout_rng": np.uint32([1, 2])}, 0)}.items():
    x = lambda n, k: jax.ShapeDtypeStruct((*[8] * bool(mapped), 4, 6, n, 5), "float32",
                                          sharding=NamedSharding(mesh, P()))
    arrays = {"query": x(heads, 0), "key": x(key_heads, 0), "value": x(key_heads, 0)}
    floats = {n: s for n, s in arguments.items() if type(s) is tuple}
    rest = {n: s for n, s in arguments.items() if n not in floats}
    arrays |= {n: jax.ShapeDtypeStruct(s, "float32") for n, s in floats.items()}
    def loss(arrays: Any, rest: Any = rest) -> Any:
      call = lambda a: attention(**a, mechanism="blockwise", **rest).attention_outputs
      axes = ({n: 0 if n in ("query", "key", "value") else None for n in arrays},)
      return jnp.sin(jax.vmap(call, axes)(arrays) if mapped else call(arrays)).sum()
    noted.clear()
    with (jax.set_mesh(mesh), mock.patch.object(partitioned, "operation", operation)):
      said = attempt(lambda f=loss, a=arrays: len(jax.jit(jax.grad(f)).lower(a).as_text()) > 0)
    yield f"{name}: {said}"
    yield from (f"  {line}" for line in noted)
  static = jax.tree.structure((1, 2)), "blockwise", 3
  yield f"digests {text(partition_rules._digest(static))}"
  for size in (1, 2, 12, 35, 97):
    yield f"{size}: {partitioned._primes(size)}"
  for index in (np.arange(8).reshape(2, 2, 2), np.arange(8).reshape(2, 2, 2) // 2,
                np.arange(8).reshape(2, 2, 2) % 2, np.arange(8).reshape(2, 2, 2).T,
                np.zeros((2, 2, 2), int), np.int64([[[0, 1], [1, 0]], [[2, 3], [3, 2]]])):
    yield f"axes {index.reshape(-1).tolist()}: {partitioned._axes_of_index(index, ('a', 'b', 'c'))}"


def written() -> Iterator[str]:
  """Yields values as JSON and back, and the speeds of reports."""
  mesh = create_mesh((2, 1, 1, 2, 2))
  for value in (None, True, 3, 0.5, "x", np.dtype("float32"), jnp.dtype("bfloat16"), mesh,
                P("dp", None, ("tp", "sp")), AttentionMechanism.AUTO if hasattr(
                    AttentionMechanism, "AUTO") else next(iter(AttentionMechanism)),
                (1, (2, "y")), [1, [2]], {"a": (1,), "b": {"c": None}}, {1: 2}, {3}, object,
                masks.causal(), OperationMetadata(platform="cpu").ring, np.float32(2), 1j):
    said = attempt(lambda v=value: metadata_json.encode(v, "it"))
    yield f"{text(value)[:80]}: {said}"
    if "Error" not in said:
      yield "  back " + attempt(lambda v=value: metadata_json.decode(
          metadata_json.encode(v, "it")) == v)
  for value in ({"enum": "attn_core.types:AttentionMechanism", "value": "x"},
                {"enum": "attn_core.types:X", "value": 1}, {"enum": "x", "value": 1},
                {"named_tuple": "attn_core.types:RingConfig", "fields": {"x": 1}}, {"x": 1}, {},
                {"mesh": 3}, {"dtype": "x"}, {"tuple": [1, {"tuple": []}]}):
    yield f"decode {value}: {attempt(lambda v=value: metadata_json.decode(v))}"
  result = lambda name, direction, width, seconds, **more: {
      "case": {"name": name, "width": width}, "direction": direction, "flops": 6e9,
      "seconds": seconds, "peer": False, "wrong": False, **more}
  results = [result("a", "forward", 64, 2.0), result("a", "forward", 64, 3.0),
             result("a", "forward and backward", 64, 5.0), result("b", "forward", 128, 1.0),
             result("b", "forward and backward", 128, 4.0, flops=9e9),
             result("c", "forward", 128, 0.5, peer=True),
             result("d", "forward", 64, 0.1, wrong=True)]
  good = {"times": {"data": {"environment": {"device": "TPU v5p"}, "results": results}}}
  changed = lambda **more: {"times": {"data": {**good["times"]["data"], **more}}}
  for name, report in {
      "good": good, "none": {}, "no results": {"times": {"data": {"environment": {}}}},
      "no device": changed(environment={}), "negative": changed(results=[
          result("a", "forward", 64, -1.0)]), "empty": changed(results=[]), "few": changed(
              results=results[:2]), "a list": [1], "a file": "/nowhere/x.json"}.items():
    for device, width in (("v5p", 64), ("v5p", 128), ("v5p", 96), ("h100", 64)):
      yield f"{name} {device} {width}: " + attempt(
          lambda a=(report, device, width): measured.speed(*a))
    yield f"{name}: {attempt(lambda r=report: measured.device_kind(r))}"


def mods() -> Iterator[str]:
  """Yields what constructors of score mods make of their arguments."""
  table = np.float32([[1, 2], [3, 5], [4, 7], [9, 8], [6, 0.5]])
  for name, function, good in (
      ("alibi", score_mods.alibi, {"slopes": np.float32([1, 2]), "symmetric": True}),
      ("relative", score_mods.relative, {"table": table[:4], "max_distance": 9,
                                         "bidirectional": False}),
      ("by_distance", score_mods.by_distance, {"table": table, "first": -3}),
      ("grid", score_mods.grid, {"table": np.concatenate([table] * 3), "shape": (2, 3)}),
      ("per_query", score_mods.per_query, {"x": np.ones((2, 1, 5), np.float32)}),
      ("per_key", score_mods.per_key, {"x": np.ones((2, 1, 5), np.float32)}),
      ("scale_by", score_mods.scale_by, {"x": np.ones((2, 1, 5), np.float32)}),
      ("dense", score_mods.dense, {"bias": np.ones((2, 1, 5, 7), np.float32)}),
      ("soft_cap", score_mods.soft_cap, {"cap": 0.5})):
    names = list(good)
    run = lambda f=function, leading=names[0], **x: f(x.pop(leading), **x)
    yield f"{name}({', '.join(names)}): {attempt(lambda r=run, g=good: r(**g))}"
    yield from (f"{name} {line}" for line in alternatives(run, good))
  mod = score_mods.alibi(np.float32([1, 2])) >> score_mods.soft_cap(0.5)
  for other in (mod, masks.causal(), None, 3):
    yield f"then {text(other)[:60]}: {attempt(lambda o=other: mod >> o)}"
  for shape in ((2, 5, 2, 7), (2, 5, 3, 7), (1, 4, 2, 7)):
    x = jax.ShapeDtypeStruct(shape, "float32")
    for one in (mod, score_mods.per_query(np.ones((2, 2, 5), np.float32)), score_mods.dense(
        np.ones((1, 1, 5, 1), np.float32)), 3, "alibi"):
      yield f"{shape} {text(one)[:40]}: " + attempt(lambda a=x, o=one: jax.eval_shape(
          lambda q: attention(q, q, q, score_mod=o, causal=False).attention_outputs, a))
  options = LatentOptions(4, 2, 3)
  good = {"query": np.zeros((2, 5, 3, 6), np.float32), "key": np.zeros((2, 7, 6), np.float32),
          "value": None, "layout": "bthd", "latent_options": options, "softmax_scale": None}
  up = options._replace(key_up=np.zeros((4, 3, 3), np.float32),
                        value_up=np.zeros((4, 3, 5), np.float32))
  run = lambda **x: jax.eval_shape(lambda: attention(**x).attention_outputs)
  yield from alternatives(run, good, {"latent_options": (
      up, *(options._replace(**{f: v}) for f in LatentOptions._fields
            for v in (None, 0, 3, 2.0, np.zeros((4, 3, 3))))), "layout": ("bhtd", "thd")})


FILES = {"features_trees": trees, "features_pools": pools, "features_partitions": partitions,
         "features_written": written, "features_mods": mods}
