"""page_attention and ragged_page_attention_v2, v3: attention over pages, spread over a mesh.

Where mesh axes have the stripes of the requests' pages, every device attends to its own ones, and
the results are merged as those of `decode` are.
"""

import functools
import math
from typing import Callable

import jax
import jax.numpy as jnp

from attn_core.autodiff import paged as derivatives_paged
from attn_core.caches.paged import request_groups as groups, ops as pages, page_stripes as stripes
from attn_core.caches.paged.page_stripes import Stripe
from attn_core.kernels.gpu.split_kv import paged as gpu_kernel
from attn_core.kernels.tpu.ragged import paged as tpu_kernel
from attn_core.kernels.xla import paged_forward as xla_kernel
from attn_core.sharding import lse_combine as merge, paged as shard_paged
from attn_core.types import AttentionOutput, Call


def xla(call: Call) -> AttentionOutput:
  """Attention to what is in the pages, in plain XLA."""
  return _spread(xla_kernel.forward, call)


def tpu(call: Call) -> AttentionOutput:
  """Attention to what is in the pages, by a Pallas kernel for TPUs; gradients by XLA."""
  return _spread(KERNELS["tpu"], call)


def gpu(call: Call) -> AttentionOutput:
  """Attention to what is in the pages, by a Mosaic GPU kernel for Hopper; gradients by XLA."""
  return _spread(KERNELS["gpu"], call)


def xla_writing(call: Call) -> AttentionOutput:
  """As `xla`, new keys and values being written first; returns the cache with them."""
  return _spread(xla_kernel.forward, call, writes=True)


def tpu_writing(call: Call) -> AttentionOutput:
  """As `tpu`, new keys and values being written first; returns the cache with them."""
  return _spread(KERNELS["tpu"], call, writes=True)


def gpu_writing(call: Call) -> AttentionOutput:
  """As `gpu`, new keys and values being written first; returns the cache with them."""
  return _spread(KERNELS["gpu"], call, writes=True)


def _unaware(forward: Callable) -> Callable:
  """A kernel that knows no stripes, for requests of one query and no window.

  That query sees all keys before it: how many a stripe holds is all there is to know.
  """
  def run(operands, *rest):
    if operands.stripe is not None:
      metadata = operands.metadata
      lengths = stripes.held(operands.stripe, metadata.context_lens)
      operands = operands._replace(stripe=None, metadata=metadata._replace(context_lens=lengths))
    return forward(operands, *rest)
  return run


KERNELS = {"tpu": _unaware(tpu_kernel.forward), "gpu": _unaware(gpu_kernel.forward)}


def _spread(forward: Callable, call: Call, *, writes: bool = False) -> AttentionOutput:
  return shard_paged.sharded(functools.partial(_local, forward, call, writes), call, writes=writes)


def _local(forward: Callable, call: Call, writes: bool, operands) -> AttentionOutput:
  """One device's groups of requests, one after the other."""
  axes = call.placement.keys if call.placement else ()
  operands = _of_device(operands, call.placement)
  cache, metadata, tokens = operands.cache, operands.metadata, operands.query.shape[0]
  key_heads, width, value_width = pages.heads_of(cache)
  if writes:
    key_heads = operands.key.shape[1]
    cache = pages.append(cache, operands.key, operands.value,
                         groups.slots(cache, metadata, tokens, operands.stripe))
  if isinstance(cache, pages.PagesV3):
    width = value_width = operands.query.shape[2]

  def attend(query, metadata):
    return derivatives_paged.attend(
        forward, operands._replace(query=query, cache=cache, metadata=metadata, key=None,
                                   value=None),
        call.spec, pages.Heads(key_heads, width, value_width), call.block_sizes)

  number = groups.count(metadata)
  if number is None:
    out, lse = attend(operands.query, metadata)
  elif number == 1:
    out, lse = attend(operands.query, jax.tree.map(lambda x: x[0], metadata))
  else:
    queries = operands.query.reshape(number, tokens // number, *operands.query.shape[1:])
    found = jax.lax.map(lambda x: attend(*x), (queries, groups.with_pool_ids(
        metadata, pages.num_pages(cache))))
    out, lse = (x.reshape(tokens, *x.shape[2:]) for x in found)
  lse = lse.astype(jnp.promote_types(lse.dtype, jnp.float32))[..., 0].T[None]
  out, lse = merge.over_axes(out[None], lse, axes) if axes else (out[None], lse)
  return AttentionOutput(out, lse=lse if call.return_lse else None,
                         cache_view=cache if writes else None)


def _of_device(operands, placement):
  """The operands by the numbers of a device's own pages, with their stripe; sinks count once."""
  cache, sinks, own = operands.cache, operands.sinks, groups.stripe_count(operands.metadata)
  operands = operands._replace(metadata=groups.whole(operands.metadata, pages.num_pages(cache)))
  if placement is None or not placement.keys:
    return operands
  number = jax.lax.axis_index(placement.keys)
  of = math.prod(placement.mesh.shape[axis] for axis in placement.keys)
  return operands._replace(
      sinks=None if sinks is None else jnp.where(number == 0, sinks, -jnp.inf),
      stripe=Stripe(*map(jnp.int32, (number, of, own * pages.page_size(cache)))))
