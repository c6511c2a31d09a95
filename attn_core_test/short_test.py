# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that one block holds: no loops, programs as small as jax.nn's, bounded memory."""

import functools
import itertools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, attention, masks
from attn_core.kernels.xla import tiling
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands

SHORT = (1, 2, 197, 512)  # lengths
LONG = 513
ONE_PIECE = ("flash_attn2", "blockwise", "vanilla", "auto")


def shapes(batch, length, heads, width=64, dtype="float32"):
  return [jax.ShapeDtypeStruct((batch, length, heads, width), dtype)] * 3


def ours(mechanism, causal=True, **arguments):
  return lambda q, k, v: attention(
      q, k, v, mechanism=mechanism, causal=causal, **arguments).attention_outputs


def jax_nn(q, k, v):
  return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def gradient(attend):
  return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))


def count(program, operation):
  """Returns the number of operations of one kind in an optimized program."""
  return len(re.findall(rf" {operation}\(", program.as_text()))


class ProgramTest(parameterized.TestCase):

  @parameterized.product(mechanism=ONE_PIECE, backward=(False, True), length=SHORT)
  def test_no_loops(self, mechanism, backward, length):
    if (mechanism, length) == ("auto", 1):
      self.skipTest("one query is decoded, in a loop over the rows")
    attend = ours(mechanism)
    if backward:
      attend = gradient(attend)
    self.assertEqual(jax.jit(attend).lower(*shapes(1, length, 2, 8)).as_text().count(
        "stablehlo.while"), 0)

  @parameterized.parameters(
      (LONG, {}), (64, dict(block_sizes=BlockSizes(block_q=16))),
      (64, dict(logits_soft_cap=2.0)), (64, dict(compute_dtype="bfloat16")),
      (64, dict(bias=np.zeros((1, 1, 64, 64), np.float32))))
  def test_loops_where_there_is_something_to_loop_over_or_to_add(self, length, arguments):
    attend = ours("flash_attn2", **arguments)
    self.assertIn("stablehlo.while", jax.jit(attend).lower(*shapes(1, length, 2, 8)).as_text())

  @parameterized.parameters("flash_attn2", "vanilla")
  def test_programs_compile_as_fast_as_those_of_jax_nn(self, mechanism):
    # The time of XLA:CPU is that of its fusions, each of which is a function for LLVM.
    at = (2, 197, 4)
    for wrap in (lambda attend: attend, gradient):
      mine, theirs = (jax.jit(wrap(attend)).lower(*shapes(*at)).compile()
                      for attend in (ours(mechanism), jax_nn))
      self.assertLessEqual(count(mine, "fusion"), 1.5 * count(theirs, "fusion"))
      self.assertEqual(count(mine, "while") + count(mine, "conditional"), 0)

  def test_layers_share_one_trace(self):
    traced = []
    def visible(batch, head, query, key):
      traced.append(1)
      return (query >= key) & (batch >= 0) & (head >= 0)
    mask = masks.custom(visible)
    def layers(number):
      def net(x):
        for _ in range(number):
          x = ours("flash_attn2", causal=False, mask=mask)(x, x, x)
        return x
      traced.clear()
      jax.jit(net).lower(jax.ShapeDtypeStruct((1, 16, 2, 8), "float32"))
      return len(traced)
    self.assertEqual(layers(12), layers(2))


class MemoryTest(parameterized.TestCase):
  """Quadratic temporaries are bounded by a constant."""

  @parameterized.parameters((1, 512, 16), (4, 512, 4), (64, 128, 4), (256, 128, 1))
  def test_the_largest_scores_in_one_piece(self, batch, length, heads):
    scores = batch * heads * length**2
    self.assertEqual(scores, tiling.SHORT_SCORES)
    operand = 4 * batch * length * heads * 64
    for attend, copies in ((ours("flash_attn2"), 3), (gradient(ours("flash_attn2")), 4)):
      program = jax.jit(attend).lower(*shapes(batch, length, heads)).compile()
      self.assertEqual(count(program, "while"), 0)
      self.assertLessEqual(program.memory_analysis().temp_size_in_bytes,
                           copies * 4 * scores + 12 * operand)

  @parameterized.parameters((2, 512, 16), (1, 512, 17), (256, 160, 1))
  def test_more_scores_take_a_loop_and_less_memory(self, batch, length, heads):
    for attend in (ours("flash_attn2"), gradient(ours("flash_attn2"))):
      program = jax.jit(attend).lower(*shapes(batch, length, heads)).compile()
      self.assertGreater(count(program, "while"), 0)
      operand = 4 * batch * length * heads * 64
      self.assertLessEqual(program.memory_analysis().temp_size_in_bytes, 32e6 + 2 * operand)


def reference(mask, q, k, v):
  """Returns output and lse by the oracle."""
  arrays, structure = jax.tree.flatten(mask)
  found = oracle.attention(
      Operands(q, k, v, None, MaskOperands(tuple(map(jnp.asarray, arrays)))),
      AttentionSpec(structure, q.shape[-1]**-0.5, softmax_dtype=q.dtype))
  return found.attention_outputs, found.lse


def make(length, dtype, heads=(6, 2), widths=(16, 8), batch=2, keys=None):
  rng = np.random.default_rng(length)
  return [jnp.asarray(rng.normal(size=(batch, n, h, w)), dtype) for n, h, w in (
      (length, heads[0], widths[0]), (keys or length, heads[1], widths[0]),
      (keys or length, heads[1], widths[1]))]


def loss_of(attend):
  """Returns a function of output and lse that gives both a cotangent."""
  def loss(*x):
    out, lse = attend(*x)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    weight = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return (out.astype(lse.dtype) * weight).sum() + jnp.sin(lse).sum()
  return loss


