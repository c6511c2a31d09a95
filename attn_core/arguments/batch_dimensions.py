# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folds no or several leading batch dimensions of a call into one, and unfolds its results.

Rows are numbered in row-major order: row i * n + j of the folded batch is [i, j] of [m, n].
"""

from typing import TypeVar, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.array_axes import AnyMesh, parts_of
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches.dense import DenseCache
from attn_core.caches.latent import LatentCache
from attn_core.caches.window import WindowCache
from attn_core.masks.info import MaskInfo
from attn_core.types import AttentionOutput

Shape = tuple[int, ...]
Given = TypeVar("Given")  # an array, or whatever else the caller gave

# Dimensions of a query, key or value after those of the batch, and of arrays with rows.
_OPERAND, _LOGITS, _TOKENS = 3, 3, 1


def fold(a: AttentionArguments) -> tuple[AttentionArguments, "Batch | None"]:
  """Returns the arguments with one batch dimension, and the batch as it was; None: it was one.

  Raises:
    ValueError: the batch dimensions of an array are not those of the query.
  """
  query = a.query
  if (not isinstance(query, (jax.Array, np.ndarray)) or a.layout not in ("bthd", "bhtd")
      or query.ndim < _OPERAND or query.ndim == _OPERAND + 1
      or not isinstance(a.cache_view, (DenseCache, WindowCache, LatentCache, type(None)))):
    return a, None
  batch = Batch(query)
  info, init_bias = a.mask_info, a.init_bias
  if isinstance(info, MaskInfo):
    info = MaskInfo(batch.fold_rows("mask_info.attention_mask", info.attention_mask, _LOGITS), *(
        batch.fold_rows(f"mask_info.{name}", getattr(info, name), _TOKENS)
        for name in MaskInfo._fields[1:]))
  if callable(init_bias):
    made = batch.fold_rows("what init_bias returned", init_bias(), _LOGITS)
    init_bias = lambda: made
  offset = a.query_offset
  offset = np.asarray(offset) if isinstance(offset, (list, tuple)) else offset
  return a._replace(
      query=batch.merge(query), key=batch.fold_operand("key", a.key),
      value=batch.fold_operand("value", a.value), mask=batch.fold_rows("mask", a.mask, _LOGITS),
      mask_info=info, bias=batch.fold_rows("bias", a.bias, _LOGITS), init_bias=init_bias,
      query_offset=batch.fold_rows("query_offset", offset, 0)), batch


class Batch:
  """The batch dimensions of a query, none or several."""

  def __init__(self, query: checks.Array):
    self.query = checks.describe(query)
    self.shape: Shape = query.shape[:-_OPERAND]
    self.size = int(np.prod(self.shape))
    # Partitions of these dimensions over Explicit axes; None: the compiler decides.
    parts = parts_of(query)
    self.partitions = None if parts is None else parts.spec[:len(self.shape)]

  def fold_operand(self, name: str, x: Given) -> Given:
    """Returns a key or value with one batch dimension; what is not an array is left as it is.

    Raises:
      ValueError: its batch dimensions are not the query's.
    """
    if not isinstance(x, (jax.Array, np.ndarray)):
      return x
    checks.require(x.shape[:-_OPERAND] == self.shape and x.ndim == len(self.shape) + _OPERAND,
                   name, checks.describe(x),
                   f"the batch dimensions {list(self.shape)} of the query {self.query}, and three "
                   "more: [B, T, H, D] in layout bthd, [B, H, T, D] in layout bhtd, with any "
                   "dimensions for B")
    return cast(Given, self.merge(x))

  def fold_rows(self, name: str, x: Given, rest: int) -> Given:
    """Returns an array with one batch dimension, which is 1 where all of its own are.

    A mask value, and what is not an array, is left as it is: a mask value counts folded rows.

    Args:
      name: of the argument, for errors.
      x: [*batch, ...], each dimension of the batch may be 1, or [1, ...].
      rest: number of dimensions after those of the batch.

    Raises:
      ValueError: dimensions of the batch are neither 1 nor the query's.
    """
    if not isinstance(x, (jax.Array, np.ndarray)) or not rest and x.ndim == 0:
      return x
    if x.ndim == rest + 1 and x.shape[0] == 1:
      return x
    rank = len(self.shape)
    lead, own = x.shape[:-rest] if rest else x.shape, x.shape[x.ndim - rest:]
    checks.require(x.ndim == rank + rest
                   and all(n in (1, full) for n, full in zip(lead, self.shape)),
                   name, checks.describe(x),
                   f"the batch dimensions {list(self.shape)} of the query {self.query}, any of "
                   f"which may be 1, and {rest} more")
    if all(n == 1 for n in lead):
      return cast(Given, x.reshape(1, *own))
    if lead != self.shape:
      xp = np if isinstance(x, np.ndarray) else jnp
      return cast(Given, self.merge(xp.broadcast_to(x, self.shape + own)))
    return cast(Given, self.merge(x))

  def merge(self, x: checks.Array) -> checks.Array:
    """Returns [*batch, ...] as [B, ...]."""
    rank = len(self.shape)
    shape = self.size, *x.shape[rank:]
    parts = parts_of(x)
    if parts is None:
      return x.reshape(shape)
    merged = sum(map(parts.axes, range(rank)), ())
    return _reshape(x, shape, parts.mesh, (merged or None, *parts.spec[rank:]))

  def unfold(self, output: AttentionOutput) -> AttentionOutput:
    """Returns the results with the query's batch dimensions; a cache keeps its rows."""
    split = lambda x: None if x is None else self._split(x)
    return output._replace(
        attention_outputs=self._split(output.attention_outputs),
        attention_weights=split(output.attention_weights), lse=split(output.lse))

  def _split(self, x: jax.Array) -> jax.Array:
    """Returns [B, ...] as [*batch, ...]."""
    shape = *self.shape, *x.shape[1:]
    parts = parts_of(x)
    if parts is None or self.partitions is None:
      return x.reshape(shape)
    return _reshape(x, shape, parts.mesh, (*self.partitions, *parts.spec[1:]))


def _reshape(x: checks.Array, shape: Shape, mesh: AnyMesh, partitions: tuple) -> jax.Array:
  """Reshapes an array whose type names its sharding."""
  return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*partitions)))
