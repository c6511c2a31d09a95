"""page_attention and ragged_page_attention_v2, v3: attention over pages, on one device."""

from typing import Callable

import jax.numpy as jnp

from attn_core import derivatives_paged
from attn_core.caches import pages
from attn_core.kernels.tpu import paged as tpu_kernel
from attn_core.kernels.xla import paged as xla_kernel
from attn_core.types import AttentionOutput, Call


def xla(call: Call) -> AttentionOutput:
  """Attention to what is in the pages, in plain XLA."""
  return _attend(xla_kernel.forward, call, call.operands.cache)._replace(cache_view=None)


def tpu(call: Call) -> AttentionOutput:
  """Attention to what is in the pages, by a Pallas kernel for TPUs; gradients by XLA."""
  return _attend(tpu_kernel.forward, call, call.operands.cache)._replace(cache_view=None)


def xla_writing(call: Call) -> AttentionOutput:
  """As `xla`, new keys and values being written first; returns the cache with them."""
  return _write_and_attend(xla_kernel.forward, call)


def tpu_writing(call: Call) -> AttentionOutput:
  """As `tpu`, new keys and values being written first; returns the cache with them."""
  return _write_and_attend(tpu_kernel.forward, call)


def _write_and_attend(forward: Callable, call: Call) -> AttentionOutput:
  operands = call.operands
  cache = operands.cache
  mapping = pages.slots(operands.metadata, pages.page_size(cache), operands.query.shape[0])
  cache = pages.append(cache, operands.key, operands.value, mapping)
  return _attend(forward, call, cache)


def _attend(forward: Callable, call: Call, cache) -> AttentionOutput:
  operands = call.operands
  key_heads, width, value_width = pages.heads_of(cache)
  if operands.key is not None:
    key_heads = operands.key.shape[1]
  if isinstance(cache, pages.PagesV3):
    width = value_width = operands.query.shape[2]
  out, lse = derivatives_paged.attend(
      forward, operands._replace(cache=cache, key=None, value=None), call.spec,
      pages.Heads(key_heads, width, value_width), call.block_sizes)
  lse = lse.astype(jnp.promote_types(lse.dtype, jnp.float32))[..., 0].T[None]
  lse = lse if call.return_lse else None
  return AttentionOutput(out[None], lse=lse, cache_view=cache)
