# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""autoregressive_decodeattn with score mods, against formulas of all scores at once."""

import functools
import itertools
import operator
from typing import NamedTuple
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, attention, create_mesh, explain, masks,
                       score_mods)
from attn_core.benchmark.static import profile
from attn_core.caches import quantize
from attn_core_test import decode_cases, sampling
from attn_core_test.decode_cases import (CASES, SHARDED, Case, arrays, cache_of, close, decoded,
                                         from_cache, with_gradients)
from attn_core_test.tpu_interpret import interpreted

TPU = OperationMetadata(platform="tpu")
HOPPER = OperationMetadata(platform="gpu", compute_capability="9.0")
IDS = np.array([3, -1, 2], np.int32)


def gathered(score, batch, head, query, key, weights, ids):
  """Returns scores of a custom score mod that reads every index."""
  return score * jnp.cos(weights[head]) + jnp.where(
      ids[batch % 3] > 0, weights[head] * jnp.sin(query - 0.5 * key).astype(score.dtype),
      0.1 * score * score)


def mod_arrays(case: Case, dtype=jnp.float64) -> dict:
  """Returns the arrays of every kind of score mod, by name."""
  rng = np.random.default_rng(7)
  rows, heads = len(case.lengths), case.H
  shapes = {"scale": (rows, 1, case.T), "slopes": (rows, heads), "table": (8, heads),
            "distance": (6, heads), "near": (3 * 9, heads), "weights": (heads,),
            "per_query": (1, heads, case.T), "per_key": (rows, 1, case.S),
            "dense": (1, heads, case.T, case.S)}
  return {name: jnp.asarray(0.3 * rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def by_parity(score, batch, head, query, key, amounts):
  """Returns scores of a custom score mod that kernels for TPUs evaluate."""
  return jnp.where(key & 1 == 0, score * amounts[head], score) + 0.1 * jnp.tanh(score) * (
      batch + 2 * head - query).astype(score.dtype)


def _by_pair(score, batch, head, query, key, weights):
  del batch, head
  return score + weights[(query - key) % 4]


def near(at: "At", a: dict):
  row = np.clip(at.query // 5 - at.key // 5 + 1, 0, 2)
  column = np.clip(at.query % 5 - at.key % 5 + 4, 0, 8)
  return a["near"][row * 9 + column, at.head]


def bucket(apart):
  back = np.maximum(-apart, 0)  # of 8 buckets for 9 distances, one for each up to 4
  ratio = 4 * np.log(np.maximum(back, 1) / 4) / np.log(9 / 4)
  return np.where(back < 4, back, np.minimum(4 + ratio.astype(int), 7))


class At(NamedTuple):
  """Coordinates that broadcast to scores [B, H, T, S]."""

  batch: np.ndarray
  head: np.ndarray
  query: np.ndarray
  key: np.ndarray


# Every kind of score mod, in the order in which they are composed: the score mod, and its formula.
KINDS = {
    "scale_by": (lambda a: score_mods.scale_by(a["scale"]),
                 lambda x, at, a: x * a["scale"][..., None]),
    "alibi": (lambda a: score_mods.alibi(a["slopes"]),
              lambda x, at, a: x + a["slopes"][:, :, None, None] * (at.key - at.query)),
    "relative": (lambda a: score_mods.relative(a["table"], max_distance=9, bidirectional=False),
                 lambda x, at, a: x + a["table"][bucket(at.key - at.query), at.head]),
    "soft_cap": (lambda a: score_mods.soft_cap(2.5), lambda x, at, a: 2.5 * jnp.tanh(x / 2.5)),
    "by_distance": (lambda a: score_mods.by_distance(a["distance"], -5), lambda x, at, a: (
        x + a["distance"][np.clip(at.key - at.query + 5, 0, 5), at.head])),
    "grid": (lambda a: score_mods.grid(a["near"], (2, 5)), lambda x, at, a: x + near(at, a)),
    "gathered": (lambda a: score_mods.custom(gathered, a["weights"], IDS), lambda x, at, a: (
        gathered(x, *at, a["weights"], jnp.asarray(IDS)))),
    "by_pair": (lambda a: score_mods.custom(_by_pair, a["weights"]),
                lambda x, at, a: _by_pair(x, *at, a["weights"])),
    "symmetric": (lambda a: score_mods.alibi(a["slopes"], symmetric=True), lambda x, at, a: (
        x - a["slopes"][:, :, None, None] * abs(at.key - at.query))),
    "by_parity": (lambda a: score_mods.custom(by_parity, a["weights"]),
                  lambda x, at, a: by_parity(x, *at, a["weights"])),
    "per_query": (lambda a: score_mods.per_query(a["per_query"]),
                  lambda x, at, a: x + a["per_query"][..., None]),
    "per_key": (lambda a: score_mods.per_key(a["per_key"]),
                lambda x, at, a: x + a["per_key"][:, :, None]),
    "dense": (lambda a: score_mods.dense(a["dense"]), lambda x, at, a: x + a["dense"]),
}
EVERYTHING = tuple(name for name in KINDS if name not in ("symmetric", "by_parity", "by_pair"))


def composed(a: dict, names=EVERYTHING) -> score_mods.ScoreMod:
  """Returns the composition of kinds of score mods."""
  return functools.reduce(operator.rshift, (KINDS[name][0](a) for name in names))


def by_formulas(score, query, key, a: dict, names=EVERYTHING):
  """Returns scores [B, H, T, S] after `composed`, at positions query [B, T] and key [B, S]."""
  rows, heads = score.shape[:2]
  at = At(np.arange(rows)[:, None, None, None], np.arange(heads)[None, :, None, None],
          query[:, None, :, None], key[:, None, None, :])
  for name in names:
    score = KINDS[name][1](score, at, a)
  return score


def places(case: Case):
  """Returns positions of queries and keys, and which are visible, of a case's cache."""
  starts = np.array(case.starts or (0,) * len(case.lengths))[:, None]
  lengths = np.array(case.lengths)[:, None]
  query, key = np.arange(case.T) + lengths - case.T - starts, np.arange(case.S) - starts
  left = np.inf if case.sliding_window is None else case.sliding_window[0]
  q, k = query[:, :, None], key[:, None]
  return query, key, (k >= 0) & (k <= q) & (k >= q - left) & (q >= 0)


def defined(case: Case, operands: dict, names=EVERYTHING):
  """Returns (out, lse) by formulas; see `decoded`."""
  query, key, seen = places(case)
  repeat = lambda x: jnp.repeat(x, case.H // case.K, 2)
  score = jnp.einsum("bthd,bshd->bhts", operands["query"], repeat(operands["key"]),
                     precision="highest") * case.D**-0.5
  if case.logits_soft_cap is not None:
    score = case.logits_soft_cap * jnp.tanh(score / case.logits_soft_cap)
  logits = jnp.where(seen[:, None], by_formulas(
      score, query, key, operands, names), -jnp.inf)
  if case.sinks:
    sinks = jnp.broadcast_to(operands["softmax_aux"][None, :, None, None], (*logits.shape[:3], 1))
    logits = jnp.concatenate([logits, sinks], -1)
  most = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), -1e30))
  weights = jnp.exp(logits - most)
  total = weights.sum(-1, keepdims=True)
  empty = total == 0
  total = jnp.where(empty, 1, total)
  out = jnp.einsum("bhts,bshd->bthd", (weights / total)[..., :case.S], repeat(operands["value"]))
  return out, jnp.where(empty, -jnp.inf, jnp.log(total) + most)[..., 0]


def run(case: Case, operands: dict, names=EVERYTHING, **more):
  return decoded(case, operands, score_mod=composed(operands, names), **more)


SHIFTED = Case((37, 20, 9), T=2, starts=(30, 0, 4), sliding_window=(11, 0), D=16, E=8, H=6, K=2,
               sinks=True, logits_soft_cap=3.0)


class FormulasTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("shifted", SHIFTED),
      *sampling.with_slow((), *((name, CASES[name]) for name in (
          "one_query", "rows_shorter_than_the_queries", "window", "starts",
          "every_query_head_has_its_own", "many_rows", "one_block"))))
  def test_value_lse_and_gradients(self, case):
    operands = arrays(case, jnp.float64) | mod_arrays(case)
    close(with_gradients(run, case)(operands), with_gradients(defined, case)(operands), 1e-10)

  def test_a_quantized_cache(self):
    """Checks gradients of the query and of the score mod's arrays, too."""
    case = SHIFTED
    operands = {name: x.astype(jnp.float32)
                for name, x in (arrays(case, jnp.float64) | mod_arrays(case)).items()}
    stored, wide = {}, {}
    for name in ("key", "value"):
      stored[name], stored[f"{name}_scale"] = quantize.quantize(operands.pop(name), "int8")
      wide[name] = quantize.dequantize(stored[name], stored[f"{name}_scale"], jnp.float64)
    got = with_gradients(lambda case, x: from_cache(
        case, x, cache_of(case, **stored), score_mod=composed(x)), case)(operands)
    exact = {name: x.astype(jnp.float64) for name, x in operands.items()}
    want = with_gradients(lambda case, x: defined(case, wide | x), case)(exact)
    close(got, want, 1e-4)

  def test_tangents(self):
    case = SHIFTED
    operands = arrays(case, jnp.float64) | mod_arrays(case)
    moves = jax.tree.map(lambda x: jnp.cos(3 * x), operands)
    finite = lambda run, x: jax.tree.map(jnp.nan_to_num, run(case, x))
    got, want = (jax.jit(lambda x, dx, run=run: jax.jvp(functools.partial(finite, run), (x,), (dx,))
                         )(operands, moves) for run in (run, defined))
    close(got, want, 1e-10)

  def test_keys_over_devices_have_global_positions(self):
    case = SHARDED
    operands = arrays(case, jnp.float64) | mod_arrays(case)
    mesh = OperationMetadata(mesh=create_mesh((2, 1, 1, 2, 2)))  # dp, fsdp, ep, tp, sp
    found = with_gradients(functools.partial(run, metadata=mesh), case)(operands)
    cache = cache_of(case, operands["key"], operands["value"])
    self.assertIn("sp", str(explain(
        operands["query"], None, None, cache_view=cache, score_mod=composed(operands),
        metadata=mesh, **case.arguments)))
    close(found, with_gradients(defined, case)(operands), 1e-10)

  def test_positions_of_a_call_without_a_cache(self):
    case = Case((5, 5, 5), T=2, S=5, block=None)
    operands = arrays(case, jnp.float64) | mod_arrays(case)
    query, key = np.array([[7, 1], [3, 9], [2, 2]], np.int32), np.array([[4, 0, 8, 2, 6]] * 3)
    info = MaskInfo(q_positions=query, kv_positions=key.astype(np.int32))
    want, got = (jax.jit(lambda x, name=name: attention(
        *(x[name] for name in ("query", "key", "value")), score_mod=composed(x), mask_info=info,
        mask=masks.full(), causal=False, mechanism=name).attention_outputs)(operands)
                 for name in ("vanilla", "autoregressive_decodeattn"))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


