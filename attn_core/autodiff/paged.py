"""The derivatives of attention over pages: forward and reverse mode, once, in linear memory.

  jvp(forward)(x; dx)            = tangent(x; dx)
  transpose of dx -> tangent     = c -> backward(x; c)

Forward mode may be taken of all that, any number of times; reverse mode once, of what forward mode
has not been taken of: a Hessian is forward over reverse. The residuals carry the checkpoint names
`attn_output` and `attn_lse`.

Letters: as in `kernels.xla.paged`.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from attn_core.caches.paged import ops as pages
from attn_core.caches import quantize
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import paged_blocks as paged, paged_backward, paged_tangent
from attn_core.sharding import varying_axes as vary
from attn_core.types import BlockSizes, PagedSpec

MOVABLE = ("query", "cache", "sinks")


class _Call(NamedTuple):
  """The static side of an attention."""

  forward: Callable
  spec: PagedSpec
  heads: pages.Heads
  block_sizes: BlockSizes
  structure: Any  # tree structure of PagedOperands
  names: tuple[str, ...] = ()  # of MOVABLE: those with a tangent


def attend(forward: Callable, operands: paged.PagedOperands, spec: PagedSpec, heads: pages.Heads,
           block_sizes: BlockSizes) -> Residuals:
  """Attention over pages, differentiable in the query, the pages and the sinks.

  Args:
    forward: `xla.paged_forward.forward`, or a kernel with its arguments and results.
    operands: query [T, H, D], pages, metadata, sinks.
    spec: what to compute.
    heads: the heads in the pages, without their padding.
    block_sizes: how fast.

  Returns:
    out [T, H, E] and lse [T, H, 1].

  Raises:
    NotImplementedError: quantised pages that are differentiated themselves.
  """
  if operands.cache.key_scales is not None:
    operands = operands._replace(cache=quantize.constant(operands.cache, "cache_view"))
  leaves, structure = jax.tree.flatten(vary.vary_alike(operands))
  return _attend(_Call(forward, spec, heads, block_sizes, structure), leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: _Call, leaves) -> Residuals:
  return call.forward(_operands(leaves, call), call.spec, call.heads, call.block_sizes)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(call: _Call, primals, tangents):
  leaves, moved = primals[0], _operands(tangents[0], call)
  # The derivative reads the named values, so that a remat policy can keep them.
  out, lse = _attend(call, leaves)
  residuals = Residuals(checkpoint_name(out, "attn_output"), checkpoint_name(lse, "attn_lse"))
  names = tuple(name for name in MOVABLE if any(map(_moves, jax.tree.leaves(
      getattr(moved, name), is_leaf=_is_zero))))
  if not names:
    return residuals, jax.tree.map(jnp.zeros_like, residuals)
  linear = [jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x for name in names
            for x in jax.tree.leaves(getattr(moved, name), is_leaf=_is_zero)]
  linear = vary.vary_alike((leaves[0], linear))[1]
  call = call._replace(names=names)
  return residuals, Residuals(*_tangent_p.bind(*leaves, *residuals, *linear, call=call))


def _is_zero(x) -> bool:
  return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _moves(x) -> bool:
  return not _is_zero(x)


def _operands(leaves, call: _Call) -> paged.PagedOperands:
  return jax.tree.unflatten(call.structure, leaves)


def _split(args, call: _Call):
  """(operands, residuals, the tangents)."""
  count = call.structure.num_leaves
  return (_operands(args[:count], call), Residuals(*args[count:count + 2]), args[count + 2:])


def _tangent(*args, call: _Call) -> list:
  operands, residuals, linear = _split(args, call)
  moved, linear = {}, list(linear)
  for name in call.names:
    leaves, structure = jax.tree.flatten(getattr(operands, name))
    moved[name] = jax.tree.unflatten(structure, linear[:len(leaves)])
    linear = linear[len(leaves):]
  return list(paged_tangent.tangent(operands, call.spec, call.heads, call.block_sizes, residuals,
                                    paged_tangent.Moved(**moved)))


def _transpose(cotangents, *args, call: _Call):
  operands, residuals, linear = _split(args, call)
  found = paged_backward.backward(operands, call.spec, call.heads, call.block_sizes, residuals,
                                  Residuals(*map(ad.instantiate_zeros, cotangents)))
  found = [x for name in call.names for x in jax.tree.leaves(getattr(found, name))]
  return [None] * (len(args) - len(linear)) + [
      c if ad.is_undefined_primal(x) else None for c, x in zip(found, linear, strict=True)]


def _jvp(primals, tangents, *, call: _Call):
  """By jax, through the loops."""
  zeros = (jnp.zeros(p.shape, jax.dtypes.float0) if not jnp.issubdtype(p.dtype, jnp.inexact)
           else ad.instantiate_zeros(t) for p, t in zip(primals, tangents))
  return jax.jvp(functools.partial(_tangent, call=call), primals, tuple(zeros))


def _batch(args, dims, *, call: _Call):
  """One after the other: a loop over requests that is mapped would run for the longest of all."""
  size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
  moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
  found = jax.lax.map(lambda i: _tangent_p.bind(
      *(x if d is None else x[i] for x, d in zip(moved, dims)), call=call), jnp.arange(size))
  return found, [0] * len(found)


def _lower(ctx, *args, call: _Call):
  # One device's work: how values vary over a mesh plays no part inside.
  inner = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
  return mlir.lower_fun(functools.partial(_tangent, call=call))(inner, *args)


_tangent_p = Primitive("paged_attention_tangent")
_tangent_p.multiple_results = True
_tangent_p.def_impl(jax.jit(_tangent, static_argnames="call"))
_tangent_p.def_abstract_eval(lambda *avals, call: avals[call.structure.num_leaves:][:2])
ad.primitive_jvps[_tangent_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batch
mlir.register_lowering(_tangent_p, _lower)
