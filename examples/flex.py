# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples of FlexAttention's authors, in this library: masks and functions of the scores.

    python3 examples/flex.py

FlexAttention is told apart by two functions: `mask_mod` says which keys a query sees, `score_mod`
changes the scores. Here both are values. The program computes each example by the block-wise
mechanism, in memory linear in the length, and by the definition with all scores at once, and prints
how far they are apart, of the largest number, in the output and in the gradients of query, key,
value and every array that a score mod reads. Named masks and score mods are used where there are
some; the tree, the 2-D neighborhood and a function of two documents are functions. It takes about
half a minute on a CPU.

https://pytorch.org/blog/flexattention/
"""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, attention, masks, score_mods

B, T, H, D = 2, 96, 4, 32
WIDTH = 12  # of an image of 8 by 12 tokens
PARENTS = np.array([-1, *((n - 1) // 2 for n in range(1, T))], np.int32)  # of a binary tree
DOCUMENTS = np.repeat(np.arange(3, dtype=np.int32), T // 3)[None].repeat(B, 0)
PREFIX = np.array([20, 33], np.int32)


class Example(NamedTuple):
  """One example: as values of this library, and as functions of indices."""

  mask: masks.Mask = masks.full()
  seen: Callable[..., Any] = lambda b, h, q, k: True
  make: Callable[..., score_mods.ScoreMod | None] = lambda *arrays: None
  score: Callable[..., Any] = lambda score, b, h, q, k, *arrays: score
  shapes: tuple[tuple[int, ...], ...] = ()  # of the arrays that the score mod reads


def ancestors() -> np.ndarray:
  """Returns which nodes of the tree are a node or above it, bool [nodes, nodes]."""
  seen = np.eye(T, dtype=bool)
  for node in range(1, T):
    seen[node] |= seen[PARENTS[node]]
  return seen


def neighbors(b, h, q, k):
  """Says whether two tokens of the image are at most 2 rows and 2 columns apart."""
  return (abs(q // WIDTH - k // WIDTH) <= 2) & (abs(q % WIDTH - k % WIDTH) <= 2)


def of_table(b, h, q, k, table):
  """Reads from a table whether a key is seen."""
  return table[q, k]


def between_documents(score, b, h, q, k, amount, ids):
  """Returns the score, lowered by a learned amount where the documents differ."""
  return jnp.where(ids[b, q] == ids[b, k], score, score - amount[h] ** 2)


CAUSAL = lambda b, h, q, k: q >= k
EXAMPLES = {
    "causal": Example(masks.causal(), CAUSAL),
    "sliding window": Example(masks.causal() & masks.window(16, 0),
                              lambda b, h, q, k: (q >= k) & (q - k <= 16)),
    "prefix LM": Example(masks.prefix(PREFIX) | masks.causal(),
                         lambda b, h, q, k: (k < jnp.asarray(PREFIX)[b]) | (q >= k)),
    "documents": Example(
        masks.causal() & masks.segments(DOCUMENTS),
        lambda b, h, q, k: (q >= k) & (jnp.asarray(DOCUMENTS)[b, q]
                                       == jnp.asarray(DOCUMENTS)[b, k])),
    "ALiBi": Example(masks.causal(), CAUSAL, score_mods.alibi,
                     lambda score, b, h, q, k, slopes: score + slopes[h] * (k - q), ((H,),)),
    "relative bias": Example(
        make=score_mods.by_distance,
        score=lambda score, b, h, q, k, table: score + table[jnp.clip(k - q, -8, 8) + 8, h],
        shapes=((17, H),)),
    "soft cap": Example(masks.causal(), CAUSAL, lambda: score_mods.soft_cap(2.0),
                        lambda score, b, h, q, k: 2 * jnp.tanh(score / 2)),
    "2-D neighborhood": Example(masks.custom(neighbors), neighbors),
    "tree": Example(masks.custom(of_table, ancestors()),
                    lambda b, h, q, k: jnp.asarray(ancestors())[q, k]),
    "a function": Example(
        make=lambda amount: score_mods.custom(between_documents, amount, DOCUMENTS),
        score=lambda score, b, h, q, k, amount: between_documents(
            score, b, h, q, k, amount, jnp.asarray(DOCUMENTS)), shapes=((H,),)),
}


def defined(example: Example, query, key, value, *arrays):
  """Computes attention by its definition, with all scores at once."""
  scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") * D**-0.5
  indices = jnp.indices(scores.shape)
  scores = example.score(scores, *indices, *arrays)
  weights = jax.nn.softmax(jnp.where(example.seen(*indices), scores, -jnp.inf))
  return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest")


def computed(example: Example, query, key, value, *arrays):
  """Computes the same block by block."""
  return attention(query, key, value, mechanism="blockwise", causal=False, mask=example.mask,
                   score_mod=example.make(*arrays), block_sizes=BlockSizes(32, 32, 32, 32)
                   ).attention_outputs


def main():
  for name, example in EXAMPLES.items():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    arrays = [jax.random.normal(next(keys), shape)
              for shape in ((B, T, H, D),) * 3 + example.shapes]
    weights = jax.random.normal(next(keys), (B, T, H, D))

    def both(attend):
      loss = lambda arrays: (attend(example, *arrays) * weights).sum()
      return jax.jit(lambda arrays: (attend(example, *arrays), jax.grad(loss)(arrays)))(arrays)

    found, want = (jax.tree.leaves(both(attend)) for attend in (computed, defined))
    # Of the largest number: a slope's gradient sums 96 x 96 scores, each times a distance.
    errors = [float(abs(x - y).max() / abs(y).max()) for x, y in zip(found, want)]
    print(f"{name:17} output {errors[0]:.1e}  gradients {max(errors[1:]):.1e}", flush=True)
    if not max(errors) < 1e-4:
      raise SystemExit(f"{name} is not what its definition says")


if __name__ == "__main__":
  main()
