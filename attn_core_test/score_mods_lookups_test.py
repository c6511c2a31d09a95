# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores that look numbers up, which is done before the kernels, against float64."""

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

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, attention, create_mesh, explain,
                       masks, score_mods)
from attn_core.benchmark.static import gpu as static_gpu, profile
from attn_core.caches import dense as caches
from attn_core.score_mods import lookups
from attn_core_test import gpu_cases, gpu_interpret, sampling, score_mods_lookups as cases
from attn_core_test import tpu_interpret
from attn_core_test.score_mods_lookups import FUNCTIONS

B, T, H, K, D = cases.B, cases.T, cases.H, 1, 16
NAMES = tuple(FUNCTIONS)
TPU = OperationMetadata(platform="tpu")
METADATA = {"tpu": TPU, "gpu": OperationMetadata(platform="gpu", compute_capability="9.0")}


def _arrays(name, dtype=np.float32):
  """Returns queries, keys, values and the operands of a function."""
  rng = np.random.default_rng(5)
  found = {x: rng.normal(size=(B, T, heads, D)).astype(dtype)
           for x, heads in (("query", H), ("key", K), ("value", K))}
  operands = FUNCTIONS[name].operands
  return found | {"operands": tuple(
      x.astype(dtype) if x.dtype == np.float32 else x for x in operands)}


def _run(name, arrays, **arguments):
  """Returns (out, lse) of causal attention."""
  output = attention(arrays["query"], arrays["key"], arrays["value"], causal=True, return_lse=True,
                     score_mod=FUNCTIONS[name].mod(*arrays["operands"]), **arguments)
  return output.attention_outputs, output.lse


def _with_gradients(run, name, **arguments):
  """Returns a function of arrays to (gradients by all floats, (out, lse))."""
  def loss(floats, ids):
    found = run(name, floats | {"operands": _joined(floats["operands"], ids)}, **arguments)
    return sum((jnp.sin(x) * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()
               for x in found), found
  def split(arrays):
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays["operands"]]
    floats = tuple(x if f else None for x, f in zip(arrays["operands"], is_float))
    ids = tuple(None if f else x for x, f in zip(arrays["operands"], is_float))
    return jax.grad(loss, has_aux=True)(arrays | {"operands": floats}, ids)
  return jax.jit(split)


def _joined(floats, ids):
  return tuple(y if x is None else x for x, y in zip(floats, ids, strict=True))


def _defined(name, arrays, query=np.arange(T)[None], key=np.arange(T)[None], seen=None):
  """Returns what `_run` does, by the definition of the function on all scores at once."""
  wide = [jnp.repeat(arrays[x], H // K, 2) for x in ("key", "value")]
  scores = jnp.einsum("bthd,bshd->bhts", arrays["query"], wide[0], precision="highest") * D**-0.5
  scores = cases.defined(name, scores, query, key, tuple(map(jnp.asarray, arrays["operands"])))
  seen = (key[:, None] <= query[:, :, None])[:, None] if seen is None else seen
  scores = jnp.where(seen, scores, -jnp.inf)
  out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), wide[1], precision="highest")
  return out, jax.nn.logsumexp(scores, -1)


def _in_float64(name, run=_defined, **arguments):
  """Returns what `_with_gradients` of a definition returns, in float64."""
  with jax.enable_x64(True):
    return _with_gradients(run, name, **arguments)(_arrays(name, np.float64))


def _close(got, want, tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=tolerance * max(1, abs(y).max())), got, want)


def _before(name, shape=(B, H, T, T), at=True):
  """Returns the term of a function, which has done its look-ups where it can."""
  function = FUNCTIONS[name]
  return lookups.before(function.mod(*function.operands).lower(shape), shape, np.float32,
                        masks.full() if at else None)


def _times_column(score, row, head, query, key, column):
  del head, query
  return score * column[row, key]


class NumbersTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in NAMES)
  def test_kernels_get_numbers_of_linear_size(self, name):
    term = _before(name)
    self.assertEqual([x.shape for x in term.numbers], FUNCTIONS[name].shapes)
    self.assertEqual(term.operands, ())

  @parameterized.parameters(
      (lambda score, row, head, query, key, x: score + x[key - query],),
      (lambda score, row, head, query, key, x: score + x[head] * x[abs(key - query)],),
      (lambda score, row, head, query, key, x: score * x[(query + key) // 2] + x[key],),
      (lambda score, row, head, query, key, x: score + (jnp.zeros_like(score) + x[head]),),
      (lambda score, row, head, query, key, x: score + jnp.where(
          x[query] > 2, jnp.zeros_like(score), 1.0),),
      (lambda score, row, head, query, key, x: score + 0.1 * head,))
  def test_leaves_others_as_they_are(self, function):
    """Also one that looks nothing up, which needs no array."""
    mod = score_mods.custom(lambda *x: function(*x), np.ones(T, np.float32)).lower((B, H, T, T))
    self.assertIs(lookups.before(mod, (B, H, T, T), np.float32, masks.full()), mod)

  @parameterized.parameters(("slopes", True), ("keys", False), ("scales", False))
  def test_positions_that_are_not_known_are_left(self, name, is_before):
    self.assertEqual(not _before(name, at=False).operands, is_before)

  def test_settings_of_jax_decide_anew(self):
    """Calls a function whose sum has 32 bits, and with x64 64 bits, which no float holds."""
    def function(score, row, head, query, key, x):
      return jnp.where(key < x[head].astype(int).sum(-1) - query, score, score - 1)
    query, mod = _arrays("slopes")["query"], score_mods.custom(function, np.full((H, 3), 20.0, "f"))
    run = lambda: attention(query, query, query, mechanism="blockwise",
                            score_mod=mod).attention_outputs
    want = run()
    with jax.enable_x64(True):
      got = run()
    np.testing.assert_allclose(run(), want, atol=1e-6)
    np.testing.assert_allclose(got, want, atol=1e-6)

  def test_nan_that_the_function_drops_is_not_found(self):
    def function(score, row, head, query, key, x):
      return score * jnp.where(x[key] > 0, jnp.log(x[key]), 1.0)
    query, x = _arrays("slopes")["query"], np.linspace(-1, 1, T).astype(np.float32)
    with jax.debug_nans(True):
      attention(query, query, query, mechanism="blockwise",
                score_mod=score_mods.custom(function, x)).attention_outputs.block_until_ready()

  def test_an_equal_function_is_not_traced_again(self):
    traced = []
    def function(score, row, head, query, key, slopes):
      traced.append(score)
      return score + slopes[head] * (key - query)
    @jax.jit
    def run(query, slopes):
      return attention(query, query, query, mechanism="blockwise",
                       score_mod=score_mods.custom(function, slopes)).attention_outputs
    query = _arrays("slopes")["query"]
    run(query, cases.SLOPES)
    before = len(traced)
    run(query, 2 * cases.SLOPES)
    self.assertLen(traced, before)


class ValuesTest(parameterized.TestCase):

  @parameterized.product(name=NAMES, mechanism=("vanilla", "blockwise"))
  def test_equals_float64(self, name, mechanism):
    with jax.enable_x64(True):
      blocks = BlockSizes(block_q=32, block_kv=32) if mechanism == "blockwise" else None
      got = _with_gradients(_run, name, mechanism=mechanism, block_sizes=blocks)(
          _arrays(name, np.float64))
    _close(got, _in_float64(name), 1e-11)

  def test_tangents_of_gradients(self):
    """Compares derivatives of the gradient along a direction, forward over reverse."""
    with jax.enable_x64(True):
      arrays = _arrays("kerple", np.float64)
      moves = jax.tree.map(lambda x: np.cos(np.arange(x.size)).reshape(x.shape), arrays)
      got, want = (jax.jvp(_with_gradients(run, "kerple", **arguments), (arrays,), (moves,))[1]
                   for run, arguments in ((_run, {"mechanism": "blockwise"}), (_defined, {})))
    _close(got, want, 1e-10)

  def test_rows_of_vmap_have_operands_of_their_own(self):
    """Maps over calls with a batch row each, and over slopes."""
    arrays = _arrays("slopes")
    slopes = np.stack([cases.SLOPES, -cases.SLOPES])
    def run(query, key, value, slopes):
      found = _run("slopes", {"query": query[None], "key": key[None], "value": value[None],
                              "operands": (slopes,)}, mechanism="blockwise")
      return found[0][0], found[1][0]
    got = jax.vmap(run)(arrays["query"], arrays["key"], arrays["value"], slopes)
    for n in range(B):
      want = _defined("slopes", arrays | {"operands": (slopes[n],)})
      _close([x[n] for x in got], [x[n] for x in want], 1e-5)

  def test_positions_of_each_row(self):
    """Looks numbers up at the positions of an offset, and at listed ones."""
    arrays, offset = _arrays("scales"), np.array([0, 3], np.int32)
    gate = np.random.default_rng(9).normal(size=(T + 3, H)).astype(np.float32)
    arrays["operands"] = arrays["operands"][0], gate
    got = _run("scales", arrays, mechanism="blockwise", query_offset=offset)
    query = np.arange(T) + offset[:, None]
    _close(got, _defined("scales", arrays, query=query), 1e-5)

  def test_bfloat16_operands_are_widened_before(self):
    arrays = _arrays("slopes")
    narrow = jnp.asarray(cases.SLOPES, jnp.bfloat16)
    got, want = (_run("slopes", arrays | {"operands": (x,)}, mechanism="blockwise")
                 for x in (narrow, narrow.astype(np.float32)))
    jax.tree.map(np.testing.assert_array_equal, got, want)

  def test_numbers_of_hidden_keys_have_no_effect(self):
    """Looks up NaN for keys that no query sees: values and gradients are those of zeros there."""
    arrays, seen = _arrays("keys"), np.arange(T) < T - 20
    def run(column):
      output = attention(arrays["query"], arrays["key"], arrays["value"], mechanism="blockwise",
                         mask_info=MaskInfo(attention_mask=np.broadcast_to(seen, (B, 1, 1, T))),
                         score_mod=score_mods.custom(_times_column, column))
      return output.attention_outputs
    got, want = (jax.value_and_grad(lambda x: jnp.sin(run(x)).sum())(
        np.where(seen, arrays["operands"][0], x)) for x in (np.float32(np.nan), np.float32(0)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


class MeshTest(parameterized.TestCase):

  @parameterized.product(name=("kerple", "scales", "documents"),
                         kind=(AxisType.Auto, AxisType.Explicit))
  def test_sharded_equals_unsharded(self, name, kind):
    """Shards rows and heads, operands by heads where their types say so, and tokens in a ring."""
    arrays = _arrays(name)
    arrays = {k: x if k == "operands" else np.repeat(x, 2 // x.shape[2], 2)
              for k, x in arrays.items()}
    want = _with_gradients(_run, name, mechanism="blockwise")(arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    spec = {name: P("dp", None, "tp", None) for name in ("query", "key", "value")}
    of_heads = {"kerple": (P("tp"), P("tp")), "scales": (P("dp"), P(None, "tp")),
                "documents": (P("dp", None),)}[name]
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
                          arrays, spec | {"operands": of_heads})
    with jax.set_mesh(mesh):
      got = _with_gradients(_run, name, mechanism="blockwise")(placed)
    _close(got, want, 1e-5)

  @parameterized.parameters(("kerple",), ("scales",))
  def test_rings_look_up_at_global_positions(self, name):
    arrays = _arrays(name)
    arrays = {k: x if k == "operands" else np.pad(x, ((0, 0), (0, 2), (0, 0), (0, 0)))
              for k, x in arrays.items()}
    if name == "scales":
      arrays["operands"] = arrays["operands"][0], np.pad(
          arrays["operands"][1], ((0, 2), (0, 0)), constant_values=1)
    ring = OperationMetadata(mesh=create_mesh((1, 1, 1, 1, 4)))
    got, want = (_with_gradients(_run, name, mechanism=mechanism, metadata=metadata)(arrays)
                 for mechanism, metadata in (("ring", ring), ("blockwise", None)))
    _close(got, want, 1e-5)


class CachesTest(parameterized.TestCase):

  @parameterized.parameters(("slopes", "tpu"), ("kerple", "tpu"), ("slopes", "gpu"))
  def test_kernels_that_decode_take_look_ups_by_head(self, name, platform):
    shape = lambda *x: jax.ShapeDtypeStruct(x, jnp.bfloat16)
    view = jax.eval_shape(lambda: caches.init(B, 256, (2, 64), dtype=jnp.bfloat16))
    found = explain(shape(B, 1, H, 64), shape(B, 1, 2, 64), shape(B, 1, 2, 64),
                    cache_view=view, mechanism="autoregressive_decodeattn",
                    score_mod=FUNCTIONS[name].mod(*FUNCTIONS[name].operands),
                    metadata=METADATA[platform])
    self.assertIn(f"decode.{platform}", str(found))


class TpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("scales",)))
  def test_value_and_gradients(self, name):
    with tpu_interpret.interpreted():
      got = jax.block_until_ready(_with_gradients(
          _run, name, mechanism="flash_attn2", metadata=TPU,
          block_sizes=BlockSizes(128, 128, 128, 128))(_arrays(name)))
    _close(got, _in_float64(name), 2e-5)


@gpu_interpret.interprets
class GpuTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("scales",)))
  def test_value_and_gradients(self, name):
    gpu_cases.check_gradients(cases.gpu_case(name))


class ExplainTest(parameterized.TestCase):

  @parameterized.product(name=NAMES, platform=[*METADATA])
  def test_the_kernels_take_them(self, name, platform):
    arrays = {x: jax.ShapeDtypeStruct((B, T, heads, 64), jnp.bfloat16)
              for x, heads in (("query", H), ("key", K), ("value", K))}
    found = explain(**arrays, score_mod=FUNCTIONS[name].mod(*FUNCTIONS[name].operands),
                    metadata=METADATA[platform])
    self.assertEqual(found.chosen, "flash_attn2", str(found))

  def test_names_functions_that_also_look_up_by_distance(self):
    def both(score, row, head, query, key, slopes):
      return score + slopes[head] * slopes[abs(key - query) % H]
    arrays = {x: jax.ShapeDtypeStruct((B, T, H, 64), jnp.bfloat16)
              for x in ("query", "key", "value")}
    for metadata in METADATA.values():
      found = explain(**arrays, score_mod=score_mods.custom(both, cases.SLOPES), metadata=metadata)
      self.assertEqual(found.chosen, "blockwise")
      self.assertIn("both with an operand [2], not a number", str(found))


@unittest.skipIf(profile.missing(), f"nothing to compile with: {profile.missing()}")
class TpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("scales",)))
  def test_compiles(self, name):
    """Compiles forward and backward, without a chip."""
    place = SingleDeviceSharding(profile.devices("v6e")[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                          _arrays(name))
    text = _with_gradients(_run, name, mechanism="flash_attn2", metadata=TPU).trace(shapes).lower(
        lowering_platforms=("tpu",)).compile().as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)


@unittest.skipIf(static_gpu.missing(), f"nothing to compile with: {static_gpu.missing()}")
class GpuCompileTest(parameterized.TestCase):

  @parameterized.named_parameters((x, x) for x in sampling.names(NAMES, ("kerple",)))
  def test_compiles(self, name):
    """Compiles forward and backward to machine code for Hopper."""
    kernels = static_gpu.measure(
        f"{cases.__name__}:gpu_programs", [f"{name}_forward", f"{name}_backward"])
    for kernel in kernels:
      self.assertNotIsInstance(kernel, dict, kernel)
    self.assertGreater(len(kernels), 3)


if __name__ == "__main__":
  absltest.main()
