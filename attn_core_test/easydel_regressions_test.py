# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Defects of the library that the documents describe, each reproduced there, each absent here.

One test a defect, for every mechanism that runs on a CPU; what a mechanism refuses it must refuse
by name. The truth is the oracle in float64.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import functools
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, PartitionAxis, attention, blockwise,
                       blockwise_attn, create_mesh, masks)
from attn_core import table
from attn_core.masks import materialize
from attn_core.references import oracle
from attn_core.types import AttentionSpec, MaskOperands, Operands

jax.config.update("jax_num_cpu_devices", 8)

BLOCKWISE = ("blockwise", "flash_attn2", "blocksparse", "auto")
WITHOUT_SDPA = ("vanilla", *BLOCKWISE)
ALL = ("sdpa", *WITHOUT_SDPA)

# One name of every implementation that CPUs have: those that share one need not all compile it.
EACH = tuple({table.TABLE[name, "cpu"]: name for name in reversed(ALL) if name != "auto"}.values())

# Many small blocks, so that whatever happens once per block happens several times.
BLOCKS = BlockSizes(8, 7, 7, 8, 1)


def numbers(*shape, seed=0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(b=2, t=24, s=24, h=4, k=2, d=8):
  return numbers(b, t, h, d, seed=1), numbers(b, s, k, d, seed=2), numbers(b, s, k, d, seed=3)


def attend(mechanism, *arrays, **kwargs):
  """`attention`, in small blocks where the mechanism has blocks, on 8 devices where it has hops."""
  if mechanism in (*BLOCKWISE, "ring"):
    kwargs = {"block_sizes": BLOCKS, **kwargs}
  if mechanism == "ring":
    kwargs["metadata"] = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, -1)))
  return attention(*arrays, mechanism=mechanism, **kwargs)


def truth(query, key, value, mask=masks.causal(), *, bias=None, sinks=None,
          wrt=(), target=None, lse_weights=None):
  """The oracle in float64: output, lse, and the gradients of `loss` for the names in `wrt`."""
  arrays = (query, key, value, bias, sinks, target, lse_weights)
  question = (mask, wrt, *(None if x is None else (x.shape, x.tobytes()) for x in arrays))
  if question not in _answers:
    _answers[question] = _truth(query, key, value, mask, bias, sinks, wrt, target, lse_weights)
  return _answers[question]


_answers = {}  # the same for every mechanism


def _truth(query, key, value, mask, bias, sinks, wrt, target, lse_weights):
  with jax.enable_x64(True):
    wide = lambda x: None if x is None else jnp.asarray(np.asarray(x, np.float64))
    arrays, structure = jax.tree.flatten(mask)
    operands = Operands(wide(query), wide(key), wide(value), wide(bias),
                        MaskOperands(tuple(map(jnp.asarray, arrays))),
                        None if sinks is None else wide(sinks)[None])
    spec = AttentionSpec(structure, query.shape[-1] ** -0.5)
    def run(moved):
      found = oracle.attention(operands._replace(**moved), spec)
      return loss(found.attention_outputs, found.lse, target, lse_weights), found
    moved = {name: getattr(operands, name) for name in wrt}
    # Not in jit: one operation after the other, each of which is compiled once for all masks.
    (_, found), gradients = jax.value_and_grad(run, has_aux=True)(moved)
    gradients = [np.asarray(gradients[name]) for name in wrt]
    if sinks is not None and "sinks" in wrt:
      gradients[wrt.index("sinks")] = gradients[wrt.index("sinks")][0]
    return np.asarray(found.attention_outputs), np.asarray(found.lse), gradients


def loss(out, lse=None, target=None, lse_weights=None):
  total = 0.0 if target is None else (out * jnp.asarray(target, out.dtype)).sum()
  if lse_weights is not None:
    seen = jnp.isfinite(lse)
    total = total + (jnp.where(seen, lse, 0) * jnp.asarray(lse_weights, lse.dtype)).sum()
  return total


def close(found, expected, tolerance=2e-5, **kwargs):
  np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, **kwargs)


