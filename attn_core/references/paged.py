# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Definition of attention over pages: gathers each request to dense arrays.

Written to be read, in any float dtype; a request's tokens are read in order from its pages, and
`oracle.attention` computes the result. It does not import kernels. T is the number of tokens of
the call.
"""

from typing import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from attn_core.masks import constructors
from attn_core.references import oracle
from attn_core.score_mods import score_mod
from attn_core.types import AttentionSpec, MaskOperands, Operands, PagedSpec


def tokens(key_pages: jax.Array, value_pages: jax.Array, table: ArrayLike,
           length: int) -> tuple[jax.Array, jax.Array]:
  """Returns a request's keys [S, K, D] and values [S, K, E].

  Args:
    key_pages: dequantized keys [K, P, page_size, D].
    value_pages: dequantized values [K, P, page_size, E].
    table: int [row_pages], the request's pages in order.
    length: S.
  """
  page, slot = np.divmod(np.arange(length), key_pages.shape[2])
  number = np.asarray(table)[page]
  rows = lambda x: x[:, number, slot].swapaxes(0, 1)
  return rows(key_pages), rows(value_pages)


def attention(query: jax.Array, requests: Sequence[tuple[int, jax.Array | None, jax.Array | None]],
              spec: PagedSpec, sinks: jax.Array | None = None,
              mods: tuple[jax.Array, ...] = ()) -> tuple[jax.Array, jax.Array]:
  """Computes attention of every request's queries to its own tokens.

  Args:
    query: [T, H, D], the requests' queries one after the other.
    requests: a list of (number of queries, keys [S, K, D], values [S, K, E]); the queries are the
      last ones of the S tokens. Keys and values are None for a request without tokens.
    spec: what to compute; everything is computed in the operands' dtype.
    sinks: [H] or None.
    mods: arrays of the score mod, [1, H or 1, ...]; those per query have T of them, and positions
      count a request's tokens.

  Returns:
    out [T, H, E] and lse [H, T]; 0 and -inf for tokens outside of all requests.
  """
  width = next((value.shape[-1] for _, _, value in requests if value is not None), query.shape[-1])
  out, lse, start = [], [], 0
  for number, key, value in requests:
    rows, start = query[start:start + number], start + number
    if not number:
      continue
    if key is None:
      alone = jnp.full((query.shape[1],), -jnp.inf) if sinks is None else sinks
      out.append(jnp.zeros((number, query.shape[1], width), query.dtype))
      lse.append(jnp.broadcast_to(alone[:, None], (query.shape[1], number)))
      continue
    structure, mask = _mask(number, key.shape[0], spec)
    dense = AttentionSpec(structure, spec.softmax_scale, spec.logits_soft_cap,
                          score_mod=spec.score_mod)
    roles = score_mod.structure_roles(spec.score_mod)
    own = tuple(x[:, :, start - number:start] if role == score_mod.PAIR and x.shape[2] > 1 else x
                for x, role in zip(mods, roles))
    assert value is not None
    found = oracle.attention(Operands(rows[None], key[None], value[None], mask=mask,
                                      sinks=None if sinks is None else sinks[None], mods=own),
                             dense)
    assert found.lse is not None
    out.append(found.attention_outputs[0])
    lse.append(found.lse[0])
  rest = query.shape[0] - start
  out.append(jnp.zeros((rest, query.shape[1], width), query.dtype))
  lse.append(jnp.full((query.shape[1], rest), -jnp.inf, query.dtype))
  return jnp.concatenate(out), jnp.concatenate(lse, 1)


def _mask(queries: int, keys: int,
          spec: PagedSpec) -> tuple[jax.tree_util.PyTreeDef, MaskOperands]:
  """Returns the mask of the last `queries` of `keys` tokens, token by token."""
  left, right = spec.window
  def sees(query: int, key: int) -> bool:
    return ((not spec.causal or key <= query) and (left is None or key >= query - left)
            and (right is None or key <= query + right)
            and (spec.chunk_size is None or key // spec.chunk_size == query // spec.chunk_size))
  seen = np.array([[sees(keys - queries + t, s) for s in range(keys)] for t in range(queries)])
  at = np.arange(keys, dtype=np.int32)[None]
  mask = constructors.positions(at[:, keys - queries:], at, constructors.dense(seen[None, None]))
  leaves, structure = jax.tree.flatten(mask)
  return structure, MaskOperands(tuple(map(jnp.asarray, leaves)))
