# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The value `Allocator`, and its state: a pool of pages, and a row for each request."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from attn_core import checks
from attn_core.caches.paged import page_pool
from attn_core.caches.paged.versions import Changes, Version
from attn_core.types import cdiv

# Entries of a request's row, which is a list so that `Changes` can set them. PAGES: int32 numpy
# array, of which the first COUNT entries are in use, -1 for the first RELEASED ones. DIGESTS: of
# the published pages by their index, and of what comes before them at index -1. SERIAL: its place
# in the order of requests.
PAGES, COUNT, LENGTH, RELEASED, DIGESTS, SERIAL = range(6)
Row = list[Any]

Copies = tuple[tuple[int, int], ...]  # pairs (page, page to copy it to)


class Request(NamedTuple):
  """The pages of one request."""

  pages: tuple[int, ...]  # in the order of positions; -1 where `release_before` released one
  length: int  # tokens


class Statistics(NamedTuple):
  """Numbers of pages and tokens of a pool, see `statistics`."""

  num_pages: int
  free: int  # pages without owners and without known contents
  idle: int  # pages without owners whose contents are kept until the pool needs them
  evicted: int  # idle pages that were needed for other tokens
  asked_tokens: int  # tokens of the requests that were added with their tokens
  found_tokens: int  # those of them whose pages were found
  fragmentation: float  # slots without a token, as a part of the slots of all requests

  @property
  def hit_rate(self) -> float:
    """The part of the asked tokens that was found."""
    return self.found_tokens / max(self.asked_tokens, 1)


class State:
  """The present state of an allocator."""

  __slots__ = ("page_size", "pool", "rows")

  def __init__(self, num_pages: int, page_size: int) -> None:
    self.page_size = page_size
    self.pool = page_pool.PagePool(num_pages)
    self.rows: dict[Hashable, Row] = {}


class Allocator:
  """A pool of pages and the requests that own them."""

  __slots__ = ("version",)

  def __init__(self, version: Version[State]) -> None:
    self.version = version

  @property
  def page_size(self) -> int:
    """Tokens of a page."""
    return self.version.state().page_size

  @property
  def num_pages(self) -> int:
    """Pages of the pool."""
    return len(self.version.state().pool.owners)

  @property
  def num_free(self) -> int:
    """Pages that can be assigned: those without owners."""
    return page_pool.available(self.version.state().pool)

  @property
  def owners(self) -> np.ndarray:
    """Returns the number of requests that own each page, int32 [num_pages]."""
    return np.array(self.version.state().pool.owners, np.int32)

  @property
  def requests(self) -> Mapping[Hashable, Request]:
    """The requests by name, in the order in which they were added."""
    return _Requests(self)

  def __repr__(self) -> str:
    return (f"Allocator(num_pages={self.num_pages}, page_size={self.page_size}, "
            f"num_free={self.num_free}, requests={list(self.requests)})")


class _Requests(Mapping[Hashable, Request]):
  """The requests of an allocator."""

  def __init__(self, allocator: Allocator) -> None:
    self._allocator = allocator

  def _rows(self) -> dict[Hashable, Row]:
    return self._allocator.version.state().rows

  def __getitem__(self, name: Hashable) -> Request:
    row = self._rows()[name]
    return Request(tuple(row[PAGES][:row[COUNT]].tolist()), row[LENGTH])

  def __contains__(self, name: object) -> bool:
    return name in self._rows()

  def __iter__(self) -> Iterator[Hashable]:
    rows = self._rows()
    return iter(sorted(rows, key=lambda name: rows[name][SERIAL]))

  def __len__(self) -> int:
    return len(self._rows())

  def __repr__(self) -> str:
    return repr(dict(self))


def add_row(state: State, changes: Changes, name: Hashable, pages: list[int], length: int,
            released: int, digests: dict[int, bytes]) -> None:
  """Adds the row of a request."""
  page_pool.count(state.pool, changes, "added", 1)
  changes.set(state.rows, name, [np.array(pages, np.int32), len(pages), length, released, digests,
                                 state.pool.counts["added"]])


def grow(state: State, changes: Changes, row: Row, length: int, needed: int,
         shared: bool) -> Copies:
  """Gives a request its new pages; returns the copies to make of its last one."""
  pool, count = state.pool, row[COUNT]
  copies: Copies = ()
  if row[LENGTH] % state.page_size:
    last = int(row[PAGES][count - 1])
    if shared:
      count -= 1
    elif last in pool.digests:
      page_pool.forget(pool, changes, last)
  if needed:
    if count + needed > len(row[PAGES]):
      larger = np.empty(2 * (count + needed), np.int32)
      larger[:row[COUNT]] = row[PAGES][:row[COUNT]]
      changes.set(row, PAGES, larger)
    for n in range(count, count + needed):
      page = page_pool.take(pool, changes)
      if shared and n == count:
        copies = ((last, page),)
        page_pool.disown(pool, changes, last)
      changes.set(row[PAGES], n, page)
    changes.set(row, COUNT, count + needed)
  changes.set(row, LENGTH, length)
  return copies


def shorten(state: State, changes: Changes, row: Row, length: int) -> None:
  """Takes the last tokens of a request, and the pages of only those."""
  kept = cdiv(length, state.page_size)
  for page in row[PAGES][kept:row[COUNT]][::-1].tolist():
    page_pool.disown(state.pool, changes, page)
  for n in range(length // state.page_size, len(row[DIGESTS]) - 1):
    changes.delete(row[DIGESTS], n)
  changes.set(row, COUNT, kept)
  changes.set(row, LENGTH, length)


def found(allocator: Allocator, name: Hashable) -> tuple[State, Row]:
  """Returns the state and the row of a request; ValueError if it does not exist."""
  state = allocator.version.state()
  if name not in state.rows:  # describing a name takes longer than finding its row
    checks.require(False, "name", repr(name), "a request of the allocator")
  return state, state.rows[name]


def after(allocator: Allocator, changes: Changes) -> Allocator:
  """Returns the allocator after changes of its state."""
  return Allocator(allocator.version.successor(changes))
