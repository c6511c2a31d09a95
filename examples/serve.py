# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves many requests at once from a cache in pages, by the model of train_and_generate.py.

    python3 examples/serve.py
    python3 examples/serve.py --model=model.npz --requests=200 --pages=128

Continuous batching: one call of `ragged_page_attention_v2` a layer takes the next byte of every
request that is generating and pieces of the prompts of those that are not yet. The pool has fewer
pages than all requests need, so requests wait, and the youngest gives its pages back when an older
one needs them, to be read again later. Prompts begin with one of a few texts; their pages are
stored once, and a request that writes into a shared page gets a copy.

The model is loaded from --model, or trained first and written there. Every byte generated is then
held to the model without a cache, a request at a time: exits with status 1 if one is another.

Letters: R requests of a call, T bytes of a call, N pages of a request, P pages of the pool.
"""

import functools
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (Heads, PagedOptions, PagesMetadata, PagesV2, attention,
                       ragged_page_attention_v2)
from attn_core.caches.paged import allocator as pool
from attn_core.caches import pages
import train_and_generate as model

FLAGS = flags.FLAGS


# --- One call of the model. ----------------------------------------------------------------------


class Arrays(NamedTuple):
  """What changes from call to call; bytes and rows that are not in use are 0."""

  tokens: Any  # int32 [T]
  positions: Any  # int32 [T]
  last: Any  # int32 [R], the row of a request's last byte among T
  copies: Any  # int32 [2, R]: pages to copy before anything is written, and where to; P: none
  metadata: PagesMetadata


def step(params, caches, arrays: Arrays, *, config):
  """The bytes of a call through all layers.

  Args:
    params: the model's.
    caches: `PagesV2` of every layer; donated.
    arrays: see `Arrays`.
    config: the model.

  Returns:
    (caches, likeliest next byte of every request int32 [R]).
  """
  caches = [pages.copy_pages(cache, *arrays.copies) for cache in caches]
  slots = pages.slots(arrays.metadata, pages.page_size(caches[0]), arrays.tokens.shape[0])

  def attend(n, query, key, value):
    caches[n] = pages.append(caches[n], key[0], value[0], slots)
    options = PagedOptions(sliding_window=model.window_of(config, n))
    out = ragged_page_attention_v2(query[0], caches[n], arrays.metadata, options)
    return out.attention_outputs[None]

  x = params["embedding"][arrays.tokens][None]
  for n in range(config.layers):
    x = model.layer(model.layer_weights(params, config, n), x, arrays.positions,
                    functools.partial(attend, n))
  logits = model.norm(x[0, arrays.last], params["final_norm"]) @ params["logits"]
  return caches, logits.argmax(-1).astype(jnp.int32)


# --- Who is served when. -------------------------------------------------------------------------


class Job(NamedTuple):
  """A request."""

  name: Any
  text: tuple[int, ...]  # the prompt and what was generated
  prompt: int  # bytes of the prompt
  amount: int  # bytes to generate
  prefix: Any = None  # name of the job whose text begins this one
  stored: int = 0  # bytes in the cache

  @property
  def ended(self) -> bool:
    """Whether all is generated or, where nothing is to be, all is in the cache."""
    return len(self.text) == self.prompt + self.amount and (
        self.amount > 0 or self.stored == self.prompt)


class Server(NamedTuple):
  """The state of all requests."""

  pool: pool.Allocator
  waiting: tuple[Job, ...]
  running: tuple[Job, ...] = ()  # in the order in which they came
  done: tuple[Job, ...] = ()
  given_back: int = 0  # times that a request gave its pages back
  copies: int = 0  # pages copied because they were shared


def pages_for(length: int) -> int:
  """How many pages hold so many bytes."""
  return -(-length // FLAGS.page_size)


def admit(server: Server, rows: int) -> Server:
  """Lets in those who wait, in their order, as long as there are rows and pages for their text.

  And a page for everyone to grow into, or they would soon take each other's.
  """
  while server.waiting and len(server.running) < rows:
    job, allocator, stored = server.waiting[0], server.pool, 0
    if job.prefix in allocator.requests:
      stored = allocator.requests[job.prefix].length
    shared = stored // allocator.page_size
    growth = len(server.running) + 1
    if server.running and pages_for(len(job.text)) - shared + growth > len(allocator.free):
      break
    allocator = (pool.fork(allocator, job.prefix, job.name, stored) if stored
                 else pool.add(allocator, job.name))
    server = server._replace(pool=allocator, waiting=server.waiting[1:],
                             running=server.running + (job._replace(stored=stored),))
  return server


def give_back(server: Server, job: Job) -> Server:
  """Takes a request's pages; it waits, before all others, to be read again."""
  return server._replace(
      pool=pool.release(server.pool, job.name), given_back=server.given_back + 1,
      running=tuple(x for x in server.running if x.name != job.name),
      waiting=(job._replace(stored=0),) + server.waiting)


