# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of the TPU kernels and the masks that they mean, for interpreting and for compiling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, OperationMetadata, attention, masks
from attn_core.benchmark.static import profile
from attn_core.masks import dropout
from attn_core.masks.selected import fitted
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling

TPU = OperationMetadata(platform="tpu")
PRECISIONS = ("highest", "default", "high", "bfloat16", "float32", "tensorfloat32")
BLOCKS = BlockSizes(128, 128, 128, 128)
IDS = np.repeat(np.array([[0, 1, 2, -1], [5, 5, 6, 7]], np.int32), 75, 1)
DENSE = np.random.default_rng(0).random((2, 4, 260, 260)) < 0.5
DENSE[:, :, 7] = False  # a query that sees no key
KEYS = np.random.default_rng(3).random((2, 4, 1, 140)) < 0.7
KEY = np.array([3, 4], np.uint32)
BACKWARDS = np.tile(np.arange(200, dtype=np.int32)[::-1], (2, 1))
LENGTHS = masks.lengths(np.array([150, 200], np.int32), np.array([0, 190], np.int32))


def compiled_for(name):
  """Returns (chip, `jax.default_matmul_precision`) to compile a case for; rotations take turns."""
  number = sampling.number_of(name) + (sampling.ROTATION.index if sampling.ROTATION else 0)
  chips = tuple(profile.CHIPS)
  return chips[number % len(chips)], PRECISIONS[number // len(chips) % len(PRECISIONS)]


def predicate(batch, head, query, key):
  return (batch + 2 * head + query - key) % 3 != 0


class Case(NamedTuple):
  """A call: arguments other than query, key and value, the mask that these mean, and the shape."""

  arguments: dict
  mask: masks.Mask = masks.causal()
  B: int = 1
  T: int = 260
  S: int | None = None  # None: T
  H: int = 2
  K: int | None = None  # None: H
  D: int = 64
  E: int | None = None  # None: D
  dtype: str = "float32"
  blocks: BlockSizes | None = BLOCKS
  floats: dict = {}  # shapes of float32 arguments

  def shapes(self):
    """Returns the shapes and dtypes of `arrays`."""
    S, K, E = self.S or self.T, self.K or self.H, self.E or self.D
    found = {"query": (self.B, self.T, self.H, self.D), "key": (self.B, S, K, self.D),
             "value": (self.B, S, K, E)}
    made = lambda shapes, dtype: {
        name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return made(found, self.dtype) | made(self.floats, jnp.float32)

  def arrays(self):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=x.shape), x.dtype)
            for name, x in self.shapes().items()}

  def call(self, arrays):
    output = attention(**{**self.arguments, **arrays}, mechanism="flash_attn2", metadata=TPU,
                       block_sizes=self.blocks, return_lse=True)
    return output.attention_outputs, output.lse

  def shapes_of_rows(self, rows):
    """Returns the shapes of `arrays` and of mask arguments for this number of batch rows."""
    widen = lambda x: jax.ShapeDtypeStruct(
        (rows, *x.shape[1:]) if x.shape[0] == self.B > 1 else x.shape, x.dtype)
    given = {name: x for name, x in self.arguments.items() if name in ("mask", "mask_info")}
    floats = {name: (rows, *shape[1:]) if len(shape) == 4 and shape[0] == self.B > 1 else shape
              for name, shape in self.floats.items()}
    return (self._replace(B=rows, floats=floats).shapes(),
            jax.tree.map(widen, given))

  def oracle(self, arrays, dtype=jnp.float32):
    a = self.arguments
    leaves, structure = jax.tree.flatten(self.mask)
    spec = AttentionSpec(structure, a.get("softmax_scale", self.D**-0.5), a.get("logits_soft_cap"),
                         a.get("dropout_prob", 0.0))
    wide = {name: x.astype(dtype) for name, x in arrays.items()}
    sinks = wide.get("softmax_aux")
    operands = Operands(
        wide["query"], wide["key"], wide["value"], wide.get("bias"),
        MaskOperands(tuple(map(jnp.asarray, leaves))), None if sinks is None else sinks[None],
        dropout.key_words(jnp.asarray(KEY)) if spec.dropout_prob else None)
    output = oracle.attention(operands, spec)
    return output.attention_outputs, output.lse


