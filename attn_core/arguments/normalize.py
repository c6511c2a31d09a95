"""From the door's argument list to one normalised `Call`: every default and every meaning, once.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.masks import dropout
from attn_core.config import metadata as metadata_lib, remat
from attn_core.caches import quantize, update as step_lib
from attn_core.masks import leaves as algebra
from attn_core.masks.info import MaskInfo
from attn_core.sharding import context_parallel as sequence
from attn_core.table import Request
from attn_core.types import (LAYOUTS, MODES, AttentionSpec, BlockSizes, Call, MaskOperands,
                             Operands)

# A value for masked logits up to here cannot be told from -inf; a higher one would be a bias.
HIGHEST_MASK_VALUE = -1e9


class Normalised(NamedTuple):
  """What the arguments mean."""

  call: Call  # without placement
  request: Request
  metadata: metadata_lib.OperationMetadata
  rules: metadata_lib.AttnShardingRules | None  # of layout bthd; None: nothing is spread
  dtype: Any  # of the outputs
  step: step_lib.Step | None  # of a call with a cache


def normalise(a) -> Normalised:
  """Checks all arguments of `attention` and says what they mean.

  Args:
    a: the arguments, as attributes; see `attention`.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  metadata = checked_metadata(a)
  query, key, value = _arrays(a)
  step = _cache_step(a, query, key, value)
  if step is not None:
    a, key, value = _with_step(a, step), step.key, step.value
  scales = (None, None) if step is None else (step.key_scale, step.value_scale)
  quantized = scales[0] is not None
  checks.query_key_value(query, key, value, quantized=quantized)
  dtype = query.dtype
  query, key, value = (x if quantized and x is not query else x.astype(
      compute_dtype_of(a, metadata, dtype)) for x in (query, key, value))
  if quantized:
    key, value, *scales = quantize.constant((key, value, *scales), "cache_view")
  query, key, value = (checkpoint_name(x, name) for x, name in (
      (query, "attn_query"), (key, "attn_key"), (value, "attn_value")))

  mask = _mask(a, query.shape, key.shape)
  arrays, structure = jax.tree.flatten(mask)
  probability = dropout_prob_of(a, metadata)
  operands = Operands(
      query, key, value, _bias(a, query.shape, key.shape),
      MaskOperands(tuple(map(jnp.asarray, arrays))), sinks_of(a, query.shape),
      _dropout_words(a.dropout_rng, probability), *scales)
  spec = AttentionSpec(
      structure, scale_of(a, metadata, query.shape[3]), soft_cap_of(a), probability,
      jnp.promote_types(metadata.runtime_softmax_dtype, query.dtype)
      if query.dtype == jnp.float64 else metadata.runtime_softmax_dtype,
      precision_of(a.precision), bool(a.normalize_output))
  call = Call(operands, spec, block_sizes_of(a), None, bool(a.return_lse), bool(a.return_weights))
  rules = metadata.get_shardings(a.mode, "bthd")
  request = Request(
      features_of(a, call), query.dtype, query.shape[3], value.shape[3], structure,
      (query.shape[1], key.shape[1]), None if operands.bias is None else operands.bias.dtype,
      metadata_lib.resolved_capability(metadata), transfer=metadata.ring.transfer)
  return Normalised(call, request, metadata, rules, dtype, step)


def checked_metadata(a) -> metadata_lib.OperationMetadata:
  """The metadata of a call; checks what means the same with and without pages."""
  metadata = metadata_lib.OperationMetadata() if a.metadata is None else a.metadata
  checks.require(isinstance(metadata, metadata_lib.OperationMetadata), "metadata",
                 type(metadata).__name__, "an OperationMetadata or None")
  checks.one_of("mode", a.mode, MODES)
  checks.one_of("layout", a.layout, LAYOUTS)
  checks.require(a.mask_info is None or isinstance(a.mask_info, MaskInfo), "mask_info",
                 type(a.mask_info).__name__, "a MaskInfo or None; a boolean array is `mask`")
  _check_flags(a)
  return metadata


def to_bthd(x, layout: str):
  """A query, key or value [B, T, H, D] of an array in the caller's layout."""
  return {"bthd": lambda: x, "bhtd": lambda: x.transpose(0, 2, 1, 3), "thd": lambda: x[None]}[
      layout]()


