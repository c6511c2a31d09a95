# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`AttnConfigDict`: the fields of `AttnConfig` as keyword arguments for a type checker."""

from typing import Any, TypedDict

from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from attn_core.rope.frequencies import Rope
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import BlockSizes

# A hashable, JSON-serializable value; the items of a tuple are such values again.
JsonValue = bool | int | float | str | tuple[Any, ...] | None


class AttnConfigDict(TypedDict, total=False):
  """Fields of `AttnConfig`, each optional; see there for their meaning."""

  sharding_axis_dims: tuple[int, ...]
  sharding_dcn_axis_dims: tuple[int, ...] | None
  sharding_axis_names: tuple[str, ...]
  attn_mechanism: str
  decode_attn_mechanism: str | None
  blocksize_k: int | None
  blocksize_q: int | None
  blocksize_b: int | None
  moe_tiling_size_batch: int
  moe_tiling_size_seqlen: int
  moe_tiling_size_dim: int
  partition_axis: PartitionAxis
  use_sharded_kv_caching: bool
  use_sharding_constraint: bool
  backend: str | None
  platform: str | None
  easy_method: str
  bits: int | None
  scan_ring_attention: bool
  scan_attention_layers: bool
  use_scan_mlp: bool
  scan_mlp_chunk_size: int
  sequence_axis_name: str
  gradient_checkpointing: str
  gradient_checkpointing_targets: tuple[str, ...] | None
  precompute_masks: bool
  kv_cache_quantization_config: JsonValue
  quantization_config: JsonValue
  kv_cache_sharding_sequence_axis_name: str | tuple[str, ...]
  flash_attention_backward_pass_impl: str
  attn_dtype: DTypeLike
  kvdtype: DTypeLike | None
  attn_softmax_dtype: DTypeLike
  fcm_max_ratio: float
  fcm_min_ratio: float
  hardware_abstraction: bool
  pallas_m_block_size: int
  pallas_k_block_size: int
  pallas_n_block_size: int
  moe_method: str
  moe_force_xla_gmm: bool
  use_expert_tensor_mode: bool
  use_ring_of_experts: bool
  fsdp_is_ep_bound: bool
  sp_is_ep_bound: bool
  operation_configs: tuple[tuple[str, BlockSizes], ...]
  model_type: str | None
  num_hidden_layers: int | None
  hidden_size: int | None
  num_attention_heads: int | None
  num_key_value_heads: int | None
  head_dim: int | None
  layer_key_value_heads: tuple[tuple[str, int], ...]
  layer_head_dims: tuple[tuple[str, int], ...]
  value_head_dim: int | None
  latent_width: int | None
  rope_head_dim: int | None
  causal: bool
  softmax_scale: float | None
  logits_soft_cap: float | None
  dropout_prob: float
  sinks: bool
  layer_types: tuple[str, ...] | None
  sliding_window: tuple[int, int] | None
  chunk_size: int | None
  index_topk: int | None
  rope: Rope
  layer_ropes: tuple[tuple[str, Rope], ...]
  layers_without_rope: tuple[int, ...]
  temperature_tuning: tuple[float, int] | None
  temperature_offset: int
  temperature_with_rope: bool
  alibi_bias_max: float | None
  alibi_scaled: bool
  relative_buckets: tuple[int, int] | None
  max_position_embeddings: int | None
  freq_max_position_embeddings: int | None
  mask_max_position_embeddings: int | None
  partition_rules: tuple[tuple[str, PartitionSpec], ...] | None
  mesh: Mesh | None
  extras: tuple[tuple[str, str], ...]
  unset: tuple[str, ...]