class SinksTest(parameterized.TestCase):

  @parameterized.parameters(*WITHOUT_SDPA, "ring")
  def test_sinks_are_counted_once(self, mechanism):
    """There: once per key block."""
    arrays, sinks = qkv(), numbers(4, seed=4) + 2
    found = attend(mechanism, *arrays, softmax_aux=sinks, return_lse=True)
    expected, lse, _ = truth(*arrays, sinks=sinks)
    close(found.attention_outputs, expected)
    close(found.lse, lse)
    self.assertGreater(abs(truth(*arrays, sinks=sinks + np.log(4))[1] - lse).min(), 0.02)

  @parameterized.parameters("vanilla", "flash_attn2")
  def test_several_sinks_of_a_head(self, mechanism):
    arrays, sinks = qkv(), numbers(4, 3, seed=5)
    found = attend(mechanism, *arrays, softmax_aux=sinks).attention_outputs
    close(found, truth(*arrays, sinks=np.log(np.exp(sinks.astype(np.float64)).sum(1)))[0])

  @parameterized.parameters("vanilla", "flash_attn2", "blocksparse")
  def test_sinks_have_a_gradient(self, mechanism):
    """There: zero, without a word."""
    arrays, sinks, target = qkv(), numbers(4, seed=4), numbers(2, 24, 4, 8, seed=6)
    found = jax.jit(jax.grad(lambda sinks: loss(attend(
        mechanism, *arrays, softmax_aux=sinks).attention_outputs, target=target)))(sinks)
    _, _, (expected,) = truth(*arrays, sinks=sinks, wrt=("sinks",), target=target)
    close(found, expected, 1e-4)
    self.assertGreater(abs(expected).min(), 0.1)

  @parameterized.parameters("vanilla", "flash_attn2")
  def test_a_head_without_sinks_among_heads_with_some(self, mechanism):
    """Sinks of -inf are none: their gradient is 0, and not that of a logsumexp of nothing."""
    arrays, sinks = qkv(), numbers(4, 2, seed=5)
    sinks[1], sinks[2, 0] = -np.inf, -np.inf
    target = numbers(2, 24, 4, 8, seed=6)
    found = jax.jit(jax.grad(lambda sinks: loss(attend(
        mechanism, *arrays, softmax_aux=sinks).attention_outputs, target=target)))(sinks)
    with np.errstate(divide="ignore"):
      joint = np.log(np.exp(sinks.astype(np.float64)).sum(1))
    _, _, (expected,) = truth(*arrays, sinks=joint, wrt=("sinks",), target=target)
    share = np.exp(sinks - np.where(joint == -np.inf, 0, joint)[:, None])
    close(found, expected[:, None] * share, 1e-4)
    np.testing.assert_array_equal(found[1], 0)

  def test_sdpa_refuses_sinks(self):
    with self.assertRaisesRegex(NotImplementedError, "'sdpa'.*softmax_aux"):
      attend("sdpa", *qkv(), softmax_aux=numbers(4))


