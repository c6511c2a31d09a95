# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of all orders of every kernel.

A kernel provides forward, backward and tangent (see `kernels.common.contract.Kernel`). Here they
become five primitives, related by

  jvp(forward)(x; dx)                   = tangent(x; dx)
  transpose of dx -> tangent            = c -> backward(x; c)
  jvp(backward)(x, c; dx, dc)           = backward_jvp(x, c; dx, dc) = H(x, c) dx + backward(x; dc)
  transpose of (dx, dc) -> backward_jvp = u -> (backward_jvp(x, c; u, 0), tangent(x; u))
  jvp(tangent)(x, t; dx, dt)            = tangent_jvp(x, t; dx, dt), linear in (dx, dt)
  transpose of (dx, dt) -> tangent_jvp  = c -> (backward_jvp(x, c; t, 0), backward(x; c)),

where H is the Hessian of <c, forward(x)>, which is symmetric: that is why transposes need no
kernels. So all first and second derivatives, in every mixture of forward and reverse mode, are
block-wise and linear in memory, and vmap folds the mapped axis into the batch. Third derivatives
are available in forward mode.

The residuals carry the checkpoint names `attn_output` and `attn_lse`. Where the output has 16 bits,
they include what was rounded off it (see `rounding`).
"""

from collections.abc import Set
import functools
from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from attn_core.array_axes import AnyMesh
from attn_core.autodiff import folding, partition_rules, rounding
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.sharding import partitioned, varying_axes
from attn_core.types import (AttentionSpec, BlockSizes, Operands, at_least_float32,
                             differentiable_names, operand, value_width, with_operands)


class _Call(NamedTuple):
  """Static parameters of every primitive."""

  kernel: Kernel
  spec: AttentionSpec
  block_sizes: BlockSizes
  structure: jax.tree_util.PyTreeDef  # of Operands
  names: tuple[str, ...]  # differentiable operands with a tangent or cotangent
  mesh: AnyMesh | None = None  # whose partitioner shards the call; None: runs on whole operands
  num_residuals: int = 2  # out and lse; 3: out, lse and the rest of out
  mapped: int = 0  # axes before the rows, of `vmap`, where a partitioner shards them by themselves


def attend(kernel: Kernel, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
           mesh: AnyMesh | None = None) -> Residuals:
  """Runs a kernel, differentiable in query, key, value, bias, sinks and arrays of the score mod.

  Args:
    kernel: forward, backward and tangent.
    operands: layout bthd; every array has a leading axis B or 1, except those that a custom mask
      predicate reads whole.
    spec: what to compute.
    block_sizes: sizes fixed by the caller.
    mesh: a mesh of Auto axes over which the compiler's partitioner shards batch and heads; None:
      the operands are those of one device.

  Returns:
    out [B, T, H, E] and lse [B, H, T].
  """
  kernel.check(operands, spec, block_sizes)
  leaves, structure = jax.tree.flatten(varying_axes.unify(operands))
  call = _Call(kernel, spec, block_sizes, structure, (), mesh)
  return Residuals(*_forward_p.bind(*leaves, call=call))


# --- Computations of the primitives, with flat lists of arrays as arguments and results. ---------


def _operands(leaves: Sequence[Any], call: _Call) -> Operands:
  return jax.tree.unflatten(call.structure, leaves)


def _split(args: Sequence[Any], call: _Call, *counts: int) -> list[Any]:
  """Returns the operands, then lists of arguments of the given lengths."""
  n = call.structure.num_leaves
  parts: list[Any] = [_operands(args[:n], call)]
  for count in counts:
    parts.append(list(args[n:n + count]))
    n += count
  return parts


def _forward(*args: jax.Array, call: _Call) -> Residuals:
  return call.kernel.forward(_operands(args, call), call.spec, call.block_sizes)


def _tangent(*args: jax.Array, call: _Call) -> Residuals:
  operands, residuals, tangents = _split(args, call, call.num_residuals, len(call.names))
  return call.kernel.tangent(operands, call.spec, call.block_sizes, rounding.join(*residuals),
                             dict(zip(call.names, tangents)))


def _backward(*args: jax.Array, call: _Call) -> tuple[jax.Array, ...]:
  operands, residuals, cotangents = _split(args, call, call.num_residuals, 2)
  return call.kernel.backward(operands, call.spec, call.block_sizes, rounding.join(*residuals),
                              Residuals(*cotangents), call.names)


def _backward_jvp(*args: jax.Array, call: _Call) -> tuple[jax.Array, ...]:
  """Computes the derivative of `backward` along tangents of operands and of cotangents."""
  operands, residuals, cotangents, tangents, d_cotangents = _split(
      args, call, call.num_residuals, 2, len(call.names), 2)
  kernel = call.kernel.differentiable or call.kernel
  residuals, d_residuals = _d_residuals(operands, residuals, tangents, call)
  def backward(values: list[jax.Array], residuals: list[jax.Array],
               cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
    varied = with_operands(operands, dict(zip(call.names, values)))
    return kernel.backward(varied, call.spec, call.block_sizes, Residuals(*residuals),
                           Residuals(*cotangents), call.names)
  primals = [operand(operands, name) for name in call.names]
  return jax.jvp(backward, (primals, residuals, cotangents),
                 (tangents, list(d_residuals), d_cotangents))[1]


def _d_residuals(operands: Operands, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array],
                 call: _Call) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns the residuals, joined, and their tangents along those of the operands."""
  joined = rounding.join(*residuals)
  kernel = call.kernel.differentiable or call.kernel
  spec = call.spec if len(residuals) == 2 else rounding.exact(call.spec)
  found = kernel.tangent(operands, spec, call.block_sizes, joined, dict(zip(call.names, tangents)))
  return list(joined), list(found)


