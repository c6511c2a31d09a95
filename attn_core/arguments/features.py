# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the features that a call of `attention` needs, by the arguments that the caller gave."""

import jax.numpy as jnp

from attn_core import checks
from attn_core.arguments import mask_lookups
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches import quantize
from attn_core.config import metadata as metadata_lib
from attn_core.config.metadata import OperationMetadata
from attn_core.masks import leaves, mask as mask_lib
from attn_core.masks.info import MaskInfo
from attn_core.score_mods import score_mod
from attn_core.sharding import context_parallel
from attn_core.types import Call, holds_pairs


def permuted_token_order(metadata: OperationMetadata | None) -> str | None:
  """Returns `ring.layout` where arrays hold their tokens permuted; None: in their own order."""
  if metadata is None or metadata.ring.layout == "contiguous":
    return None
  shards = context_parallel.shards_of(metadata.ring, metadata.sequence_axis_name,
                                      metadata_lib.resolved_mesh(metadata))
  return metadata.ring.layout if shards > 1 else None


def split_shards(mechanism: str, metadata: OperationMetadata) -> int:
  """Returns the shards of the keys, of which a call inside the caller's shard_map gets one.

  Its biases and boolean masks have the columns of all shards.
  """
  if str(mechanism) != "ring" and permuted_token_order(metadata) is None:
    return 1
  return context_parallel.split_shards(metadata.ring, metadata.sequence_axis_name)


def features_of(a: AttentionArguments, call: Call) -> dict[str, str]:
  """Returns {feature: the argument that needs it, as in an error}; see `capabilities.FEATURES`."""
  query, key, value = call.operands[:3]
  info = MaskInfo() if a.mask_info is None else a.mask_info
  dtype = jnp.dtype(query.dtype).name
  order, pairs = permuted_token_order(a.metadata), holds_pairs(call.operands.key_scale, key)
  nodes = [*mask_lib.nodes(mask_lib.of_structure(call.spec.mask))]
  needs = {
      "gqa": (key.shape[2] != query.shape[2], f"{query.shape[2]} heads over {key.shape[2]}"),
      "value_width": (a.latent_options is None and value.shape[3] != key.shape[3],
                      f"value width {value.shape[3]} and query width {key.shape[3]}"),
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
      "mask_operands": (mask_lookups.reads_arrays(mask_lib.of_structure(call.spec.mask)),
                        "masks.custom that reads arrays"),
      "selected": (any(isinstance(x, leaves.Selected) for x in nodes),
                   "masks.selected_blocks or masks.selected_keys"),
      "bias": (call.operands.bias is not None, "bias"),
      "score_mod": (a.score_mod is not None, "score_mod"),
      "score_function": (call.spec.has_score_mod
                         and not score_mod.of_structure(call.spec.score_mod).is_additive,
                         "score_mod"),
      "sinks": (a.softmax_aux is not None, "softmax_aux"),
      "soft_cap": (a.logits_soft_cap is not None, f"logits_soft_cap={a.logits_soft_cap}"),
      "dropout": (call.spec.dropout_prob > 0, f"dropout_prob={call.spec.dropout_prob}"),
      "lse": (a.return_lse, "return_lse=True"),
      "weights": (a.return_weights, "return_weights=True"),
      "unnormalized": (not a.normalize_output, "normalize_output=False"),
      "precision": (a.precision is not None, f"precision={a.precision}"),
      "softmax_dtype": (call.spec.softmax_dtype not in (jnp.float32, jnp.float64),
                        f"runtime_softmax_dtype={call.spec.softmax_dtype}"),
      "block_sizes": (a.block_sizes is not None, "block_sizes"),
      "optimized": (a.optimized, "optimized=True"),
      "vmem_limit_bytes": (call.block_sizes.vmem_limit_bytes is not None,
                           f"vmem_limit_bytes={call.block_sizes.vmem_limit_bytes}"),
      "sequence_layout": (
          order is not None, f"metadata.ring.layout={order!r} over several devices"),
      "cache": (a.cache_view is not None or a.cache_metadata is not None,
                "cache_view or cache_metadata"),
      "latent": (a.latent_options is not None, "latent_options"),
      "quantized": (call.operands.key_scale is not None,
                    f"a cache of dtype {quantize.dtype_name(key.dtype)}"),
      "int4": (pairs, "a cache of dtype int4"),
  }
  return {feature: written for feature, (needed, written) in needs.items() if needed}
