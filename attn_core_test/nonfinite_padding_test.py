# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite change no value and no derivative of what does not see them.

For every implementation in the table that runs on this machine, and every variant of `ring`: in
padding (queries that see nothing, keys that no query sees) and in one key head of several.
"""

import functools
import itertools
from typing import Any, Callable

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagesMetadata, PagesV2, attention,
                       ragged_page_attention_v2)
from attn_core.caches import pages
from attn_core.types import RING_VARIANTS
from attn_core_test import ring_cases  # it sets the number of devices before arrays are made
from attn_core_test import gpu_cases, gpu_interpret, property_cases, sampling, tpu_interpret
from attn_core_test.property_cases import BY_NAME, NAMES, PALLAS_TPU

CASES = ("segments_with_padding", "lengths", "dense_mask_per_head", "negative_offset_empty_rows")
NONFINITE = (np.nan, np.inf, -np.inf)


def metadata_of(place: str) -> OperationMetadata:
  """Returns metadata of a platform, or of a variant of `ring` over several devices."""
  if place not in RING_VARIANTS:
    return OperationMetadata(platform=place)
  mesh = None if place == "hybrid" else ring_cases.mesh_of(place, 2)
  return ring_cases.metadata_of(place, mesh=mesh)


def first_order(f: Callable, arrays: dict, moves: dict) -> dict[str, Any]:
  """Returns the output, the gradient of a sum over it, and its tangent."""
  loss = lambda x: jnp.sin(f(x)).sum()
  output, tangent = jax.jvp(f, (arrays,), (moves,))
  return {"output": output, "gradient": jax.grad(loss)(arrays), "tangent": tangent}


def second_order(f: Callable, arrays: dict, moves: dict) -> dict[str, Any]:
  """Returns the derivatives of `first_order` in forward mode."""
  along = lambda g: jax.jvp(g, (arrays,), (moves,))[1]
  found = first_order(f, arrays, moves)
  return {**found, "product": along(jax.grad(lambda x: jnp.sin(f(x)).sum())),
          "curvature": along(lambda x: jax.jvp(f, (x,), (moves,))[1])}


@functools.cache
def compiled(name: str, mechanism: str, place: str, order: Callable) -> Callable:
  """Returns (arrays, tangents) -> derivatives of the output of a property case."""
  # Without sizes so few tokens are computed in one piece, as short_test checks.
  blocks = BlockSizes(8, 8, 8, 8) if mechanism == "blockwise" else None
  def run(arrays):
    return attention(**BY_NAME[name].arguments, **arrays, mechanism=mechanism, block_sizes=blocks,
                     metadata=metadata_of(place)).attention_outputs
  return jax.jit(functools.partial(order, run))


def compare(got: dict, want: dict, changed: dict[str, np.ndarray], message: str) -> None:
  """Compares bits, except where "output" or the gradient of an operand is `changed`."""
  flat, _ = jax.tree_util.tree_flatten_with_path(got)
  for (path, x), y in zip(flat, jax.tree.leaves(want), strict=True):
    name = path[-1].key if len(path) > 1 else "output"
    keep = ~np.broadcast_to(changed.get(name, np.False_), x.shape)
    np.testing.assert_array_equal(np.where(keep, x, 0), np.where(keep, y, 0),
                                  f"{jax.tree_util.keystr(path)}: {message}")


RINGS = [("ring", variant) for variant in RING_VARIANTS]
# Second orders would be slow, or are those of block-wise attention.
FIRST = (*RINGS, PALLAS_TPU, ("autoregressive_decodeattn", "cpu"))
ALL = [(name, *who) for name in CASES for who in (*NAMES, *RINGS)]
QUICK = [("segments_with_padding", mechanism, "cpu")
         for mechanism in ("vanilla", "sdpa", "blockwise")]
TAKEN = sampling.with_slow(QUICK, *(case for case in ALL if case not in QUICK))


class NonfiniteTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(pltpu.force_tpu_interpret_mode())

  def derivatives(self, name, mechanism, place):
    """Returns (compiled function, arrays, tangents)."""
    order = first_order if (mechanism, place) in FIRST else second_order
    arrays, moves = (property_cases.operands(BY_NAME[name], "float32", seed) for seed in (0, 1))
    return compiled(name, mechanism, place, order), arrays, moves

  @parameterized.parameters(*TAKEN)
  def test_in_padding(self, name, mechanism, place):
    run, arrays, moves = self.derivatives(name, mechanism, place)
    want = run(arrays, moves)
    sees = property_cases.visible(BY_NAME[name])
    padding = {"query": ~sees.any(3).transpose(0, 2, 1)[..., None],
               **dict.fromkeys(("key", "value"), ~sees.any((1, 2))[..., None, None])}
    self.assertTrue(padding["query"].any())
    numbers = NONFINITE[:1] if (mechanism, place) == PALLAS_TPU else NONFINITE  # interpreted: slow
    for array, marked in padding.items():
      for number in numbers:
        got = run({**arrays, array: jnp.where(marked, number, arrays[array])}, moves)
        compare(got, want, {}, f"{array} {number}")
    for result in ("gradient", "product"):
      if result in want:
        np.testing.assert_array_equal(np.where(padding["query"], want[result]["query"], 0), 0)

  @parameterized.parameters(*TAKEN)
  def test_in_one_key_head(self, name, mechanism, place):
    run, arrays, moves = self.derivatives(name, mechanism, place)
    want = run(arrays, moves)
    sees = property_cases.visible(BY_NAME[name])
    at = 3
    for head in (0, 1):
      seeing = np.array(sees[..., at])  # [B, H, T]
      seeing[:, [h for h in range(4) if h // 2 != head]] = False
      rows = seeing.transpose(0, 2, 1)[..., None]
      self.assertTrue(rows.any())
      heads = (np.arange(2) == head)[:, None]
      for array in ("key", "value"):
        got = run({**arrays, array: arrays[array].at[:, at, head, 1].set(jnp.nan)}, moves)
        changed = {"output": rows, "query": rows, "key": heads, "value": heads}
        compare(got, want, changed, f"{array} {head}")
        self.assertTrue(np.isnan(np.where(rows, got["output"], np.nan)).all())


class HopperTest(parameterized.TestCase):

  @gpu_interpret.interprets
  @sampling.slow("nonfinite_padding_test.HopperTest")
  def test_in_padding(self):
    """Checks the gradients of the kernels."""
    case, arrays, run = gpu_cases.property_call("segments_with_padding")
    sees = property_cases.visible(case)
    marked = ~sees.any(3).transpose(0, 2, 1)[..., None]
    gradient = jax.grad(lambda arrays: jnp.sin(run(arrays)[0].astype(jnp.float32)).sum())
    want = gpu_interpret.interpret(gradient, arrays)
    for number in NONFINITE:
      got = gpu_interpret.interpret(
          gradient, {**arrays, "query": jnp.where(marked, number, arrays["query"])})
      compare({"gradient": got}, {"gradient": want}, {}, str(number))


CPU, TPU, HOPPER = (OperationMetadata(platform=platform, compute_capability="9.0")
                    for platform in ("cpu", "tpu", "gpu"))
SMALL_BLOCKS = BlockSizes(16, 16, 16, 16)
# (mechanism, dtype, block sizes); several blocks, and all of it in one.
QUERIES = [("vanilla", "bfloat16", None), ("sdpa", "float32", None), ("blockwise", "float32", None),
           ("blockwise", "bfloat16", SMALL_BLOCKS), ("blockwise", "float32", SMALL_BLOCKS),
           ("autoregressive_decodeattn", "bfloat16", None), ("pages", "bfloat16", None)]


class QueryTest(parameterized.TestCase):
  """A query that is not finite has NaN in its own row only, and zeros if it sees no key."""

  def check(self, mechanism, dtype, sizes, metadata=CPU, length=40, cap=None,
            evaluate=lambda run, *arrays: jax.jit(run)(*arrays)):
    rng, width = np.random.default_rng(0), 8 if metadata is CPU else 64
    query, key, value = (jnp.asarray(rng.normal(size=(1, length, heads, width)), dtype)
                         for heads in (4, 2, 2))
    def run(query):
      if mechanism == "pages":
        new = key[0], value[0]
        cache = pages.append(pages.init(PagesV2, 4, 16, Heads(2, width, width), dtype), *new,
                             np.arange(length))
        requests = PagesMetadata([[0, 1, 2]], [length], [0, length])
        output = ragged_page_attention_v2(query[0], cache, requests, logits_soft_cap=cap,
                                          return_lse=True, metadata=metadata)
        return output.attention_outputs[None], output.lse[None]
      output = attention(query, key, value, mechanism=mechanism, logits_soft_cap=cap,
                         block_sizes=sizes, return_lse=mechanism != "sdpa", metadata=metadata)
      return output.attention_outputs, output.lse
    want = evaluate(run, query)[0]
    for number, position in itertools.product(NONFINITE, (0, length // 2)):
      changed = np.zeros(want.shape, bool)
      changed[0, position, 1] = True
      out, lse = evaluate(run, query.at[0, position, 1, 3].set(number))
      np.testing.assert_array_equal(np.float32(out), np.where(changed, np.nan, np.float32(want)))
      self.assertTrue(lse is None or jnp.isnan(lse[0, 1, position]))

  @parameterized.product(call=QUERIES, cap=(None, 5.0))
  def test_not_finite(self, call, cap):
    if call[0] == "sdpa" and cap is not None:
      self.skipTest("refused by name")
    self.check(*call, cap=cap)

  @parameterized.parameters(*sampling.with_slow(
      [("autoregressive_decodeattn", None)], ("flash_attn2", None), ("flash_attn2", 5.0),
      ("autoregressive_decodeattn", 5.0), ("pages", None), ("pages", 5.0)))
  def test_on_a_tpu(self, mechanism, cap):
    with tpu_interpret.interpreted():
      self.check(mechanism, "bfloat16", None, TPU, length=9, cap=cap)

  @sampling.slow_parameters(*itertools.product(
      ("flash_attn2", "autoregressive_decodeattn", "pages"), (None, 5.0)))
  @gpu_interpret.interprets
  def test_on_a_gpu(self, mechanism, cap):
    self.check(mechanism, "bfloat16", None, HOPPER, length=8, cap=cap,
               evaluate=gpu_interpret.interpret)


class UnevenKeysTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("all_gather", 2, 3), ("ulysses", 2, 3)],
      *itertools.product(RING_VARIANTS, (8,), (3, 13, 17))))
  def test_shards_divide_the_queries_only(self, variant, shards, keys):
    """Checks that keys that fill up the last shard are hidden without any other mask."""
    case = ring_cases.Case(lambda b, h, t, s: True, (1, 16, keys, 8, 8, 4, 4), floats=(),
                           arguments=dict(causal=False))
    mesh = ring_cases.mesh_of(variant, shards)
    case.check(ring_cases.metadata_of(variant, mesh=mesh), shards, forward_mode=False)


if __name__ == "__main__":
  absltest.main()