def _tangent_jvp(*args: jax.Array, call: _Call) -> Residuals:
  """Computes the derivative of `tangent` along tangents of operands and of tangents."""
  operands, residuals, tangents, directions, d_tangents = _split(
      args, call, call.num_residuals, *[len(call.names)] * 3)
  kernel = call.kernel.differentiable or call.kernel
  residuals, d_residuals = _d_residuals(operands, residuals, directions, call)
  def tangent(values: list[jax.Array], residuals: list[jax.Array],
              tangents: list[jax.Array]) -> Residuals:
    varied = with_operands(operands, dict(zip(call.names, values)))
    return kernel.tangent(varied, call.spec, call.block_sizes, Residuals(*residuals),
                          dict(zip(call.names, tangents)))
  primals = [operand(operands, name) for name in call.names]
  return jax.jvp(tangent, (primals, residuals, tangents),
                 (directions, list(d_residuals), d_tangents))[1]


# --- Shapes. -------------------------------------------------------------------------------------


def _residual_avals(*avals: Any, call: _Call) -> list[Any]:
  operands = _operands(avals[:call.structure.num_leaves], call)
  query: Any = operands.query  # its type
  width = value_width(operands, call.spec)
  *batch, length, heads, _ = query.shape
  lse_dtype = at_least_float32(call.spec.softmax_dtype)
  dtype = call.spec.out_dtype or query.dtype
  rows = P(*query.sharding.spec[:1])  # an Explicit axis that vmap maps is a part of the rows
  return [varying_axes.like(query, (*batch, length, heads, width), dtype, rows),
          varying_axes.like(query, (*batch, heads, length), lse_dtype, rows)]


def _cotangent_avals(*avals: Any, call: _Call) -> list[Any]:
  operands = _operands(avals[:call.structure.num_leaves], call)
  named: list[Any] = [operand(operands, name) for name in call.names]
  return [varying_axes.like(operands.query, x.shape, x.dtype, x.sharding.spec) for x in named]


# --- Rules. --------------------------------------------------------------------------------------


def _forward_jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call) -> tuple:
  out, lse, *rest = _residuals(primals, call)
  names, moves = differentiable_names(_operands(primals, call)), _operands(tangents, call)
  given = {name: operand(moves, name) for name in names
           if type(operand(moves, name)) is not ad.Zero}
  if not given:
    return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
  call = call._replace(names=tuple(given), num_residuals=2 + len(rest))
  return [out, lse], _tangent_p.bind(*primals, out, lse, *rest, *given.values(), call=call)


