"""The backward on TPUs: cotangents of queries, keys and values in one kernel.

  scores = K Q^T;  d_value = P d_out;  d_key = dS Q;  d_query^T = K^T dS

The cotangent of the queries stays in vector memory, which saves the two products that a second
kernel would have to repeat.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K,
D query and key width, E value width; C keys and Q queries of a tile.
"""

import functools
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Cargo, Residuals
from attn_core.kernels.tpu.flash import tile_inputs as feeds
from attn_core.kernels.tpu.flash import schedule, tiling as tuned
from attn_core.kernels.tpu.flash.tile_inputs import Part, Refs
from attn_core.kernels.tpu.flash.tile_loop import Setting, ahead, setting_of, visit
from attn_core.kernels.xla import flash as blockwise, tile_ops as steps
from attn_core.types import AttentionSpec, BlockSizes, Operands


def backward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...]) -> tuple:
  """The cotangents of the operands named in `wrt`; see `kernels.xla.blockwise.completed`."""
  return carrying(operands, spec, block_sizes, residuals, cotangents, wrt, None)[0]


def carrying(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
             residuals: Residuals, cotangents: Residuals, wrt: tuple[str, ...],
             cargo: Cargo | None) -> tuple[tuple, tuple]:
  """`backward`, and what came instead of a cargo meanwhile; see `kernel.Carrying`."""
  arrived = []
  def products(*arguments):
    found, came = _products(operands, spec, block_sizes, cargo, *arguments)
    arrived.extend(came)
    return found
  found = blockwise.completed(products, operands, spec, block_sizes, residuals, cotangents, wrt)
  return found, tuple(arrived)


def _products(operands: Operands, spec, block_sizes, cargo, d_out, lse, correction, wrt):
  """Cotangents of query, key and value, by as many queries at a time as vector memory holds.

  And what came instead of the cargo.
  """
  del wrt  # one kernel computes all
  queries, keys = operands.query.shape[1], operands.key.shape[1]
  mask = steps.mask_of(operands, spec)
  cut = tuned.choose(operands, block_sizes, mask, backward=True)
  rows = lambda x, fill: jnp.pad(
      x[:, :, None], ((0, 0),) * 3 + ((0, cut.padded_queries - queries),), constant_values=fill)
  query, key, value = steps.clean_hidden(mask, operands.query, operands.key, operands.value)
  lse = rows(steps.finite_lse(lse) * softmax.LOG2E, jnp.inf)
  arrays = _BackwardArrays(query, d_out, key, value, lse, rows(correction, 0))
  ranges = tuned.query_ranges(operands, cut)
  cargos = [cargo, *[None] * (len(ranges) - 1)]
  parts, arrived = zip(*[
      _backward_range(operands, spec, block_sizes, arrays, cut, blocks_q, cargo)
      for blocks_q, cargo in zip(ranges, cargos)])
  d_queries, d_keys, d_values = zip(*parts)
  add = lambda parts, like: sum(parts[1:], parts[0])[:, :keys].astype(like.dtype)
  return {"query": jnp.concatenate(d_queries, 1)[:, :queries],
          "key": add(d_keys, operands.key), "value": add(d_values, operands.value)}, arrived[0]


class _BackwardArrays(NamedTuple):
  """What the backward's kernels read, or the readers of its blocks.

  lse times log2(e), +inf where nothing was seen.
  """

  query: Any  # [B, T, H, D]; a reader gives [queries, D]
  d_out: Any  # [B, T, H, E]
  key: Any  # [B, S, K, D]
  value: Any  # [B, S, K, E]
  lse: Any  # [B, H, 1, padded T]; a reader gives a block [1, G, 1, queries]
  correction: Any  # the same