# What the kernel for TPUs takes, with any rows, and with few.
ON_TPU = ("scale_by", "alibi", "soft_cap", "symmetric", "by_parity", "per_query", "per_key")
FEW_ROWS = ("scale_by", "alibi", "relative", "soft_cap", "by_distance", *ON_TPU[3:], "dense")
# name: (case, dtype, of the cache where it is in 8 bits, score mods, how transfers are executed)
TPU_ROWS = {
    "few_rows": (Case((293, 0, 131), T=2, S=293, starts=(70, 0, 129), sliding_window=(200, 0),
                      D=16, E=8, H=6, K=2, sinks=True, logits_soft_cap=3.0, block=128),
                 "float32", None, FEW_ROWS, "on_wait"),
    "many_rows": (Case((150, 45), T=40, S=160, H=4, K=2, D=16, E=16, block=128), "float32", None,
                  ON_TPU, "eager"),
    "rows_of_two_heads": (Case((257, 130), T=3, S=260, H=8, K=2, D=128, E=128, block=128),
                          "bfloat16", None, FEW_ROWS, "eager"),
    "one_head": (Case((71,), T=1, S=71, H=1, K=1, D=8, E=8, block=None), "float32", None,
                 FEW_ROWS, "on_wait"),
    "int8": (Case((150, 77), S=160, H=8, K=4, D=16, E=8, block=None), "bfloat16", "int8", ON_TPU,
             "on_wait"),
    **{name: (Case((150, 3), T=2, S=160, H=4, K=2, D=16, E=16, block=128), "float32", None,
              (name,), "eager") for name in FEW_ROWS},
}


class TpuTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(False))  # decode_cases enables 64 bits

  @parameterized.parameters(*sampling.names(TPU_ROWS, ("few_rows", "many_rows")))
  def test_equals_the_formulas(self, name):
    """Interprets the kernel, with NaN in unread slots of the cache and of numbers of its keys."""
    case, dtype, held, names, transfers = TPU_ROWS[name]
    operands, cache, read = decode_cases.with_holes(case, dtype, held)
    mods = mod_arrays(case, jnp.float32)
    mods["per_key"] = jnp.where(jnp.isnan(cache.key[:, :, 0, 0])[:, None], jnp.nan, mods["per_key"])
    run = lambda operands, cache, mods: from_cache(
        case, operands, cache, score_mod=composed(mods, names), metadata=TPU)
    with interpreted(transfers):
      output = jax.block_until_ready(jax.jit(run)(operands, cache, mods))
    with jax.enable_x64(True):
      expected = jax.jit(lambda x: defined(case, x, names))(
          {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in (read | mods).items()})
    for x, y in zip(output, expected):
      x, y = np.asarray(x, np.float64), np.asarray(y)
      np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
      np.testing.assert_allclose(x, y, atol=2e-2 if dtype == "bfloat16" else 2e-5)

  @sampling.slow("tpu_decode_score_mods_gradients")
  def test_gradients(self):
    case, _, _, names, _ = TPU_ROWS["few_rows"]
    operands = arrays(case, jnp.float32) | mod_arrays(case, jnp.float32)
    with interpreted():
      got = jax.block_until_ready(with_gradients(functools.partial(
          run, names=names, metadata=TPU), case)(operands))
    with jax.enable_x64(True):
      exact = {name: x.astype(jnp.float64) for name, x in operands.items()}
      want = with_gradients(functools.partial(defined, names=names), case)(exact)
    close(got, want, 2e-4)

  @unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
  @parameterized.parameters(*sampling.with_slow(
      [("v6e", (8, 4, 128), 1, "bfloat16")],
      *itertools.product(("v6e",), ((1, 8, 128), (3, 1, 64)), (3,), ("bfloat16", "float32")),
      *itertools.product(("v5e", "v5p", "v6e", "tpu7x"), ((2, 5, 128),), (2, 40), ("bfloat16",))))
  def test_compiles(self, chip, shape, tokens, dtype):
    """Compiles ahead of time, without a chip."""
    key_heads, group, width = shape
    case = Case((1000,) * 8, S=1000, T=tokens, H=key_heads * group, K=key_heads, D=width, E=width,
                block=None)
    names = FEW_ROWS if tokens * group <= 64 else ON_TPU
    place = SingleDeviceSharding(profile.devices(chip)[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                          jax.eval_shape(
                              lambda: arrays(case, dtype) | mod_arrays(case, jnp.float32)))
    found = jax.jit(lambda x: run(case, x, names, metadata=TPU)).trace(shapes).lower(
        lowering_platforms=("tpu",)).compile()
    self.assertEqual(found.as_text().count('custom_call_target="tpu_custom_call"'), 1)


class ChoiceTest(parameterized.TestCase):

  def explained(self, case, mod, metadata):
    operands = arrays(case, jnp.bfloat16)
    return str(explain(operands["query"], None, None, score_mod=mod, metadata=metadata, cache_view=
                       cache_of(case, operands["key"], operands["value"]), **case.arguments))

  @parameterized.parameters(
      (("relative",), 32, "of 64 queries and heads a key head: the kernel for Hopper reads"),
      (("grid",), 1, "up by distance (score_mods.grid): the kernels for Hopper look nothing"),
      (("by_pair",), 1, "of _by_pair with an operand [4], not a number: the kernels for Hopper"),
      (("gathered",), 1, None),
      ((*ON_TPU, "dense"), 32, None), (FEW_ROWS, 16, None))
  def test_the_kernel_for_hopper_names_what_it_leaves_to_plain_xla(self, names, tokens, reason):
    case = Case((64, 64), T=tokens, S=64, D=64, E=64)
    found = self.explained(case, composed(mod_arrays(case), names), HOPPER)
    self.assertIn("decode.gpu" if reason is None else "by decode.xla, not by decode.gpu", found)
    self.assertIn(reason or "decode.gpu", found)

  @parameterized.parameters(
      (("relative",), 64, "of 128 queries and heads a key head: the TPU kernel takes them for up"),
      (("by_distance",), 1, None),
      (("grid",), 1, "a table looked up by distance (score_mods.grid)"),
      (("by_pair",), 1, "of _by_pair with an operand [4], not a number"),
      (("gathered",), 1, None),
      (("dense",), 64, "of 128 queries and heads a key head: the TPU kernel takes them for up to"),
      (ON_TPU, 64, None), (FEW_ROWS, 1, None))
  def test_the_kernel_for_tpus_names_what_it_leaves_to_plain_xla(self, names, tokens, reason):
    case = Case((64, 64), T=tokens, S=64, D=64, E=64)
    found = self.explained(case, composed(mod_arrays(case), names), TPU)
    self.assertIn("decode.tpu" if reason is None else "decode.xla", found)
    self.assertIn(reason or "decode.tpu", found)


if __name__ == "__main__":
  absltest.main()