class BiasAndMaskTest(parameterized.TestCase):

  @parameterized.product(mechanism=EACH, shape=((2, 4, 24, 24), (1, 4, 1, 24), (2, 1, 24, 1)))
  def test_bias_has_a_gradient(self, mechanism, shape):
    """There: zero, without a word."""
    arrays, bias, target = qkv(), numbers(*shape, seed=7), numbers(2, 24, 4, 8, seed=6)
    out, found = jax.jit(jax.value_and_grad(lambda bias: loss(attend(
        mechanism, *arrays, bias=bias, sliding_window=(9, 0)).attention_outputs,
        target=target)))(bias)
    expected, _, (gradient,) = truth(*arrays, masks.window(9, 0), bias=bias, wrt=("bias",),
                                     target=target)
    close(out, (expected * target).sum(), 1e-4)
    close(found, gradient, 1e-4)
    # One bias for all keys of a query changes nothing, and only then is the gradient zero.
    self.assertEqual(abs(gradient).max() > 0.1, shape[3] > 1)

  @parameterized.parameters("blockwise_attn", "auto", "flash_attn2")
  def test_bias_gradient_by_other_names(self, mechanism):
    arrays, target = qkv(), numbers(2, 24, 4, 8, seed=6)
    run = functools.partial(attend, mechanism)
    if mechanism == "blockwise_attn":
      run = functools.partial(blockwise_attn, query_chunk_size=8, key_chunk_size=7)
    def value(bias):
      out = run(*arrays, bias=bias)
      return loss(getattr(out, "attention_outputs", out), target=target)
    found = jax.jit(jax.grad(value))(numbers(1, 4, 24, 24, seed=7))
    _, _, (expected,) = truth(*arrays, bias=numbers(1, 4, 24, 24, seed=7), wrt=("bias",),
                              target=target)
    close(found, expected, 1e-4)

  @parameterized.product(mechanism=(*ALL, "ring"), by=("mask", "mask_info"))
  def test_dense_mask_is_not_dropped(self, mechanism, by):
    """There: blocksparse and ring dropped it."""
    arrays = qkv()
    array = np.random.default_rng(8).random((2, 4, 24, 24)) < 0.4
    given = {"mask": array} if by == "mask" else {"mask_info": MaskInfo(array)}
    causal = by == "mask"
    found = attend(mechanism, *arrays, causal=causal, **given).attention_outputs
    base = masks.causal() if causal else masks.full()
    close(found, truth(*arrays, base & masks.dense(array))[0])
    self.assertGreater(abs(found - truth(*arrays, base)[0]).max(), 0.5)

  @parameterized.parameters(*EACH)
  def test_mask_values_are_not_dropped(self, mechanism):
    arrays = qkv()
    mask = masks.chunk(5) | ~masks.window(12, 12) | masks.prefix(np.array([2, 0]))
    found = attend(mechanism, *arrays, mask=mask).attention_outputs
    close(found, truth(*arrays, masks.causal() & mask)[0])

  @parameterized.product(mechanism=EACH, kind=("dense", "value", "segments", "causal"))
  def test_bias_and_mask_both_apply(self, mechanism, kind):
    """There: a bias given meant that the mask was ignored."""
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    array = np.random.default_rng(9).random((2, 1, 24, 24)) < 0.5
    ids = np.sort(np.random.default_rng(10).integers(0, 4, (2, 24)), 1).astype(np.int32)
    given, mask = {
        "dense": ({"mask": array, "causal": False}, masks.dense(array)),
        "value": ({"mask": masks.chunk(6), "causal": False}, masks.chunk(6)),
        "segments": ({"mask_info": MaskInfo.from_segments(ids), "causal": False},
                     masks.segments(ids)),
        "causal": ({}, masks.causal())}[kind]
    found = attend(mechanism, *arrays, bias=bias, **given).attention_outputs
    close(found, truth(*arrays, mask, bias=bias)[0])
    self.assertGreater(abs(found - truth(*arrays, mask)[0]).max(), 0.1)
    self.assertGreater(abs(found - truth(*arrays, masks.full(), bias=bias)[0]).max(), 0.1)

  @parameterized.parameters(*EACH, "blocksparse")
  def test_fully_masked_rows_are_0(self, mechanism):
    """There: the mean of the values."""
    query, key, value = arrays = qkv()
    ids = np.zeros((2, 24), np.int32)
    ids[0, 5:9] = -1  # some queries and keys
    ids[1] = -1  # a whole row of the batch
    hidden = ids < 0
    target = numbers(2, 24, 4, 8, seed=6)
    def value_of(*arrays):
      found = attend(mechanism, *arrays, mask_info=MaskInfo.from_segments(ids),
                     return_lse=mechanism != "sdpa")
      weights = None if found.lse is None else np.ones((2, 4, 24))
      return loss(found.attention_outputs, found.lse, target, weights), found
    (_, found), gradients = jax.jit(jax.value_and_grad(value_of, (0, 1, 2), has_aux=True))(*arrays)
    out = np.asarray(found.attention_outputs)
    self.assertFalse(out[hidden].any())
    self.assertTrue(out[~hidden].any(-1).all())
    if found.lse is not None:
      self.assertTrue((np.asarray(found.lse).swapaxes(1, 2)[hidden] == -np.inf).all())
    mask = masks.causal() & masks.segments(ids)
    expected, lse, true_gradients = truth(
        *arrays, mask, wrt=("query", "key", "value"), target=target,
        lse_weights=None if found.lse is None else np.ones((2, 4, 24)))
    close(out, expected)
    if found.lse is not None:
      close(found.lse, lse)
    for gradient, true in zip(gradients, true_gradients):
      close(gradient, true, 1e-4)
      self.assertFalse(np.asarray(gradient)[hidden].any())

  @parameterized.parameters(*EACH)
  def test_what_is_hidden_may_be_anything(self, mechanism):
    """Padding that holds NaN or infinities leaves every query that does not see it alone."""
    query, key, value = (x.copy() for x in qkv())
    ids = np.zeros((2, 24), np.int32)
    ids[:, 20:] = -1
    expected = truth(query, key, value, masks.causal() & masks.segments(ids))[0]
    key[:, 20:22], value[:, 21:] = np.nan, np.inf
    found = attend(mechanism, query, key, value, mask_info=MaskInfo.from_segments(ids))
    close(found.attention_outputs, expected)


