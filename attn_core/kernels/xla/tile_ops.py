"""The pieces of a block-wise step: what forward, backward and tangent share.

Letters: B batch, T query length, S key length, H query heads, K key heads,
G = H / K, D query and key width, E value width, W any width; N key heads computed together,
Q and C tokens of a query and a key block, R = Q * G rows (token-major).
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import dropout
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import cpu_math as numbers, tiling as tuned
from attn_core.masks import leaves as algebra, block_map as blocks, tile as tiles
from attn_core.types import AttentionSpec, Operands


class Problem(NamedTuple):
  """One attention, cut into blocks; its arrays are padded to whole blocks."""

  operands: Operands
  spec: AttentionSpec
  sizes: blocks.Sizes
  heads: int  # N
  visits: blocks.BlockMap  # of query blocks (forward) or of key blocks (backward)

  @property
  def group(self) -> int:
    return self.operands.query.shape[2] // self.operands.key.shape[2]

  @property
  def num_steps(self) -> int:
    """Pairs of a batch row and N key heads."""
    return self.operands.key.shape[0] * (self.operands.key.shape[2] // self.heads)

  @property
  def dtype(self):
    """The dtype of logits, sums and accumulators."""
    return self.spec.softmax_dtype


class Place(NamedTuple):
  """Which batch row and which heads a step computes."""

  batch: Any
  key_head: Any  # the first of N


def mask_of(operands: Operands, spec: AttentionSpec) -> algebra.Mask:
  return jax.tree.unflatten(spec.mask, operands.mask.arrays)


def cut(operands, spec, block_sizes, *, backward) -> Problem:
  """Chooses blocks, pads to whole blocks and finds the blocks to visit."""
  (_, queries, query_heads, _), (_, keys, key_heads, _) = operands.query.shape, operands.key.shape
  mask = mask_of(operands, spec)
  sizes, heads = tuned.choose((queries, keys, query_heads, key_heads), block_sizes, mask,
                              backward=backward)
  kinds = blocks.merge_heads(blocks.block_kinds(mask, sizes), heads * query_heads // key_heads)
  kinds = kinds.swapaxes(-1, -2) if backward else kinds
  return Problem(pad(operands, sizes, spec.mask), spec, sizes, heads, blocks.block_map(kinds))


def pad(operands: Operands, sizes: blocks.Sizes, structure=None) -> Operands:
  """Pads queries, keys and values, the bias and the mask's arrays to whole blocks."""
  rows = -sizes.queries % sizes.block_q
  columns = key_padding(sizes)
  bias, mask = operands.bias, operands.mask
  if bias is not None:
    bias = pad_axis(bias, 2, rows if bias.shape[2] > 1 else 0)
    bias = pad_axis(bias, 3, columns if bias.shape[3] > 1 else 0)
  if structure is not None:
    mask = tiles.pad(structure, mask, rows, columns)
  key, value = (pad_axis(x, 1, columns) for x in (operands.key, operands.value))
  return operands._replace(query=pad_axis(operands.query, 1, rows), key=key, value=value,
                           bias=bias, mask=mask)


def pad_residuals(problem, residuals) -> Residuals:
  padding = problem.operands.query.shape[1] - residuals.out.shape[1]
  return Residuals(pad_axis(residuals.out, 1, padding), pad_axis(residuals.lse, 2, padding))


def pad_axis(x, axis, amount):
  if not amount:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, amount)
  return jnp.pad(x, widths)


def key_padding(sizes: blocks.Sizes) -> int:
  return -sizes.keys % sizes.block_kv


