# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of drafted tokens, which one call over pages verifies.

The new tokens of a request are the nodes of a tree, of which each sees its ancestors, itself and
all tokens of the cache. They are written to the pages one after the other; `depths` gives what to
add to the length before the call for their positions in rotary embeddings. Of the accepted tokens,
`keep` moves the keys and values to the front, and `allocator.truncate` takes the others back.

Miao et al., SpecInfer, https://arxiv.org/abs/2305.09781.

>>> import numpy as np
>>> from attn_core.caches import drafts
>>> parents = np.array([[-1, 0, 0, 2]])  # two guesses after token 0, and one after the second
>>> drafts.mask(parents)[0].astype(int)
Array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [1, 0, 1, 0],
       [1, 0, 1, 1]], dtype=int32)
>>> drafts.depths(parents)
Array([[0, 1, 1, 2]], dtype=int32)

Shapes: R requests of up to q new tokens.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.caches.paged import layouts, slot_mapping, token_writes
from attn_core.caches.paged.layouts import Array, PagesMetadata, PagesT


def mask(parents: Array) -> jax.Array:
  """Makes the `draft_mask` of a `PagesMetadata` of the parents of new tokens.

  Args:
    parents: int [R, q]: the number of each token's parent among the new tokens of its request; -1
      for one that follows the cache, and for tokens that do not exist.

  Returns:
    bool [R, q, q]: whether the j-th token is an ancestor of the i-th, or is the i-th.

  Raises:
    ValueError: parents are not integers [R, q], or concrete and not those of trees; under jit see
      `is_forest`.
  """
  parents = _checked(parents)
  size = parents.shape[1]
  # A token sees itself and what its parent sees: parents come first, so one pass is enough.
  def add(i: jax.Array, seen: jax.Array) -> jax.Array:
    parent = parents[:, i]
    above = jnp.take_along_axis(seen, jnp.maximum(parent, 0)[:, None, None], 1)[:, 0]
    row = jnp.where((parent >= 0)[:, None], above, False) | (jnp.arange(size) == i)
    return seen.at[:, i].set(row)
  return jax.lax.fori_loop(0, size, add, jnp.zeros((*parents.shape, size), bool))


def depths(parents: Array) -> jax.Array:
  """Counts the ancestors of new tokens.

  Args:
    parents: as for `mask`.

  Returns:
    int32 [R, q].

  Raises:
    ValueError: as for `mask`.
  """
  return mask(parents).sum(2, dtype=jnp.int32) - 1


def is_forest(parents: Array) -> Array:
  """Returns whether every parent comes before its child, bool []: for use under jit.

  Args:
    parents: int [R, q].
  """
  own = np.arange(parents.shape[1])
  return ((parents >= -1) & (parents < own)).all()


def keep(cache: PagesT, pages_metadata: PagesMetadata, accepted: Array) -> PagesT:
  """Moves keys and values of accepted new tokens to the front of a request's new tokens.

  Args:
    cache: any layout, which holds the new tokens.
    pages_metadata: of the call that wrote them, without groups.
    accepted: int [R, n]: the numbers of accepted tokens among the new ones of each request, in
      rising order, then -1.

  Returns:
    The cache, in which the i-th accepted token is the i-th new one; those after them are to be
    truncated.

  Raises:
    ValueError: metadata of groups, or accepted are not integers [R, n].
  """
  pages_metadata = slot_mapping.of_one_pool(pages_metadata)
  requests, size = pages_metadata.context_lens.shape[0], layouts.page_size(cache)
  accepted = jnp.asarray(checks.int32("accepted", accepted, f"int [{requests}, n]"))
  checks.require(accepted.ndim == 2 and accepted.shape[0] == requests, "accepted",
                 checks.describe(accepted), f"int [{requests}, n], a row for each request")
  starts = layouts.query_starts(pages_metadata)
  number = (starts[1:] - starts[:-1])[:, None]
  first = pages_metadata.context_lens[:, None] - number
  live = (accepted >= 0) & (accepted < number)
  rows = jnp.arange(requests, dtype=jnp.int32)[:, None]
  place = jnp.broadcast_to(jnp.arange(accepted.shape[1], dtype=jnp.int32), accepted.shape)

  def slots(new: jax.Array) -> jax.Array:
    position = jnp.clip(first + new, 0, pages_metadata.page_tables.shape[1] * size - 1)
    return slot_mapping.slot_at(pages_metadata, rows, position, size, live).reshape(-1)
  return token_writes.move(cache, slots(accepted), slots(place))


def _checked(parents: Array) -> jax.Array:
  """Returns parents as a jax array, checked as `mask` documents."""
  parents = cast(Array, checks.int32("parents", parents, "int [R, q]"))
  checks.require(parents.ndim == 2, "parents", checks.describe(parents),
                 "int [R, q], a row for each request")
  if not isinstance(parents, jax.core.Tracer):
    checks.require(bool(is_forest(jnp.asarray(parents))), "parents", np.asarray(parents).tolist(),
                   "-1, or the number of a token before the child: those of trees")
  return jnp.asarray(parents)
