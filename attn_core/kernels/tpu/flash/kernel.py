# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-wise attention as Pallas TPU kernels: forward and backward in linear memory.

Scores are computed transposed, with keys along the sublanes and queries along the lanes:
reductions over keys then need no movement across lanes, the numbers of a row (m_i, l_i, lse) are
dense vectors, and the product with the values fills the whole width of the matrix unit with
queries, whatever the head dimension. The grid visits only blocks with visible entries
(`schedule`).

Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning,
https://arxiv.org/abs/2307.08691.
"""

import functools

from attn_core.kernels.common import listed
from attn_core.kernels.common.contract import Kernel, RemoteCopyFns
from attn_core.kernels.tpu import launch
from attn_core.kernels.tpu.flash import backward, forward, scalar_memory, tiling as tiling_lib
from attn_core.types import AttentionSpec, BlockSizes, Operands


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  """Raises where the forward or the backward would; see `contract.Kernel`."""
  operands, spec = listed.shapes_of_local_rows(operands, spec)
  for is_backward in (False, True):
    tiling = tiling_lib.make_tiling(operands, spec, block_sizes, backward=is_backward)
    tiling_lib.vmem_limit(block_sizes, tiling, operands, backward=is_backward)
    scalar_memory.num_groups(operands, spec, tiling, by_keys=is_backward, requested=block_sizes)


@functools.cache
def make_kernel(fallback: Kernel) -> Kernel:
  """Returns the kernel.

  Args:
    fallback: computes tangents, second derivatives, and cotangents of a bias and of arrays of a
      score mod with a number for every pair.
  """
  return Kernel("tpu", forward.forward,
                functools.partial(backward.backward, fallback=fallback.backward),
                fallback.tangent, fallback, _check, launch.effects)


@functools.cache
def make_remote_copy_kernel(fallback: Kernel) -> Kernel:
  """Returns `make_kernel`, able to copy arrays to another device while it computes."""
  return make_kernel(fallback)._replace(name="tpu_remote", remote_copy_fns=RemoteCopyFns(
      forward.forward_with_remote_copy,
      functools.partial(backward.backward_with_remote_copy, fallback=fallback.backward)))
