# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block-wise attention as Mosaic GPU kernels for Hopper, as the library's `Kernel`."""

import functools

from attn_core.kernels.common import listed
from attn_core.kernels.common.contract import Kernel
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.gpu.flash import backward, forward, tiling
from attn_core.masks import mask as mask_lib
from attn_core.types import AttentionSpec, BlockSizes, Operands


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  tiling.make_tiling(operands, spec, block_sizes)
  tiling.make_backward_tilings(operands, spec, block_sizes)
  _, of_visited = listed.without_lists(operands, spec)
  if mask_lib.WHOLE in mask_lib.structure_roles(of_visited.mask):
    raise NotImplementedError(
        "mask: masks.custom with operands; the GPU kernels cannot cut them into blocks; "
        "mechanism='blockwise' can")


@functools.cache
def make_kernel(fallback: Kernel) -> Kernel:
  """Returns the kernel; `fallback` computes tangents, some biases and second derivatives."""
  return Kernel("gpu", forward.forward,
                functools.partial(backward.backward, fallback=fallback.backward),
                fallback.tangent, fallback, _check, mosaic.effects)