def place_of(problem, n) -> Place:
  parts = problem.operands.key.shape[2] // problem.heads
  return Place(n // parts, n % parts * problem.heads)


def write_at(x, part, starts):
  return lax.dynamic_update_slice(x, part, tiles.int32s(starts))


def loop(lower, upper, body, carry):
  """`lax.fori_loop` with an int32 counter, whatever jax_enable_x64 says."""
  lower, upper = (np.int32(x) if isinstance(x, int) else x for x in (lower, upper))
  return lax.fori_loop(lower, upper, body, carry)


def visit(problem, place, row_block, step, carry):
  """Runs step(column block, carry, masked) over the blocks that `row_block` must visit."""
  visits = problem.visits
  b = place.batch if visits.num_full.shape[0] > 1 else 0
  h = place.key_head // problem.heads if visits.num_full.shape[1] > 1 else 0
  indices, num_full, num_visited = (jnp.asarray(x)[b, h, row_block] for x in visits)
  if visits.any_full:
    carry = loop(0, num_full, lambda n, c: step(indices[n], c, False), carry)
  if visits.any_partial:
    carry = loop(num_full, num_visited, lambda n, c: step(indices[n], c, True), carry)
  return carry


def scale_parts(problem):
  """(what multiplies the query, what multiplies the logits): their product is the scale.

  A 16-bit query is multiplied by a power of two only, which rounds nothing.
  """
  scale = problem.spec.softmax_scale
  if problem.operands.query.dtype.itemsize >= 4 or scale == 0:
    return scale, 1.0
  mantissa, exponent = math.frexp(scale)
  return 2.0 ** (exponent - 1), 2 * mantissa


def scaled_query(problem, place, block):
  rows = query_rows(problem.operands.query, problem, place, block)
  return rows * jnp.asarray(scale_parts(problem)[0], rows.dtype)


def query_rows(x, problem, place, block):
  """[B, T, H, W] -> [N, R, W]: one query block (None: all queries) of this step's heads."""
  length = x.shape[1] if block is None else problem.sizes.block_q
  start = 0 if block is None else block * length
  group = problem.group
  x = tiles.slice_at(x, (place.batch, start, place.key_head * group, 0),
                        (1, length, problem.heads * group, x.shape[3]))
  x = x.reshape(length, problem.heads, group, -1).transpose(1, 0, 2, 3)
  return x.reshape(problem.heads, length * group, -1)


def write_rows(problem, place, block, x, rows):
  """The inverse of `query_rows`: writes [N, R, W] into [B, T, H, W]."""
  length = rows.shape[1] // problem.group
  start = 0 if block is None else block * length
  rows = rows.astype(x.dtype).reshape(problem.heads, length, problem.group, -1)
  rows = rows.transpose(1, 0, 2, 3).reshape(1, length, problem.heads * problem.group, -1)
  return write_at(x, rows, (place.batch, start, place.key_head * problem.group, 0))


def row_numbers(problem, place, block, x):
  """[B, H, T] -> [N, R]."""
  length = x.shape[2] if block is None else problem.sizes.block_q
  start = 0 if block is None else block * length
  group = problem.group
  x = tiles.slice_at(x, (place.batch, place.key_head * group, start),
                        (1, problem.heads * group, length))
  return x.reshape(problem.heads, group, length).transpose(0, 2, 1).reshape(problem.heads, -1)


def write_row_numbers(problem, place, block, x, numbers):
  """The inverse of `row_numbers`."""
  length, group = problem.sizes.block_q, problem.group
  numbers = numbers.astype(x.dtype).reshape(problem.heads, length, group).transpose(0, 2, 1)
  return write_at(x, numbers.reshape(1, problem.heads * group, length),
                                  (place.batch, place.key_head * group, block * length))


def key_rows(x, problem, place, block):
  """[B, S, K, W] -> [N, C, W]: one key block of this step's heads.

  Cut whenever a block is visited: an ordered copy of all keys is no faster, and would be most of
  the memory.
  """
  length = problem.sizes.block_kv
  x = tiles.slice_at(x, (place.batch, block * length, place.key_head, 0),
                     (1, length, problem.heads, x.shape[3]))
  return x[0].transpose(1, 0, 2)


def write_key_rows(problem, place, block, x, rows):
  rows = rows.astype(x.dtype).transpose(1, 0, 2)[None]
  return write_at(
      x, rows, (place.batch, block * problem.sizes.block_kv, place.key_head, 0))


def keys_and_values(problem, place, block, finite):
  """A block of keys and values, `finite` of all [B, S, K, 1]; see `shield`."""
  return shield(*(key_rows(x, problem, place, block)
                  for x in (problem.operands.key, problem.operands.value, finite)))


def finite_keys(keys, values):
  """Whether a key and its value are finite: [..., W] -> [..., 1].

  By a sum, since the logical one of every row is slow on TPUs, and to compile for them.
  """
  nothing = lambda x: (x - x).astype(jnp.float32).sum(-1, keepdims=True)  # 0, or NaN
  return nothing(keys) + nothing(values) == 0


def shield(keys, values, finite):
  """Keys and values [..., W] such that what is not `finite` reaches only those who see it.

  0 * NaN is NaN, so a hidden value would spoil the product. A key that is not finite, or whose
  value is not, becomes a NaN key with value 0: its logits are NaN where it is seen, and -inf
  where it is hidden.
  """
  return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)


