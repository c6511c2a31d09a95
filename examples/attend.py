# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A short tour: calls by name, explains the choice, shards, compares with the definition.

    python3 examples/attend.py
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # virtual devices where there are no accelerators

import jax.numpy as jnp
import numpy as np

from attn_core import OperationMetadata, attention, create_mesh, explain, masks
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands


def main():
  keys = jax.random.split(jax.random.key(0), 3)
  query, key, value = (jax.random.normal(k, (8, 96, heads, 32))
                       for k, heads in zip(keys, (4, 2, 2)))
  mesh = create_mesh((2, -1, 1, 2, 1))  # dp, fsdp, ep, tp, sp
  print(explain(query, key, value, sliding_window=(31, 0), metadata=OperationMetadata(mesh=mesh)))

  structure = jax.tree.structure(masks.causal() & masks.window(31, 0))
  want = oracle.attention(Operands(query, key, value, mask=MaskOperands()),
                          AttentionSpec(structure, 32**-0.5)).attention_outputs
  for name in ("flash_attn2", "blockwise", "blocksparse", "sdpa", "vanilla", "auto"):
    for where, metadata in (("one device", None), ("sharded", OperationMetadata(mesh=mesh))):
      got = attention(query, key, value, mechanism=name, sliding_window=(31, 0), metadata=metadata)
      error = np.abs(got.attention_outputs - want).max()
      print(f"{name:12} {where:10} largest difference from the definition {error:.1e}")
      assert error < 1e-5

  gradient = jax.grad(lambda q: jnp.sum(attention(q, key, value).attention_outputs**2))(query)
  print("gradient of the query:", gradient.shape, gradient.dtype)


if __name__ == "__main__":
  main()
