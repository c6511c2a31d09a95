# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches over 8 virtual devices: updates keep the sharding, on Explicit and on Auto axes."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import attention
from attn_core.caches import CacheMetadata, concatenate, dense, pages, window

jax.config.update("jax_num_cpu_devices", 8)

B, S, K, H, D, T = 8, 16, 2, 4, 8, 5
LENGTHS = np.array([5, 4, 3, 2, 1, 0, 5, 5], np.int32)
ROWS = np.array([3, 6], np.int32)
MODULES = {"dense": dense, "window": window}
AXES = {"dft": ((2, 2, 2), ("dp", "fsdp", "tp")), "dm": ((4, 2), ("data", "model"))}
BATCH, ALL = ("dp", "fsdp"), ("dp", "fsdp", "tp")

# (mesh, rows and heads of the cache, rows and heads of the tokens)
SHARDINGS = (
    ("dft", ("dp", None), ("dp", None)), ("dft", (BATCH, "tp"), (BATCH, "tp")),
    ("dft", (("fsdp", "dp"), "tp"), (BATCH, "tp")), ("dft", (None, None), (BATCH, "tp")),
    ("dft", (BATCH, "tp"), (None, None)), ("dft", (ALL, None), ("fsdp", "tp")),
    ("dft", (None, "tp"), ("dp", None)), ("dm", ("data", "model"), ("data", "model")),
    ("dm", (("data", "model"), None), (None, "model")), ("dm", ("model", None), ("data", None)))


