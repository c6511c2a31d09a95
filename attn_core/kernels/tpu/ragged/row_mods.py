# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The score mod in the ragged kernel, traced into it as into the flash kernel.

Its term is evaluated on the scores of a head group and a block of keys, [group_rows, block_kv] with
few rows, else [block_kv, group_rows].
"""

from typing import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands
from attn_core.kernels.tpu.ragged.common import (
    Index, KernelRefs, StepShape, TileIndex, TilePart)
from attn_core.kernels.tpu.ragged.kv_layout import LANES, SUBLANES
from attn_core.kernels.tpu.ragged import mod_lines, visibility
from attn_core.kernels.tpu.ragged.mod_form import (FIXED, KEYS, LINES, PAIRS, STEP, ModArray,
                                                   ModForm, ModInputs)
from attn_core.masks.mask import Coordinates
from attn_core.score_mods import evaluate, forms, tables
from attn_core.score_mods.score_mod import ScoreMod, ScoreTile, of_structure
from attn_core.types import cdiv

# Maps an array [B or 1, H or 1, T or 1, n] to [1 or num_steps, key_heads, block_q, G, n].
RowsOf = Callable[[jax.Array], jax.Array]
# Maps a head group to the score mod on a block of keys, from logits to logits; None: the call has
# none.
Modifier = Callable[[Index], Callable[[jax.Array], jax.Array] | None]


def make_inputs(term: jax.tree_util.PyTreeDef, arrays: Sequence[jax.Array],
                coordinates: Mapping[str, jax.Array], shape: StepShape,
                rows_of: RowsOf) -> ModInputs:
  """Returns the arrays of a score mod as the kernel reads them.

  Args:
    term: structure of the score mod's term.
    arrays: its arrays, [B or 1, H or 1, T or 1, S or 1] or [B or 1, 1], or tables by distance [1, H
      or 1, n], which few rows only take.
    coordinates: those that the caller has, int32 with the same axes; others are left out.
    shape: static shape of a step.
    rows_of: see `RowsOf`.
  """
  found: dict[str, list[jax.Array]] = {kind: [] for kind in (FIXED, STEP, KEYS, PAIRS)}
  found_tables = tables.find(term)

  def add(x: jax.Array) -> ModArray:
    x = _bits(x.reshape(x.shape[0], 1, 1, 1) if x.ndim == 2 else x)
    if x.shape[3] > 1 and x.shape[1:3] == (1, 1):
      kind, x = KEYS, x[:, :, 0]
    else:
      is_pair, x = x.shape[3] > 1, rows_of(x)
      x = x.reshape(x.shape[0], shape.head_groups, shape.group_rows, x.shape[4])
      kind = PAIRS if is_pair else FIXED if x.shape[0] == 1 else STEP
      x = x.reshape(x.shape[0], -1, x.shape[3]) if is_pair else x
    found[kind].append(x)
    return ModArray(kind, len(found[kind]) - 1)

  of_tables = [(arrays[n], x.first) for n, x in found_tables.items()]
  places = tuple(ModArray(LINES, [*found_tables].index(n), found_tables[n].first, x.shape[2])
                 if n in found_tables else add(x) for n, x in enumerate(arrays))
  term = jax.tree.structure(tables.as_added(of_structure(term)))
  read = coordinates_read(term)
  named = tuple((name, add(x)) for name, x in coordinates.items() if name in read)
  def numbers(kind: str) -> jax.Array | None:
    if not found[kind]:
      return None
    x = jnp.concatenate(found[kind], 3)
    return x if shape.few_rows else x.swapaxes(2, 3)

  shared = cdiv(len(found[KEYS]), SUBLANES) * SUBLANES
  keys, of_keys = None, [*found[KEYS], *found[PAIRS]]
  if of_keys:
    rows = max(x.shape[0] for x in of_keys)
    if found[KEYS]:
      of_keys.insert(len(found[KEYS]), jnp.zeros(
          (1, shared - len(found[KEYS]), of_keys[0].shape[2]), jnp.int32))
    keys = jnp.concatenate([jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in of_keys], 1)
    keys = dense_operands.pad_axis(keys, 1, -keys.shape[1] % SUBLANES)
    keys = dense_operands.pad_axis(keys, 2, -keys.shape[2] % shape.layout.block_kv)
  form = ModForm(term, places, named, shared, 0 if keys is None else keys.shape[1])
  return ModInputs(form, numbers(FIXED), numbers(STEP), keys,
                   mod_lines.make(of_tables, shape, rows_of))


def coordinates_read(term: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
  """Returns which of `Coordinates` a term may read."""
  mod = of_structure(term)
  positions = ("query_position", "key_position") if mod.reads_positions else ()
  return (*positions, "batch", "head") if evaluate.has_function(term) else positions


def _bits(x: jax.Array) -> jax.Array:
  """Returns integers as int32, floats as the bits of float32."""
  if jnp.issubdtype(x.dtype, jnp.integer):
    return x.astype(jnp.int32)
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def vmem_bytes(shape: StepShape, mods: ModInputs | None) -> int:
  """Returns an upper estimate of the vector memory for the arrays of a score mod."""
  if mods is None:
    return 0
  rows, block_kv = cdiv(shape.group_rows, LANES) * LANES, shape.layout.block_kv
  keys = (shape.layout.slots + 1) * mods.form.key_rows * block_kv
  count = len(mods.form.arrays) + len(mods.form.coordinates)
  lines = 0 if mods.lines is None else 2 * mods.lines.size  # two blocks are in flight
  return 4 * (keys + 4 * shape.head_groups * rows * LANES + count * rows * block_kv + lines)


def vmem_limit(shape: StepShape, dtype: DTypeLike, mods: ModInputs | None) -> int:
  """Returns the limit on vector memory for a kernel whose queries have a dtype."""
  return max(16 * 2**20, (shape.vmem_bytes(dtype) + vmem_bytes(shape, mods)) * 5 // 4)


# --- In the kernel. ------------------------------------------------------------------------------


def modifier(k: KernelRefs, tile: TileIndex, axis: int,
             part: TilePart | None = None) -> Modifier:
  """Returns the score mods of head groups.

  Args:
    k: the kernel.
    tile: the block of keys.
    axis: of the keys.
    part: with keys along axis 0: the keys and rows of the logits; None: all.
  """
  def of_group(group: Index) -> Callable[[jax.Array], jax.Array] | None:
    form = k.spec.mods
    return None if form is None else lambda logits: _modified(
        k, form, (tile, part), group, axis, logits)
  return of_group


def _modified(k: KernelRefs, form: ModForm, place: tuple[TileIndex, TilePart | None],
              group: Index, axis: int, logits: jax.Array) -> jax.Array:
  tile, part = place
  kept = part.kept if part is not None else lambda x: x
  read = lambda x: kept(_read(k, form, tile, group, axis, x))
  term: ScoreMod = jax.tree.unflatten(form.term, [
      lax.bitcast_convert_type(read(x), jnp.float32) for x in form.arrays])
  at = {name: jnp.zeros((1, 1), jnp.int32) for name in Coordinates._fields[:-1]}
  if term.reads_positions:
    at |= {name: kept(x) for name, x in _positions_in_request(k, tile, axis).items()}
  at |= {name: read(x) for name, x in form.coordinates}
  return term.apply(logits, ScoreTile(Coordinates._make([*at.values(), False]), 1,
                                      transposed=axis == 0, forms=forms.COMMON))


def _positions_in_request(k: KernelRefs, tile: TileIndex, axis: int) -> dict[str, jax.Array]:
  """Returns positions that count from the first token of a request."""
  size, other = k.shape.layout.block_kv, 1 - axis
  key = tile.block * size + lax.broadcasted_iota(
      jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
  query = tile.step.query_begin + visibility.query_of(k, visibility.row_numbers(k, other))
  return {"query_position": query, "key_position": key}


def _read(k: KernelRefs, form: ModForm, tile: TileIndex, group: Index, axis: int,
          x: ModArray) -> jax.Array:
  """Returns the numbers of an array, int32, which broadcast to the scores."""
  if x.kind in (FIXED, STEP):
    assert k.mods is not None
    ref = k.mods.fixed if x.kind == FIXED else k.mods.by_step
    found = ref[0, group]
    return found[:, x.number:x.number + 1] if axis == 1 else found[x.number:x.number + 1]
  if x.kind == LINES:
    assert k.mods is not None and axis == 1
    return mod_lines.read(k, tile, k.mods.lines, group, x)
  buffer, rows = k.buffers[len(k.shape.layout.buffers())], k.shape.group_rows
  if x.kind == PAIRS:  # with few rows only
    assert axis == 1
    first = form.shared_rows + x.number * k.shape.head_groups * rows
    return buffer[tile.slot, pl.ds(first + group * rows, rows)]
  if axis == 1:
    return buffer[tile.slot, x.number:x.number + 1]
  first = x.number // SUBLANES * SUBLANES
  return buffer[tile.slot, first:first + SUBLANES].T[:, x.number - first:x.number - first + 1]
