# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Normalizes the arguments of `attention` to one `Call`, with all defaults filled in."""

import functools
from typing import NamedTuple, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.arguments import (block_sizes, features, latent, mask_lookups, normalize_mask,
                                 normalize_score_mod)
from attn_core.arguments.arguments import AttentionArguments, InitBias, RematPolicy, Shaped
from attn_core.caches import quantize, update as step_lib
from attn_core.caches.latent import LatentCache
from attn_core.config import devices, metadata as metadata_lib, remat
from attn_core.config.metadata import OperationMetadata
from attn_core.dispatch.capabilities import Request, request_of
from attn_core.masks import dropout
from attn_core.masks.info import MaskInfo
from attn_core.types import (ARRAY_LAYOUTS, MODES, ArrayLayout, AttentionSpec, Call, MaskOperands,
                             Operands, SlidingWindow, at_least_float32)

# Values of masked logits up to this act like -inf; a higher value would be a bias.
HIGHEST_MASK_VALUE = -1e9

_DEFAULT_METADATA = OperationMetadata()

FLAGS = ("causal", "normalize_output", "prevent_cse", "fused_backward", "optimized", "return_lse",
         "return_weights")


class Normalized(NamedTuple):
  """A normalized call of `attention`, before a mechanism is chosen."""

  call: Call  # without placement
  request: Request  # of the whole call, as if on one device; that of pages is placed
  metadata: OperationMetadata
  rules: metadata_lib.AttnShardingRules | None  # of layout bthd; None: those of pages
  dtype: np.dtype  # of the outputs
  step: step_lib.Step | None  # of a call with a cache


