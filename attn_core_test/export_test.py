# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs of `jax.export` with a symbolic length: exported once, called with several lengths."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (MaskInfo, OperationMetadata, PagesMetadata, attention, caches, masks,
                       ragged_page_attention_v2)
from attn_core.caches import pages
from attn_core_test import sampling

jax.config.update("jax_num_cpu_devices", 4)

H, K, D = 4, 2, 8
LENGTHS = (1, 5, 300)  # less than a block, and several blocks
MECHANISMS = ("vanilla", "sdpa", "blockwise", "flash_attn2")


def _random(*shape):
  return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _ids(rows, length):
  """Returns segments of 7 tokens, and padding at the end."""
  ids = np.tile(np.arange(length, dtype=np.int32) // 7, (rows, 1))
  ids[:, -length // 10:] = -1
  return ids


def _queries(rows, length):
  return {"query": _random(rows, length, H, D), "key": _random(rows, length, K, D),
          "value": _random(rows, length, K, D)}


def _arrays(case, rows, length):
  """Returns the arrays of a case for a number of rows and a length."""
  found = _queries(rows, length)
  if case == "bias":
    found["bias"] = _random(1, H, length, length)
  if case == "segments":
    found["ids"] = _ids(rows, length)
  if case == "dense":
    found["mask"] = _random(rows, 1, length, length) > -1
  if case == "lengths":
    found["lengths"] = np.full(rows, (length + 1) // 2, np.int32)
  if case == "packed":
    found = {name: x[0] for name, x in found.items()}
    found["cum_seqlens_q"] = np.int32([0, length // 2, length])
  if case == "keys":
    found |= {"key": _random(rows, length + 3, K, D), "value": _random(rows, length + 3, K, D)}
  return found


def _call(case, mechanism, arrays):
  arrays = dict(arrays)
  more = {"window": {"sliding_window": (11, 0)}, "full": {"causal": False},
          "keys": {"query_offset": 3}, "packed": {"layout": "thd"},
          "sinks": {"softmax_aux": jnp.arange(H, dtype=jnp.float32), "logits_soft_cap": 2.0},
          "prefix": {"causal": False, "mask": masks.causal() | masks.prefix(3)}}.get(case, {})
  if "ids" in arrays:
    more["mask_info"] = MaskInfo.from_segments(arrays.pop("ids"))
  if "lengths" in arrays:
    more["mask"] = masks.lengths(None, arrays.pop("lengths"))
  return attention(**arrays, **more, mechanism=mechanism).attention_outputs


CASES = ("causal", "full", "window", "segments", "dense", "lengths", "bias", "sinks", "keys",
         "prefix", "packed")
REFUSED = (("sdpa", "sinks"),)
QUICK = [(mechanism, "causal") for mechanism in MECHANISMS] + [
    ("flash_attn2", case) for case in ("segments", "dense", "bias", "packed", "keys")] + [
    ("sdpa", "window"), ("vanilla", "lengths")]
ALL = [(mechanism, case) for mechanism in MECHANISMS for case in CASES
       if (mechanism, case) not in REFUSED]


def _symbolic(case, length="t", rows="b"):
  """Returns the shapes of a case with symbols."""
  like, longer = _arrays(case, 2, 24), _arrays(case, 2, 25)
  more = _arrays(case, 3, 24)
  def shape(x, y, z):
    names = [length + (f" + {n - 24}" if n > 24 else "") if n != m else rows if n != p else str(n)
             for n, m, p in zip(x.shape, y.shape, z.shape)]
    return jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(names), scope=scope), x.dtype)
  scope = export.SymbolicScope()
  return jax.tree.map(shape, like, longer, more)


class ExportTest(parameterized.TestCase):

  @parameterized.parameters(*sampling.with_slow(QUICK, *(x for x in ALL if x not in QUICK)))
  def test_one_program_for_all_lengths(self, mechanism, case):
    run = functools.partial(_call, case, mechanism)
    exported = export.export(jax.jit(run))(_symbolic(case))
    for rows, length in zip((2, 3, 1), LENGTHS):
      arrays = _arrays(case, rows, length)
      want = _call(case, "vanilla", arrays)
      np.testing.assert_allclose(exported.call(arrays), want, rtol=3e-6, atol=3e-6,
                                 err_msg=f"{length}")

  @parameterized.parameters(*sampling.with_slow(
      [("vanilla", "causal"), ("flash_attn2", "bias")], *(
          (mechanism, case) for mechanism in MECHANISMS for case in ("causal", "bias"))))
  def test_gradients(self, mechanism, case):
    def loss(arrays, mechanism=mechanism):
      return jnp.sin(_call(case, mechanism, arrays)).sum()
    exported = export.export(jax.jit(jax.grad(loss)))(_symbolic(case))
    for rows, length in ((1, 5), (2, 300)):
      arrays = _arrays(case, rows, length)
      with jax.enable_x64(True):
        wide = {name: np.float64(x) for name, x in arrays.items()}
        want = jax.jit(jax.grad(functools.partial(loss, mechanism="vanilla")))(wide)
      for name, got in exported.call(arrays).items():
        np.testing.assert_allclose(got, want[name], rtol=0, atol=1e-6 * np.abs(want[name]).max(),
                                   err_msg=f"{name}, {length}")

  def test_auto_takes_a_linear_mechanism(self):
    exported = export.export(jax.jit(functools.partial(_call, "causal", "auto")))(
        _symbolic("causal"))
    arrays = _arrays("causal", 1, 9)
    np.testing.assert_allclose(exported.call(arrays), _call("causal", "vanilla", arrays), atol=3e-6)
    self.assertNotIn("b,4,t,t", exported.mlir_module().replace("x", ","))

  @parameterized.parameters(
      ("flash_attn2", "tpu", None), ("flash_attn2", "gpu", "9.0"), ("blocksparse", "tpu", None),
      ("ring", "cpu", None), ("autoregressive_decodeattn", "cpu", None))
  def test_kernels_are_refused_by_name(self, mechanism, platform, capability):
    metadata = OperationMetadata(platform=platform, compute_capability=capability)
    run = lambda arrays: attention(
        **arrays, mechanism=mechanism, metadata=metadata).attention_outputs
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
              for name, x in _symbolic("causal").items()}
    with self.assertRaisesRegex(NotImplementedError, rf"(?s){mechanism}.*symbolic.*'vanilla'"):
      export.export(jax.jit(run))(shapes)

  def test_two_lengths_without_an_offset_are_refused_by_name(self):
    scope = export.SymbolicScope()
    of = lambda heads, length: jax.ShapeDtypeStruct(export.symbolic_shape(
        f"2, {length}, {heads}, {D}", scope=scope), jnp.float32)
    arrays = {"query": of(H, "t"), "key": of(K, "s"), "value": of(K, "s")}
    with self.assertRaisesRegex(ValueError, "query_offset.*None .* with t queries and s keys"):
      export.export(jax.jit(functools.partial(_call, "causal", "vanilla")))(arrays)

  def test_caches_are_refused_by_name(self):
    cache = caches.dense.init(2, 16, (K, D), dtype="float32")
    run = lambda arrays: attention(**arrays, cache_view=cache).attention_outputs
    with self.assertRaisesRegex(NotImplementedError, "(?s)cache_view.*symbolic"):
      export.export(jax.jit(run))(_symbolic("causal", rows="2"))
    held = pages.init(caches.pages.PagesV2, 4, 16, caches.pages.Heads(K, D, D), "float32")
    requests = PagesMetadata([[0]], [3], [0, 3])
    paged = lambda query: ragged_page_attention_v2(query, held, requests).attention_outputs
    with self.assertRaisesRegex(NotImplementedError, "(?s)pages.*symbolic"):
      export.export(jax.jit(paged))(jax.ShapeDtypeStruct(
          export.symbolic_shape(f"t, {H}, {D}"), jnp.float32))


class MeshTest(parameterized.TestCase):
  """Programs over a mesh of several devices, which are partitioned when they are called."""

  def run_exported(self, mechanism, sizes, kind, names=("data", "model"), **fields):
    mesh = jax.make_mesh((2, 2), names, axis_types=(getattr(AxisType, kind),) * 2,
                         devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P(names[0], None, names[1]))
    shape = export.symbolic_shape(f"{sizes}, {H}, {D}")
    call = jax.jit(lambda x: attention(x, x, x, mechanism=mechanism, metadata=OperationMetadata(
        **fields)).attention_outputs)
    with jax.set_mesh(mesh):
      program = export.export(call)(jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding))
      x = _random(4, 300, H, D)
      out = jax.jit(program.call)(jax.device_put(x, sharding))
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(x, x, x, is_causal=True),
                               atol=1e-5)

  @parameterized.product(mechanism=MECHANISMS, sizes=["4, t", "2*b, t", "4, 300"])
  def test_auto_axes(self, mechanism, sizes):
    self.run_exported(mechanism, sizes, "Auto")

  def test_auto_axes_of_default_names(self):
    self.run_exported("auto", "2*b, t", "Auto", ("dp", "tp"))

  def test_explicit_axes_and_numbers(self):
    self.run_exported("flash_attn2", "4, 300", "Explicit")

  @parameterized.parameters(("Explicit", "blockwise", {}), ("Auto", "vanilla", {"platform": "tpu"}))
  def test_shard_maps_of_symbolic_sizes_are_refused(self, kind, mechanism, fields):
    with self.assertRaisesRegex(NotImplementedError, r"\[2\*b, t, 4, 8\] on the mesh .*'data': 2"
                                ".*symbolic sizes of jax.export.*AxisType.Auto"):
      self.run_exported(mechanism, "2*b, t", kind, **fields)


if __name__ == "__main__":
  absltest.main()
