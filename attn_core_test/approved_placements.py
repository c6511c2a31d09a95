# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls on meshes as text: which axes shard what, by rules and by the types of arrays."""

import itertools
from typing import Any, Iterator

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3, PartitionAxis,
                       RingConfig, attention, caches, explain)
from attn_core.caches.paged import request_groups
from attn_core_test import approved_calls, random_calls
from attn_core_test.approved_text import REFUSALS, error, record, text

RULES = {"default": PartitionAxis(), "batch sp": PartitionAxis(batch_axis=("sp", "dp")),
         "heads dp": PartitionAxis(head_axis=("tp", "dp"), kv_head_axis="dp", batch_axis="fsdp"),
         "unknown": PartitionAxis(batch_axis="rows", head_axis=None, kv_head_axis=None)}
SIZES = {"dp=2 tp=2": (2, 1, 1, 2, 1), "fsdp=2 tp=4": (1, 2, 1, 4, 1), "tp=3": (1, 1, 1, 3, 1),
         "dp=2 tp=2 sp=2": (2, 1, 1, 2, 2), "sp=8": (1, 1, 1, 1, 8), "dp=3 ep=2": (3, 1, 2, 1, 1)}


def placements() -> Iterator[str]:
  """Yields how a mesh shards a call, by its rules and the call's shape."""
  shapes = {"6 rows, 12 of 4 heads": (6, 16, 12, 4), "4 rows, 6 of 2 heads": (4, 24, 6, 2),
            "2 rows, 8 of 8 heads": (2, 8, 8, 8)}
  for index, ((mesh_name, sizes), (rules_name, rules)) in enumerate(
      itertools.product(SIZES.items(), RULES.items())):
    devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
    kinds = (AxisType.Auto,) * 5
    mesh = Mesh(devices, random_calls.AXES, axis_types=kinds)
    asked = (("vanilla", "cpu"), ("ring", "tpu"), ("flash_attn2", "tpu"),
             ("autoregressive_decodeattn", "gpu"), ("ring", "cpu"))
    for (shape_name, (rows_, tokens, heads, key_heads)), (mechanism, platform) in list(zip(
        itertools.cycle(shapes.items()), asked))[index % 2::2]:
      x = approved_calls.shape(rows_, tokens, heads, 64, dtype="bfloat16")
      key = approved_calls.shape(rows_, tokens, key_heads, 64, dtype="bfloat16")
      metadata = OperationMetadata(platform=platform, mesh=mesh, partition_axis=rules,
                                   ring=RingConfig("ulysses" if rows_ == 2 else "ring"))
      yield f"{mesh_name}, {rules_name}, {mechanism} on {platform}, {shape_name}"
      run = lambda q, k, m=mechanism, given=metadata: attention(q, k, k, mechanism=m,
                                                                metadata=given)
      try:
        found = explain(x, key, key, mechanism=mechanism, metadata=metadata)
        yield from (f"  {line}" for line in (*found.spread, *found.axes))
      except REFUSALS as exception:
        record(exception)
        yield f"  {error(exception)}"
        continue
      if found.chosen:
        yield from (f"  {line}" for line in approved_calls.noted(
            lambda run=run, x=x, key=key: jax.eval_shape(run, x, key)) if "gets" in line)


def _answered(arrays: tuple[Any, ...], arguments: dict[str, Any]) -> Iterator[str]:
  """Yields what shards a call, and what its mechanism gets."""
  try:
    found = explain(*arrays, **arguments)
    yield from approved_calls.explained(found)
  except REFUSALS as exception:
    record(exception)
    yield error(exception)
    return
  if found.chosen:
    leaves, structure = jax.tree.flatten(arrays)
    yield from approved_calls.noted(lambda: jax.eval_shape(lambda *x: attention(
        *jax.tree.unflatten(structure, x), **arguments).attention_outputs, *leaves))


def _explicit(names: str, sizes: tuple[int, ...]) -> Mesh:
  devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
  return Mesh(devices, tuple(names.split()), axis_types=(AxisType.Explicit,) * len(sizes))