def normalize(a: AttentionArguments) -> Normalized:
  """Checks all arguments of a call without pages and normalizes them.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  metadata = check_options(a)
  query, key, value = _arrays(a)
  info = MaskInfo() if a.mask_info is None else a.mask_info
  scales: list[jax.Array | None] = [None, None]
  step, mode = None, a.mode or "__train__"
  checks.known_sizes("cache_view", a.cache_view, query)
  if a.cache_view is None:
    checks.require(a.cache_metadata is None, "cache_metadata",
                   f"{type(a.cache_metadata).__name__} without cache_view", "a cache_view as well")
  else:
    _check_cache_arguments(a.layout, a.query_offset)
    cache = cast(step_lib.AnyCache | LatentCache, a.cache_view)  # `update_cache` checks it
    cache_metadata = cast(step_lib.CacheMetadata | None, a.cache_metadata)
    mode = step_lib.mode_of(a.mode, cache_metadata, query.shape[1])
    step_lib.check_masks_with_cache(cache, mode, info, a.mask)
    reach = _lookback(a.sliding_window, a.chunk_size)
    step = step_lib.update_cache(
        _new_tokens(query, key, value), cache, cache_metadata, mode, reach)
    key, value, scales = step.key, step.value, [step.key_scale, step.value_scale]
    info = step.mask_info._replace(attention_mask=info.attention_mask)
    a = a._replace(mask_info=info)
  dtype = query.dtype
  query, key, value, scales = _cast(
      (query, key, value), scales, a, metadata.runtime_dtype)
  batch, queries, heads, _ = query.shape
  shape = batch, heads, queries, key.shape[1]
  columns = key.shape[1] * features.split_shards(a.mechanism, metadata)
  mod = normalize_score_mod.term_of(a.score_mod, (*shape[:3], columns))
  mask = normalize_mask.make_mask(normalize_mask.MaskArguments(
      a.causal, a.sliding_window, a.chunk_size, a.mask, info, a.query_offset, a.cum_seqlens_q,
      a.cum_seqlens_k, a.layout, features.permuted_token_order(metadata), columns,
      mod is not None and mod.reads_positions), shape)
  is_in_order = features.permuted_token_order(metadata) is None and columns == shape[3]
  mod = normalize_score_mod.after_look_ups(
      mod, a.score_mod, query.dtype, mask, shape, is_in_order and a.cache_view is None)
  if is_in_order:
    mask = mask_lookups.before(mask, shape)
  arrays, structure = jax.tree.flatten(mask)
  bias = normalize_bias(a.bias, a.init_bias, a.layout, (*shape[:3], columns))
  sinks = normalize_sinks(a.softmax_aux, heads)
  mods, of_mod = jax.tree.flatten(mod)
  options = a.latent_options
  version = metadata_lib.resolved_tpu_version(metadata)
  spec = make_spec(a, metadata, query, structure)._replace(
      score_mod=of_mod, latent_width=None if options is None else options.latent_width,
      matrix_depth=devices.matrix_depth(version), int8_products=devices.multiplies_int8(version),
      num_cores=metadata_lib.resolved_num_cores(metadata))
  operands = Operands(
      query, key, value, bias, MaskOperands(tuple(map(jnp.asarray, arrays))), sinks,
      _dropout_words(a.dropout_rng, spec.dropout_prob), scales[0], scales[1], tuple(mods),
      latent.up_projections(options, query.dtype))
  call = Call(operands, spec, block_sizes.requested(a.block_sizes, a.vmem_limit_bytes), None,
              bool(a.return_lse), bool(a.return_weights))
  rules = metadata.get_shardings(mode, "bthd")
  request = request_of(call, features.features_of(a, call),
                       metadata_lib.resolved_capability(metadata), metadata.ring.transfer, version)
  request = request._replace(latent=latent.widths_of(options),
                             blocks=block_sizes.with_chip_memory(call.block_sizes, version))
  return Normalized(call, request, metadata, rules, dtype, step)


def make_spec(a: AttentionArguments, metadata: OperationMetadata,
              query: jax.Array | jax.ShapeDtypeStruct,
              mask: jax.tree_util.PyTreeDef) -> AttentionSpec:
  """Returns the static description of a call, with or without pages.

  Args:
    a: the arguments.
    metadata: the metadata.
    query: [..., D] of the dtype that is computed with.
    mask: the structure of the mask.
  """
  softmax_dtype = metadata.runtime_softmax_dtype
  assert isinstance(softmax_dtype, np.dtype)  # the metadata made it one
  if query.dtype == jnp.float64:
    softmax_dtype = query.dtype
  return AttentionSpec(
      mask, normalize_scale(a.softmax_scale, metadata.softmax_scale, query.shape[-1]),
      normalize_soft_cap(a.logits_soft_cap),
      normalize_dropout_prob(a.dropout_prob, metadata.dropout_prob, a.deterministic,
                             a.dropout_rng is not None),
      softmax_dtype, normalize_precision(a.precision), bool(a.normalize_output))


# --- Checks that calls with and without pages share. ----------------------------------------------


def check_options(a: AttentionArguments) -> OperationMetadata:
  """Checks the arguments that are independent of shapes; returns the metadata."""
  metadata = _DEFAULT_METADATA if a.metadata is None else a.metadata
  checks.require(isinstance(metadata, OperationMetadata), "metadata",
                 type(metadata).__name__, "an OperationMetadata or None; a mesh is its `mesh`")
  checks.one_of("mode", a.mode, (*MODES, None))
  checks.one_of("layout", a.layout, ARRAY_LAYOUTS)
  checks.require(a.mask_info is None or isinstance(a.mask_info, MaskInfo), "mask_info",
                 type(a.mask_info).__name__, "a MaskInfo or None; a boolean array is `mask`")
  checks.require(a.deterministic is None or isinstance(a.deterministic, (bool, np.bool_)),
                 "deterministic", checks.describe(a.deterministic), "None, True or False, static")
  for name in FLAGS:
    value = getattr(a, name)
    checks.require(isinstance(value, (bool, np.bool_)), name, checks.describe(value),
                   "True or False, static")
  _check_limits(a.mask_value, a.vmem_limit_bytes)
  _check_policy(a.policy)
  checks.require(a.init_bias is None or callable(a.init_bias), "init_bias", repr(a.init_bias),
                 "None or a function without arguments that returns the bias")
  checks.require(a.bias is None or a.init_bias is None, "init_bias", "a bias as well",
                 "one of bias and init_bias, since both name the same term")
  for name in ("cum_seqlens_q", "cum_seqlens_k"):
    checks.require(getattr(a, name) is None or a.layout == "thd", name,
                   f"{checks.describe(getattr(a, name))} with layout={a.layout!r}",
                   "layout='thd', the packed one; rows of a batch take segment ids in mask_info")
  return metadata


def _check_limits(mask_value: float | None, vmem_limit_bytes: int | None) -> None:
  if mask_value is not None:
    checks.number("mask_value", mask_value, f"at most {HIGHEST_MASK_VALUE}: a masked key has "
                  "weight 0 here whatever the value; a higher one is a bias, so pass it as `bias`",
                  lambda x: x <= HIGHEST_MASK_VALUE)
  if vmem_limit_bytes is not None:
    checks.integer("vmem_limit_bytes", vmem_limit_bytes, "a number of bytes >= 1",
                   lambda x: x >= 1)


def _check_policy(policy: RematPolicy | str | None) -> None:
  if isinstance(policy, str):
    checks.one_of("policy", policy, tuple(remat.POLICIES))
  else:
    checks.require(policy is None or callable(policy), "policy", repr(policy),
                   "None, a remat policy such as jax.checkpoint_policies.nothing_saveable, or one "
                   f"of {', '.join(remat.POLICIES)}")


# --- Query, key and value, and the cache. ---------------------------------------------------------


def to_bthd(x: jax.Array, layout: ArrayLayout) -> jax.Array:
  """Converts a query, key or value from the caller's layout to [B, T, H, D]."""
  if layout == "bhtd":
    return x.transpose(0, 2, 1, 3)
  return x[None] if layout == "thd" else x


