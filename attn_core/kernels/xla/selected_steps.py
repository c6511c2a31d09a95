# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of attention to selected blocks: their sizes, the listed keys, reading and writing.

Axes of a step: [num_blocks, block_rows, n], with n = k * block_kv listed keys of a query block, and
block_rows = block_q * G rows (token-major).
"""

from typing import Callable, NamedTuple, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands, matmul_precision, nonfinite
from attn_core.kernels.xla import cpu_math, tile_ops, tiling
from attn_core.masks import dropout, leaves, mask as mask_lib, selected, tile as tile_lib
from attn_core.types import (AttentionSpec, Operands, are_known, at_least_float32, cdiv,
                             value_width)

Results = TypeVar("Results")  # a pytree of arrays
GATHERED = 2**21  # numbers of the keys and values of a step
TABLE = 8  # blocks for each listed one, of a table that XLA:CPU makes faster than it sorts a list


class Inputs(NamedTuple):
  """One attention and its steps."""

  operands: Operands
  spec: AttentionSpec
  lists: leaves.Selected
  rest: mask_lib.Mask
  block_q: int  # queries that share a list and are computed together; divides that of the lists
  num_blocks: int  # query blocks of a step
  num_steps: int  # of a key head
  reads_listed: bool = False  # whether a step reads its keys where they are stored, and no others

  @property
  def group(self) -> int:
    """G, query heads per key head."""
    return self.operands.query.shape[2] // self.operands.key.shape[2]

  @property
  def padded(self) -> int:
    """Queries of all steps."""
    return self.block_q * self.num_blocks * self.num_steps

  @property
  def dtype(self) -> DTypeLike:
    """The dtype of products and sums."""
    return at_least_float32(self.spec.softmax_dtype)


class Head(NamedTuple):
  """Arrays of one batch row and one key head; rows are [T padded, G, width]."""

  batch: jax.Array
  key_head: jax.Array
  query: jax.Array  # rows, scaled
  key: jax.Array  # [num_key_blocks + 1, block_kv, D]
  value: jax.Array  # [num_key_blocks + 1, block_kv, E]; E = 0 where it is a part of the key


class Keys(NamedTuple):
  """Listed keys of a step."""

  blocks: jax.Array  # int32 [num_blocks, k]: their key blocks, the last in place of none
  seen: jax.Array  # bool, see `masked`
  keep: jax.Array | None  # dropout, likewise; None: everything is kept


class Rows(NamedTuple):
  """Numbers of all queries that a backward reads."""

  d_out: jax.Array  # [B, T, H, E]
  lse: jax.Array  # [B, T, H, 1]
  delta: jax.Array  # [B, T, H, 1], see `backward.compute_delta`


class Sums(NamedTuple):
  """Cotangents of the arrays of all heads, or of those of a step."""

  query: jax.Array
  key: jax.Array
  value: jax.Array


def make_inputs(operands: Operands, spec: AttentionSpec) -> Inputs | None:
  """Chooses the steps of an attention; None: it does not follow lists."""
  if (operands.bias is not None or operands.key_scale is not None or spec.has_score_mod
      or not are_known(*operands.query.shape, *operands.key.shape)):
    return None
  found = selected.follow(dense_operands.mask_of(operands, spec))
  (_, queries, heads, width), key_heads = operands.query.shape, operands.key.shape[2]
  group = heads // key_heads
  if found is None or (found.lists.indices.shape[1] > 1 and found.lists.group % group):
    return None  # no lists, or query heads of one key head have different ones
  lists = found.lists
  listed = lists.indices.shape[-1] * lists.block_kv
  scores = group * listed
  block_q = next(n for n in range(lists.block_q, 0, -1) if lists.block_q % n == 0
                 and (n == 1 or n * scores <= tiling.STEP_SCORES))
  blocks = cdiv(queries, block_q)
  num_blocks = max(1, min(blocks, tiling.STEP_SCORES // (block_q * scores),
                          GATHERED // (listed * (width + value_width(operands, spec)))))
  return Inputs(operands, spec, lists, found.rest, block_q, num_blocks, cdiv(blocks, num_blocks))


def over_heads(inputs: Inputs, of_head: Callable[[Head, Results], Results],
               results: Results) -> Results:
  """Runs of_head(head, results) over all batch rows and key heads."""
  key_heads = inputs.operands.key.shape[2]

  def body(n: jax.Array, results: Results) -> Results:
    n = jnp.asarray(n, jnp.int32)  # with jax_enable_x64 a counter of known trips has 64 bits
    batch, key_head = lax.div(n, jnp.int32(key_heads)), lax.rem(n, jnp.int32(key_heads))
    return of_head(head_of(inputs, batch, key_head), results)

  return tile_ops.loop(0, inputs.operands.key.shape[0] * key_heads, body, results)


def head_of(inputs: Inputs, batch: jax.Array, key_head: jax.Array, *,
            propagate: bool = True) -> Head:
  """Returns the arrays of a batch row and a key head.

  Args:
    inputs: the attention.
    batch: the batch row.
    key_head: the key head.
    propagate: whether keys are NaN where a key or value is not finite, and such values 0.
  """
  operands, dtype, block_kv = inputs.operands, inputs.dtype, inputs.lists.block_kv
  query = head_rows(inputs, operands.query, batch, key_head)
  query = nonfinite.infinite_to_nan(query).astype(dtype)
  keys = operands.key.shape[1]
  count = cdiv(keys, block_kv)
  key, value = (tile_lib.slice_at(x, (batch, 0, key_head, 0), (1, keys, 1, x.shape[3]))[0, :, 0]
                for x in (operands.key, operands.value))
  if propagate:
    latents = _latents_of(inputs, key)
    finite = nonfinite.is_finite(key, value if latents is None else latents)
    key, value = nonfinite.propagate_nan(key, value, finite)
  # One more block, of zeros, stands for none.
  key, value = (jnp.pad(x, ((0, (count + 1) * block_kv - keys), (0, 0))).reshape(
      count + 1, block_kv, -1) for x in (key, value))
  return Head(batch, key_head, query * jnp.asarray(inputs.spec.softmax_scale, dtype), key, value)


def head_rows(inputs: Inputs, x: jax.Array, batch: jax.Array, key_head: jax.Array) -> jax.Array:
  """Returns rows [T padded, G, width] of x [B, T, H, width]."""
  _, queries, _, width = x.shape
  rows = tile_lib.slice_at(x, (batch, 0, key_head * inputs.group, 0),
                           (1, queries, inputs.group, width))[0]
  return tile_lib.pad_axis(rows, 0, inputs.padded - queries)


def write_head(inputs: Inputs, x: jax.Array, head: Head, rows: jax.Array) -> jax.Array:
  """Writes rows [T padded, G, width] into x [B, T, H, width]."""
  return tile_ops.write_at(x, rows[None, :x.shape[1]].astype(x.dtype),
                           (head.batch, 0, head.key_head * inputs.group, 0))


def write_keys(x: jax.Array, head: Head, keys: jax.Array) -> jax.Array:
  """Writes keys [num_keys of all blocks and more, width] into x [B, S, K, width]."""
  rows = keys[None, :x.shape[1], None].astype(x.dtype)
  return tile_ops.write_at(x, rows, (head.batch, 0, head.key_head, 0))


def rows_of(inputs: Inputs, x: jax.Array, n: jax.Array) -> jax.Array:
  """Returns [num_blocks, block_rows, width] of rows [T padded, G, width] for step n."""
  tokens = inputs.num_blocks * inputs.block_q
  rows = lax.dynamic_slice_in_dim(x, n * tokens, tokens, 0, allow_negative_indices=False)
  return rows.reshape(inputs.num_blocks, inputs.block_q * inputs.group, x.shape[2])


def write(inputs: Inputs, x: jax.Array, n: jax.Array, rows: jax.Array) -> jax.Array:
  """Writes what `rows_of` returns."""
  tokens = inputs.num_blocks * inputs.block_q
  rows = rows.reshape(tokens, inputs.group, x.shape[2]).astype(x.dtype)
  return tile_ops.write_at(x, rows, (n * tokens, 0, 0))


def row_sinks(inputs: Inputs, head: Head) -> jax.Array | None:
  """Returns the sinks of a head's rows [1, block_rows, 1], or None."""
  sinks = inputs.operands.sinks
  if sinks is None:
    return None
  sinks = tile_lib.slice_at(sinks, (head.batch if sinks.shape[0] > 1 else 0,
                                    head.key_head * inputs.group), (1, inputs.group))
  return jnp.tile(sinks, (1, inputs.block_q))[..., None].astype(inputs.dtype)


