# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with the signature of `keras.ops.dot_product_attention`, for Keras 3 on JAX."""

from typing import Unpack

import jax
from jax.typing import ArrayLike

from attn_core.adapters import common, jax_nn, options as options_lib
from attn_core.adapters.options import PreciseOptions
from attn_core.masks.mask import Mask

OWN = {**jax_nn.OWN, "logits_soft_cap": "attn_logits_soft_cap", "optimized": "flash_attention"}
del OWN["return_lse"]


def keras_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    **options: Unpack[PreciseOptions],
) -> jax.Array:
  """Computes attention with the arguments and results of `keras.ops.dot_product_attention`.

  A layer of Keras uses it where a subclass overrides `_compute_attention`; docs/adapters.md shows
  one. The output of a query that sees no key is 0, where Keras gives the mean of all values.

  Args:
    query: float [..., T, H, D], with any number of batch dimensions, also none.
    key: float [..., S, K, D]; H is a multiple of K.
    value: float [..., S, K, E].
    bias: added to the logits; broadcast to [..., H, T, S] as numpy broadcasts.
    mask: True = visible; bool, or 0 and 1 of any dtype, broadcast as the bias is; or a `Mask`.
    scale: factor of the logits; None: D**-0.5.
    is_causal: whether keys after the query are hidden, by row and column from the top left.
    flash_attention: True: only mechanisms with memory linear in the sequence length; None and
      False leave the choice to the option `mechanism`.
    attn_logits_soft_cap: number c > 0: logits are c * tanh(logits / c); not with a bias, since
      Keras does not say which of the two comes first.
    **options: see `AdapterOptions` and `PreciseOptions`.

  Returns:
    [..., T, H, E] in the common dtype of query, key and value.

  Raises:
    TypeError: an unknown keyword, or one that an argument says here.
    ValueError: an argument is not as documented here.
    NotImplementedError: a soft cap together with a bias; or the mechanism does not support an
      argument.
  """
  options_lib.check("keras_dot_product_attention", options, PreciseOptions, OWN)
  refuse_cap_with_bias("attn_logits_soft_cap", attn_logits_soft_cap, bias)
  arrays = common.with_dtype(common.Arrays(query, key, value, bias, mask))
  return jax_nn.attend_scaled(
      arrays, common.Hidden(is_causal), scale, options,
      {"logits_soft_cap": attn_logits_soft_cap, "optimized": bool(flash_attention)}).out


def refuse_cap_with_bias(name: str, cap: float | None, bias: ArrayLike | None) -> None:
  """Refuses a soft cap where another library would apply it to the sum of logits and bias.

  Raises:
    NotImplementedError: both are given.
  """
  if cap is not None and bias is not None:
    raise NotImplementedError(
        f"{name}={cap} with a bias: the cap of attn_core comes before the bias. "
        "attention(..., bias=bias, logits_soft_cap=cap) is soft_cap(scale * query . key) + bias; "
        "no argument means soft_cap(scale * query . key + bias)")