def _arrays(a):
  """query, key and value in layout bthd; None where a cache has the keys and values."""
  rank, letters = (3, "[total, heads, width]") if a.layout == "thd" else (
      4, "[B, T, H, D] in layout bthd, [B, H, T, D] in layout bhtd")
  reads = a.cache_view is not None and a.key is None and a.value is None
  for name in ("query",) if reads else ("query", "key", "value"):
    checks.floating(name, getattr(a, name), rank, f"{letters} (layout={a.layout!r})")
  return [None if x is None else to_bthd(jnp.asarray(x), a.layout)
          for x in (a.query, a.key, a.value)]


def _cache_step(a, query, key, value) -> step_lib.Step | None:
  """Writes the new tokens to the cache, and what to attend to; None: there is no cache."""
  if a.cache_view is None:
    checks.require(a.cache_metadata is None, "cache_metadata",
                   f"{type(a.cache_metadata).__name__} without cache_view", "a cache_view as well")
    return None
  checks.require(a.layout != "thd", "layout", "'thd' with cache_view",
                 "'bthd' or 'bhtd': rows of a cache are sequences of their own")
  checks.require(a.query_offset is None, "query_offset", "a number and cache_view",
                 "None: the cache knows where its rows' tokens stand")
  info = MaskInfo() if a.mask_info is None else a.mask_info
  step_lib.check_beside_cache(a.cache_view, a.mode, info, a.mask)
  reach = [checks.window(a.sliding_window)[0], None if a.chunk_size is None else checks.integer(
      "chunk_size", a.chunk_size, "an int >= 1 (tokens)", lambda x: x >= 1) - 1]
  reach = min((x for x in reach if x is not None), default=None)
  tokens = query.shape[1]
  if key is not None:
    for name, x in (("key", key), ("value", value)):
      checks.require(x.shape[:2] == query.shape[:2], name, checks.describe(x),
                     f"{list(query.shape[:2])} rows and new tokens, as the query "
                     f"{checks.describe(query)}, with a cache")
    tokens = key, value
  return step_lib.take(tokens, a.cache_view, a.cache_metadata, a.mode, reach)


def _with_step(a, step: step_lib.Step):
  """The call of a step, as one without a cache."""
  info = MaskInfo() if a.mask_info is None else a.mask_info
  return a._replace(mask_info=step.mask_info._replace(attention_mask=info.attention_mask))


def _check_flags(a) -> None:
  for name in ("causal", "deterministic", "normalize_output", "prevent_cse", "fused_backward",
               "optimized", "return_lse", "return_weights"):
    value = getattr(a, name)
    checks.require(isinstance(value, (bool, np.bool_)), name, checks.describe(value),
                   "True or False, static")
  if a.mask_value is not None:
    checks.number("mask_value", a.mask_value, f"at most {HIGHEST_MASK_VALUE}: what is masked has "
                  "weight 0 here whatever the value; a higher one is a bias, so pass it as `bias`",
                  lambda x: x <= HIGHEST_MASK_VALUE)
  if a.vmem_limit_bytes is not None:
    checks.integer("vmem_limit_bytes", a.vmem_limit_bytes, "a number of bytes >= 1",
                   lambda x: x >= 1)
  if isinstance(a.policy, str):
    checks.one_of("policy", a.policy, tuple(remat.POLICIES))
  else:
    checks.require(a.policy is None or callable(a.policy), "policy", repr(a.policy),
                   "None, a remat policy such as jax.checkpoint_policies.nothing_saveable, or one "
                   f"of {', '.join(remat.POLICIES)}")
  checks.require(a.init_bias is None or callable(a.init_bias), "init_bias", repr(a.init_bias),
                 "None or a function without arguments that returns the bias")
  checks.require(a.bias is None or a.init_bias is None, "init_bias", "a bias as well",
                 "one of bias and init_bias, since both name the same term")
  for name in ("cum_seqlens_q", "cum_seqlens_k"):
    checks.require(getattr(a, name) is None or a.layout == "thd", name,
                   f"{checks.describe(getattr(a, name))} with layout={a.layout!r}",
                   "layout='thd', the packed one; rows of a batch take segment ids in mask_info")


def compute_dtype_of(a, metadata, dtype):
  """The dtype of the products: `compute_dtype`, else a 16-bit runtime dtype, else the operands'.

  Operands are never widened for a runtime dtype: products accumulate in float32 as it is.
  """
  if a.compute_dtype is None:
    runtime = metadata.runtime_dtype
    return runtime if runtime.itemsize < 4 else dtype
  try:
    wanted = jnp.dtype(a.compute_dtype)
  except TypeError:
    wanted = None
  checks.require(wanted is not None and jnp.issubdtype(wanted, jnp.floating), "compute_dtype",
                 repr(a.compute_dtype), "a floating-point dtype or None")
  return wanted


