# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps that the adapters share: masks, biases and lengths of any shape, and the call itself."""

from typing import Any, NamedTuple, cast

import jax
from jax.typing import ArrayLike, DTypeLike
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.adapters.options import AdapterOptions
from attn_core.arguments.arguments import AttentionOptions
from attn_core.attention import attention
from attn_core.masks import constructors
from attn_core.masks.info import MaskInfo
from attn_core.masks.mask import Mask
from attn_core.types import AttentionOutput

Shape = tuple[int, ...]


class Arrays(NamedTuple):
  """Arrays of a call as the caller of an adapter gave them; `batch` is any number of dimensions."""

  query: ArrayLike  # [*batch, T, H, D]
  key: ArrayLike  # [*batch, S, K, D]
  value: ArrayLike  # [*batch, S, K, E]
  bias: ArrayLike | None = None  # broadcast to [*batch, H, T, S] as numpy broadcasts
  mask: ArrayLike | Mask | None = None  # the same; bool, or 0 and 1 of any dtype


class Hidden(NamedTuple):
  """Keys that an adapter hides besides the mask, by row and column numbers from the top left."""

  causal: bool = False
  window: int | tuple[int, int] | None = None  # (left, right), both inclusive; tokens
  query_lengths: ArrayLike | None = None  # int [*batch], each dimension may be 1; tokens
  key_lengths: ArrayLike | None = None


def attend(arrays: Arrays, hidden: Hidden, options: AdapterOptions,
           own: AttentionOptions) -> AttentionOutput:
  """Calls `attention` with arguments in the shapes of another library.

  Args:
    arrays: query, key, value, bias and mask.
    hidden: the other masks.
    options: the options of the adapter, checked by `options.check`.
    own: keyword arguments of `attention` that arguments of the adapter say.

  Raises:
    ValueError: an argument is not as documented.
    NotImplementedError: the mechanism does not support an argument.
  """
  query, key, value = (_as_array(name, getattr(arrays, name)) for name in ("query", "key", "value"))
  given: dict[str, Any] = {**options, **own}
  info = given.pop("mask_info", None)
  if query.ndim >= 3 and key.ndim == query.ndim:
    lead = query.shape[:-3]
    logits = *lead, query.shape[-2], query.shape[-3], key.shape[-3]
    if arrays.bias is not None:
      given["bias"] = _bias(arrays.bias, logits, query.dtype)
    given["mask"] = _other_masks(hidden, lead)
    if isinstance(arrays.mask, Mask):
      given["mask"] = arrays.mask if given["mask"] is None else arrays.mask & given["mask"]
    elif arrays.mask is not None:
      info = _with_mask(info, boolean("mask", arrays.mask, logits))
    if query.shape[-3] != key.shape[-3]:
      given.setdefault("query_offset", _top_left(info))
  return attention(query, key, value, causal=hidden.causal, mask_info=info, **given)


def with_dtype(arrays: Arrays, dtype: DTypeLike | None = None) -> Arrays:
  """Casts query, key and value to a dtype; None: their common one."""
  query, key, value = (jnp.asarray(x) for x in arrays[:3])
  dtype = jnp.result_type(query, key, value) if dtype is None else dtype
  return arrays._replace(query=query.astype(dtype), key=key.astype(dtype),
                         value=value.astype(dtype))


def _as_array(name: str, x: ArrayLike) -> checks.Array:
  """Returns a query, key or value as an array of jax or numpy.

  Raises:
    ValueError: it is not an array.
  """
  if isinstance(x, (jax.Array, np.ndarray)):
    return x
  try:
    return jnp.asarray(x)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{name}: got {type(x).__name__}; expected an array; a quantized one is "
                     "dequantized first") from error


def _top_left(info: MaskInfo | None) -> int | None:
  """Returns the position of the first query, unless positions are given."""
  return None if info is not None and info.q_positions is not None else 0


