# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of `attention` by shapes, each with the choices that made it."""

import contextlib
from typing import Any, Iterator, NamedTuple, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, Heads, LatentOptions, MaskInfo, OperationMetadata,
                       PagesMetadata, PagesV1, PagesV2, PagesV3, RingConfig, caches, masks,
                       score_mods)
from attn_core.caches import device_parts, pages
from attn_core.caches.paged import request_groups

AXES = ("dp", "fsdp", "ep", "tp", "sp")
PLATFORMS = {"cpu": ("cpu", None), "gpu": ("gpu", None), "gpu 8.0": ("gpu", "8.0"),
             "gpu 9.0": ("gpu", "9.0"), "tpu": ("tpu", None)}
MESHES = {"none": None, "sp=2": (1, 1, 1, 1, 2), "dp=2 sp=4": (2, 1, 1, 1, 4),
          "fsdp=2 tp=2 sp=2": (1, 2, 1, 2, 2), "dp=2 fsdp=2 tp=2": (2, 2, 1, 2, 1),
          "sp=8": (1, 1, 1, 1, 8), "tp=8": (1, 1, 1, 8, 1)}
# Mesh, groups of requests, stripes.
PAGED_MESHES: dict[str, tuple[tuple[int, ...] | None, int, int | None]] = {
    "none": (None, 1, None), "none, 2 groups": (None, 2, None),
    "dp=2 tp=2, 2 groups": ((2, 1, 1, 2, 1), 2, None), "tp=2": ((1, 1, 1, 2, 1), 1, None),
    "sp=2, 2 stripes": ((1, 1, 1, 1, 2), 1, 2), "sp=2, 3 stripes": ((1, 1, 1, 1, 2), 1, 3),
    "dp=2 sp=2, 2 groups of 2 stripes": ((2, 1, 1, 1, 2), 2, 2)}
MESH_SOURCES = ("metadata", "metadata, abstract", "set_mesh", "set_mesh, explicit")
RINGS = {"ring": RingConfig(), "ring, zigzag": RingConfig(layout="zigzag"),
         "ring, remote": RingConfig(transfer="remote"),
         "ring, remote, striped": RingConfig(layout="striped", transfer="remote"),
         "all_gather": RingConfig("all_gather"), "ulysses": RingConfig("ulysses"),
         "hybrid": RingConfig("hybrid", heads_axis_name="tp")}
PAGED = {"page_attention": PagesV1, "ragged_page_attention_v2": PagesV2,
         "ragged_page_attention_v3": PagesV3}
MECHANISMS = ("auto", "auto", "flash_attn2", "blocksparse", "blockwise", "vanilla", "sdpa", "cudnn",
              "cuda_flash_attn2", *["ring"] * 4, "autoregressive_decodeattn")
DTYPES = (*["bfloat16"] * 7, "float16", "float32", "float64")


SCORE_MODS = {
    "alibi": lambda: score_mods.alibi(np.zeros(1, np.float32)),
    "relative": lambda: score_mods.relative(np.zeros((8, 1), np.float32), max_distance=9),
    "grid": lambda: score_mods.grid(np.zeros((9, 1), np.float32), (2, 2)),
    "soft_cap": lambda: score_mods.soft_cap(3.0),
    "alibi_capped": lambda: (score_mods.alibi(np.zeros(1, np.float32)) >>
                             score_mods.soft_cap(3.0)),
    "custom": lambda: score_mods.custom(lambda score, b, h, q, k, x: score * x,
                                        np.ones((), np.float32))}


class RandomCall(NamedTuple):
  """One call, by the shapes of its operands."""

  operands: tuple[jax.ShapeDtypeStruct | None, ...]  # query, key, value
  arguments: dict[str, Any]
  mesh: Mesh | None  # the current one
  x64: bool
  choices: tuple[tuple[str, str], ...]  # (dimension, the chosen value)

  @contextlib.contextmanager
  def context(self) -> Iterator[None]:
    """The configuration of JAX that the call belongs to."""
    with contextlib.ExitStack() as stack:
      stack.enter_context(jax.enable_x64(self.x64))
      if self.mesh is not None:
        stack.enter_context(jax.set_mesh(self.mesh))
      yield