def plan(server: Server, budget: int) -> tuple[Server, list[tuple[Job, int]], list]:
  """Which bytes the next call takes.

  Args:
    server: the state.
    budget: T.

  Returns:
    (server with room for these bytes, [(job, how many of its bytes)], [(page, copy)]): those that
    generate take one byte, the others share what is left.
  """
  chunks, copies = [], []
  missing = lambda job: len(job.text) - job.stored
  for job in sorted(server.running, key=lambda job: missing(job) > 1):
    number = min(missing(job), budget)
    while number and job in server.running:
      try:
        allocator, more = pool.extend(server.pool, job.name, number)
      except pool.OutOfPages:
        planned = {job.name for job, _ in chunks}
        server = give_back(server, [x for x in server.running if x.name not in planned][-1])
      else:
        server = server._replace(pool=allocator, copies=server.copies + len(more))
        copies.extend(more)
        chunks.append((job, number))
        budget -= number
        break
  return server, chunks, copies


def pack(server: Server, chunks, copies, shape) -> Arrays:
  """The arrays of a call; shape: (T, R, N)."""
  tokens_of_call, rows, width = shape
  tokens, positions = np.zeros((2, tokens_of_call), np.int32)
  copied = np.full((2, rows), len(server.pool.owners), np.int32)
  copied[:, :len(copies)] = np.array(copies, np.int32).reshape(-1, 2).T
  starts = np.zeros(rows + 1, np.int32)
  starts[1:len(chunks) + 1] = np.cumsum([number for _, number in chunks])
  starts[len(chunks) + 1:] = starts[len(chunks)]
  lengths, table = np.zeros(rows, np.int32), np.zeros((rows, width), np.int32)
  for row, (job, number) in enumerate(chunks):
    lengths[row] = job.stored + number
    where = slice(starts[row], starts[row + 1])
    tokens[where] = job.text[job.stored:lengths[row]]
    positions[where] = np.arange(job.stored, lengths[row])
  table[:len(chunks)] = pool.table(server.pool, [job.name for job, _ in chunks], width)
  return Arrays(tokens, positions, np.maximum(starts[1:] - 1, 0), copied,
                PagesMetadata(table, lengths, starts, np.int32(len(chunks))))


def advance(server: Server, chunks, likeliest) -> Server:
  """The state after a call; a request whose last byte was in it has one more."""
  moved = {}
  for (job, number), byte in zip(chunks, likeliest):
    job = job._replace(stored=job.stored + number)
    if job.stored == len(job.text) and job.amount:
      job = job._replace(text=job.text + (int(byte),))
    moved[job.name] = job
  running = [moved.get(job.name, job) for job in server.running]
  ended = tuple(job for job in running if job.ended)
  allocator = server.pool
  for job in ended:
    if job.amount:  # the others are beginnings of texts, for others to share
      allocator = pool.release(allocator, job.name)
  return server._replace(pool=allocator, done=server.done + ended,
                         running=tuple(job for job in running if not job.ended))


# --- The program. --------------------------------------------------------------------------------


def jobs_of(text: np.ndarray, rng) -> list[Job]:
  """The shared beginnings, and requests of different lengths that begin with one of them."""
  def piece(length):
    first = rng.integers(len(text) - length)
    return tuple(int(x) for x in text[first:first + length])

  beginnings = [piece(FLAGS.beginning) for _ in range(FLAGS.beginnings)]
  jobs = [Job(("beginning", n), x, len(x), 0) for n, x in enumerate(beginnings)]
  for n in range(FLAGS.requests):
    of = int(rng.integers(len(beginnings)))
    prompt = beginnings[of] + piece(int(rng.integers(1, FLAGS.longest_prompt + 1)))
    jobs.append(Job(n, prompt, len(prompt), int(rng.integers(1, FLAGS.longest_answer + 1)),
                    ("beginning", of)))
  return jobs


