"""attn_core: every attention mechanism a JAX user knows by name, as plain functions.

`attention(query, key, value, mechanism=...)` is the door; `explain` says what it would do.
"""

from attn_core import caches, masks
from attn_core.attention import Explanation, attention, explain
from attn_core.caches import CacheMetadata, DenseCache, WindowCache, concatenate
from attn_core.masks import Mask, MaskInfo
from attn_core.metadata import AttnShardingRules, OperationMetadata
from attn_core.named import autoregressive_decodeattn, blocksparse, blockwise, blockwise_attn
from attn_core.named import cuda_flash_attn2, cudnn, flash_attn2, sdpa, vanilla
from attn_core.sharding.mesh import (auto_expert_mesh, create_mesh, expert_abstract_mesh,
                                     expert_mesh)
from attn_core.sharding.partition import PartitionAxis, resolve
from attn_core.types import (AttentionMechanism, AttentionOutput, AttentionSpec, BlockSizes,
                             Operands)

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism", "AttentionOutput", "AttentionSpec", "AttnShardingRules", "BlockSizes",
    "CacheMetadata", "DenseCache", "Explanation", "Mask", "MaskInfo", "OperationMetadata",
    "Operands", "PartitionAxis", "WindowCache", "attention", "auto_expert_mesh",
    "autoregressive_decodeattn", "blocksparse", "blockwise", "blockwise_attn", "caches",
    "concatenate", "create_mesh", "cuda_flash_attn2", "cudnn", "expert_abstract_mesh",
    "expert_mesh", "explain", "flash_attn2", "masks", "resolve", "sdpa", "vanilla",
]