# Positions of a ring step: rows and columns of a longer sequence, the last of them padding.
ZIGZAG = masks.placed(masks.causal() & masks.window(150, 0), *[np.arange(100, 300)[None]] * 2,
                      (280, 290))
LISTS = masks.selected_blocks(
    np.random.default_rng(4).integers(-1, 5, (2, 2, 260, 2)).astype(np.int32), 1, 64)

CASES = {
    "causal_odd_length": Case({}, T=301),
    "full": Case(dict(causal=False), masks.full(), T=384),
    "gqa_batch": Case({}, B=2, T=300, H=4, K=2),
    "one_query": Case(dict(query_offset=299), masks.full(), T=1, S=300),
    "widths_differ": Case(dict(query_offset=100), masks.offset(masks.causal(), 100), T=260, S=390,
                          D=80, E=48),
    "window": Case(dict(sliding_window=(100, 0)), masks.causal() & masks.window(100, 0), T=512),
    "empty_rows": Case(dict(query_offset=-50), masks.offset(masks.causal(), -50), T=200, S=300),
    "chunk": Case(dict(chunk_size=70), masks.causal() & masks.chunk(70), T=300),
    "segments": Case(dict(mask_info=MaskInfo.from_segments(IDS)),
                     masks.causal() & masks.segments(IDS), B=2, T=300),
    "positions": Case(dict(mask_info=MaskInfo(q_positions=BACKWARDS)),
                      masks.positions(BACKWARDS), B=2, T=200),
    "placed": Case(dict(mask=ZIGZAG, causal=False), ZIGZAG, T=200, H=1),
    "lengths": Case(dict(mask=LENGTHS, causal=False), LENGTHS, B=2, T=200),
    "dense_per_head": Case(dict(mask=DENSE, causal=False), masks.dense(DENSE), B=2, H=4, K=2),
    "dense_row": Case(dict(mask=DENSE[:1, :, :1]), masks.causal() & masks.dense(DENSE[:1, :, :1]),
                      B=2, H=4, K=2),
    "custom": Case(dict(mask=masks.custom(predicate)), masks.causal() & masks.custom(predicate),
                   B=2, H=4, K=2),
    "soft_cap": Case(dict(logits_soft_cap=5.0, softmax_scale=0.9)),
    "negative_scale": Case(dict(softmax_scale=-0.3)),
    "sinks": Case(dict(sliding_window=(20, -1), query_offset=-100, causal=True),
                  masks.offset(masks.causal() & masks.window(20, None), -100),
                  floats={"softmax_aux": (2,)}),
    "bias": Case({}, floats={"bias": (1, 2, 260, 260)}),
    "bias_row": Case({}, floats={"bias": (1, 2, 1, 260)}),
    "dropout": Case(dict(dropout_prob=0.3, dropout_rng=KEY, deterministic=False), B=2, H=4, K=2),
    "dropout_of_16_bits": Case(dict(dropout_prob=0.3, dropout_rng=KEY, deterministic=False), B=2,
                               dtype="bfloat16"),
    "bfloat16": Case({}, dtype="bfloat16", H=4, K=2),
    "whole_lanes": Case({}, B=2, T=300, H=4, K=2, D=128),
    "whole_lanes_of_values": Case(dict(causal=False), masks.full(), T=130, S=140, D=192, E=128),
    "heads_of_a_step": Case({}, B=2, T=300, H=8, K=4, blocks=BlockSizes()),
    "heads_side_by_side": Case(dict(causal=False), masks.full(), T=300, S=140, H=6, K=6, D=128,
                               blocks=BlockSizes()),
    "heads_of_a_step_see_differently": Case(
        dict(mask=DENSE, causal=False), masks.dense(DENSE), B=2, H=4, K=4, blocks=BlockSizes(),
        floats={"bias": (1, 4, 260, 260), "softmax_aux": (4,)}),
    "heads_side_by_side_by_row": Case(
        dict(mask=KEYS), masks.causal() & masks.dense(KEYS), B=2, T=140, H=4, K=2, D=128,
        blocks=BlockSizes(), floats={"bias": (2, 4, 1, 140), "softmax_aux": (4,)}),
    "several_tiles_a_block": Case({}, T=1100, H=1, K=1, blocks=BlockSizes()),
    "lists_of_tokens": Case(dict(mask=LISTS), masks.causal() & fitted(LISTS, (2, 4, 260, 260)), B=2,
                            H=4, K=2),
}
