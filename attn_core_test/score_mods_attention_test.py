# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with score mods: every derivative of every array, on every kernel, in linear memory."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, CacheMetadata, MaskInfo, OperationMetadata, RingConfig,
                       attention, create_mesh, explain, from_layout, masks, score_mods, to_layout)
from attn_core.caches import dense, window
from attn_core.kernels.xla import tile_sums
from attn_core.masks import materialize
from attn_core_test import sampling
from attn_core_test.score_mods_cases import (ADDITIVE, B, CASES, D, H, K, POSITIONED, T, ModCase,
                                             arrays_of, by_hand, composed, numbers, random_mask,
                                             same_document)

jax.config.update("jax_num_cpu_devices", 4)

BLOCKS = BlockSizes(4, 3, 5, 4, 1)
NAMES = ("query", "key", "value")
SOME = composed("scale_by_query", "alibi", "soft_cap", "relative", "custom", "per_key")
EVERYTHING = composed("scale_by_head", "alibi", "soft_cap", "relative", "custom", "per_key", "grid",
                      "per_query", "dense", "by_distance")


def operands(seed=0):
  return {"query": numbers(B, T, H, D, seed=seed), "key": numbers(B, T, K, D, seed=seed + 1),
          "value": numbers(B, T, K, D, seed=seed + 2)}


def call(case, mechanism, return_lse=True, **arguments):
  """Returns a function of arrays, those of the case among them -> (output, lse)."""
  if mechanism == "blockwise":
    arguments.setdefault("block_sizes", BLOCKS)
  def run(arrays):
    mod = case.make(**{name: arrays[name] for name in case.arrays})
    output = attention(*(arrays[name] for name in NAMES), score_mod=mod, mechanism=mechanism,
                       return_lse=return_lse, **arguments)
    return output.attention_outputs, output.lse
  return run