def _residuals(primals: Sequence[Any], call: _Call) -> list[jax.Array]:
  """Returns out, lse and, where out has 16 bits, the rest of it.

  The derivative reads the named values, so that a remat policy can keep them.
  """
  dtype, rest = _operands(primals, call).query.dtype, list[jax.Array]()
  if call.spec.out_dtype is not None or dtype.itemsize > 2:
    out, lse = _forward_p.bind(*primals, call=call)
  else:
    exact, lse = _forward_p.bind(*primals, call=call._replace(spec=rounding.exact(call.spec)))
    out, *rest = rounding.split(exact, dtype)
  return [checkpoint_name(out, "attn_output"), checkpoint_name(lse, "attn_lse"),
          *(checkpoint_name(x, "attn_output") for x in rest)]


def _tangent_transpose_rule(cotangents: Sequence[Any], *args: Any, call: _Call) -> list:
  constants, linear = args[:-len(call.names)], args[-len(call.names):]
  found = _backward_p.bind(*constants, *map(ad.instantiate_zeros, cotangents), call=call)
  return [None] * len(constants) + [
      c if ad.is_undefined_primal(x) else None for c, x in zip(found, linear)]


def _differentiable(primals: Sequence[Any], tangents: Sequence[Any],
                    call: _Call) -> tuple[tuple[str, ...], list[Any]]:
  """Returns names and instantiated tangents of every differentiable operand."""
  operands, given = (_operands(x[:call.structure.num_leaves], call) for x in (primals, tangents))
  fixed = ("key", "value") if given.key_scale is not None else ()  # in 8 bits
  names = tuple(name for name in differentiable_names(operands) if name not in fixed)
  return names, [ad.instantiate_zeros(operand(given, name)) for name in names]


def _tangent_jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call) -> tuple:
  # As in `_backward_jvp_rule`, the residuals' tangents follow from those of the operands.
  names, directions = _differentiable(primals, tangents, call)
  count = len(call.names)
  first = dict(zip(call.names, primals[-count:]))
  second = dict(zip(call.names, map(ad.instantiate_zeros, tangents[-count:])))
  given, d_given = ([x.get(name, jnp.zeros_like(d)) for name, d in zip(names, directions)]
                    for x in (first, second))
  outs = _tangent_p.bind(*primals, call=call)
  return outs, _tangent_jvp_p.bind(*primals[:-count], *given, *directions, *d_given,
                            call=call._replace(names=names))


def _tangent_jvp_transpose_rule(cotangents: Sequence[Any], *args: Any, call: _Call) -> list:
  n, count = call.structure.num_leaves + call.num_residuals, len(call.names)
  constants, linear = args[:n + count], args[n + count:]
  cotangents = [ad.instantiate_zeros(c) for c in cotangents]
  zeros = [jnp.zeros(c.shape, c.dtype) for c in cotangents]
  operands, given = constants[:n], constants[n:]
  found = [*_backward_jvp_p.bind(*operands, *cotangents, *given, *zeros, call=call),
           *_backward_p.bind(*operands, *cotangents, call=call)]
  return [None] * len(constants) + [
      c if ad.is_undefined_primal(x) else None for c, x in zip(found, linear)]


def _backward_jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call) -> tuple:
  found = _backward_p.bind(*primals, call=call)
  # The residuals are functions of the operands: `_backward_jvp` computes their tangents. Operands
  # without a requested cotangent may have tangents too, so every differentiable one takes part.
  names, directions = _differentiable(primals, tangents, call)
  d_cotangents = [ad.instantiate_zeros(t) for t in tangents[-2:]]
  derivatives = _backward_jvp_p.bind(*primals, *directions, *d_cotangents,
                              call=call._replace(names=names))
  derivatives = dict(zip(names, derivatives))
  return found, [derivatives[name] for name in call.names]