def _arrays(a: AttentionArguments) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns query, key and value in layout bthd; None where a cache holds the keys and values."""
  rank, dimensions = (3, "[total, heads, width]") if a.layout == "thd" else (
      4, "[B, T, H, D] in layout bthd, [B, H, T, D] in layout bhtd, with any dimensions for B")
  given = {"query": a.query, "key": a.key, "value": a.value}
  if a.cache_view is not None and a.key is None and a.value is None:
    given = {"query": a.query}
  for name, x in given.items():
    checks.require(getattr(x, "dtype", None) != jnp.int8, name, checks.describe(x), "a float "
                   "dtype: int8 with scales is a DenseCache(key, value, starts, lengths, overflow, "
                   "key_scale, value_scale), or multiplied by them (see docs/equivalents.md)")
  arrays = {name: checks.floating(name, x, rank, f"{dimensions} (layout={a.layout!r})")
            for name, x in given.items()}
  query, key, value = (to_bthd(jnp.asarray(arrays[name]), a.layout) if name in arrays else None
                       for name in ("query", "key", "value"))
  return cast(jax.Array, query), cast(jax.Array, key), cast(jax.Array, value)


def _check_cache_arguments(layout: ArrayLayout, query_offset: ArrayLike | None) -> None:
  checks.require(layout != "thd", "layout", "'thd' with cache_view",
                 "'bthd' or 'bhtd': each row of a cache is one sequence")
  checks.require(query_offset is None, "query_offset", "a number and cache_view",
                 "None: the cache knows the positions of its rows' tokens")


def _lookback(sliding_window: SlidingWindow, chunk_size: int | None) -> int | None:
  """Returns the largest distance of a visible key before its query (tokens); None: unbounded."""
  left, size = checks.window(sliding_window)[0], checks.chunk_size(chunk_size)
  return min((x for x in (left, size and size - 1) if x is not None), default=None)


def _new_tokens(query: jax.Array, key: jax.Array | None,
                value: jax.Array | None) -> int | tuple[jax.Array, jax.Array]:
  """Returns the new tokens' keys and values, or the number of queries where there are none."""
  if key is None or value is None:
    return query.shape[1]
  for name, x in (("key", key), ("value", value)):
    checks.require(x.shape[:2] == query.shape[:2], name, checks.describe(x),
                   f"{list(query.shape[:2])} rows and new tokens, as the query "
                   f"{checks.describe(query)}, with a cache")
  return (key, value) if query.shape[1] else 0  # without new tokens nothing is written


