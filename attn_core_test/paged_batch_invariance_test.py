# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The output of a request has the same bits whatever else is in the batch and in the pages."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, PagedOptions, PagesMetadata, PagesV1, PagesV3,
                       page_attention, ragged_page_attention_v3)
from attn_core.caches import pages


class BatchInvarianceTest(parameterized.TestCase):
  """A request's output has the same bits in 200 random schedules."""

  R, N, PAGE, POOL, ROWS, TOKENS = 4, 8, 4, 40, 16, 29

  @parameterized.parameters((8, 2, 64), (4, 1, 64), (4, 1, 128))
  def test_unused_slots_change_no_bit(self, H, K, D):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (
        (3, H, D), (K, 64, 16, D), (K, 64, 16, D)))
    lengths, tables = np.array([300, 17, 5], np.int32), np.arange(60, dtype=np.int32).reshape(3, 20)
    dead = np.ones((64, 16), bool)
    dead[tables] = np.arange(320).reshape(20, 16) >= lengths[:, None, None]
    attend = jax.jit(lambda x: page_attention(query, PagesV1(*(
        jnp.where(dead[None, ..., None], x, held) for held in (key, value))), PagesMetadata(
            tables, lengths)).attention_outputs)
    np.testing.assert_array_equal(attend(0.0), attend(jnp.nan))

  @parameterized.parameters(("float32", 160), ("bfloat16", 40))
  def test_schedules(self, dtype, schedules):
    rng = np.random.default_rng(0)
    heads = Heads(2, 64, 64)
    sinks = jnp.asarray(rng.normal(size=8), jnp.float32)
    texts = [[rng.normal(size=(self.TOKENS, h, 64)).astype(jnp.dtype(dtype)) for h in (8, 2, 2)]
             for _ in range(6)]
    options = PagedOptions(sliding_window=(11, 0), softmax_aux=sinks, logits_soft_cap=4.0,
                           block_sizes=BlockSizes(block_q=8, block_kv=16), return_lse=True)
    step = jax.jit(lambda cache, metadata, q, k, v: ragged_page_attention_v3(
        q, k, v, cache, metadata, options), donate_argnums=0)
    empty = pages.init(PagesV3, self.POOL, self.PAGE, heads, dtype)
    garbage = [jnp.full_like(empty.pages, x) for x in (jnp.nan, -jnp.inf, 7.0)]

    def play(requests, orders, held=empty.pages):
      """Runs requests (text -> chunk sizes) in random rows and pages; returns their outputs."""
      cache, done = PagesV3(held + 0), {text: 0 for text in requests}
      free = list(orders.permutation(self.POOL))
      tables = {text: [free.pop() for _ in range(self.N)] for text in requests}
      outputs = {text: [] for text in requests}
      chunks = {text: list(sizes) for text, sizes in requests.items()}
      while any(chunks.values()):
        ready = [text for text in chunks if chunks[text]]
        batch = list(orders.permutation(ready))[:orders.integers(1, self.R + 1)]
        arrays = [np.zeros((self.ROWS, *x.shape[1:]), x.dtype) for x in texts[0]]
        starts, lengths, table, start = [0], [], np.zeros((self.R, self.N), np.int32), 0
        taken = []
        for text in batch:
          size = chunks[text][0]
          if start + size > self.ROWS:
            continue
          chunks[text].pop(0)
          for mine, whole in zip(arrays, texts[text]):
            mine[start:start + size] = whole[done[text]:done[text] + size]
          table[len(taken)] = tables[text]
          taken.append((text, start, size))
          done[text], start = done[text] + size, start + size
          starts.append(start)
          lengths.append(done[text])
        pad = lambda x, value: np.array(x + [value] * (self.R - len(taken)), np.int32)
        metadata = PagesMetadata(table, pad(lengths, 0), pad(starts, start),
                                 np.array([len(taken)], np.int32))
        output = step(cache, metadata, *arrays)
        cache = output.cache_view
        out, lse = np.asarray(output.attention_outputs), np.asarray(output.lse)
        for text, begin, size in taken:
          outputs[text].append((out[begin:begin + size], lse[:, begin:begin + size]))
      return {text: (np.concatenate([out for out, _ in parts]),
                     np.concatenate([lse for _, lse in parts], 1))
              for text, parts in outputs.items()}

    alone = {text: play({text: [16, self.TOKENS - 16]}, rng)[text] for text in range(len(texts))}
    once = {text: play({text: [16]}, rng)[text] for text in range(len(texts))}
    for schedule in range(schedules):
      chosen = rng.permutation(len(texts))[:rng.integers(1, self.R + 1)]
      requests = {}
      for text in chosen:
        cuts = np.sort(rng.integers(0, self.TOKENS + 1, size=rng.integers(0, 4)))
        sizes = np.diff([0, *cuts, self.TOKENS])
        sizes = [part for size in sizes for part in [self.ROWS] * (size // self.ROWS) + [
            size % self.ROWS] if part]
        if rng.random() < 0.3:  # the last part token by token
          sizes = [*sizes[:-1], *[1] * sizes[-1]]
        requests[int(text)] = sizes
      held = garbage[schedule % len(garbage)]  # contents of the pages before the first write
      for text, (out, lse) in play(requests, rng, held).items():
        np.testing.assert_array_equal(out, alone[text][0])
        np.testing.assert_array_equal(lse, alone[text][1])
        np.testing.assert_array_equal(out[:16], once[text][0])


if __name__ == "__main__":
  absltest.main()
