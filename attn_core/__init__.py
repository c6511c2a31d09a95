# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""attn_core: every attention mechanism a JAX user knows by name, as plain functions.

`attention(query, key, value, mechanism=...)` runs any of them; `explain` tells which one and why.
"""

from attn_core import adapters, caches, masks
from attn_core.attention import Explanation, attention, explain
from attn_core.caches import CacheMetadata, DenseCache, WindowCache, concatenate
from attn_core.caches.paged.layouts import Heads, PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.config.config import (AttnConfig, EasyMethod, get_axis_dims, get_axis_names,
                                     get_backend, get_mesh, get_partition_rules)
from attn_core.config.config_dict import AttnConfigDict
from attn_core.config.json import (extract_commit_hash, from_dict, from_pretrained,
                                   save_pretrained, to_dict, to_diff_dict, to_json_file)
from attn_core.config.layers import (AttnMaskDetail, attention_arguments, get_basic_causal_mask,
                                     get_basic_frequencies, get_basic_inv_frequencies,
                                     get_basic_rope, get_fcm_mask, get_mask_details,
                                     granted_freq_max_position_embedding,
                                     granted_mask_max_position_embedding, index_mask, layer_rope,
                                     query_temperature)
from attn_core.config.merge import (add_basic_configurations, attach_custom_arguments, extras_of,
                                    read_basics_from_config, set_model_mesh)
from attn_core.config.devices import get_optimal_config, tpu_version_check
from attn_core.rope.frequencies import Rope, inverse_frequencies, rope_from_dict
from attn_core.config.constraints import (apply_qk_shardings, apply_qkv_shardings,
                                           build_cache_pos, default_key_value_sharding,
                                           get_sharding_safely, repeat_key_value,
                                           shard_attention_prod)
from attn_core.masks import Mask, MaskInfo
from attn_core.config.metadata import AttnShardingRules, OperationMetadata
from attn_core.mechanism_functions import (PagedOptions, autoregressive_decodeattn, blocksparse,
                                           blockwise, blockwise_attn, cuda_flash_attn2, cudnn,
                                           flash_attn2, page_attention, ragged_page_attention_v2,
                                           ragged_page_attention_v3, ring_attention, sdpa, vanilla)
from attn_core.plan.context_parallel import (ContextParallelPlan, Prediction, Shapes,
                                             plan_context_parallel)
from attn_core.config.remat import checkpoint_policy
from attn_core.rope.rope import apply_complex_rotary, apply_rotary, rotary, rotary_table
from attn_core.sharding.token_order import from_layout, to_layout
from attn_core.sharding.mesh import auto_expert_mesh, create_mesh, expert_abstract_mesh, expert_mesh
from attn_core.sharding.partition import PartitionAxis, resolve
from attn_core.sharding.rules import match_partition_rules
from attn_core.types import (AttentionMechanism, AttentionOutput, AttentionSpec, BlockSizes,
                             Operands, RingConfig)

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism", "AttentionOutput", "AttentionSpec", "AttnConfig", "AttnConfigDict",
    "AttnMaskDetail", "AttnShardingRules", "BlockSizes", "CacheMetadata", "ContextParallelPlan",
    "DenseCache", "EasyMethod", "Explanation", "Heads", "Mask", "MaskInfo", "Operands",
    "OperationMetadata", "PagedOptions", "PagesMetadata", "PagesV1", "PagesV2", "PagesV3",
    "PartitionAxis", "Prediction", "RingConfig", "Rope", "Shapes", "WindowCache",
    "adapters", "add_basic_configurations", "apply_complex_rotary", "apply_qk_shardings",
    "apply_qkv_shardings", "apply_rotary", "attach_custom_arguments", "attention",
    "attention_arguments", "auto_expert_mesh", "autoregressive_decodeattn", "blocksparse",
    "blockwise", "blockwise_attn",
    "build_cache_pos", "caches", "checkpoint_policy", "concatenate", "create_mesh",
    "cuda_flash_attn2", "cudnn", "default_key_value_sharding", "expert_abstract_mesh",
    "expert_mesh", "explain", "extract_commit_hash", "extras_of", "flash_attn2", "from_dict",
    "from_layout", "from_pretrained", "get_axis_dims", "get_axis_names", "get_backend",
    "get_basic_causal_mask", "get_basic_frequencies", "get_basic_inv_frequencies", "get_basic_rope",
    "get_fcm_mask", "get_mask_details", "get_mesh", "get_optimal_config", "get_partition_rules",
    "get_sharding_safely", "granted_freq_max_position_embedding",
    "granted_mask_max_position_embedding", "index_mask", "inverse_frequencies", "layer_rope",
    "masks", "match_partition_rules", "page_attention", "plan_context_parallel",
    "query_temperature", "ragged_page_attention_v2", "ragged_page_attention_v3",
    "read_basics_from_config", "repeat_key_value", "resolve", "ring_attention", "rope_from_dict",
    "rotary", "rotary_table", "save_pretrained", "sdpa", "set_model_mesh", "shard_attention_prod",
    "to_dict", "to_diff_dict", "to_json_file", "to_layout", "tpu_version_check", "vanilla",
]
