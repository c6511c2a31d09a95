# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves requests that arrive at random from pages, with the model of train_and_generate.py.

    python3 examples/serve.py
    python3 examples/serve.py --model=model.npz --requests=200 --pages=128 --arrivals=0.5
    python3 examples/serve.py --model=model.npz --drafts=0
    python3 examples/serve.py --model=model.npz --latent

Requests arrive as a Poisson process, begin with one of a few prefixes, and have prompts and answers
of random lengths. One call of `ragged_page_attention_v3` per layer computes the next bytes of every
request that is generating, and chunks of the prompts of the others. With --latent the pages hold
latent rows, and the calls are those of `multi_latent_ragged_page_attention`.

* Pages give each request memory as it grows. The pages of a request are published by a hash of
  their contents, and those of a later prompt that begins alike are found and not computed again.
  A call reads the pages that several of its requests begin with once for all of them.
* The pool is smaller than all requests need. Pages that only the prefix cache keeps are evicted,
  the least recently used ones first; if that is not enough, the newest request releases its pages
  and is computed again later.
* What followed the last bytes of a text when they occurred before are guesses of what follows now:
  a small tree, which the same call verifies. Guesses that are right cost no call of their own.

The clock of arrivals is the number of calls, so that a run repeats; times are those of the machine.
The model is loaded from --model, or trained first and written there. At the end every answer is
compared with that of the model without a cache, one request at a time: the program exits with
status 1 if one differs. T is the number of tokens (bytes) of a call, q of a request in it.
"""

import functools
import logging
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

from attn_core import (AttentionOutput, Heads, PagesMetadata, PagesV3, attention,
                       multi_latent_ragged_page_attention, ragged_page_attention_v3)
from attn_core.caches import drafts, latent_pages, pages, prefixes
from attn_core.caches.paged import allocator as pool
import train_and_generate as model

FLAGS = flags.FLAGS


# --- One call of the model. ----------------------------------------------------------------------


class Arrays(NamedTuple):
  """Arguments of one call; unused bytes and rows are 0."""

  tokens: Any  # int32 [T]
  positions: Any  # int32 [T]
  parents: Any  # int32 [rows, q]: those of a row's bytes, see `Chunk`
  metadata: PagesMetadata


def step(params, caches, arrays: Arrays, *, config):
  """Computes one call: all its bytes through all layers.

  Args:
    params: the parameters.
    caches: `PagesV3` or `PagesLatent` of every layer; donated.
    arrays: see `Arrays`.
    config: the model.

  Returns:
    (caches, the most likely byte after each one, int32 [T]).
  """
  caches = list(caches)
  metadata = arrays.metadata._replace(draft_mask=drafts.mask(arrays.parents))

  def attend(n, query, key, value):
    window = model.window_of(config, n)
    # The windows of requests end in different pages of a prefix that they share.
    mine = metadata if window is None else metadata._replace(prefixes=None)
    out = attend_to_pages((query[0], key[0], value[0]), caches[n], mine, window)
    caches[n] = out.cache_view
    return out.attention_outputs[None]

  x = params["embedding"][arrays.tokens][None]
  for n in range(config.layers):
    x = model.layer(model.layer_weights(params, config, n), x, arrays.positions,
                    functools.partial(attend, n))
  logits = model.norm(x[0], params["final_norm"]) @ params["logits"]
  return caches, logits.argmax(-1).astype(jnp.int32)


def attend_to_pages(tokens, cache, metadata: PagesMetadata, window) -> AttentionOutput:
  """Writes keys and values to the pages, and attends to these.

  A latent row holds the values of all heads in its latent part, and their rotated keys in its
  rotary part. A query has its own numbers in the columns of its key head, and zeros elsewhere.

  Args:
    tokens: query [T, H, D], key and value [T, K, D].
    cache: `PagesV3`, or `PagesLatent` of rows with K * D numbers in each part.
    metadata: of the pages.
    window: the sliding window, or None.
  """
  query, key, value = tokens
  if isinstance(cache, PagesV3):
    return ragged_page_attention_v3(query, key, value, cache, metadata, sliding_window=window)
  count, heads, width = query.shape
  rows = jnp.concatenate([value.reshape(count, -1), key.reshape(count, -1)], -1)
  key_head = jnp.repeat(jnp.eye(key.shape[1]), heads // key.shape[1], 0)  # of each head, [H, K]
  spread = jnp.einsum("thd,hk->thkd", query, key_head).reshape(count, heads, -1)
  out = multi_latent_ragged_page_attention(
      jnp.concatenate([jnp.zeros_like(spread), spread], -1), rows, cache, metadata,
      sliding_window=window, softmax_scale=width ** -0.5)
  found = out.attention_outputs.reshape(count, heads, -1, width)
  return out._replace(attention_outputs=jnp.einsum("thkd,hk->thd", found, key_head))


def keep(caches, metadata: PagesMetadata, accepted):
  """Moves keys and values of guesses that were right to where their bytes belong."""
  return [drafts.keep(cache, metadata, accepted) for cache in caches]


# --- Guesses. ------------------------------------------------------------------------------------


class Chunk(NamedTuple):
  """The bytes of a request in one call: a part of its prompt, or its last byte and guesses."""

  job: "Job"
  tokens: list[int]
  parents: list[int]  # number of the byte before each one; -1: the one before the chunk


def guess(text: bytes, most: int, length: int = 2) -> tuple[list[int], list[int]]:
  """Guesses what follows a text: what followed its last bytes twice before, as a tree.

  Args:
    text: the bytes so far.
    most: number of guesses.
    length: of the last bytes that are searched.

  Returns:
    (bytes, parents) of a `Chunk`; the first is the last byte of the text.
  """
  tokens, parents, end = [text[-1]], [-1], len(text) - 1
  for _ in range(2):
    found = text.rfind(text[-length:], 0, end)
    if found < 0:
      break
    node, first, end = 0, found + length, found + length - 1
    for byte in text[first:first + (most + 1) // 2]:
      child = child_of(tokens, parents, node, byte)
      if child is None:
        if len(tokens) > most:
          break
        child = len(tokens)
        tokens.append(byte)
        parents.append(node)
      node = child
  return tokens, parents


def child_of(tokens: list[int], parents: list[int], node: int, byte: int) -> int | None:
  """Returns the number of the guess after `node` that is `byte`, or None."""
  return next((n for n in range(node + 1, len(tokens))
               if parents[n] == node and tokens[n] == byte), None)


def verify(chunk: Chunk, likeliest) -> tuple[list[int], bytes]:
  """Walks down a tree of guesses as long as they are the most likely bytes.

  Args:
    chunk: the last byte of a text and guesses.
    likeliest: int [q], the most likely byte after each one.

  Returns:
    (the numbers of the bytes on the path, the bytes that follow the text).
  """
  path, new = [0], []
  while True:
    new.append(int(likeliest[path[-1]]))
    child = child_of(chunk.tokens, chunk.parents, path[-1], new[-1])
    if child is None:
      return path, bytes(new)
    path.append(child)


# --- Scheduling. ---------------------------------------------------------------------------------


class Job(NamedTuple):
  """A request and its progress."""

  name: int
  text: bytes  # the prompt and the generated bytes
  prompt: int  # length of the prompt (bytes)
  amount: int  # number of bytes to generate
  arrival: int  # number of the call before which it arrives
  since: float = 0.0  # time of the arrival (seconds)
  times: tuple[float, ...] = ()  # those of the generated bytes
  stored: int = 0  # number of bytes in the cache

  @property
  def missing(self) -> int:
    """Number of bytes to generate that are not yet."""
    return self.prompt + self.amount - len(self.text)


class Server(NamedTuple):
  """The state of all requests."""

  pool: pool.Allocator
  coming: tuple[Job, ...]  # in the order of arrival
  waiting: tuple[Job, ...] = ()
  running: tuple[Job, ...] = ()  # oldest first
  done: tuple[Job, ...] = ()
  preemptions: int = 0  # number of times that a running request released its pages
  guessed: int = 0
  right: int = 0  # number of guesses that were


def pages_for(length: int | np.ndarray) -> int | np.ndarray:
  """Returns the number of pages that hold `length` bytes."""
  return -(-length // FLAGS.page_size)


def array_of(text: bytes) -> np.ndarray:
  return np.frombuffer(text, np.uint8)


def arrive(server: Server, call: int, now: float) -> Server:
  """Moves the jobs that arrive before a call to those that wait; the next if nothing runs."""
  if not server.waiting + server.running:
    call = max(call, server.coming[0].arrival)
  new = tuple(job._replace(since=now) for job in server.coming if job.arrival <= call)
  return server._replace(coming=server.coming[len(new):], waiting=server.waiting + new)


def admit(server: Server, rows: int) -> Server:
  """Starts waiting jobs in order, as long as there are rows and free pages for their text.

  One more free page is required for each running job, so that jobs can grow before one of them is
  preempted.
  """
  while server.waiting and len(server.running) < rows:
    job = server.waiting[0]
    # The last byte is computed in any case: the next one follows from its output.
    allocator = pool.add(server.pool, job.name, array_of(job.text[:-1]))
    stored = pool.length(allocator, job.name)
    needed = pages_for(len(job.text)) - pages_for(stored) + len(server.running) + 1
    if server.running and needed > allocator.num_free:
      break
    server = server._replace(pool=allocator, waiting=server.waiting[1:],
                             running=server.running + (job._replace(stored=stored),))
  return server


def preempt(server: Server, job: Job) -> Server:
  """Releases the pages of a running job, which becomes the first to wait."""
  return server._replace(
      pool=pool.release(server.pool, job.name), preemptions=server.preemptions + 1,
      running=tuple(x for x in server.running if x.name != job.name),
      waiting=(job._replace(stored=0),) + server.waiting)


def chunk_of(job: Job, budget: int) -> Chunk:
  """Returns the bytes of a job for the next call: the next ones of its prompt, or guesses."""
  if len(job.text) - job.stored == 1:
    return Chunk(job, *guess(job.text, min(FLAGS.drafts, job.missing - 1, budget - 1)))
  tokens = list(job.text[job.stored:][:min(FLAGS.chunk, budget)])
  return Chunk(job, tokens, list(range(-1, len(tokens) - 1)))


def plan(server: Server, budget: int) -> tuple[Server, list[Chunk]]:
  """Plans the next call: jobs that are generating first, then chunks of prompts.

  Args:
    server: the state.
    budget: T.

  Returns:
    (server with pages for these bytes, their chunks).
  """
  chunks = []
  for job in sorted(server.running, key=lambda job: len(job.text) - job.stored > 1):
    while budget and job in server.running:
      chunk = chunk_of(job, budget)
      try:
        allocator, copies = pool.extend(server.pool, job.name, len(chunk.tokens))
      except pool.OutOfPages:
        planned = {chunk.job.name for chunk in chunks}
        server = preempt(server, [x for x in server.running if x.name not in planned][-1])
      else:
        assert not copies, "only full pages are shared"
        server = server._replace(pool=allocator)
        chunks.append(chunk)
        budget -= len(chunk.tokens)
        break
  return server, chunks


def pack(server: Server, chunks: list[Chunk], shape) -> Arrays:
  """Makes the arrays of a call; shape: (T, q, rows, pages of a row)."""
  num_tokens, most, rows, width = shape
  tokens, positions = np.zeros((2, num_tokens), np.int32)
  parents = np.full((rows, most), -1, np.int32)
  starts, lengths = np.zeros(rows + 1, np.int32), np.zeros(rows, np.int32)
  table = np.zeros((rows, width), np.int32)
  for row, chunk in enumerate(chunks):
    number = len(chunk.tokens)
    lengths[row], starts[row + 1:] = chunk.job.stored + number, starts[row] + number
    depths: list[int] = []
    for parent in chunk.parents:
      depths.append(depths[parent] + 1 if parent >= 0 else 0)
    own = slice(starts[row], starts[row + 1])
    tokens[own], positions[own] = chunk.tokens, np.array(depths) + chunk.job.stored
    parents[row, :number] = chunk.parents
  table[:len(chunks)] = pool.table(server.pool, [chunk.job.name for chunk in chunks], width)
  held = lengths - starts[1:] + starts[:-1]  # bytes of earlier calls, whose full pages are shared
  return Arrays(tokens, positions, parents, PagesMetadata(
      table, lengths, starts, np.int32(len(chunks)),
      prefixes=prefixes.find(table, held // FLAGS.page_size, min_requests=2)))


def reads(metadata: PagesMetadata) -> np.ndarray:
  """Returns int [2]: the pages that a call reads, and those that it need not, being shared."""
  groups = metadata.prefixes
  spared = prefixes.pages_of_requests(groups, np).sum() - groups.page_counts.sum()
  return np.array([pages_for(metadata.context_lens).sum() - spared, spared])


def advance(server: Server, chunks: list[Chunk], likeliest,
            now: float) -> tuple[Server, list[list[int]]]:
  """Returns the state after a call, and the numbers of the guesses of each chunk that were right.

  Args:
    server: the state.
    chunks: those of the call.
    likeliest: int [T], the most likely byte after each byte of the call.
    now: the time (seconds).
  """
  advanced, paths, start = {}, [], 0
  guessed, right = server.guessed, server.right
  for chunk in chunks:
    job, number = chunk.job, len(chunk.tokens)
    path, new = list(range(number)), b""
    if len(job.text) - job.stored == 1:
      path, new = verify(chunk, likeliest[start:start + number])
      guessed, right = guessed + number - 1, right + len(path) - 1
    elif job.stored + number == len(job.text):
      new = bytes([int(likeliest[start + number - 1])])
    before = job.times[-1] if job.times else now  # bytes of one call are spread over its time
    times = tuple(np.linspace(before, now, len(new) + 1)[1:])
    job = job._replace(stored=job.stored + len(path), text=job.text + new, times=job.times + times)
    advanced[job.name], start = job, start + number
    paths.append(path)
  allocator = pool.truncate_all(server.pool, {name: job.stored for name, job in advanced.items()})
  for name, job in advanced.items():
    allocator = pool.publish(allocator, name, array_of(job.text[:job.stored]))
    if not job.missing:
      allocator = pool.release(allocator, name)
  running = [advanced.get(job.name, job) for job in server.running]
  return server._replace(
      pool=allocator, guessed=guessed, right=right,
      done=server.done + tuple(job for job in running if not job.missing),
      running=tuple(job for job in running if job.missing)), paths


# --- The program. --------------------------------------------------------------------------------


def jobs_of(text: np.ndarray, rng) -> tuple[Job, ...]:
  """Makes requests that begin with one of a few prefixes, in the order in which they arrive."""
  def piece(length):
    first = rng.integers(len(text) - length)
    return text[first:first + length].tobytes()

  prefixes = [piece(FLAGS.prefix_length) for _ in range(FLAGS.prefixes)]
  arrivals = np.cumsum(rng.exponential(1 / FLAGS.arrivals, FLAGS.requests)).astype(int)
  jobs = []
  for n, arrival in enumerate(arrivals.tolist()):
    prompt = prefixes[rng.integers(len(prefixes))] + piece(
        int(rng.integers(1, FLAGS.longest_prompt + 1)))
    amount = int(rng.integers(1, FLAGS.longest_answer + 1))
    jobs.append(Job(n, prompt, len(prompt), amount, arrival))
  return tuple(jobs)


class Engine:
  """The model with its caches, compiled for two shapes of a call."""

  def __init__(self, params, config, width: int):
    heads = Heads(config.key_heads, config.head_dim, config.head_dim)
    self.params = params
    row = heads.key_heads * heads.key_width
    self.caches = [
        latent_pages.init(FLAGS.pages, FLAGS.page_size, (row, row), dtype=jnp.float32)
        if FLAGS.latent else pages.init(
            PagesV3, FLAGS.pages, FLAGS.page_size, heads, jnp.float32)
        for _ in range(config.layers)]
    q = FLAGS.drafts + 1
    # Calls in which all jobs generate are short, so they have a smaller shape.
    self.shapes = [(FLAGS.rows * q, q, FLAGS.rows, width),
                   (max(FLAGS.budget, FLAGS.rows * q), max(FLAGS.chunk, q), FLAGS.rows, width)]
    run = jax.jit(functools.partial(step, config=config), donate_argnums=1)
    self.keep = jax.jit(keep, donate_argnums=0)
    print("compiling two shapes of a call", flush=True)
    empty = Server(pool.create(FLAGS.pages, FLAGS.page_size), ())
    self.calls = []
    for shape in self.shapes:
      arrays = pack(empty, [], shape)
      self.calls.append(run.lower(params, self.caches, arrays).compile())
      self.caches = self.keep(self.caches, arrays.metadata, np.full_like(arrays.parents, -1))

  def run(self, server: Server, chunks: list[Chunk]) -> tuple[Arrays, np.ndarray]:
    """Runs a call; returns its arrays and the most likely byte after each of its bytes."""
    long = max(len(chunk.tokens) for chunk in chunks) > self.shapes[0][1]
    arrays = pack(server, chunks, self.shapes[long])
    self.caches, likeliest = self.calls[long](self.params, self.caches, arrays)
    return arrays, np.asarray(likeliest)

  def accept(self, arrays: Arrays, paths: list[list[int]]) -> None:
    """Keeps the guesses that were right; they lie in place unless a path leaves some out."""
    if all(path == list(range(len(path))) for path in paths):
      return
    accepted = np.full_like(arrays.parents, -1)
    for row, path in enumerate(paths):
      accepted[row, :len(path)] = path
    self.caches = self.keep(self.caches, arrays.metadata, accepted)


def serve(params, config, jobs: tuple[Job, ...]) -> Server:
  """Runs all jobs and prints reports."""
  width = pages_for(FLAGS.prefix_length + FLAGS.longest_prompt + FLAGS.longest_answer)
  server = Server(pool.create(FLAGS.pages, FLAGS.page_size), jobs)
  needed = sum(pages_for(job.prompt + job.amount) for job in jobs)
  print(f"{FLAGS.requests} requests need {needed} pages in all; there are {FLAGS.pages}",
        flush=True)
  if FLAGS.pages < width:
    sys.exit(f"--pages={FLAGS.pages}: expected at least {width}, for the longest request")
  engine = Engine(params, config, width)
  call, begun, last_report, most, read = 0, time.monotonic(), 0.0, 0, np.zeros(2, int)
  while server.coming or server.waiting or server.running:
    server = arrive(server, call, time.monotonic())
    server = admit(server, FLAGS.rows)
    server, chunks = plan(server, max(FLAGS.budget, FLAGS.rows * (FLAGS.drafts + 1)))
    most = max(most, FLAGS.pages - server.pool.num_free)
    arrays, likeliest = engine.run(server, chunks)
    read += reads(arrays.metadata)
    server, paths = advance(server, chunks, likeliest, time.monotonic())
    engine.accept(arrays, paths)
    call, now = call + 1, time.monotonic() - begun
    if now - last_report > FLAGS.report_every:
      last_report = now
      print(f"{now:.1f} s: call {call}, {len(server.done)} done, {len(server.running)} running, "
            f"{len(server.waiting)} waiting, {FLAGS.pages - server.pool.num_free} pages in use, "
            f"{generated(server) / now:,.0f} bytes/s", flush=True)
  print(f"{generated(server)} bytes generated in {call} calls, {generated(server) / now:,.0f} a "
        f"second; {server.preemptions} preemptions")
  report(server, most)
  print(f"shared prefixes: {read[0]} pages read in layers without a window, {read.sum()} if every "
        "request read its own")
  return server


def generated(server: Server) -> int:
  """Returns the number of bytes generated so far."""
  return sum(len(job.times) for job in server.done + server.running + server.waiting)


def report(server: Server, most: int) -> None:
  """Prints times, and what the prefix cache and the guesses have saved."""
  def written(seconds) -> str:
    return "p50 {:.1f} ms, p99 {:.1f} ms".format(*1000 * np.percentile(seconds, (50, 99)))

  first = [job.times[0] - job.since for job in server.done]
  between = np.concatenate([[0.0], *(np.diff(job.times) for job in server.done)])[1:]
  print(f"time to the first byte: {written(first)}; between bytes: "
        f"{written(between) if len(between) else 'none'}")
  counts = pool.statistics(server.pool)
  print(f"prefix cache: {counts.hit_rate:.0%} of the bytes of prompts found, {counts.evicted} "
        f"pages evicted; at most {most} of {counts.num_pages} pages in use")
  print(f"guesses: {server.right} of {server.guessed} right")


def differing(params, config, done) -> list:
  """Returns the names of the requests for which the model without a cache gives other bytes."""
  def attend(query, key, value, sliding_window):
    return attention(query, key, value, sliding_window=sliding_window).attention_outputs

  longest = max(len(job.text) for job in done)
  forward = jax.jit(lambda tokens: model.forward(params, tokens, config, attend).argmax(-1))
  found = []
  for job in done:
    tokens = np.zeros((1, longest), np.int32)
    tokens[0, :len(job.text)] = array_of(job.text)
    likeliest = np.asarray(forward(tokens))[0, job.prompt - 1:len(job.text) - 1]
    if bytes(likeliest.tolist()) != job.text[job.prompt:]:
      found.append(job.name)
  return found


def trained(path: pathlib.Path):
  """Returns (parameters, sizes) of --model, which is trained first if it does not exist."""
  if not path.exists():
    print(f"training {path}", flush=True)
    subprocess.run([sys.executable, model.__file__, f"--save={path}", f"--steps={FLAGS.steps}",
                    "--generate=0", "--noverify", "--max_bytes=4000000"], check=True)
  return model.load(path)


def define_flags() -> None:
  flags.DEFINE_string("model", None,
                      "file written by train_and_generate.py --save; default: trained now")
  flags.DEFINE_integer("steps", 100, "training steps of a new model")
  flags.DEFINE_integer("requests", 64, "number of requests")
  flags.DEFINE_float("arrivals", 0.5, "requests that arrive during a call, on average")
  flags.DEFINE_integer("prefixes", 4, "number of shared prefixes of prompts")
  flags.DEFINE_integer("prefix_length", 40, "bytes of a prefix")
  flags.DEFINE_integer("longest_prompt", 120, "most bytes of a prompt after its prefix")
  flags.DEFINE_integer("longest_answer", 60, "most bytes to generate for a request")
  flags.DEFINE_integer("page_size", 16, "bytes of a page")
  flags.DEFINE_integer("pages", 96, "pages of the pool")
  flags.DEFINE_integer("rows", 16, "most requests of a call")
  flags.DEFINE_integer("budget", 96, "most bytes of a call")
  flags.DEFINE_integer("chunk", 32, "most bytes of a prompt in a call")
  flags.DEFINE_integer("drafts", 4, "most guesses for a request in a call")
  flags.DEFINE_boolean("latent", False, "whether pages hold latent rows")
  flags.DEFINE_integer("seed", 0, "seed of the requests")
  flags.DEFINE_float("report_every", 0.5, "seconds between reports")


def main(argv) -> None:
  del argv
  begun = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    params, config = trained(pathlib.Path(FLAGS.model or pathlib.Path(folder) / "model.npz"))
  params = jax.device_put(params)
  _, held_out = model.read(sysconfig.get_paths()["stdlib"], 4_000_000)
  done = serve(params, config, jobs_of(held_out, np.random.default_rng(FLAGS.seed))).done
  job = max(done, key=lambda job: job.amount)
  print("---", job.text[:job.prompt].decode(errors="replace") + "|" +
        job.text[job.prompt:].decode(errors="replace"), "---", sep="\n")
  print(f"comparing {len(done)} requests with the model without a cache", flush=True)
  wrong = differing(params, config, done)
  print(f"{len(done) - len(wrong)} of {len(done)} requests equal those without a cache; "
        f"{time.monotonic() - begun:.0f} s")
  if wrong:
    sys.exit(f"FAILED: other text than without a cache: requests {wrong}")


if __name__ == "__main__":
  # absl shows logs of level INFO, where jax names every platform that this machine lacks.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  define_flags()
  app.run(main)
