# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who owns which page: host side, plain Python, with prefix sharing and copy on write.

An `Allocator` is a value; every function returns a new one beside its answer, or raises and
changes nothing. Pages are counted by their owners: a fork of a request owns its pages too, and the
first to write into a page that others own as well gets a copy.

Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from typing import Hashable, Iterable, Mapping, NamedTuple

import numpy as np

from attn_core import checks
from attn_core.types import cdiv


class OutOfPages(RuntimeError):
  """There are fewer free pages than the request needs; nothing was changed."""


class Request(NamedTuple):
  """The pages of one request."""

  pages: tuple[int, ...]  # in the order of positions
  length: int  # tokens


class Allocator(NamedTuple):
  """A pool of pages and who owns them."""

  page_size: int  # tokens
  free: tuple[int, ...]  # the last one is given next
  owners: tuple[int, ...]  # by page: how many requests own it
  requests: Mapping[Hashable, Request]


def create(num_pages: int, page_size: int) -> Allocator:
  """A pool of free pages.

  Args:
    num_pages: pages of the pool, as that of `pages.init`.
    page_size: tokens of a page.

  Returns:
    An Allocator without requests.

  Raises:
    ValueError: one of the two is no int >= 1.
  """
  for name, size in (("num_pages", num_pages), ("page_size", page_size)):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  return Allocator(page_size, tuple(range(num_pages))[::-1], (0,) * num_pages, {})


def add(allocator: Allocator, name: Hashable) -> Allocator:
  """A new request of no tokens.

  Args:
    allocator: the pool.
    name: of the new request.

  Returns:
    The allocator with the request, which owns no page yet.

  Raises:
    ValueError: there is one of that name.
  """
  checks.require(name not in allocator.requests, "name", repr(name), "a name that is not in use")
  return _replace(allocator, name, Request((), 0))


def fork(allocator: Allocator, parent: Hashable, name: Hashable, length: int) -> Allocator:
  """A new request that shares the first tokens of another, and their pages.

  Args:
    allocator: the pool.
    parent: the request to share with.
    name: of the new request.
    length: tokens to share, from 0 to those of the parent.

  Returns:
    The allocator with the request; no page is taken.

  Raises:
    ValueError: no such parent, a name in use, or a `length` that is no int from 0 to the tokens of
      the parent.
  """
  of_parent = _request(allocator, parent)
  checks.require(name not in allocator.requests, "name", repr(name), "a name that is not in use")
  checks.integer("length", length, f"an int from 0 to the {of_parent.length} tokens of {parent!r}",
                 lambda x: 0 <= x <= of_parent.length)
  shared = of_parent.pages[:cdiv(length, allocator.page_size)]
  allocator = allocator._replace(owners=_count(allocator.owners, shared, 1))
  return _replace(allocator, name, Request(shared, length))


def extend(allocator: Allocator, name: Hashable,
           tokens: int) -> tuple[Allocator, tuple[tuple[int, int], ...]]:
  """Room for more tokens at the end of a request.

  Args:
    allocator: the pool.
    name: of the request.
    tokens: how many.

  Returns:
    (allocator, copies): pairs (page, page to copy it to) to carry out before the tokens are
    written, with `pages.copy_pages`.

  Raises:
    ValueError: no such request, or `tokens` that are no int >= 0.
    OutOfPages: there are too few free pages.
  """
  request, size = _request(allocator, name), allocator.page_size
  checks.integer("tokens", tokens, "an int >= 0", lambda x: x >= 0)
  length = request.length + tokens
  # Only the last page can be written to that is already there.
  shared = tokens and request.length % size and allocator.owners[request.pages[-1]] > 1
  kept = request.pages[:-1] if shared else request.pages
  needed = cdiv(length, size) - len(kept)
  if needed > len(allocator.free):
    raise OutOfPages(f"request {name!r} needs {needed} pages for {length} tokens; "
                     f"{len(allocator.free)} of {len(allocator.owners)} are free")
  new = allocator.free[len(allocator.free) - needed:][::-1]
  owners = _count(_count(allocator.owners, request.pages[len(kept):], -1), new, 1)
  allocator = allocator._replace(free=allocator.free[:len(allocator.free) - needed], owners=owners)
  copies = ((request.pages[-1], new[0]),) if shared else ()
  return _replace(allocator, name, Request(kept + new, length)), copies


def release(allocator: Allocator, name: Hashable) -> Allocator:
  """Ends a request; pages that nobody else owns become free.

  Args:
    allocator: the pool.
    name: of the request.

  Returns:
    The allocator without the request.

  Raises:
    ValueError: no such request.
  """
  gone = _request(allocator, name)
  owners = _count(allocator.owners, gone.pages, -1)
  freed = tuple(page for page in gone.pages if owners[page] == 0)
  rest = {key: value for key, value in allocator.requests.items() if key != name}
  return allocator._replace(free=allocator.free + freed[::-1], owners=owners, requests=rest)


def table(allocator: Allocator, names: Iterable[Hashable], width: int) -> np.ndarray:
  """The page table of some requests.

  Args:
    allocator: the pool.
    names: of R requests, in the order of the rows.
    width: N, columns of the table (pages).

  Returns:
    int32 [R, N], of numpy; 0 past a request's last page.

  Raises:
    ValueError: no such request, one with more pages than the width, or a width that is no int >= 0.
  """
  names, width = tuple(names), checks.integer("width", width, "an int >= 0", lambda x: x >= 0)
  rows = np.zeros((len(names), width), np.int32)
  for row, name in zip(rows, names):
    held = _request(allocator, name).pages
    checks.require(len(held) <= width, "width", width, f"at least the {len(held)} pages of request "
                   f"{name!r}")
    row[:len(held)] = held
  return rows


def _request(allocator: Allocator, name: Hashable) -> Request:
  checks.require(name in allocator.requests, "name", repr(name), "a request of the allocator")
  return allocator.requests[name]


def _replace(allocator: Allocator, name: Hashable, request: Request) -> Allocator:
  return allocator._replace(requests={**allocator.requests, name: request})


def _count(owners: tuple[int, ...], pages: tuple[int, ...], step: int) -> tuple[int, ...]:
  """One owner more or less for each of some pages."""
  counts = list(owners)
  for page in pages:
    counts[page] += step
  return tuple(counts)