def clean(x):
  """Zeros instead of what is not finite; rows that saw it carry NaN in their lse."""
  return jnp.where(jnp.isfinite(x), x, 0)


def clean_hidden(mask: algebra.Mask, *arrays):
  """`clean` of all, unless everything is seen by all and so shows NaN anyhow."""
  return arrays if isinstance(mask, algebra.Full) else tuple(map(clean, arrays))


def take(x, start, length):
  return lax.dynamic_slice_in_dim(x, start, length, 1)


def dot(a, b, problem):
  """[N, x, y] . [N, y, z] -> [N, x, z]."""
  return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=problem.spec.precision,
                         preferred_element_type=problem.dtype)


def scores_of(problem, rows, keys, *, transposed=False):
  """rows [N, R, W] . keys [N, C, W] -> [N, R, C], or [N, C, R] when transposed."""
  left, right = (keys, rows) if transposed else (rows, keys)
  scores = lax.dot_general(left, right, (((2,), (2,)), ((0,), (0,))),
                           precision=problem.spec.precision, preferred_element_type=problem.dtype)
  return scores


def logits_of(problem, place, rows, keys, tile, *, transposed=False):
  """Logits of a tile, -inf where hidden, and d logit / d score (None: 1).

  tile = (query block, key block, whether the mask must be evaluated).
  """
  i, j, masked = tile
  spec, rest = problem.spec, scale_parts(problem)[1]
  logits, slope = scores_of(problem, rows, keys, transposed=transposed), None
  logits = logits if rest == 1 else logits * jnp.asarray(rest, problem.dtype)
  if spec.logits_soft_cap is not None:
    capped = jnp.tanh(logits / spec.logits_soft_cap)
    logits, slope = capped * spec.logits_soft_cap, 1 - capped * capped
  if problem.operands.bias is not None:
    logits = logits + bias_tile(problem, place, (i, j), transposed).astype(problem.dtype)
  if masked:
    mask, at = mask_tile(problem, place, (i, j), transposed)
    seen = mask.visible(at)
    if key_padding(problem.sizes):
      seen = seen & (at.key_index < problem.sizes.keys)
    logits = jnp.where(per_element(seen, logits.shape, problem, transposed), logits, -jnp.inf)
  return logits, slope


def mask_tile(problem, place, tile, transposed):
  """Mask and coordinates of a tile, arrays oriented like the scores in four axes."""
  (i, j), sizes, group = tile, problem.sizes, problem.group
  where = tiles.Tile(place.batch, place.key_head * group, i * sizes.block_q, j * sizes.block_kv,
                     problem.heads * group, sizes.block_q, sizes.block_kv)
  return tiles.cut(problem.spec.mask, problem.operands.mask, where,
                   lambda x: orient(x, problem, transposed))


def orient(x, problem, transposed):
  """[heads or 1, Q or 1, C or 1] -> [N or 1, Q or 1, G or 1, C or 1] (transposed: N, C, Q, G)."""
  x = x.reshape(*((problem.heads, -1) if x.shape[0] > 1 else (1, 1)), *x.shape[1:])
  return x.transpose(0, 3, 2, 1) if transposed else x.transpose(0, 2, 1, 3)