# --- What is visible. ----------------------------------------------------------------------------


def _mask(a, query_shape, key_shape) -> algebra.Mask:
  """All arguments that hide keys, as one mask with the positions outermost."""
  batch, queries, heads, _ = query_shape
  keys = key_shape[1]
  mask = algebra.causal() if a.causal else algebra.full()
  window = checks.window(a.sliding_window)
  if window != (None, None):
    mask = mask & algebra.window(*window)
  if a.chunk_size is not None:
    mask = mask & algebra.chunk(checks.integer("chunk_size", a.chunk_size, "an int >= 1 (tokens)",
                                               lambda x: x >= 1))
  by_position = mask != algebra.full()
  mask = mask & _explicit_mask(a, (batch, heads, queries, keys))

  info = MaskInfo() if a.mask_info is None else a.mask_info
  _check_info(info, (batch, heads, queries, keys))
  packed = _packed(a, queries, keys)
  checks.require(a.query_offset is None or info.q_positions is None, "query_offset",
                 "mask_info.q_positions as well",
                 "one of the two: both say where the queries stand")
  offset = 0 if a.query_offset is None else _offset(
      a.query_offset, batch if packed is None else a.cum_seqlens_q.shape[0] - 1)
  if packed is not None:
    for name in ("q_segment_ids", "kv_segment_ids"):
      checks.require(getattr(info, name) is None, f"mask_info.{name}", "cum_seqlens_q as well",
                     "one of the two: offsets already say which tokens belong together")
    info = MaskInfo(*[mine if mine is not None else theirs for mine, theirs in zip(info, packed)])
    if not isinstance(offset, int):
      offset = offset[jnp.minimum(jnp.maximum(packed.q_segment_ids, 0), offset.shape[0] - 1)]
    info, offset = info._replace(q_positions=info.q_positions + offset), 0
  elif by_position:
    checks.require(
        queries == keys or a.query_offset is not None or info.q_positions is not None,
        "query_offset and mask_info.q_positions", f"None for both with {queries} queries and "
        f"{keys} keys", "one of them, to say where the queries stand among the keys (query_offset: "
        f"0 for the top left, {keys - queries} for the bottom right), or causal=False")
  mask = info.to_mask(mask)
  if not (isinstance(offset, int) and offset == 0):
    mask = algebra.offset(mask, offset)
  _check_mask_arrays(mask, (batch, heads, queries, keys))
  return mask


def _explicit_mask(a, shape) -> algebra.Mask:
  """`mask`: a mask value or a boolean array."""
  if a.mask is None:
    return algebra.full()
  if isinstance(a.mask, algebra.Mask):
    return a.mask
  rank = 3 if a.layout == "thd" else 4
  expected = ("a Mask value, or a bool array (True = visible) "
              + ("[H or 1, T or 1, S or 1]" if rank == 3 else "[B or 1, H or 1, T or 1, S or 1]")
              + "; an additive float mask is a bias, and a padding mask [B, S] goes through "
              "MaskInfo.from_attention_mask")
  checks.array("mask", a.mask, expected)
  checks.require(a.mask.dtype == bool and a.mask.ndim == rank, "mask", checks.describe(a.mask),
                 expected)
  array = a.mask[None] if rank == 3 else a.mask
  checks.broadcastable("mask", array, shape, "[B, H, T, S]")
  return algebra.dense(array)


def _check_info(info: MaskInfo, shape) -> None:
  """The arrays of mask_info, by the names the caller gave them."""
  batch, _, queries, keys = shape
  for name, letter, length in (("q_segment_ids", "T", queries), ("kv_segment_ids", "S", keys),
                               ("q_positions", "T", queries), ("kv_positions", "S", keys)):
    x = getattr(info, name)
    if x is not None:
      expected = f"int32 [B or 1, {letter}] = [{batch}, {length}]"
      checks.array(f"mask_info.{name}", x, expected)
      checks.require(jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 2
                     and x.shape[0] in (1, batch) and x.shape[1] == length,
                     f"mask_info.{name}", checks.describe(x), expected)
  if info.attention_mask is not None:
    name, expected = "mask_info.attention_mask", (
        "bool [B or 1, H or 1, T or 1, S or 1], True = visible; a padding mask [B, S] goes through "
        "MaskInfo.from_attention_mask, an additive float mask is a bias")
    checks.array(name, info.attention_mask, expected)
    checks.require(info.attention_mask.dtype == bool, name, checks.describe(info.attention_mask),
                   expected)
    checks.broadcastable(name, info.attention_mask, shape, f"{expected}; [B, H, T, S]")


