# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy for non-finite numbers, and the operations that implement it.

A query that attends to a key that is not finite, or whose value is not, gets NaN in its output and
lse; a query that does not attend to it is unaffected, in its results and in its derivatives. A
query that is not finite gets NaN if it attends to any key: `infinite_to_nan` sees to it, since
logits of -inf would count as hidden, and a soft cap would make infinite ones finite.

A hidden value has weight 0, and 0 * NaN is NaN. So kernels do not multiply by values as they are:

  * `mask_nonfinite` replaces non-finite numbers by zeros. It is enough in derivatives: rows that
    saw one carry NaN in their lse, which spreads to all that is computed from the row.
  * `propagate_nan` moves the NaN from values into keys, which become NaN in whole, with value 0.
    Logits of such a key are NaN where it is visible and -inf where it is hidden.
"""

import jax
import jax.numpy as jnp

from attn_core.masks import mask as mask_lib


def is_finite(keys: jax.Array, values: jax.Array) -> jax.Array:
  """Returns bool [..., 1]: whether all numbers of a key and of its value are finite.

  By a sum, because a logical reduction of every row is slow on TPUs, and slow to compile for them.

  Args:
    keys: [..., D].
    values: [..., E].
  """
  return _zero_or_nan(keys) + _zero_or_nan(values) == 0


def _zero_or_nan(x: jax.Array) -> jax.Array:
  """Returns float32 [..., 1]: 0 where all numbers of x [..., D] are finite, else NaN."""
  return (x - x).astype(jnp.float32).sum(-1, keepdims=True)


def nan_of_pairs(keys: jax.Array, values: jax.Array) -> jax.Array:
  """Returns [..., 1] in the dtype of the keys: NaN for pairs that are not finite, else 0.

  Args:
    keys: [..., D].
    values: [..., E].
  """
  return (_zero_or_nan(keys) + _zero_or_nan(values)).astype(keys.dtype)


def mask_nonfinite(x: jax.Array) -> jax.Array:
  """Returns `x` with zeros in place of non-finite numbers."""
  return jnp.where(jnp.isfinite(x), x, 0)


def infinite_to_nan(query: jax.Array) -> jax.Array:
  """Returns `query` with NaN in place of infinities, so that all its logits are NaN."""
  return jnp.where(jnp.isfinite(query), query, jnp.nan)


def mask_nonfinite_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns `x` [..., D] with zeros in place of rows that are not finite, and which are: [..., 1].

  For queries: one that sees nothing has a cotangent of 0 in every product, and 0 * NaN is NaN.
  Queries that see a key must be given NaN by the caller.
  """
  finite = jnp.isfinite(x).all(-1, keepdims=True)
  return jnp.where(finite, x, 0), finite


def mask_nonfinite_unless_full(mask: mask_lib.Mask, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Applies `mask_nonfinite` to each array, unless the mask hides nothing.

  Where every query attends to every key, all rows carry NaN already.
  """
  return arrays if isinstance(mask, mask_lib.Full) else tuple(map(mask_nonfinite, arrays))


def mask_nonfinite_pairs(
    keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns keys and values with zeros in place of pairs that are not finite, and `is_finite`.

  Queries that attend to a key that is not finite must be given NaN by the caller.

  Args:
    keys: [..., D].
    values: [..., E].
  """
  finite = is_finite(keys, values)
  return jnp.where(finite, keys, 0), jnp.where(finite, values, 0), finite


def propagate_nan(
    keys: jax.Array, values: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns NaN keys and zero values in place of the pairs that are not finite.

  Args:
    keys: [..., D].
    values: [..., E].
    finite: bool [..., 1], as `is_finite` returns it.
  """
  return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)
