# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Score mods in the TPU flash kernels, interpreted, against the kernel of all scores at once."""

import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, attention, explain, masks,
                       score_mods)
from attn_core.benchmark.static import profile
from attn_core.config import devices
from attn_core.kernels.tpu.flash import (
    depth_columns, diagonals, kernel as tpu_kernel, scalar_memory, tile_inputs, tiling)
from attn_core.kernels.tpu.flash.schedule import Tiling
from attn_core.kernels.common.contract import Residuals
from attn_core.kernels.xla import flash as xla_flash
from attn_core.masks import block_map, leaves
from attn_core.mechanisms import flash as flash_mechanism
from attn_core.types import AttentionSpec, MaskOperands, Operands
from attn_core_test import sampling
from attn_core_test.tpu_interpret import interpreted

B, T, H, K, D = 2, 150, 2, 1, 16
IDS = np.arange(500, dtype=np.int32)[None] // 350
TPU = OperationMetadata(platform="tpu")


def _number(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def _by_parity(score, batch, head, query, key, amount):
  row = (batch + head).astype(score.dtype)
  return jnp.where((key & 1) == 0, score * amount, score) + 0.1 * jnp.tanh(score) * row


def _steep(score, batch, head, query, key, amount):
  """Has an infinite derivative above the diagonal of a causal mask, and no value beyond that."""
  del batch, head
  return score + 0.1 * jnp.sqrt(amount * (query - key + 1).astype(score.dtype))


def value_and_gradients(kernel, spec, blocks, d_out):
  """Returns a jitted function of (query, key, value), arrays of a score mod, and of a mask."""
  def run(arrays, mods, mask):
    operands = Operands(*arrays, mask=MaskOperands(tuple(mask)), mods=tuple(mods))
    out, lse = kernel.forward(operands, spec, blocks)
    return out, lse, kernel.backward(
        operands, spec, blocks, Residuals(out, lse), Residuals(d_out, jnp.cos(lse)),
        ("query", "key", "value", "mods.0"))
  return jax.jit(run)


ARRAYS = {"slopes": _number(H), "row": _number(B, H, T), "column": _number(B, 1, T),
          "scale": _number(1, 1, T), "bias": _number(1, H, T, T), "amount": _number(),
          "table": _number(8, H), "shared": _number(40, 1)}
MODS = {
    "alibi": lambda a: score_mods.alibi(0.1 * a["slopes"]),
    "alibi_symmetric": lambda a: score_mods.alibi(0.1 * a["slopes"], symmetric=True),
    "per_query": lambda a: score_mods.per_query(a["row"]),
    "per_key": lambda a: score_mods.per_key(a["column"]),
    "scale_by": lambda a: score_mods.scale_by(a["scale"]),
    "soft_cap": lambda a: score_mods.soft_cap(0.8),
    "relative": lambda a: score_mods.relative(a["table"], max_distance=90),
    "relative_causal": lambda a: score_mods.relative(
        a["table"], max_distance=60, bidirectional=False),
    "by_distance": lambda a: score_mods.by_distance(a["shared"], -31),
    "dense": lambda a: score_mods.dense(a["bias"]),
    "custom": lambda a: score_mods.custom(_by_parity, a["amount"]),
    "steep": lambda a: score_mods.custom(_steep, jnp.exp(a["amount"])),
    "composed": lambda a: (
        score_mods.scale_by(a["scale"]) >> score_mods.alibi(0.1 * a["slopes"])
        >> score_mods.relative(a["table"], max_distance=40) >> score_mods.by_distance(a["shared"])
        >> score_mods.soft_cap(0.8) >> score_mods.custom(_by_parity, a["amount"])
        >> score_mods.per_key(a["column"]) >> score_mods.per_query(a["row"])),
}


def _call(name, mechanism, **arguments):
  def run(arrays):
    output = attention(arrays["query"], arrays["key"], arrays["value"], mechanism=mechanism,
                       score_mod=MODS[name](arrays), return_lse=True, **arguments)
    return output.attention_outputs, output.lse
  return run


def _given():
  return ARRAYS | {"query": _number(B, T, H, D), "key": _number(B, T, K, D, seed=1),
                   "value": _number(B, T, K, D, seed=2)}


class InterpretTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("composed", "float32"), ("steep", "float32")],
      *((name, "float32") for name in MODS if name not in ("composed", "steep")),
      ("composed", "bfloat16")))
  def test_value_and_gradients(self, name, dtype):
    """Compares all gradients and values, at positions with an offset of each batch row."""
    arrays, offset = _given(), np.array([3, 20], np.int32)
    weights = _number(B, T, H, D, seed=5), _number(B, H, T, seed=6)
    def both(run):
      def loss(arrays):
        found = run(arrays)
        return sum((jnp.sin(x.astype(jnp.float32)) * w).sum()
                   for x, w in zip(found, weights)), found
      return jax.jit(jax.grad(loss, has_aux=True))
    given = {k: jnp.asarray(x, dtype) if k in ("query", "key", "value") else x
             for k, x in arrays.items()}
    with interpreted():
      got = jax.block_until_ready(both(_call(
          name, "flash_attn2", metadata=TPU, query_offset=offset,
          block_sizes=BlockSizes(128, 128, 128, 128)))(given))
    with jax.enable_x64(True):
      wide = {k: np.asarray(x, np.float64) for k, x in given.items()}
      want = both(_call(name, "vanilla", query_offset=offset))(wide)
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    flat, _ = jax.tree_util.tree_flatten_with_path(got)
    for (path, x), y in zip(flat, jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0,
                                 atol=tolerance * max(1, abs(y).max()),
                                 err_msg=jax.tree_util.keystr(path))


