# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns the pages of a pool to requests, on the host, with prefix sharing and copy on write.

An `Allocator` is a value: every function returns a new one, or raises and changes nothing, and the
old one stays usable. Requests may share pages: a fork of a request owns its pages as well, and the
first owner that writes to a shared page gets a copy.

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

Pages whose contents are published are found again by their tokens, also after their last owner has
released them, until the pool needs them for other tokens.

The time of every function grows with the pages that it changes, or returns, and not with the pool.
An `Allocator` is not used by several threads at once.

Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180; Zheng et al., SGLang (prefixes kept
for later requests), https://arxiv.org/abs/2312.07104.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from attn_core import checks
from attn_core.caches.paged import page_pool
from attn_core.caches.paged.allocator_state import (
    COUNT, DIGESTS, LENGTH, PAGES, RELEASED, Allocator, Copies, Request, Row, State, Statistics,
    add_row, after, found, grow, shorten)
from attn_core.caches.paged.versions import Changes, Version
from attn_core.types import cdiv

Tokens = Sequence[int] | np.ndarray


class OutOfPages(RuntimeError):
  """The request needs more pages than are free; nothing was changed."""


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
  return Allocator(Version(State(num_pages, page_size)))


def add(allocator: Allocator, name: Hashable, tokens: Tokens | None = None,
        salt: bytes = b"") -> Allocator:
  """Adds a request, which shares the published pages that hold the beginning of its tokens.

  Args:
    allocator: the pool.
    name: name of the new request.
    tokens: the request's token ids from position 0. Leave out the last one: its output is needed,
      so that it must be computed. None: the request begins without tokens.
    salt: requests of other salts do not share pages; for example the name of an adapter's weights,
      or a digest of a picture among the tokens.

  Returns:
    The allocator with the request, whose length is the number of tokens that were found, a multiple
    of the page size.

  Raises:
    ValueError: the name is in use, `salt` is not bytes, or the tokens are not integers.
  """
  state = allocator.version.state()
  checks.require(name not in state.rows, "name", repr(name), "a name that is not in use")
  checks.require(isinstance(salt, bytes), "salt", repr(salt), "bytes")
  pool, size, changes = state.pool, state.page_size, Changes()
  digests, cached = {-1: page_pool.digest_of(salt)}, []
  if tokens is not None:
    for n in range(len(tokens) // size):
      digest = page_pool.next_digest(digests[n - 1], tokens[n * size:(n + 1) * size])
      if digest not in pool.pages:
        break
      digests[n] = digest
      cached.append(pool.pages[digest])
    for page in cached:
      page_pool.own(pool, changes, page)
    page_pool.count(pool, changes, "asked", len(tokens))
    page_pool.count(pool, changes, "found", len(cached) * size)
  add_row(state, changes, name, cached, len(cached) * size, 0, digests)
  return after(allocator, changes)


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
    ValueError: the parent does not exist, the name is in use, or `length` is not an int from the
      tokens that `release_before` released to the tokens of the parent.
  """
  state, of_parent = found(allocator, parent)
  checks.require(name not in state.rows, "name", repr(name), "a name that is not in use")
  size, changes = state.page_size, Changes()
  least = of_parent[RELEASED] * size
  checks.integer("length", length, f"an int from {least} to the {of_parent[LENGTH]} tokens of "
                 f"{parent!r}", lambda x: least <= x <= of_parent[LENGTH])
  shared = of_parent[PAGES][:cdiv(length, size)].tolist()
  for page in shared:
    if page >= 0:
      page_pool.own(state.pool, changes, page)
  digests = {n: x for n, x in of_parent[DIGESTS].items() if n < length // size}
  add_row(state, changes, name, shared, length, of_parent[RELEASED], digests)
  return after(allocator, changes)


def extend(allocator: Allocator, name: Hashable, tokens: int) -> tuple[Allocator, Copies]:
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
  return extend_all(allocator, {name: tokens})


def extend_all(allocator: Allocator,
               tokens: Mapping[Hashable, int]) -> tuple[Allocator, Copies]:
  """Assigns the pages for more tokens at the ends of several requests, or of none.

  Args:
    allocator: the pool.
    tokens: number of tokens to add, by name of the request.

  Returns:
    (allocator, copies), as `extend` of one request after another.

  Raises:
    ValueError: a request does not exist, or a number of tokens is not an int >= 0.
    OutOfPages: there are too few free pages for all of them.
  """
  state = allocator.version.state()
  size, pool = state.page_size, state.pool
  left, wanted = page_pool.available(pool), []
  leaving: dict[int, int] = {}  # owners of a shared page that get a copy
  for name, more in tokens.items():
    if type(more) is not int or more < 0:
      checks.integer("tokens", more, "an int >= 0", lambda x: x >= 0)
    row = found(allocator, name)[1]
    before = row[LENGTH]
    length, shared = before + more, False
    if more and before % size:  # of the pages that the request has, only the last is written
      page = int(row[PAGES][row[COUNT] - 1])
      shared = pool.owners[page] - leaving.get(page, 0) > 1
      if shared:
        leaving[page] = leaving.get(page, 0) + 1
    needed = -(-length // size) - row[COUNT] + shared
    if needed > left:
      raise OutOfPages(f"request {name!r} needs {needed} pages for {length} tokens; {left} of "
                       f"{len(pool.owners)} are free")
    left -= needed
    wanted.append((row, length, needed, shared))
  changes, copies = Changes(), list[tuple[int, int]]()
  for row, length, needed, shared in wanted:
    if length > row[LENGTH]:
      copies.extend(grow(state, changes, row, length, needed, shared))
  return after(allocator, changes), tuple(copies)


def publish(allocator: Allocator, name: Hashable, tokens: Tokens) -> Allocator:
  """Lets later requests find the full pages of a request by its tokens.

  >>> pool, _ = extend(add(create(num_pages=4, page_size=2), "a"), "a", tokens=3)
  >>> pool = release(publish(pool, "a", tokens=[5, 6, 7]), "a")
  >>> add(pool, "b", tokens=[5, 6, 8, 9]).requests["b"]
  Request(pages=(0,), length=2)

  Args:
    allocator: the pool.
    name: name of the request.
    tokens: the request's token ids from position 0, of those whose keys and values are written.

  Returns:
    The allocator, in which `add` finds these pages. Only pages that were not published yet take
    time.

  Raises:
    ValueError: the request does not exist, has fewer tokens, or the tokens are not integers.
  """
  state, row = found(allocator, name)
  size, changes, digests = state.page_size, Changes(), row[DIGESTS]
  checks.require(len(tokens) <= row[LENGTH], "tokens", f"{len(tokens)} tokens",
                 f"at most the {row[LENGTH]} tokens of {name!r}")
  for n in range(len(digests) - 1, len(tokens) // size):
    digest = page_pool.next_digest(digests[n - 1], tokens[n * size:(n + 1) * size])
    changes.set(digests, n, digest)
    page = int(row[PAGES][n])
    if page >= 0:
      page_pool.publish(state.pool, changes, page, digest)
  return after(allocator, changes)


def truncate(allocator: Allocator, name: Hashable, length: int) -> Allocator:
  """Removes the last tokens of a request, for example rejected drafts, and the pages of only those.

  Args:
    allocator: the pool.
    name: name of the request.
    length: number of tokens to keep.

  Returns:
    The allocator with the shorter request.

  Raises:
    ValueError: the request does not exist, or `length` is not an int from the tokens that
      `release_before` released to the tokens of the request.
  """
  return truncate_all(allocator, {name: length})


def truncate_all(allocator: Allocator, lengths: Mapping[Hashable, int]) -> Allocator:
  """Removes the last tokens of several requests, or of none.

  Args:
    allocator: the pool.
    lengths: number of tokens to keep, by name of the request.

  Returns:
    The allocator, as after `truncate` of one request after another.

  Raises:
    ValueError: as by `truncate`; nothing was changed.
  """
  state, rows = allocator.version.state(), list[tuple[Row, int]]()
  for name, length in lengths.items():
    row = found(allocator, name)[1]
    least = row[RELEASED] * state.page_size
    if type(length) is not int or not least <= length <= row[LENGTH]:
      checks.integer("length", length,
                     f"an int from {least} to the {row[LENGTH]} tokens of {name!r}",
                     lambda x: least <= x <= row[LENGTH])
    rows.append((row, length))
  changes = Changes()
  for row, length in rows:
    shorten(state, changes, row, length)
  return after(allocator, changes)


def release_before(allocator: Allocator, name: Hashable, position: int) -> Allocator:
  """Releases the pages of a request whose tokens all lie before a position.

  With a sliding window of `left` tokens, queries from position t on do not see tokens before
  t - left, so that their pages can hold others' tokens.

  Args:
    allocator: the pool.
    name: name of the request.
    position: the first token that is still needed.

  Returns:
    The allocator; the request's length and the columns of its table stay as they are. Calls of
    attention need the `sliding_window`, which does not reach the released pages.

  Raises:
    ValueError: the request does not exist, or `position` is not an int from 0 to its tokens.
  """
  state, row = found(allocator, name)
  checks.integer("position", position, f"an int from 0 to the {row[LENGTH]} tokens of {name!r}",
                 lambda x: 0 <= x <= row[LENGTH])
  first, last, changes = row[RELEASED], position // state.page_size, Changes()
  for n in range(last - 1, first - 1, -1):
    page_pool.disown(state.pool, changes, int(row[PAGES][n]))
    changes.set(row[PAGES], n, -1)
  changes.set(row, RELEASED, max(first, last))
  return after(allocator, changes)


def release(allocator: Allocator, name: Hashable) -> Allocator:
  """Removes a request; pages that no other request owns become free.

  Args:
    allocator: the pool.
    name: name of the request.

  Returns:
    The allocator without the request. Its published pages stay in place until the pool needs them.

  Raises:
    ValueError: the request does not exist.
  """
  state, row = found(allocator, name)
  changes = Changes()
  # The last page first: of the pages that are kept, those of the beginning are found most.
  for page in row[PAGES][row[RELEASED]:row[COUNT]][::-1].tolist():
    page_pool.disown(state.pool, changes, page)
  changes.delete(state.rows, name)
  return after(allocator, changes)


def table(allocator: Allocator, names: Iterable[Hashable], width: int) -> np.ndarray:
  """Returns the page table of some requests.

  Args:
    allocator: the pool.
    names: names of requests, one per row.
    width: columns of the table (pages).

  Returns:
    A numpy array, int32 [num_requests, width]; 0 past a request's last page, and for the pages that
    `release_before` released.

  Raises:
    ValueError: a request does not exist or has more than `width` pages, or `width` is not an
      int >= 0.
  """
  names, width = tuple(names), checks.integer("width", width, "an int >= 0", lambda x: x >= 0)
  rows = np.zeros((len(names), width), np.int32)
  for row, name in zip(rows, names):
    _, held = found(allocator, name)
    first, last = held[RELEASED], held[COUNT]
    checks.require(last <= width, "width", width, f"at least the {last} pages of request {name!r}")
    row[first:last] = held[PAGES][first:last]
  return rows


def length(allocator: Allocator, name: Hashable) -> int:
  """Returns the number of tokens of a request; ValueError if it does not exist."""
  return found(allocator, name)[1][LENGTH]


def statistics(allocator: Allocator) -> Statistics:
  """Counts pages and tokens, since the allocator was created.

  Args:
    allocator: the pool.

  Returns:
    `Statistics`. Its fragmentation counts a shared page once for each owner; it takes time for
    every request.
  """
  state = allocator.version.state()
  counts, size = state.pool.counts, state.page_size
  slots = size * sum(row[COUNT] for row in state.rows.values())
  filled = sum(row[LENGTH] for row in state.rows.values())
  return Statistics(len(state.pool.owners), counts["free"], counts["idle"], counts["evicted"],
                    counts["asked"], counts["found"], (slots - filled) / max(slots, 1))
