# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""page_attention, ragged_page_attention_v2 and v3: attention over pages, sharded over a mesh.

Where mesh axes shard the stripes of the requests' pages, each device attends to its stripes, and
the results are combined as those of `decode` are.
"""

import functools
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn_core import array_axes
from attn_core.autodiff import paged as autodiff_paged
from attn_core.caches.paged import layouts, ops, page_stripes, request_groups
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.page_stripes import Stripe
from attn_core.kernels.common import paged_operands
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import paged_forward
from attn_core.mechanisms import paged_prefixes
from attn_core.sharding import lse_combine, paged as shard_paged, shard_map, varying_axes
from attn_core.sharding.placement import Placement
from attn_core.types import (AttentionOutput, BlockSizes, Call, PagedOperands, PagedSpec,
                             at_least_float32)

WRITTEN = (layouts.PagesV3, PagesLatent)  # layouts to which calls write
Forward = autodiff_paged.PagedForwardFn
Writer = autodiff_paged.WritingForwardFn


class _Kernel(NamedTuple):
  """A kernel over pages."""

  forward: Forward
  prefixes: Callable[[paged_prefixes.Attend, layouts.Heads], paged_prefixes.Form]
  writer: Writer | None = None  # writes the new tokens as well; None: XLA does


def xla(call: Call) -> AttentionOutput:
  """Attends to the pages in plain XLA."""
  return _sharded(_xla_kernel(), call)


def tpu(call: Call) -> AttentionOutput:
  """Attends to the pages by a Pallas kernel for TPUs; gradients are those of plain XLA."""
  return _sharded(_Kernel(tpu_forward(), paged_prefixes.on_tpu), call)


def gpu(call: Call) -> AttentionOutput:
  """Attends to the pages by a Mosaic GPU kernel for Hopper; gradients are those of plain XLA."""
  return _sharded(_Kernel(gpu_forward(), paged_prefixes.on_hopper), call)


def xla_writing(call: Call) -> AttentionOutput:
  """Writes new keys and values to the pages, then attends as `xla`; returns the cache."""
  return _sharded(_xla_kernel(), call, writes=True)


def tpu_writing(call: Call) -> AttentionOutput:
  """Attends as `tpu` to pages to which the kernel first writes new keys and values, or rows."""
  from attn_core.kernels.tpu.ragged import paged  # as in `tpu_forward`
  return _sharded(_Kernel(tpu_forward(), paged_prefixes.on_tpu,
                          _over_every_axis(paged.forward_writing)), call, writes=True)


def gpu_writing(call: Call) -> AttentionOutput:
  """Writes new keys and values to the pages, then attends as `gpu`; returns the cache."""
  return _sharded(_Kernel(gpu_forward(), paged_prefixes.on_hopper), call, writes=True)


def _xla_kernel() -> _Kernel:
  return _Kernel(paged_forward.forward, paged_prefixes.on_xla)


def tpu_forward() -> Forward:
  """Returns the forward of the kernel for TPUs, which takes stripes."""
  from attn_core.kernels.tpu.ragged import paged  # imported when chosen: Pallas takes 0.1 s
  return _by_held_lengths(paged.forward)


def gpu_forward() -> Forward:
  """Returns the forward of the kernel for Hopper, which takes stripes."""
  from attn_core.kernels.gpu.split_kv import paged  # imported when chosen: Mosaic GPU takes 0.3 s
  return _by_held_lengths(paged.forward)


@functools.lru_cache(maxsize=8)  # one function for each kernel, which JAX traces once
def _over_every_axis(writer: Writer) -> Writer:
  """Returns a kernel that may leave out axes of one device of the caller's mesh."""
  def run(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
          block_sizes: BlockSizes) -> tuple[Residuals, layouts.Pages]:
    return shard_map.over_every_axis(
        lambda operands: writer(operands, spec, heads, block_sizes), operands)
  return run


@functools.lru_cache(maxsize=8)  # one function for each kernel, which JAX traces once
def _by_held_lengths(forward: Forward) -> Forward:
  """Returns a kernel that takes stripes, for requests of one query without a window.

  That query sees all keys before it, so a device needs only the number of tokens in its stripe.
  """
  def run(operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
          block_sizes: BlockSizes) -> Residuals:
    if operands.stripe is not None:
      metadata = operands.metadata
      lengths = page_stripes.held(operands.stripe, metadata.context_lens)
      operands = operands._replace(stripe=None, metadata=metadata._replace(context_lens=lengths))
    return shard_map.over_every_axis(
        lambda operands: forward(operands, spec, heads, block_sizes), operands)
  return run


def _sharded(kernel: _Kernel, call: Call, *, writes: bool = False) -> AttentionOutput:
  if call.operands.key is None:  # the keys of another layer are read
    writes, kernel = False, kernel._replace(writer=None)
  return shard_paged.sharded(functools.partial(_local, kernel, call, writes), call, writes=writes)


