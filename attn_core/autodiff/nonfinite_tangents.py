# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps tangents that are not finite from all but the queries that see them.

Derivatives multiply the tangents of hidden keys and queries by weights of 0, and 0 * NaN is NaN. So
they get zeros in place of such tangents, and NaN in the lse of each query that sees one: from there
NaN spreads to all that is computed from the query, as it does from a key that is not finite.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.types import AttentionSpec, BlockSizes, Operands

_ROWS = ("query", "key", "value")


def separate(call: tuple[Kernel, Operands, AttentionSpec, BlockSizes], residuals: Residuals,
             names: Sequence[str],
             tangents: Sequence[jax.Array]) -> tuple[Residuals, dict[str, jax.Array]]:
  """Returns the residuals with NaN in the lse of these queries, and finite tangents by name.

  Which queries see them is what the forward says about NaN in their place; it runs only if there
  are any. Kernels that exchange data between devices are left alone: all would have to run it.

  Args:
    call: the forward: its kernel, what it computed, and block sizes.
    residuals: out and lse.
    names: operands that the tangents belong to.
    tangents: one for each name.
  """
  kernel, operands, spec, block_sizes = call
  given = dict(zip(names, tangents, strict=True))
  bad = {name: ~jnp.isfinite(given[name]) for name in _ROWS if name in given}
  if kernel.communicates or not bad:
    return residuals, given
  rows = {name: x.any(-1, keepdims=True) for name, x in bad.items()}

  def seen() -> jax.Array:
    fixed = lax.stop_gradient(operands)
    nan = lambda x, name: jnp.where(rows[name], jnp.nan, x) if name in rows else x
    marked = fixed._replace(query=nan(fixed.query, "query"),
                            key=nan(nan(fixed.key, "key"), "value"))
    return jnp.isnan(kernel.forward(marked, spec, block_sizes).lse)

  some = jnp.stack([x.any() for x in rows.values()]).any()
  spoiled = lax.cond(some, seen, lambda: jnp.isnan(lax.stop_gradient(residuals.lse)))
  finite = {name: jnp.where(x, 0, given[name]) for name, x in bad.items()}
  return (Residuals(residuals.out, jnp.where(spoiled, jnp.nan, residuals.lse)),
          {**given, **finite})
