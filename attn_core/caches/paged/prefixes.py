# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pages that several requests share, which a call reads once for all of them.

Requests that begin with the same pages form a group, those of a group that share more pages form
groups of the next level, and so on: a tree. A call with a `Prefixes` in its `PagesMetadata` attends
to the pages of every group by the queries of all its requests together, to the other pages request
by request, and merges the results. The values are those of a call without, except for rounding.
Plain XLA and the kernel for TPUs compute such calls; Hopper GPUs run plain XLA.

A result's bits depend on where the pages of its request are cut, and not on the other requests. To
get the same bits in any batch, cut every request that begins with a prefix after that prefix: with
`min_requests=1`, `page_counts` of the prefix alone, so that requests that share a page share all
pages counted, and `num_levels=1`, `find` does so for one request too. Calls of other shapes need
the same `block_sizes` as well: those chosen for you depend on shapes.

>>> import numpy as np
>>> from attn_core.caches import prefixes
>>> tables = np.array([[5, 6, 0, 0], [5, 6, 1, 2], [9, 0, 0, 0]], np.int32)
>>> found = prefixes.find(tables, np.array([2, 4, 1]), min_requests=2)
>>> found.page_tables[0, 0]
array([5, 6, 0, 0], dtype=int32)
>>> found.page_counts[0], found.rows[0]  # the first two requests, then the other
(array([2, 0, 0], dtype=int32), array([0, 2, 3, 3], dtype=int32))

Juravsky et al., Hydragen, https://arxiv.org/abs/2402.05099.