def _cast(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    scales: list[jax.Array | None], a: AttentionArguments, runtime_dtype: DTypeLike | None,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
  """Casts query, key and value to the dtype of the products, but those of an 8-bit cache.

  Args:
    arrays: query [B, T, H, D], key [B, S, K, D], value [B, S, K, E].
    scales: of key and value [B, S, K]; None: not quantized.
    a: the caller's arguments.
    runtime_dtype: that of the metadata.

  Returns:
    query, key, value and the scales.
  """
  query, key, value = arrays
  quantized, mixed = scales[0] is not None, a.compute_dtype is not None
  if a.latent_options is None:
    checks.query_key_value(query, key, value, quantized=quantized, mixed=mixed)
  else:
    latent.check(query, key, value, a, quantized=quantized)
  dtype = normalize_compute_dtype(a.compute_dtype, runtime_dtype, query.dtype)
  if quantized:
    key, value, scales = quantize.constant((key, value, scales), "cache_view")
  else:
    key, value = key.astype(dtype), value.astype(dtype)
  return (checkpoint_name(query.astype(dtype), "attn_query"), checkpoint_name(key, "attn_key"),
          checkpoint_name(value, "attn_value"), scales)


def normalize_compute_dtype(compute_dtype: DTypeLike | None, runtime_dtype: DTypeLike | None,
                            dtype: np.dtype) -> np.dtype:
  """Returns the dtype of the products: `compute_dtype`, a 16-bit runtime dtype, or the operands'.

  Operands are never widened for a runtime dtype: products accumulate in float32 in any case.
  """
  if compute_dtype is None:
    assert isinstance(runtime_dtype, np.dtype)  # the metadata made it one
    return runtime_dtype if runtime_dtype.itemsize < 4 else dtype
  expected = "a floating-point dtype or None"
  wanted = checks.dtype("compute_dtype", compute_dtype, expected)
  checks.require(jnp.issubdtype(wanted, jnp.floating), "compute_dtype", repr(compute_dtype),
                 expected)
  return wanted


# --- The other arguments. -------------------------------------------------------------------------


def normalize_bias(bias: Shaped | None, init_bias: InitBias | None, layout: ArrayLayout,
                   shape: tuple[int, ...]) -> jax.Array | None:
  """Returns the bias [B or 1, H or 1, T or 1, S or 1], calling `init_bias` where it is given."""
  given = bias if init_bias is None else init_bias()
  if given is None:
    return None
  name = "bias" if init_bias is None else "what init_bias returned"
  rank = 3 if layout == "thd" else 4
  dimensions = "[H or 1, T or 1, S or 1]" if rank == 3 else "[B or 1, H or 1, T or 1, S or 1]"
  array = checks.floating(name, given, rank, dimensions)
  array = array[None] if rank == 3 else array
  checks.broadcastable(name, array, shape, "[B, H, T, S]")
  return jnp.asarray(array)


def normalize_sinks(softmax_aux: Shaped | None, heads: int) -> jax.Array | None:
  """Returns the logsumexp of each head's sinks, [1, H]: together they weigh as one."""
  if softmax_aux is None:
    return None
  expected = (f"floating-point [{heads}] or [{heads}, num_sinks]: one or several logits per query "
              "head")
  given = checks.array("softmax_aux", softmax_aux, expected)
  checks.require(jnp.issubdtype(given.dtype, jnp.floating) and given.ndim in (1, 2)
                 and given.shape[0] == heads and 0 not in given.shape, "softmax_aux",
                 checks.describe(given), expected)
  sinks = jnp.asarray(given).astype(at_least_float32(given.dtype))
  return (sinks if sinks.ndim == 1 else _joint_sinks(sinks))[None]


def _joint_sinks(sinks: jax.Array) -> jax.Array:
  """Returns the logsumexp of [H, num_sinks] per head; -inf with gradient 0 where all are -inf."""
  absent = (sinks == -jnp.inf).all(-1)
  found = jax.nn.logsumexp(jnp.where(absent[:, None], 0, sinks), -1)
  return jnp.where(absent, -jnp.inf, found)


def normalize_scale(softmax_scale: float | None, default: float | None, width: int) -> float:
  """Returns the scale: the call's, the metadata's, or width**-0.5."""
  if softmax_scale is not None:
    return checks.number("softmax_scale", softmax_scale,
                         "a finite number; a learned or traced scale multiplies the query",
                         np.isfinite)
  return width**-0.5 if default is None else default


def normalize_soft_cap(logits_soft_cap: float | None) -> float | None:
  """Returns the soft cap of the logits; None: no cap."""
  if logits_soft_cap is None:
    return None
  return checks.number("logits_soft_cap", logits_soft_cap, "a finite number > 0, or None",
                       lambda x: 0 < x < np.inf)


def normalize_dropout_prob(dropout_prob: float, default: float, deterministic: bool | None,
                           has_key: bool) -> float:
  """Returns the probability that a weight is dropped; 0: dropout is off.

  Args:
    dropout_prob: the call's; 0: `default` instead.
    default: the metadata's.
    deterministic: True: off; False: on; None: on if there is a key.
    has_key: whether the call has a key.
  """
  probability = checks.number("dropout_prob", dropout_prob, "a number in [0, 1)",
                              lambda x: 0 <= x < 1)
  is_off = not has_key if deterministic is None else deterministic
  return 0.0 if is_off else probability or default


def _dropout_words(rng: ArrayLike | None, probability: float) -> jax.Array | None:
  """Returns the words of the key, which is checked even where dropout is off; None: it is off."""
  if rng is None and not probability:
    return None
  expected = "one key, of jax.random.key(seed) or PRNGKey(seed)" + (
      ", for deterministic=False and dropout_prob > 0; or deterministic=True"
      if rng is None else "")
  checks.require(isinstance(rng, (jax.Array, np.ndarray)), "dropout_rng", checks.describe(rng),
                 expected)
  key = cast(checks.Array, rng)
  checks.require(key.dtype != bool, "dropout_rng", checks.describe(key), "a key; a mask of kept "
                 "weights multiplies the weights of vanilla(..., return_weights=True), which then "
                 "weigh the values (see docs/equivalents.md)")
  typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
  raw = key.dtype == jnp.uint32 and key.ndim == 1 and key.shape[0] >= 2
  checks.require(typed or raw, "dropout_rng", checks.describe(key), expected)
  words = key if isinstance(key, jax.Array) else jnp.asarray(key)
  return dropout.key_words(words) if probability else None


def normalize_precision(precision: jax.lax.PrecisionLike) -> jax.lax.PrecisionLike:
  """Returns `precision` as a hashable value that a product accepts."""
  if precision is None:
    return None
  hashable = tuple(precision) if isinstance(precision, list) else precision
  square = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  try:
    jax.eval_shape(functools.partial(jax.lax.dot, precision=hashable), square, square)
  except (TypeError, ValueError) as error:
    raise ValueError(f"precision: got {hashable!r}; expected a jax.lax.PrecisionLike of both "
                     "products (see docs/equivalents.md)") from error
  return hashable
