# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Owners and contents of the pages of a pool; the state behind `allocator`.

A page is free, owned by one or more requests, or idle: without owners, and with tokens that a
request may ask for again. Pages are taken from the free ones, then from the idle ones, of which the
one that was idle longest is taken first.

Every function takes the `Changes` that remember what it did, and time for the pages that it is
given only.
"""

from array import array
from collections.abc import Sequence
import hashlib

import numpy as np

from attn_core import checks
from attn_core.caches.paged.versions import Changes

_END = -1  # the list of idle pages is a ring through this entry


class PagePool:
  """Pages by number; `free` is a stack of which `num_free` entries are in use."""

  __slots__ = ("owners", "free", "counts", "after", "before", "digests", "pages")

  def __init__(self, num_pages: int) -> None:
    self.owners = array("l", bytes(array("l").itemsize * num_pages))
    self.free = array("l", range(num_pages - 1, -1, -1))
    self.counts = {"free": num_pages, "idle": 0, "added": 0, "evicted": 0, "asked": 0,
                   "found": 0}
    self.after = {_END: _END}  # of the idle pages, in the order in which they lost their owners
    self.before = {_END: _END}
    self.digests: dict[int, bytes] = {}  # of the pages whose contents are known
    self.pages: dict[bytes, int] = {}


def count(pool: PagePool, changes: Changes, name: str, step: int) -> None:
  """Adds to one of the counts."""
  changes.set(pool.counts, name, pool.counts[name] + step)


def available(pool: PagePool) -> int:
  """Returns the number of pages without owners."""
  return pool.counts["free"] + pool.counts["idle"]


def take(pool: PagePool, changes: Changes) -> int:
  """Gives a page without owners its first one; at least one page is available."""
  if pool.counts["free"]:
    count(pool, changes, "free", -1)
    page = pool.free[pool.counts["free"]]
  else:
    page = pool.after[_END]
    _remove_from_idle(pool, changes, page)
    forget(pool, changes, page)
    count(pool, changes, "evicted", 1)
  changes.set(pool.owners, page, 1)
  return page


def own(pool: PagePool, changes: Changes, page: int) -> None:
  """Adds an owner to a page that is owned or idle."""
  if not pool.owners[page]:
    _remove_from_idle(pool, changes, page)
  changes.set(pool.owners, page, pool.owners[page] + 1)


def disown(pool: PagePool, changes: Changes, page: int) -> None:
  """Takes an owner from a page, which becomes free or idle after its last owner."""
  left = pool.owners[page] - 1
  changes.set(pool.owners, page, left)
  if left:
    return
  if page not in pool.digests:
    changes.set(pool.free, pool.counts["free"], page)
    count(pool, changes, "free", 1)
    return
  last = pool.before[_END]
  for links, one, other in ((pool.after, last, page), (pool.before, page, last),
                            (pool.after, page, _END), (pool.before, _END, page)):
    changes.set(links, one, other)
  count(pool, changes, "idle", 1)


def _remove_from_idle(pool: PagePool, changes: Changes, page: int) -> None:
  after, before = pool.after[page], pool.before[page]
  changes.set(pool.after, before, after)
  changes.set(pool.before, after, before)
  changes.delete(pool.after, page)
  changes.delete(pool.before, page)
  count(pool, changes, "idle", -1)


def publish(pool: PagePool, changes: Changes, page: int, digest: bytes) -> None:
  """Lets requests find a page by its contents, unless they find another page already."""
  if digest not in pool.pages and page not in pool.digests:
    changes.set(pool.pages, digest, page)
    changes.set(pool.digests, page, digest)


def forget(pool: PagePool, changes: Changes, page: int) -> None:
  """Forgets the contents of a page, which is not idle."""
  digest = pool.digests.get(page)
  if digest is not None:
    changes.delete(pool.pages, digest)
    changes.delete(pool.digests, page)


def digest_of(salt: bytes) -> bytes:
  """Returns the digest that stands before the first page of a request."""
  return hashlib.blake2b(salt, digest_size=16).digest()


def next_digest(digest: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
  """Returns the digest of all tokens up to a page's end.

  Args:
    digest: of the tokens before the page.
    tokens: those of the page.

  Raises:
    ValueError: the tokens are not integers.
  """
  numbers = np.asarray(tokens)
  checks.require(numbers.ndim == 1 and numbers.dtype.kind in "iu", "tokens",
                 checks.describe(numbers), "a sequence or an array of token ids, integers")
  return hashlib.blake2b(digest + numbers.astype(np.int64).tobytes(), digest_size=16).digest()
