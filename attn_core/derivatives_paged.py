"""The derivative of attention over pages: reverse mode, once, in memory linear in the pages.

Letters: as in `kernels.xla.paged`.
"""

import functools
from typing import Callable

import jax

from attn_core.caches import pages
from attn_core.kernels.kernel import Residuals
from attn_core.kernels.xla import paged, paged_backward
from attn_core.sharding import vary
from attn_core.types import BlockSizes, PagedSpec


def attend(forward: Callable, operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
           block_sizes: BlockSizes) -> Residuals:
  """Attention over pages, differentiable in the query, the pages and the sinks.

  Args:
    forward: `xla.paged.forward`, or a kernel with its arguments and results.
    operands: query [T, H, D], pages, metadata, sinks.
    spec: what to compute.
    heads: the heads in the pages, without their padding.
    block_sizes: how fast.

  Returns:
    out [T, H, E] and lse [T, H, 1].

  Raises:
    NotImplementedError: quantised pages, where differentiated.
  """
  return _attend(forward, vary.vary_alike(operands), spec, heads, block_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4))
def _attend(forward, operands, spec, heads, block_sizes):
  return forward(operands, spec, heads, block_sizes)


def _forward(forward, operands, spec, heads, block_sizes):
  if operands.cache.key_scales is not None:
    raise NotImplementedError(
        f"cache_view: gradients through pages quantised to {pages.dtype_of(operands.cache).name} "
        "are not supported: rounding has none. Read them with caches.pages.to_dense, or keep "
        "pages of a floating-point dtype without scales")
  residuals = forward(operands, spec, heads, block_sizes)
  return residuals, (operands, residuals)


def _backward(_, spec, heads, block_sizes, saved, cotangents):
  operands, residuals = saved
  found = paged_backward.backward(operands, spec, heads, block_sizes, residuals, cotangents)
  return (operands._replace(query=found.query, cache=found.cache, sinks=found.sinks,
                            metadata=None),)


_attend.defvjp(_forward, _backward)
