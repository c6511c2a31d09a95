"""From the door's argument list to one attention over pages.

Letters: T tokens of the call, R requests, H query heads, K key heads, D and E widths.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from attn_core.arguments import normalize as arguments
from attn_core import checks
from attn_core.config import metadata as metadata_lib
from attn_core.caches.paged import request_groups as groups, validate as page_checks, ops as pages
from attn_core.kernels.gpu.split_kv import paged as gpu_kernel
from attn_core.kernels.tpu.ragged import paged as tpu_kernel
from attn_core.kernels.xla.paged_blocks import PagedOperands
from attn_core.masks import leaves as algebra
from attn_core.sharding import paged as shard_paged
from attn_core.table import Request
from attn_core.types import AttentionSpec, Call, Operands, PagedSpec

LAYOUTS = {"page_attention": pages.PagesV1, "ragged_page_attention_v2": pages.PagesV2,
           "ragged_page_attention_v3": pages.PagesV3}


def mechanism_of(a) -> str | None:
  """The mechanism over pages that a call names, or that goes with its cache; None: it has none.

  A call with pages is one over pages whichever mechanism it names, which then refuses them.
  """
  if a.cache_view is None:
    return None
  name = str(a.mechanism)
  if name in LAYOUTS:
    return name
  found = [mechanism for mechanism, layout in LAYOUTS.items() if isinstance(a.cache_view, layout)]
  return found[0] if found else None


def normalise(a) -> arguments.Normalised:
  """Checks all arguments of `attention` and says what they mean for pages.

  Args:
    a: the arguments, as attributes; see `attention`.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  metadata = arguments.checked_metadata(a)
  mechanism = mechanism_of(a)
  layout = LAYOUTS[mechanism]
  checks.require(a.layout == "thd", "layout", repr(a.layout), "'thd': the requests' queries one "
                 "after the other, [T, H, D]")
  for name in ("cum_seqlens_q", "cum_seqlens_k"):
    checks.require(getattr(a, name) is None, name, "an array", "None: query_start_loc of "
                   "cache_metadata says where the requests' queries begin")
  query = checks.floating("query", a.query, 3, "[T, H, D]")
  checks.require(0 not in query.shape, "query", checks.describe(query), "no dimension of size 0")
  checks.require(isinstance(a.cache_view, layout), "cache_view", type(a.cache_view).__name__,
                 f"a {layout.__name__}, which mechanism {mechanism!r} reads")
  page_checks.check(a.cache_view, a.cache_metadata, query.shape[0])
  checks.require(mechanism != "page_attention" or a.cache_metadata.query_start_loc is None,
                 "cache_metadata.query_start_loc", "an array", "None: page_attention has one query "
                 "a request; ragged_page_attention_v2 has any number")
  heads = _heads(a, mechanism, query)
  compute = arguments.compute_dtype_of(a, metadata, query.dtype)
  dense = _dense(a, metadata, heads, compute)
  operands = PagedOperands(
      checkpoint_name(jnp.asarray(query).astype(compute), "attn_query"),
      jax.tree.map(jnp.asarray, a.cache_view), jax.tree.map(jnp.asarray, a.cache_metadata),
      None if dense.operands.sinks is None else dense.operands.sinks[0],
      *(None if x is None else checkpoint_name(jnp.asarray(x), name)
        for name, x in (("attn_key", a.key), ("attn_value", a.value))))
  # Positions are added to the sides and must stay int32; nothing lies so far away.
  window = tuple(None if side is None or side >= 2**30 else side
                 for side in checks.window(a.sliding_window))
  spec = PagedSpec(dense.spec.softmax_scale, dense.spec.logits_soft_cap, bool(a.causal), window,
                   dense.spec.softmax_dtype, dense.spec.precision)
  features = arguments.features_of(a, dense)
  del features["cache"]
  features["pages"] = f"a cache_view of {layout.__name__}"
  placed = shard_paged.place(metadata.get_shardings(a.mode, "bthd"),
                             metadata_lib.resolved_mesh(metadata), operands, heads.key_heads)
  request = Request(
      features, jnp.dtype(compute), heads.key_width, heads.value_width,
      lengths=(query.shape[0],) * 2, capability=metadata_lib.resolved_capability(metadata),
      pages=layout.__name__, spread_pages=placed.refusal,
      **{} if placed.refusal else _kernels_refusals(operands, placed, heads, spec))
  call = dense._replace(operands=operands, spec=spec, placement=placed.placement)
  return arguments.Normalised(call, request, metadata, None, query.dtype, None)