def _is_reordered(a) -> bool:
  """Whether the arrays of the call have their tokens in another order than the sequence."""
  metadata = a.metadata
  return metadata is not None and metadata.ring.layout != "contiguous" and sequence.shards_of(
      metadata.ring, metadata.sequence_axis_name, metadata_lib.resolved_mesh(metadata)) > 1


def _packed(a, queries, keys) -> MaskInfo | None:
  """Segment ids and positions of layout thd."""
  if a.layout != "thd":
    return None
  checks.require(not _is_reordered(a), "layout", "'thd' with metadata.ring.layout="
                 f"{a.metadata and a.metadata.ring.layout!r}", "ring.layout 'contiguous', as "
                 "cum_seqlens_q counts tokens in their own order; or layout 'bthd' with the "
                 "segment ids and positions of MaskInfo.from_cu_seqlens, put through to_layout")
  checks.require(a.cum_seqlens_q is not None, "cum_seqlens_q", "None with layout='thd'",
                 "int32 [B + 1] offsets of the packed sequences")
  checks.cum_seqlens("cum_seqlens_q", a.cum_seqlens_q, queries)
  if a.cum_seqlens_k is None:
    checks.require(keys == queries, "cum_seqlens_k", f"None with {queries} queries and {keys} keys",
                   "the offsets of the keys, since they are not those of the queries")
    return MaskInfo.from_cu_seqlens(a.cum_seqlens_q, queries)
  checks.cum_seqlens("cum_seqlens_k", a.cum_seqlens_k, keys)
  checks.require(a.cum_seqlens_k.shape == a.cum_seqlens_q.shape, "cum_seqlens_k",
                 checks.describe(a.cum_seqlens_k), f"as many sequences as cum_seqlens_q, "
                 f"{checks.describe(a.cum_seqlens_q)}")
  by_position = (a.causal or checks.window(a.sliding_window) != (None, None)
                 or a.chunk_size is not None)
  given = a.query_offset is not None or (a.mask_info is not None
                                         and a.mask_info.q_positions is not None)
  checks.require(given or not by_position or _same_offsets(a), "query_offset",
                 "None with cum_seqlens_k of their own",
                 "where the queries of each sequence stand among its keys: int or int32 [B]; or "
                 "leave cum_seqlens_k out where both are packed alike")
  return MaskInfo.from_cu_seqlens(a.cum_seqlens_q, queries, a.cum_seqlens_k, keys)


def _same_offsets(a) -> bool:
  """Whether queries and keys are known to be packed alike."""
  if a.cum_seqlens_k is a.cum_seqlens_q:
    return True
  traced = any(isinstance(x, jax.core.Tracer) for x in (a.cum_seqlens_q, a.cum_seqlens_k))
  return not traced and np.array_equal(a.cum_seqlens_q, a.cum_seqlens_k)


def _offset(offset, batch: int):
  """A static int, or int32 [B or 1]."""
  # Positions are added to it and must stay int32.
  expected = (f"an int, or int32 [{batch}] with one offset per batch row (tokens), below 2**30 in "
              "magnitude")
  if isinstance(offset, (int, np.integer)) and not isinstance(offset, bool):
    return checks.integer("query_offset", offset, expected, lambda x: abs(x) < 2**30)
  checks.array("query_offset", offset, expected)
  checks.require(jnp.issubdtype(offset.dtype, jnp.integer) and offset.shape in ((), (1,), (batch,)),
                 "query_offset", checks.describe(offset), expected)
  if isinstance(offset, np.ndarray):
    checks.require((abs(offset.astype(np.int64)) < 2**30).all(), "query_offset", offset, expected)
  # Not one of numpy's, which no traced number could index.
  return jnp.asarray(offset).reshape(-1).astype(jnp.int32)


