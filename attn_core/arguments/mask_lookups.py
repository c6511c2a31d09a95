# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Look-ups of custom predicates of masks, done once before the kernels, which look nothing up."""

import dataclasses
import functools
from typing import Any, Callable

import jax
from jax.extend.core import ClosedJaxpr
import jax.numpy as jnp

from attn_core import operations
from attn_core.masks import leaves, looked_up, mask as mask_lib, materialize
from attn_core.masks.mask import Coordinates, Mask
from attn_core.score_mods import lookups
from attn_core.types import MaskOperands

_SIDES = None, "query", "key", "head"  # see `lookups.side_of`; the fields of `LookedUp`


def before(mask: Mask, shape: materialize.Shape) -> Mask:
  """Returns a mask whose custom predicates get the results of their look-ups.

  What a predicate computes from its operands or arrays that it captures, the batch row, the head
  and at most one of the two positions, such as both sides of `ids[row, query] == ids[row, key]`, is
  an array with a number for each row, head, query or key. A predicate that also looks numbers up by
  both positions is left as it is.

  Args:
    mask: any mask.
    shape: (B, H, T, S) of the call.
  """
  if 0 in shape or not reads_arrays(mask):
    return mask
  arrays, structure = jax.tree.flatten(mask)
  numbers = MaskOperands(tuple(map(jnp.asarray, arrays)))
  return _before(mask, *materialize.expand(structure, numbers, shape), shape)


def reads_arrays(mask: Mask) -> bool:
  """Returns whether a predicate in a mask has operands, or captures arrays."""
  return any(isinstance(x, leaves.Custom) and _is_given_arrays(x) for x in mask_lib.nodes(mask))


def _is_given_arrays(mask: leaves.Custom) -> bool:
  return bool(mask.operands) or _captures_arrays(mask.predicate)


@functools.lru_cache(maxsize=64)  # a predicate is traced, and every call asks
def _captures_arrays(predicate: Callable[..., Any]) -> bool:
  at = [jax.ShapeDtypeStruct((1,) * 4, jnp.int32)] * 4
  return _holds_arrays(jax.make_jaxpr(lambda *at: jnp.asarray(predicate(*at)))(*at))


def _holds_arrays(traced: ClosedJaxpr) -> bool:
  inner = [operations.inner(x) for x in traced.jaxpr.eqns]
  return any(jnp.ndim(x) > 0 for x in traced.consts) or any(
      isinstance(x, ClosedJaxpr) and _holds_arrays(x) for x in inner)


def _before(mask: Mask, expanded: Mask, at: Coordinates, shape: materialize.Shape) -> Mask:
  """Returns a part of a mask, its predicates without their look-ups.

  Args:
    mask: the part.
    expanded: the same with arrays [B or 1, H or 1, T or 1, S or 1].
    at: the coordinates of all pairs at which it is evaluated.
    shape: (B, H, T, S) of the call.
  """
  if isinstance(mask, leaves.Custom) and isinstance(expanded, leaves.Custom):
    return _predicate_before(mask, tuple(map(jnp.asarray, expanded.operands)), at, shape)
  if isinstance(expanded, (leaves.Positions, leaves.Offset, leaves.Placed)):
    at = expanded.move(at)
  names = [name for name, role in mask.roles.items() if role is None]
  return mask_lib.with_children(mask, [
      _before(getattr(mask, name), getattr(expanded, name), at, shape)
      for name in names]) if names else mask


def _predicate_before(mask: leaves.Custom, operands: tuple[jax.Array, ...], at: Coordinates,
                      shape: materialize.Shape) -> Mask:
  if not _is_given_arrays(mask):
    return mask
  plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # on one device
  jax.eval_shape(lambda at, x: leaves.Custom(mask.predicate, x).visible(Coordinates(*at)),
                 *jax.tree.map(plain, (tuple(at[:-1]), operands)))  # checks what it returns
  found = lookups.of_predicate(_Predicate(mask.predicate), operands, shape,
                               (at.query_position, at.key_position))
  if found is None:
    return mask
  rest, numbers = found
  sides = [lookups.side_of(x) for x in rest.depends]
  axes = {None: (0,), "query": (0, 2), "key": (0, 3), "head": (0, 1, 2, 3)}
  of = lambda side: tuple(x.reshape([x.shape[n] for n in axes[side]])
                          for x, y in zip(numbers, sides) if y == side)
  return looked_up.LookedUp(_Rest(rest, tuple(sides)), *map(of, _SIDES))


@dataclasses.dataclass(frozen=True)
class _Predicate:
  """A predicate as a function of scores, which it ignores."""

  predicate: Callable[..., Any]

  def __call__(self, score: jax.Array, *arguments: Any) -> jax.Array:
    del score
    return jnp.asarray(self.predicate(*arguments))


@dataclasses.dataclass(frozen=True)
class _Rest:
  """The predicate of `looked_up.LookedUp`."""

  rest: lookups.Rest
  sides: tuple[str | None, ...]  # of each number: one of _SIDES

  def __str__(self) -> str:
    return str(self.rest)

  def __call__(self, row: Any, head: Any, query: Any, key: Any, *numbers: tuple) -> jax.Array:
    left = {side: list(x) for side, x in zip(_SIDES, numbers, strict=True)}
    shape = jnp.broadcast_shapes(*map(jnp.shape, (row, head, query, key)))
    return self.rest(jax.ShapeDtypeStruct(shape, jnp.int32), row, head, query, key,
                     *(left[side].pop(0) for side in self.sides))