class Sample:
  """A stream of choices."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng(seed)
    self.choices: list[tuple[str, str]] = []
    self.mesh: Mesh | None = None  # the current one

  def one(self, *choices: Any) -> Any:
    return choices[self.rng.integers(len(choices))]

  def pick(self, dimension: str, *values: Any) -> Any:
    """Chooses a value of a dimension that is counted."""
    value = self.one(*values)
    self.choices.append((dimension, str(value)))
    return value

  def maybe(self, probability: float = 0.2) -> bool:
    return self.rng.random() < probability

  def some(self, dimension: str, options: dict[str, Any], probability: float) -> dict[str, Any]:
    """Chooses some of the options, each with a probability."""
    chosen = {name: value for name, value in options.items() if self.maybe(probability)}
    self.choices += [(dimension, name) for name in chosen]
    return chosen

  def metadata(self, sizes: tuple[int, ...] | None,
               platforms: tuple[str, ...] = (*PLATFORMS, *["gpu 9.0", "tpu"] * 2),
               **fields: Any) -> OperationMetadata:
    """Metadata of a platform, with the mesh unless that is the current one."""
    platform, capability = PLATFORMS[self.pick("platform", *platforms)]
    metadata = OperationMetadata(platform=platform, compute_capability=capability, **fields)
    if sizes is None:
      return metadata
    source = self.pick("mesh from", *MESH_SOURCES)
    kind = AxisType.Explicit if "explicit" in source else AxisType.Auto
    devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, AXES, axis_types=(kind,) * len(AXES))
    if source.startswith("set_mesh"):
      self.mesh = mesh
      return metadata
    return metadata.replace(mesh=mesh.abstract_mesh if "abstract" in source else mesh)


def make(seed: int) -> RandomCall:
  """Returns the call of a seed.

  One of four is over pages, one of 16 has latent rows, and three of 32 pages of latent rows.
  """
  sample = Sample(seed)
  over_pages = seed % 4 == 3
  dtype = sample.pick("dtype", *(DTYPES[:-1] if over_pages else DTYPES))
  x64 = dtype == "float64" or sample.pick("x64", False, False, True)
  of_latents = {14: latent_call, 30: latent_call, 6: latent_pages_call, 12: latent_pages_call,
                26: latent_pages_call}
  make_call = paged_call if over_pages else of_latents.get(seed % 32, dense_call)
  with jax.enable_x64(x64), mock.patch.object(device_parts, "full", _full):
    operands, arguments = make_call(sample, dtype)
    if make_call in (dense_call, paged_call):
      arguments.update(_score_mod(sample, seed, arguments))
  return RandomCall(operands, arguments, sample.mesh, x64, tuple(sample.choices))


def _full(shape: Sequence[int], number: float, dtype: Any, sharding: None) -> jax.Array:
  """Creates an array of a cache as `device_parts.full` does, without compiling a program for it."""
  assert sharding is None, sharding
  return jnp.asarray(np.full(shape, number, dtype))


def dense_call(sample: Sample, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Returns (query, key, value), and the other arguments, of a call without pages."""
  heads, key_heads = sample.one((4, 2), (4, 4), (2, 1), (8, 2), (6, 3))
  batch, width = sample.one(1, 2, 4), sample.one(64, 64, 128, 96, 72, 32)
  few = sample.maybe(0.6)
  queries = sample.one(1, 1, 3) if few else sample.one(16, 64, 65)
  keys = sample.one(16, 24, 32, 48, 64, 136) if few else queries
  sizes = MESHES[sample.pick("mesh", "none", "none", *MESHES)]
  mechanism = sample.pick("mechanism", *(["autoregressive_decodeattn"] * 4 if few else []),
                          *MECHANISMS)
  fields = sample.some("metadata", {"runtime_softmax_dtype": "bfloat16",
                                    "scan_ring_attention": False}, 0.05)
  if sample.maybe(0.8 if mechanism == "ring" else 0.1):
    fields["ring"] = RINGS[sample.pick("ring", *RINGS)]
  arguments: dict[str, Any] = {
      "metadata": sample.metadata(sizes, **fields), "return_lse": sample.maybe(),
      "mode": "__autoregressive__" if few else sample.pick("mode", "__train__", "__prefill__"),
      "mechanism": mechanism}
  shape = lambda length, heads, width: jax.ShapeDtypeStruct((batch, length, heads, width), dtype)
  query = shape(queries, heads, width)
  arguments.update(_options(sample, (heads, queries, keys), dtype))
  if few and mechanism != "ring" and sample.maybe(0.5):
    for name in ("bias", "mask", "query_offset"):
      arguments.pop(name, None)
    return _with_cache(sample, query, (keys, key_heads), arguments)
  arguments.update(_mask_arguments(sample, batch, queries, keys))
  arrays = query, shape(keys, key_heads, width), shape(
      keys, key_heads, width if sample.maybe(0.9) else 64)
  layout = sample.pick("layout", "bthd", "bthd", "bthd", "bhtd", "thd")
  return _in_layout(layout, arrays, arguments)


