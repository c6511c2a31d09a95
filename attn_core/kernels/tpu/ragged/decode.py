"""A few queries a row against a dense cache on TPUs: a long run of pages that lie side by side.

Every row of the batch is one step of `stream`; a page is some tokens of it, and only those between
the first and the last key that any of its queries sees are read. The mask comes as columns of a
boolean array, beside which keys and values are large. A row's result has the same bits in any
batch: its blocks are cut at multiples of their size, and nothing else goes into it.

Letters: B batch, T query length, S key length, H query heads, K key heads, G = H / K, D and E
widths.
"""

from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common import online_softmax as softmax
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.tpu.flash import kernel as flash
from attn_core.kernels.tpu.ragged import common as step, kernel as stream
from attn_core.kernels.tpu.ragged.kv_layout import LANES, Pool, heads_apart
from attn_core.kernels.xla import decode as xla, tile_ops as steps
from attn_core.masks import materialize as dense_mask
from attn_core.types import AttentionSpec, BlockSizes, Operands, cdiv

PAGE = 64  # tokens that are read together
BLOCK_KV = 1024  # tokens of a block; a multiple of LANES, as all are
BUFFER_BYTES = 16 * 2**20  # of vector memory for keys and values on their way and as words
MASK_ROWS = 16  # rows of the mask are a multiple, as bfloat16 is stored
SCORES = 2**19  # of a block, of the key heads that are computed together
MOST_QUERIES = 64  # T
DTYPES = ("float32", "bfloat16")


def forward(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> Residuals:
  """out [B, T, H, E] and lse [B, H, T]; see `kernel.Kernel`."""
  batch, length, heads, width = operands.query.shape
  key_heads = operands.key.shape[2]
  group, pool = heads // key_heads, _pool(operands, block_sizes)
  mask, by_head, items = _visible(operands, spec, pool)
  shape = step.Shape(pool, group, length, 0, mask.shape[1], by_head)
  rows = operands.query.reshape(batch, length, key_heads, group, width)
  rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, shape.groups, shape.lanes, width)
  rule = step.Rule(spec.softmax_scale, spec.logits_soft_cap, None, None, spec.precision)
  count = jnp.full((1,), batch, jnp.int32)
  out, lse = stream.attend(rule, shape, step.Arrays(
      items, count, jnp.zeros((1,), jnp.int32), None, rows, mask, _arrays(operands, pool)))
  def shaped(x):
    x = x.reshape(batch, key_heads, length, group, -1).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, length, heads, -1)
  sinks = None if operands.sinks is None else operands.sinks[:, None, :, None]
  out, lse = softmax.join_sinks(shaped(out), shaped(lse), sinks)
  return Residuals(out, lse[..., 0].swapaxes(1, 2))


def _pool(operands: Operands, block_sizes: BlockSizes) -> Pool:
  """How keys and values lie."""
  key, value = operands.key, operands.value
  length, heads = operands.query.shape[1:3]
  block = cdiv(block_sizes.block_kv or BLOCK_KV, LANES) * LANES
  block = min(block, cdiv(key.shape[1], LANES) * LANES)
  lanes = cdiv(length * heads // key.shape[2], LANES) * LANES
  block = min(block, max(1, SCORES // lanes // LANES) * LANES)
  # Part of a page of heads apart would be part of a tile.
  apart = heads_apart(key.shape[2], key.dtype) and key.shape[1] % PAGE == 0
  pool = Pool(False, apart, key.shape[2], (key.shape[3], value.shape[3]), jnp.dtype(key.dtype),
              PAGE, block // PAGE, key.shape[1],
              None if operands.key_scale is None else "token",
              step.FEW_SLOTS if step.is_few(length * heads // key.shape[2]) else 2)
  most = max(1, pool.block * BUFFER_BYTES // pool.bytes() // LANES)
  return pool._replace(block_pages=min(pool.block_pages, most * LANES // PAGE))


def _arrays(operands: Operands, pool: Pool) -> tuple:
  """Keys, values and scales as `Pool` has them."""
  def stored(x):
    x = lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x
    return x.swapaxes(1, 2) if pool.apart else x
  arrays = stored(operands.key), stored(operands.value)
  if operands.key_scale is None:
    return arrays
  padded = lambda x: steps.pad_axis(steps.pad_axis(
      x.swapaxes(1, 2), 1, pool.scale_rows - pool.key_heads), 2, -x.shape[1] % pool.block)
  return *arrays, padded(operands.key_scale), padded(operands.value_scale)


def _visible(operands: Operands, spec: AttentionSpec, pool: Pool):
  """(mask bfloat16 [B, R, keys], whether R are rows of every query head, the steps)."""
  (batch, length, heads, _), keys = operands.query.shape, operands.key.shape[1]
  seen = dense_mask.visible(spec.mask, operands.mask, (batch, heads, length, keys))
  by_head = seen.shape[1] > 1
  seen = jnp.broadcast_to(seen, (batch, heads if by_head else 1, length, keys))
  seen = seen.reshape(batch, -1, keys)
  some = seen.any(1)
  stop = jnp.max(jnp.where(some, jnp.arange(1, keys + 1, dtype=jnp.int32), 0), 1)
  start = jnp.where(stop > 0, jnp.argmax(some, 1).astype(jnp.int32), 0)
  first = start // pool.block
  # A step of no key block would leave the next one's first transfers to nobody.
  end = jnp.maximum(cdiv(stop, pool.block), first + 1)
  nothing = jnp.zeros_like(start)
  items = step.Items(jnp.arange(batch, dtype=jnp.int32), first, end, nothing, nothing, stop,
                     start, stop)
  mask = steps.pad_axis(seen.astype(jnp.bfloat16), 2, -keys % pool.block)
  return steps.pad_axis(mask, 1, -seen.shape[1] % MASK_ROWS), by_head, items


def refusal(dtype, widths, length: int) -> str | None:
  """Why the kernel does not compute a call, by shapes and dtypes; None: it does.

  Args:
    dtype: of the query.
    widths: D and E.
    length: T.
  """
  if jnp.dtype(dtype).name not in DTYPES:
    return f"dtype {jnp.dtype(dtype).name}: the TPU kernel computes {' and '.join(DTYPES)}"
  for width in widths:
    if width > LANES and width % LANES:
      return f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}"
  if length > MOST_QUERIES:
    return (f"{length} queries a row: the TPU kernel takes up to {MOST_QUERIES}; prefill with "
            "flash_attn2")
  return None


KERNEL = Kernel("decode_tpu", forward, xla.backward, xla.tangent, xla.KERNEL,
                effects=flash.effects)
