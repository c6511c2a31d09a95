# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""A typed program with one mistake per marked line, each of which a type checker must find."""

import jax

from attn_core import BlockSizes, PagedOptions, attention, explain, flash_attn2, masks


def mistakes(x: jax.Array) -> None:
  attention("query", x, x)  # error: arg-type
  attention(x, x)  # error: call-arg
  attention(x, x, x, layout="btdh")  # error: arg-type
  attention(x, x, x, sliding_window="4")  # error: arg-type
  attention(x, x, x, window=4)  # error: call-arg
  attention(x, x, x, mask=masks)  # error: arg-type
  attention(x, x, x, "flash_attn2")  # error: call-arg
  attention(x, x, x).lse.sum()  # error: union-attr
  flash_attn2(x, x, x, mechanism="vanilla")  # error: call-arg
  flash_attn2(x, x, x, logits_soft_cap="30")  # error: arg-type
  explain(x, x, x, mode="train")  # error: arg-type
  chosen: str = explain(x, x, x).chosen  # error: assignment
  BlockSizes(block_q="128")  # error: arg-type
  PagedOptions(causal=None)  # error: arg-type
  print(chosen)