def _options(sample: Sample, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
  """Returns some arguments of `attention`; shape: heads, queries, keys."""
  heads, queries, keys = shape
  chosen = sample.some("option", {
      "logits_soft_cap": 20.0, "softmax_aux": np.zeros(heads, np.float32),
      "bias": np.zeros((1, 1, queries, keys), jnp.dtype(dtype)), "optimized": True,
      "return_weights": True, "precision": "highest", "normalize_output": False,
      "compute_dtype": "bfloat16", "block_sizes": BlockSizes(128, 128), "policy": "dots_saveable",
      "vmem_limit_bytes": 2**24, "dropout_prob": 0.1}, 0.04)
  return {**chosen, "dropout_rng": jax.random.key(0)} if "dropout_prob" in chosen else chosen


def _score_mod(sample: Sample, seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
  """Returns a score mod for one of four seeds; no other choice of the call depends on it."""
  rng = np.random.default_rng([seed, 1])
  # Calls of the ring that copies in its kernel are few, and it takes no score mod.
  if rng.random() > 1 / 4 or arguments["metadata"].ring.transfer == "remote":
    return {}
  name = list(SCORE_MODS)[rng.integers(len(SCORE_MODS))]
  sample.choices.append(("score_mod", name))
  return {"score_mod": SCORE_MODS[name]()}


def _mask_arguments(sample: Sample, batch: int, queries: int, keys: int) -> dict[str, Any]:
  """Returns arguments that hide keys, and the positions of the queries."""
  ids = lambda length: np.zeros((batch, length), np.int32)
  arguments = sample.some("mask", {"sliding_window": (5, 0), "chunk_size": 8, "causal": False}, 0.1)
  kind = sample.pick("mask", *["by position"] * 6, "boolean", "custom", "with operands", "lengths")
  if kind != "by position":
    arguments["mask"] = {
        "boolean": np.ones((1, 1, queries, keys), bool),
        "custom": masks.custom(lambda b, h, q, k: (q + k) % 3 == 0),
        "with operands": masks.custom(lambda b, h, q, k, n: q + k < n[0],
                                      np.full(1, 99, np.int32)),
        "lengths": masks.lengths(None, np.full(batch, keys, np.int32))}[kind]
  info = sample.pick("mask_info", *["none"] * 6, "segments", "positions", "padding")
  if info == "segments":
    arguments["mask_info"] = MaskInfo(None, ids(queries), ids(keys))
  elif info == "positions":
    arguments["mask_info"] = MaskInfo(q_positions=ids(queries), kv_positions=ids(keys))
  elif info == "padding":
    arguments["mask_info"] = MaskInfo.from_attention_mask(np.ones((batch, keys), bool))
  if queries != keys and info != "positions":
    offset = sample.pick("query_offset", "int", "array")
    arguments["query_offset"] = (
        keys - queries if offset == "int" else np.full(batch, keys - queries, np.int32))
  return arguments


def _in_layout(layout: str, arrays: tuple[jax.ShapeDtypeStruct, ...],
               arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Converts arrays [B, length, heads, width] and the arguments to a layout."""
  if layout == "bthd":
    return arrays, arguments
  if layout == "bhtd":
    swapped = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in arrays]
    return tuple(jax.ShapeDtypeStruct(shape, x.dtype)
                 for shape, x in zip(swapped, arrays)), {**arguments, "layout": layout}
  queries, keys = (x.shape[1] for x in arrays[:2])
  offsets = {f"cum_seqlens_{name}": np.array([0, length], np.int32)
             for name, length in (("q", queries), ("k", keys))}
  packed = {name: x[0] if name in ("bias", "mask") and isinstance(x, np.ndarray) else x
            for name, x in arguments.items() if name != "mask_info"}
  if queries != keys:
    packed["query_offset"] = keys - queries
  return (tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays),
          {**packed, **offsets, "layout": layout})


def _with_cache(sample: Sample, query: jax.ShapeDtypeStruct, slots_and_heads: tuple[int, int],
                arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Returns a call with a dense or a window cache."""
  (batch, queries, _, width), (slots, key_heads) = query.shape, slots_and_heads
  kind, stored = sample.pick("cache", "dense", "dense", "window"), sample.pick(
      "cache dtype", "the query's", "the query's", "int8", "float8_e4m3fn", "int4")
  mode = sample.pick("cache mode", "__autoregressive__", "__autoregressive__", "__prefill__",
                     "__insert__")
  dtype = query.dtype if stored == "the query's" else stored
  module = caches.dense if kind == "dense" else caches.window
  cache = module.init(2 * batch if mode == "__insert__" else batch, slots, (key_heads, width),
                      dtype=dtype)
  new = jax.ShapeDtypeStruct((batch, queries, key_heads, width), query.dtype)
  if mode == "__insert__":
    arguments["cache_metadata"] = CacheMetadata(slots=np.arange(batch, dtype=np.int32))
  elif not sample.maybe(0.5):
    new = None
  if kind == "window":
    arguments["sliding_window"] = (5, 0)
  return (query, new, new), {**arguments, "cache_view": cache, "mode": mode}


def latent_call(sample: Sample, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Returns (query, rows, None), and the other arguments, of a call with latent rows."""
  batch, heads, queries = sample.one(1, 2, 4), sample.one(2, 4, 8), sample.one(1, 3, 64)
  keys = queries if queries == 64 else sample.one(24, 64)
  has_up = sample.pick("latent", "absorbed", "up-projections") == "up-projections"
  latent, rope = sample.pick("latent widths", (32, 8), (64, 64))
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
  up = [np.zeros((latent, heads, 16), jnp.dtype(dtype))] * 2 if has_up else [None, None]
  arguments: dict[str, Any] = {
      "metadata": sample.metadata(MESHES[sample.pick("mesh", "none", "none", *MESHES)]),
      "mechanism": sample.pick("mechanism", "auto", "multi_latent_attention"),
      "latent_options": LatentOptions(latent, rope, 16, *up)}
  query = shape(batch, queries, heads, (16 if has_up else latent) + rope)
  rows = shape(batch, keys, latent + rope)
  stored = sample.pick("latent cache", "none", "none", "the query's", "int8")
  if stored == "none":
    arguments.update(_options(sample, (heads, queries, keys), dtype))
    return (query, rows, None), {**arguments, **_mask_arguments(sample, batch, queries, keys)}
  cache = caches.latent.init(batch, keys + (0 if keys > queries else queries), (latent, rope),
                             dtype=dtype if stored == "the query's" else stored,
                             padded=sample.pick("latent cache", "as it is", "padded") == "padded")
  rows = shape(batch, queries, latent + rope)
  return (query, rows, None), {**arguments, "cache_view": cache}


def latent_pages_call(sample: Sample, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Returns (query, rows or None, None), and the other arguments, over pages of latent rows."""
  requests, heads, page, queries = 3, sample.one(2, 4, 8), sample.one(4, 16), sample.one(1, 3)
  has_up = sample.pick("latent", "absorbed", "up-projections") == "up-projections"
  stored = sample.pick("latent cache", *["the query's"] * 3, "int8")
  padded = sample.pick("pages of latent rows", "as they are", "padded", "padded") == "padded"
  sizes, groups, stripes = PAGED_MESHES[sample.pick("paged mesh", *PAGED_MESHES)]
  tables = np.tile(np.arange(4 * requests, dtype=np.int32).reshape(requests, 4),
                   (stripes or 1, 1, 1))
  one = PagesMetadata(tables if stripes else tables[0], np.full(requests, 2 * page, np.int32),
                      np.arange(requests + 1, dtype=np.int32) * queries)
  tokens = groups * requests * queries
  latent, rope = sample.pick("latent widths", (32, 8), *[(64, 64)] * 3)
  shape = lambda *sizes: jax.ShapeDtypeStruct((tokens, *sizes), dtype)
  up = [np.zeros((latent, heads, 16), jnp.dtype(dtype))] * 2 if has_up else [None, None]
  arguments = dict(
      layout="thd", mechanism=sample.pick(
          "mechanism", "auto", "multi_latent_ragged_page_attention"),
      latent_options=LatentOptions(latent, rope, 16, *up),
      cache_view=caches.latent_pages.init(
          groups * (stripes or 1) * 4 * requests, page, (latent, rope), padded=padded,
          dtype=dtype if stored == "the query's" else stored),
      cache_metadata=request_groups.stack(*[one] * groups) if groups > 1 or stripes else one,
      metadata=sample.metadata(sizes, *([("cpu", *["tpu", "gpu 9.0"] * 2)] if padded else [])),
      return_lse=sample.maybe())
  arguments.update(sample.some("option over pages", {
      "sliding_window": (9, 0), "softmax_aux": np.zeros(heads, np.float32), "logits_soft_cap": 9.0,
      "precision": "highest", "causal": False, "block_sizes": BlockSizes(16, 128)}, 0.12))
  is_written = sample.pick("latent rows", "written", "held") == "written"
  query = shape(heads, (16 if has_up else latent) + rope)
  return (query, shape(latent + rope) if is_written else None, None), arguments


def paged_call(sample: Sample, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  """Returns (query, key, value), and the other arguments, of a call over pages."""
  mechanism = sample.pick("pages for", *PAGED)
  layout, requests, row_pages = PAGED[mechanism], sample.one(2, 4), 4
  heads, key_heads = sample.one((4, 2), (4, 4), (4, 1), (8, 4))
  width, page = sample.one(64, 128, 128, 96), sample.pick("page size", 8, 16, 16, 4)
  stored, scales = {"the query's": (dtype, None), "int8": ("int8", "token"),
                    "float8": ("float8_e4m3fn", "tensor"), "int4": ("int4", "group")}[
                        sample.pick("page dtype", *["the query's"] * 4, "int8", "float8", "int4")]
  sizes, groups, stripes = PAGED_MESHES[sample.pick("paged mesh", *PAGED_MESHES)]
  queries = 1 if mechanism == "page_attention" or sample.maybe(0.5) else 3
  pool = groups * (stripes or 1) * requests * row_pages
  tables = np.tile(np.arange(requests * row_pages, dtype=np.int32).reshape(requests, row_pages),
                   (stripes or 1, 1, 1))
  one = PagesMetadata(tables if stripes else tables[0], np.full(requests, 2 * page, np.int32),
                      None if queries == 1 and layout is not PagesV3 and sample.maybe(0.5)
                      or mechanism == "page_attention"
                      else np.arange(requests + 1, dtype=np.int32) * queries)
  if one.query_start_loc is None:
    queries = 1
  tokens = groups * requests * queries
  array = lambda heads: jax.ShapeDtypeStruct((tokens, heads, width), dtype)
  arguments = dict(
      layout="thd", mechanism=sample.pick("mechanism", mechanism, "auto"),
      cache_view=pages.init(layout, pool, page, Heads(key_heads, width, width), stored, scales),
      cache_metadata=request_groups.stack(*[one] * groups) if groups > 1 or stripes else one,
      metadata=sample.metadata(sizes), return_lse=sample.maybe())
  arguments.update(sample.some("option over pages", {
      "sliding_window": (9, 0), "softmax_aux": np.zeros(heads, np.float32), "logits_soft_cap": 9.0,
      "precision": "highest", "causal": False, "block_sizes": BlockSizes(16, 128),
      "compute_dtype": "bfloat16"}, 0.12))
  new = array(key_heads) if layout is PagesV3 else None
  return (array(heads), new, new), arguments