def _check_mask_arrays(mask, shape) -> None:
  """Every array of the mask fits [B, H, T, S] by its role."""
  batch, _, queries, keys = shape
  expected = {algebra.QUERY: (batch, queries), algebra.KEY: (batch, keys), algebra.BATCH: (batch,)}
  letters = {algebra.QUERY: "[B or 1, T]", algebra.KEY: "[B or 1, S]", algebra.BATCH: "[B or 1]"}
  for x, role in zip(jax.tree.leaves(mask), algebra.leaf_roles(mask), strict=True):
    if role == algebra.DENSE:
      checks.broadcastable("a boolean array of the mask", x, shape, "[B, H, T, S]")
    elif role != algebra.WHOLE:
      full = expected[role]
      checks.require(x.ndim == len(full) and x.shape[0] in (1, batch) and x.shape[1:] == full[1:],
                     f"mask: an array per {role} (segment ids, positions, lengths or offsets)",
                     checks.describe(x), f"int32 {letters[role]} = {list(full)}")


# --- The other arguments. ------------------------------------------------------------------------


def _bias(a, query_shape, key_shape):
  bias = a.bias if a.init_bias is None else a.init_bias()
  name = "bias" if a.init_bias is None else "what init_bias returned"
  if bias is None:
    return None
  rank = 3 if a.layout == "thd" else 4
  letters = "[H or 1, T or 1, S or 1]" if rank == 3 else "[B or 1, H or 1, T or 1, S or 1]"
  checks.floating(name, bias, rank, letters)
  bias = bias[None] if rank == 3 else bias
  batch, queries, heads, _ = query_shape
  checks.broadcastable(name, bias, (batch, heads, queries, key_shape[1]), "[B, H, T, S]")
  return jnp.asarray(bias)


def sinks_of(a, query_shape):
  """The logsumexp of each head's sinks, [1, H]: together they weigh as one."""
  sinks, heads = a.softmax_aux, query_shape[2]
  if sinks is None:
    return None
  expected = f"floating-point [{heads}] or [{heads}, n]: one or n logits per query head"
  checks.array("softmax_aux", sinks, expected)
  checks.require(jnp.issubdtype(sinks.dtype, jnp.floating) and sinks.ndim in (1, 2)
                 and sinks.shape[0] == heads and 0 not in sinks.shape, "softmax_aux",
                 checks.describe(sinks), expected)
  sinks = jnp.asarray(sinks).astype(jnp.promote_types(sinks.dtype, jnp.float32))
  return (sinks if sinks.ndim == 1 else _joint(sinks))[None]


def _joint(sinks):
  """The logsumexp of [H, n] over n; -inf with gradient 0 where all are -inf."""
  absent = (sinks == -jnp.inf).all(-1)
  found = jax.nn.logsumexp(jnp.where(absent[:, None], 0, sinks), -1)
  return jnp.where(absent, -jnp.inf, found)


def scale_of(a, metadata, width: int) -> float:
  if a.softmax_scale is not None:
    return checks.number("softmax_scale", a.softmax_scale,
                         "a finite number; a learned or traced scale multiplies the query",
                         np.isfinite)
  return width**-0.5 if metadata.softmax_scale is None else metadata.softmax_scale


def soft_cap_of(a) -> float | None:
  if a.logits_soft_cap is None:
    return None
  return checks.number("logits_soft_cap", a.logits_soft_cap, "a finite number > 0, or None",
                       lambda x: 0 < x < np.inf)


def dropout_prob_of(a, metadata) -> float:
  probability = checks.number("dropout_prob", a.dropout_prob, "a number in [0, 1)",
                              lambda x: 0 <= x < 1)
  if a.deterministic:
    return 0.0
  return probability or metadata.dropout_prob


def _dropout_words(rng, probability: float):
  """The words of the key, which is looked at even where dropout is off; None where it is off."""
  if rng is None and not probability:
    return None
  expected = "one key, of jax.random.key(seed) or PRNGKey(seed)" + (
      ", since deterministic=False and dropout_prob > 0" if probability else "")
  checks.require(isinstance(rng, (jax.Array, np.ndarray)), "dropout_rng", checks.describe(rng),
                 expected)
  typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) and rng.ndim == 0
  raw = rng.dtype == jnp.uint32 and rng.ndim == 1 and rng.shape[0] >= 2
  checks.require(typed or raw, "dropout_rng", checks.describe(rng), expected)
  return dropout.key_words(rng if typed else jnp.asarray(rng)) if probability else None


def precision_of(precision):
  """`precision`, hashable, if a product takes it."""
  precision = tuple(precision) if isinstance(precision, list) else precision
  if precision is None:
    return None
  square = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  try:
    jax.eval_shape(functools.partial(jax.lax.dot, precision=precision), square, square)
  except (TypeError, ValueError) as error:
    raise ValueError(f"precision: got {precision!r}; expected a jax.lax.PrecisionLike") from error
  return precision