def numbers(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@functools.cache
def mesh_of(name, kind):
  shape, names = AXES[name]
  return jax.make_mesh(shape, names, axis_types=(getattr(AxisType, kind),) * len(names))


def tokens(count, rows=B, seed=0):
  """Returns query, key and value of new tokens."""
  return [numbers(rows, count, heads, D, seed=seed + n) for n, heads in enumerate((H, K, K))]


def placed(arrays, mesh, spec):
  return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def model(cache, first, later, requests):
  """Prefills rows of different lengths, decodes in a scan, and then inserts two requests."""
  options = dict(sliding_window=(7, 0)) if isinstance(cache, window.WindowCache) else {}
  found = attention(*first, mode="__prefill__", cache_view=cache,
                    cache_metadata=CacheMetadata(lengths=jnp.asarray(LENGTHS)), **options)
  def step(cache, new):
    out = attention(*new, mode="__autoregressive__", cache_view=cache, **options)
    return out.cache_view, out.attention_outputs
  cache, outs = jax.lax.scan(step, found.cache_view, later)
  inserted = attention(*requests, mode="__insert__", cache_view=cache,
                       cache_metadata=CacheMetadata(slots=jnp.asarray(ROWS)), **options)
  return inserted.cache_view, (found.attention_outputs, outs, inserted.attention_outputs)


def inputs(mesh=None, spec=P()):
  """Returns the other arguments of `model`."""
  first, requests = tokens(T), tokens(T, 2, seed=9)
  later = [np.stack(x) for x in zip(*(tokens(1, seed=3 * n) for n in range(1, 4)))]
  if mesh is not None:
    first, later = placed(first, mesh, spec), placed(later, mesh, P(None, *spec))
    requests = placed(requests, mesh, P(None, None, *spec[2:]))
  return first, later, requests


def compare(got, want, rtol=0, atol=0):
  """Compares all arrays; the sharding that a cache remembers is a part of its structure."""
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def same_sharding(test, got, want):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    test.assertTrue(x.sharding.is_equivalent_to(y.sharding, y.ndim), (x.sharding, y.sharding))


class RowCachesTest(parameterized.TestCase):

  @functools.cache
  def want(self, kind, dtype):
    return jax.jit(model)(MODULES[kind].init(B, S, (K, D), dtype=dtype), *inputs())

  @parameterized.named_parameters(
      (f"{name}_{n}_{kind}", name, *SHARDINGS[n][1:], kind)
      for n, (name, *_) in enumerate(SHARDINGS) for kind in MODULES)
  def test_explicit_types(self, name, of_cache, of_tokens, kind):
    """Checks the types of a whole model: whatever shards cache and tokens, it keeps its own."""
    mesh = mesh_of(name, "Explicit")
    with jax.set_mesh(mesh):
      for dtype in ("float32", "int8"):
        cache = MODULES[kind].init(B, S, (K, D), dtype=dtype,
                                   sharding=P(of_cache[0], None, of_cache[1]))
        arguments = inputs(mesh, P(of_tokens[0], None, of_tokens[1]))
        found, _ = jax.eval_shape(model, cache, *arguments)
        self.assertEqual(jax.tree.map(jax.typeof, cache),
                         jax.tree.map(lambda x: jax.core.ShapedArray(
                             x.shape, x.dtype, sharding=x.sharding), found))

  @parameterized.parameters(
      ("Explicit", 1, "dense", "float32"), ("Explicit", 2, "window", "int8"),
      ("Explicit", 3, "window", "float32"), ("Explicit", 4, "dense", "int8"),
      ("Explicit", 8, "dense", "float32"),
      ("Auto", 1, "dense", "float32"), ("Auto", 3, "window", "int8"),
      ("Auto", 4, "dense", "float32"), ("Auto", 7, "window", "float32"))
  def test_a_donated_cache(self, axis_type, n, kind, dtype):
    name, of_cache, of_tokens = SHARDINGS[n]
    mesh = mesh_of(name, axis_type)
    with jax.set_mesh(mesh):
      cache = MODULES[kind].init(B, S, (K, D), dtype=dtype,
                                 sharding=P(of_cache[0], None, of_cache[1]))
      kept = jax.tree.map(jnp.copy, cache)
      got, outs = jax.jit(model, donate_argnums=0)(
          cache, *inputs(mesh, P(of_tokens[0], None, of_tokens[1])))
    same_sharding(self, got, kept)
    self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(cache)))
    compare((got, outs), self.want(kind, dtype), atol=2e-6)

  @parameterized.parameters("Explicit", "Auto")
  def test_outside_of_jit_and_without_set_mesh(self, axis_type):
    mesh = mesh_of("dm", axis_type)
    sharding = NamedSharding(mesh, P("data", None, "model"))
    key, value = placed(tokens(T)[1:], mesh, P("data", None, "model"))
    for module in MODULES.values():
      cache = module.init(B, S, (K, D), dtype="float32", sharding=sharding)
      got = module.append(cache, key, value, jnp.asarray(LENGTHS))
      got = module.append(got, *tokens(1)[1:])  # tokens that are not on the mesh
      got = module.insert(got, ROWS, module.init(2, S, (K, D), dtype="float32"))
      same_sharding(self, got, cache)
      want = module.append(module.init(B, S, (K, D), dtype="float32"), *tokens(T)[1:], LENGTHS)
      want = module.append(want, *tokens(1)[1:])
      want = module.insert(want, ROWS, module.init(2, S, (K, D), dtype="float32"))
      compare(got, want)

  @parameterized.parameters("Explicit", "Auto")
  def test_sharded_slots(self, axis_type):
    """Checks slots over devices: the keys of a row lie on several of them."""
    mesh = mesh_of("dm", axis_type)
    def run(sharding):
      cache = dense.init(B, S, (K, D), dtype="float32", sharding=sharding)
      cache = dense.append(cache, *tokens(T)[1:], LENGTHS)
      cache = dense.append(cache, *tokens(T, seed=5)[1:])
      prefilled = dense.append(dense.init(2, 9, (K, D), dtype="float32"),
                               *tokens(9, 2, seed=7)[1:])
      return dense.insert(cache, ROWS, prefilled)
    with jax.set_mesh(mesh):
      got = jax.jit(run, static_argnums=0)(P("model", "data"))
      self.assertEqual(got.key.sharding.spec[:2], ("model", "data"))
      ring = jax.jit(window.from_dense, static_argnums=1)(got, 6)
      back = jax.jit(window.to_dense, static_argnums=1)(ring, S)
    want = run(None)
    compare(got, want)
    compare(ring, window.from_dense(want, 6))
    compare(back, window.to_dense(window.from_dense(want, 6), S))

  def test_a_window_whose_slots_lie_on_several_devices(self):
    """Checks new tokens that overwrite keys that the first of them see."""
    mesh = mesh_of("dm", "Explicit")
    def run(sharding, *arrays):
      cache = window.append(window.init(B, 8, (K, D), dtype="float32", sharding=sharding),
                            *tokens(T)[1:], LENGTHS)
      return attention(*arrays, mode="__prefill__", cache_view=cache, sliding_window=(7, 0),
                       mechanism="vanilla")[:1]
    new = tokens(3, seed=5)
    with jax.set_mesh(mesh):
      got = jax.jit(run, static_argnums=0)(P("data", "model"), *placed(new, mesh, P("data")))
    compare(got, run(None, *new), atol=2e-6)

  @parameterized.parameters("Explicit", "Auto")
  def test_concatenate(self, axis_type):
    mesh = mesh_of("dm", axis_type)
    query, key, value = tokens(T)
    with jax.set_mesh(mesh):
      cache = dense.init(B, S, (K, D), dtype="float32", sharding=P("data", None, "model"))
      run = lambda cache, *x: concatenate(
          query=x[0], key=x[1], value=x[2], mode="__prefill__", cache_view=cache)._replace(
              init_attention_bias=None)
      got = jax.jit(run)(cache, *placed([query, key, value], mesh, P("data", None, "model")))
      same_sharding(self, got.cache_view, cache)
    want = jax.jit(run)(dense.init(B, S, (K, D), dtype="float32"), query, key, value)
    compare(got, want)

  def test_gradients_of_an_append(self):
    mesh = mesh_of("dm", "Explicit")
    def loss(key, value, cache):
      after = dense.append(cache, key, value, LENGTHS)
      return jnp.sum(jnp.sin(after.key)) + jnp.sum(jnp.cos(after.value))
    _, key, value = tokens(T)
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    want = gradient(key, value, dense.init(B, S, (K, D), dtype="float32"))
    with jax.set_mesh(mesh):
      cache = dense.init(B, S, (K, D), dtype="float32", sharding=P("data", None, "model"))
      got = gradient(*placed([key, value], mesh, P("data")), cache)
    compare(got, want, atol=1e-6)


