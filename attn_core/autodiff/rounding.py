# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps the digits that 16 bits round off an output, for its derivatives.

  dS = P * (d_out . value - delta),  delta = sum(d_out * out)

Where nearly all weight is on one key, d_out . value and delta are nearly equal there, and the error
of an output of 16 bits is as large as their difference: bfloat16 outputs made gradients of queries,
keys and biases 20 times as imprecise as those of a softmax over stored logits. So the derivatives
read the output with the digits it had: the output itself, which the caller keeps anyway, and the
rest in as many bits. That takes 2 bytes a number, where a float32 output would take 4.
"""

from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_core.kernels.common import dense_operands
from attn_core.kernels.common.contract import Residuals
from attn_core.types import AttentionSpec, PagedSpec

SpecT = TypeVar("SpecT", AttentionSpec, PagedSpec)


def exact(spec: SpecT) -> SpecT:
  """Returns the spec of the same output, not rounded to 16 bits."""
  return spec._replace(out_dtype=dense_operands.lse_dtype(spec))


def split(found: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
  """Returns (output, rest): `found` rounded to 16 bits, and a multiple of what that takes off.

  Args:
    found: float32 or float64.
    dtype: of 16 bits.
  """
  info, shape, found = jnp.finfo(dtype), found.shape, _merged(found)
  # XLA may omit a conversion to 16 bits and back, after which the output would still include the
  # rest; it never omits this.
  rounded = lax.reduce_precision(found, info.nexp, info.nmant)
  # Below the normal numbers, `rounded` is 0 and a float16 is not; above the largest it is infinite.
  normal = jnp.isfinite(rounded) & (jnp.abs(rounded) >= jnp.asarray(info.tiny, found.dtype))
  rounded = jnp.where(normal, rounded, found)
  rest = jnp.where(normal, found - rounded, 0) * jnp.asarray(_unit(dtype), found.dtype)
  return rounded.astype(dtype).reshape(shape), rest.astype(dtype).reshape(shape)


def _merged(x: jax.Array) -> jax.Array:
  """Merges heads and width: on TPUs, operations on few heads fill few of the 8 sublanes."""
  return x.reshape(*x.shape[:-2], -1)


def _unit(dtype: DTypeLike) -> float:
  """Returns the factor that makes a rest as large as its output, as float16 has a small range."""
  return 2.0 ** (jnp.finfo(dtype).nmant + 1)


def join(out: jax.Array, lse: jax.Array, rest: jax.Array | None = None) -> Residuals:
  """Returns the residuals with the output as it was before `split`, in the dtype of the lse.

  Args:
    out: of `split`, or an output that was not split.
    lse: logsumexp of the logits.
    rest: of `split`; None: `out` was not split.
  """
  if rest is None:
    return Residuals(out, lse)
  wide = _merged(rest).astype(lse.dtype) * jnp.asarray(1 / _unit(out.dtype), lse.dtype)
  return Residuals((_merged(out).astype(lse.dtype) + wide).reshape(out.shape), lse)
