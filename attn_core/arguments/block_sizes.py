# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block sizes of a call: those of the caller, then those of the metadata, then those of a chip."""

from attn_core import checks
from attn_core.config import devices
from attn_core.config.metadata import OperationMetadata
from attn_core.types import BlockSizes


def requested(block_sizes: BlockSizes | None, vmem_limit_bytes: int | None) -> BlockSizes:
  """Returns the block sizes that the caller asks for.

  Raises:
    ValueError: `block_sizes` is not a BlockSizes, or a size is not an int >= 1.
  """
  sizes = BlockSizes() if block_sizes is None else block_sizes
  checks.require(isinstance(sizes, BlockSizes), "block_sizes", repr(sizes), "a BlockSizes or None")
  if vmem_limit_bytes is not None:
    sizes = sizes._replace(vmem_limit_bytes=vmem_limit_bytes)
  for field, size in sizes._asdict().items():
    if size is not None:
      checks.integer(f"block_sizes.{field}", size, "an int >= 1, or None for the tuned one",
                     lambda x: x >= 1)
  return sizes


def with_configured_blocks(sizes: BlockSizes, metadata: OperationMetadata,
                           mechanism: str) -> BlockSizes:
  """Fills absent block sizes with the metadata's for the mechanism, then with those for all."""
  configured = metadata.get_operation_config(mechanism) or BlockSizes()
  general = BlockSizes(metadata.blocksize_q, metadata.blocksize_k, metadata.blocksize_q,
                       metadata.blocksize_k)
  return BlockSizes(*(next((x for x in options if x is not None), None)
                      for options in zip(sizes, configured, general)))


def with_chip_memory(sizes: BlockSizes, tpu_version: str | None) -> BlockSizes:
  """Limits the vector memory of a kernel to that of a TPU that has little, unless it is given."""
  limit = devices.SMALL_VMEM_BYTES.get(tpu_version or "")
  return sizes if sizes.vmem_limit_bytes else sizes._replace(vmem_limit_bytes=limit)