def keys_of(inputs: Inputs, head: Head, n: jax.Array, *, transposed: bool = False) -> Keys:
  """Returns the listed keys of step n, and which of them its rows see and keep.

  Args:
    inputs: the attention.
    head: its arrays.
    n: number of the step.
    transposed: whether that is for scores [num_blocks, n, block_rows].
  """
  lists, spec = inputs.lists, inputs.spec
  blocks = (jnp.asarray(n, jnp.int32) * inputs.num_blocks
            + jnp.arange(inputs.num_blocks, dtype=jnp.int32))
  query = blocks[:, None] * inputs.block_q + jnp.arange(inputs.block_q, dtype=jnp.int32)[None]
  first = head.key_head * inputs.group
  local = first + jnp.arange(inputs.group, dtype=jnp.int32)
  batch, start = tile_lib.global_numbers(inputs.operands.mask, head.batch)
  found = _once(jnp.asarray(lists.blocks_of(batch, first + start, query[:, 0])),
                head.key.shape[0] - 1)
  key = (found[..., None] * lists.block_kv
         + jnp.arange(lists.block_kv, dtype=jnp.int32)[None, None])
  key = key.reshape(inputs.num_blocks, 1, 1, -1)
  query, heads = query[..., None, None], local[None, None, :, None]
  at = mask_lib.Coordinates(batch, heads + start, query, key, query, key)
  rest = sliced(inputs.rest, head.batch, at._replace(head=heads), inputs.operands.key.shape[1])
  seen = jnp.asarray(rest.visible(at)) & (key < inputs.operands.key.shape[1])
  keep = None
  if spec.dropout_prob:
    words = inputs.operands.dropout_key
    assert words is not None
    keep = dropout.keep_mask(words[head.batch if words.shape[0] > 1 else 0],
                             dropout.move_to_positions(rest, at), spec.dropout_prob)
  if not transposed:
    return Keys(found, seen, keep)
  four = lambda x: x.reshape((1,) * (4 - x.ndim) + x.shape).transpose(0, 3, 1, 2)
  return Keys(found, four(seen), None if keep is None else four(keep))


