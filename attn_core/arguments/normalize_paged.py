# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Normalizes the arguments of `attention` over pages to one `Call`."""

from typing import cast

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.arguments import (block_sizes, features as features_lib, latent, normalize as steps,
                                 normalize_score_mod)
from attn_core.arguments.arguments import AttentionArguments, Shaped
from attn_core.caches import quantize
from attn_core.config import devices, metadata as metadata_lib
from attn_core.config.metadata import OperationMetadata
from attn_core.caches.paged import layouts, request_groups, validate
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.dispatch.capabilities import PagesRequest, request_of
from attn_core.masks import constructors
from attn_core.score_mods import leaves, score_mod
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.sharding import paged as shard_paged, paged_placement
from attn_core.types import Call, PagedOperands, PagedSpec, operands_like

# Mechanism -> the layout of its pages.
PAGE_LAYOUTS: dict[str, type] = {
    "page_attention": layouts.PagesV1, "ragged_page_attention_v2": layouts.PagesV2,
    "ragged_page_attention_v3": layouts.PagesV3,
    "multi_latent_ragged_page_attention": PagesLatent}


def mechanism_of(mechanism: str, cache_view: object) -> str | None:
  """Returns the mechanism over pages that a call names or its cache implies; None: neither.

  A call with pages is one over pages whichever mechanism it names, which then refuses them.
  """
  if cache_view is None:
    return None
  name = str(mechanism)
  if name in PAGE_LAYOUTS:
    return name
  found = [name for name, layout in PAGE_LAYOUTS.items() if isinstance(cache_view, layout)]
  return found[0] if found else None


