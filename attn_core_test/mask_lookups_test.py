# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicates of masks that look numbers up, which is done before the kernels, against arrays."""

import os
import unittest

# Interpreted warpgroups wait for each other on threads of XLA's, of which there are otherwise as
# many as cores.
os.environ["NPROC"] = "16"

# pylint: disable=g-import-not-at-top
from absl.testing import absltest
from absl.testing import parameterized
import jax
jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, RingConfig, attention, create_mesh,
                       explain, masks)
from attn_core.arguments import mask_lookups
from attn_core.benchmark.static import gpu as static_gpu, profile
from attn_core.masks import leaves, looked_up, mask as mask_lib, materialize
from attn_core_test import gpu_cases, gpu_interpret, sampling, tpu_interpret
from attn_core_test import mask_lookups as cases
from attn_core_test.mask_lookups import PREDICATES

B, T, H, K, D = cases.B, cases.T, cases.H, 1, 16
NAMES = tuple(PREDICATES)
METADATA = {"tpu": OperationMetadata(platform="tpu"),
            "gpu": OperationMetadata(platform="gpu", compute_capability="9.0")}
BLOCKS = BlockSizes(32, 32, 32, 32)


def _arrays(length=T, key_heads=K):
  rng = np.random.default_rng(5)
  return [rng.normal(size=(B, length, heads, D)).astype(np.float32)
          for heads in (H, key_heads, key_heads)]


def _with_gradients(mask, **arguments):
  """Returns a function of queries, keys, values and operands to (gradients, (out, lse))."""
  def loss(arrays, operands):
    output = attention(*arrays, mask=mask(*operands), causal=False, return_lse=True, **arguments)
    found = output.attention_outputs, jnp.where(jnp.isfinite(output.lse), output.lse, 0)
    return sum((jnp.sin(x) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()
               for x in found), found
  return jax.jit(jax.grad(loss, has_aux=True))


def _run(name, arrays, **arguments):
  predicate = PREDICATES[name]
  mask = lambda *operands: masks.causal() & predicate.mask(*operands)
  return _with_gradients(mask, **arguments)(arrays, predicate.operands)


def _defined(name, arrays, query=np.arange(T)[None], key=np.arange(T)[None]):
  """Returns what `_run` does, by one boolean array."""
  seen = PREDICATES[name].seen(query, key) & (key[:, None] <= query[..., None])[:, None]
  return _with_gradients(masks.dense, mechanism="vanilla")(arrays, (seen,))


def _close(got, want, tolerance=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=tolerance * max(1, abs(y).max())), got, want)


def _is_before(mask):
  kinds = [type(x) for x in mask_lib.nodes(mask)]
  return looked_up.LookedUp in kinds and leaves.Custom not in kinds


class NumbersTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in NAMES)
  def test_kernels_get_numbers_of_linear_size(self, name):
    found = mask_lookups.before(PREDICATES[name].mask(), (B, H, T, T))
    self.assertIsInstance(found, looked_up.LookedUp)
    sides = found.rows, found.queries, found.keys, found.heads
    self.assertEqual(tuple([x.shape for x in side] for side in sides), PREDICATES[name].shapes)
    self.assertEqual({x.dtype for x in jax.tree.leaves(found)}, {np.dtype(np.int32)})

  @parameterized.parameters(
      (lambda row, head, query, key, x: x[query, key] > 0,),
      (lambda row, head, query, key, x: x[0, abs(query - key)] > x[0, key],),
      (lambda row, head, query, key, x: x[head, query] > x[query, key],))
  def test_leaves_others_as_they_are(self, predicate):
    mask = masks.custom(predicate, np.ones((T, T), np.float32))
    self.assertIs(mask_lookups.before(mask, (B, H, T, T)), mask)

  def test_leaves_numbers_of_64_bits_as_they_are(self):
    with jax.enable_x64(True):
      mask = masks.custom(lambda row, head, query, key, x: x[query] > x[key], np.arange(T) / 3)
      self.assertIs(mask_lookups.before(mask, (B, H, T, T)), mask)

  def test_leaves_masks_without_operands_as_they_are(self):
    for mask in (masks.causal(), masks.custom(lambda row, head, query, key: query - key < 5)):
      self.assertIs(mask_lookups.before(mask, (B, H, T, T)), mask)

  def test_equal_calls_have_equal_structures(self):
    mask = PREDICATES["documents"].mask()
    first, second = (jax.tree.structure(mask_lookups.before(mask, (B, H, T, T))) for _ in range(2))
    self.assertEqual(first, second)
    self.assertEqual(hash(first), hash(second))

  def test_masks_in_masks(self):
    """Finds predicates in combinations, each at the positions around it."""
    documents, kinds = (PREDICATES[name].mask() for name in ("documents", "kinds"))
    query, key = (np.array(x, np.int32)[None] for x in (np.arange(T)[::-1], np.arange(T) // 2))
    mask = ~masks.positions(query, key, masks.offset(documents, -1)) | kinds & masks.causal()
    found = mask_lookups.before(mask, (B, H, T, T))
    self.assertTrue(_is_before(found))
    np.testing.assert_array_equal(*(materialize.to_dense(x, (B, H, T, T)) for x in (found, mask)))

  def test_what_a_predicate_returns_is_checked(self):
    query, *_ = _arrays()
    number = masks.custom(lambda row, head, query, key, ids: ids[query], cases.TOKENS)
    with self.assertRaisesRegex(ValueError, "returned int32; expected bool"):
      attention(query, query, query, mask=number)


class ValuesTest(parameterized.TestCase):

  @parameterized.parameters(
      *((x, "blockwise") for x in NAMES),
      *((x, "vanilla") for x in sampling.names(NAMES, ("documents", "sums", "gates", "captured"))))
  def test_equals_an_array(self, name, mechanism):
    blocks = BLOCKS if mechanism == "blockwise" else None
    got = _run(name, _arrays(), mechanism=mechanism, block_sizes=blocks)
    _close(got, _defined(name, _arrays()))

  @parameterized.parameters("documents", "sums")
  def test_with_64_bits(self, name):
    want = _defined(name, _arrays())
    with jax.enable_x64(True):
      _close(_run(name, _arrays(), mechanism="blockwise", block_sizes=BLOCKS), want)

  def test_operands_keep_their_dtype(self):
    """Compares 16-bit numbers whose sums round to the same."""
    x = jnp.asarray(np.linspace(256, 300, T), jnp.bfloat16)
    mask = masks.custom(lambda row, head, query, key, x: x[query] + 1 > x[key], x)
    found = mask_lookups.before(mask, (B, H, T, T))
    self.assertTrue(_is_before(found))
    np.testing.assert_array_equal(*(materialize.to_dense(x, (B, H, T, T)) for x in (found, mask)))

  def test_positions_of_each_row(self):
    offset = np.array([0, -3], np.int32)
    got = _run("documents", _arrays(), mechanism="blockwise", block_sizes=BLOCKS,
               query_offset=offset)
    query = np.arange(T) + offset[:, None]
    _close(got, _defined("documents", _arrays(), query=query))

  def test_listed_positions(self):
    key = np.random.default_rng(0).permutation(T).astype(np.int32)[None]
    query = np.sort(np.random.default_rng(1).integers(0, T, (B, T)), 1).astype(np.int32)
    info = MaskInfo(q_positions=query, kv_positions=key)
    got = _run("times", _arrays(), mechanism="blockwise", block_sizes=BLOCKS, mask_info=info)
    _close(got, _defined("times", _arrays(), query=query, key=key))

  def test_operands_of_vmap(self):
    arrays, ids = _arrays(), np.stack([cases.IDS, cases.IDS[::-1]])
    mask = PREDICATES["documents"].mask
    run = lambda ids: attention(*arrays, mask=mask(ids), mechanism="blockwise",
                                block_sizes=BLOCKS).attention_outputs
    _close(jax.vmap(run)(ids), jnp.stack([run(x) for x in ids]), 1e-6)

  @parameterized.parameters(
      (lambda row, head, query, key, x: x[row, query] >= x[row, key],),
      (lambda row, head, query, key, x: x[head, query] >= x[head, key],))
  def test_operands_have_gradients_of_zero(self, predicate):
    """Differentiates by an operand alone, and by queries too."""
    query = _arrays()[0]
    def loss(operand, query):
      return attention(query, query, query, mask=masks.custom(predicate, operand),
                       mechanism="blockwise").attention_outputs.sum()
    np.testing.assert_array_equal(jax.grad(loss)(cases.WEIGHTS, query), 0)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss, (0, 1)))(cases.WEIGHTS, query)[0], 0)

  def test_dropout_is_that_of_the_array(self):
    """Drops the same weights, whose places are the positions that predicates read."""
    arrays, key = _arrays(), jax.random.key(3)
    predicate = PREDICATES["documents"]
    run = lambda mask: attention(*arrays, mask=mask, query_offset=-2, dropout_prob=0.3,
                                 dropout_rng=key, deterministic=False, mechanism="vanilla",
                                 ).attention_outputs
    _close(run(predicate.mask()),
           run(masks.dense(predicate.seen(np.arange(T)[None] - 2, np.arange(T)[None]))), 1e-6)


