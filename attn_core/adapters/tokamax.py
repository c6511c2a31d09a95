# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with the signature of `tokamax.dot_product_attention`."""

from collections.abc import Sequence
from typing import Unpack

import jax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp

from attn_core.adapters import common, jax_nn, keras, options as options_lib
from attn_core.adapters.options import AdapterOptions
from attn_core.config.metadata import OperationMetadata
from attn_core.masks.mask import Mask
from attn_core.sharding.partition import PartitionAxis

# The names that tokamax gives its implementations -> mechanisms.
IMPLEMENTATIONS = {"mosaic": "flash_attn2", "triton": "flash_attn2", "xla_chunked": "blockwise",
                   **jax_nn.IMPLEMENTATIONS}


class TokamaxOptions(AdapterOptions, total=False):
  """Options of `tokamax_dot_product_attention`: keyword arguments of `attention`."""

  compute_dtype: DTypeLike | None
  optimized: bool


OWN = {**jax_nn.OWN, "logits_soft_cap": "logits_soft_cap", "precision": "precision"}
del OWN["return_lse"]


def tokamax_dot_product_attention(
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
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | Sequence[str] | None = None,
    q_sharding: NamedSharding | None = None,
    **options: Unpack[TokamaxOptions],
) -> jax.Array:
  """Computes attention with the arguments and results of `tokamax.dot_product_attention`.

  Arguments that `attn_core.adapters.dot_product_attention` has too mean the same here.

  Args:
    query: float [..., T, H, D]; a quantized array is dequantized first.
    key: float [..., S, K, D].
    value: float [..., S, K, E].
    bias: added to the logits.
    mask: True = visible.
    scale: factor of the logits; None: D**-0.5.
    is_causal: whether keys after the query are hidden, by row and column from the top left.
    query_seq_lengths: int [...] (tokens).
    key_value_seq_lengths: int [...] (tokens).
    local_window_size: (left, right), or one int for both (tokens, inclusive).
    logits_soft_cap: number c > 0: logits are c * tanh(logits / c); not with a bias, which tokamax
      adds before the cap and attn_core after it.
    precision: `jax.lax.PrecisionLike` of the products.
    implementation: None; a name of tokamax: "mosaic" and "triton" are flash_attn2, "xla_chunked" is
      blockwise, "xla" is vanilla, and "cudnn"; a name of a mechanism; or several names, of which
      the first one runs that supports the call.
    q_sharding: sharding of the query; its axes of the batch and of the heads shard the call.
    **options: see `AdapterOptions` and `TokamaxOptions`.

  Returns:
    [..., T, H, E] in the query's dtype.

  Raises:
    TypeError: an unknown keyword, or one that an argument says here.
    ValueError: an argument is not as documented here.
    NotImplementedError: a soft cap together with a bias; a sharded sequence or width; or none of
      the mechanisms supports the call.
  """
  options_lib.check("tokamax_dot_product_attention", options, TokamaxOptions, OWN)
  keras.refuse_cap_with_bias("logits_soft_cap", logits_soft_cap, bias)
  placed: AdapterOptions = options
  if q_sharding is not None:
    placed = _with_sharding(q_sharding, jnp.ndim(query), options)
  arrays = common.Arrays(query, key, value, bias, mask)
  hidden = common.Hidden(is_causal, local_window_size, query_seq_lengths, key_value_seq_lengths)
  refusals: list[str] = []
  for name in _names(implementation):
    chosen = jax_nn.with_implementation(name, placed)
    try:
      return jax_nn.attend_scaled(arrays, hidden, scale, chosen, {
          "logits_soft_cap": logits_soft_cap, "precision": precision}).out
    except NotImplementedError as error:
      refusals.append(str(error))
  raise NotImplementedError("implementation: none of the names supports the call. " +
                            " ".join(refusals))


def _names(implementation: str | Sequence[str] | None) -> list[str | None]:
  """Returns the mechanisms to try, in this order; None: the one that the options name."""
  if implementation is None:
    return [None]
  names = [implementation] if isinstance(implementation, str) else list(implementation)
  if not names or not all(isinstance(name, str) for name in names):
    raise ValueError(f"implementation: got {implementation!r}; expected None, a name, or a "
                     "sequence of names that is not empty")
  return [IMPLEMENTATIONS.get(name, name) for name in names]


def _with_sharding(sharding: NamedSharding, rank: int, options: AdapterOptions) -> AdapterOptions:
  """Returns the options with the mesh and the axes of the sharding of a query.

  Raises:
    ValueError: the options have metadata as well.
    NotImplementedError: the sequence or the width is sharded, or several batch dimensions are.
  """
  if "metadata" in options:
    raise ValueError("q_sharding: got metadata as well; expected one of the two, since both hold a "
                     "mesh")
  spec = (tuple(sharding.spec) + (None,) * rank)[:rank]
  batch, (length, heads, width) = spec[:-3], spec[-3:]
  if length is not None or width is not None:
    raise NotImplementedError(
        f"q_sharding={sharding.spec}: the sequence or the width of the query is sharded; mechanism "
        "'ring' shards a sequence, by metadata=OperationMetadata(mesh=..., sequence_axis_name=...)")
  if any(axes is not None for axes in batch[1:]):
    raise NotImplementedError(
        f"q_sharding={sharding.spec}: only the first of several batch dimensions may be sharded")
  rows = batch[0] if batch else None
  axes = PartitionAxis(batch_axis=rows, head_axis=heads, kv_head_axis=heads, decode_batch_axis=rows,
                       decode_head_axis=heads, decode_kv_head_axis=heads)
  return {**options, "metadata": OperationMetadata(mesh=sharding.mesh, partition_axis=axes)}