class ColumnsTest(parameterized.TestCase):
  """Slopes as columns of keys and queries, for matrix units that are deeper than heads are wide."""

  def test_their_product_is_exact(self):
    """Computes the columns of two heads, and compares sums of their products with the term."""
    blocks, slopes, base = Tiling(512, 512, 256, 384, 128, 128, group=2), _number(1, 2), 1_234_567
    at = tile_inputs.GridIndex(0, 0, 3, 1)
    columns = depth_columns.SlopeColumns(
        lambda refs, tile: jnp.full((1, 1), refs.arrays[0][0, tile.head]),
        1.0, lambda refs, grid: refs.arrays[1][grid.batch], blocks, 0)
    def kernel(slopes, base, keys, queries, *scratch):
      refs = tile_inputs.KernelRefs((), (slopes, base), (pl.program_id(0),), 1, scratch)
      columns.prepare(refs, at)
      for head in range(2):
        queries[head] = columns.of_queries(refs, head, tile_inputs.TokenRange(0, 256))
        tokens = tile_inputs.TokenRange(128, 256)
        keys[head] = columns.of_keys(refs, tile_inputs.TileIndex(at, head, tokens, tokens))
    shape = jax.ShapeDtypeStruct((2, 256, depth_columns.WIDTH), jnp.bfloat16)
    found = pl.pallas_call(
        kernel, out_shape=(shape, shape), grid=(1,), interpret=True,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2,
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in columns.scratch])(
            slopes, np.array([base], np.int32))
    keys, queries = (np.asarray(x, np.float64) for x in found)
    key, query = base + 384 + 128 + np.arange(256), 3 * 256 + np.arange(256)
    distance = key[:, None] - query
    np.testing.assert_allclose(keys @ queries.transpose(0, 2, 1),
                               slopes.reshape(2, 1, 1).astype(np.float64) * distance, rtol=1e-12)

  @parameterized.parameters(*sampling.with_slow(
      [(128, "alibi", 3)], (128, "both", 3), (384, "alibi", 100_000)))
  def test_value_and_gradients(self, width, name, offset):
    """Compares them with those of additions to the scores, in float32."""
    shapes = {"query": (2, 150, 2, width), "key": (2, 150, 1, width), "value": (2, 150, 1, 8)}
    arrays = {k: jnp.asarray(_number(*shape, seed=n), jnp.bfloat16).astype(jnp.float32)
              for n, (k, shape) in enumerate(shapes.items())}
    arrays |= {"slopes": np.array([0.7, 0.03], np.float32), "table": _number(8, 2)}
    mod = {"alibi": lambda a: score_mods.alibi(a["slopes"]),
           "both": lambda a: (score_mods.relative(a["table"], max_distance=40)
                              >> score_mods.alibi(a["slopes"]) >> score_mods.alibi(a["slopes"]))}
    def run(dtype, **arguments):
      def loss(a):
        query, key, value = (a[k].astype(dtype) for k in ("query", "key", "value"))
        found = attention(query, key, value, score_mod=mod[name](a), return_lse=True,
                          query_offset=offset, **arguments)
        out = found.attention_outputs.astype(jnp.float32)
        return jnp.sin(out).sum() + jnp.sin(found.lse).sum(), (out, found.lse)
      return jax.jit(jax.grad(loss, has_aux=True))(arrays)
    want = run(jnp.float32, mechanism="blockwise")
    sizes = BlockSizes(128, 128, 128, 128)
    with interpreted(), mock.patch.dict(devices.MATRIX_DEPTHS, {None: 256}):
      got = jax.block_until_ready(run(
          jnp.bfloat16, mechanism="flash_attn2", metadata=TPU, block_sizes=sizes))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x, y, rtol=0, atol=1e-2 * max(1, abs(y).max())), got, want)

  def test_rows_of_keys_are_exact(self):
    low, high, ones, *others = np.asarray(depth_columns.rows_of_keys(1024), np.float64)
    np.testing.assert_array_equal(low + high, np.arange(1024))
    np.testing.assert_array_equal(ones, 1)
    self.assertFalse(np.any(others))

  @parameterized.parameters(False, True)
  def test_take_little_vector_memory(self, backward):
    """Counts tables by distance for these alone: what a kernel may use, XLA does not."""
    mask, structure = jax.tree.flatten(masks.causal())
    rows = jax.ShapeDtypeStruct((1, 4096, H, 128), jnp.bfloat16)
    def needed(*mods):
      arrays, term = jax.tree.flatten(mods[0].lower((1, H, 4096, 4096))) if mods else ((), None)
      operands = Operands(rows, rows, rows, mask=MaskOperands(tuple(mask)), mods=tuple(arrays))
      spec = AttentionSpec(structure, 0.1, **(dict(score_mod=term) if mods else {}))
      found = tiling.make_tiling(operands, spec, BlockSizes(), backward=backward)
      return tiling.needed_vmem(found, operands, backward)
    self.assertBetween(needed(MODS["alibi"](ARRAYS)) - needed(), 2**19, 2**20)
    # The tiles of all block diagonals, which both directions keep.
    self.assertBetween(needed(MODS["alibi_symmetric"](ARRAYS)) - needed(), 2**22, 2**25)

  @parameterized.parameters(
      ("v6e", 128, "alibi", True), ("v5e", 128, "alibi", False), ("v6e", 256, "alibi", False),
      ("v6e", 128, "alibi_symmetric", False), ("v6e", 128, "capped", False))
  def test_are_chosen_where_they_are_free(self, chip, width, name, expected):
    """Lowers the forward for a chip that is not attached."""
    mods = MODS | {"capped": lambda a: score_mods.soft_cap(3.0) >> MODS["alibi"](a)}
    kind = {"v6e": "TPU v6 lite", "v5e": "TPU v5 lite"}[chip]
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice(
        kind, 1, "tpu"))
    rows = jax.ShapeDtypeStruct((1, 128, H, width), jnp.bfloat16)
    with (jax.sharding.use_abstract_mesh(mesh), mock.patch.object(
        depth_columns, "slope_columns", wraps=depth_columns.slope_columns) as made):
      jax.jit(lambda x: attention(
          x, x, x, score_mod=mods[name](ARRAYS), metadata=TPU, mechanism="flash_attn2",
          ).attention_outputs).trace(rows).lower(lowering_platforms=("tpu",))
    self.assertEqual(made.called, expected)


