# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over some of the keys each, combined to that over all of them.

  lse = log(sum_i exp(lse_i)),   out = sum_i out_i * exp(lse_i - lse)

where out_i and lse_i are those of the keys of part i.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attn_core import checks
from attn_core.types import Array, ArrayLayout, AttentionOutput, at_least_float32

Reduction = Callable[[jax.Array], jax.Array]


def merge_partials(outs: Sequence[Array], lses: Sequence[Array],
                   layout: ArrayLayout = "bthd") -> AttentionOutput:
  """Merges the results of attention over separate keys into that over all keys.

    lse = log(sum_i exp(lse_i)),   out = sum_i out_i * exp(lse_i - lse)

  For example, a prefix that many requests share is attended to once, by all their queries, and the
  requests' own keys by themselves. All derivatives exist, also with regard to `lses`.
  Dao et al., Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.

  >>> from attn_core import attention, merge_partials
  >>> query, key = jnp.ones((1, 2, 1, 4)), jnp.arange(24.0).reshape(1, 6, 1, 4)
  >>> parts = [attention(query, x, x, causal=False, return_lse=True)
  ...          for x in jnp.split(key, 2, axis=1)]
  >>> merged = merge_partials([part.out for part in parts], [part.lse for part in parts])
  >>> bool(jnp.allclose(merged.out, attention(query, key, key, causal=False).out))
  True

  Args:
    outs: outputs over the keys of each part, floating [B, T, H, E] in layout bthd, [B, H, T, E] in
      bhtd, [T, H, E] in thd; of any dtypes. NaN where a part has no visible key is ignored.
    lses: the logsumexp of each part, floating [B, H, T], or [H, T] in layout thd; -inf where a
      query sees no key of the part. A logit without a key, such as a sink, belongs to one part.
    layout: that of the outputs.

  Returns:
    AttentionOutput with attention_outputs in the first output's dtype and lse, float32 or wider;
    0 and -inf where no part has a visible key.

  Raises:
    ValueError: the sequences are empty or differ in length, an array is not floating, or shapes
      differ.
  """
  checks.one_of("layout", layout, ("bthd", "bhtd", "thd"))
  checks.require(len(outs) == len(lses) > 0, "lses", f"{len(lses)} with {len(outs)} outs",
                 "as many as outs, at least one")
  rank = 3 if layout == "thd" else 4
  first = checks.floating("outs[0]", outs[0], rank, f"an output in layout {layout}").shape
  wanted = (*first[:-3], first[-2], first[-3]) if layout != "bhtd" else first[:-1]
  for n, (out, lse) in enumerate(zip(outs, lses)):
    for name, x, shape in ((f"outs[{n}]", out, first), (f"lses[{n}]", lse, wanted)):
      found = checks.floating(name, x, len(shape), f"floating {list(shape)}")
      checks.require(found.shape == shape, name, checks.describe(found), f"shape {list(shape)}")
  stacked = [jnp.stack([jnp.asarray(lse, at_least_float32(lse.dtype)) for lse in lses]),
             jnp.stack([jnp.asarray(out, at_least_float32(out.dtype)) for out in outs])]
  to_rows = (lambda x: x) if layout == "bhtd" else (lambda x: x.swapaxes(-1, -2))
  out, lse = combine_stacked(stacked[1], stacked[0], to_rows)
  return AttentionOutput(out.astype(outs[0].dtype), lse=lse)


def combine_stacked(out: jax.Array, lse: jax.Array,
                    to_rows: Reduction) -> tuple[jax.Array, jax.Array]:
  """Combines parts along the first axis, which the results do not have; see `combine`."""
  out, lse = combine(out, lse, to_rows, lambda x: x.max(0, keepdims=True),
                     lambda x: x.sum(0, keepdims=True))
  return out[0], lse[0]


def combine(out: jax.Array, lse: jax.Array, to_rows: Reduction, largest: Reduction,
            total: Reduction) -> tuple[jax.Array, jax.Array]:
  """Combines parts along an axis of the arrays, or along axes of a mesh.

  Args:
    out: [..., E], the output over the keys of a part.
    lse: its logsumexp; -inf where no key of the part is visible.
    to_rows: orders the axes of an lse as those of `out` are, without E.
    largest: the maximum over all parts.
    total: the sum over all parts.

  Returns:
    (out, lse) over all keys, not rounded to their dtypes.
  """
  m_i = jax.lax.stop_gradient(lse)
  # Without a visible key in any part the maximum is finite: -inf - -inf would be NaN.
  m_i = largest(jnp.where(m_i == -jnp.inf, jnp.finfo(lse.dtype).min, m_i))
  weight = jnp.exp(lse - m_i)
  l_i = total(weight)
  share = to_rows(weight / jnp.where(l_i == 0, 1, l_i))[..., None]
  hidden = to_rows(lse)[..., None] == -jnp.inf
  out = total(jnp.where(hidden, 0, out.astype(share.dtype)) * share)
  return out, jnp.where(l_i == 0, -jnp.inf, m_i + jnp.log(jnp.where(l_i == 0, 1, l_i)))
