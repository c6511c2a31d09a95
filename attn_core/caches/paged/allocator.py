# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns the pages of a pool to requests, on the host, with prefix sharing and copy on write.

An `Allocator` is a value: every function returns a new one, or raises and changes nothing. Requests
may share pages: a fork of a request owns its pages as well, and the first owner that writes to a
shared page gets a copy.

>>> from attn_core.caches.paged import allocator
>>> pool = allocator.add(allocator.create(num_pages=4, page_size=2), "a")
>>> pool, _ = allocator.extend(pool, "a", tokens=3)
>>> pool = allocator.fork(pool, "a", "b", length=3)  # shares pages 0 and 1
>>> pool, copies = allocator.extend(pool, "b", tokens=1)  # the token is written to a copy of page 1
>>> copies
((1, 2),)
>>> allocator.table(pool, ["a", "b"], width=2)
array([[0, 1],
       [0, 2]], dtype=int32)

Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from typing import Hashable, Iterable, Mapping, NamedTuple

import numpy as np

from attn_core import checks
from attn_core.types import cdiv


class OutOfPages(RuntimeError):
  """The request needs more pages than are free; nothing was changed."""


class Request(NamedTuple):
  """The pages of one request."""

  pages: tuple[int, ...]  # in the order of positions
  length: int  # tokens


class Allocator(NamedTuple):
  """A pool of pages and the requests that own them."""

  page_size: int  # tokens
  free: tuple[int, ...]  # the last one is assigned next
  owners: tuple[int, ...]  # number of requests that own each page
  requests: Mapping[Hashable, Request]


def create(num_pages: int, page_size: int) -> Allocator:
  """Makes the allocator of a pool whose pages are all free.

  Args:
    num_pages: pages of the pool, as in `pages.init`.
    page_size: tokens of a page.

  Returns:
    An Allocator without requests.

  Raises:
    ValueError: an argument is not an int >= 1.
  """
  for name, size in (("num_pages", num_pages), ("page_size", page_size)):
    checks.integer(name, size, "an int >= 1", lambda x: x >= 1)
  return Allocator(page_size, tuple(range(num_pages))[::-1], (0,) * num_pages, {})


def add(allocator: Allocator, name: Hashable) -> Allocator:
  """Adds a request without tokens.

  Args:
    allocator: the pool.
    name: name of the new request.

  Returns:
    The allocator with the request, which does not own pages yet.

  Raises:
    ValueError: the name is in use.
  """
  checks.require(name not in allocator.requests, "name", repr(name), "a name that is not in use")
  return _replace(allocator, name, Request((), 0))


def fork(allocator: Allocator, parent: Hashable, name: Hashable, length: int) -> Allocator:
  """Adds a request that shares the first tokens of another request, and their pages.

  Args:
    allocator: the pool.
    parent: name of the request to share with.
    name: name of the new request.
    length: number of tokens to share.

  Returns:
    The allocator with the request; the number of free pages is unchanged.

  Raises:
    ValueError: the parent does not exist, the name is in use, or `length` is not an int from 0 to
      the number of tokens of the parent.
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
  """Assigns the pages for more tokens at the end of a request.

  Args:
    allocator: the pool.
    name: name of the request.
    tokens: number of tokens to add.

  Returns:
    (allocator, copies): pairs (page, page to copy it to) for `pages.copy_pages`, which must run
    before the tokens are written.

  Raises:
    ValueError: the request does not exist, or `tokens` is not an int >= 0.
    OutOfPages: there are too few free pages.
  """
  request, size = _request(allocator, name), allocator.page_size
  checks.integer("tokens", tokens, "an int >= 0", lambda x: x >= 0)
  length = request.length + tokens
  # Of the pages that the request has, new tokens are written to the last one only.
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
  """Removes a request; pages that no other request owns become free.

  Args:
    allocator: the pool.
    name: name of the request.

  Returns:
    The allocator without the request.

  Raises:
    ValueError: the request does not exist.
  """
  gone = _request(allocator, name)
  owners = _count(allocator.owners, gone.pages, -1)
  freed = tuple(page for page in gone.pages if owners[page] == 0)
  rest = {key: value for key, value in allocator.requests.items() if key != name}
  return allocator._replace(free=allocator.free + freed[::-1], owners=owners, requests=rest)


def table(allocator: Allocator, names: Iterable[Hashable], width: int) -> np.ndarray:
  """Returns the page table of some requests.

  Args:
    allocator: the pool.
    names: names of requests, one per row.
    width: columns of the table (pages).

  Returns:
    A numpy array, int32 [num_requests, width]; 0 past a request's last page.

  Raises:
    ValueError: a request does not exist or has more than `width` pages, or `width` is not an
      int >= 0.
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
  """Adds `step` to the number of owners of some pages."""
  counts = list(owners)
  for page in pages:
    counts[page] += step
  return tuple(counts)