def softmax(logits, value):
  """Returns (output [B, T, H, E], lse [B, H, T]) of logits [B, H, T, S], in numpy."""
  most = np.maximum(logits.max(-1, keepdims=True), -1e300)
  weights = np.exp(logits - most)
  total = weights.sum(-1, keepdims=True)
  out = np.einsum("bhts,bshd->bthd", weights / np.where(total, total, 1),
                  np.repeat(value, H // K, 2))
  with np.errstate(divide="ignore"):
    return out, (np.log(total) + most)[..., 0]


def truth(case, arrays, seen, positions=None):
  """Returns the output and the lse, number by number; `seen` bool [B, H, T, S]."""
  key = np.repeat(arrays["key"], H // K, 2)
  scores = np.einsum("bthd,bshd->bhts", arrays["query"], key) * D**-0.5
  logits = by_hand(case, scores, {name: arrays[name] for name in case.arrays}, positions)
  return softmax(np.where(seen, logits, -np.inf), arrays["value"])


CAUSAL = np.tril(np.ones((T, T), bool))


class ValuesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))

  @parameterized.named_parameters(
      ("everything_blockwise", EVERYTHING, "blockwise"),
      ("everything_dense", EVERYTHING, "vanilla"), ("additive_sdpa", composed(*ADDITIVE), "sdpa"),
      *sampling.with_slow((), *(
          (f"{name}_{mechanism}", CASES[name], mechanism) for name in CASES
          for mechanism in ("blockwise", "vanilla", "flash_attn2", "sdpa")
          if mechanism != "sdpa" or name in ADDITIVE)))
  def test_equal_numbers(self, case, mechanism):
    arrays = operands() | arrays_of(case)
    exact = mechanism != "sdpa"  # which has float32 at most
    tolerance = 1e-10 if exact else 3e-5
    given = arrays if exact else {k: x.astype(np.float32) for k, x in arrays.items()}
    got = jax.jit(call(case, mechanism))(given)
    for x, y in zip(got, truth(case, arrays, CAUSAL)):
      np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

  @parameterized.named_parameters(
      ("composed", composed(*POSITIONED)),
      *sampling.with_slow((), *((name, CASES[name]) for name in POSITIONED)))
  def test_positions_are_global(self, case):
    arrays = operands() | arrays_of(case)
    rng = np.random.default_rng(0)
    listed = [rng.integers(0, T, (B, T)).astype(np.int32) for _ in range(2)]
    offset = np.array([3, -2], np.int32)
    rows = np.broadcast_to(np.arange(T), (B, T))
    for arguments, positions in (
        ({"mask_info": MaskInfo(q_positions=listed[0], kv_positions=listed[1])}, tuple(listed)),
        ({"query_offset": offset}, (rows + offset[:, None], rows))):
      want = truth(case, arrays, np.ones((B, H, T, T), bool), positions)
      for mechanism in ("blockwise", "vanilla"):
        got = jax.jit(call(case, mechanism, causal=False, **arguments))(arrays)
        for x, y in zip(got, want):
          np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10, err_msg=str(arguments))

  def test_soft_cap_and_bias_come_first(self):
    case = composed("alibi", "soft_cap")
    arrays, bias = operands() | arrays_of(case), numbers(1, H, T, T, seed=9)
    key = np.repeat(arrays["key"], H // K, 2)
    scores = np.einsum("bthd,bshd->bhts", arrays["query"], key) * D**-0.5
    logits = by_hand(case, 0.9 * np.tanh(scores / 0.9) + bias,
                     {name: arrays[name] for name in case.arrays})
    want = softmax(np.where(CAUSAL, logits, -np.inf), arrays["value"])
    for mechanism in ("blockwise", "vanilla"):
      got = call(case, mechanism, logits_soft_cap=0.9, bias=bias)(arrays)
      for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)

  def test_several_batch_dimensions(self):
    case = CASES["alibi_symmetric_per_row"]
    arrays = operands() | arrays_of(case)
    folded = {k: x[:, None] if k in NAMES else x for k, x in arrays.items()}
    got, want = (call(case, "blockwise")(x)[0] for x in (folded, arrays))
    np.testing.assert_array_equal(got[:, 0], want)

  def test_packed_sequences_have_positions_of_their_own(self):
    case = CASES["alibi"]
    arrays = {k: x[0] if k in NAMES else x for k, x in (operands() | arrays_of(case)).items()}
    offsets = np.array([0, 5, 13], np.int32)
    got = call(case, "blockwise", layout="thd", cum_seqlens_q=offsets)(arrays)[0]
    for first, last in zip(offsets, offsets[1:]):
      part = {k: x[None, first:last] if k in NAMES else x for k, x in arrays.items()}
      np.testing.assert_allclose(got[first:last], call(case, "vanilla")(part)[0][0], rtol=1e-10)


@jax.jit
def _derivatives(run, arrays, moves, weights):
  def loss(arrays):
    return sum((jnp.sin(x) * w).sum() for x, w in zip(run(arrays), weights))
  gradient = jax.grad(loss)
  return {"value": run(arrays), "gradient": gradient(arrays),
          "tangent": jax.jvp(run, (arrays,), (moves,))[1],
          "second": jax.jvp(gradient, (arrays,), (moves,))[1]}


def derivatives(run, arrays):
  moves = {name: numbers(*x.shape, seed=20 + n) for n, (name, x) in enumerate(arrays.items())}
  weights = [numbers(B, T, H, D, seed=5), numbers(B, H, T, seed=6)]
  return _derivatives(jax.tree_util.Partial(run), arrays, moves, weights)