def _with_mask(info: MaskInfo | None, mask: checks.Array) -> MaskInfo:
  """Adds a boolean mask to a mask_info."""
  info = MaskInfo() if info is None else info
  if info.attention_mask is not None:
    mask = jnp.asarray(mask) & jnp.asarray(info.attention_mask)
  return info._replace(attention_mask=mask)


def boolean(name: str, mask: ArrayLike, shape: Shape) -> checks.Array:
  """Returns a mask of any dtype as booleans of the rank of the logits.

  Args:
    name: of the argument, for errors.
    mask: bool, or 0 and 1 of any dtype; broadcast to `shape` as numpy broadcasts.
    shape: [*batch, H, T, S].

  Raises:
    ValueError: it does not broadcast, or is known to hold other numbers than 0 and 1.
  """
  array = mask if isinstance(mask, (jax.Array, np.ndarray)) else np.asarray(mask)
  if array.dtype != bool:
    if _is_known(array):
      checks.require(np.isin(np.asarray(array), (0, 1)).all(), name,
                     f"{checks.describe(array)} with other numbers than 0 and 1",
                     "True or 1 = visible; an additive mask is a bias")
    array = array.astype(bool)
  return _of_rank(name, array, shape)


def _is_known(x: checks.Array) -> bool:
  """Whether this process can read the values of an array now."""
  if isinstance(x, np.ndarray):
    return True
  return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable


def _bias(bias: ArrayLike, shape: Shape, dtype: np.dtype) -> checks.Array:
  """Returns a bias of the rank of the logits; numbers that are not floating get `dtype`."""
  array = bias if isinstance(bias, (jax.Array, np.ndarray)) else jnp.asarray(bias)
  array = array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(dtype)
  return _of_rank("bias", array, shape)


def _of_rank(name: str, x: checks.Array, shape: Shape) -> checks.Array:
  """Returns an array with leading dimensions of 1 up to the rank of the logits.

  Raises:
    ValueError: it does not broadcast to them.
  """
  # An unbatched query may come with [1, H, T, S].
  rank = max(len(shape), min(x.ndim, 4))
  full = (1,) * (rank - len(shape)) + shape
  padded = x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x
  checks.require(padded.ndim == rank and all(n in (1, m) for n, m in zip(padded.shape, full)),
                 name, checks.describe(x), f"a shape that broadcasts to [..., H, T, S] = "
                 f"{list(shape)}")
  return padded


def _other_masks(hidden: Hidden, lead: Shape) -> Mask | None:
  """Combines the window and the lengths of a call with batch dimensions `lead`."""
  found: Mask | None = None
  if hidden.window is not None:
    found = constructors.window(*_window(hidden.window))
  lengths = [_lengths(name, x, lead) for name, x in (
      ("query_seq_lengths", hidden.query_lengths), ("key_value_seq_lengths", hidden.key_lengths))]
  if any(x is not None for x in lengths):
    mask = constructors.lengths(*cast(list[Any], lengths))
    found = mask if found is None else found & mask
  return found


def _window(window: object) -> tuple[int, int]:
  """Returns (left, right) of a window that may be one int for both."""
  expected = "an int w for (w, w) or a pair (left, right) of ints (tokens, inclusive)"
  pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
  checks.require(len(pair) == 2, "local_window_size", repr(window), expected)
  left, right = (checks.integer("local_window_size", side, expected) for side in pair)
  return left, right


def _lengths(name: str, lengths: ArrayLike | None, lead: Shape) -> checks.Array | None:
  """Returns int32 [B or 1] lengths, B the product of the batch dimensions."""
  if lengths is None:
    return None
  array = lengths if isinstance(lengths, (jax.Array, np.ndarray)) else np.asarray(lengths)
  expected = f"int32 {list(lead)} (tokens), any dimension may be 1"
  array = checks.int32(name, array, expected)
  if array.size == 1:
    return array.reshape(1)
  checks.require(array.ndim == len(lead) and all(n in (1, m) for n, m in zip(array.shape, lead)),
                 name, checks.describe(lengths), expected)
  return jnp.broadcast_to(array, lead).reshape(-1)