def _kernels_refusals(operands: PagedOperands, placed: shard_paged.Placed, heads: pages.Heads,
                      spec: PagedSpec) -> dict[str, str | None]:
  """Why kernels do not compute a call, as fields of `Request`."""
  several = operands.metadata.query_start_loc is not None or spec.window[0] is not None
  if placed.placement and placed.placement.keys and several:
    return dict.fromkeys(("tpu_pages", "gpu_pages"), "a window, or query_start_loc, where a request"
                         "'s pages are on several devices")
  query, cache, metadata, heads = _part(operands, placed, heads)
  return {"tpu_pages": tpu_kernel.refusal(query, cache, metadata, heads),
          "gpu_pages": gpu_kernel.refusal(query, cache, metadata, heads)}


def _part(operands: PagedOperands, placed: shard_paged.Placed, heads: pages.Heads):
  """Shapes of query, cache and metadata, and the heads, of which a kernel is asked once.

  They are those of one device, and there of one group of requests.
  """
  query, cache, metadata = shard_paged.part(operands, placed.placement)[:3]
  tokens = query.shape[0] // (groups.count(metadata) or 1)
  cut = pages.heads_of(operands.cache).key_heads // pages.heads_of(cache).key_heads
  return (jax.ShapeDtypeStruct((tokens, *query.shape[1:]), query.dtype), cache,
          groups.shapes_of_one(metadata), heads._replace(key_heads=heads.key_heads // cut))


def _heads(a, mechanism: str, query) -> pages.Heads:
  """The heads of the call, by the pages and, where these are padded, by the new keys."""
  held = pages.heads_of(a.cache_view)
  width = query.shape[2]
  if mechanism == "ragged_page_attention_v3":
    checks.floating("key", a.key, 3, "[T, K, D]")
    checks.floating("value", a.value, 3, "[T, K, D]")
    most = f"[{query.shape[0]}, K, {width}], T and D of the query, K at most {held.key_heads}"
    checks.require(a.key.shape[0] == query.shape[0] and a.key.shape[2] == width <= held.key_width
                   and 0 < a.key.shape[1] <= held.key_heads, "key", checks.describe(a.key), most)
    checks.require(a.value.shape == a.key.shape, "value", checks.describe(a.value),
                   f"{list(a.key.shape)}, as the key")
    held = pages.Heads(a.key.shape[1], width, width)
    for name in ("key", "value"):
      x = getattr(a, name)
      checks.require(a.cache_view.key_scales is not None or x.dtype == (
          pages.dtype_of(a.cache_view)), name, checks.describe(x),
                     f"the dtype of the pages, {pages.dtype_of(a.cache_view)}")
    kept = a.cache_view.key_scales
    checks.require(not pages.has_token_scales(a.cache_view) or kept.shape[2] == a.key.shape[1],
                   "key", checks.describe(a.key), "as many heads as the cache's key_scales "
                   f"{checks.describe(kept)} have")
  else:
    for name in ("key", "value"):
      checks.require(getattr(a, name) is None, name, checks.describe(getattr(a, name)),
                     f"None: mechanism {mechanism!r} reads what is in the pages; write it first, "
                     "with caches.pages.append")
    checks.require(held.key_width == width, "query", checks.describe(query),
                   f"[T, H, {held.key_width}], the width of the pages")
  checks.require(query.shape[1] % held.key_heads == 0, "query", checks.describe(query),
                 f"a number of heads that the {held.key_heads} key heads divide")
  held_dtype = pages.dtype_of(a.cache_view)
  checks.require(a.cache_view.key_scales is not None or held_dtype == query.dtype, "query",
                 checks.describe(query), f"the dtype of the pages, {held_dtype}")
  return held


def _dense(a, metadata, heads: pages.Heads, compute) -> Call:
  """The arguments that mean the same with and without pages; operands are shapes only."""
  tokens, query_heads, width = a.query.shape
  array = lambda *shape: jax.ShapeDtypeStruct((1, tokens, *shape), compute)
  query = array(query_heads, width)
  operands = Operands(query, array(heads.key_heads, width),
                      array(heads.key_heads, heads.value_width),
                      a.init_bias if a.bias is None else a.bias,
                      sinks=arguments.sinks_of(a, query.shape))
  softmax_dtype = metadata.runtime_softmax_dtype
  if compute == jnp.float64:
    softmax_dtype = jnp.promote_types(softmax_dtype, compute)
  spec = AttentionSpec(
      jax.tree.structure(algebra.full()), arguments.scale_of(a, metadata, width),
      arguments.soft_cap_of(a), arguments.dropout_prob_of(a, metadata), softmax_dtype,
      arguments.precision_of(a.precision), bool(a.normalize_output))
  return Call(operands, spec, arguments.block_sizes_of(a), None, bool(a.return_lse),
              bool(a.return_weights))
