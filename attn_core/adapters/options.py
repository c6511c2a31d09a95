# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The options that every adapter takes besides the arguments of the library that it stands for."""

from collections.abc import Mapping
from typing import TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from attn_core.arguments.arguments import AttentionOptions, RematPolicy
from attn_core.config.metadata import OperationMetadata
from attn_core.masks.info import MaskInfo
from attn_core.types import BlockSizes, Mode, SlidingWindow


class AdapterOptions(TypedDict, total=False):
  """Keyword arguments of `attention` that every adapter takes, with the meaning they have there.

  Masks among the options and among the adapter's own arguments apply together.
  """

  mechanism: str
  metadata: OperationMetadata | None
  mode: Mode
  mask_info: MaskInfo | None
  query_offset: ArrayLike | None
  sliding_window: SlidingWindow
  chunk_size: int | None
  softmax_aux: ArrayLike | None
  block_sizes: BlockSizes | None
  policy: RematPolicy | str | None
  prevent_cse: bool
  vmem_limit_bytes: int | None


class PreciseOptions(AdapterOptions, total=False):
  """Options of adapters whose library has no argument for the precision of the products."""

  precision: jax.lax.PrecisionLike
  compute_dtype: DTypeLike | None


def check(function: str, options: Mapping[str, object], known: type,
          own: Mapping[str, str]) -> None:
  """Checks the names of the options of an adapter.

  Args:
    function: name of the adapter, for errors.
    options: as the caller gave them.
    known: the TypedDict of its options.
    own: keyword of `attention` -> the argument of the adapter that says the same.

  Raises:
    TypeError: an unknown option, or one that an argument of the adapter says.
  """
  for name in options:
    wrong = f"{function}() got an unexpected keyword argument {name!r}"
    if name in own:
      raise TypeError(f"{wrong}; here it is {own[name]!r}")
    if name not in known.__annotations__:
      other = " (`attention` has it)" if name in AttentionOptions.__annotations__ else ""
      raise TypeError(f"{wrong}{other}; the options are {', '.join(known.__annotations__)}")
