# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scheduling of examples/serve.py over many steps, with requests that are canceled at random.

A function of the last bytes stands for the model, and the digest of a text for the keys and values
of its last byte. After every step no page is lost or owned by requests that do not share it, and
the pages of every request hold what belongs to its text.
"""

import sys
import zlib

from absl import flags
from absl.testing import absltest
import numpy as np

from attn_core.caches import allocator
from attn_core_test import sampling
from attn_core_test.example_files import ROOT, load_example

SETTINGS = {"page_size": 4, "pages": 24, "rows": 6, "budget": 24, "chunk": 10, "drafts": 4,
            "prefixes": 3, "prefix_length": 10, "longest_prompt": 12, "longest_answer": 25}


def following(text: bytes) -> int:
  """Returns the byte that follows a text: often, but not always, what followed two bytes before."""
  third, second, first = (b"\0\0" + text)[-3:]
  return (first * 5 + second * 3 + (third == 1)) % 3


def digest_of(text: bytes) -> int:
  return zlib.crc32(text)


class SoakTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    sys.path.insert(0, str(ROOT / "examples"))
    cls.addClassCleanup(sys.path.remove, str(ROOT / "examples"))
    cls.serve = load_example("serve")
    cls.serve.define_flags()
    for name, value in SETTINGS.items():
      setattr(flags.FLAGS, name, value)

  def test_some_steps(self):
    self.soak(400)

  @sampling.slow("soak of 20,000 steps")
  def test_20000_steps(self):
    self.soak(20_000)

  def soak(self, steps: int) -> None:
    rng = np.random.default_rng(0)
    self.prefixes = [rng.integers(0, 3, SETTINGS["prefix_length"], np.uint8).tobytes()
                     for _ in range(SETTINGS["prefixes"])]
    self.held = np.zeros((SETTINGS["pages"], SETTINGS["page_size"]), np.int64)
    self.added = self.canceled = self.moved = 0
    server = self.serve.Server(allocator.create(SETTINGS["pages"], SETTINGS["page_size"]), ())
    for n in range(steps):
      server = server._replace(coming=server.coming + tuple(
          self.request(n, rng) for _ in range(rng.poisson(0.5) * (len(server.waiting) < 20))),
                               done=())
      server = self.cancel(server, rng)
      if server.coming or server.waiting or server.running:
        server = self.step(server, n)
      self.check(server)
    counts = allocator.statistics(server.pool)
    happened = {"preempted": server.preemptions, "canceled": self.canceled, "right": server.right,
                "moved": self.moved, "evicted": counts.evicted, "found": counts.found_tokens}
    self.assertGreater(min(happened.values()), steps // 100, happened)
    self.assertGreater(server.guessed, server.right)

  def request(self, n: int, rng):
    """Returns a request that arrives before call n."""
    self.added += 1
    prompt = self.prefixes[rng.integers(3)] + rng.integers(
        0, 3, rng.integers(1, SETTINGS["longest_prompt"] + 1), np.uint8).tobytes()
    amount = int(rng.integers(1, SETTINGS["longest_answer"] + 1))
    return self.serve.Job(self.added, prompt, len(prompt), amount, n)

  def cancel(self, server, rng):
    """Removes a request that runs or waits, at random."""
    jobs = server.running + server.waiting
    if not jobs or rng.random() > 0.08:
      return server
    name = jobs[rng.integers(len(jobs))].name
    self.canceled += 1
    if any(job.name == name for job in server.running):
      server = server._replace(pool=allocator.release(server.pool, name))
    without = lambda jobs: tuple(job for job in jobs if job.name != name)
    return server._replace(running=without(server.running), waiting=without(server.waiting))

  def step(self, server, n: int):
    """Runs one call, whose model and pages are numbers."""
    server = self.serve.arrive(server, n, float(n))
    server = self.serve.admit(server, SETTINGS["rows"])
    server, chunks = self.serve.plan(server, SETTINGS["budget"])
    self.assertNotEmpty(chunks)
    likeliest = []
    for chunk in chunks:
      texts: list[bytes] = []
      for place, (byte, parent) in enumerate(zip(chunk.tokens, chunk.parents)):
        before = chunk.job.text[:chunk.job.stored] if parent < 0 else texts[parent]
        texts.append(before + bytes([byte]))
        self.write(server, chunk.job.name, chunk.job.stored + place, digest_of(texts[-1]))
        likeliest.append(following(texts[-1]))
    before = server.pool
    server, paths = self.serve.advance(server, chunks, likeliest, n + 0.5)
    for chunk, path in zip(chunks, paths):
      read = [self.held[self.slot(before, chunk.job.name, chunk.job.stored + i)] for i in path]
      self.moved += path != list(range(len(path)))
      for place, number in enumerate(read):
        self.held[self.slot(before, chunk.job.name, chunk.job.stored + place)] = number
    return server

  def write(self, server, name: int, position: int, number: int) -> None:
    page, offset = self.slot(server.pool, name, position)
    self.assertEqual(server.pool.owners[page], 1, "a page that is written has one owner")
    self.held[page, offset] = number

  def slot(self, pool, name: int, position: int) -> tuple[int, int]:
    size = SETTINGS["page_size"]
    return pool.requests[name].pages[position // size], position % size

  def check(self, server) -> None:
    """Checks who owns each page, and what the pages of the running requests hold."""
    pool, owners = server.pool, np.zeros(SETTINGS["pages"], np.int32)
    self.assertEqual(set(pool.requests), {job.name for job in server.running})
    for job in server.running:
      own, length = pool.requests[job.name]
      self.assertEqual(length, job.stored)
      self.assertLen(own, self.serve.pages_for(length))
      np.add.at(owners, list(own), 1)
      self.assertLen(set(own), len(own))
      held = self.held[list(own)].reshape(-1)[:length]
      self.assertEqual(held.tolist(), [digest_of(job.text[:i + 1]) for i in range(length)])
    np.testing.assert_array_equal(pool.owners, owners)
    counts = allocator.statistics(pool)
    self.assertEqual(counts.free + counts.idle + np.count_nonzero(owners), counts.num_pages)
    for job in server.done:
      text = job.text[:job.prompt]
      while len(text) < len(job.text):
        text += bytes([following(text)])
      self.assertEqual(job.text, text)


if __name__ == "__main__":
  absltest.main()
