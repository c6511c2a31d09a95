# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of calls without tokens, and those of a mechanism as the caller asked for them."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.caches import device_parts, slots
from attn_core.caches.update import Step
from attn_core.dispatch.capabilities import Implementation
from attn_core.types import (AttentionOutput, AttentionSpec, Call, Operands, PagedOperands,
                             at_least_float32, output_width)


def is_empty(call: Call) -> bool:
  """Whether a call has no batch rows, no queries or no keys, so that no kernel is needed."""
  if isinstance(call.operands, PagedOperands):
    return False
  return 0 in call.operands.query.shape[:2] or call.operands.key.shape[1] == 0


def empty(call: Call[Operands, AttentionSpec]) -> AttentionOutput:
  """Returns the results of a call without tokens: no query sees any key.

  Outputs are 0, and the lse is that of the sinks, or -inf.
  """
  query, key, _ = call.operands[:3]
  dtype = query.dtype if call.spec.out_dtype is None else call.spec.out_dtype
  # Of the query, not of a shape: the outputs are sharded as the query is.
  zeros = jax.lax.full_like(query, 0, dtype)[..., :1]
  rows = zeros[..., 0].transpose(0, 2, 1).astype(at_least_float32(query.dtype))  # [B, H, T]
  lse = weights = None
  if call.return_lse:
    sinks = call.operands.sinks
    lse = rows + (-jnp.inf if sinks is None else sinks[..., None].astype(rows.dtype))
  if call.return_weights:
    weights = jnp.broadcast_to(rows[..., None].astype(dtype), (*rows.shape, key.shape[1]))
  out = jnp.broadcast_to(zeros, (*zeros.shape[:3], output_width(call.operands, call.spec)))
  return AttentionOutput(out, weights, lse)


def with_rows(call: Call, step: Step | None, implementation: Implementation,
              placed: Call) -> Operands | PagedOperands:
  """Returns the operands of a call, with the rows of its cache if the implementation reads them.

  Args:
    call: the call.
    step: of its cache; None: it has none.
    implementation: which runs.
    placed: the call with its placement. Shards of the keys are not computed from the rows.
  """
  operands, placement = call.operands, placed.placement
  if (step is None or step.rows is None or not implementation.reads_rows or is_empty(call)
      or placement is not None and placement.keys):
    return operands
  rows = step.rows
  if not _ends_with_kernel(call):
    rows = rows._replace(overflow=jnp.zeros_like(rows.overflow))
  return operands._replace(mask=operands.mask._replace(rows=rows))


def _ends_with_kernel(call: Call) -> bool:
  """Returns whether nothing is computed from a kernel's results: 0 * NaN in derivatives is NaN."""
  return call.spec.normalize_output and not call.operands.up


def writes_nan(call: Call, operands: Operands | PagedOperands) -> bool:
  """Returns whether the kernel writes NaN for rows that overflowed, given what `with_rows` did."""
  return (isinstance(operands, Operands) and operands.mask.rows is not None
          and _ends_with_kernel(call))


def with_cache(output: AttentionOutput, step: Step, written: bool = False) -> AttentionOutput:
  """Adds the updated cache, and NaN in the rows that overflowed, unless it is `written`."""
  if written:
    return output._replace(cache_view=step.cache)

  def with_nan(x: jax.Array) -> jax.Array:
    return slots.nan_rows(x, device_parts.match(step.overflow, x))

  weights, lse = output.attention_weights, output.lse
  return output._replace(
      attention_outputs=with_nan(output.attention_outputs),
      attention_weights=None if weights is None else with_nan(weights),
      lse=None if lse is None else with_nan(lse), cache_view=step.cache)


def to_layout(output: AttentionOutput, layout: str, dtype: np.dtype) -> AttentionOutput:
  """Converts from layout bthd to the caller's, and to the dtype of the query."""
  out, weights, lse = output.attention_outputs.astype(dtype), output.attention_weights, output.lse
  if layout == "bhtd":
    out = out.transpose(0, 2, 1, 3)
  if layout != "thd":
    return output._replace(attention_outputs=out)
  return output._replace(
      attention_outputs=out[0], attention_weights=None if weights is None else weights[0],
      lse=None if lse is None else lse[0])