class CausalTest(parameterized.TestCase):

  @parameterized.product(mechanism=("blockwise_attn", *ALL), sizes=((1, 24), (2, 2)))
  def test_a_single_head_keeps_causality(self, mechanism, sizes):
    """There: shapes with one head were taken for decoding."""
    batch, length = sizes
    arrays = qkv(batch, length, length, 1, 1)
    if mechanism == "blockwise_attn":
      found = blockwise_attn(*arrays, query_chunk_size=8, key_chunk_size=7)
    else:
      found = attend(mechanism, *arrays).attention_outputs
    close(found, truth(*arrays)[0])
    np.testing.assert_allclose(found[:, 0], arrays[2][:, 0], rtol=1e-5)

  @parameterized.product(mechanism=EACH, heads=((1, 1), (4, 2)))
  def test_one_query_changes_nothing(self, mechanism, heads):
    """T == 1 is not a mode: where the query stands must be said, and then decides."""
    query, key, value = qkv(2, 24, 24, *heads)
    whole = truth(query, key, value)[0]
    with self.assertRaisesRegex(ValueError, "query_offset.*1 queries and 24 keys"):
      attend(mechanism, query[:, :1], key, value)
    run = jax.jit(lambda q, offset: attend(
        mechanism, q, key, value, query_offset=offset).attention_outputs)
    for t in (0, 1, 7, 8, 23):
      close(run(query[:, t:t + 1], jnp.full(2, t, jnp.int32)), whole[:, t:t + 1])
    close(attend(mechanism, query[:, :1], key, value, query_offset=0).attention_outputs,
          whole[:, :1])
    # One query and one key need no word, and are causal as any other.
    close(attend(mechanism, query[:, :1], key[:, :1], value[:, :1]).attention_outputs, whole[:, :1])

  @parameterized.parameters("blockwise_attn", *EACH, "ring")
  def test_causal_is_kept_under_differentiation(self, mechanism):
    """There: ring lost it, and changed the values too."""
    query, key, value = arrays = qkv()
    target = numbers(2, 24, 4, 8, seed=6)
    target[:, 11:] = 0
    if mechanism == "blockwise_attn":
      run = functools.partial(blockwise_attn, query_chunk_size=8, key_chunk_size=7)
    else:
      run = lambda *arrays: attend(mechanism, *arrays).attention_outputs
    def value_of(*arrays):
      out = run(*arrays)
      return loss(out, target=target), out
    (_, out), gradients = jax.jit(jax.value_and_grad(value_of, (0, 1, 2), has_aux=True))(*arrays)
    expected, _, true_gradients = truth(*arrays, wrt=("query", "key", "value"), target=target)
    close(out, expected)
    for gradient, true in zip(gradients, true_gradients):
      close(gradient, true, 1e-4)
    for gradient in gradients:  # nothing after the last query that counts plays a part
      self.assertFalse(np.asarray(gradient)[:, 11:].any())
      self.assertTrue(np.asarray(gradient)[:, 1:11].any(-1).all())
    tangents = [np.zeros_like(query), key * 0, value * 0]
    tangents[1][:, 11:], tangents[2][:, 11:] = 1, 1
    moved = jax.jit(lambda *t: jax.jvp(run, arrays, t)[1])(*tangents)
    self.assertFalse(np.asarray(moved)[:, :11].any())
    self.assertTrue(np.asarray(moved)[:, 11:].any(-1).all())

  @parameterized.parameters(*ALL)
  def test_causal_false_is_not_causal(self, mechanism):
    """Nor is one taken for the other once the other was compiled."""
    arrays = qkv()
    for causal in (True, False, True):
      close(attend(mechanism, *arrays, causal=causal).attention_outputs,
            truth(*arrays, masks.causal() if causal else masks.full())[0])

  @parameterized.parameters(*EACH)
  def test_every_query_has_a_window_of_its_own(self, mechanism):
    """There: prefill cut the keys once, by the window of the last query."""
    query, key, value = qkv()
    for causal in (True, False):
      found = attend(mechanism, query, key, value, sliding_window=(4, 2), causal=causal)
      close(found.attention_outputs,
            truth(query, key, value, masks.window(4, 0 if causal else 2))[0])
    found = attend(mechanism, query[:, :10], key, value, sliding_window=(4, 0), query_offset=9)
    close(found.attention_outputs,
          truth(query[:, :10], key, value, masks.offset(masks.window(4, 0), 9))[0])


