# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The page allocator, by hand and against a model of every request's tokens."""

import random

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import Heads, PagesMetadata, PagesV2, PagesV3, attention
from attn_core.caches import pages
from attn_core.caches.paged import allocator, page_pool
from attn_core.caches.paged.versions import Changes, Version


def filled(num_pages: int, page_size: int, **lengths: int) -> allocator.Allocator:
  """Returns a pool with requests of these lengths."""
  pool = allocator.create(num_pages, page_size)
  for name, length in lengths.items():
    pool, _ = allocator.extend(allocator.add(pool, name), name, length)
  return pool


class AllocatorTest(absltest.TestCase):

  def test_by_hand(self):
    pool = filled(4, 4, a=6)
    self.assertEqual(pool.requests["a"], allocator.Request((0, 1), 6))
    pool = allocator.fork(pool, "a", "b", 5)
    self.assertEqual(pool.requests["b"], allocator.Request((0, 1), 5))
    self.assertEqual(pool.owners.tolist(), [2, 2, 0, 0])
    pool, copies = allocator.extend(pool, "b", 4)
    self.assertEqual((pool.requests["b"].pages, copies), ((0, 2, 3), ((1, 2),)))
    with self.assertRaisesRegex(allocator.OutOfPages, "'a' needs 1 pages for 9 tokens; 0 of 4"):
      allocator.extend(pool, "a", 3)
    # "b" has copied the last page, so "a" owns it again
    pool, copies = allocator.extend(pool, "a", 2)
    self.assertEqual(copies, ())
    np.testing.assert_array_equal(allocator.table(pool, "ba", 3), [[0, 2, 3], [0, 1, 0]])
    pool = allocator.release(pool, "a")
    self.assertEqual((pool.num_free, pool.owners.tolist()), (1, [1, 0, 1, 1]))
    self.assertEqual(repr(pool), "Allocator(num_pages=4, page_size=4, num_free=1, requests=['b'])")
    self.assertEqual((len(pool.requests), "a" in pool.requests, allocator.length(pool, "b")),
                     (1, False, 9))

  def test_several_requests_at_once(self):
    """Requests that share a partly filled page: the last of them keeps it."""
    pool = allocator.fork(allocator.fork(filled(6, 4, a=6), "a", "b", 6), "a", "c", 5)
    after, copies = allocator.extend_all(pool, {"a": 1, "b": 2, "c": 3})
    self.assertEqual(copies, ((1, 2), (1, 3)))
    self.assertEqual([after.requests[name] for name in "abc"],
                     [((0, 2), 7), ((0, 3), 8), ((0, 1), 8)])
    one_by_one, separate = pool, ()
    for name, tokens in (("a", 1), ("b", 2), ("c", 3)):
      one_by_one, more = allocator.extend(one_by_one, name, tokens)
      separate += more
    self.assertEqual((dict(one_by_one.requests), separate), (dict(after.requests), copies))
    with self.assertRaisesRegex(allocator.OutOfPages, "'c' needs 3 pages for 17 tokens; 2 of 6"):
      allocator.extend_all(pool, {"a": 1, "b": 1, "c": 12})
    self.assertEqual(dict(pool.requests), {"a": ((0, 1), 6), "b": ((0, 1), 6), "c": ((0, 1), 5)})
    self.assertEqual(allocator.extend_all(pool, {})[0].num_free, 4)

  def test_no_tokens_need_no_page(self):
    """A request that shares its last page keeps it until it writes to it."""
    pool = allocator.fork(filled(2, 4, a=6), "a", "b", 6)
    self.assertEqual(pool.num_free, 0)
    for after, copies in (allocator.extend(pool, "b", 0),
                          allocator.extend_all(pool, {"a": 0, "b": 0})):
      self.assertEqual((dict(after.requests), copies), (dict(pool.requests), ()))
    pool = allocator.fork(filled(3, 4, a=6), "a", "b", 6)
    after, copies = allocator.extend_all(pool, {"a": 0, "b": 1})
    self.assertEqual((after.requests["b"].pages, copies), ((0, 2), ((1, 2),)))

  def test_published_pages_are_found(self):
    text = list(range(100, 111))
    pool = allocator.publish(filled(4, 4, a=11), "a", text)  # two full pages
    pool = allocator.add(pool, "b", text)
    self.assertEqual(pool.requests["b"], allocator.Request((0, 1), 8))
    pool = allocator.add(pool, "c", np.array(text[:7]))
    self.assertEqual(pool.requests["c"], allocator.Request((0,), 4))
    pool = allocator.add(pool, "d", [0, *text[1:]])
    pool = allocator.add(pool, "e", text, salt=b"other weights")
    self.assertEqual([pool.requests[name].length for name in "de"], [0, 0])
    self.assertEqual(pool.owners.tolist(), [3, 2, 1, 0])
    for name in "abc":
      pool = allocator.release(pool, name)
    self.assertEqual((pool.num_free, allocator.statistics(pool)[1:4]), (4, (2, 2, 0)))
    self.assertEqual(allocator.add(pool, "f", text).requests["f"].pages, (0, 1))
    # Free pages are taken first, then the one that is found least: the end of the text.
    pool, _ = allocator.extend(pool, "d", 12)
    self.assertEqual((pool.requests["d"].pages, allocator.statistics(pool).evicted), ((2, 3, 1), 1))
    pool = allocator.add(pool, "f", text)
    self.assertEqual(pool.requests["f"], allocator.Request((0,), 4))
    statistics = allocator.statistics(pool)
    self.assertEqual((statistics.asked_tokens, statistics.found_tokens), (11 + 7 + 3 * 11, 8 + 8))
    self.assertAlmostEqual(statistics.hit_rate, 16 / 51)
    self.assertEqual(allocator.statistics(allocator.create(2, 2)),
                     (2, 2, 0, 0, 0, 0, 0.0))

  def test_pages_are_forgotten_before_other_tokens_are_written_to_them(self):
    text = list(range(8))
    pool = allocator.publish(filled(6, 4, a=8), "a", text)
    shared = allocator.fork(pool, "a", "b", 6)  # page 1 is published, and b's last page
    for pool, name in ((allocator.release(shared, "a"), "b"),
                       (allocator.truncate(pool, "a", 6), "a")):
      self.assertEqual(allocator.add(pool, "c", text).requests["c"].length, 8)
      pool, copies = allocator.extend(pool, name, 1)
      self.assertEqual((copies, allocator.add(pool, "c", text).requests["c"].length), ((), 4))
      pool = allocator.publish(allocator.extend(pool, name, 1)[0], name, [*text[:6], 16, 17])
      self.assertEqual(allocator.add(pool, "c", [*text[:6], 16, 17]).requests["c"].pages, (0, 1))
    kept, copies = allocator.extend(allocator.truncate(shared, "a", 7), "a", 1)
    self.assertEqual((copies, allocator.add(kept, "c", text).requests["c"].length), (((1, 2),), 8))

  def test_a_second_page_of_the_same_tokens_is_not_published(self):
    text = [7, 8, 9, 10, 11]
    pool = filled(4, 2, a=5, b=2)
    pool = allocator.publish(allocator.publish(pool, "a", text[:3]), "b", text[:2])
    self.assertEqual(allocator.add(pool, "c", text[:2]).requests["c"].pages, (0,))
    pool = allocator.release(allocator.publish(pool, "a", text), "b")
    self.assertEqual(allocator.add(pool, "c", text).requests["c"].pages, (0, 1))
    self.assertEqual(allocator.statistics(pool)[1:3], (1, 0))

  def test_truncate_and_release_before(self):
    pool = filled(5, 4, a=17)
    pool = allocator.release_before(pool, "a", 11)
    self.assertEqual(pool.requests["a"], allocator.Request((-1, -1, 2, 3, 4), 17))
    self.assertEqual((pool.num_free, allocator.table(pool, "a", 6).tolist()),
                     (2, [[0, 0, 2, 3, 4, 0]]))
    self.assertEqual(allocator.release_before(pool, "a", 3).num_free, 2)
    forked = allocator.fork(pool, "a", "b", 10)
    self.assertEqual(forked.requests["b"], allocator.Request((-1, -1, 2), 10))
    self.assertEqual(allocator.release(forked, "a").owners.tolist(), [0, 0, 1, 0, 0])
    short = allocator.truncate(pool, "a", 12)
    self.assertEqual((short.requests["a"], short.num_free), (((-1, -1, 2), 12), 4))
    self.assertEqual(allocator.extend(short, "a", 8)[0].requests["a"].pages, (-1, -1, 2, 3, 4))
    with self.assertRaisesRegex(ValueError, "length: got 7; expected an int from 8 to the 12"):
      allocator.truncate(short, "a", 7)

  def test_truncate_all_is_truncate_of_each(self):
    """Truncates two requests that share pages, one that keeps all tokens, and none."""
    pool = allocator.fork(filled(9, 4, a=17, c=6), "a", "b", 15)
    lengths = {"a": 5, "b": 9, "c": 6}
    one_by_one = pool
    for name, length in lengths.items():
      one_by_one = allocator.truncate(one_by_one, name, length)
    at_once = allocator.truncate_all(pool, lengths)
    for found in (at_once, one_by_one):
      self.assertEqual(dict(found.requests), {
          "a": ((0, 1), 5), "b": ((0, 1, 2), 9), "c": ((5, 6), 6)})
      self.assertEqual(found.owners.tolist(), one_by_one.owners.tolist())
    self.assertEqual(pool.requests["a"].length, 17)  # an older value stays as it was
    self.assertEqual(allocator.truncate_all(pool, {}).requests, pool.requests)
    with self.assertRaisesRegex(ValueError, "length: got 16; expected an int from 0 to the 15"):
      allocator.truncate_all(pool, {"a": 3, "b": 16})
    self.assertEqual(pool.requests["a"].length, 17)

  def test_bad_input(self):
    pool = filled(4, 4, a=9)
    for call, words in (
        (lambda: allocator.create(0, 4), "num_pages: got 0"),
        (lambda: allocator.create(4, 1.5), "page_size: got 1.5"),
        (lambda: allocator.add(pool, "a"), "name: got 'a'"),
        (lambda: allocator.add(pool, "b", [1.5] * 4), "tokens: got float64"),
        (lambda: allocator.add(pool, "b", salt="x"), "salt: got 'x'; expected bytes"),
        (lambda: allocator.extend(pool, "b", 1), "name: got 'b'"),
        (lambda: allocator.extend(pool, "a", -1), "tokens: got -1"),
        (lambda: allocator.extend_all(pool, {"a": 1, "b": 1}), "name: got 'b'"),
        (lambda: allocator.extend_all(pool, {"a": True}), "tokens: got True"),
        (lambda: allocator.fork(pool, "a", "a", 1), "name: got 'a'"),
        (lambda: allocator.fork(pool, "a", "b", 10), "length: got 10"),
        (lambda: allocator.fork(allocator.release_before(pool, "a", 5), "a", "b", 3),
         "length: got 3; expected an int from 4 to the 9 tokens of 'a'"),
        (lambda: allocator.publish(pool, "a", [1] * 10), "tokens: got 10 tokens; expected at most"),
        (lambda: allocator.publish(pool, "a", ["x"] * 9), "tokens: got <U1"),
        (lambda: allocator.publish(pool, "b", []), "name: got 'b'"),
        (lambda: allocator.truncate(pool, "a", 10), "length: got 10"),
        (lambda: allocator.release_before(pool, "a", 10), "position: got 10"),
        (lambda: allocator.release(pool, "b"), "name: got 'b'"),
        (lambda: allocator.length(pool, "b"), "name: got 'b'"),
        (lambda: allocator.table(pool, "a", 2), "width: got 2"),
        (lambda: allocator.table(pool, "a", 1.5), "width: got 1.5; expected an int >= 0"),
        (lambda: allocator.table(pool, "a", "b"), "width: got 'b'; expected an int >= 0")):
      with self.assertRaisesRegex(ValueError, words):
        call()
    self.assertEqual(dict(pool.requests), {"a": ((0, 1, 2), 9)})

  def test_a_step_changes_as_much_in_a_large_pool(self):
    """Counts the changes of a step of 64 requests in pools of a thousand and of a million pages."""
    counted = []
    for num_pages in (1_000, 1_000_000):
      pool = filled(num_pages, 16, **{str(n): 100 + n % 16 for n in range(64)})
      before = pool.version
      allocator.extend_all(pool, {str(n): 1 for n in range(64)})
      counted.append(len(before._changes.made))
    self.assertEqual(counted[0], counted[1])
    self.assertLess(counted[1], 6 * 64)


