# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod of a tile in the TPU kernels: traced into them, on scores [keys, queries].

The cotangents of its arrays come from another kernel, as that of the bias does.
"""

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.kernels.tpu.flash import tile_inputs
from attn_core.kernels.tpu.flash.tile_inputs import KernelRefs, TileIndex
from attn_core.score_mods import evaluate
from attn_core.score_mods.score_mod import ScoreMod, ScoreTile
from attn_core.types import AttentionSpec, Operands


class ModReader(NamedTuple):
  """Readers of the arrays of a score mod, which evaluate it on one tile."""

  structure: jax.tree_util.PyTreeDef
  readers: tuple[tile_inputs.Reader, ...]
  mask: tile_inputs.MaskReader

  def apply(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array) -> jax.Array:
    """Returns scores [keys, queries] after the score mod."""
    mask, at = self.mask.coordinates(refs, tile)
    at, _ = evaluate.move_to_positions(mask, at)
    # A function may compute what the scalar unit cannot.
    batch, head = (jnp.full((1, 1), x, jnp.int32) for x in (at.batch, at.head))
    arrays = [reader(refs, tile).astype(jnp.float32) for reader in self.readers]
    term: ScoreMod = jax.tree.unflatten(self.structure, arrays)
    return term.apply(scores, ScoreTile(at._replace(batch=batch, head=head), 1, transposed=True))

  def pullback(self, refs: KernelRefs, tile: TileIndex, scores: jax.Array,
               ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns `apply`, and a function from cotangents to those of the scores."""
    logits, pull = jax.vjp(lambda scores: self.apply(refs, tile, scores), scores)
    return logits, lambda d_logits: pull(d_logits)[0]


def mod_reader(inputs: tile_inputs.TileInputs, operands: Operands, spec: AttentionSpec,
               mask: tile_inputs.MaskReader) -> ModReader | None:
  """Adds the arrays of a score mod to the inputs of a kernel; None: the call has none."""
  if not spec.has_score_mod:
    return None
  # Operands of a function are numbers, those of each batch row.
  readers = tuple(inputs.add_per_pair(x.reshape(*x.shape[:2], 1, 1) if x.ndim == 2 else x)
                  for x in operands.mods)
  return ModReader(spec.score_mod, readers, mask)