def _backward_range(operands, spec, block_sizes, arrays: _BackwardArrays, cut, query_blocks, cargo):
  """(d_query [B, T', H, D], d_key and d_value [B, padded S, K, W]) of a range of queries.

  And what came instead of the cargo.
  """
  batch, _, heads, width = operands.query.shape
  key_heads = operands.key.shape[2]
  number = query_blocks[1] - query_blocks[0]
  mask = steps.mask_of(operands, spec)
  visits, lines = schedule.build(mask, cut, by_keys=True, query_blocks=query_blocks)
  feed = feeds.Feed(visits, lines, cut, by_keys=True, first_query_block=query_blocks[0])
  of_rows = lambda x: feed.array(
      x, (1, cut.query_heads, 1, cut.block_q), lambda b, h, i, j: (b, h, 0, i))
  forms = (*(feed.query_tokens(x.shape) for x in arrays[:2]),
           *(feed.key_tokens(x.shape) for x in arrays[2:4]))
  readers = _BackwardArrays(
      *(feed.tokens(form, form.pack(x)) for form, x in zip(forms, arrays)),
      of_rows(arrays.lse), of_rows(arrays.correction))
  setting = setting_of(feed, operands, spec, cut, visits)
  # The cotangent of all queries of the range is one block: it stays until the last step.
  rows = number * cut.block_q
  results = (feeds.Tokens(batch, rows, heads, width, cut.query_heads, rows, lambda i, j: 0),
             feed.key_tokens(operands.key.shape), feed.key_tokens(operands.value.shape))
  summed = jnp.float32 if rows < cut.padded_queries else operands.query.dtype
  found, arrived = feeds.call(
      functools.partial(_backward_kernel, setting, feed, readers, results), feed,
      (batch, key_heads // cut.heads, feed.steps),
      [(form.shape, dtype, form.block_shape, form.index)
       for form, dtype in zip(results, (operands.query.dtype, summed, summed))],
      [(cut.query_heads * number, width, cut.block_q), (cut.heads, cut.block_kv, width),
       (cut.heads, cut.block_kv, operands.value.shape[3])],
      vmem_bytes=tuned.vmem_limit(block_sizes, cut, operands, backward=True),
      name="attn_core_backward", cargo=cargo)
  return tuple(form.unpack(x) for form, x in zip(results, found)), arrived


def _backward_kernel(setting: Setting, feed, readers, results, refs: Refs, outputs, scratch):
  b, h, n = refs.place
  i, j, kinds, flags = feed.step(refs.scalars, b, h, n)
  lse, correction = (read(refs) for read in readers[4:])
  # The queries' cotangent is transposed, block by block of each head.
  d_query, d_key, d_value = scratch
  number = d_query.shape[0] // setting.cut.query_heads

  @pl.when(n == 0)
  def _():
    d_query[...] = jnp.zeros_like(d_query)

  @pl.when((flags & schedule.FIRST) != 0)
  def _():
    d_key[...] = jnp.zeros_like(d_key)
    d_value[...] = jnp.zeros_like(d_value)

  def products(at):
    """(scores, d_weights) [C, Q]."""
    pairs = (readers.key, readers.query), (readers.value, readers.d_out)
    key_head = setting.key_head(at)
    return tuple(setting.dot(keys(refs, key_head, at.keys), queries(refs, at.head, at.queries),
                             ((1,), (1,))) for keys, queries in pairs)

  def add(at, both, masked):
    scores, d_weights = both
    key_head, keys, queries = setting.key_head(at), at.keys.slice, at.queries.slice
    query, d_out = (read(refs, at.head, at.queries) for read in (readers.query, readers.d_out))
    logits, slope = setting.logits(refs, at, scores)
    weights = jnp.exp2(logits * setting.unit - lse[0, at.head, :, queries])
    weights = setting.hide(refs, at, masked, weights, 0.0)
    kept, d_weights = setting.dropout.drop(refs, at, weights, d_weights)
    d_logits = weights * (d_weights * setting.dropout.scale - correction[0, at.head, :, queries])
    d_logits = (d_logits if slope is None else d_logits * slope).astype(query.dtype)
    d_value[key_head, keys] += setting.dot(kept.astype(d_out.dtype), d_out)
    d_key[key_head, keys] += setting.dot(d_logits, query)
    d_query[at.head * number + at.query_block - feed.first_query_block, :, queries] += setting.dot(
        readers.key(refs, key_head, at.keys), d_logits, ((0,), (0,)))

  def strips(places):
    for at, masked, both in ahead(places, products, tuned.AHEAD[True]):
      add(at, both, masked)

  visit(setting, (b, h, i, j), kinds, strips)

  def write(which, head, part, x):
    ref = outputs[which]
    ref[results[which].at(head, part)] = x.astype(ref.dtype)

  @pl.when((flags & schedule.LAST) != 0)
  def _():
    every = Part(0, setting.cut.block_kv)
    for head in range(setting.cut.heads):
      write(1, head, every, d_key[head] * setting.spec.softmax_scale)
      write(2, head, every, d_value[head] * setting.dropout.scale)

  @pl.when(n == feed.steps - 1)  # the last step of all
  def _():
    size = setting.cut.block_q
    for head in range(setting.cut.query_heads):
      for block in range(number):
        write(0, head, Part(block * size, size),
              d_query[head * number + block].T * setting.spec.softmax_scale)
