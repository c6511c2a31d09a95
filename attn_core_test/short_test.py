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

from attn_core import BlockSizes, MaskInfo, attention, caches, masks
from attn_core.kernels.common.contract import LseOnly, Residuals
from attn_core.kernels.xla import plain, tiling
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling

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


def layers(attend, number):
  """Returns a function of query, key and value that applies `attend` `number` times."""
  def net(q, k, v):
    for _ in range(number):
      q = attend(q, k, v)
    return q
  return net


def gradient(attend):
  return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))


def functions(program):
  """Returns the number of different functions that LLVM compiles for an optimized program.

  These are its fusions, but those of XLA:CPU's library, and equal ones once: their time is that of
  compiling a program.
  """
  bodies, found = {}, []
  for name, body in re.findall(
      r"^(?:ENTRY )?(%[\w.\-]+) \([^\n]*\{\n(.*?)^\}", program.as_text(), re.M | re.S):
    names = {}
    number = lambda match: names.setdefault(match[0], f"%{len(names)}")
    text = re.sub(r", (metadata|backend_config)=.*", "", body)
    bodies[name] = re.sub(r"%[\w.\-]+", number, text)
    found += re.findall(r" fusion\(.*kind=k(?:Loop|Input|Output), calls=(%[\w.\-]+)", body)
  return len({bodies[name] for name in found})


def count(program, operation):
  """Returns the number of operations of one kind in an optimized program."""
  return len(re.findall(rf" {operation}\(", program.as_text()))


@functools.cache
def fusions_of_jax(dtype, causal):
  """Returns the number of fusions of jax.nn's program, and of its gradient's."""
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
  return [count(jax.jit(run).lower(*shapes(2, 197, 4, 64, dtype)).compile(), "fusion")
          for run in (attend, gradient(attend))]