def _once(blocks: jax.Array, count: int) -> jax.Array:
  """Returns lists of blocks [num_blocks, k] that name no block twice, in any order.

  Args:
    blocks: numbers; those that are none, and repeated ones, become `count`.
    count: number of all blocks.
  """
  named = jnp.where((blocks < 0) | (blocks >= count), jnp.int32(count), blocks)

  def by_order(named: jax.Array) -> jax.Array:
    ascending = jnp.sort(named, axis=-1)
    repeated = jnp.pad(ascending[:, 1:] == ascending[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(repeated, count, ascending)

  def by_table(named: jax.Array) -> jax.Array:
    rows, length = named.shape
    place = jnp.arange(rows, dtype=jnp.int32)[:, None] * (count + 1) + named
    number = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), named.shape)
    last = jnp.zeros(rows * (count + 1), jnp.int32).at[place.reshape(-1)].max(
        number.reshape(-1), mode="promise_in_bounds")
    return jnp.where(last.at[place].get(mode="promise_in_bounds") == number, named, count)

  if count > TABLE * blocks.shape[1]:
    return by_order(named)
  return lax.platform_dependent(named, cpu=by_table, default=by_order)


def sliced(mask: mask_lib.Mask, batch: jax.Array, at: mask_lib.Coordinates,
           keys: int) -> mask_lib.Mask:
  """Returns a mask with its arrays at local rows, heads, queries and keys."""
  key = jnp.minimum(at.key_index, keys - 1)
  def slice_array(x: jax.Array, role: str) -> jax.Array:
    if role == mask_lib.WHOLE:
      return x
    x = x[batch if x.shape[0] > 1 else 0]
    if role == mask_lib.BATCH:
      return x
    axes = {mask_lib.QUERY: (at.query_index,), mask_lib.KEY: (key,)}.get(
        role, (at.head, at.query_index, key))
    indices = tuple(jnp.minimum(index, n - 1) if n > 1 else jnp.zeros_like(index)
                    for index, n in zip(axes, x.shape))
    return x.at[indices].get(mode="promise_in_bounds")
  arrays, structure = jax.tree.flatten(mask)
  return jax.tree.unflatten(structure, map(slice_array, arrays, mask_lib.leaf_roles(mask)))