class WindowTest(absltest.TestCase):

  def test_attention_does_not_need_released_pages(self):
    """Pages behind a window belong to another request; queries of both see their own tokens."""
    rng = np.random.default_rng(0)
    size, window, heads = 4, 5, Heads(2, 8, 8)
    key, value = (jnp.asarray(rng.normal(size=(40, 2, 8)), jnp.float32) for _ in range(2))
    pool = allocator.release_before(filled(5, size, a=17), "a", 15 - window)
    pool, _ = allocator.extend(allocator.add(pool, "b"), "b", 7)  # takes pages 0 and 1
    self.assertEqual(allocator.table(pool, "ab", 5).tolist(), [[0, 0, 2, 3, 4], [0, 1, 0, 0, 0]])
    metadata = PagesMetadata(allocator.table(pool, "ab", 5), np.int32([17, 7]),
                             np.int32([0, 2, 9]))
    lone = filled(8, size, a=17, b=7)
    every = metadata._replace(page_tables=allocator.table(lone, "ab", 5))
    query = jnp.asarray(rng.normal(size=(9, 4, 8)), jnp.float32)
    for layout, mechanism in ((PagesV2, "ragged_page_attention_v2"),
                              (PagesV3, "ragged_page_attention_v3")):
      outs = []
      for requests in (metadata, every):
        cache = pages.init(layout, 8, size, heads, jnp.float32)
        slots = [[int(requests.page_tables[row, n // size]) * size + n % size if n >= first else -1
                  for n in range(length)] for row, length, first in ((0, 17, 8), (1, 7, 0))]
        cache = pages.append(cache, key[:24], value[:24], jnp.array(sum(slots, [])))
        new = {"key": key[15:24], "value": value[15:24]}
        if layout is PagesV2:
          new = {"key": None, "value": None}
        outs.append(attention(query, mechanism=mechanism, layout="thd", cache_view=cache,
                              cache_metadata=requests, sliding_window=(window, 0),
                              **new).attention_outputs)
        with self.assertRaisesRegex(ValueError, "different pages in a request's row"):
          attention(query, mechanism=mechanism, layout="thd", cache_view=cache,
                    cache_metadata=metadata, sliding_window=(window + 8, 0), **new)
      np.testing.assert_allclose(*outs, rtol=1e-6, atol=1e-6)


class VersionsTest(absltest.TestCase):

  def test_every_version_stays_a_value(self):
    """Reads, and branches off, old versions in random order."""
    rng = random.Random(0)
    kept = [(Version(({}, [0] * 5)), ({}, [0] * 5))]
    for step in range(2_000):
      version, (names, numbers) = rng.choice(kept)
      state = version.state()
      self.assertEqual(state, (names, numbers))
      changes, names, numbers = Changes(), dict(names), list(numbers)
      for _ in range(rng.randrange(4)):
        key = rng.randrange(5)
        if rng.random() < 0.3 and key in names:
          changes.delete(state[0], key)
          del names[key]
        elif rng.random() < 0.5:
          changes.set(state[0], key, step)
          names[key] = step
        else:
          changes.set(state[1], key, step)
          numbers[key] = step
      after = version.successor(changes)
      if len(kept) < 50:
        kept.append((after, (names, numbers)))
      else:
        kept[rng.randrange(50)] = after, (names, numbers)

  def test_old_allocators_stay_usable(self):
    pool = filled(4, 2, a=3)
    other = allocator.release(allocator.extend(pool, "a", 4)[0], "a")
    branch = allocator.add(pool, "b")
    self.assertEqual((list(branch.requests), list(other.requests)), (["a", "b"], []))
    self.assertEqual(pool.requests["a"], allocator.Request((0, 1), 3))
    again, _ = allocator.extend(pool, "a", 4)
    self.assertEqual((again.requests["a"].pages, pool.num_free), ((0, 1, 2, 3), 2))


class RandomTest(absltest.TestCase):

  def test_random_operations_against_a_model(self):
    """Checks requests' tokens, where they are, and pages' owners; 100,000 operations."""
    rng = random.Random(0)
    self.size, self.count = 3, 24
    self.pool, self.model = allocator.create(self.count, self.size), {}
    self.released, self.slots = {}, {}
    seen = dict.fromkeys(("full", "copied", "found", "evicted"), 0)
    for step in range(100_000):
      choice, name = rng.random(), rng.choice(list(self.model)) if self.model else None
      if choice < 0.15 and len(self.model) < 12:
        self.add(rng, step, seen)
      elif name is None:
        continue
      elif choice < 0.25 and len(self.model) < 12:
        length = rng.randint(self.released[name] * self.size, len(self.model[name]))
        self.pool = allocator.fork(self.pool, name, step, length)
        self.model[step], self.released[step] = self.model[name][:length], self.released[name]
      elif choice < 0.35:
        self.pool = allocator.release(self.pool, name)
        del self.model[name], self.released[name]
      elif choice < 0.42:
        length = rng.randint(self.released[name] * self.size, len(self.model[name]))
        self.pool = allocator.truncate(self.pool, name, length)
        self.model[name] = self.model[name][:length]
      elif choice < 0.45:
        position = rng.randint(0, len(self.model[name]))
        self.pool = allocator.release_before(self.pool, name, position)
        self.released[name] = max(self.released[name], position // self.size)
      elif choice < 0.6:
        written = self.model[name][:rng.randint(0, len(self.model[name]))]
        self.pool = allocator.publish(self.pool, name, written)
      else:
        self.extend(rng, name, seen)
      if step % 100 == 0 or step < 1_000:
        self.check()
    seen["evicted"] = allocator.statistics(self.pool).evicted
    self.assertGreater(min(seen.values()), 500, seen)
    for name in list(self.model):
      self.pool = allocator.release(self.pool, name)
    self.assertEqual((self.pool.num_free, set(self.pool.owners.tolist())), (self.count, {0}))

  def add(self, rng, name, seen):
    """Adds a request with the beginning of another one's tokens, or without tokens."""
    text = list(rng.choice(list(self.model.values()))) if self.model and rng.random() < 0.7 else []
    text = text[:rng.randint(0, len(text))] + [rng.randrange(3) for _ in range(3)]
    self.pool = allocator.add(self.pool, name, text)
    held = self.pool.requests[name]
    self.assertEqual(held.length, len(held.pages) * self.size)
    self.model[name], self.released[name] = text[:held.length], 0
    seen["found"] += len(held.pages)
    self.check_tokens(name)

  def extend(self, rng, name, seen):
    """Extends one request, or several, by tokens of few kinds, so that texts repeat."""
    names = {name, *rng.sample(list(self.model), min(len(self.model), rng.randrange(3)))}
    new = {n: [rng.randrange(3) for _ in range(rng.randint(0, 2 * self.size))] for n in names}
    before, free = dict(self.pool.requests), self.pool.num_free
    owners = self.pool.owners
    try:
      after, copies = allocator.extend_all(self.pool, {n: len(x) for n, x in new.items()})
    except allocator.OutOfPages:
      self.assertEqual((dict(self.pool.requests), self.pool.num_free), (before, free))
      seen["full"] += 1
      return
    self.pool = after
    seen["copied"] += len(copies)
    for source, target in copies:
      # Only a partly filled page that others own too is copied.
      self.assertGreater(owners[source], 1)
      self.slots.update({(target, i): self.slots[source, i] for i in range(self.size)
                         if (source, i) in self.slots})
    for n, tokens in new.items():
      held, begin = after.requests[n], len(self.model[n])
      self.model[n] = self.model[n] + tokens
      for position in range(begin, len(self.model[n])):
        self.slots[held.pages[position // self.size], position % self.size] = (
            self.model[n][position])
      self.check_tokens(n)
    # As many pages as are needed, and no more, leave those without owners.
    taken = sum(len(after.requests[n].pages) - len(before[n].pages) for n in names) + len(copies)
    self.assertEqual(free - after.num_free, taken)

  def check_tokens(self, name):
    held, first = self.pool.requests[name], self.released[name] * self.size
    self.assertEqual((len(held.pages), held.length),
                     (-(-len(self.model[name]) // self.size), len(self.model[name])))
    found = [self.slots[held.pages[p // self.size], p % self.size]
             for p in range(first, held.length)]
    self.assertEqual(found, self.model[name][first:])

  def check(self):
    """Checks that requests find their tokens, and that every page has its owners."""
    self.assertEqual(list(self.pool.requests), list(self.model))
    owners = [0] * self.count
    for name in self.model:
      self.check_tokens(name)
      for page in self.pool.requests[name].pages[self.released[name]:]:
        owners[page] += 1
    self.assertEqual(self.pool.owners.tolist(), owners)
    self.assertEqual(self.pool.num_free, owners.count(0))
    state = self.pool.version.state().pool
    self.assertEqual(page_pool.available(state), owners.count(0))
    self.assertEqual({page: digest for digest, page in state.pages.items()}, state.digests)


if __name__ == "__main__":
  absltest.main()