def _backward_jvp_transpose_rule(cotangents: Sequence[Any], *args: Any, call: _Call) -> list:
  n = call.structure.num_leaves + call.num_residuals + 2
  constants, linear = args[:n], args[n:]
  directions = [ad.instantiate_zeros(c) for c in cotangents]
  zeros = [jnp.zeros(c.shape, c.dtype) for c in constants[-2:]]
  found = [*_backward_jvp_p.bind(*constants, *directions, *zeros, call=call),
           *_tangent_p.bind(*constants[:-2], *directions, call=call)]
  return [None] * len(constants) + [
      c if ad.is_undefined_primal(x) else None for c, x in zip(found, linear)]


def _jvp_by_jax(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], *,
                call: _Call) -> tuple:
  """Computes the jvp of a primitive by JAX: forward mode through the kernel's loops."""
  zeros = (jnp.zeros(p.shape, jax.dtypes.float0) if not jnp.issubdtype(p.dtype, jnp.inexact)
           else ad.instantiate_zeros(t) for p, t in zip(primals, tangents))
  return jax.jvp(functools.partial(primitive.impl, call=call), primals, tuple(zeros))


# --- vmap: the mapped axis joins the batch, on each device where a partitioner shards them. ------


def _batch(primitive: Primitive, labels_of: Callable[[_Call], list[str]], axis: Any,
           args: Sequence[Any], dims: Sequence[int | None], *,
           call: _Call) -> tuple[list, Sequence[int | None]]:
  if all(d is None for d in dims):
    outs = primitive.bind(*args, call=call)
    return outs, [None] * len(outs)
  size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
  labels = _labels(labels_of, call)
  if not size:  # kernels cannot compute an empty batch
    outs = folding.empty(functools.partial(primitive.bind, call=call), args, dims)
    return outs, [0] * len(outs)
  if any(label == "whole" and d is not None for label, d in zip(labels, dims, strict=True)):
    outs = folding.one_by_one(functools.partial(primitive.bind, call=call), args, dims, size)
    return outs, [0] * len(outs)

  mapped = call.mapped + 1
  without = [x.shape if d is None else (*x.shape[:d], *x.shape[d + 1:]) for x, d in zip(args, dims)]
  sizes = size, *without[0][:mapped]  # the first operand is always the query
  full = {"query", "lse", "key", "value", "key_scale", "value_scale", *call.names}
  args = [x if label == "whole" else folding.lead(x, d, sizes, label in full)
          for x, d, label in zip(args, dims, labels)]
  operands, rest = _split(args, call, len(args) - call.structure.num_leaves)
  if operands.mask.batch_index is None:
    # Dropout and predicates depend on the row's index within its own mapped element.
    index = jnp.broadcast_to(jnp.arange(sizes[-1], dtype=jnp.int32), sizes)
    operands = operands._replace(mask=operands.mask._replace(batch_index=index))
  leaves, structure = jax.tree.flatten(varying_axes.unify(operands))
  outer = call._replace(structure=structure, mapped=mapped if call.mesh is not None else 0)
  bind = functools.partial(primitive.bind, call=outer)
  outs = (bind(*leaves, *rest) if call.mesh is not None else
          folding.by_folding(bind, _labels(labels_of, outer), mapped, [*leaves, *rest]))
  if primitive in (_backward_p, _backward_jvp_p):
    shapes = [without[labels.index(name)][:mapped] for name in call.names]
    outs = [folding.summed(x, shape) for x, shape in zip(outs, shapes)]
  return outs, [0] * len(outs)


def _labels(labels_of: Callable[[_Call], list[str]], call: _Call) -> list[str]:
  return folding.operand_labels(call.structure, call.spec.mask) + labels_of(call)


# --- The primitives. -----------------------------------------------------------------------------


