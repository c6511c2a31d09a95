# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of attention over pages, in linear memory.

  jvp(forward)(x; dx)            = tangent(x; dx)
  transpose of dx -> tangent     = c -> backward(x; c)

Forward mode may be applied any number of times; reverse mode once, and before forward mode: a
Hessian is forward over reverse. The residuals carry the checkpoint names `attn_output` and
`attn_lse`; where the output has 16 bits, they include what was rounded off it (see `rounding`).
"""

import functools
from typing import Any, NamedTuple, Protocol, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from attn_core.autodiff import rounding
from attn_core.caches import quantize
from attn_core.caches.paged import layouts, ops, slot_mapping
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import paged_backward, paged_tangent
from attn_core.sharding import varying_axes
from attn_core.types import (BlockSizes, PagedOperands, PagedSpec, differentiable_mods, is_mod,
                             operand)

DIFFERENTIABLE = ("query", "cache", "sinks")  # and arrays of the score mod, see `types.operand`


class PagedForwardFn(Protocol):
  """Computes out [T, H, E] and lse [T, H, 1]; see `kernels.xla.paged_forward.forward`."""

  def __call__(self, operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
               block_sizes: BlockSizes) -> Residuals:
    ...


class _Call(NamedTuple):
  """Static parameters of an attention."""

  forward: PagedForwardFn
  spec: PagedSpec
  heads: layouts.Heads
  block_sizes: BlockSizes
  structure: jax.tree_util.PyTreeDef  # of PagedOperands
  names: tuple[str, ...] = ()  # of operands that have a tangent
  num_residuals: int = 2  # out and lse; 3: out, lse and the rest of out, see `rounding`


def attend(forward: PagedForwardFn, operands: PagedOperands, spec: PagedSpec,
           heads: layouts.Heads, block_sizes: BlockSizes) -> Residuals:
  """Computes attention over pages, differentiable in its operands.

  Args:
    forward: `xla.paged_forward.forward`, or a kernel with its arguments and results.
    operands: query [T, H, D], pages, metadata, sinks, arrays of the score mod.
    spec: what to compute.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.

  Returns:
    out [T, H, E] and lse [T, H, 1].

  Raises:
    NotImplementedError: quantized pages are differentiated.
  """
  if operands.cache.key_scales is not None:
    operands = operands._replace(cache=quantize.constant(operands.cache, "cache_view"))
  leaves, structure = jax.tree.flatten(varying_axes.unify(operands))
  return _attend(_Call(forward, spec, heads, block_sizes, structure), leaves)


class WritingForwardFn(Protocol):
  """Writes new tokens to the pages, and computes attention over them; returns also the cache."""

  def __call__(self, operands: PagedOperands, spec: PagedSpec, heads: layouts.Heads,
               block_sizes: BlockSizes) -> tuple[Residuals, layouts.Pages]:
    ...


class _WritingCall(NamedTuple):
  """Static parameters of an attention that writes new tokens."""

  forward: WritingForwardFn
  call: _Call


def attend_writing(forward: WritingForwardFn, reading: PagedForwardFn, operands: PagedOperands,
                   spec: PagedSpec, heads: layouts.Heads,
                   block_sizes: BlockSizes) -> tuple[Residuals, layouts.Pages]:
  """Writes new tokens to the pages, and computes attention over them.

  Args:
    forward: does both; where a derivative is taken, `ops.append_tokens` and `reading` do.
    reading: as in `attend`.
    operands: query, key and value [T, ...], pages and metadata of one group, sinks.
    spec: what to compute.
    heads: the heads in the pages, without their padding.
    block_sizes: sizes fixed by the caller.

  Returns:
    (out [T, H, E] and lse [T, H, 1], the cache with the new tokens).

  Raises:
    NotImplementedError: quantized pages, or what is written to them, are differentiated.
  """
  leaves, structure = jax.tree.flatten(varying_axes.unify(operands))
  return _attend_writing(
      _WritingCall(forward, _Call(reading, spec, heads, block_sizes, structure)), leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend_writing(writing: _WritingCall,
                    leaves: list[jax.Array]) -> tuple[Residuals, layouts.Pages]:
  call = writing.call
  return writing.forward(_operands(leaves, call), call.spec, call.heads, call.block_sizes)


@functools.partial(_attend_writing.defjvp, symbolic_zeros=True)
def _attend_writing_jvp(writing: _WritingCall, primals: tuple, tangents: tuple) -> tuple:
  """Differentiates the two steps one by one, in what has a tangent."""
  call, leaves, given = writing.call, primals[0], tangents[0]
  numbers = [n for n, x in enumerate(given) if not _is_zero(x)]

  def separately(*varying: jax.Array) -> tuple[Residuals, layouts.Pages]:
    some = dict(zip(numbers, varying))
    operands = _operands([some.get(n, x) for n, x in enumerate(leaves)], call)
    assert operands.key is not None and operands.value is not None
    cache = ops.append_tokens(operands.cache, operands.key, operands.value, slot_mapping.slots(
        operands.metadata, layouts.page_size(operands.cache), operands.query.shape[0]))
    return attend(call.forward, operands._replace(cache=cache, key=None, value=None), call.spec,
                  call.heads, call.block_sizes), cache

  return jax.jvp(separately, [leaves[n] for n in numbers], [given[n] for n in numbers])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: _Call, leaves: list[jax.Array]) -> Residuals:
  return call.forward(_operands(leaves, call), call.spec, call.heads, call.block_sizes)


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(call: _Call, primals: tuple, tangents: tuple) -> tuple[Residuals, Residuals]:
  leaves, given = primals[0], _operands(tangents[0], call)
  # The derivative reads the named values, so that a remat policy can keep them.
  dtype, rest = _operands(leaves, call).query.dtype, list[jax.Array]()
  sums = jnp.dtype(call.spec.softmax_dtype)
  if call.spec.out_dtype is None and dtype.itemsize <= 2 < sums.itemsize:
    exact, lse = _attend(call._replace(spec=rounding.exact(call.spec)), leaves)
    out, *rest = rounding.split(exact, dtype)
  else:
    out, lse = _attend(call, leaves)
  residuals = Residuals(checkpoint_name(out, "attn_output"), checkpoint_name(lse, "attn_lse"))
  rest = [checkpoint_name(x, "attn_output") for x in rest]
  every = (*DIFFERENTIABLE, *differentiable_mods(_operands(leaves, call)))
  names = tuple(name for name in every if not all(map(_is_zero, jax.tree.leaves(
      operand(given, name), is_leaf=_is_zero))))
  if not names:
    return residuals, jax.tree.map(jnp.zeros_like, residuals)
  linear = [jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x for name in names
            for x in jax.tree.leaves(operand(given, name), is_leaf=_is_zero)]
  linear = varying_axes.unify((leaves[0], linear))[1]
  call = call._replace(names=names, num_residuals=2 + len(rest))
  return residuals, Residuals(*_tangent_p.bind(*leaves, *residuals, *rest, *linear, call=call))


def _is_zero(x: Any) -> bool:
  """Returns whether a tangent is a symbolic zero."""
  return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _operands(leaves: Sequence[Any], call: _Call) -> PagedOperands:
  return jax.tree.unflatten(call.structure, leaves)


def _split(args: Sequence[Any],
           call: _Call) -> tuple[PagedOperands, Residuals, Sequence[Any]]:
  """Returns operands, residuals with the digits that the output had, and tangents."""
  count, end = call.structure.num_leaves, call.structure.num_leaves + call.num_residuals
  return _operands(args[:count], call), rounding.join(*args[count:end]), args[end:]


def _tangent(*args: jax.Array, call: _Call) -> list[jax.Array]:
  operands, residuals, linear = _split(args, call)
  tangents, mods, linear = dict[str, Any](), dict[str, jax.Array](), list(linear)
  for name in call.names:
    leaves, structure = jax.tree.flatten(operand(operands, name))
    of_kind = mods if is_mod(name) else tangents
    of_kind[name] = jax.tree.unflatten(structure, linear[:len(leaves)])
    linear = linear[len(leaves):]
  d_out, d_lse = paged_tangent.tangent(operands, call.spec, call.heads, call.block_sizes, residuals,
                                       paged_tangent.Tangents(**tangents, mods=mods))
  return [d_out.astype(args[call.structure.num_leaves].dtype), d_lse]


def _transpose(cotangents: Sequence[Any], *args: Any, call: _Call) -> list:
  operands, residuals, linear = _split(args, call)
  found = paged_backward.backward(operands, call.spec, call.heads, call.block_sizes, residuals,
                                  Residuals(*map(ad.instantiate_zeros, cotangents)), call.names)
  leaves = [x for name in call.names for x in jax.tree.leaves(
      found.mods[name] if is_mod(name) else getattr(found, name))]
  return [None] * (len(args) - len(linear)) + [
      c if ad.is_undefined_primal(x) else None for c, x in zip(leaves, linear, strict=True)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call) -> tuple:
  """Computes the jvp by JAX, through the loops."""
  zeros = (jnp.zeros(p.shape, jax.dtypes.float0) if not jnp.issubdtype(p.dtype, jnp.inexact)
           else ad.instantiate_zeros(t) for p, t in zip(primals, tangents))
  return jax.jvp(functools.partial(_tangent, call=call), primals, tuple(zeros))


def _batch(args: Sequence[Any], dims: Sequence[int | None], *,
           call: _Call) -> tuple[list, list[int]]:
  """Maps sequentially: a vectorized loop over requests would run as long as the longest one."""
  size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
  leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
  found = jax.lax.map(lambda i: _tangent_p.bind(
      *(x if d is None else x[i] for x, d in zip(leading, dims)), call=call), jnp.arange(size))
  return found, [0] * len(found)


def _lower(ctx: Any, *args: Any, call: _Call) -> Any:
  # The computation of one device does not depend on how values vary over a mesh.
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
