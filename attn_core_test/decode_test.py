# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""autoregressive_decodeattn: a few queries against a dense cache, against the oracle."""

import functools
import inspect
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import OperationMetadata, attention, autoregressive_decodeattn, create_mesh, explain
from attn_core.arguments import normalize
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches import dense, quantize
from attn_core.kernels.xla import decode
from attn_core_test import sampling
from attn_core_test.decode_cases import (CASES, MODE, SHARDED, Case, arrays, cache_of, close,
                                         compiled, decoded, defined, expected, with_gradients)


class OracleTest(parameterized.TestCase):

  @parameterized.named_parameters(*[(name, name) for name in CASES])
  def test_value_lse_and_gradients(self, name):
    case = CASES[name]
    operands = arrays(case, jnp.float64)
    close(with_gradients(decoded, case)(operands),
          with_gradients(defined, case, sampling.LEAST)(operands), 1e-10)

  @parameterized.parameters("window", "many_rows", "every_query_head_has_its_own")
  def test_float32(self, name):
    case = CASES[name]
    operands = arrays(case, jnp.float32)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), operands)
    close(compiled(case)(operands), expected(case)(wide), 2e-5)

  def test_bfloat16(self):
    dtype, case = "bfloat16", CASES["window"]
    operands = arrays(case, dtype)
    out, lse = compiled(case)(operands)
    want, want_lse = expected(case)(jax.tree.map(lambda x: x.astype(jnp.float64), operands))
    self.assertEqual((out.dtype, lse.dtype), (dtype, jnp.float32))
    # Only the output is rounded: products and sums are in float32.
    np.testing.assert_allclose(out.astype(jnp.float64), want, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)

  @parameterized.product(queries=(1, 6), dtype=("float8_e4m3fn", "float8_e5m2"))
  def test_unscaled_8_bit_operands_equal_float32_ones(self, queries, dtype):
    rng = np.random.default_rng(0)
    narrow = [jnp.asarray(rng.normal(size=(2, length, heads, 8)), dtype)
              for length, heads in ((queries, 4), (9, 2), (9, 2))]
    def run(arrays, mechanism):
      return attention(*arrays, mechanism=mechanism, query_offset=3, return_lse=True)
    found = run(narrow, "autoregressive_decodeattn")
    expected = run([x.astype(jnp.float32) for x in narrow], "vanilla")
    self.assertEqual(found.attention_outputs.dtype, dtype)
    rounding = 4 * float(jnp.finfo(dtype).eps)  # rounding of the weights and of the output
    np.testing.assert_allclose(found.attention_outputs.astype(jnp.float32),
                               expected.attention_outputs, rtol=rounding, atol=rounding / 4)
    np.testing.assert_allclose(found.lse, expected.lse, atol=rounding)

  @parameterized.parameters(("window", "int8"), ("many_rows", "float8_e4m3fn"),
                            ("every_query_head_has_its_own", "float8_e4m3fn"),
                            ("window", "int4"), ("many_rows", "int4"),
                            ("all_query_heads_share_a_key_head", "int4"))
  def test_a_quantized_cache_equals_the_dequantized_one(self, name, dtype):
    """Checks that values and the query's gradient are those of the dequantized cache."""
    case = CASES[name]
    operands = arrays(case, jnp.float32)
    stored, wide = {}, {"query": operands["query"].astype(jnp.float64)}
    for field in ("key", "value"):
      stored[field], scales = quantize.quantize(operands[field], dtype)
      wide[field] = quantize.dequantize(stored[field], scales, jnp.float64)
      stored[f"{field}_scale"] = scales
      if dtype == "int4":
        stored[field] = quantize.pack_columns(stored[field])
    def run(case, operands):
      output = attention(operands["query"], None, None, cache_view=cache_of(case, **stored),
                         return_lse=True, **case.arguments)
      return output.attention_outputs, output.lse
    got = with_gradients(run, case)({"query": operands["query"]})
    want = with_gradients(lambda case, x: defined(case, {**wide, **x}), case, sampling.LEAST)(
        {"query": wide["query"]})
    close(got, want, 3e-5)