def block_sizes_of(a) -> BlockSizes:
  sizes = BlockSizes() if a.block_sizes is None else a.block_sizes
  checks.require(isinstance(sizes, BlockSizes), "block_sizes", repr(sizes), "a BlockSizes or None")
  if a.vmem_limit_bytes is not None:
    sizes = sizes._replace(vmem_limit_bytes=a.vmem_limit_bytes)
  for field, size in sizes._asdict().items():
    if size is not None:
      checks.integer(f"block_sizes.{field}", size, "an int >= 1, or None for the tuned one",
                     lambda x: x >= 1)
  return sizes


def with_configured_blocks(sizes: BlockSizes, metadata, mechanism: str) -> BlockSizes:
  """Block sizes of the call, where absent those of the metadata for the mechanism, then for all."""
  configured = metadata.get_operation_config(mechanism) or BlockSizes()
  general = BlockSizes(metadata.blocksize_q, metadata.blocksize_k, metadata.blocksize_q,
                       metadata.blocksize_k)
  first = lambda *options: next((x for x in options if x is not None), None)
  return BlockSizes(*map(first, sizes, configured, general))


def features_of(a, call: Call) -> dict[str, str]:
  """What the call needs, in the caller's words; see `table.FEATURES`."""
  query, key, value = call.operands[:3]
  info = MaskInfo() if a.mask_info is None else a.mask_info
  dtype = jnp.dtype(query.dtype).name
  needs = {
      "gqa": (key.shape[2] != query.shape[2], f"{query.shape[2]} heads over {key.shape[2]}"),
      "value_width": (value.shape[3] != key.shape[3], f"value width {value.shape[3]} and query "
                      f"width {key.shape[3]}"),
      "float16": (dtype == "float16", "dtype float16"),
      "float64": (dtype == "float64", "dtype float64"),
      "causal": (a.causal, "causal=True"),
      "window": (checks.window(a.sliding_window) != (None, None),
                 f"sliding_window={a.sliding_window}"),
      "chunk": (a.chunk_size is not None, f"chunk_size={a.chunk_size}"),
      "segments": (info.q_segment_ids is not None or info.kv_segment_ids is not None
                   or a.cum_seqlens_q is not None,
                   "cum_seqlens_q" if a.cum_seqlens_q is not None else
                   "mask_info's segment ids"),
      "positions": (a.query_offset is not None or info.q_positions is not None
                    or info.kv_positions is not None, "query_offset or mask_info's positions"),
      "mask": (a.mask is not None or info.attention_mask is not None, "mask"),
      "mask_operands": (algebra.WHOLE in algebra.structure_roles(call.spec.mask),
                        "masks.custom with operands"),
      "bias": (call.operands.bias is not None, "bias"),
      "sinks": (a.softmax_aux is not None, "softmax_aux"),
      "soft_cap": (a.logits_soft_cap is not None, f"logits_soft_cap={a.logits_soft_cap}"),
      "dropout": (call.spec.dropout_prob > 0, f"dropout_prob={call.spec.dropout_prob}"),
      "lse": (a.return_lse, "return_lse=True"),
      "weights": (a.return_weights, "return_weights=True"),
      "unnormalised": (not a.normalize_output, "normalize_output=False"),
      "precision": (a.precision is not None, f"precision={a.precision}"),
      "softmax_dtype": (call.spec.softmax_dtype not in (jnp.float32, jnp.float64),
                        f"runtime_softmax_dtype={call.spec.softmax_dtype}"),
      "block_sizes": (a.block_sizes is not None, "block_sizes"),
      "optimized": (a.optimized, "optimized=True"),
      "vmem_limit_bytes": (call.block_sizes.vmem_limit_bytes is not None,
                           f"vmem_limit_bytes={call.block_sizes.vmem_limit_bytes}"),
      "sequence_layout": (_is_reordered(a), "metadata.ring.layout="
                          f"{a.metadata and a.metadata.ring.layout!r} over several devices"),
      "cache": (a.cache_view is not None or a.cache_metadata is not None,
                "cache_view or cache_metadata"),
      "quantized": (call.operands.key_scale is not None, f"a cache of dtype {key.dtype.name}"),
  }
  return {feature: written for feature, (needed, written) in needs.items() if needed}
