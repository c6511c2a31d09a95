# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with the signature of `jax.nn.dot_product_attention`."""

from typing import Any, Literal, Unpack, cast, overload

import jax
from jax.typing import ArrayLike
import jax.numpy as jnp

from attn_core.adapters import common, options as options_lib
from attn_core.adapters.options import AdapterOptions, PreciseOptions
from attn_core.arguments.arguments import AttentionOptions
from attn_core.masks.mask import Mask
from attn_core.types import AttentionOutput

# The names that `jax.nn` gives its implementations -> mechanisms.
IMPLEMENTATIONS = {"xla": "vanilla", "cudnn": "cudnn"}

# Keyword of `attention` -> the argument that says it in the signature of `jax.nn`.
OWN = {"causal": "is_causal", "softmax_scale": "scale", "bias": "bias", "mask": "mask",
       "return_lse": "return_residual"}


class JaxNnOptions(PreciseOptions, total=False):
  """Options of `dot_product_attention`: keyword arguments of `attention`."""

  logits_soft_cap: float | None
  optimized: bool


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None, *, scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: Literal[False] = ..., **options: Unpack[JaxNnOptions]) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None, *, scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: Literal[True],
    **options: Unpack[JaxNnOptions]) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **options: Unpack[JaxNnOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes attention with the arguments and results of `jax.nn.dot_product_attention`.

  It differs for queries that see no key: their output is 0 and their residual -inf, where `jax.nn`
  gives the mean of all values, padding included, and a large negative number.

  >>> import jax.numpy as jnp
  >>> from attn_core.adapters import dot_product_attention
  >>> query = jnp.ones((4, 1, 8))  # all logits are equal
  >>> value = jnp.repeat(jnp.array([0., 2., 4., 6.]).reshape(4, 1, 1), 8, axis=-1)
  >>> dot_product_attention(query, query, value)[:, 0, 0]
  Array([3., 3., 3., 3.], dtype=float32)
  >>> dot_product_attention(query, query, value, key_value_seq_lengths=jnp.array([2]))[:, 0, 0]
  Array([1., 1., 1., 1.], dtype=float32)

  Args:
    query: float [..., T, H, D], with any number of batch dimensions, also none.
    key: float [..., S, K, D], of the query's batch dimensions and dtype; H is a multiple of K.
    value: float [..., S, K, E].
    bias: added to the logits; broadcast to [..., H, T, S] as numpy broadcasts.
    mask: True = visible; bool, or 0 and 1 of any dtype, broadcast as the bias is; or a `Mask`.
    scale: factor of the logits; None: D**-0.5. A traced number multiplies the query.
    is_causal: whether keys after the query are hidden, by row and column from the top left.
    query_seq_lengths: int [...] (tokens); later queries see nothing.
    key_value_seq_lengths: int [...] (tokens); later keys are hidden.
    local_window_size: (left, right), or one int for both (tokens, inclusive).
    implementation: None; "xla": `vanilla`, dense attention in plain XLA; "cudnn"; or any other name
      of a mechanism, as the option `mechanism`.
    return_residual: whether to return the logsumexp of the logits too, without a gradient.
    **options: see `AdapterOptions` and `JaxNnOptions`.

  Returns:
    [..., T, H, E] in the query's dtype; with return_residual a pair of it and [..., T, H] in the
    key's dtype.

  Raises:
    TypeError: an unknown keyword, or one that an argument says here.
    ValueError: an argument is not as documented here.
    NotImplementedError: the mechanism does not support an argument; the message names both.
  """
  options_lib.check("dot_product_attention", options, JaxNnOptions, OWN)
  arrays = common.Arrays(query, key, value, bias, mask)
  hidden = common.Hidden(is_causal, local_window_size, query_seq_lengths, key_value_seq_lengths)
  output = attend_scaled(arrays, hidden, scale, with_implementation(implementation, options),
                         {"return_lse": return_residual})
  if not return_residual:
    return output.out
  residual = jnp.swapaxes(cast(jax.Array, output.lse), -1, -2).astype(jnp.asarray(key).dtype)
  return output.out, jax.lax.stop_gradient(residual)


def with_implementation(implementation: str | None, options: AdapterOptions) -> AdapterOptions:
  """Returns the options with the mechanism that an implementation stands for.

  Raises:
    ValueError: a mechanism is among the options too.
  """
  if implementation is None:
    return options
  if "mechanism" in options:
    raise ValueError(f"implementation: got {implementation!r} and mechanism="
                     f"{options['mechanism']!r}; expected one of the two")
  return {**options, "mechanism": IMPLEMENTATIONS.get(implementation, implementation)}


def attend_scaled(arrays: common.Arrays, hidden: common.Hidden, scale: ArrayLike | None,
                  options: AdapterOptions, own: AttentionOptions) -> AttentionOutput:
  """Calls `common.attend` with a scale that may be an array."""
  if isinstance(scale, jax.core.Tracer):
    query = jnp.asarray(arrays.query)
    arrays = arrays._replace(query=(query * scale).astype(query.dtype))
    scale = 1.0
  number = None if scale is None else float(cast(Any, scale))
  return common.attend(arrays, hidden, options, {**own, "softmax_scale": number})
