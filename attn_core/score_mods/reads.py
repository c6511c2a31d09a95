# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds functions of `custom` that read beyond their operands, at some pairs of a call.

JAX clamps or fills such reads without a word. Here they give one of two numbers, and where the
result depends on which, at a pair that is certainly visible, the function is refused. A read that
the function discards, as in jnp.where(key < n, x[key], 0), changes nothing and is allowed.
"""

import functools
from typing import Any, Callable, Sequence

import jax
from jax.extend.core import Jaxpr, JaxprEqn
import jax.numpy as jnp
import numpy as np

from attn_core import operations
from attn_core.masks import leaves as mask_leaves, mask as mask_lib, position_range
from attn_core.masks.materialize import Shape
from attn_core.score_mods import leaves
from attn_core.score_mods.score_mod import ScoreMod, chain
from attn_core.types import are_known

_FILLS = (1021.0, -613.0)
_PROBES = 7  # batch rows, heads, queries or keys of which the function is evaluated, at most


def check(mod: ScoreMod, mask: mask_lib.Mask, shape: Shape) -> None:
  """Checks the functions of a score mod at the corners of a call, and between them.

  Not checked are functions with operands of integers, which may be indices themselves, masks whose
  arrays decide what is visible, positions other than rows and columns, and reads in branches of
  `lax.cond`, in loops and at traced positions.

  Args:
    mod: as the user has it.
    mask: of the call.
    shape: (B, H, T, S).

  Raises:
    ValueError: a function reads beyond its operands.
  """
  moved = (mask_leaves.Offset, mask_leaves.Positions, mask_leaves.Placed)
  if not are_known(*shape) or any(isinstance(x, moved) for x in mask_lib.nodes(mask)):
    return
  for leaf in chain(mod):
    if not isinstance(leaf, leaves.Custom) or not leaf.operands:
      continue
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaf.operands)
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in shapes):
      found = _beyond(leaf.function, shapes, position_range.static_subset(mask), shape)
      if found:
        raise ValueError(f"custom: function={leaf.function!r} reads beyond its operands "
                         f"{[list(x.shape) for x in shapes]} {found}; expected indices within them "
                         "for every visible pair: clip them, or pass more rows")


@functools.lru_cache(maxsize=64)
def _beyond(function: Callable[..., jax.Array], operands: tuple[jax.ShapeDtypeStruct, ...],
            mask: mask_lib.Mask, shape: Shape) -> str | None:
  """Returns where a function reads beyond its operands; None: nowhere that is known."""
  batch, head, query, key = (np.unique(np.linspace(0, n - 1, _PROBES).astype(np.int32))
                             for n in shape)
  at = mask_lib.Coordinates(batch[:, None, None, None], head[:, None, None], query[:, None], key,
                            query[:, None], key)
  full = (batch.size, head.size, query.size, key.size)
  arrays = [np.full(x.shape, 0.37, np.float32) for x in operands]
  score = np.full((head.size, query.size, 1, key.size), 1.7, np.float32)
  where = [np.int32(0), *(x.reshape(s) for x, s in (
      (head, (-1, 1, 1, 1)), (query, (1, -1, 1, 1)), (key, (1, 1, 1, -1))))]
  with jax.ensure_compile_time_eval():
    seen = np.broadcast_to(np.asarray(mask.visible(at)), full)
    traced = jax.make_jaxpr(function)(score, *where, *arrays)
    if not _reads(traced.jaxpr):
      return None
    run = jax.jit(lambda row, fill: _evaluate(
        traced.jaxpr, traced.consts, [*map(jnp.asarray, (score, row, *where[1:], *arrays))],
        fill)[0])
    for b, row in enumerate(batch):
      first, second = (np.asarray(run(row, np.float32(fill)))[:, :, 0] for fill in _FILLS)
      found = np.argwhere((first != second) & ~(np.isnan(first) & np.isnan(second)) & seen[b])
      if found.size:
        h, q, k = found[0]
        return (f"at batch row {row}, head {head[h]}, query position {query[q]}, key position "
                f"{key[k]}")
  return None


def _reads(jaxpr: Any) -> bool:
  """Returns whether a function looks numbers up."""
  def of(equation: Any) -> bool:
    inner = operations.inner(equation)
    if inner is not None:
      return _reads(getattr(inner, "jaxpr", inner))
    return equation.primitive.name in ("gather", "dynamic_slice")
  return any(map(of, jaxpr.eqns))


def _evaluate(jaxpr: Jaxpr, consts: Sequence[jax.Array], arguments: Sequence[jax.Array],
              fill: jax.Array) -> list[jax.Array]:
  """Evaluates a function so that reads beyond an array of floats give `fill`."""
  def apply(equation: JaxprEqn, given: list[jax.Array]) -> list[jax.Array]:
    found = operations.bind(equation, given)
    inside = _is_inside(equation, given)
    if inside is not None and jnp.issubdtype(found[0].dtype, jnp.floating):
      found = [jnp.where(inside, found[0], fill.astype(found[0].dtype))]
    return found
  return operations.evaluate(jaxpr, consts, arguments, apply)


def _is_inside(equation: Any, given: list[Any]) -> jax.Array | None:
  """Returns which numbers of a look-up are within the array; None: of another operation."""
  name, parameters = equation.primitive.name, equation.params
  if name not in ("gather", "dynamic_slice"):
    return None
  if name == "gather":
    mode, fill = parameters["mode"], parameters["fill_value"]
    # What the function asks for; NaN is what `jnp.take` fills with by itself.
    if mode == jax.lax.GatherScatterMode.CLIP or (
        mode == jax.lax.GatherScatterMode.FILL_OR_DROP and fill is not None and fill == fill):
      return None
  most = [n - size for n, size in zip(given[0].shape, parameters["slice_sizes"])]
  if name == "dynamic_slice":
    starts = given[1:]
    return jnp.stack([(x >= 0) & (x <= m) for x, m in zip(starts, most)]).all()
  numbers = parameters["dimension_numbers"]
  limits = jnp.asarray([most[axis] for axis in numbers.start_index_map])
  inside = ((given[1] >= 0) & (given[1] <= limits)).all(-1)
  return jnp.expand_dims(inside, numbers.offset_dims)
