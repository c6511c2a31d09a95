# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""autoregressive_decodeattn with score mods, against formulas of all scores at once."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, attention, create_mesh, explain, masks,
                       score_mods)
from attn_core.caches import quantize
from attn_core_test import sampling
from attn_core_test.decode_cases import (CASES, SHARDED, Case, arrays, cache_of, close, decoded,
                                         from_cache, with_gradients)

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


def everything(a: dict) -> score_mods.ScoreMod:
  """Returns the composition of every kind of score mod."""
  return (score_mods.scale_by(a["scale"]) >> score_mods.alibi(a["slopes"])
          >> score_mods.relative(a["table"], max_distance=9, bidirectional=False)
          >> score_mods.soft_cap(2.5) >> score_mods.by_distance(a["distance"], -5)
          >> score_mods.grid(a["near"], (2, 5)) >> score_mods.custom(gathered, a["weights"], IDS)
          >> score_mods.per_query(a["per_query"]) >> score_mods.per_key(a["per_key"])
          >> score_mods.dense(a["dense"]))


def by_formulas(score, query, key, a: dict):
  """Returns scores [B, H, T, S] after `everything`, at positions query [B, T] and key [B, S]."""
  query, key = query[:, None, :, None], key[:, None, None, :]
  rows, heads = score.shape[:2]
  head, batch = np.arange(heads)[None, :, None, None], np.arange(rows)[:, None, None, None]
  apart = key - query
  score = score * a["scale"][..., None] + a["slopes"][:, :, None, None] * apart
  back = np.maximum(-apart, 0)  # of 8 buckets for 9 distances, one for each up to 4
  ratio = 4 * np.log(np.maximum(back, 1) / 4) / np.log(9 / 4)
  bucket = np.where(back < 4, back, np.minimum(4 + ratio.astype(int), 7))
  score = 2.5 * jnp.tanh((score + a["table"][bucket, head]) / 2.5)
  score = score + a["distance"][np.clip(apart + 5, 0, 5), head]
  row = np.clip(query // 5 - key // 5 + 1, 0, 2)
  column = np.clip(query % 5 - key % 5 + 4, 0, 8)
  score = score + a["near"][row * 9 + column, head]
  score = gathered(score, batch, head, query, key, a["weights"], jnp.asarray(IDS))
  return (score + a["per_query"][..., None] + a["per_key"][:, :, None] + a["dense"])


def places(case: Case):
  """Returns positions of queries and keys, and which are visible, of a case's cache."""
  starts = np.array(case.starts or (0,) * len(case.lengths))[:, None]
  lengths = np.array(case.lengths)[:, None]
  query, key = np.arange(case.T) + lengths - case.T - starts, np.arange(case.S) - starts
  left = np.inf if case.sliding_window is None else case.sliding_window[0]
  q, k = query[:, :, None], key[:, None]
  return query, key, (k >= 0) & (k <= q) & (k >= q - left) & (q >= 0)


def defined(case: Case, operands: dict):
  """Returns (out, lse) by formulas; see `decoded`."""
  query, key, seen = places(case)
  repeat = lambda x: jnp.repeat(x, case.H // case.K, 2)
  score = jnp.einsum("bthd,bshd->bhts", operands["query"], repeat(operands["key"]),
                     precision="highest") * case.D**-0.5
  if case.logits_soft_cap is not None:
    score = case.logits_soft_cap * jnp.tanh(score / case.logits_soft_cap)
  logits = jnp.where(seen[:, None], by_formulas(score, query, key, operands), -jnp.inf)
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


def run(case: Case, operands: dict, **more):
  return decoded(case, operands, score_mod=everything(operands), **more)


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
        case, x, cache_of(case, **stored), score_mod=everything(x)), case)(operands)
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
        operands["query"], None, None, cache_view=cache, score_mod=everything(operands),
        metadata=mesh, **case.arguments)))
    close(found, with_gradients(defined, case)(operands), 1e-10)

  def test_positions_of_a_call_without_a_cache(self):
    case = Case((5, 5, 5), T=2, S=5, block=None)
    operands = arrays(case, jnp.float64) | mod_arrays(case)
    query, key = np.array([[7, 1], [3, 9], [2, 2]], np.int32), np.array([[4, 0, 8, 2, 6]] * 3)
    info = MaskInfo(q_positions=query, kv_positions=key.astype(np.int32))
    want, got = (jax.jit(lambda x, name=name: attention(
        *(x[name] for name in ("query", "key", "value")), score_mod=everything(x), mask_info=info,
        mask=masks.full(), causal=False, mechanism=name).attention_outputs)(operands)
                 for name in ("vanilla", "autoregressive_decodeattn"))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


class ChoiceTest(absltest.TestCase):

  def test_kernels_of_accelerators_leave_it_to_plain_xla(self):
    case = Case((64, 64), S=64, D=64, E=64)
    operands = arrays(case, jnp.bfloat16)
    mod = score_mods.alibi(np.ones(case.H, np.float32))
    for metadata in (OperationMetadata(platform="tpu"),
                     OperationMetadata(platform="gpu", compute_capability="9.0")):
      found = explain(operands["query"], None, None, score_mod=mod, metadata=metadata, cache_view=
                      cache_of(case, operands["key"], operands["value"]), **case.arguments)
      self.assertIn("decode.xla", str(found))
      self.assertIn("score_mod (a score mod", str(found))


if __name__ == "__main__":
  absltest.main()