def per_element(x, shape, problem, transposed):
  """Something that broadcasts to the four axes of `orient`, as an array of the scores' shape."""
  heads, (rows, keys) = shape[0], (shape[2], shape[1]) if transposed else shape[1:]
  rows = (rows // problem.group, problem.group)
  four = (heads, keys, *rows) if transposed else (heads, *rows, keys)
  return jnp.broadcast_to(x, four).reshape(shape)


def bias_tile(problem, place, tile, transposed=False):
  """The bias of a tile, broadcast to the scores' shape."""
  bias, (i, j), sizes, group = problem.operands.bias, tile, problem.sizes, problem.group
  starts, lengths = bias_slice(bias.shape, problem, place, tile)
  part = tiles.slice_at(bias, starts, lengths)[0]
  shape = (problem.heads, sizes.block_q * group, sizes.block_kv)
  shape = (shape[0], shape[2], shape[1]) if transposed else shape
  return per_element(orient(part, problem, transposed), shape, problem, transposed)


def bias_slice(shape, problem, place, tile):
  (i, j), sizes, group = tile, problem.sizes, problem.group
  starts = (place.batch, place.key_head * group, i * sizes.block_q, j * sizes.block_kv)
  lengths = (1, problem.heads * group, sizes.block_q, sizes.block_kv)
  return (tuple(0 if n == 1 else start for n, start in zip(shape, starts)),
          tuple(1 if n == 1 else length for n, length in zip(shape, lengths)))


def add_bias_tile(problem, place, tile, d_bias, d_logits):
  """Adds transposed d_logits [N, C, R] to the part of d_bias that the tile covers."""
  group, sizes = problem.group, problem.sizes
  starts, lengths = bias_slice(d_bias.shape, problem, place, tile)
  part = d_logits.reshape(problem.heads, sizes.block_kv, sizes.block_q, group)
  part = part.transpose(0, 3, 2, 1).reshape(1, -1, sizes.block_q, sizes.block_kv)
  part = part.sum([a for a in range(4) if lengths[a] == 1], keepdims=True)
  return write_at(
      d_bias, tiles.slice_at(d_bias, starts, lengths) + part.reshape(lengths), starts)


def drop(problem, place, tile, weights, *, transposed=False):
  """Dropout on weights of a tile: zeros where they are dropped; see `kept_scale`."""
  if not problem.spec.dropout_prob:
    return weights
  words = problem.operands.dropout_key
  words = words[place.batch if words.shape[0] > 1 else 0]
  mask, at = mask_tile(problem, place, tile, transposed)
  keep = dropout.keep_mask(words, algebra.move_to_positions(mask, at), problem.spec.dropout_prob)
  return jnp.where(per_element(keep, weights.shape, problem, transposed), weights, 0)


def kept_scale(problem) -> float:
  """`dropout.kept_scale`; multiplied once, on what the weights are summed to."""
  return dropout.kept_scale(problem.spec.dropout_prob)


def weights_of(problem, relative):
  """exp(relative), relative <= 0, in the problem's dtype."""
  narrowed = problem.operands.query.dtype.itemsize < 4  # what is rounded next: see numbers.exp
  return (jnp.exp if narrowed else numbers.exp)(relative)


def correction_of(residuals, cotangents, dtype):
  """[B, H, T]: sum(d_out * out) less d_lse, since both enter dS in the same place."""
  if residuals.out is None:  # d_lse has it already
    return -cotangents.lse
  return jnp.einsum("bthe,bthe->bht", cotangents.out, residuals.out,
                    preferred_element_type=dtype) - cotangents.lse


def row_sinks(problem, place):
  """The sinks of this step's rows: [N, R, 1], or None."""
  sinks = problem.operands.sinks
  if sinks is None:
    return None
  group = problem.group
  sinks = tiles.slice_at(
      sinks, (place.batch if sinks.shape[0] > 1 else 0, place.key_head * group),
      (1, problem.heads * group))
  sinks = sinks.reshape(problem.heads, 1, group, 1).astype(problem.dtype)
  shape = (problem.heads, problem.sizes.block_q, group, 1)
  return jnp.broadcast_to(sinks, shape).reshape(problem.heads, -1, 1)


def finite_lse(lse):
  """+inf instead of -inf: the weights of a row that saw nothing are exp(logits - inf) = 0."""
  return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def out_dtype(operands, spec):
  return operands.query.dtype if spec.out_dtype is None else spec.out_dtype


def lse_dtype(spec):
  return jnp.promote_types(spec.softmax_dtype, jnp.float32)