class ProgramTest(parameterized.TestCase):

  @parameterized.product(mechanism=ONE_PIECE, backward=(False, True), length=SHORT,
                         dtype=("float32", "bfloat16", "float16"))
  def test_no_loops(self, mechanism, backward, length, dtype):
    if (mechanism, length) == ("auto", 1):
      self.skipTest("one query is decoded, in a loop over the rows")
    attend = ours(mechanism)
    if backward:
      attend = gradient(attend)
    loops = jax.jit(attend).lower(*shapes(1, length, 2, 8, dtype)).as_text().count(
        "stablehlo.while")
    # Measured: without derivatives, masked float16 takes less time in loops.
    in_loops = dtype == "float16" and length >= 64 and mechanism != "vanilla" and not backward
    self.assertEqual(loops > 0, in_loops)

  @parameterized.parameters(
      (LONG, {}), (64, dict(block_sizes=BlockSizes(block_q=16))),
      (64, dict(logits_soft_cap=2.0)),
      (64, dict(bias=np.zeros((1, 1, 64, 64), np.float32))))
  def test_loops_where_there_is_something_to_loop_over_or_to_add(self, length, arguments):
    attend = ours("flash_attn2", **arguments)
    self.assertIn("stablehlo.while", jax.jit(attend).lower(*shapes(1, length, 2, 8)).as_text())

  @parameterized.product(mechanism=("flash_attn2", "vanilla"), dtype=("float32", "bfloat16"),
                         causal=(True, False))
  def test_programs_compile_as_fast_as_those_of_jax_nn(self, mechanism, dtype, causal):
    # The time of XLA:CPU is that of its fusions, each of which is a function for LLVM.
    for wrap, theirs in zip((lambda attend: attend, gradient), fusions_of_jax(dtype, causal)):
      mine = jax.jit(wrap(ours(mechanism, causal))).lower(*shapes(2, 197, 4, 64, dtype)).compile()
      self.assertLessEqual(count(mine, "fusion"), 1.5 * theirs)
      self.assertEqual(count(mine, "while") + count(mine, "conditional"), 0)

  @parameterized.product(dtype=("float32", "bfloat16"), backward=(False, True))
  def test_many_layers_compile_as_fast_as_those_of_jax_nn(self, dtype, backward):
    wrap = gradient if backward else lambda attend: attend
    mine, theirs = (count(jax.jit(wrap(layers(attend, 6))).lower(
        *shapes(2, 128, 4, 64, dtype)).compile(), "fusion")
                    for attend in (ours("flash_attn2"), jax_nn))
    self.assertLessEqual(mine, 1.5 * theirs)

  @parameterized.parameters(False, True)
  def test_products_of_16_bits_stay_in_16_bits(self, causal):
    if jax.__version_info__ < (0, 11):
      self.skipTest("XLA:CPU of jax 0.10.2 multiplies 16-bit numbers in a library of its own")
    for attend, number in ((ours("flash_attn2", causal), 2),
                           (gradient(ours("flash_attn2", causal)), 5)):
      program = jax.jit(attend).lower(*shapes(2, 128, 4, 64, "bfloat16")).compile().as_text()
      kinds = dict(re.findall(r"(%[\w.\-]+) = (\w+)\[", program))
      products = re.findall(r" dot\((%[\w.\-]+), (%[\w.\-]+)\)", program)
      self.assertEqual([tuple(kinds[name] for name in pair) for pair in products],
                       number * [("bf16", "bf16")])

  @parameterized.parameters(True, False)
  def test_one_token(self, causal):
    """Nothing is looped over, chosen or multiplied by a library where there is one key."""
    for attend in (ours("auto", causal), ours("vanilla", causal)):
      program = jax.jit(attend).lower(*shapes(3, 1, 2)).compile()
      self.assertEqual([count(program, kind) for kind in ("while", "compare")], [0, 0])

  @parameterized.product(dtype=("float32", "bfloat16"), backward=(False, True))
  def test_sums_of_one_token_have_no_axis_of_tokens(self, dtype, backward):
    """XLA:CPU of jax 0.10.2 takes 4 times as long for sums whose result has an axis of T = 1."""
    wrap = gradient if backward else lambda attend: attend
    mine, theirs = (jax.jit(wrap(attend)).lower(*shapes(256, 1, 8, 64, dtype)).compile()
                    for attend in (ours("vanilla"), jax_nn))
    found = re.findall(r"= (\w+\[[\d,]*\])\S* reduce\(", mine.as_text())
    self.assertEqual(found, (2 if backward else 1) * ["f32[256,8]"])
    self.assertLessEqual(count(mine, "fusion"), count(theirs, "fusion"))

  @parameterized.product(shape=((1, 128, 1), (4, 16, 8)), causal=(True, False))
  def test_small_arrays_of_bfloat16_start_no_threads(self, shape, causal):
    """Starting one takes longer than the 8,192 numbers: such a call took up to 5 times as long."""
    if jax.__version_info__ < (0, 11):
      self.skipTest("XLA:CPU of jax 0.10.2 removes barriers before it joins functions")
    for attend in (ours("vanilla", causal), gradient(ours("vanilla", causal))):
      program = jax.jit(attend).lower(*shapes(*shape, 64, "bfloat16")).compile()
      found = re.findall(r".*outer_dimension_partitions\":\[\".*", program.as_text())
      self.assertEmpty([line for line in found if "bitcast_convert" in line])

  def test_products_of_few_keys_are_apart(self):
    """XLA:CPU of jax 0.12 takes up to 1.3 times as long for both products in one function."""
    if jax.__version_info__ < (0, 11):
      self.skipTest("XLA:CPU of jax 0.10.2 removes barriers before it joins functions")
    program = jax.jit(ours("vanilla", False)).lower(*shapes(32, 16, 8)).compile().as_text()
    bodies = re.findall(r"^(?:ENTRY )?%[\w.\-]+ \([^\n]*\{\n(.*?)^\}", program, re.M | re.S)
    self.assertEqual(sorted(body.count(" dot(") for body in bodies)[-2:], [1, 1])

  def test_16_bits_are_rounded_by_the_product(self):
    if not plain.ROUNDS_IN_PRODUCTS:
      self.skipTest("XLA:CPU of jax 0.10.2 takes twice as long for results of 16 bits")
    program = jax.jit(ours("vanilla")).lower(*shapes(2, 16, 4, 64, "bfloat16")).as_text()
    self.assertEqual(re.findall(r"dot_general.* -> tensor<[\dx]*x(\w+)>", program),
                     ["f32", "bf16"])

  @parameterized.parameters(("float32", 1), ("float32", 16), ("bfloat16", 16))
  def test_no_sum_finds_nan_in_values(self, dtype, length):
    """The sum of the weights is the only one, of one key there is none; it took a tenth longer."""
    program = jax.jit(ours("vanilla")).lower(*shapes(3, length, 2, 8, dtype)).as_text()
    self.assertEqual(program.count("applies stablehlo.add"), int(length > 1))

  def test_the_forward_and_its_gradient_compute_the_weights_once(self):
    def both(q, k, v):
      return jax.vjp(ours("flash_attn2"), q, k, v)[1](q), ours("flash_attn2")(q, k, v)
    found = [count(jax.jit(run).lower(*shapes(2, 128, 4)).compile(), "exponential")
             for run in (ours("flash_attn2"), both)]
    self.assertEqual(found, [1, 1])

  def test_layers_share_one_trace(self):
    def traces(number):
      traced = []
      def visible(batch, head, query, key):
        traced.append(1)
        return (query >= key) & (batch >= 0) & (head >= 0)
      attend = ours("flash_attn2", causal=False, mask=masks.custom(visible))
      jax.jit(layers(attend, number)).lower(*shapes(1, 16, 2, 8))
      return len(traced)
    self.assertEqual(traces(12), traces(2))