def gathered(inputs: Inputs, blocks: jax.Array, keys: Keys) -> jax.Array:
  """Returns the listed blocks [num_blocks, n, width] of [num_key_blocks + 1, block_kv, width]."""
  found = blocks.at[keys.blocks].get(mode="promise_in_bounds")
  return found.reshape(inputs.num_blocks, keys.blocks.shape[1] * blocks.shape[1],
                       blocks.shape[2]).astype(inputs.dtype)


def keys_and_values(inputs: Inputs, head: Head, keys: Keys) -> tuple[jax.Array, jax.Array]:
  """Returns the listed keys [num_blocks, n, D] and their values [num_blocks, n, E]."""
  if not inputs.reads_listed:
    key, value = (gathered(inputs, x, keys) for x in (head.key, head.value))
    latents = _latents_of(inputs, key)
    return key, value if latents is None else nonfinite.mask_nonfinite(latents)
  last = inputs.operands.key.shape[1] - 1
  key, value = (x.at[head.batch, jnp.minimum(keys.blocks, last), head.key_head].get(
      mode="promise_in_bounds").astype(inputs.dtype) for x in inputs.operands[1:3])
  latents = _latents_of(inputs, key)
  value = value if latents is None else latents
  return nonfinite.propagate_nan(key, value, nonfinite.is_finite(key, value))


def _latents_of(inputs: Inputs, key: jax.Array) -> jax.Array | None:
  """Returns the values that are a part of keys [.., D]; None: values are apart."""
  width = inputs.spec.latent_width
  return None if width is None else key[..., :width]


def reading_listed(inputs: Inputs) -> Inputs:
  """Returns inputs whose steps read only listed keys, where these are fewer than all keys."""
  lists, (_, queries, _, _) = inputs.lists, inputs.operands.query.shape
  few = queries * lists.indices.shape[-1] < inputs.operands.key.shape[1]
  return inputs._replace(reads_listed=few and lists.block_kv == 1)


def add_blocks(x: jax.Array, blocks: jax.Array, found: jax.Array, block_kv: int) -> jax.Array:
  """Adds [len(blocks) * block_kv, width] to some blocks of x [keys, width].

  Arrays of single rows have two axes: XLA:CPU copies what is added if they have more.
  """
  if block_kv == 1:
    return x.at[blocks].add(found, mode="promise_in_bounds")
  parts = found.reshape(len(blocks), block_kv, -1)
  return x.reshape(-1, block_kv, x.shape[1]).at[blocks].add(
      parts, mode="promise_in_bounds").reshape(x.shape)