class InitTest(parameterized.TestCase):

  def test_a_cache_of_other_slots(self):
    """The axes of the old slots, which may not divide the new ones, do not shard them."""
    mesh = mesh_of("dm", "Auto")
    full = dense.init(B, S, (K, D), sharding=NamedSharding(mesh, P("data", "model")))
    ring = window.from_dense(full, 5)
    for cache in (ring, window.to_dense(ring, 9)):
      self.assertEqual(cache.sharding.spec, P("data", None, None, None))

  @parameterized.product(axis_type=["Explicit", "Auto"], in_jit=[False, True])
  def test_sharding(self, axis_type, in_jit):
    with jax.set_mesh(mesh_of("dft", axis_type)):
      make = lambda: dense.init(B, S, (K, D, 6), dtype="int8", sharding=P(BATCH, None, "tp"))
      cache = jax.jit(make)() if in_jit else make()
    want = {"key": P(BATCH, None, "tp"), "key_scale": P(BATCH, None, "tp"), "lengths": P(BATCH),
            "overflow": P(BATCH)}
    for name, spec in want.items():
      x = getattr(cache, name)
      self.assertTrue(x.sharding.is_equivalent_to(
          NamedSharding(mesh_of("dft", axis_type), spec), x.ndim), (name, x.sharding))

  @parameterized.parameters("Explicit", "Auto")
  def test_init_like(self, axis_type):
    mesh = mesh_of("dft", axis_type)
    query, key, _ = placed(tokens(T), mesh, P(BATCH, None, "tp"))
    for made in (dense.init_like(key, S), window.init_like(query, S, (K, D)),
                 dense.init_like(jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=key.sharding),
                                 S)):
      self.assertEqual((made.key.shape, made.key.dtype), ((B, S, K, D), jnp.float32))
      for x, spec in ((made.key, P(BATCH, None, "tp")), (made.lengths, P(BATCH))):
        self.assertTrue(x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim))
    one_head = dense.init_like(query, S, (1, D), dtype="bfloat16")
    self.assertTrue(one_head.key.sharding.is_equivalent_to(NamedSharding(mesh, P(BATCH)), 4))
    self.assertEqual(one_head.key.dtype, jnp.bfloat16)
    if axis_type == "Explicit":
      with jax.set_mesh(mesh):
        inside = jax.jit(lambda key: dense.init_like(key, S))(key)
      self.assertEqual(tuple(inside.key.sharding.spec)[:3], (BATCH, None, "tp"))

  @parameterized.parameters(
      (P("dp"), False, "sharding: got .* without a mesh; expected .*jax.set_mesh"),
      (P("x"), True, "sharding: got .*'x'.*; expected axes of the mesh"),
      (P(None, None, ("dp", "tp")), True, r"axes that divide the dimensions \[B, S, K, D\]"),
      (P(*[None] * 5), True, r"sharding: .*PartitionSpec of \[B, S, K, D\]"),
      ("dp", True, "sharding: got 'dp'; expected a NamedSharding or a PartitionSpec"))
  def test_bad_shardings(self, sharding, in_mesh, message):
    mesh = mesh_of("dft", "Auto") if in_mesh else jax.make_mesh((), (), axis_types=())
    with jax.set_mesh(mesh), self.assertRaisesRegex(ValueError, message):
      dense.init(B, S, (K, D), sharding=sharding)

  def test_scales_of_int4_keep_three_dimensions(self):
    """Columns that are sharded over an Auto axis are not groups of columns."""
    with jax.set_mesh(mesh_of("dm", "Auto")):
      cache = dense.init(B, S, (K, 64), dtype="int4", sharding=P("data", None, None, "model"))
      got = jax.jit(dense.append)(cache, *[numbers(B, 1, K, 64)] * 2)
      for x in (cache.key_scale, got.key_scale, got.value_scale):
        self.assertEqual(x.sharding.shard_shape(x.shape), (B // 4, S, K, 2))
      with self.assertRaisesRegex(ValueError, r"\[B, S, K, D / 2\] = \[8, 16, 2, 3\]"):
        dense.init(B, S, (K, 6), dtype="int4", sharding=P(None, None, None, "model"))

  def test_bad_likes(self):
    with self.assertRaisesRegex(ValueError, r"like: .*an array \[B, T, K, D\]"):
      dense.init_like(jnp.zeros((2, 3)), S)
    with self.assertRaisesRegex(ValueError, "like: got str"):
      window.init_like("query", S)
    with self.assertRaisesRegex(ValueError, "axes for the pages and for the heads"):
      with jax.set_mesh(mesh_of("dft", "Auto")):
        pages.init(pages.PagesV2, 4, 2, pages.Heads(2, 8, 8), sharding=P(None, "dp"))


class PagesTest(parameterized.TestCase):

  @parameterized.product(axis_type=["Explicit", "Auto"], layout=pages.PAGES,
                         stored=["float32", "int8", "int4"])
  def test_functions_of_pages(self, axis_type, layout, stored):
    """Checks each function of pages whose pool and heads are sharded.

    In a PagesV3 of int4 four heads share a word: eight fit two devices, and four stay together.
    """
    key_heads = 8 if (layout, stored) == (pages.PagesV3, "int4") else 4
    mesh, heads = mesh_of("dm", axis_type), pages.Heads(key_heads, D, D)
    scales = {"float32": None, "int8": "token", "int4": "group"}[stored]
    other = pages.PagesV1 if layout is not pages.PagesV1 else pages.PagesV3
    metadata = pages.PagesMetadata(np.array([[6, 0], [3, 5]], np.int32), np.array([3, 4], np.int32),
                                   np.array([0, 3, 7], np.int32))

    def run(cache, key, value):
      cache = pages.append(cache, key, value, pages.slots(metadata, 2, 7))
      cache = pages.copy_pages(cache, np.array([3, 0]), np.array([1, -1]))
      whole = pages.to_dense(cache, metadata, heads)
      cache = pages.from_dense(cache, whole[0] + 1, whole[1], metadata)
      return cache, whole, pages.convert(cache, other, heads)

    key, value = numbers(7, key_heads, D), numbers(7, key_heads, D, seed=1)
    want = run(pages.init(layout, 8, 2, heads, stored, scales), key, value)
    spec = P("model", "data") if layout is pages.PagesV1 else P("data", None, "model")
    with jax.set_mesh(mesh):
      cache = pages.init(layout, 8, 2, heads, stored, scales, sharding=spec)
      got = jax.jit(run)(cache, *placed([key, value], mesh, P(None, "model")))
    if axis_type == "Explicit":
      same_sharding(self, got[0], cache)
    # XLA divides differently in other programs.
    compare(got, want, rtol=3e-7)


if __name__ == "__main__":
  absltest.main()
