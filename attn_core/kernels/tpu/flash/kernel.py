"""Block-wise attention as Pallas TPU kernels: forward and backward in linear memory.

Scores are computed transposed, keys along the sublanes and queries along the
lanes: reductions over keys then need no movement across lanes, the numbers of a
row (maximum, sum, lse) are dense vectors, and the product with the values fills
the whole width of the matrix unit with queries, whatever the head dimension.
The grid visits only blocks with something to see (`schedule`).

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.
"""

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common.contract import Carrying, Kernel
from attn_core.kernels.tpu.flash import backward, forward, schedule, tiling as tuned
from attn_core.kernels.xla import flash as blockwise, tile_ops as steps
from attn_core.types import AttentionSpec, BlockSizes, Operands


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  mask = steps.mask_of(operands, spec)
  for is_backward in (False, True):
    cut = tuned.choose(operands, block_sizes, mask, backward=is_backward)
    tuned.vmem_limit(block_sizes, cut, operands, backward=is_backward)
    # A kernel's own: the backward has one for every range of queries that vector memory holds.
    for query_blocks in tuned.query_ranges(operands, cut) if is_backward else [None]:
      schedule.check(mask, cut, by_keys=is_backward, query_blocks=query_blocks)


def effects():
  """Those of any TPU kernel: none, but for what interpret mode does on the host."""
  def copy(x, y):
    y[...] = x[...]
  shape = jax.core.ShapedArray((8, 128), jnp.float32)
  return jax.make_jaxpr(pl.pallas_call(copy, out_shape=shape))(shape).effects


KERNEL = Kernel("tpu", forward.forward, backward.backward, blockwise.tangent, blockwise.KERNEL,
                _check, effects)
# The same, able to send arrays to another device while it computes.
CARRYING = KERNEL._replace(name="tpu_remote",
                           carrying=Carrying(forward.carrying, backward.carrying))