def typed() -> Iterator[str]:
  """Yields calls whose arrays say in their types how Explicit axes shard them."""
  mesh = _explicit("dp tp sp", (2, 2, 2))
  made = lambda shape, spec: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(
      mesh, spec))
  for of_query, of_key in (
      (P("dp"), P("dp")), (P(None, None, "tp"), P(None, None, "tp")), (P("dp", "sp", "tp"),) * 2,
      (P(("tp", "dp")), P(("tp", "dp"))), (P("dp"), P("tp")), (P("dp", None, "tp"), P("dp")),
      (P(None, None, ("dp", "tp")), P(None, None, "dp")), (P(), P(None, "sp")),
      (P(None, None, None, "tp"), P()), (P("sp", None, "dp"), P("sp", None, "dp")), (P(), P())):
    for mechanism, platform in (("auto", "cpu"), ("vanilla", "tpu"), ("ring", "gpu"),
                                ("autoregressive_decodeattn", "tpu")):
      arrays = (made((4, 16, 8, 64), of_query), made((4, 16, 4, 64), of_key),
                made((4, 16, 4, 64), of_key))
      yield f"{text(of_query)} {text(of_key)} {mechanism} on {platform}"
      with jax.set_mesh(mesh):
        lines = list(_answered(arrays, {"mechanism": mechanism, "metadata": OperationMetadata(
            platform=platform)}))
      yield from (f"  {line}" for line in lines
                  if "gets" in line or "Error" in line or "over " in line or "->" in line)


def pages_on_meshes() -> Iterator[str]:
  """Yields calls over pages on meshes, by rules and by the types of the pages."""
  tables = np.arange(8, dtype=np.int32).reshape(2, 4)
  one = PagesMetadata(tables, np.int32([9, 5]), np.int32([0, 2, 3]))
  two = request_groups.stack(one, one)
  striped = one._replace(page_tables=np.stack([tables, tables]))
  both = request_groups.stack(striped, striped)
  for kind in (AxisType.Auto, AxisType.Explicit):
    for (name, sizes), (meta_name, metadata, groups, stripes) in itertools.product(
        {"dp=2 tp=2": (2, 2, 1), "tp=4": (1, 4, 1), "dp=2 sp=2": (2, 1, 2), "sp=2": (1, 1, 2)}
        .items(), (("one", one, 1, 1), ("two", two, 2, 1), ("striped", striped, 1, 2),
                   ("both", both, 2, 2))):
      devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
      mesh = Mesh(devices, ("dp", "tp", "sp"), axis_types=(kind,) * 3)
      specs = (None,) if kind == AxisType.Auto else (None, ("dp", None), (None, "tp"), ("dp", "tp"),
                                                     (("dp", "sp"), None))
      for layout, spec in itertools.product((PagesV1, PagesV2, PagesV3), specs):
        if layout is not PagesV2 and (spec not in (None, ("dp", "tp")) or meta_name == "both"
                                      or name in ("tp=4", "sp=2")):
          continue
        yield f"{kind.name} {name} {meta_name} {layout.__name__} {spec}"
        lines = _over_pages(mesh, layout, metadata, spec, 8 * groups * stripes)
        yield from (f"  {line}" for line in lines if "gets" in line or "Error" in line
                    or "over " in line or "does not shard" in line)


def _over_pages(mesh: Mesh, layout: Any, metadata: Any, spec: Any, pool: int) -> list[str]:
  """Returns what is said about a call whose pages have a sharding (pool, heads)."""
  queries = 2 if layout is PagesV1 else 3
  if layout is PagesV1:
    metadata = metadata._replace(query_start_loc=None)
  groups = metadata.context_lens.size // 2
  heads = caches.pages.Heads(4, 64, 64)
  with jax.set_mesh(mesh):
    try:
      sharding = None if spec is None else NamedSharding(mesh, P(
          *(spec[::-1] if layout is PagesV1 else (spec[0], None, spec[1]))))
      cache = caches.pages.init(layout, pool, 8, heads, "bfloat16", sharding=sharding)
      query = jax.ShapeDtypeStruct((queries * groups, 8, 64), "bfloat16")
      new = None if layout is not PagesV3 else jax.ShapeDtypeStruct(
          (queries * groups, 4, 64), "bfloat16")
      return list(_answered((query, new, new), {
          "layout": "thd", "cache_view": cache, "cache_metadata": metadata,
          "metadata": OperationMetadata(platform="cpu")}))
    except REFUSALS as exception:
      record(exception)
      return [error(exception)]


FILES = {"placements_by_rules": placements, "placements_typed": typed,
         "placements_pages": pages_on_meshes}