class MeshTest(parameterized.TestCase):

  @parameterized.product(name=("documents", "windows", "gates_of_rows"),
                         kind=(AxisType.Auto, AxisType.Explicit))
  def test_sharded_equals_unsharded(self, name, kind):
    arrays = _arrays(key_heads=2)
    want = _defined(name, arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    predicate = PREDICATES[name]
    operands = tuple(place(x, P("dp") if x.ndim else P()) for x in predicate.operands)
    mask = lambda *operands: masks.causal() & predicate.mask(*operands)
    with jax.set_mesh(mesh):
      got = _with_gradients(mask, mechanism="blockwise")(
          [place(x, P("dp", None, "tp")) for x in arrays], operands)
    _close(got, want)

  @parameterized.parameters(
      ("documents", "ring"), ("tokens", "ring"), ("windows_of_heads", "ring"), ("gates", "ring"),
      ("gates", "ulysses"), ("gates_of_rows", "ulysses"))
  def test_rings_look_up_at_global_positions(self, name, variant):
    length, devices = T - 2, 4 if variant == "ring" else 2  # divide the tokens and the heads
    arrays, at = _arrays(length), np.arange(length)[None]
    metadata = OperationMetadata(mesh=create_mesh((4 // devices, 1, 1, 1, devices)),
                                 ring=RingConfig(variant))
    _close(_run(name, arrays, mechanism="ring", metadata=metadata),
           _defined(name, arrays, query=at, key=at))

  def test_heads_of_several_devices(self):
    """Looks up by the heads of all devices."""
    arrays, at = _arrays(T - 2, key_heads=2), np.arange(T - 2)[None]
    metadata = OperationMetadata(mesh=create_mesh((1, 1, 1, 2, 2)))
    _close(_run("gates", arrays, mechanism="ring", metadata=metadata),
           _defined("gates", arrays, query=at, key=at))


class TpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("times", "gates")))
  def test_value_and_gradients(self, name):
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(_run(
          name, _arrays(), mechanism="flash_attn2", metadata=METADATA["tpu"],
          block_sizes=BlockSizes(128, 128, 128, 128)))
    _close(got, _defined(name, _arrays()), 2e-5)

  def test_in_a_ring(self):
    arrays, ids = _arrays(512), np.repeat(cases.IDS, 8, 1)[:, :512]
    windows = PREDICATES["windows_of_heads"].mask(np.array([60, 300], np.int32))
    mask = lambda ids: masks.causal() & PREDICATES["documents"].mask(ids) & windows
    metadata = OperationMetadata(platform="tpu", mesh=create_mesh((1, 1, 1, 1, 4)))
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(_with_gradients(mask, mechanism="ring", metadata=metadata)(
          arrays, (ids,)))
    _close(got, _with_gradients(mask, mechanism="blockwise")(arrays, (ids,)), 2e-5)


@gpu_interpret.interprets
class GpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("gates",)))
  def test_value_and_gradients(self, name):
    gpu_cases.check_gradients(cases.gpu_case(name))

  def test_decoding(self):
    case = cases.gpu_decode_case()
    operands = case.operands()
    found = gpu_interpret.interpret(case.decode, operands)
    for x, y, tolerance in zip(found, case.oracle(operands), (1e-2, 1e-5)):
      np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=0, atol=tolerance)


class ExplainTest(parameterized.TestCase):

  @parameterized.product(name=NAMES, platform=[*METADATA])
  def test_the_kernels_take_them(self, name, platform):
    arrays = {x: jax.ShapeDtypeStruct((B, T, heads, 64), jnp.bfloat16)
              for x, heads in (("query", H), ("key", K), ("value", K))}
    found = explain(**arrays, mask=PREDICATES[name].mask(), metadata=METADATA[platform])
    self.assertEqual(found.chosen, "flash_attn2", str(found))

  def test_others_are_left_to_blockwise(self):
    arrays = {x: jax.ShapeDtypeStruct((B, T, H, 64), jnp.bfloat16)
              for x in ("query", "key", "value")}
    table = masks.custom(lambda row, head, query, key, x: x[query, key], np.ones((T, T), bool))
    for metadata in METADATA.values():
      found = explain(**arrays, mask=table, metadata=metadata)
      self.assertEqual(found.chosen, "blockwise")
      self.assertIn("masks.custom that reads arrays", str(found))


@unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
class TpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("gates",)))
  def test_compiles(self, name):
    """Compiles forward and backward, without a chip."""
    place = SingleDeviceSharding(profile.devices("v6e")[0])
    shapes, operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (_arrays(), PREDICATES[name].operands))
    mask = lambda *operands: masks.causal() & PREDICATES[name].mask(*operands)
    run = _with_gradients(mask, mechanism="flash_attn2", metadata=METADATA["tpu"])
    text = run.trace(shapes, operands).lower(lowering_platforms=("tpu",)).compile().as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)


@unittest.skipIf(static_gpu.missing(), f"no compiler: {static_gpu.missing()}")
class GpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("gates",)))
  def test_compiles(self, name):
    """Compiles forward and backward to machine code for Hopper."""
    kernels = static_gpu.measure(
        f"{cases.__name__}:gpu_programs", [f"{name}_forward", f"{name}_backward"])
    for kernel in kernels:
      self.assertNotIsInstance(kernel, dict, kernel)
    self.assertLen(kernels, 3)

  def test_compiles_decoding(self):
    for kernel in static_gpu.measure(f"{cases.__name__}:gpu_programs", ["decode"]):
      self.assertNotIsInstance(kernel, dict, kernel)


if __name__ == "__main__":
  absltest.main()