class ShardingTest(parameterized.TestCase):

  @parameterized.product(
      mechanism=EACH, batch_axis=(("fsdp", "dp"), ("dp", "fsdp")))
  def test_masks_are_sharded_as_tensors_are(self, mechanism, batch_axis):
    """There: ("dp", "fsdp") against ("fsdp", "dp") mixed up the rows of the batch."""
    arrays = qkv(b=8, t=16, s=16)
    metadata = OperationMetadata(mesh=create_mesh((2, 2, 1, 2, 1)),
                                 partition_axis=PartitionAxis(batch_axis=batch_axis))
    generator = np.random.default_rng(11)
    array = generator.random((8, 4, 16, 16)) < 0.6
    ids = np.sort(generator.integers(0, 3, (8, 16)), 1).astype(np.int32)
    places = np.stack([generator.permutation(16) for _ in range(8)]).astype(np.int32)
    lengths = np.arange(9, 17).astype(np.int32)
    bias = numbers(8, 4, 16, 16, seed=7)
    mask = masks.causal() & masks.lengths(None, lengths) & masks.segments(ids)
    mask = masks.positions(places, places, mask & masks.dense(array))
    found = attend(mechanism, *arrays, mask=masks.lengths(None, lengths), bias=bias,
                   metadata=metadata, mask_info=MaskInfo(array, ids, ids, places, places))
    expected = truth(*arrays, mask, bias=bias)[0]
    close(found.attention_outputs, expected)
    self.assertLen(found.attention_outputs.sharding.device_set, 8)
    # Every row of the batch has a mask of its own, so that no two could be exchanged.
    visible = np.asarray(materialize.to_dense(mask, (8, 4, 16, 16))).reshape(8, -1)
    self.assertLen(np.unique(visible, axis=0), 8)


