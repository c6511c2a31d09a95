# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""attn_core: every attention mechanism a JAX user knows by name, as plain functions.

`attention(query, key, value, mechanism=...)` runs any of them; `explain` tells which one and why.
"""

from attn_core import adapters, caches, masks, score_mods
from attn_core.arguments.paged_options import PagedOptions
from attn_core.attention import Explanation, attention, explain
from attn_core.caches import CacheMetadata, DenseCache, LatentCache, WindowCache
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import PagesMetadata, PagesV1, PagesV2, PagesV3
from attn_core.config.config import (AttnConfig, EasyMethod, get_axis_dims, get_axis_names,
                                     get_partition_rules)
from attn_core.config.config_dict import AttnConfigDict
from attn_core.config.json import from_pretrained, save_pretrained
from attn_core.config.layers import (AttnMaskDetail, attention_arguments, get_basic_causal_mask,
                                     get_basic_frequencies, get_basic_inv_frequencies,
                                     get_basic_rope, get_fcm_mask, get_mask_details,
                                     granted_freq_max_position_embedding,
                                     granted_mask_max_position_embedding, index_mask, layer_rope,
                                     query_temperature)
from attn_core.config.merge import (add_basic_configurations, attach_custom_arguments,
                                    read_basics_from_config, set_model_mesh)
from attn_core.config.position_bias import layer_score_mod
from attn_core.config.devices import get_optimal_config, tpu_version_check
from attn_core.config.latent import latent_options
from attn_core.rope.frequencies import Rope, inverse_frequencies, rope_from_dict
from attn_core.config.constraints import (apply_qk_shardings, apply_qkv_shardings, build_cache_pos,
                                          default_key_value_sharding, get_sharding_safely,
                                          repeat_key_value, shard_attention_prod)
from attn_core.masks import Mask, MaskInfo
from attn_core.config.metadata import AttnShardingRules, OperationMetadata
from attn_core.mechanism_functions import (
    autoregressive_decodeattn, blocksparse, blockwise, blockwise_attn, cuda_flash_attn2, cudnn,
    flash_attn2, multi_latent_attention, multi_latent_ragged_page_attention, page_attention,
    ragged_page_attention_v2, ragged_page_attention_v3, ring_attention, sdpa, vanilla)
from attn_core.partials import merge_partials
from attn_core.plan.context_parallel import ContextParallelPlan, plan_context_parallel
from attn_core.config.remat import checkpoint_policy
from attn_core.rope.rope import apply_complex_rotary, apply_rotary, rotary, rotary_table
from attn_core.sharding.mesh import auto_expert_mesh, create_mesh, expert_abstract_mesh, expert_mesh
from attn_core.sharding.partition import PartitionAxis
from attn_core.sharding.rules import match_partition_rules
from attn_core.types import (AttentionMechanism, AttentionOutput, BlockSizes, LatentOptions,
                             RingConfig)

# Names that say little by themselves live in these submodules, and are kept here as aliases.
from attn_core.caches import concatenate as concatenate
from attn_core.caches.paged.layouts import Heads as Heads
from attn_core.config.config import get_backend as get_backend, get_mesh as get_mesh
from attn_core.config.json import (extract_commit_hash as extract_commit_hash,
                                   from_dict as from_dict, to_dict as to_dict,
                                   to_diff_dict as to_diff_dict, to_json_file as to_json_file)
from attn_core.config.merge import extras_of as extras_of
from attn_core.plan.context_parallel import Prediction as Prediction, Shapes as Shapes
from attn_core.sharding.partition import resolve as resolve
from attn_core.sharding.token_order import from_layout as from_layout, to_layout as to_layout
from attn_core.mechanism_functions import (
    multi_latent_ragged_page_attention as multi_latent_ragged_page_attention_v1,
    multi_latent_ragged_page_attention as multi_latent_ragged_page_attention_v2)
from attn_core.types import AttentionSpec as AttentionSpec, Operands as Operands

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism", "AttentionOutput", "AttnConfig", "AttnConfigDict", "AttnMaskDetail",
    "AttnShardingRules", "BlockSizes", "CacheMetadata", "ContextParallelPlan", "DenseCache",
    "EasyMethod", "Explanation", "LatentCache", "LatentOptions", "Mask", "MaskInfo",
    "OperationMetadata", "PagedOptions", "PagesLatent", "PagesMetadata", "PagesV1", "PagesV2",
    "PagesV3", "PartitionAxis", "RingConfig", "Rope", "WindowCache", "adapters",
    "add_basic_configurations", "apply_complex_rotary", "apply_qk_shardings",
    "apply_qkv_shardings", "apply_rotary", "attach_custom_arguments", "attention",
    "attention_arguments", "auto_expert_mesh", "autoregressive_decodeattn", "blocksparse",
    "blockwise", "blockwise_attn", "build_cache_pos", "caches", "checkpoint_policy",
    "create_mesh", "cuda_flash_attn2", "cudnn", "default_key_value_sharding",
    "expert_abstract_mesh", "expert_mesh", "explain", "flash_attn2", "from_pretrained",
    "get_axis_dims", "get_axis_names", "get_basic_causal_mask", "get_basic_frequencies",
    "get_basic_inv_frequencies", "get_basic_rope", "get_fcm_mask", "get_mask_details",
    "get_optimal_config", "get_partition_rules", "get_sharding_safely",
    "granted_freq_max_position_embedding", "granted_mask_max_position_embedding", "index_mask",
    "inverse_frequencies", "latent_options", "layer_rope", "layer_score_mod", "masks",
    "match_partition_rules", "merge_partials", "multi_latent_attention",
    "multi_latent_ragged_page_attention", "page_attention",
    "plan_context_parallel", "query_temperature", "ragged_page_attention_v2",
    "ragged_page_attention_v3", "read_basics_from_config", "repeat_key_value", "ring_attention",
    "rope_from_dict", "rotary", "rotary_table", "save_pretrained", "score_mods", "sdpa",
    "set_model_mesh", "shard_attention_prod", "tpu_version_check", "vanilla",
]


def __dir__() -> list[str]:
  """Returns the names that a user needs; aliases and submodules can be imported all the same."""
  return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])