def _local(kernel: _Kernel, call: Call, writes: bool, operands: PagedOperands) -> AttentionOutput:
  """Attends to one device's groups of requests, one after the other."""
  operands = _of_device(operands, call)
  forward, writer = kernel.forward, kernel.writer
  cache, metadata, tokens = operands.cache, operands.metadata, operands.query.shape[0]
  key_heads, width, value_width = _heads(cache, metadata, call.placement)
  number = request_groups.count(metadata)
  # The kernel writes the tokens of one group, with all pages of its requests.
  separately = (writer is None or operands.stripe is not None or number not in (None, 1)
                # Pages that several devices hold stay equal on all of them.
                or varying_axes.of(cache) != varying_axes.of(operands)
                or isinstance(cache, WRITTEN) and array_axes.parts_of(cache.pages) is not None)
  if writes:
    assert operands.key is not None and operands.value is not None
    key_heads = operands.key.shape[1]
    if separately:
      slots = request_groups.slots(cache, metadata, tokens, operands.stripe)
      cache = ops.append_tokens(cache, operands.key, operands.value, slots)
    if isinstance(cache, layouts.PagesV3):
      width, value_width = operands.query.shape[2], operands.value.shape[2]

  heads = layouts.Heads(key_heads, width, value_width)
  form = kernel.prefixes(lambda operands, spec, sizes: autodiff_paged.attend(
      forward, operands, spec, heads, sizes), heads)

  def attend(query: jax.Array, metadata: layouts.PagesMetadata,
             mods: tuple[jax.Array, ...]) -> Residuals:
    part = operands._replace(query=query, cache=cache, metadata=metadata, key=None, value=None,
                             mods=mods)
    return paged_prefixes.attend(form, part, call.spec, call.block_sizes)[0]

  if writer is not None and not separately:
    one = metadata if number is None else jax.tree.map(lambda x: x[0], metadata)
    write = lambda operands, spec, sizes: autodiff_paged.attend_writing(
        writer, forward, operands, spec, heads, sizes)
    (out, lse), cache = paged_prefixes.attend(
        form, operands._replace(metadata=one), call.spec, call.block_sizes, write)
  elif number is None:
    out, lse = attend(operands.query, metadata, operands.mods)
  elif number == 1:
    out, lse = attend(operands.query, jax.tree.map(lambda x: x[0], metadata), operands.mods)
  else:
    queries = operands.query.reshape(number, tokens // number, *operands.query.shape[1:])
    found = jax.lax.map(lambda x: attend(*x), (queries, request_groups.with_pool_ids(
        metadata, layouts.num_pages(cache)), _by_group(operands.mods, call.spec, number)))
    out, lse = (x.reshape(tokens, *x.shape[2:]) for x in found)
  out, lse = out[None], lse.astype(at_least_float32(lse.dtype))[..., 0].T[None]
  if operands.stripe is not None:
    assert call.placement is not None
    out, lse = lse_combine.combine(out, lse, call.placement.keys)
  return AttentionOutput(
      out, lse=lse if call.return_lse else None,
      cache_view=cache if writes and isinstance(cache, WRITTEN) else None)


def _heads(cache: layouts.Pages, metadata: layouts.PagesMetadata,
           placement: Placement | None) -> layouts.Heads:
  """Returns the heads of one device's pages, without padding where the metadata says them."""
  stored = metadata.stored_heads
  if stored is None:
    return layouts.heads_of(cache)
  shards = 1 if placement is None else placement.size(placement.key_heads)
  return layouts.Heads(stored.key_heads // shards, stored.key_width, stored.value_width)


def _by_group(mods: tuple[jax.Array, ...], spec: PagedSpec,
              number: int) -> tuple[jax.Array, ...]:
  """Returns the arrays of the score mod of each of `number` groups of requests, stacked."""
  split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], number, -1, 1), 2, 0)
  return tuple(split(x) if tokens else jnp.broadcast_to(x, (number, *x.shape))
               for x, tokens in zip(mods, paged_operands.has_tokens(mods, spec)))


def _of_device(operands: PagedOperands, call: Call) -> PagedOperands:
  """Returns the operands with this device's numbers and stripe; sinks count on one device."""
  cache, placement = operands.cache, call.placement
  own = request_groups.stripe_count(operands.metadata)
  operands = operands._replace(
      metadata=request_groups.whole(operands.metadata, layouts.num_pages(cache)))
  # A function without arrays may read the number of the head, too.
  if placement is not None and placement.heads and call.spec.has_score_mod:
    first = jax.lax.axis_index(placement.heads) * operands.query.shape[1]
    operands = operands._replace(head_offset=first.astype(jnp.int32))
  if placement is None or not placement.keys:
    return operands
  axes = placement.keys
  assert own is not None  # keys are sharded by their stripes only
  return operands._replace(
      sinks=lse_combine.sinks_on_first_device(operands.sinks, axes), stripe=Stripe(*map(jnp.int32, (
          jax.lax.axis_index(axes), placement.size(axes), own * layouts.page_size(cache)))))