class DerivativesTest(parameterized.TestCase):
  """Derivatives of the block-wise kernel equal those that JAX finds for all scores at once."""

  def setUp(self):
    super().setUp()
    self.enterContext(jax.enable_x64(True))

  def compare(self, got, want, tolerance=1e-9):
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want),
                            strict=True):
      np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, abs(y).max()),
                                 err_msg=jax.tree_util.keystr(path))

  @parameterized.named_parameters(
      ("some", SOME, {"query_offset": np.array([0, 2], np.int32)}),
      *sampling.with_slow(
          (), ("everything", EVERYTHING, {}), ("everything_listed_positions", EVERYTHING, {
              "mask_info": MaskInfo(q_positions=np.random.default_rng(0).integers(
                  0, T, (B, T)).astype(np.int32))}),
          *((name, case, {}) for name, case in CASES.items())))
  def test_all(self, case, arguments):
    arrays = operands() | arrays_of(case)
    self.compare(derivatives(call(case, "blockwise", **arguments), arrays),
                 derivatives(call(case, "vanilla", **arguments), arrays))

  @sampling.slow("score_mods_differences")
  def test_dense_ones_equal_finite_differences(self):
    arrays = operands() | arrays_of(EVERYTHING)
    moves = {name: numbers(*x.shape, seed=20 + n) for n, (name, x) in enumerate(arrays.items())}
    step = lambda size: truth(EVERYTHING, {
        name: x + size * moves[name] for name, x in arrays.items()}, CAUSAL)
    got = derivatives(call(EVERYTHING, "vanilla"), arrays)["tangent"]
    for x, high, low in zip(got, step(1e-6), step(-1e-6)):
      np.testing.assert_allclose(x, (high - low) / 2e-6, rtol=1e-6, atol=1e-7)

  @parameterized.parameters("vanilla", "blockwise")
  def test_a_scale_that_is_not_finite(self, mechanism):
    """It changes nothing at a query that sees nothing, and is NaN at any other."""
    case = ModCase({"x": (B, H, T)}, score_mods.scale_by, None)
    arrays = operands() | arrays_of(case)
    both = call(case, mechanism, query_offset=-3)  # causal: the first three see nothing
    run = lambda arrays: both(arrays)[:1]  # lse is -inf there
    want = derivatives(run, arrays)
    gradient = jax.jit(jax.grad(lambda arrays: run(arrays)[0].sum()))
    for number in (np.nan, np.inf, -np.inf):
      x = arrays["x"].copy()
      x[:, :, :3] = number
      chex.assert_trees_all_equal(derivatives(run, {**arrays, "x": x}), want)
      x[0, 0, 4] = number
      out = jax.jit(run)({**arrays, "x": x})[0]
      self.assertTrue(np.isnan(out[0, 4, 0]).all())
      self.assertEqual(np.isnan(out).sum(), D)
      d_scale = gradient({**arrays, "x": x})["x"]
      self.assertTrue(np.isnan(d_scale[0, 0, 4]))
      self.assertEqual(np.isnan(d_scale).sum(), 1)

  @parameterized.parameters(*sampling.with_slow(
      [("slopes.1", "x.4", "query")], ("table.3",), ("x.5",), ("query", "x.0")))
  def test_vmap_equals_a_loop(self, *mapped):
    arrays = operands() | arrays_of(SOME)
    run = call(SOME, "blockwise")
    weights = numbers(B, T, H, D, seed=5)
    loss = jax.value_and_grad(lambda arrays: (jnp.sin(run(arrays)[0]) * weights).sum())
    stacked = {k: np.stack([x, 0.5 * x]) if k in mapped else x for k, x in arrays.items()}
    axes = ({k: 0 if k in mapped else None for k in arrays},)
    got = jax.jit(jax.vmap(loss, axes))(stacked)
    for i in range(2):
      one = jax.jit(loss)({k: x[i] if k in mapped else x for k, x in stacked.items()})
      self.compare(jax.tree.map(lambda x: x[i], got), one)

  def test_sums_over_large_tiles(self):
    """With two query heads of a key head."""
    length = 300
    arrays = {"query": numbers(1, length, 2, 4), "key": numbers(1, length, 1, 4, seed=1),
              "value": numbers(1, length, 1, 4, seed=2), "slopes": numbers(2, seed=3),
              "table": numbers(8, 2, seed=4), "number": numbers(seed=5) ** 2,
              "rates": numbers(2, seed=6), "row": numbers(1, 2, length, seed=7),
              "column": numbers(1, 1, length, seed=8)}

    def loss(arrays, mechanism, **sizes):
      mod = (score_mods.alibi(arrays["slopes"])
             >> score_mods.relative(arrays["table"], max_distance=40, bidirectional=False)
             >> score_mods.custom(_far, arrays["number"], arrays["rates"])
             >> score_mods.per_query(arrays["row"]) >> score_mods.per_key(arrays["column"]))
      found = attention(*(arrays[name] for name in NAMES), score_mod=mod, mechanism=mechanism,
                        **sizes)
      return jnp.sin(found.attention_outputs).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=(1,), static_argnames=("block_sizes",))
    blocks = BlockSizes(block_q_backward=128, block_kv_backward=128)
    self.compare(gradient(arrays, "blockwise", block_sizes=blocks), gradient(arrays, "vanilla"))

  def test_large_sums_are_products(self):
    """XLA:CPU computes other sums in loops over scalars, and their summands with them."""
    x = numbers(2, 128, 128, 1, seed=9)
    branch = lambda x: jax.lax.cond(x[0, 0, 0, 0] < 9, lambda x: x.sum((1, 2, 3)),
                                    lambda x: x[:, 0, 0, 0], x)
    run = lambda x: [x.sum((0, 1, 2, 3)), jnp.exp(x).sum((0, 2)), branch(x * x)]
    compiled = jax.jit(functools.partial(tile_sums.evaluate, run)).lower(x).compile()
    self.assertEqual(compiled.as_text().count(" dot("), 2)  # of the first and the last
    self.compare(compiled(x), run(x))

  @sampling.slow("score_mods_repeat")
  def test_gradients_repeat_bit_for_bit(self):
    arrays = {k: x.astype(np.float32) for k, x in (operands() | arrays_of(SOME)).items()}
    run = call(SOME, "blockwise")
    gradient = jax.jit(jax.grad(lambda arrays: run(arrays)[0].sum()))
    jax.tree.map(np.testing.assert_array_equal, gradient(arrays), gradient(arrays))

  def test_rows_of_padding_do_nothing(self):
    """Neither where a score mod raises the scores of rows that fill up the last block."""
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    raise_padding = score_mods.custom(
        lambda score, batch, head, query, key: jnp.where(query < T, score, 1e30))
    run = lambda arrays, mod: (attention(
        **arrays, score_mod=mod, mechanism="blockwise", causal=False, block_sizes=BLOCKS
        ).attention_outputs ** 2).sum()
    gradient = jax.jit(jax.grad(lambda arrays: run(arrays, raise_padding)))(arrays)
    want = jax.jit(jax.grad(lambda arrays: run(arrays, None)))(arrays)
    for name in NAMES:
      np.testing.assert_allclose(gradient[name], want[name], rtol=1e-5, atol=1e-6)


  @parameterized.parameters(*sampling.with_slow([("blockwise",)], ("vanilla",)))
  def test_an_infinite_derivative_at_hidden_pairs(self, mechanism):
    """Checks finite gradients, where a function has none for a key that is its query or after."""
    case = ModCase(
        {"x": (H,)}, lambda x: score_mods.custom(_root, x), lambda s, b, h, q, k, t, _, a:
        s + np.sqrt(a["x"][h] ** 2 * max(q - k, 0)) * np.cbrt(s * (q > k)))
    arrays = operands() | arrays_of(case)
    before = masks.custom(lambda batch, head, query, key: key < query)
    run = call(case, mechanism, mask=before)
    move = numbers(H, seed=7)
    loss = lambda arrays: (jnp.sin(run(arrays)[0]) * numbers(B, T, H, D, seed=5)).sum()
    gradient, along = jax.jit(lambda arrays: (
        jax.grad(loss)(arrays), jax.jvp(lambda x: loss(arrays | {"x": x}), (arrays["x"],), (move,))
    ))(arrays)
    seen = np.tril(np.ones((T, T), bool), -1)
    by_numbers = lambda x: (np.sin(truth(case, arrays | {"x": x}, seen)[0])
                            * numbers(B, T, H, D, seed=5)).sum()
    self.assertTrue(all(np.isfinite(x).all() for x in gradient.values()))
    want = (by_numbers(arrays["x"] + 1e-6 * move) - by_numbers(arrays["x"] - 1e-6 * move)) / 2e-6
    np.testing.assert_allclose(along[1], want, rtol=1e-5)
    np.testing.assert_allclose((gradient["x"] * move).sum(), want, rtol=1e-5)


