# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metadata and base configurations for the tests of OperationMetadata."""

import enum
from typing import Any, NamedTuple

from jax.sharding import Mesh, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

from attn_core.config.metadata import OperationMetadata
from attn_core.sharding.partition import PartitionAxis
from attn_core.types import AttentionMechanism, BlockSizes, RingConfig

FIELDS = (
    "runtime_dtype", "runtime_softmax_dtype", "sequence_axis_name", "mesh", "platform", "backend",
    "partition_axis", "base_config", "scan_ring_attention", "softmax_scale", "dropout_prob",
    "blocksize_q", "blocksize_k", "blocksize_b", "operation_configs", "compute_capability", "ring")


class Color(enum.Enum):
  RED = "red"


class Nested(NamedTuple):
  axes: PartitionAxis = PartitionAxis()
  sizes: tuple[BlockSizes, ...] = (BlockSizes(block_q=8), BlockSizes())


class Config(NamedTuple):
  """A base configuration of plain values."""

  attn_dtype: Any = np.dtype(jnp.bfloat16)
  attn_softmax_dtype: Any = np.dtype("float32")
  sequence_axis_name: str = "ring"
  mesh: Mesh | None = None
  platform: str | None = None
  backend: str | None = None
  partition_axis: PartitionAxis = PartitionAxis(batch_axis="dp")
  scan_ring_attention: bool = False
  blocksize_q: int = 128
  blocksize_k: int = 256
  blocksize_b: int = 1
  operation_configs: Any = (("ring", BlockSizes(block_q=64)),)
  theta: float = 1e6
  names: Any = ("a", ("b", None), 3)
  listed: Any = (1, 2)
  table: Any = None
  color: Color = Color.RED
  mechanism: AttentionMechanism = AttentionMechanism.RING
  nested: Nested = Nested()
  specs: Any = (P(("dp", "fsdp"), None, "tp"), P())


def full(mesh=None):
  """Returns metadata in which no field has its default."""
  return OperationMetadata(
      runtime_dtype=jnp.bfloat16, runtime_softmax_dtype="float16", sequence_axis_name="ring",
      mesh=mesh, platform="tpu", backend="tpu",
      partition_axis=PartitionAxis(batch_axis=("dp",), head_axis=("tp", "ep"), vocab_axis=None),
      base_config=Config(mesh=mesh, table={"x": [1, {"y": (2,)}]}), scan_ring_attention=False,
      softmax_scale=0.1, dropout_prob=0.3, blocksize_q=1, blocksize_k=2, blocksize_b=3,
      operation_configs={
          "ring": BlockSizes(block_q=64), "blocksparse": BlockSizes(8, 16, 32, 64, 2)},
      compute_capability="8.6", ring=RingConfig("hybrid", "zigzag", "inner"))