def _lower_sharded(ctx: Any, args: Sequence[Any], compute: Callable[..., list[jax.Array]],
                   labels: Sequence[str], results: Sequence[str], call: _Call) -> Any:
  """Lowers a primitive so that the compiler's partitioner shards it."""
  assert call.mesh is not None
  def local(*args: jax.Array) -> list[jax.Array]:
    *given, _, rows, heads = args
    def on_rows(*args: jax.Array) -> list[jax.Array]:
      operands, rest = _split(args, call, len(args) - call.structure.num_leaves)
      leaves, structure = jax.tree.flatten(partition_rules.with_numbers(operands, rows, heads))
      return compute(*leaves, *rest, call=call._replace(structure=structure, mapped=0))
    return folding.by_folding(on_rows, _labels(lambda _: list(labels), call), call.mapped, given)
  operands = _operands(ctx.avals_in[:call.structure.num_leaves], call)
  signature = partition_rules.signature_of(operands, call.spec.mask, labels, results, call.mapped)
  return partition_rules.lower(ctx, args, local, signature, (call.kernel.name, *call[1:]),
                               call.mesh)


def _primitive(name: str, compute: Callable, avals: Callable, labels_of: Callable[[_Call], list],
               effects: Callable[[_Call], Set] = lambda call: frozenset()) -> Primitive:
  """Returns a primitive that runs `compute`; `labels_of` labels the arguments after operands."""
  results_of = lambda call: _OUT_LSE if avals is _residual_avals else call.names
  compute = functools.wraps(compute)(functools.partial(_as_list, compute, labels_of))
  primitive = Primitive(name)
  primitive.multiple_results = True
  primitive.def_impl(jax.jit(compute, static_argnames="call"))
  primitive.def_effectful_abstract_eval(
      lambda *args, call: (avals(*args, call=call), effects(call)))
  batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, labels_of)

  def lower(ctx: Any, *args: Any, call: _Call) -> Any:
    # The computation of one device does not depend on how values vary over a mesh.
    inner = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
    if call.mesh is not None and partitioned.is_sharded(ctx) and not effects(call):
      return _lower_sharded(inner, args, compute, labels_of(call), results_of(call), call)
    results = folding.lower(ctx, inner, functools.partial(compute, call=call), args)
    if effects(call):
      ctx.set_tokens_out(inner.tokens_out)
    return results

  mlir.register_lowering(primitive, lower)
  return primitive


def _as_list(compute: Callable, labels_of: Callable[[_Call], list[str]], *args: jax.Array,
             call: _Call) -> list[jax.Array]:
  run = functools.partial(compute, call=call._replace(mapped=0))
  return folding.by_folding(run, _labels(labels_of, call), call.mapped, args) if call.mapped else [
      *run(*args)]


_OUT_LSE = ["query", "lse"]


def _residual_labels(call: _Call) -> list[str]:
  return ["query", "lse", "query"][:call.num_residuals]


_forward_p = _primitive("attention_forward", _forward, _residual_avals, lambda call: [],
                        lambda call: call.kernel.effects())
_tangent_p = _primitive("attention_tangent", _tangent, _residual_avals,
                        lambda call: _residual_labels(call) + list(call.names))
_backward_p = _primitive("attention_backward", _backward, _cotangent_avals,
                         lambda call: _residual_labels(call) + _OUT_LSE,
                         lambda call: call.kernel.effects())
_backward_jvp_p = _primitive("attention_backward_jvp", _backward_jvp, _cotangent_avals,
                             lambda call: (_residual_labels(call) + _OUT_LSE + list(call.names)
                                           + _OUT_LSE))
_tangent_jvp_p = _primitive("attention_tangent_jvp", _tangent_jvp, _residual_avals,
                            lambda call: _residual_labels(call) + list(call.names) * 3)

ad.primitive_jvps[_forward_p] = _forward_jvp_rule
ad.primitive_jvps[_tangent_p] = _tangent_jvp_rule
ad.primitive_jvps[_backward_p] = _backward_jvp_rule
ad.primitive_jvps[_backward_jvp_p] = functools.partial(_jvp_by_jax, _backward_jvp_p)
ad.primitive_jvps[_tangent_jvp_p] = functools.partial(_jvp_by_jax, _tangent_jvp_p)
ad.primitive_transposes[_tangent_p] = _tangent_transpose_rule
ad.primitive_transposes[_backward_jvp_p] = _backward_jvp_transpose_rule
ad.primitive_transposes[_tangent_jvp_p] = _tangent_jvp_transpose_rule
