# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Folds an axis that `vmap` maps into the rows of the batch, and back."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def fold(x: jax.Array, dim: int | None, shape: tuple[int, int], full: bool,
         rows_first: bool) -> jax.Array:
  """Folds a mapped axis into the leading axis.

  Args:
    x: its leading axis has as many entries as there are rows, or 1.
    dim: the mapped axis; None: the array is shared.
    shape: (size of the mapped axis, rows).
    full: whether a shared array with 1 row must not keep it. Every other array gets all rows.
    rows_first: whether the rows are the slower part of the folded axis.
  """
  if dim is None and x.shape[0] == 1 and not full:
    return x
  x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
  x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
  return (x.swapaxes(0, 1) if rows_first else x).reshape(-1, *x.shape[2:])


def unfold(x: jax.Array, shape: tuple[int, int], rows_first: bool) -> jax.Array:
  """Returns an array with the mapped axis first, from one that `fold` gives."""
  size, rows = shape
  if rows_first:
    return x.reshape(rows, size, *x.shape[1:]).swapaxes(0, 1)
  return x.reshape(size, rows, *x.shape[1:])


def rows_of(args: Sequence[jax.Array], dims: Sequence[int | None], labels: Sequence[str],
            name: str) -> int:
  """Returns the rows of the argument of this label, not counting the mapped axis."""
  x, dim = next((x, d) for x, d, label in zip(args, dims, labels) if label == name)
  return x.shape[1 if dim == 0 else 0]