BIG = Case((300, 299, 0, 1, 128, 257), S=300, block=None)
ROWS = BIG._replace(lengths=(300, 299, 3, 7, 128, 257), block=64, D=128, E=64)


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(
      (ROWS._replace(block=None), "float32"), (ROWS._replace(T=3), "float32"), (ROWS, "bfloat16"),
      (CASES["large_blocks"]._replace(lengths=(1100, 300, 700, 1024)), "float32"),
      (Case((48, 64, 22, 64), S=64, H=4, K=4, block=None), "float32"))
  def test_a_row_has_the_same_bits_in_every_batch(self, case, dtype):
    operands = arrays(case, dtype)
    whole = compiled(case)(operands)
    order = np.random.default_rng(1).permutation(len(case.lengths))
    moved = case._replace(lengths=tuple(np.array(case.lengths)[order].tolist()))
    shuffled = compiled(moved)({name: x[order] for name, x in operands.items()})
    for x, y in zip(whole, shuffled):
      np.testing.assert_array_equal(np.asarray(x)[order], y)
    for row in (0, 3):
      alone = case._replace(lengths=case.lengths[row:row + 1])
      one = compiled(alone)({name: x[row:row + 1] for name, x in operands.items()})
      for x, y in zip(whole, one):
        np.testing.assert_array_equal(np.asarray(x)[row:row + 1], y)

  def test_only_live_blocks_are_visited(self):
    case = BIG._replace(block=32, sliding_window=(40, 0), starts=(0, 0, 0, 0, 100, 0))
    visits, = _visits(case, arrays(case, jnp.float32))
    # Of 32 keys each: keys 259..299, 258..298, none, 0, 100..127 and 216..256.
    np.testing.assert_array_equal(visits.num_visited[:, 0, 0], [2, 2, 0, 1, 1, 3])

  def test_visible_keys_are_split_into_large_blocks(self):
    case = CASES["large_blocks"]
    large, small = _visits(case, arrays(case, jnp.float32))
    np.testing.assert_array_equal(large.num_visited[:, 0, 0], [2, 1, 0])
    # Keys 1024..1099, 512..699, and 0..255 and 256..299.
    np.testing.assert_array_equal(small.num_full[:, 0, 0], [0, 0, 1])
    np.testing.assert_array_equal(small.num_visited[:, 0, 0], [1, 1, 2])
    self.assertFalse(large.any_partial)

  def test_hidden_slots_do_not_matter(self):
    """Checks NaN and infinities past the lengths, before the starts and outside the window."""
    case = CASES["window"]._replace(starts=(0, 3, 0))
    operands = arrays(case, jnp.float32)
    slot = np.arange(case.S)
    first = np.maximum(np.array(case.starts), np.array(case.lengths) - case.T - 9)
    seen = (slot < np.array(case.lengths)[:, None]) & (slot >= first[:, None])
    run = with_gradients(decoded, case)
    want = run(operands)
    for number in (np.nan, np.inf, -np.inf):
      with_nonfinite = lambda x: jnp.where(seen[..., None, None], x, number)
      got = run({**operands, **{name: with_nonfinite(operands[name]) for name in ("key", "value")}})
      jax.tree.map(np.testing.assert_array_equal, got, want)
    for name in ("key", "value"):
      np.testing.assert_array_equal(np.asarray(want[1][name])[~seen], 0)

  @parameterized.parameters("int8", "int4")
  def test_hidden_scales_do_not_matter(self, dtype):
    """Checks NaN scales past the lengths, before the starts and outside the window."""
    case = CASES["window"]._replace(starts=(0, 3, 0))
    operands = arrays(case, jnp.float32)
    slot = np.arange(case.S)
    first = np.maximum(np.array(case.starts), np.array(case.lengths) - case.T - 9)
    seen = ((slot < np.array(case.lengths)[:, None]) & (slot >= first[:, None]))[..., None]
    stored = dict(zip(("key", "key_scale", "value", "value_scale"), (
        part for name in ("key", "value") for part in quantize.quantize(operands[name], dtype))))
    if dtype == "int4":
      stored = {name: x if "scale" in name else quantize.pack_columns(x)
                for name, x in stored.items()}
      seen = seen[..., None]
    @jax.jit
    def run(stored):
      output = attention(operands["query"], None, None, cache_view=cache_of(case, **stored),
                         return_lse=True, **case.arguments)
      return output.attention_outputs, output.lse
    want = run(stored)
    for name in ("key_scale", "value_scale"):
      got = run({**stored, name: jnp.where(seen, stored[name], jnp.nan)})
      jax.tree.map(np.testing.assert_array_equal, got, want)
      # Of the first row, the last query alone sees the last slot.
      out, lse = run({**stored, name: stored[name].at[0, -1, 1].set(np.nan)})
      affected = np.zeros((3, case.T, case.H), bool)
      affected[0, -1, 2:] = True
      np.testing.assert_array_equal(np.isnan(out).all(-1), affected)
      np.testing.assert_array_equal(np.isnan(lse).transpose(0, 2, 1), affected)

  @parameterized.product(array=("key", "value"), number=(np.nan, np.inf, -np.inf),
                         masked=(False, True))
  def test_visible_nonfinite_slots_yield_nan(self, array, number, masked):
    case = CASES["one_query"]
    slot = 16 if masked else 2  # in a partial block at the end of row 2, or in a full one
    case = case._replace(lengths=(37, 1, 17))
    operands = arrays(case, jnp.float32)
    operands[array] = operands[array].at[2, slot, 1, 3].set(number)
    out, lse = compiled(case)(operands)
    want = np.zeros((3, case.H), bool)
    want[2, 2:] = True  # the query heads of that key head
    np.testing.assert_array_equal(np.isnan(out).any((1, 3)), want)
    np.testing.assert_array_equal(np.isnan(out).all((1, 3)), want)
    np.testing.assert_array_equal(np.isnan(lse)[..., 0], want)

  def test_huge_logits(self):
    case = CASES["window"]
    operands = arrays(case, jnp.float32)
    operands["query"] *= 1e4
    operands["key"] *= 1e4
    out, lse = compiled(case)(operands)
    want, want_lse = expected(case)(jax.tree.map(lambda x: x.astype(jnp.float64), operands))
    np.testing.assert_allclose(out, want, atol=1e-5)
    # Products as large as the largest logits are rounded.
    np.testing.assert_allclose(lse, want_lse, atol=1e-6 * np.abs(want_lse).max())

  def test_one_head_and_one_query_stay_causal(self):
    case = CASES["one_head"]._replace(T=1)
    operands = arrays(case, jnp.float32)
    out = attention(operands["query"], operands["key"], operands["value"], query_offset=4,
                    mechanism="autoregressive_decodeattn").attention_outputs
    late = {name: operands[name].at[:, 5:].set(7.0) for name in ("key", "value")}
    again = autoregressive_decodeattn(operands["query"], **late, query_offset=4).attention_outputs
    np.testing.assert_array_equal(out, again)

  def test_no_copy_of_the_cache_is_made(self):
    case = Case((4096, 1), S=4096, H=2, K=1, D=64, E=64, block=128)
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn", "int4"):
      cache = dense.init(2, case.S, (1, 64), dtype=dtype)
      run = jax.jit(lambda cache, query: attention(
          query, None, None, cache_view=cache, **case.arguments).attention_outputs)
      query = jnp.ones((2, 1, 2, 64), "bfloat16" if dtype == "bfloat16" else "float32")
      memory = run.lower(cache, query).compile().memory_analysis()
      cached = cache.key.nbytes + cache.value.nbytes
      if dtype == "int4":  # its scales are a fifth of it
        cached += cache.key_scale.nbytes + cache.value_scale.nbytes
      # A CPU converts float8 from copies of its bits; a whole cache is never dequantized.
      most = 1.25 if dtype == "float8_e4m3fn" else 0.25
      self.assertLess(memory.temp_size_in_bytes, most * cached, dtype)

  @parameterized.parameters("float32", "int8")
  def test_all_threads_work(self, dtype):
    run = jax.jit(lambda cache, query: attention(query, None, None, cache_view=cache, **MODE))
    cache = jax.eval_shape(lambda: dense.init(8, 4096, (8, 128), dtype=dtype))
    query = jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.float32)
    # XLA:CPU marks a loop so if it compiles it as one function, which runs in one thread.
    self.assertNotIn("xla_cpu_small_call", run.lower(cache, query).compile().as_text())