class LoopProgramTest(parameterized.TestCase):
  """Bounds of the programs that have loops: what they have more is time to compile."""

  # (loops, products, fusions, functions) at most, as jax 0.12 optimizes them; jax.nn has 9 and 25
  # fusions, 5 and 18 functions.
  @parameterized.parameters(
      ("float32", False, (3, 2, 33, 22)), ("float32", True, (6, 7, 76, 42)),
      ("bfloat16", False, (3, 2, 34, 23)), ("bfloat16", True, (6, 7, 83, 49)))
  def test_long_sequences(self, dtype, backward, most):
    attend = gradient(ours("flash_attn2")) if backward else ours("flash_attn2")
    program = jax.jit(attend).lower(*shapes(1, 4096, 8, 64, dtype)).compile()
    found = [*(count(program, operation) for operation in ("while", "dot", "fusion")),
             functions(program)]
    for x, limit in zip(found if jax.__version_info__ >= (0, 12) else found[:2], most):
      self.assertLessEqual(x, limit, found)

  def test_a_mask_that_hides_nothing_is_not_evaluated(self):
    for causal, conditions in ((True, 1), (False, 0)):
      program = jax.jit(ours("flash_attn2", causal)).lower(*shapes(1, 1024, 2, 16)).compile()
      self.assertEqual(count(program, "conditional"), conditions)

  # That sums of 8 numbers are a product takes one function of bfloat16, and a tenth of the time.
  @parameterized.parameters(("float32", 54), ("bfloat16", 55))
  def test_decode_step(self, dtype, most):
    cache = jax.eval_shape(lambda: caches.dense.init(8, 8192, (8, 128), dtype=dtype))
    tokens = lambda heads: jax.ShapeDtypeStruct((8, 1, heads, 128), dtype)
    program = jax.jit(lambda q, k, v, cache: attention(q, k, v, cache_view=cache)).lower(
        tokens(32), tokens(8), tokens(8), cache).compile()
    self.assertLessEqual(count(program, "while"), 4)
    if jax.__version_info__ >= (0, 12):
      self.assertLessEqual(functions(program), most)


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

  @parameterized.parameters(
      ({}, 1), ({"policy": "nothing_saveable"}, 0), ({"block_sizes": BlockSizes(block_q=256)}, 0))
  def test_weights_kept_for_each_layer(self, arguments, kept):
    """Checks what docs/guides/derivatives.md says of forward and gradient in one program."""
    if "policy" in arguments and jax.__version_info__ < (0, 11):
      self.skipTest("XLA of jax 0.10 merges the recomputation with the first computation on a CPU")
    batch, length, heads = 1, 512, 4
    def temporaries(number):
      net = layers(ours("flash_attn2", **arguments), number)
      loss = lambda x: net(x, x, x).sum()
      program = jax.jit(jax.value_and_grad(loss)).lower(shapes(batch, length, heads)[0]).compile()
      return program.memory_analysis().temp_size_in_bytes
    more = temporaries(5) - temporaries(3)  # of two layers
    weights, operand = 4 * batch * heads * length**2, 4 * batch * length * heads * 64
    self.assertLessEqual(more, 2 * (kept * weights + 3 * operand))
    self.assertEqual(more > weights, kept == 1)

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


