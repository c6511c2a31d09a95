# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers for which the naive softmax of the TPU forward fails: the kernel in interpret mode.

The oracle computes in float64. Blocks are small, so that a row of blocks has several steps.
"""

import collections
import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import BlockSizes, MaskInfo, masks, score_mods
from attn_core.kernels.tpu.flash import forward_step, softmax_choice, strip_loop
from attn_core_test import sampling
from attn_core_test.tpu_cases import Case
from attn_core_test.tpu_interpret import interpreted

T, PADDED = 384, 150
SEVERAL = Case({}, B=2, T=T, D=32, dtype="bfloat16")
ONE_STEP = Case(dict(causal=False), masks.full(), B=2, T=256, H=2, D=32, dtype="bfloat16",
                blocks=BlockSizes(128, 256))
# A call of one step begins with the safe softmax.
ONLY_STEP = ONE_STEP._replace(B=1, blocks=BlockSizes(256, 256))
# Of so many strips that the safe softmax computes them in a loop, in pairs; one is left of seven.
# The loop has two parts of 256 queries, and one of 128.
SIX_STRIPS = ONE_STEP._replace(S=2304, D=128, blocks=None)
SEVEN_STRIPS = SIX_STRIPS._replace(T=128, S=3584)
SHAPES = {"several_steps": SEVERAL, "one_step": ONE_STEP, "only_step": ONLY_STEP,
          "six_strips": SIX_STRIPS, "seven_strips": SEVEN_STRIPS}
CHANGES = {  # of batch row 0, by argument
    "nothing": {},
    **{f"times_{n}": {"query": lambda x, n=n: x.at[0].multiply(n)} for n in (8, 64, 512, 4096)},
    # Exact in float32, whose neighbors are far apart there: a maximum must stay near itself.
    "logits_of_1e9": {"query": lambda x: x.at[0].set(huge(x.shape[1:], 2**17)),
                      "key": lambda x: x.at[0].set(huge(x.shape[1:], 2**16))},
    "one_hot_row": {"query": lambda x: x.at[0, 200, 0].multiply(512)},
    "one_hot_head": {"query": lambda x: x.at[0, :, 1].multiply(512)},
    "hot_in_the_last_step": {"key": lambda x: x.at[0, -50:].multiply(512)},
    "low_logits": {"query": lambda x: x.at[0, ..., 0].set(50),
                   "key": lambda x: x.at[0, ..., 0].set(-50)},
    "low_then_high": {"query": lambda x: x.at[0, ..., 0].set(50),
                      "key": lambda x: x.at[0, :130, :, 0].set(-50)},
    "high_then_low": {"query": lambda x: x.at[0, ..., 0].set(50),
                      "key": lambda x: x.at[0, :130, :, 0].set(50).at[0, 130:, :, 0].set(-50)},
    "one_low_row": {"query": lambda x: x.at[0, 77].set(-40), "key": lambda x: x.at[0].set(3)},
    "large_values": {"value": lambda x: x.at[0, 3].set(1e20)},
    "large_values_of_large_sums": {"query": lambda x: x.at[0].multiply(12),
                                   "value": lambda x: x.at[0, 3].set(1e28)},
    "values_that_cancel": {"value": lambda x: x.at[0, 3:5].set(jnp.asarray([1e33, -1e33])[
        :, None, None].astype(x.dtype))},
    "a_nan_key": {"key": lambda x: x.at[0, 250, 1, 3].set(np.nan)},
    "a_key_of_minus_infinity": {"query": lambda x: x.at[0, ..., 0].set(1),
                                "key": lambda x: x.at[0, 150, :, 0].set(-np.inf)},
    "a_nan_value": {"value": lambda x: x.at[0, 250, 0, 3].set(np.nan)},
    "an_infinite_value": {"value": lambda x: x.at[0, 130].set(np.inf)},
    "a_nan_query": {"query": lambda x: x.at[0, 140].set(np.nan)},
    "nan_and_large": {"query": lambda x: x.at[0].multiply(512),
                      "value": lambda x: x.at[0, 200:].set(np.nan)}}


def huge(shape, size):
  """Returns [tokens, heads, D] with one dimension that is not 0, of few digits."""
  numbers = size * (1 + jnp.arange(shape[0] * shape[1]).reshape(shape[:2]) % 61 / 128)
  return jnp.zeros(shape, jnp.bfloat16).at[..., 0].set(numbers.astype(jnp.bfloat16))


@functools.cache
def compiled(shape):
  """Returns (arrays of a case, the compiled call, its results for these arrays)."""
  case = SHAPES[shape]
  arrays = case.arrays()
  with interpreted("eager"):
    call = jax.jit(lambda arrays: case.call(arrays)).lower(arrays).compile()
  return arrays, call, run(call, arrays)


def run(call, arrays):
  with interpreted("eager"):
    return [np.asarray(x, np.float64) for x in jax.block_until_ready(call(arrays))]


def in_float64(function, *arguments):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, function(*arguments))


@functools.cache
def oracle_of(shape):
  """Returns a function: arrays -> (output, lse) in float64, called in `in_float64`."""
  return jax.jit(lambda arrays: SHAPES[shape].oracle(arrays, jnp.float64),
                 compiler_options=sampling.LEAST)


def assert_close(test, found, expected, tolerance):
  """Compares arrays, with the places of NaN and infinities, relative to the largest number."""
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
    np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
    finite = np.isfinite(y)
    size = max(1.0, np.abs(y[finite]).max(initial=0))
    test.assertLess(np.abs(x[finite] - y[finite]).max(initial=0), tolerance * size)


class ChangesTest(parameterized.TestCase):

  @parameterized.named_parameters((f"{name}_{shape}", name, shape) for name, shape in (
      *itertools.product(CHANGES, ("several_steps", "one_step")),
      *itertools.product(("nothing", "times_512", "values_that_cancel", "a_nan_key",
                          "an_infinite_value", "nan_and_large"), ("only_step",)),
      *itertools.product(("nothing", "times_512", "logits_of_1e9", "hot_in_the_last_step",
                          "low_then_high", "high_then_low", "values_that_cancel", "a_nan_key",
                          "a_nan_query"), ("six_strips",)),
      ("times_512", "seven_strips")))
  def test_equals_the_oracle(self, name, shape):
    usual, call, results = compiled(shape)
    arrays = {key: CHANGES[name].get(key, lambda x: x)(x) for key, x in usual.items()}
    found = run(call, arrays)
    expected = in_float64(oracle_of(shape), arrays)
    for rows in (slice(0, 1), slice(1, 2)):
      assert_close(self, [x[rows] for x in found], [x[rows] for x in expected], 1e-2)
    lse, exact = (np.where(np.isfinite(x), x, 0) for x in (found[1], expected[1]))
    np.testing.assert_allclose(lse, exact, rtol=2e-6, atol=2e-6)
    for x, y in zip(found, results):
      np.testing.assert_array_equal(x[1:], y[1:])


class StripsTest(parameterized.TestCase):

  @parameterized.parameters(("one_step", False), ("six_strips", True), ("seven_strips", True))
  def test_many_are_computed_in_a_loop(self, shape, expected):
    case = SHAPES[shape]
    with interpreted("eager"), mock.patch.object(
        strip_loop, "fold", wraps=strip_loop.fold) as fold:
      jax.jit(lambda arrays: case.call(arrays)).lower(case.shapes())
    self.assertEqual(fold.called, expected)


# A cap or a score mod may make the infinite scores of such a query finite.
INFINITE = {"plain": {}, "one_step": {}, "soft_cap": dict(logits_soft_cap=20.0),
            "score_mod": dict(score_mod=score_mods.custom(lambda score, *_: jnp.tanh(score)))}


class InfiniteQueriesTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in INFINITE)
  def test_are_nan(self, name):
    """Also where all scores are -inf, as those of hidden keys are."""
    case = SHAPES.get(name, SEVERAL)._replace(B=1)
    case = case._replace(arguments={**case.arguments, **INFINITE[name]})
    arrays = case.arrays()
    arrays["query"] = arrays["query"].at[0, 140, 1, 3].set(np.inf)
    arrays["key"] = arrays["key"].at[..., 3].set(-1)
    with interpreted("eager"):
      out, lse = jax.block_until_ready(jax.jit(case.call)(arrays))
    expected = np.zeros(lse.shape, bool)
    expected[0, 1, 140] = True
    np.testing.assert_array_equal(np.isnan(lse), expected)
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(
        expected.transpose(0, 2, 1)[..., None], out.shape))

  @parameterized.parameters("several_steps", "one_step")
  def test_have_nan_gradients(self, shape):
    """So have all keys that they see, and none of other heads or of blocks that they do not see."""
    case = SHAPES[shape]._replace(B=1)
    arrays = case.arrays()
    arrays["query"] = arrays["query"].at[0, 140, 1, 3].set(-np.inf)
    loss = lambda some: case.call({**arrays, **some})[0].astype(jnp.float32).sum()
    with interpreted("eager"):
      found = jax.block_until_ready(jax.jit(jax.grad(loss))(arrays))
    nan = {key: np.isnan(np.asarray(x[0], np.float32)) for key, x in found.items()}
    rows = np.zeros(nan["query"].shape, bool)
    rows[140, 1] = True
    np.testing.assert_array_equal(nan["query"], rows)
    for key in ("key", "value"):
      self.assertFalse(nan[key][:, 0].any())
      self.assertTrue(nan[key][:141, 1].all())
      self.assertFalse(nan[key][256:].any())


def alibi(b, h, t, s, scale):
  slopes = scale * 2.0 ** -(4 * np.arange(1, h + 1))
  return jnp.asarray(-slopes[:, None, None] * np.abs(np.arange(t)[:, None] - np.arange(s)))[None]


def padding(b, h, t, s, scale):
  """Hides the first keys of batch row 0 as additive masks do: some queries see no other key."""
  return jnp.zeros((b, 1, 1, s)).at[0, ..., :PADDED].set(scale)


IDS = np.repeat(np.array([[0, 1, 2], [5, 5, 6]], np.int32), T // 3, 1)
FEATURES = {
    "plain": SEVERAL, "one_step": ONE_STEP,
    "grouped": SEVERAL._replace(H=4, K=2),
    "segments": SEVERAL._replace(arguments=dict(mask_info=MaskInfo.from_segments(IDS)),
                                 mask=masks.causal() & masks.segments(IDS)),
    "window": SEVERAL._replace(arguments=dict(sliding_window=(40, 0)),
                               mask=masks.causal() & masks.window(40, 0)),
    "soft_cap": SEVERAL._replace(arguments=dict(logits_soft_cap=200.0)),
    "sinks": SEVERAL._replace(floats={"softmax_aux": (2,)}),
    "alibi": SEVERAL._replace(floats={"bias": (1, 2, T, T)}),
    "padding": SEVERAL._replace(floats={"bias": (2, 1, 1, T)})}
VALUES = {
    "sinks": {"softmax_aux": lambda: jnp.asarray([100.0, -100.0])},
    "alibi": {"bias": lambda: alibi(2, 2, T, T, 30.0)},
    "padding": {"bias": lambda: padding(2, 1, 1, T, -1e9)}}


class FeaturesTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in FEATURES)
  def test_results_and_gradients(self, name):
    """Compares with numbers for which the naive softmax fails in one head of a batch row.

    Next to 1e9 float32 has no digits for logits: queries that see only such keys weigh them
    equally.
    """
    case, empty = FEATURES[name], np.s_[0, :PADDED if name == "padding" else 0]
    arrays = {**case.arrays(), **{key: f() for key, f in VALUES.get(name, {}).items()}}
    arrays["query"] = arrays["query"].at[int(name == "padding"), :, 0].multiply(64)
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=x.shape) for x in jax.eval_shape(case.oracle, arrays)]
    weights[0][empty], weights[1][0, :, empty[1]] = 0, 0
    wrt = ("query", "key", "value")
    def loss(call, some):
      out, lse = call({**arrays, **some})
      terms = out.astype(weights[0].dtype) * weights[0], jnp.where(jnp.isfinite(lse), lse, 0)
      return terms[0].sum() + (terms[1] * weights[1]).sum(), (out, lse)
    some = {key: arrays[key] for key in wrt}
    with interpreted("on_wait"):
      found = jax.block_until_ready(
          jax.jit(jax.grad(functools.partial(loss, case.call), has_aux=True))(some))
    oracle = functools.partial(case.oracle, dtype=jnp.float64)
    expected = in_float64(jax.grad(functools.partial(loss, oracle), has_aux=True), some)
    gradients, results = ([np.asarray(x, np.float64) for x in jax.tree.leaves(part)]
                          for part in found)
    exact_gradients, exact_results = (list(map(np.array, jax.tree.leaves(part)))
                                      for part in expected)
    if name == "padding":
      mean = np.cumsum(np.asarray(arrays["value"][0], np.float64), 0)
      exact_results[0][empty] = (mean / np.arange(1, T + 1)[:, None, None])[empty[1]]
    for lse in (results[1], exact_results[1]):
      np.testing.assert_allclose(lse[0, :, empty[1]], -1e9, rtol=1e-6)
      lse[0, :, empty[1]] = 0
    assert_close(self, results, exact_results, 1e-2)
    assert_close(self, gradients, exact_gradients, 2e-2)


# Of 6 steps, of which 0, 1 and 3 begin a row of blocks, where the naive softmax may be tried again
# 3 steps after it failed: (steps that begin naively, steps that are computed safely).
EXPECTED_STEPS = {"nothing": (6, 0), "times_512": (2, 6), "one_hot_row": (2, 5),
                  "hot_in_the_last_step": (6, 1), "a_nan_value": (2, 2), "alibi": (6, 0),
                  "slopes": (6, 0)}
WITH_SLOPES = {
    "alibi": FEATURES["alibi"],
    "slopes": SEVERAL._replace(arguments=dict(
        score_mod=score_mods.alibi(np.array([30 / 16, 30 / 256], np.float32))))}


class ChoiceTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name, steps) for name, steps in EXPECTED_STEPS.items())
  def test_steps(self, name, expected):
    """Counts the steps in which each form is computed."""
    counts = collections.Counter()
    after_naive = softmax_choice.SoftmaxChoice.after_naive
    fold = forward_step.ForwardStep.fold_block
    def counted_fold(step, strips):
      if step.form.safe and not step.form.shielded:
        jax.debug.callback(lambda: counts.update(["safe"]))
      return fold(step, strips)
    def counted_naive(state, failed):
      jax.debug.callback(lambda: counts.update(["naive"]))
      return after_naive(state, failed)
    case = WITH_SLOPES.get(name, SEVERAL)._replace(B=1)
    changes = ({key: lambda _, f=f: f() for key, f in VALUES.get(name, {}).items()}
               or CHANGES.get(name, {}))
    arrays = {key: changes.get(key, lambda x: x)(x) for key, x in case.arrays().items()}
    with (mock.patch.object(forward_step.ForwardStep, "fold_block", counted_fold),
          mock.patch.object(softmax_choice.SoftmaxChoice, "after_naive", counted_naive),
          mock.patch.object(softmax_choice, "SAFE_STEPS", 3), interpreted("eager")):
      jax.block_until_ready(jax.jit(lambda arrays: case.call(arrays))(arrays))
      jax.effects_barrier()
    self.assertEqual((counts["naive"], counts["safe"]), expected)


if __name__ == "__main__":
  absltest.main()
