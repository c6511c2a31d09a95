"""Block-wise attention as Mosaic GPU kernels for Hopper, as the library's `Kernel`."""

from attn_core.kernels.gpu.flash import backward, forward, tiling as tuned
from attn_core.kernels.gpu import mosaic
from attn_core.kernels.common.contract import Kernel
from attn_core.kernels.xla import flash as blockwise
from attn_core.masks import leaves as algebra
from attn_core.types import AttentionSpec, BlockSizes, Operands


def _check(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  tuned.choose(operands, spec, block_sizes)
  tuned.choose_backward(operands, spec, block_sizes)
  if algebra.WHOLE in algebra.structure_roles(spec.mask):
    raise NotImplementedError(
        "mask: masks.custom with operands; the GPU kernels cannot cut them into blocks; "
        "mechanism='blockwise' can")


KERNEL = Kernel("gpu", forward.forward, backward.backward, blockwise.tangent, blockwise.KERNEL,
                _check, mosaic.effects)
