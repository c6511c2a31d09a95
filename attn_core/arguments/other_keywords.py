# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keywords of other libraries' attention functions, for errors that name what to write instead."""

from collections.abc import Callable
import functools
import inspect
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# What to write -> the keywords of others that it stands for.
_EQUIVALENTS = {
    "dropout_prob= and dropout_rng=, a key of which the kept weights are a function; a mask of "
    "your own: 'A dropout mask' in docs/equivalents.md": "dropout_mask keep_mask",
    "return_lse=True; the maximum and the sum apart: 'Partial results' in docs/equivalents.md":
        "return_residual return_residuals return_softmax_stats return_max_logits return_stats "
        "save_residuals return_aux",
    "a cache with scales, or arrays that are multiplied by them: 'Quantized queries, keys and "
    "values' in docs/equivalents.md":
        "query_quant key_quant value_quant quant quantization query_scale key_scale value_scale "
        "q_scale k_scale v_scale q_descale k_descale v_descale descale_q descale_k descale_v",
    "precision= of both products: 'Precision of each product' in docs/equivalents.md":
        "q_k_dot_precision weights_v_dot_precision qk_precision pv_precision einsum_precision",
    "attn_core.adapters.flax_attention_fn as the attention_fn of a layer of Flax":
        "broadcast_dropout",
    "mechanism=": "implementation impl backend attn_mechanism attention_type",
    "softmax_scale=": "scale sm_scale scaling",
    "causal=": "is_causal use_causal_mask",
    "mask=, a boolean array or a mask of attn_core.masks": "attn_mask attention_mask",
    "mask=masks.custom(mask_mod), or one that has a name: docs/coming_from/flex_attention.md":
        "block_mask mask_mod",
    "no keyword: query heads share the heads of a key that has fewer": "enable_gqa",
    "block_sizes=, which no result needs": "kernel_options",
    "mask=masks.lengths(...)": "query_seq_lengths key_value_seq_lengths kv_lengths kv_seq_lengths",
    "mask_info=MaskInfo(q_segment_ids=..., kv_segment_ids=...)":
        "segment_ids q_segment_ids kv_segment_ids query_segment_ids decoder_segment_ids",
    "bias=": "attn_bias attention_bias ab position_bias",
    "sliding_window=(left, right)": "window window_size local_window_size",
    "logits_soft_cap=": "softcap soft_cap logit_cap logits_softcap attn_logits_soft_cap",
    "softmax_aux=": "sinks sink s_aux attention_sinks",
    "dropout_prob=": "dropout dropout_p dropout_rate",
    "dropout_rng=": "rng dropout_key",
    "return_lse=True": "return_logsumexp return_attn_probs",
    "return_weights=True": "output_attentions need_weights return_attention_scores",
    "cache_view=": "cache kv_cache past_key_values past_key_value",
    "cum_seqlens_q= and cum_seqlens_k=": "cu_seqlens cu_seqlens_q cu_seqlens_k",
    "metadata=OperationMetadata(mesh=...)": "mesh",
    "cache_metadata=PagesMetadata(...)": "kv_lens page_indices cu_q_lens block_tables slot_mapping",
}
EQUIVALENTS = {name: text for text, names in _EQUIVALENTS.items() for name in names.split()}


def cure(name: str) -> str:
  """Returns "expected ..." for an error about an unknown keyword; "" if it stands for nothing."""
  return f"expected {EQUIVALENTS[name]}" if name in EQUIVALENTS else ""


def explained(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
  """Decorates a function so that its error about an unknown keyword names what to write instead."""
  known = frozenset(inspect.signature(function).parameters)

  @functools.wraps(function)
  def checked(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
    unknown = min(keywords.keys() - known, default=None)
    if unknown is not None:
      raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}; "
                      f"{cure(unknown) or 'the keywords are in help(attn_core.attention)'}")
    return function(*args, **keywords)

  return checked
