# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over the fields of `equinox.nn.MultiheadAttention`."""

from collections.abc import Callable
from typing import Protocol, Unpack

import jax
from jax.typing import ArrayLike
import jax.numpy as jnp

from attn_core import checks
from attn_core.adapters import common, options as options_lib
from attn_core.adapters.options import PreciseOptions
from attn_core.arguments.arguments import AttentionOptions
from attn_core.masks.mask import Mask


class EquinoxOptions(PreciseOptions, total=False):
  """Options of `equinox_attention`: keyword arguments of `attention`."""

  softmax_scale: float | None
  logits_soft_cap: float | None
  optimized: bool


OWN = {"mask": "mask", "dropout_rng": "key", "dropout_prob": "layer.dropout.p",
       "deterministic": "inference"}

Projection = Callable[[jax.Array], jax.Array]
Heads = tuple[jax.Array, jax.Array, jax.Array]


class Dropout(Protocol):
  """The fields of `equinox.nn.Dropout`."""

  p: float
  inference: bool


class Layer(Protocol):
  """The fields of `equinox.nn.MultiheadAttention` that are read."""

  query_proj: Projection
  key_proj: Projection
  value_proj: Projection
  output_proj: Projection
  dropout: Dropout
  num_heads: int


def equinox_attention(
    layer: Layer,
    query: ArrayLike,
    key_: ArrayLike,
    value: ArrayLike,
    mask: ArrayLike | Mask | None = None,
    *,
    key: ArrayLike | None = None,
    inference: bool | None = None,
    process_heads: Callable[[jax.Array, jax.Array, jax.Array], Heads] | None = None,
    **options: Unpack[EquinoxOptions],
) -> jax.Array:
  """Computes what `layer(query, key_, value, ...)` computes, by any mechanism.

    class Attention(equinox.nn.MultiheadAttention):
      def __call__(self, *args, **kwargs):
        return equinox_attention(self, *args, **kwargs)

  As the layer it has no batch dimension, and `jax.vmap` adds one. The output projection of a query
  that sees no key gets 0, where Equinox gives it the mean of all values.

  Args:
    layer: an `equinox.nn.MultiheadAttention`, or an object with its fields query_proj, key_proj,
      value_proj, output_proj, dropout (with p and inference) and num_heads.
    query: float [T, query_size].
    key_: float [S, key_size].
    value: float [S, value_size].
    mask: bool [T, S] or [H, T, S], True = visible; or 0 and 1 of any dtype; or a `Mask`.
    key: a `jax.random` key, required where weights are dropped. They are not those that Equinox
      drops with this key.
    inference: whether dropout is off; None: `layer.dropout.inference`.
    process_heads: function of query, key and value heads [T or S, H, width] that returns all three,
      such as one that rotates queries and keys.
    **options: see `AdapterOptions` and `EquinoxOptions`; `causal` is mask=masks.causal().

  Returns:
    [T, output_size].

  Raises:
    TypeError: an unknown keyword, or one that an argument says here.
    ValueError: an argument is not as documented here, or process_heads changes a shape.
    NotImplementedError: the mechanism does not support an argument.
  """
  options_lib.check("equinox_attention", options, EquinoxOptions, OWN)
  heads = (_heads("query", layer.query_proj, query, layer.num_heads),
           _heads("key_", layer.key_proj, key_, layer.num_heads),
           _heads("value", layer.value_proj, value, layer.num_heads))
  if process_heads is not None:
    processed = process_heads(*heads)
    checks.require([x.shape for x in processed] == [x.shape for x in heads], "process_heads",
                   f"heads of shapes {[x.shape for x in processed]}",
                   f"the shapes that it was given, {[x.shape for x in heads]}")
    heads = processed
  own = _dropout(layer.dropout, key, inference)
  out = common.attend(common.Arrays(*heads, mask=mask), common.Hidden(), options, own).out
  return jax.vmap(layer.output_proj)(out.reshape(out.shape[0], -1))


def _heads(name: str, projection: Projection, x: ArrayLike, num_heads: int) -> jax.Array:
  """Projects [length, features] to [length, num_heads, width]."""
  array = jnp.asarray(x)
  checks.require(array.ndim == 2, name, checks.describe(array),
                 "[length, features]; jax.vmap adds a batch dimension")
  return jax.vmap(projection)(array).reshape(array.shape[0], num_heads, -1)


def _dropout(dropout: Dropout, key: ArrayLike | None,
             inference: bool | None) -> AttentionOptions:
  """Returns the arguments of `attention` for a dropout layer of Equinox."""
  is_off = dropout.inference if inference is None else inference
  if is_off or dropout.p == 0:
    return {"deterministic": True}
  checks.require(key is not None, "key", f"None with layer.dropout.p={dropout.p}",
                 "a jax.random key, or inference=True")
  return {"deterministic": False, "dropout_prob": dropout.p, "dropout_rng": key}
