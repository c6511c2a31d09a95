# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A short tour: calls by name, explains the choice, shards, compares with the definition.

    python3 examples/attend.py

Start here to see what the library does before you use it in a model. The program asks `explain`
which mechanism would run a call, and why the others would not. Then it computes the same attention
by several mechanisms, on one device and sharded over a mesh, and prints how far each is from the
definition of attention in float64: they differ in speed and memory, and in results only by
rounding. At the end it takes a gradient, as training would. Without accelerators the mesh consists
of eight virtual CPU devices. The sliding window keeps the last 32 tokens of each query, itself
included. It takes a few seconds.
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

  print("\ncomputing the definition in float64", flush=True)
  structure = jax.tree.structure(masks.causal() & masks.window(31, 0))
  want = oracle.attention(Operands(query, key, value, mask=MaskOperands()),
                          AttentionSpec(structure, 32**-0.5)).attention_outputs
  for name in ("flash_attn2", "blockwise", "blocksparse", "sdpa", "vanilla", "auto"):
    for where, metadata in (("one device", None), ("sharded", OperationMetadata(mesh=mesh))):
      got = attention(query, key, value, mechanism=name, sliding_window=(31, 0), metadata=metadata)
      error = np.abs(got.attention_outputs - want).max()
      print(f"{name:12} {where:10} largest difference from the definition {error:.1e}",
            flush=True)
      assert error < 1e-5

  gradient = jax.grad(lambda q: jnp.sum(attention(q, key, value).attention_outputs**2))(query)
  print("gradient of the query:", gradient.shape, gradient.dtype)


if __name__ == "__main__":
  main()