def _visits(case, operands):
  """Returns block maps of a call: one of large blocks, if there are any, and one of small ones."""
  bound = inspect.signature(attention).bind(
      operands["query"], None, None, **case.arguments,
      cache_view=cache_of(case, operands["key"], operands["value"]))
  bound.apply_defaults()
  call = normalize.normalize(AttentionArguments(**bound.arguments)).call
  levels = decode._block_inputs(call.operands, call.spec, call.block_sizes)
  return [problem.visits for problem in levels]


class TransformationsTest(parameterized.TestCase):

  def test_jit_changes_nothing(self):
    case = CASES["soft_cap_and_sinks"]
    operands = arrays(case, jnp.float32)
    close(decoded(case, operands), compiled(case)(operands), 1e-6)

  def test_vmap_over_layers_equals_a_loop(self):
    case = CASES["window"]
    layers = [arrays(case, jnp.float32, seed) for seed in range(3)]
    run = with_gradients(decoded, case)
    got = jax.vmap(run)(jax.tree.map(lambda *x: jnp.stack(x), *layers))
    for i, layer in enumerate(layers):
      close(jax.tree.map(lambda x: x[i], got), run(layer), 1e-5)

  def test_a_scan_that_decodes_equals_the_whole(self):
    """Checks a cache as the carry of a scan, from empty to full, token by token."""
    case = Case((12, 12), T=12, S=12, D=16, E=8)
    operands = arrays(case, jnp.float32)
    want = attention(**operands, mechanism="vanilla").attention_outputs
    def token(cache, t):
      now = [jax.lax.dynamic_slice_in_dim(operands[name], t, 1, 1)
             for name in ("query", "key", "value")]
      output = attention(*now, cache_view=cache, **MODE)
      return output.cache_view, output.attention_outputs[:, 0]
    cache = dense.init(2, 12, (case.K, case.D, case.E), dtype="float32")
    cache, got = jax.jit(lambda cache: jax.lax.scan(token, cache, jnp.arange(12)))(cache)
    np.testing.assert_allclose(got.swapaxes(0, 1), want, atol=2e-6)
    np.testing.assert_array_equal(cache.key, operands["key"])

  def test_new_keys_and_values_have_gradients_through_the_cache(self):
    case = Case((5, 2), T=2, S=9, D=16, E=16)
    operands = arrays(case, jnp.float64)
    before = np.array(case.lengths) - case.T
    new = {name: jnp.stack([x[b, n:n + 2] for b, n in enumerate(before)])
           for name, x in operands.items() if name in ("key", "value")}
    def by_step(query, new):
      cache = cache_of(case._replace(lengths=tuple(before.tolist())), operands["key"],
                       operands["value"])
      return jnp.sin(attention(query, **new, cache_view=cache, **MODE).attention_outputs).sum()
    def by_definition(query, new):
      whole = {name: jax.vmap(lambda row, x, n: jax.lax.dynamic_update_slice_in_dim(
          row, x, n, 0))(operands[name], new[name], before) for name in new}
      return jnp.sin(defined(case, {"query": query, **whole})[0]).sum()
    got, want = (jax.jit(jax.grad(f, (0, 1)))(operands["query"], new)
                 for f in (by_step, by_definition))
    close(got, want, 1e-10)


class ShardedTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("keys", (1, 1, 1, 1, 8)), ("rows_and_keys", (2, 1, 1, 1, 4)),
      ("everything", (1, 2, 1, 2, 2)), ("shared_key_heads", (1, 1, 1, 4, 2)))
  def test_equals_one_device(self, dims):
    operands = arrays(SHARDED, jnp.float32)
    metadata = OperationMetadata(mesh=create_mesh(dims))
    run = functools.partial(decoded, metadata=metadata)
    close(with_gradients(run, SHARDED)(operands), with_gradients(decoded, SHARDED)(operands), 3e-5)

  def test_nan_is_seen_across_devices(self):
    operands = arrays(SHARDED, jnp.float32)
    operands["key"] = operands["key"].at[3, 15].set(jnp.nan).at[2, 9].set(jnp.nan)
    metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, 8)))
    out, lse = jax.jit(functools.partial(decoded, SHARDED, metadata=metadata))(operands)
    want = np.zeros((4, 3), bool)
    want[3, 2] = True  # only the last query sees slot 15; no query sees slot 9 of row 2
    np.testing.assert_array_equal(np.isnan(out).all((2, 3)), want)
    np.testing.assert_array_equal(np.isnan(lse).all(1), want)

  @parameterized.parameters("float32", "int8", "int4")
  def test_a_step_sends_only_results(self, dtype):
    """Checks that new tokens are written on the device of their slots; keys and values stay."""
    mesh = create_mesh((1, 1, 1, 1, 8))
    metadata = OperationMetadata(mesh=mesh)
    def like(x):
      spec = P(None, "sp") if x.ndim > 1 else P()
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    cache = jax.tree.map(like, dense.init(4, 64, (2, 16), dtype=dtype))
    new = [jax.ShapeDtypeStruct((4, 1, heads, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
           for heads in (4, 2, 2)]
    run = lambda cache, *new: attention(*new, cache_view=cache, metadata=metadata, **MODE)
    compiled = jax.jit(run, donate_argnums=0).lower(cache, *new).compile()
    text = compiled.as_text()
    sent = re.findall(r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
                      r"(?:-start)?\(", text)
    self.assertEqual(set(sent), {"all-reduce"})
    largest = max(np.prod([int(n) for n in re.search(r"\[([\d,]*)\]", line)[1].split(",")])
                  for line in text.splitlines() if "all-reduce(" in line)
    self.assertEqual(largest, 4 * 4 * 16)  # of the call's output
    self.assertIn("input_output_alias={", text)

  def test_explain_reports_what_is_not_sharded(self):
    x = jax.ShapeDtypeStruct((4, 15, 2, 16), jnp.float32)
    metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, 8)))
    explanation = str(explain(x, x, x, mechanism="autoregressive_decodeattn", metadata=metadata))
    self.assertIn("axis 'sp' does not shard dimension 1 of key: sp=8 does not divide", explanation)


if __name__ == "__main__":
  absltest.main()