def _far(score, batch, head, query, key, number, rates):
  distance = jnp.abs(query - key).astype(score.dtype)
  return score - rates[head] * jnp.log1p(number * distance)


def _root(score, batch, head, query, key, x):
  """Returns scores whose derivatives are infinite, or NaN, unless the key is before the query."""
  apart = (query - key).astype(score.dtype)
  return score + jnp.sqrt(x[head] ** 2 * apart) * jnp.cbrt(jnp.where(query > key, score, 0))


class RandomTest(parameterized.TestCase):
  """Compositions of score mods and masks against numbers."""

  # By fives, so that no rotation takes many more than another.
  @parameterized.parameters(*sampling.with_slow(
      [(0, 0, 2)], *((part, first, 5) for part in range(1, 41) for first in range(0, 50, 5))))
  def test_some_of_fifty(self, part, first, number):
    """Checks the compositions from the `first` on, of those that numbers of a part choose."""
    rng = np.random.default_rng([17, part])
    if part:  # the programs of all parts do not fit into one process
      self.addCleanup(jax.clear_caches)
    chosen = [self.choose(rng) for _ in range(first + number)]
    for one in chosen[first:]:
      self.check(*one)

  def choose(self, rng):
    """Returns a case, a mask, arrays, sizes of blocks and a mechanism."""
    case = composed(*rng.choice(list(CASES), rng.integers(1, 4)))
    mask = random_mask(rng)
    arrays = operands(int(rng.integers(100))) | arrays_of(case, int(rng.integers(100)))
    blocks = BlockSizes(*map(int, rng.integers(2, 9, 2)))
    return case, mask, arrays, blocks, rng.choice(("blockwise", "autoregressive_decodeattn"))

  def check(self, case, mask, arrays, blocks, mechanism):
    with jax.enable_x64(True):
      seen = np.asarray(materialize.to_dense(mask, (B, H, T, T)))
      got = call(case, mechanism, mask=mask, causal=False, block_sizes=blocks)(arrays)
    for x, y in zip(got, truth(case, arrays, seen)):
      np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9, err_msg=f"{case.arrays} {mask}")


class DtypesTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([("bfloat16",)], ("float16",), ("float32",)))
  def test_16_bits(self, dtype):
    arrays = operands() | arrays_of(SOME)
    given = {k: jnp.asarray(x, dtype) for k, x in arrays.items()}
    exact = {k: np.asarray(x, np.float64) for k, x in given.items()}
    tolerance = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5}[dtype]
    weights = numbers(B, T, H, D, seed=5)
    def loss(run):
      return lambda arrays: ((run(arrays)[0] * weights).sum(), run(arrays)[0])
    got = jax.jit(jax.grad(loss(call(SOME, "blockwise")), has_aux=True))(given)
    with jax.enable_x64(True):
      want = jax.jit(jax.grad(loss(call(SOME, "vanilla")), has_aux=True))(exact)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      self.assertEqual(x.dtype, dtype)
      np.testing.assert_allclose(np.asarray(x, np.float64), y,
                                 atol=tolerance * max(1, abs(y).max()))

  def test_what_a_mod_adds_has_32_bits(self):
    """Checks numbers of which 16 bits would round off the differences."""
    arrays = {k: jnp.asarray(x, jnp.bfloat16) for k, x in operands().items()}
    arrays["x"] = jnp.broadcast_to(jnp.float32(1000) + jnp.arange(T) % 3, (B, 1, T))
    want, *others = (
        jax.jit(call(CASES["per_key"], mechanism, False))(arrays)[0].astype(jnp.float32)
        for mechanism in ("vanilla", "blockwise", "sdpa"))
    for found in others:
      np.testing.assert_allclose(found, want, atol=2e-2)

  @sampling.slow("score_mods_strict_promotion")
  def test_strict_promotion_of_dtypes_and_ranks(self):
    case = composed("scale_by_head", "alibi", "relative", "per_key", "grid", "dense")
    arrays = {k: jnp.asarray(x, jnp.bfloat16) for k, x in (operands() | arrays_of(case)).items()}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
      for mechanism in ("blockwise", "vanilla"):
        run = call(case, mechanism)
        jax.jit(jax.grad(lambda arrays: run(arrays)[1].sum()))(arrays)


class ShardTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow([("auto",)], (None,)))
  def test_equals_one_device(self, kind):
    case = composed("scale_by_head", "alibi_symmetric_per_row", "custom", "relative", "per_key",
                    "dense")
    arrays = {k: x.astype(np.float32) for k, x in (operands() | arrays_of(case)).items()}
    mesh = create_mesh((2, 1, 1, 2, 1))  # dp, fsdp, ep, tp, sp
    weights = numbers(B, T, H, D, seed=5).astype(np.float32)
    def both(metadata):
      run = call(case, "blockwise", metadata=metadata)
      return jax.jit(jax.value_and_grad(
          lambda arrays: (jnp.sin(run(arrays)[0]) * weights).sum()))
    want = both(OperationMetadata())(arrays)
    if kind == "auto":
      placed = {k: jax.device_put(x, jax.NamedSharding(mesh, P("dp", None, "tp")))
                if k in NAMES else x for k, x in arrays.items()}
      got = both(OperationMetadata())(placed)
    else:
      got = both(OperationMetadata(mesh=mesh))(arrays)
    for name in arrays:
      np.testing.assert_allclose(got[1][name], want[1][name], rtol=2e-5, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


class CacheTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("dense", dense, T, None), ("window", window, 5, (3, 0)))
  def test_steps_equal_one_call(self, module, slots, reach):
    """Positions are those of a row's tokens, wherever the cache holds them."""
    case = composed("alibi", "relative", "soft_cap")
    arrays = {k: x.astype(np.float32) for k, x in (operands() | arrays_of(case)).items()}
    arguments = dict(sliding_window=reach)
    want = call(case, "vanilla", **arguments)(arrays)[0]
    mod = case.make(**{name: arrays[name] for name in case.arrays})
    counts = np.array([[6, 1], [1, 1], [0, 6], [6, 5]], np.int32)  # the rows differ

    @jax.jit
    def step(query, key, value, cache, counts):
      return attention(query, key, value, mode="__autoregressive__", score_mod=mod,
                       cache_view=cache, cache_metadata=CacheMetadata(counts), **arguments)

    cache, done = module.init(B, slots, (K, D), dtype=jnp.float32), np.zeros(B, int)
    for count in counts:
      part = [np.stack([np.resize(arrays[name][b, first:first + 6], (6, *arrays[name].shape[2:]))
                        if n else np.zeros((6, *arrays[name].shape[2:]), np.float32)
                        for b, (first, n) in enumerate(zip(done, count))]) for name in NAMES]
      found = step(*part, cache, count)
      cache = found.cache_view
      for b, (first, n) in enumerate(zip(done, count)):
        np.testing.assert_allclose(found.attention_outputs[b, :n], want[b, first:first + n],
                                   rtol=1e-5, atol=1e-5)
      done = done + count


class RingTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("ring", "zigzag")], ("ring", "contiguous"), ("ring", "striped"), ("all_gather", "striped"),
      ("ulysses", "contiguous")))
  def test_equals_one_device(self, variant, layout):
    """In value, gradient and tangent, where members hold parts of the sequence."""
    case = composed("scale_by_query", "alibi", "custom", "relative", "per_key", "dense", "soft_cap")
    mesh = create_mesh((1, 1, 1, 1, 4))  # dp, fsdp, ep, tp, sp
    length, tokens = 16, {"query": (1,), "key": (1,), "value": (1,), "x.0": (2,), "x.4": (2,),
                          "bias.5": (2, 3)}
    arrays = operands() | arrays_of(case)
    arrays |= {name: numbers(*(length if n == T else n for n in arrays[name].shape))
               for name in tokens}

    def loss(arrays, metadata=None):
      if metadata is not None:
        for name, axes in tokens.items():
          for axis in axes:
            arrays = {**arrays, name: to_layout(arrays[name], layout, 4, axis)}
      out, lse = call(case, "vanilla" if metadata is None else "ring", metadata=metadata)(arrays)
      if metadata is not None:
        out, lse = from_layout(out, layout, 4), from_layout(lse, layout, 4, 2)
      weights = numbers(B, length, H, D, seed=5), numbers(B, H, length, seed=6)
      return (jnp.sin(out) * weights[0]).sum() + (lse * weights[1]).sum()

    def both(metadata):
      run = functools.partial(loss, metadata=metadata)
      return jax.jit(lambda arrays: (jax.value_and_grad(run)(arrays),
                                     jax.jvp(run, (arrays,), (arrays,))[1]))(arrays)
    with jax.enable_x64(True):
      got = both(OperationMetadata(mesh=mesh, ring=RingConfig(variant, layout)))
      want = both(None)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * abs(y).max())


class MemoryTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [(name, True) for name in ("alibi", "relative", "custom")],
      *((name, False) for name in ("alibi", "relative", "custom"))))
  def test_is_linear(self, name, gradient):
    """The compiler's bytes of temporary memory, from 2,048 to 16,384 tokens."""
    def temporary(length):
      x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
      table = jax.ShapeDtypeStruct((32, 2), jnp.float32)
      make = {"alibi": lambda table: score_mods.alibi(table[0]), "relative": score_mods.relative,
              "custom": lambda table: score_mods.custom(_gather, table)}[name]
      def loss(query, key, value, table):
        return attention(query, key, value, score_mod=make(table)).attention_outputs.sum()
      run = jax.grad(loss, (0, 1, 2, 3)) if gradient else loss
      return jax.jit(run).lower(x, x, x, table).compile().memory_analysis().temp_size_in_bytes
    short, long = temporary(2048), temporary(16384)
    self.assertLess(long, 8.5 * max(short, 2**20))
    self.assertLess(long, 16384 * 16384)  # a quarter of the scores of one head


def _gather(score, batch, head, query, key, table):
  return score + table[(query - key) % 32, head]