def serve(params, config, jobs: list[Job]) -> Server:
  """Answers all requests and reports."""
  longest = FLAGS.beginning + FLAGS.longest_prompt + FLAGS.longest_answer
  width = pages_for(longest)
  server = Server(pool.create(FLAGS.pages, FLAGS.page_size), tuple(jobs))
  needed = sum(pages_for(job.prompt + job.amount) for job in jobs)
  print(f"{FLAGS.requests} requests need {needed} pages in all; there are {FLAGS.pages}",
        flush=True)
  least = FLAGS.beginnings * pages_for(FLAGS.beginning) + width
  if FLAGS.pages < least:
    sys.exit(f"--pages={FLAGS.pages}: expected at least {least}: the beginnings and one request")
  heads = Heads(config.key_heads, config.head_dim, config.head_dim)
  caches = [pages.init(PagesV2, FLAGS.pages, FLAGS.page_size, heads, jnp.float32)
            for _ in range(config.layers)]
  run = jax.jit(functools.partial(step, config=config), donate_argnums=1)
  # A call where all generate is short.
  shapes = [(length, FLAGS.rows, width) for length in (FLAGS.rows, FLAGS.budget)]
  compiled = [run.lower(params, caches, pack(server, [], [], shape)).compile() for shape in shapes]
  calls, bytes_in, begun, last_report = 0, 0, time.monotonic(), 0.0
  while server.waiting or server.running:
    # Beginnings first: a request that shares one needs it in the cache.
    beginnings = sum(job.amount == 0 for job in server.waiting + server.running)
    server = admit(server, min(beginnings or FLAGS.rows, FLAGS.rows))
    server, chunks, copies = plan(server, FLAGS.budget)
    number = sum(n for _, n in chunks)
    long = number > FLAGS.rows
    caches, likeliest = compiled[long](
        params, caches, pack(server, chunks, copies, shapes[long]))
    server = advance(server, chunks, np.asarray(likeliest))
    calls, bytes_in = calls + 1, bytes_in + number
    now = time.monotonic() - begun
    if now - last_report > FLAGS.report_every or not (server.waiting or server.running):
      last_report = now
      used = FLAGS.pages - len(server.pool.free)
      answered = sum(job.amount > 0 for job in server.done)
      print(f"{now:.1f} s: call {calls}, {answered} done, "
            f"{len(server.running)} running, {len(server.waiting)} waiting, {used} pages in use, "
            f"{bytes_in / now:,.0f} bytes/s", flush=True)
  written = sum(job.amount for job in server.done)
  print(f"{written} bytes generated in {calls} calls, {written / now:,.0f} a second; requests gave "
        f"their pages back {server.given_back} times, {server.copies} shared pages were copied")
  return server


def differing(params, config, done) -> list:
  """Names of the requests of which the model without a cache says another byte."""
  def attend(query, key, value, sliding_window):
    return attention(query, key, value, sliding_window=sliding_window).attention_outputs

  longest = max(len(job.text) for job in done)
  forward = jax.jit(lambda tokens: model.forward(params, tokens, config, attend).argmax(-1))
  found = []
  for job in done:
    tokens = np.zeros((1, longest), np.int32)
    tokens[0, :len(job.text)] = job.text
    likeliest = np.asarray(forward(tokens))[0, job.prompt - 1:len(job.text) - 1]
    if tuple(likeliest) != job.text[job.prompt:]:
      found.append(job.name)
  return found


def trained(path: pathlib.Path):
  """(parameters, configuration) of --model, which is trained first where there is none."""
  if not path.exists():
    print(f"training {path}", flush=True)
    subprocess.run([sys.executable, model.__file__, f"--save={path}", f"--steps={FLAGS.steps}",
                    "--generate=0", "--noverify", "--max_bytes=4000000"], check=True)
  return model.load(path)


def define_flags() -> None:
  flags.DEFINE_string("model", None, "what train_and_generate.py --save wrote; default: trained")
  flags.DEFINE_integer("steps", 100, "training steps, where there is no model")
  flags.DEFINE_integer("requests", 64, "how many")
  flags.DEFINE_integer("beginnings", 4, "texts that prompts begin with")
  flags.DEFINE_integer("beginning", 40, "bytes of these")
  flags.DEFINE_integer("longest_prompt", 120, "bytes of a prompt after its beginning, at most")
  flags.DEFINE_integer("longest_answer", 60, "bytes to generate, at most")
  flags.DEFINE_integer("page_size", 16, "bytes of a page")
  flags.DEFINE_integer("pages", 96, "of the pool")
  flags.DEFINE_integer("rows", 16, "requests of a call, at most")
  flags.DEFINE_integer("budget", 96, "bytes of a call, at most")
  flags.DEFINE_integer("seed", 0, "of the requests")
  flags.DEFINE_float("report_every", 0.5, "seconds from one report to the next")


def main(argv) -> None:
  del argv
  begun = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    params, config = trained(pathlib.Path(FLAGS.model or pathlib.Path(folder) / "model.npz"))
  params = jax.device_put(params)
  _, held_out = model.read(sysconfig.get_paths()["stdlib"], 4_000_000)
  jobs = jobs_of(held_out, np.random.default_rng(FLAGS.seed))
  server = serve(params, config, jobs)
  done = [job for job in server.done if job.amount]
  job = max(done, key=lambda job: job.amount)
  print("---", bytes(job.text[:job.prompt]).decode(errors="replace") + "|" +
        bytes(job.text[job.prompt:]).decode(errors="replace"), "---", sep="\n")
  wrong = differing(params, config, done)
  print(f"{len(done) - len(wrong)} of {len(done)} requests as without a cache; "
        f"{time.monotonic() - begun:.0f} s")
  if wrong:
    sys.exit(f"FAILED: another text than without a cache: requests {wrong}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