def both(attend, options=None):
  """Returns a function that computes output, lse and the gradients of both."""
  return jax.jit(lambda *x: (attend(*x), jax.grad(loss_of(attend), (0, 1, 2))(*x)),
                 compiler_options=options)


@functools.lru_cache(maxsize=None)
def truth(name, length):
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(y), jnp.float64) for y in make(length, "float32")]
    found = both(functools.partial(reference, mask_of(name, length)), sampling.LEAST)(*wide)
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

  @parameterized.product(queries=(1, 3), heads=((4, 2), (2, 2)))
  def test_one_key(self, queries, heads):
    x = make(queries, "float32", heads=heads, keys=1)
    def attend(q, k, v):
      output = attention(q, k, v, mechanism="vanilla", causal=False, return_lse=True)
      return output.attention_outputs, output.lse
    with jax.enable_x64(True):
      wide = [jnp.asarray(np.asarray(y), jnp.float64) for y in x]
      want = jax.tree.map(np.asarray, both(
          functools.partial(reference, masks.full()), sampling.LEAST)(*wide))
    run = both(attend)
    clean = run(*x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), clean, want)
    for which, bad in itertools.product(range(3), (np.nan, np.inf)):
      spoilt = list(x)
      spoilt[which] = x[which].at[1, 0, 1, 1].set(bad)
      (out, lse), gradients = run(*spoilt)
      rows = (1, slice(0, 1), 1) if which == 0 else (1, slice(None), slice(-(heads[0] // 2), None))
      reached = np.zeros(out.shape[:3], bool)
      reached[rows] = True
      np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(reached[..., None], out.shape))
      np.testing.assert_array_equal(np.isnan(lse), reached.swapaxes(1, 2))
      for a, b in zip(gradients, clean[1]):
        np.testing.assert_array_equal(a[0], b[0])
      self.assertTrue(np.isnan(gradients[0][reached]).all())

  @parameterized.parameters("flash_attn2", "vanilla")
  def test_queries_without_keys(self, mechanism):
    x = make(7, "float32")
    for mask in (~masks.full(), masks.segments(np.full((2, 7), -1, np.int32))):
      def attend(q, k, v):
        output = attention(q, k, v, mechanism=mechanism, causal=False, mask=mask, return_lse=True)
        return output.attention_outputs, output.lse
      (out, lse), gradients = both(attend)(*x)
      np.testing.assert_array_equal(out, np.zeros_like(out))
      np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))
      for d in gradients:
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