def normalize(a: AttentionArguments) -> steps.Normalized:
  """Checks all arguments of a call over pages and normalizes them.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  metadata = steps.check_options(a)
  mechanism = str(a.mechanism)
  layout = PAGE_LAYOUTS[mechanism]
  checks.require(a.layout == "thd", "layout", repr(a.layout), "'thd': the requests' queries one "
                 "after the other, [T, H, D]")
  for name in ("cum_seqlens_q", "cum_seqlens_k"):
    checks.require(getattr(a, name) is None, name, "an array", "None: query_start_loc of "
                   "cache_metadata holds the offsets of the requests' queries")
  query = checks.floating("query", a.query, 3, "[T, H, D]")
  checks.known_sizes("cache_view of pages", a.cache_view, query)
  checks.require(0 not in query.shape, "query", checks.describe(query), "no dimension of size 0")
  checks.require(isinstance(a.cache_view, layout), "cache_view", type(a.cache_view).__name__,
                 f"a {layout.__name__}, which mechanism {mechanism!r} reads")
  cache = cast(Pages, a.cache_view)
  cache_metadata = layouts.checked(cast(layouts.PagesMetadata, a.cache_metadata))
  # Positions are added to the sides and must stay int32; no token is that far away.
  left, right = (None if side is None or side >= 2**30 else side
                 for side in checks.window(a.sliding_window))
  validate.check(cache, cache_metadata, query.shape[0], left)
  checks.require(mechanism != "page_attention" or cache_metadata.query_start_loc is None,
                 "cache_metadata.query_start_loc", "an array", "None: page_attention has one query "
                 "a request; ragged_page_attention_v2 has any number")
  heads = _heads(a, cache, query, mechanism, cache_metadata.stored_heads)
  compute = steps.normalize_compute_dtype(a.compute_dtype, metadata.runtime_dtype, query.dtype)
  dense = _dense(a, metadata, query, heads, compute)
  def stored(name: str, x: Shaped | None) -> jax.Array | None:
    return None if x is None else checkpoint_name(_as_stored(jnp.asarray(x), cache), name)
  operands = PagedOperands(
      checkpoint_name(jnp.asarray(query).astype(compute), "attn_query"),
      jax.tree.map(jnp.asarray, cache), jax.tree.map(jnp.asarray, cache_metadata),
      None if dense.operands.sinks is None else dense.operands.sinks[0],
      stored("attn_key", a.key), stored("attn_value", a.value), mods=dense.operands.mods,
      up=latent.up_projections(a.latent_options, compute))
  chunk = checks.chunk_size(a.chunk_size)
  version = metadata_lib.resolved_tpu_version(metadata)
  spec = PagedSpec(dense.spec.softmax_scale, dense.spec.logits_soft_cap, bool(a.causal),
                   (left, right), dense.spec.softmax_dtype, dense.spec.precision,
                   chunk if chunk is not None and chunk < 2**30 else None,
                   score_mod=dense.spec.score_mod, int8_products=devices.multiplies_int8(version),
                   num_cores=metadata_lib.resolved_num_cores(metadata))
  features = features_lib.features_of(a, dense)
  del features["cache"]
  features["pages"] = f"a cache_view of {layout.__name__}"
  if quantize.is_packed(layouts.dtype_of(cache)):
    features["int4"] = "a cache_view of dtype int4"
  if cache_metadata.draft_mask is not None:
    features["draft_mask"] = "cache_metadata.draft_mask"
  if cache_metadata.scope != layouts.Scope.ALL:
    features["scope"] = f"cache_metadata.scope={cache_metadata.scope}"
  if cache_metadata.stored_heads is not None:
    features["stored_heads"] = "cache_metadata.stored_heads"
  if cache_metadata.prefixes is not None:
    features["prefixes"] = "cache_metadata.prefixes"
    _check_prefixes(a, cache_metadata, spec.has_score_mod and score_mod.of_structure(
        spec.score_mod).reads_positions)
  mode = a.mode or ("__autoregressive__" if cache_metadata.query_start_loc is None
                    else "__prefill__")
  placement, error = paged_placement.place(
      metadata.get_shardings(mode, "bthd"), metadata_lib.resolved_mesh(metadata), operands,
      heads._replace(value_width=operands.up[1].shape[2]) if operands.up else heads,
      metadata.partition_axis)
  shapes = shard_paged.local_shapes(operands, None if error else placement, heads)
  request = request_of(
      dense, features, metadata_lib.resolved_capability(metadata), tpu_version=version)._replace(
      placement=placement, placement_error=error, latent=latent.widths_of(a.latent_options),
      pages=PagesRequest(
          layout.__name__, shapes, spec.window,
          placement is not None and bool(placement.keys),
          block_sizes.with_chip_memory(dense.block_sizes, version)))
  call = dense._replace(operands=operands, spec=spec)
  return steps.Normalized(call, request, metadata, None, query.dtype, None)


def _check_prefixes(a: AttentionArguments, cache_metadata: layouts.PagesMetadata,
                    reads_positions: bool) -> None:
  """Refuses what the parts of a call with shared prefixes cannot compute one by one.

  Args:
    a: the arguments.
    cache_metadata: that of the pages.
    reads_positions: whether the score mod does.
  """
  for name, given, cure in (
      ("sliding_window", a.sliding_window, "None"), ("chunk_size", a.chunk_size, "None"),
      ("causal", None if a.causal else False, "True"),
      ("cache_metadata.scope", None if cache_metadata.scope == layouts.Scope.ALL
       else cache_metadata.scope, "Scope.ALL"),
      ("cache_metadata.page_tables", "tables with stripes" if request_groups.stripe_count(
          cache_metadata) else None, "without stripes")):
    checks.require(given is None, name, given, f"{cure} with cache_metadata.prefixes, whose pages "
                   "all queries of a group see; leave out `prefixes`")
  checks.require(not reads_positions, "score_mod", "one that reads positions", "one that reads "
                 "none with cache_metadata.prefixes, whose groups have no positions of their own; "
                 "leave out `prefixes`")


def _score_mod(a: AttentionArguments, heads: int, tokens: int,
               dtype: np.dtype) -> ScoreMod | None:
  """Returns the term of the score mod, whose queries are the tokens of the call.

  Raises:
    ValueError: an array of it does not fit the call, or has a number for each key: pages have no
      columns.
  """
  for leaf in score_mod.chain(a.score_mod) if isinstance(a.score_mod, ScoreMod) else ():
    checks.require(
        not (isinstance(leaf, leaves.PerPair) and 3 in leaf.axes and leaf.array.shape[-1] != 1),
        "score_mod", f"{getattr(leaf, 'name', '')} with an array "
        f"{checks.describe(getattr(leaf, 'array', None))} over pages", "no array with a number "
        "for each key, since requests have columns of their own; look numbers up by the position "
        "in the request, with score_mods.custom or by_distance")
  found = normalize_score_mod.term_of(a.score_mod, (1, heads, tokens, 1))
  # Of a request with one token: how many there are is not known.
  return normalize_score_mod.after_look_ups(
      found, a.score_mod, dtype, constructors.full(), (1, heads, 1, 1), False)


def _as_stored(x: jax.Array, cache: Pages) -> jax.Array:
  """Returns new keys or values in the dtype of the pages, unless these are quantized."""
  return x if cache.key_scales is not None else x.astype(layouts.dtype_of(cache))


def _heads(a: AttentionArguments, cache: Pages, query: checks.Array,
           mechanism: str, stored: layouts.StoredHeads | None) -> layouts.Heads:
  """Returns the heads of the call, by the pages and, where padded, `stored` or the new keys."""
  held, held_dtype = layouts.heads_of(cache), layouts.dtype_of(cache)
  mixed = cache.key_scales is not None or a.compute_dtype is not None
  if isinstance(cache, PagesLatent):
    _check_latents(a, cache, query, mixed)
    return held
  if stored is not None:
    held = _stored_heads(a, cache, query, mechanism, stored)
  elif mechanism == "ragged_page_attention_v3":
    missing = "key" if a.key is None else "value"
    checks.require(a.key is not None and a.value is not None, missing, "NoneType", "the keys and "
                   "values [T, K, D] to write; a layer that reads those of another layer needs "
                   "cache_metadata.stored_heads")
    held = _new_heads(checks.floating("key", a.key, 3, "[T, K, D]"),
                      checks.floating("value", a.value, 3, "[T, K, D]"), cache, query, mixed)
  else:
    for name, x in (("key", a.key), ("value", a.value)):
      checks.require(x is None, name, checks.describe(x),
                     f"None: mechanism {mechanism!r} reads the pages only; write to them first, "
                     "with caches.pages.append")
    checks.require(held.key_width == query.shape[2], "query", checks.describe(query),
                   f"[T, H, {held.key_width}], the width of the pages")
  checks.require(query.shape[1] % held.key_heads == 0, "query", checks.describe(query),
                 f"a number of heads that the {held.key_heads} key heads divide")
  checks.require(mixed or held_dtype == query.dtype, "query", checks.describe(query),
                 f"the dtype of the pages, {held_dtype}, or compute_dtype to compute in one dtype")
  return held


def _stored_heads(a: AttentionArguments, cache: Pages, query: checks.Array, mechanism: str,
                  stored: layouts.StoredHeads) -> layouts.Heads:
  """Returns the heads of a call that writes nothing, checked."""
  name = "cache_metadata.stored_heads"
  checks.require(mechanism == "ragged_page_attention_v3", name, repr(stored),
                 f"None: mechanism {mechanism!r} never writes; stored_heads is for "
                 "ragged_page_attention_v3, which otherwise does, and ragged_page_attention_v2 has "
                 "no padding that hides the heads")
  for argument, x in (("key", a.key), ("value", a.value)):
    checks.require(x is None, argument, checks.describe(x),
                   f"None with {name}, of a call that writes nothing")
  held, scales = layouts.heads_of(cache), cache.key_scales
  most = held.key_heads if scales is None or scales.ndim == 0 else scales.shape[2]
  widths = layouts.most_widths(cache)
  checks.require(0 < stored.key_heads <= most and 0 < stored.value_width <= widths.value
                 and stored.key_width == query.shape[2] <= widths.key, name, repr(stored),
                 f"at least 1 and at most {most} key heads of width {query.shape[2]}, the query's, "
                 f"which is at most {widths.key}, and values of a width from 1 to at most "
                 f"{widths.value}")
  return layouts.Heads(stored.key_heads, stored.key_width, stored.value_width)


def _check_latents(a: AttentionArguments, cache: PagesLatent, query: checks.Array,
                   mixed: bool) -> None:
  """Checks queries [T, H, width] and, where the call writes them, latent rows [T, 1, width]."""
  options = a.latent_options
  assert options is not None  # `latent.expand` requires it with these pages
  for name, width in cache.widths.__dict__.items():
    given = getattr(options, f"{name}_width")
    checks.require(given == width, f"latent_options.{name}_width", str(given),
                   f"{width}, that of the pages")
  latent.check_query(query, options, mixed=a.compute_dtype is not None)
  dtype, rows = cache.pages.dtype, [query]
  if a.key is not None:
    key = jnp.asarray(a.key)[:, 0]
    checks.require(key.shape == (query.shape[0], cache.width), latent.ROWS, checks.describe(key),
                   f"[{query.shape[0]}, {cache.width}], a latent row for each query, latent "
                   f"{cache.widths.latent} + rope {cache.widths.rope}")
    rows.append(key)
  for name, x in zip(("query", latent.ROWS), rows):
    checks.require(mixed or x.dtype == dtype, name, checks.describe(x),
                   f"the dtype of the pages, {dtype}, or compute_dtype to compute in one dtype")


def _new_heads(key: checks.Array, value: checks.Array, cache: Pages, query: checks.Array,
               mixed: bool) -> layouts.Heads:
  """Checks new keys and values [T, K, D] that the call writes to padded pages.

  Args:
    key: the new keys.
    value: the new values.
    cache: the pages.
    query: [T, H, D].
    mixed: whether they may have another dtype than the pages.
  """
  held, width, value_width = layouts.heads_of(cache), query.shape[2], value.shape[2]
  most = f"[{query.shape[0]}, K, {width}], T and D of the query, K at most {held.key_heads}"
  checks.require(key.shape[0] == query.shape[0] and key.shape[2] == width <= held.key_width
                 and 0 < key.shape[1] <= held.key_heads, "key", checks.describe(key), most)
  checks.require(value.shape[:2] == key.shape[:2] and value_width <= held.value_width, "value",
                 checks.describe(value), f"{list(key.shape[:2])} as the key, a width of at most "
                 f"{held.value_width}")
  for name, x in (("key", key), ("value", value)):
    checks.require(mixed or x.dtype == layouts.dtype_of(cache), name, checks.describe(x),
                   f"the dtype of the pages, {layouts.dtype_of(cache)}, or compute_dtype")
  scales = cache.key_scales
  checks.require(scales is None or scales.ndim == 0 or scales.shape[2] == key.shape[1],
                 "key", checks.describe(key), "as many heads as the cache's key_scales "
                 f"{checks.describe(scales)} have")
  return layouts.Heads(key.shape[1], width, value_width)


def _dense(a: AttentionArguments, metadata: OperationMetadata, query: checks.Array,
           heads: layouts.Heads, compute: np.dtype) -> Call:
  """Returns the arguments that mean the same without pages; operands are shapes only."""
  tokens, query_heads, width = query.shape

  def shape(*dimensions: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, tokens, *dimensions), compute)

  bias = a.bias if a.init_bias is None else a.init_bias()
  mods, structure_of_mod = jax.tree.flatten(_score_mod(a, query_heads, tokens, compute))
  operands = operands_like(
      shape(query_heads, width), shape(heads.key_heads, width),
      shape(heads.key_heads, heads.value_width),
      None if bias is None else jnp.asarray(bias),
      sinks=steps.normalize_sinks(a.softmax_aux, query_heads), mods=tuple(mods))
  spec = steps.make_spec(a, metadata, operands.query, jax.tree.structure(constructors.full()))
  spec = spec._replace(score_mod=structure_of_mod)
  return Call(operands, spec, block_sizes.requested(a.block_sizes, a.vmem_limit_bytes), None,
              bool(a.return_lse), bool(a.return_weights))