def product(formula: str, left: jax.Array, right: jax.Array, inputs: Inputs) -> jax.Array:
  """Returns a product of two arrays by an einsum formula."""
  precision = matmul_precision.resolve(jnp.dtype(inputs.dtype), inputs.spec.precision)
  return jnp.einsum(formula, left, right, precision=precision,
                    preferred_element_type=inputs.dtype)


def scores_of(inputs: Inputs, rows: jax.Array, key: jax.Array,
              *, transposed: bool = False) -> tuple[jax.Array, jax.Array | None]:
  """Returns scores after the soft cap, and their derivative (None: 1).

  Args:
    inputs: the attention.
    rows: scaled queries [b, rows, D].
    key: [b, n, D].
    transposed: whether the result is [b, n, rows].
  """
  scores = product("bnd,brd->bnr" if transposed else "brd,bnd->brn",
                   *((key, rows) if transposed else (rows, key)), inputs)
  cap = inputs.spec.logits_soft_cap
  if cap is None:
    return scores, None
  capped = jnp.tanh(scores / cap)
  return capped * cap, 1 - capped * capped


def weights_of(inputs: Inputs, seen: jax.Array, relative: jax.Array, *,
               transposed: bool = False) -> jax.Array:
  """Returns exp(relative), relative to the lse, and 0 where hidden, even if the lse is NaN."""
  # A hidden key may have a higher score than the lse, and an infinite weight no derivative.
  return masked(inputs, seen, cpu_math.exp(jnp.minimum(relative, 1)), 0, transposed=transposed)


def dropped(inputs: Inputs, keep: jax.Array | None, weights: jax.Array, *,
            transposed: bool = False) -> jax.Array:
  """Returns weights with zeros where they are dropped, unscaled."""
  return weights if keep is None else masked(inputs, keep, weights, 0, transposed=transposed)


def masked(inputs: Inputs, where: jax.Array, x: jax.Array, filler: float, *,
           transposed: bool = False) -> jax.Array:
  """Returns x with a number in place of what is not in `where`.

  Args:
    inputs: the attention.
    where: bool, broadcastable to [b, queries, G, n]; transposed: to [b, n, queries, G].
    x: [b, queries * G, n]; transposed: [b, n, queries * G].
    filler: the number.
    transposed: the order of axes.
  """
  rows, keys = x.shape[:0:-1] if transposed else x.shape[1:]
  queries = rows // inputs.group, inputs.group
  four = (x.shape[0], keys, *queries) if transposed else (x.shape[0], *queries, keys)
  return jnp.where(jnp.broadcast_to(where, four).reshape(x.shape), x, filler)


def cotangents_of(inputs: Inputs, scores: tuple[jax.Array, jax.Array | None], seen: jax.Array,
                  keep: jax.Array | None, arrays: tuple[jax.Array, ...],
                  ) -> tuple[jax.Array, jax.Array]:
  """Returns the weights that are kept, unscaled, and the cotangent of scores before the soft cap.

  dS = P * (d_out . value - delta)

  Args:
    inputs: the attention.
    scores: of `scores_of`, transposed [b, n, rows].
    seen: see `masked`.
    keep: dropout.
    arrays: values [b, n, E], cotangents of their sums [b, rows, E], and lse and delta [b, 1, rows].
  """
  (scaled, slope), (value, d_rows, lse, delta) = scores, arrays
  weights = weights_of(inputs, seen, scaled - lse, transposed=True)
  d_weights = dropped(inputs, keep, product("bne,bre->bnr", value, d_rows, inputs),
                      transposed=True)
  d_scores = weights * (d_weights * dropout.kept_scale(inputs.spec.dropout_prob) - delta)
  d_scores = d_scores if slope is None else d_scores * slope
  return dropped(inputs, keep, weights, transposed=True), d_scores
