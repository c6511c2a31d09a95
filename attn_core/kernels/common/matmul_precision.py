# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The precision of products, which does not depend on jax.default_matmul_precision."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike


def resolve(dtype: DTypeLike, requested: jax.lax.PrecisionLike) -> jax.lax.PrecisionLike:
  """Returns the precision of a product, to be given explicitly.

  Products of 16-bit numbers are exact in float32 at the default precision, and compilers for
  kernels take no other one. Products of 32 and 64 bits are exact unless the caller asks for less.

  Args:
    dtype: of both operands.
    requested: the caller's `precision`; None: as exact as the operands.
  """
  if jnp.dtype(dtype).itemsize < 4:
    return lax.Precision.DEFAULT
  return lax.Precision.HIGHEST if requested is None else requested
