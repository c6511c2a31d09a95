"""attn_core: every attention mechanism a JAX user knows by name, as plain functions.

`attention(query, key, value, mechanism=...)` is the door; `explain` says what it would do.
"""

from attn_core import masks
from attn_core.attention import Explanation, attention, explain
from attn_core.masks import Mask, MaskInfo
from attn_core.metadata import AttnShardingRules, OperationMetadata
from attn_core.named import blocksparse, blockwise, blockwise_attn, cuda_flash_attn2, cudnn
from attn_core.named import flash_attn2, ring_attention, sdpa, vanilla
from attn_core.planning.context_parallel import (ContextParallelPlan, Prediction, Shapes,
                                                 plan_context_parallel)
from attn_core.sharding.layouts import from_layout, to_layout
from attn_core.sharding.mesh import (auto_expert_mesh, create_mesh, expert_abstract_mesh,
                                     expert_mesh)
from attn_core.sharding.partition import PartitionAxis, resolve
from attn_core.types import (AttentionMechanism, AttentionOutput, AttentionSpec, BlockSizes,
                             Operands, RingConfig)

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism", "AttentionOutput", "AttentionSpec", "AttnShardingRules", "BlockSizes",
    "ContextParallelPlan", "Explanation", "Mask", "MaskInfo", "OperationMetadata", "Operands",
    "PartitionAxis", "Prediction", "RingConfig", "Shapes", "attention", "auto_expert_mesh",
    "blocksparse", "blockwise", "blockwise_attn", "create_mesh", "cuda_flash_attn2", "cudnn",
    "expert_abstract_mesh", "expert_mesh", "explain", "flash_attn2", "from_layout", "masks",
    "plan_context_parallel", "resolve", "ring_attention", "sdpa", "to_layout", "vanilla",
]