class SumsTest(parameterized.TestCase):
  """Sums of cotangents over several ranges of queries, groups of batch rows and parts of heads."""

  @parameterized.parameters(*sampling.with_slow(
      [(2, 1, "tiling", "RESIDENT_BYTES", 1)],
      (4, 1, "tiling", "RESIDENT_BYTES", 1), (2, 2, "tiling", "STEP_TOKENS", 128),
      (2, 1, "scalar_memory", "MOST_BYTES", 4200), (2, 1, "diagonals", "MOST_BYTES", 0),
      (2, 1, "diagonals", "CHUNK", 2)))
  def test_gradients(self, heads, key_heads, module, name, value):
    """Compares them with those of the kernel in plain XLA."""
    module = {"tiling": tiling, "scalar_memory": scalar_memory, "diagonals": diagonals}[module]
    shapes = {"query": (2, 256, heads, 8), "key": (2, 256, key_heads, 8), "table": (5, heads),
              "value": (2, 256, key_heads, 8), "column": (2, heads, 256), "row": (1, 1, 256)}
    arrays = {name: _number(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    def gradient(**arguments):
      def loss(a):
        mod = (score_mods.by_distance(a["table"], -2) >> score_mods.per_key(a["column"])
               >> score_mods.scale_by(a["row"]))
        return jnp.sin(attention(a["query"], a["key"], a["value"], score_mod=mod, **arguments
                                 ).attention_outputs).sum()
      return jax.jit(jax.grad(loss))(arrays)
    want = gradient(mechanism="blockwise")
    with interpreted(), mock.patch.object(module, name, value):
      got = jax.block_until_ready(gradient(
          mechanism="flash_attn2", metadata=TPU, block_sizes=BlockSizes(128, 128, 128, 128)))
    for name, x in got.items():
      np.testing.assert_allclose(x, want[name], rtol=0, atol=2e-5 * max(1, abs(want[name]).max()),
                                 err_msg=name)


class RunsTest(parameterized.TestCase):
  """Tables by distance where positions are in runs, as those of a shard of a ring."""

  @parameterized.parameters(*sampling.with_slow(
      [(256, (2, 1), 1)], (256, (2, 2), 1), (192, (2, 2), 1), (384, (2, 2), 1), (256, (1, 2), 3),
      (300, (1, 1), 5), (320, (1, 4), 4)))
  def test_value_and_gradients(self, length, runs, stride):
    """Compares runs that begin with squares of lanes, and others, with positions in any order."""
    sizes, numbers = (length, length * runs[1]), _number(1, length, 2, 8, seed=9)
    arrays = [_number(1, size, heads, 8, seed=n) for n, (size, heads) in enumerate(
        zip((sizes[0], sizes[1], sizes[1]), (2, 1, 1)))]
    table = _number(401, 2)
    def of_runs(size, count, first):
      run = stride * np.arange(size // count, dtype=np.int32)
      return np.concatenate([first + 700 * n + run for n in range(count)])[None]
    places = of_runs(sizes[0], runs[0], 300), of_runs(sizes[1], runs[1], 0)
    mod = score_mods.by_distance(table, -200).lower((1, 2, *sizes))
    mods, term = jax.tree.flatten(mod)
    blocks = BlockSizes(128, 256, 128, 256)
    def found(kernel, leaf, *more):
      mask, structure = jax.tree.flatten(leaf(masks.causal(), (10**4,) * 2, *places, *more))
      spec = AttentionSpec(structure, 0.4, score_mod=term)
      return value_and_gradients(kernel, spec, blocks, numbers)(arrays, mods, mask)
    want = found(xla_flash.KERNEL, leaves.Placed)
    with interpreted():
      got = jax.block_until_ready(found(
          tpu_kernel.make_kernel(xla_flash.KERNEL), leaves.PlacedRuns, runs, stride))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1, abs(y).max()))

  def test_long_shards_fit(self):
    """Checks tables whose tiles a step makes: those of a step count in vector memory."""
    tokens, shape = 65536, jax.ShapeDtypeStruct
    query, key = (shape((1, tokens, heads, 128), jnp.bfloat16) for heads in (8, 2))
    mods, term = jax.tree.flatten(
        score_mods.relative(_number(32, 8), bidirectional=False).lower((1, 8, tokens, tokens)))
    rows = np.zeros((1, tokens), np.int32)
    mask, structure = jax.tree.flatten(
        leaves.PlacedRuns(masks.causal(), (10**6,) * 2, rows, rows, (1, 1), 1))
    operands = Operands(query, key, key, mask=MaskOperands(tuple(mask)), mods=tuple(mods))
    spec = AttentionSpec(structure, 0.1, score_mod=term)
    tpu_kernel.make_kernel(xla_flash.KERNEL).check(operands, spec, BlockSizes())
    found = tiling.make_tiling(operands, spec, BlockSizes(), backward=True)
    self.assertEqual((found.block_q, found.block_kv), tiling.BLOCKS[tiling.LONG, True][:2])

  @parameterized.parameters(masks.causal(), masks.window(100, 0), masks.window(None, 200))
  def test_all_tiles_of_a_strip_have_their_diagonals(self, mask):
    """A strip is computed where one of its tiles is visible."""
    sizes = Tiling(1000, 1000, 512, 512, 256, 256)
    kinds = np.asarray(block_map.block_kinds(mask, block_map.Sizes(1000, 1000, 256, 256)))[0, 0]
    first, count = diagonals.visible(mask, sizes)
    for strip in range(2):
      queries = np.arange(2) + 2 * strip
      for key in np.nonzero((kinds[queries] != block_map.EMPTY).any(0))[0]:
        zero = sizes.padded_keys // 128 - 1 - 2 * key  # of tiles of two by two block diagonals
        places = np.arange(zero + 2 * queries[0] - 1, zero + 2 * queries[1] + 2)
        self.assertTrue((first <= places).all() and (places < first + count).all(), (strip, key))

  @parameterized.parameters(*sampling.with_slow([(masks.causal(),)], (masks.full(),), (
      masks.offset(masks.causal(), 100),), (masks.window(300, None) & masks.segments(IDS),)))
  def test_beyond_a_table(self, mask):
    """Compares blocks of which few pairs are in reach of the table with the XLA kernel."""
    arrays = [_number(1, 500, heads, 8, seed=n) for n, heads in enumerate((2, 1, 1))]
    mods, term = jax.tree.flatten(score_mods.by_distance(_number(5, 2), -2).lower((1, 2, 500, 500)))
    leaves_of_mask, structure = jax.tree.flatten(mask)
    spec, blocks = AttentionSpec(structure, 0.4, score_mod=term), BlockSizes(256, 256, 256, 256)
    numbers, constant = _number(1, 500, 2, 8, seed=9), []
    def found(kernel):
      return value_and_gradients(kernel, spec, blocks, numbers)(arrays, mods, leaves_of_mask)
    want = found(xla_flash.KERNEL)
    is_constant = diagonals.Band.is_constant
    def seen(band, place):
      constant.append(is_constant(band, place))
      self.assertLessEqual(band.size, 5)
      return constant[-1]
    with interpreted(), mock.patch.object(diagonals.Band, "is_constant", seen):
      got = jax.block_until_ready(found(tpu_kernel.make_kernel(xla_flash.KERNEL)))
    if mask == masks.causal():  # blocks of others share their code
      self.assertTrue(any(constant))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1, abs(y).max()))

  def test_tables_of_batch_rows_at_the_same_positions(self):
    """As `jax.vmap` over a table makes them: positions are those of all rows."""
    values, base, blocks = _number(3, 2, 9), jnp.array([[5]], jnp.int32), Tiling(
        128, 128, 128, 128, 128, 128)
    found = diagonals.rows_of(values, -4, base, 3, blocks)
    for n, row in enumerate(found):
      np.testing.assert_array_equal(row[None], diagonals.rows_of(
          values[n:n + 1], -4, base, 3, blocks))


class OneBackwardTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.names(MODS, ("composed", "dense")))
  def test_explain_names_the_gradients_of_a_second_backward(self, name):
    """Traces all gradients over a plain kernel that computes none, or the named ones alone."""
    asked = []
    def backward(operands, spec, sizes, residuals, cotangents, wrt):
      asked.extend(wrt)
      return xla_flash.KERNEL.backward(operands, spec, sizes, residuals, cotangents, wrt)
    kernel = tpu_kernel.make_kernel(xla_flash.KERNEL._replace(backward=backward))
    given, mod = _given(), MODS[name]
    gradient = jax.grad(lambda given: _call(name, "flash_attn2", metadata=TPU)(given)[0].sum())
    with mock.patch.object(flash_mechanism, "tpu_kernel", lambda **_: kernel):
      jax.jit(gradient).trace(given).lower(lowering_platforms=("tpu",))
    found = explain(*(given[k] for k in ("query", "key", "value")), score_mod=mod(given),
                    mechanism="flash_attn2", metadata=TPU)
    self.assertEqual(asked, ["mods.0"] if name == "dense" else [])
    self.assertEqual(found.derivatives.added,
                     ("flash.xla", ("score_mods.dense",)) if asked else None)

  def test_explain_names_the_gradient_of_a_bias(self):
    given = _given()
    found = explain(*(given[k] for k in ("query", "key", "value")), bias=given["bias"],
                    mechanism="flash_attn2", metadata=TPU)
    self.assertEqual(found.derivatives.added, ("flash.xla", ("bias",)))


@unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(
      [("composed", "bfloat16", "v6e")],
      *((name, "bfloat16", "v6e") for name in MODS if name != "composed"),
      *(("composed", "bfloat16", chip) for chip in ("v5e", "v5p", "tpu7x")),
      ("composed", "float32", "v6e")))
  def test_compiles(self, name, dtype, chip):
    """Compiles forward and backward ahead of time, without a chip: no other kernel has a loop."""
    place = SingleDeviceSharding(profile.devices(chip)[0])
    shapes = {k: jax.ShapeDtypeStruct(
        x.shape, dtype if k in ("query", "key", "value") else x.dtype, sharding=place)
              for k, x in _given().items()}
    run = _call(name, "flash_attn2", metadata=TPU)
    gradient = jax.grad(lambda arrays: run(arrays)[1].sum())
    text = jax.jit(gradient).trace(shapes).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)
    self.assertEqual(" while(" in text, name == "dense")


class RefusalsTest(parameterized.TestCase):

  @parameterized.parameters(
      (score_mods.alibi(np.ones(H, np.float32))
       >> score_mods.grid(np.ones((3 * 3, H), np.float32), (2, 2)), "looked up by distance"),
      (score_mods.custom(lambda s, b, h, q, k: jax.lax.lgamma(s)), "applies lgamma"),
      (score_mods.custom(lambda s, b, h, q, k, x: s + x[(q - k) % H], np.ones(H, np.float32)),
       r"an operand \[2\]"),
      (score_mods.custom(lambda s, b, h, q, k, x: s + x, np.ones((), np.int32)),
       "an operand of dtype int32"),
      (score_mods.custom(lambda s, b, h, q, k: jax.lax.cond(b > 0, lambda x: x, lambda x: -x, s)),
       r"numbers as arrays \[1, 1\]"))
  def test_names_what_it_does_not_take_and_who_does(self, mod, reason):
    given = {k: _given()[k] for k in ("query", "key", "value")}
    with self.assertRaisesRegex(NotImplementedError, f"(?s){reason}.*'blockwise'"):
      attention(**given, score_mod=mod, mechanism="flash_attn2", metadata=TPU)
    self.assertEqual(explain(**given, score_mod=mod, metadata=TPU).chosen, "blockwise")

  @parameterized.parameters(
      dict(mask_info=MaskInfo(q_positions=np.arange(T)[None].repeat(B, 0))),
      dict(mask=masks.positions(np.arange(T)[None], np.arange(T)[None], masks.causal()),
           causal=False))
  def test_tables_by_distance_need_consecutive_positions(self, **arguments):
    given = {k: _given()[k] for k in ("query", "key", "value")}
    mod = score_mods.relative(np.ones((8, H), np.float32), max_distance=9)
    with self.assertRaisesRegex(NotImplementedError, "(?s)at listed positions.*'blockwise'"):
      attention(**given, score_mod=mod, mechanism="flash_attn2", metadata=TPU, **arguments)

  def test_explain_chooses_the_kernel(self):
    given = {k: _given()[k] for k in ("query", "key", "value")}
    for mod in MODS.values():
      self.assertEqual(explain(**given, score_mod=mod(ARRAYS), metadata=TPU).chosen, "flash_attn2")


if __name__ == "__main__":
  absltest.main()