class RefusalsTest(parameterized.TestCase):

  def test_names_the_mechanisms_that_support_it(self):
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    mod = score_mods.soft_cap(3.0)
    with self.assertRaisesRegex(NotImplementedError, r"(?s)score_mod.*not supported.*blockwise"):
      attention(**arrays, score_mod=mod, mechanism="cudnn",
                metadata=OperationMetadata(platform="gpu", compute_capability="9.0"))
    with self.assertRaisesRegex(NotImplementedError, "does more than add to the scores"):
      attention(**arrays, score_mod=mod, mechanism="sdpa")
    for platform in ("cpu", "gpu", "tpu"):
      chosen = explain(**arrays, score_mod=mod, metadata=OperationMetadata(platform=platform))
      self.assertIn(chosen.chosen, ("flash_attn2", "blockwise"))
      self.assertNotIn("quadratic", str(chosen.verdicts[0]))

  def test_bad_input(self):
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    with self.assertRaisesRegex(ValueError, r"score_mod: got .*score_mods.custom\(function\)"):
      attention(**arrays, score_mod=same_document)
    with self.assertRaisesRegex(ValueError, r"alibi: slopes is float64\[3\]; expected"):
      attention(**arrays, score_mod=score_mods.alibi(np.ones(3)))
    with self.assertRaisesRegex(ValueError, "no score_mod that reads positions"):
      attention(arrays["query"][:, :3], arrays["key"], arrays["value"], causal=False,
                score_mod=score_mods.alibi(np.ones(H)))
    attention(arrays["query"][:, :3], arrays["key"], arrays["value"], causal=False,
              score_mod=score_mods.soft_cap(2.0))

  @parameterized.parameters("clip", "fill")
  def test_reads_whose_ends_are_asked_for(self, mode):
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    take = lambda x, b, h, q, k, a: x + jnp.take(a, k, mode=mode, fill_value=0.0)
    attention(**arrays, score_mod=score_mods.custom(take, np.ones(3, np.float32)))

  @parameterized.parameters("vanilla", "blockwise", "flash_attn2", "autoregressive_decodeattn")
  def test_a_function_does_not_lose_nan(self, mechanism):
    """Checks queries that see a key, or a value, that is not finite."""
    mod = score_mods.custom(lambda x, b, h, q, k: jnp.where(x > 0, x, -1.0))
    for name in ("key", "value"):
      arrays = {k: x.astype(np.float32) for k, x in operands().items()}
      arrays[name][:, 2] = np.nan
      if mechanism == "autoregressive_decodeattn":
        arrays["query"] = arrays["query"][:, -1:]
      out = attention(**arrays, score_mod=mod, mechanism=mechanism, causal=False,
                      query_offset=0).out
      self.assertTrue(jnp.isnan(out).all(), name)

  @parameterized.named_parameters(
      ("key", lambda x, b, h, q, k, a: x + a[k], (T - 1,), {},
       r"its operands \[\[12\]\] at batch row 0, head 0, query position 12, key position 12"),
      ("head", lambda x, b, h, q, k, a: x * a[jnp.minimum(q, 3), h], (4, H - 1), {}, "head 3"),
      ("row", lambda x, b, h, q, k, a: x + jnp.sin(a[b]), (1,), {}, "batch row 1"),
      ("before", lambda x, b, h, q, k, a: x + a[k - q], (5,), {}, "key position"),
      ("inner", jax.jit(lambda x, b, h, q, k, a: x + jnp.take(a, k)), (3,),
       {"causal": False}, "query position 0, key position 4"))
  def test_reads_beyond_the_operands(self, function, shape, arguments, message):
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    mod = score_mods.custom(function, np.ones(shape, np.float32))
    with self.assertRaisesRegex(ValueError, f"custom: function=.*{message}"):
      jax.jit(lambda arrays: attention(**arrays, score_mod=mod, **arguments).out)(arrays)

  def test_reads_that_do_not_count(self):
    """Checks that reads which are discarded, hidden or not known are allowed."""
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    for function, shape, arguments in (
        (lambda x, b, h, q, k, a: jnp.where(k < 5, x + a[k], x), 5, {}),
        (lambda x, b, h, q, k, a: x + a[jnp.clip(k, 0, 4)], 5, {}),
        (lambda x, b, h, q, k, a: x + a[k - q + T - 1], T, {}),
        (lambda x, b, h, q, k, a: x + a[q - k], 4, {"sliding_window": (3, 0)}),
        (lambda x, b, h, q, k, a: x + a[k], 5, {"mask": masks.lengths(None, np.int32([5, 4]))})):
      attention(**arrays, score_mod=score_mods.custom(function, np.ones(shape)), **arguments)

  def test_an_equal_one_does_not_retrace(self):
    arrays = {k: x.astype(np.float32) for k, x in operands().items()}
    traced = []
    @jax.jit
    def run(arrays, mod):
      traced.append(mod)
      return attention(**arrays, score_mod=mod).attention_outputs
    for number in range(3):
      run(arrays, score_mods.custom(same_document, np.ones(H), np.ones((B, T), np.int32))
          >> score_mods.alibi(np.full(H, number, np.float32)))
    self.assertLen(traced, 1)


if __name__ == "__main__":
  absltest.main()
