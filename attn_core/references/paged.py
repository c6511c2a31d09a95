"""The definition of attention over pages: every request gathered to dense arrays, one by one.

Written to be read, in any float dtype; a request's tokens come one after the other from its pages,
and then `oracle.attention` is the definition. Imports no kernel.

Letters: T tokens of the call, R requests, H query heads, K key heads, D and E widths, P pages.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.masks import leaves as algebra
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands, PagedSpec


def tokens(key_pages, value_pages, table, length: int):
  """A request's keys [S, K, D] and values [S, K, E] from pages [K, P, page, D] and [K, P, page, E].

  Args:
    key_pages: the keys, dequantised.
    value_pages: the values, dequantised.
    table: int [N], the request's pages in order.
    length: S.
  """
  size = key_pages.shape[2]
  places = [(int(table[p // size]), p % size) for p in range(length)]
  rows = lambda x: jnp.stack([x[:, page, slot] for page, slot in places])
  return rows(key_pages), rows(value_pages)


def attention(query, requests, spec: PagedSpec, sinks=None):
  """Attention of every request's queries to its own tokens.

  Args:
    query: [T, H, D], the requests' queries one after the other.
    requests: a list of (number of queries, keys [S, K, D], values [S, K, E]); the queries are the
      last ones of the S tokens. Of no tokens: keys and values are None.
    spec: what to compute; everything in the operands' own dtype.
    sinks: [H] or None.

  Returns:
    out [T, H, E] and lse [H, T]; tokens of no request: 0 and -inf.
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
    dense = AttentionSpec(structure, spec.softmax_scale, spec.logits_soft_cap)
    found = oracle.attention(Operands(rows[None], key[None], value[None], mask=mask,
                                      sinks=None if sinks is None else sinks[None]), dense)
    out.append(found.attention_outputs[0])
    lse.append(found.lse[0])
  rest = query.shape[0] - start
  out.append(jnp.zeros((rest, query.shape[1], width), query.dtype))
  lse.append(jnp.full((query.shape[1], rest), -jnp.inf, query.dtype))
  return jnp.concatenate(out), jnp.concatenate(lse, 1)


def _mask(queries: int, keys: int, spec: PagedSpec):
  """What the last `queries` of `keys` tokens see, token by token."""
  left, right = spec.window
  def sees(query, key):
    return ((not spec.causal or key <= query) and (left is None or key >= query - left)
            and (right is None or key <= query + right))
  seen = np.array([[sees(keys - queries + t, s) for s in range(keys)] for t in range(queries)])
  leaves, structure = jax.tree.flatten(algebra.dense(seen[None, None]))
  return structure, MaskOperands(tuple(map(jnp.asarray, leaves)))