class PrecisionTest(parameterized.TestCase):
  """Gradients in 16 bits, without bias and sinks; `gradient_precision_test` has both."""

  # Compiled once for each length and dtype.
  mine = staticmethod(jax.jit(ours("flash_attn2")))
  theirs = staticmethod(jax.jit(jax_nn))
  exact = staticmethod(jax.jit(jax.grad(
      lambda *x: (reference(masks.causal(), *x[:3])[0] * x[3]).sum(), (0, 1, 2)),
                               compiler_options=sampling.LEAST))

  @parameterized.product(kind=("random", "peaked", "equal"), dtype=("bfloat16", "float16"),
                         length=(16, 96, 160))
  def test_as_precise_as_jax_nn(self, kind, dtype, length):
    q, k, v = make(length, dtype, heads=(4, 2), widths=(64, 64))
    if kind == "peaked":
      q = q * 5
    if kind == "equal":
      k = v = k * 1.5
      q = k.repeat(2, 2)
    cotangent = make(length, dtype, heads=(4, 4), widths=(64, 64))[1]
    def gradients(attend, *x):
      loss = lambda *x: (attend(*x).astype(cotangent.dtype) * cotangent).sum(dtype=jnp.float32)
      return [np.asarray(y, np.float64) for y in jax.grad(loss, (0, 1, 2))(*x)]
    with jax.enable_x64(True):
      wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, cotangent)]
      want = [np.asarray(y) for y in self.exact(*wide)]
    mine = gradients(self.mine, q, k, v)
    # Uncompiled, it computes float16 too.
    theirs = gradients(jax_nn if dtype == "float16" else self.theirs, q, k, v)
    for a, b, c in zip(mine, theirs, want):
      error = lambda x, y: np.sqrt(((x - y)**2).mean() / (y**2).mean())
      self.assertLessEqual(error(a, c), 1.1 * error(b, c) + float(jnp.finfo(dtype).eps) / 4)

  @parameterized.product(dtype=("bfloat16", "float16"), name=("full", "window", "segments"),
                         lengths=((1, 40), (33, 70), (200, 9)))
  def test_values_of_16_bits(self, dtype, name, lengths):
    x = make(lengths[0], dtype, keys=lengths[1])
    mask = {"full": masks.full(), "window": masks.window(5, 5), "segments": masks.segments(
        ids_of(lengths[0]), ids_of(lengths[1]))}[name]
    def attend(q, k, v):
      output = attention(q, k, v, mechanism="flash_attn2", causal=False, mask=mask, query_offset=3,
                         return_lse=True)
      return output.attention_outputs, output.lse
    with jax.enable_x64(True):
      wide = [jnp.asarray(np.asarray(y, np.float64)) for y in x]
      moved = masks.offset(mask, 3) if name == "window" else mask
      want = jax.tree.map(np.asarray, both(
          functools.partial(reference, moved), sampling.LEAST)(*wide))
    eps = float(jnp.finfo(dtype).eps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        np.asarray(a, np.float64), b, rtol=4 * eps, atol=4 * eps * max(1, np.abs(np.where(
            np.isfinite(b), b, 0)).max())), both(attend)(*x), want)

  @parameterized.parameters(24, 1)
  def test_backward_from_the_lse_of_more_keys(self, length):
    q, k, v = make(length, "float32")
    operands = Operands(q, k, v, None, MaskOperands(()))
    spec = AttentionSpec(jax.tree.structure(masks.causal()), 0.25)
    run = functools.partial(plain.backward, operands, spec, BlockSizes())
    residuals = plain.forward(operands, spec, BlockSizes())
    shape = residuals.out.shape
    d_out, d_lse = jnp.cos(jnp.arange(float(np.prod(shape)))).reshape(shape), residuals.lse * 0 + 1
    wrt = ("query", "key", "value")
    delta = (d_out * residuals.out).sum(-1).swapaxes(1, 2)
    for a, b in zip(run(residuals, Residuals(d_out, d_lse), wrt), run(
        LseOnly(None, residuals.lse), Residuals(d_out, d_lse - delta), wrt)):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class NonfiniteTest(parameterized.TestCase):
  """Non-finite numbers change no bit of what does not see them, in the batch or in the row."""

  # Compiled once for each dtype.
  unmasked = staticmethod(both(lambda q, k, v: attention(
      q, k, v, mechanism="flash_attn2", causal=False, return_lse=True)[::2]))

  @parameterized.parameters(
      ("flash_attn2", "float32"), ("flash_attn2", "bfloat16"), ("flash_attn2", "float16"),
      ("vanilla", "float32"), ("vanilla", "bfloat16"))
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

  @parameterized.product(dtype=("float32", "bfloat16"), which=("q", "k", "v"),
                         bad=(np.nan, np.inf, -np.inf))
  def test_without_a_mask(self, dtype, which, bad):
    x = dict(zip("qkv", make(8, dtype, heads=(2, 2), widths=(16, 16))))
    x[which] = x[which].at[1, 3, 1, 5].set(bad)
    (out, lse), (dq, dk, dv) = jax.tree.map(
        lambda x: np.isnan(np.asarray(x, np.float32)), self.unmasked(*x.values()))
    rows = np.arange(8) == 3 if which == "q" else np.full(8, True)
    np.testing.assert_array_equal(lse[1, 1], rows)
    for found, want in ((out, rows), (dq, rows), (dk, True), (dv, True)):
      np.testing.assert_array_equal(found[1, :, 1], np.broadcast_to(want, (16, 8)).T)
    for found in (out, dq, dk, dv):
      self.assertFalse(found[0].any() or found[1, :, 0].any())

  def test_other_rows_change_no_bit(self):
    q, k, v = make(64, "float32", batch=4)
    both = jax.jit(lambda *x: (ours("flash_attn2")(*x), *gradient(ours("flash_attn2"))(*x)))
    for a, b in zip(both(q, k, v), both(*[x.at[1:].multiply(3) for x in (q, k, v)])):
      np.testing.assert_array_equal(a[0], b[0])


if __name__ == "__main__":
  absltest.main()
