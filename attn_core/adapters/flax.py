# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`attention_fn` of the MultiHeadAttention of Flax NNX and of Flax Linen."""

from collections.abc import Callable
from typing import Protocol, Unpack

import jax
from jax.typing import ArrayLike, DTypeLike

from attn_core.adapters import common, options as options_lib
from attn_core.adapters.options import AdapterOptions
from attn_core.arguments.arguments import AttentionOptions
from attn_core.masks.mask import Mask


class Sows(Protocol):
  """A module of Flax NNX or Linen, as far as it is used."""

  def sow(self, collection: str, name: str, value: jax.Array, /) -> object:
    """Stores an intermediate value."""


class FlaxOptions(AdapterOptions, total=False):
  """Options of `flax_attention_fn`: keyword arguments of `attention`."""

  softmax_scale: float | None
  logits_soft_cap: float | None
  optimized: bool


OWN = {"causal": "is_causal", "bias": "bias", "mask": "mask", "precision": "precision",
       "compute_dtype": "dtype", "dropout_prob": "dropout_rate", "dropout_rng": "dropout_rng",
       "deterministic": "deterministic"}


def flax_attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Sows | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., object] | None = None,
    qk_attn_weights_einsum: Callable[..., object] | None = None,
    attn_weights_value_einsum: Callable[..., object] | None = None,
    input_positions: ArrayLike | None = None,
    **options: Unpack[FlaxOptions],
) -> jax.Array:
  """Computes attention with the arguments of `dot_product_attention` of Flax NNX and Linen.

    nnx.MultiHeadAttention(..., attention_fn=flax_attention_fn)
    nn.MultiHeadAttention(..., attention_fn=functools.partial(flax_attention_fn, metadata=metadata))

  A decode loop on Flax's own cache works, as its mask hides the slots that are not written. The
  output of a query that sees no key is 0, where Flax gives the mean of all values.

  Args:
    query: float [..., T, H, D], with any number of batch dimensions, also none.
    key: float [..., S, K, D]; H is a multiple of K.
    value: float [..., S, K, E].
    bias: added to the logits; broadcast to [..., H, T, S] as numpy broadcasts.
    mask: True = visible; bool, or 0 and 1 of any dtype as Flax's masks are, broadcast alike.
    broadcast_dropout: unused. Each row and head drops weights of its own, as with False: a mask
      that rows share has the same mean and a larger variance.
    dropout_rng: a `jax.random` key, required where weights are dropped. They are not those that
      Flax drops with this key.
    dropout_rate: probability in [0, 1) that a weight is dropped.
    deterministic: whether dropout is off.
    dtype: dtype of the products and of the result; None: the common one of query, key and value.
    precision: `jax.lax.PrecisionLike` of the products.
    module: the module whose `sow` gets the weights before dropout as "attention_weights" (Flax's
      `sow_weights`); `vanilla` computes them, in memory quadratic in the length.
    is_causal: whether keys after the query are hidden, by row and column from the top left.
    force_fp32_for_softmax: unused. The softmax of 16-bit operands is always float32.
    einsum_dot_general: None.
    qk_attn_weights_einsum: None.
    attn_weights_value_einsum: None.
    input_positions: None; Flax passes them on to functions that rotate query and key.
    **options: see `AdapterOptions` and `FlaxOptions`.

  Returns:
    [..., T, H, E] in `dtype`.

  Raises:
    TypeError: an unknown keyword, or one that an argument says here.
    ValueError: an argument is not as documented here.
    NotImplementedError: products of the caller's own, or input_positions; a module together with
      a mechanism other than `vanilla`; or the mechanism does not support an argument.
  """
  del broadcast_dropout, force_fp32_for_softmax
  options_lib.check("flax_attention_fn", options, FlaxOptions, OWN)
  for name, product in (("einsum_dot_general", einsum_dot_general),
                        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
                        ("attn_weights_value_einsum", attn_weights_value_einsum)):
    if product is not None:
      raise NotImplementedError(f"{name}: got a function; the products are those of the mechanism. "
                                "Flax's own attention_fn takes functions")
  if input_positions is not None:
    raise NotImplementedError(
        "input_positions: got an array, by which Flax rotates queries and keys; expected them "
        "rotated in a function around this one, as by attn_core.rotary. Positions for masks are "
        "mask_info=MaskInfo(q_positions=..., kv_positions=...)")
  given = common.with_dtype(common.Arrays(query, key, value, bias, mask), dtype)
  hidden = common.Hidden(is_causal)
  own: AttentionOptions = {"precision": precision, "deterministic": True}
  if module is not None:
    _sow_weights(module, given, hidden, options, own)
  if dropout_rate and not deterministic:
    own = {"precision": precision, "deterministic": False, "dropout_prob": dropout_rate,
           "dropout_rng": dropout_rng}
  return common.attend(given, hidden, options, own).out


def _sow_weights(module: Sows, arrays: common.Arrays, hidden: common.Hidden,
                 options: AdapterOptions, own: AttentionOptions) -> None:
  """Stores the weights without dropout in a module of Flax NNX or Linen.

  Raises:
    NotImplementedError: the mechanism is not `vanilla`.
  """
  mechanism = options.get("mechanism", "auto")
  vanilla: AdapterOptions = {**options}
  if mechanism == "auto":
    vanilla["mechanism"] = "vanilla"
  output = common.attend(arrays, hidden, vanilla, {**own, "return_weights": True})
  assert output.attention_weights is not None
  module.sow("intermediates", "attention_weights", output.attention_weights)