def ids_of(length):
  """Segments, the second row with padding at both ends."""
  ids = np.stack([np.arange(length) * 3 // length, np.arange(length) * 5 // length - 1])
  ids[1, ids[1] == 3] = -1
  return ids.astype(np.int32)


def mask_of(name, length):
  return {"full": masks.full(), "causal": masks.causal(),
          "window": masks.causal() & masks.window(3, 0),
          "heads": masks.custom(lambda b, h, q, k: (b + 2 * h + q - k) % 5 < 3),
          "segments": masks.segments(ids_of(length))}[name]


def both(attend):
  """Returns a function that computes output, lse and the gradients of both."""
  return jax.jit(lambda *x: (attend(*x), jax.grad(loss_of(attend), (0, 1, 2))(*x)))


@functools.lru_cache(maxsize=None)
def truth(name, length):
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(y), jnp.float64) for y in make(length, "float32")]
    found = both(functools.partial(reference, mask_of(name, length)))(*wide)
    return jax.tree.map(np.asarray, found)


class ValuesTest(parameterized.TestCase):
  """Values and gradients on both sides of the choice."""

  @parameterized.parameters(
      *itertools.product((*SHORT, LONG), ("full", "causal", "window", "segments"),
                         ("flash_attn2",)),
      *itertools.product((1, 197, LONG), ("full", "segments"), ("vanilla",)),
      (197, "heads", "flash_attn2"), (197, "heads", "vanilla"))
  def test_float32(self, length, name, mechanism):
    def attend(q, k, v):
      output = attention(q, k, v, mechanism=mechanism, causal=False, mask=mask_of(name, length),
                         return_lse=True)
      return output.attention_outputs, output.lse
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
                 both(attend)(*make(length, "float32")), truth(name, length))

  @parameterized.parameters("flash_attn2", "vanilla")
  def test_queries_without_keys(self, mechanism):
    x = make(7, "float32")
    for mask in (~masks.full(), masks.segments(np.full((2, 7), -1, np.int32))):
      def attend(q, k, v):
        output = attention(q, k, v, mechanism=mechanism, causal=False, mask=mask, return_lse=True)
        return output.attention_outputs, output.lse
      out, lse = attend(*x)
      np.testing.assert_array_equal(out, np.zeros_like(out))
      np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))
      for d in jax.grad(loss_of(attend), (0, 1, 2))(*x):
        np.testing.assert_array_equal(d, np.zeros_like(d))

  @parameterized.parameters("flash_attn2", "vanilla")
  def test_third_derivatives_of_both_modes(self, mechanism):
    with jax.enable_x64(True):
      q, k, v = make(5, "float64")
      along = lambda t: (q + t * k.repeat(3, 2), k * (1 + t), v)
      run = lambda t: jnp.sin(ours(mechanism)(*along(t))).sum()
      want = lambda t: jnp.sin(reference(masks.causal(), *along(t))[0]).sum()
      third = lambda f, d: float(jax.jit(d(d(d(f))))(0.3))
      self.assertAlmostEqual(third(run, jax.jacfwd), third(want, jax.jacfwd), places=8)
      if mechanism == "vanilla":
        self.assertAlmostEqual(third(run, jax.grad), third(want, jax.jacfwd), places=8)


class NonfiniteTest(parameterized.TestCase):
  """Non-finite numbers change no bit of what does not see them, in the batch or in the row."""

  @parameterized.parameters(
      ("flash_attn2", "float32"), ("vanilla", "float32"), ("vanilla", "bfloat16"))
  def test_rows_and_hidden_keys(self, mechanism, dtype):
    x = make(32, dtype, heads=(2, 2), widths=(16, 16), batch=3)
    ids = np.zeros((3, 32), np.int32)
    ids[:, 20:] = -1
    def attend(q, k, v):
      output = attention(q, k, v, mechanism=mechanism, causal=True, return_lse=True,
                         mask_info=MaskInfo.from_segments(ids))
      return output.attention_outputs, output.lse
    both = jax.jit(lambda *x: (*attend(*x), *jax.grad(loss_of(attend), (0, 1, 2))(*x)))
    clean = both(*x)
    for bad, which, at in itertools.product((np.nan, np.inf, -np.inf), range(3), (0, 5)):
      # One number in the padding of row 0, and one in row 1, which queries see or are from `at` on.
      spoilt = list(x)
      spoilt[which] = x[which].at[0, 25, 1, 3].set(bad).at[1, at, 1, 3].set(bad)
      got = both(*spoilt)
      for a, b in zip(clean, got):
        np.testing.assert_array_equal(a[jnp.array([0, 2])], b[jnp.array([0, 2])])
      out, lse = got[:2]
      np.testing.assert_array_equal(clean[0][1, :at], out[1, :at])
      np.testing.assert_array_equal(clean[0][1, :, 0], out[1, :, 0])
      seeing = [at] if which == 0 else list(range(at, 20))
      self.assertTrue(np.isnan(np.asarray(out, np.float32)[1, seeing, 1]).all(), (bad, which, at))
      self.assertTrue(np.isnan(lse[1, 1, np.array(seeing)]).all(), (bad, which, at))

  def test_other_rows_change_no_bit(self):
    q, k, v = make(64, "float32", batch=4)
    both = jax.jit(lambda *x: (ours("flash_attn2")(*x), *gradient(ours("flash_attn2"))(*x)))
    for a, b in zip(both(q, k, v), both(*[x.at[1:].multiply(3) for x in (q, k, v)])):
      np.testing.assert_array_equal(a[0], b[0])


if __name__ == "__main__":
  absltest.main()