class NothingVanishesTest(parameterized.TestCase):

  # Arguments that change the result of any call, beyond those that tests above compare with truth.
  CHANGES = {
      "chunk": {"chunk_size": 5},
      "positions": {"mask_info": MaskInfo(q_positions=np.arange(24, dtype=np.int32)[None] // 2)},
      "query_offset": {"query_offset": -3},
      "init_bias": {"init_bias": lambda: jnp.asarray(numbers(1, 4, 24, 24, seed=7))},
      "scale": {"softmax_scale": 1.7},
      "scale_of_the_metadata": {"metadata": OperationMetadata(softmax_scale=1.7)},
      "soft_cap": {"logits_soft_cap": 0.6},
      "dropout_of_the_metadata": {"metadata": OperationMetadata(dropout_prob=0.3),
                                  "dropout_rng": jax.random.PRNGKey(1), "deterministic": False},
      "unnormalized": {"normalize_output": False},
      "compute_dtype": {"compute_dtype": jnp.bfloat16},
      "softmax_dtype": {"metadata": OperationMetadata(runtime_softmax_dtype=jnp.bfloat16)},
  }

  @parameterized.product(mechanism=EACH, change=tuple(CHANGES))
  def test_every_argument_counts_or_is_refused(self, mechanism, change):
    """There: what a mechanism did not support vanished into **ignore."""
    arrays = qkv()
    plain = attention(*arrays, mechanism=mechanism).attention_outputs
    try:
      found = attention(*arrays, mechanism=mechanism, **self.CHANGES[change]).attention_outputs
    except NotImplementedError as refusal:
      self.assertEqual(mechanism, "sdpa", refusal)
      self.assertIn(change, ("soft_cap", "dropout_of_the_metadata", "unnormalized",
                             "softmax_dtype"))
      return
    self.assertGreater(abs(np.asarray(found) - np.asarray(plain)).max(), 1e-4)
    self.assertEqual(found.dtype, np.float32)

  @parameterized.parameters(*EACH, "auto")
  def test_results_that_are_asked_for_come(self, mechanism):
    arrays = qkv()
    for name, field in (("return_lse", "lse"), ("return_weights", "attention_weights")):
      self.assertIsNone(getattr(attention(*arrays, mechanism=mechanism), field))
      try:
        found = attention(*arrays, mechanism=mechanism, **{name: True})
      except NotImplementedError as refusal:
        self.assertIn(name, str(refusal))
        self.assertEqual((name, mechanism in ("vanilla", "auto")), ("return_weights", False))
      else:
        self.assertIsNotNone(getattr(found, field))

  def test_there_is_no_ignore(self):
    for function in (attention, blockwise_attn):
      kinds = {p.kind for p in inspect.signature(function).parameters.values()}
      self.assertNotIn(inspect.Parameter.VAR_KEYWORD, kinds)
      with self.assertRaises(TypeError):
        function(*qkv(), segment_ids=None)

  @parameterized.parameters("vanilla", "flash_attn2", "auto")
  def test_dropout_is_active(self, mechanism):
    """There: never."""
    arrays = qkv()
    run = lambda **kwargs: np.asarray(attend(
        mechanism, *arrays, dropout_prob=0.4, dropout_rng=jax.random.key(0),
        **kwargs).attention_outputs)
    off = run(deterministic=True)
    close(off, truth(*arrays)[0])
    on = run(deterministic=False)
    np.testing.assert_array_equal(run(), on)  # a probability and a key are enough
    self.assertTrue((abs(on - off).max(-1) > 1e-3).mean() > 0.5)
    # With one key visible, the first query's output is 0 or value / 0.6.
    ratio = on[:, 0] / np.repeat(arrays[2][:, 0], 2, axis=1)
    self.assertTrue((np.isclose(ratio, 0) | np.isclose(ratio, 1 / 0.6)).all())
    with self.assertRaisesRegex(ValueError, "dropout_rng"):
      attend(mechanism, *arrays, dropout_prob=0.4, deterministic=False)

  def test_dropout_of_blockwise_attn(self):
    arrays = qkv()
    run = functools.partial(blockwise_attn, *arrays, attn_pdrop=0.4, dropout_rng=jax.random.key(0),
                            query_chunk_size=8, key_chunk_size=7)
    close(run(), truth(*arrays)[0])
    expected = attention(*arrays, mechanism="vanilla", dropout_prob=0.4, deterministic=False,
                         dropout_rng=jax.random.key(0)).attention_outputs
    close(run(deterministic=False), expected)

  @parameterized.parameters(*EACH)
  def test_lse_is_returned(self, mechanism):
    """There: never; here with its gradient."""
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    found = attend(mechanism, *arrays, bias=bias, sliding_window=(9, 0), return_lse=True).lse
    weights, wrt = numbers(2, 4, 24, seed=12), ("query", "key", "bias")
    mask = masks.window(9, 0)
    _, lse, expected = truth(*arrays, mask, bias=bias, wrt=wrt, lse_weights=weights)
    self.assertEqual((found.shape, found.dtype), ((2, 4, 24), np.float32))
    close(found, lse)
    if mechanism != "sdpa":  # whose lse refuses to be differentiated, see bad_input_test
      gradients = jax.jit(jax.grad(lambda q, k, v, bias: loss(None, attend(
          mechanism, q, k, v, bias=bias, sliding_window=(9, 0), return_lse=True).lse,
          lse_weights=weights), (0, 1, 3)))(*arrays, bias)
      for gradient, true in zip(gradients, expected):
        close(gradient, true, 1e-4)


class BlockwiseTest(parameterized.TestCase):
  """There: `blockwise` was a name that could not run."""

  def test_by_name_and_by_function(self):
    arrays = qkv(t=37, s=37)
    expected = truth(*arrays)[0]
    close(attention(*arrays, mechanism="blockwise").attention_outputs, expected)
    close(blockwise(*arrays).attention_outputs, expected)
    close(blockwise_attn(*arrays), expected)

  @parameterized.parameters((1, 1), (5, 37), (37, 5), (16, 16), (2048, 2048))
  def test_chunks_change_nothing(self, query_chunk_size, key_chunk_size):
    arrays = qkv(t=37, s=37)
    found = blockwise_attn(*arrays, query_chunk_size=query_chunk_size,
                           key_chunk_size=key_chunk_size)
    close(found, truth(*arrays)[0])

  def test_documented_arguments(self):
    arrays, bias = qkv(), numbers(1, 4, 24, 24, seed=7)
    expected = truth(*arrays, masks.full(), bias=bias)[0]
    run = functools.partial(blockwise_attn, *arrays, bias=bias, causal=False, query_chunk_size=8,
                            key_chunk_size=7)
    close(run(), expected)
    close(run(policy="nothing_saveable", prevent_cse=False, precision="highest"), expected)
    close(run(policy=jax.checkpoint_policies.dots_saveable), expected)
    rough = run(dtype=jnp.bfloat16, float32_logits=False)
    self.assertEqual(rough.dtype, np.float32)
    close(rough, expected, 5e-2)
    self.assertGreater(abs(rough - expected).max(), 1e-4)

  def test_nothing_quadratic_is_made(self):
    """Linear in memory, forward and backward: no array of T x S exists."""
    t = 512
    arrays = [jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)] * 3
    square = "512x(2x)?512"
    run = lambda *arrays: blockwise_attn(*arrays, query_chunk_size=64, key_chunk_size=64).sum()
    for function in (run, jax.grad(run, (0, 1, 2))):
      self.assertNotRegex(jax.jit(function).lower(*arrays).as_text(), square)
    dense = lambda *arrays: attention(*arrays, mechanism="vanilla").attention_outputs
    self.assertRegex(jax.jit(dense).lower(*arrays).as_text(), square)


class AccumulationTest(parameterized.TestCase):

  @parameterized.parameters(*EACH)
  def test_sums_are_not_made_in_bfloat16(self, mechanism):
    """There: one kernel summed its softmax in bfloat16, where 256 + 1 is 256."""
    keys = 1024
    query = jnp.zeros((1, 2, 2, 8), jnp.bfloat16)
    key = jnp.ones((1, keys, 2, 8), jnp.bfloat16)
    value = jnp.arange(keys, dtype=jnp.float32).astype(jnp.bfloat16)[None, :, None, None]
    value = jnp.broadcast_to(value, (1, keys, 2, 8))
    found = attention(query, key, value, mechanism=mechanism, causal=False,
                      return_lse=mechanism != "sdpa")
    mean = np.asarray(value, np.float64).mean()
    np.testing.assert_allclose(np.asarray(found.attention_outputs, np.float64), mean, rtol=2**-8)
    if found.lse is not None:
      self.assertEqual(found.lse.dtype, np.float32)
      np.testing.assert_allclose(found.lse, np.log(keys), rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