Shapes: R requests, max_pages of a request, num_levels of the tree.
"""

from types import ModuleType
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from attn_core import checks
from attn_core.array_axes import count_reached

Array = jax.Array | np.ndarray


class Prefixes(NamedTuple):
  """The groups of requests on every level, each with the pages that it adds to those above it."""

  page_tables: Array  # int32 [num_levels, R, max_pages]; entries past a group's last are not read
  page_counts: Array  # int32 [num_levels, R]: pages of each group, which may be 0
  # int32 [num_levels, R + 1]: group n has the requests order[rows[n]:rows[n + 1]]. All requests are
  # in some group; those past the last one are empty.
  rows: Array
  order: Array  # int32 [R]: the requests, those of every group next to each other


def find(page_tables: ArrayLike, page_counts: ArrayLike, num_levels: int = 1,
         min_requests: int = 4) -> Prefixes:
  """Finds the requests that begin with the same pages, on the host.

  Args:
    page_tables: int [R, max_pages], as in `PagesMetadata`.
    page_counts: int [R]: full pages of each request that hold no token of the call itself, which
      alone are shared; 0 for a row that is not in use.
    num_levels: depth of the tree; more levels find more that is shared, and each costs a pass.
    min_requests: the smallest group whose pages are read together; few take longer together than
      one by one. 1: groups of one request, too, cut after its page_counts. A result has the same
      bits alone if requests that share a page share all pages that page_counts names, and
      num_levels is 1.

  Returns:
    A `Prefixes` of numpy arrays, whose shapes depend on R, max_pages and num_levels only.

  Raises:
    ValueError: tables are not integers [R, max_pages], counts not integers [R] from 0 to max_pages,
      num_levels is not an int >= 1, or min_requests not an int >= 1.
  """
  tables, counts = np.asarray(page_tables), np.asarray(page_counts)
  checks.require(tables.ndim == 2 and np.issubdtype(tables.dtype, np.integer), "page_tables",
                 checks.describe(tables), "int [R, max_pages]")
  requests, width = tables.shape
  checks.require(counts.shape == (requests,) and np.issubdtype(counts.dtype, np.integer)
                 and bool(((0 <= counts) & (counts <= width)).all()), "page_counts",
                 counts.tolist(), f"int [{requests}], numbers from 0 to {width}")
  checks.integer("num_levels", num_levels, "an int >= 1", lambda x: x >= 1)
  checks.integer("min_requests", min_requests, "an int >= 1", lambda x: x >= 1)
  # What is not shared differs from row to row.
  own = np.where(np.arange(width) < counts[:, None], tables, -1 - np.arange(requests)[:, None])
  order = np.array(sorted(range(requests), key=lambda row: own[row].tobytes()), np.int32)
  own, counts = own[order], counts[order]
  shared = np.cumprod(own[1:] == own[:-1], axis=1).sum(1)  # pages that neighbors share
  found = Prefixes(np.zeros((num_levels, requests, width), np.int32),
                   np.zeros((num_levels, requests), np.int32),
                   np.full((num_levels, requests + 1), requests, np.int32), order)
  groups = [(0, requests, 0)]  # (first, end, pages above)
  for level in range(num_levels):
    parts = [part for group in groups for part in _parts(group, shared, counts, min_requests)]
    for n, (first, _, above, count) in enumerate(parts):
      found.page_tables[level, n, :count] = own[first, above:above + count]
      found.page_counts[level, n] = count
      found.rows[level, n] = first
    groups = [(first, end, above + count) for first, end, above, count in parts]
  return found


def _parts(group: tuple[int, int, int], shared: np.ndarray, counts: np.ndarray,
           min_requests: int) -> list[tuple[int, int, int, int]]:
  """Divides a group into those of the next level: (first, end, pages above, own pages)."""
  first, end, above = group
  parts: list[tuple[int, int, int, int]] = []
  while first < end:
    last = first
    while last + 1 < end and shared[last] > above:
      last += 1
    if last + 1 - first >= min_requests:
      count = shared[first:last].min(initial=counts[first])  # one request shares all its own
      parts.append((first, last + 1, above, int(count) - above))
      first = last + 1
    else:  # joined to the neighbors that share nothing either
      if parts and parts[-1][3] == 0:
        parts[-1] = (parts[-1][0], last + 1, above, 0)
      else:
        parts.append((first, last + 1, above, 0))
      first = last + 1
  return parts


def pages_of_requests(prefixes: Prefixes, xp: ModuleType = jnp) -> Array:
  """Counts the pages at the beginning of each request that groups read.

  Args:
    prefixes: the groups.
    xp: numpy, or jax.numpy.

  Returns:
    int32 [R].
  """
  pages = xp.zeros(len(prefixes.order), xp.int32)
  for level in range(len(prefixes.rows)):
    pages = pages + _pages_by_place(prefixes, level, xp)
  return pages[xp.argsort(prefixes.order)]


def agree(prefixes: Prefixes, page_tables: Array, xp: ModuleType = jnp) -> Array:
  """Returns whether the groups' pages are the first of each of their requests, bool [].

  Args:
    prefixes: the groups.
    page_tables: int32 [R, max_pages].
    xp: numpy, or jax.numpy.
  """
  requests, width = page_tables.shape
  good = (xp.sort(prefixes.order) == xp.arange(requests)).all()
  own, column = page_tables[xp.clip(prefixes.order, 0, requests - 1)], xp.arange(width)
  above = xp.zeros(requests, xp.int32)
  for level, (rows, counts) in enumerate(zip(prefixes.rows, prefixes.page_counts)):
    good = good & ((rows[0] == 0) & (rows[-1] == requests) & (rows[1:] >= rows[:-1]).all()
                   & (counts >= 0).all())
    end = above + _pages_by_place(prefixes, level, xp)
    inside = (column >= above[:, None]) & (column < end[:, None])
    expected = xp.take_along_axis(
        prefixes.page_tables[level][_group_of_place(rows, xp)],
        xp.clip(column - above[:, None], 0, width - 1), axis=1)
    good = good & (~inside | (own == expected)).all() & (end <= width).all()
    above = end
  return good


def _pages_by_place(prefixes: Prefixes, level: int, xp: ModuleType) -> Array:
  """Returns the pages of the group on a level of each request, in their order, int32 [R]."""
  return prefixes.page_counts[level][_group_of_place(prefixes.rows[level], xp)]


def _group_of_place(rows: Array, xp: ModuleType) -> Array:
  """Returns the number of the group of each place in the order of the requests, int32 [R]."""
  requests = len(rows) - 1
  places = xp.arange(requests, dtype=xp.int32)
  reached = count_reached(*cast(tuple[jax.Array, jax.Array], (rows[1:], places)))
  return xp.minimum(reached, requests - 1)
