# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""multi_latent_attention over 8 virtual devices: batch, heads, and the slots of a cache."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (LatentOptions, OperationMetadata, PagesMetadata, create_mesh, explain,
                       multi_latent_attention, multi_latent_ragged_page_attention)
from attn_core.caches import groups, latent, latent_pages

jax.config.update("jax_num_cpu_devices", 8)

B, S, H, L, R, NOPE, E = 4, 16, 4, 12, 4, 6, 5
ABSORBED = LatentOptions(L, R, NOPE)
COLLECTIVE = re.compile(r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
                        r"(?:-start)?\(")
# Mesh (dp, fsdp, ep, tp, sp), and the axes of the rows.
MESHES = {"heads": ((2, 2, 1, 2, 1), ("dp", "fsdp")), "keys": ((2, 1, 1, 1, 4), "dp"),
          "heads_and_keys": ((1, 2, 1, 2, 2), "fsdp"), "heads_only": ((1, 1, 1, 4, 2), None)}


def arrays(tokens, up):
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  ups = (array(L, H, NOPE), array(L, H, E)) if up else ()
  return array(B, tokens, H, (NOPE if up else L) + R), array(B, S, L + R), *ups


def attended(metadata, query, rows, *up):
  options = ABSORBED._replace(key_up=up[0], value_up=up[1]) if up else ABSORBED
  return multi_latent_attention(
      query, rows, latent_options=options, metadata=metadata, return_lse=True,
      query_offset=S - query.shape[1], softmax_aux=jnp.arange(H, dtype=jnp.float32))


def results(metadata, *x):
  output = attended(metadata, *x)
  return output.attention_outputs, output.lse


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(metadata, x):
  found, pull = jax.vjp(lambda *x: results(metadata, *x), *x)
  return found, pull(jax.tree.map(jnp.cos, found))


@functools.partial(jax.jit, static_argnums=0)
def steps(metadata, query, tokens, cache):
  """Returns the results of a prefill and of two steps, and the cache after them."""
  found = []
  for begin, end in ((0, 12), (12, 13), (13, 16)):
    output = multi_latent_attention(
        query[:, begin:end], tokens[:, begin:end], latent_options=ABSORBED,
        metadata=metadata, cache_view=cache, mode="__autoregressive__")
    cache = output.cache_view
    found.append(output.attention_outputs)
  return found, cache


def place(mesh, rows, x):
  specs = [P(rows, None, "tp"), P(rows), P(None, "tp"), P(None, "tp")]
  return [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(x, specs)]


def close(got, want):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


class MeshTest(parameterized.TestCase):

  @parameterized.product(name=("heads", "heads_only"), tokens=(1, 12, 16), up=(False, True),
                         kind=("Auto", "Explicit"))
  def test_equals_one_device(self, name, tokens, up, kind):
    sizes, rows = MESHES[name]
    names = ("dp", "fsdp", "ep", "tp", "sp")
    mesh = jax.make_mesh(sizes, names, axis_types=(getattr(AxisType, kind),) * 5)
    x = arrays(tokens, up)
    with jax.set_mesh(mesh):
      metadata = OperationMetadata(mesh=mesh)
      found = with_gradients(metadata, place(mesh, rows, x))
    close(found, with_gradients(OperationMetadata(), list(x)))

  @parameterized.product(tokens=(1, 12), up=(False, True))
  def test_no_collective_for_batch_and_heads(self, tokens, up):
    sizes, rows = MESHES["heads"]
    metadata = OperationMetadata(mesh=create_mesh(sizes))
    x = place(metadata.mesh, rows, arrays(tokens, up))
    text = jax.jit(lambda *x: results(metadata, *x)).lower(*x).compile().as_text()
    self.assertEmpty(COLLECTIVE.findall(text))


class CacheTest(parameterized.TestCase):

  @parameterized.product(name=tuple(MESHES), dtype=("float32", "int8"))
  def test_slots_over_sp(self, name, dtype):
    """Prefills, and decodes with the slots over `sp`: each device reads its own."""
    sizes, rows = MESHES[name]
    metadata = OperationMetadata(mesh=create_mesh(sizes))
    query, tokens = arrays(S, False)
    empty = lambda **sharding: latent.init(B, S, (L, R), dtype=dtype, **sharding)
    held = empty(sharding=NamedSharding(metadata.mesh, P(rows, "sp")))
    placed = place(metadata.mesh, rows, (query, tokens))
    found, cache = steps(metadata, *placed, held)
    wanted, plain = steps(OperationMetadata(), query, tokens, empty())
    close(found, wanted)
    close(cache._replace(sharding=None), plain)
    for x, y in ((cache.latents, held.latents), (cache.rope, held.rope), (cache.scale, held.scale)):
      if y is not None:
        self.assertTrue(x.sharding.is_equivalent_to(y.sharding, x.ndim), x.sharding)

  def test_a_step_sends_only_results(self):
    sizes, rows = MESHES["keys"]
    metadata = OperationMetadata(mesh=create_mesh(sizes))
    slots = 64
    query, _ = arrays(1, False)
    held = latent.init(B, slots, (L, R), dtype="float32",
                       sharding=NamedSharding(metadata.mesh, P(rows, "sp")))
    held = held._replace(lengths=jnp.full(B, slots, jnp.int32))
    step = lambda query, cache: multi_latent_attention(
        query, None, latent_options=ABSORBED, metadata=metadata, cache_view=cache,
        mode="__autoregressive__").attention_outputs
    text = jax.jit(step).lower(query, held).compile().as_text()
    # f32[2,16,16], the slots of one device, would be a gather of the cache.
    self.assertNotRegex(text, r"f32\[\d+,64,(1,)?16\]\S* (all-gather|all-to-all)")
    self.assertNotEmpty(COLLECTIVE.findall(text))
    said = str(explain(query, None, None, latent_options=ABSORBED, metadata=metadata,
                       cache_view=held, mode="__autoregressive__"))
    self.assertIn("keys over sp=4", said)

  def test_shardings(self):
    mesh = create_mesh(MESHES["keys"][0])
    with self.assertRaisesRegex(ValueError, "no mesh axis for the numbers of a row"):
      latent.init(B, S, (L, R), sharding=NamedSharding(mesh, P(None, None, "sp")))
    with self.assertRaisesRegex(ValueError, "axes that divide"):
      latent.init(B, 15, (L, R), sharding=NamedSharding(mesh, P(None, "sp")))


PAGE, POOL, TOKENS = 2, 6, 5  # tokens of a page; pages and tokens of a group


class PagesTest(parameterized.TestCase):

  def arrays(self, number, up, dtype):
    """Returns query, rows, up-projections, cache and metadata of some groups of two requests."""
    rng = np.random.default_rng(1)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    cache = latent_pages.init(number * POOL, PAGE, (L, R), dtype=dtype)
    held = array(number * POOL * PAGE, L + R)
    cache = latent_pages.append(cache, held, np.arange(held.shape[0]))
    one = PagesMetadata(np.int32([[4, 1, 0], [3, 5, 9]]), np.int32([6, 3]), np.int32([0, 4, 5]))
    metadata = one if number == 1 else groups.stack(*[one] * number)
    ups = (array(L, H, NOPE), array(L, H, E)) if up else ()
    return (array(number * TOKENS, H, (NOPE if up else L) + R), array(number * TOKENS, L + R), *ups,
            cache, metadata)

  def attended(self, mesh, query, rows, *rest):
    *up, cache, metadata = rest
    options = ABSORBED._replace(key_up=up[0], value_up=up[1]) if up else ABSORBED
    output = multi_latent_ragged_page_attention(
        query, rows, cache, metadata, latent_options=options, return_lse=True,
        sliding_window=(3, 0), softmax_aux=jnp.arange(H, dtype=jnp.float32),
        metadata=OperationMetadata(mesh=mesh))
    return output.attention_outputs, output.lse, output.cache_view

  def with_gradients(self, mesh, arrays):
    """Returns results and the gradients of query, rows, up-projections and pages."""
    *wanted, metadata = arrays
    if wanted[-1].scales is not None:
      return self.attended(mesh, *arrays)
    found, pull = jax.vjp(lambda *x: self.attended(mesh, *x, metadata), *wanted)
    return found, pull(jax.tree.map(jnp.cos, found))

  @parameterized.parameters(
      (1, False, "float32", dict(dp=2, tp=4), "Auto"),
      (2, True, "float32", dict(dp=2, tp=2), "Auto"),
      (2, False, "int8", dict(dp=2, tp=2), "Auto"),
      (2, False, "float32", dict(dp=2, tp=2), "Explicit"),
      (2, True, "float32", dict(dp=2, tp=2), "Explicit"))
  def test_equals_one_device(self, number, up, dtype, sizes, kind):
    """Heads and groups of requests are sharded; every device of a group holds its whole rows."""
    arrays = self.arrays(number, up, dtype)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes),
                         axis_types=(getattr(AxisType, kind),) * 2)
    query, rows, *ups, cache, metadata = arrays
    pool = "dp" if number > 1 else None
    placed = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
      given = (placed(query, pool, "tp"), placed(rows, pool), *(placed(x, None, "tp") for x in ups),
               jax.tree.map(lambda x: placed(x, pool), cache), metadata)
      found = jax.jit(lambda *x: self.with_gradients(mesh, x))(*given)
    close(found, jax.jit(lambda *x: self.with_gradients(None, x))(*arrays))

  def test_a_width_of_the_output_that_an_axis_of_the_query_does_not_divide(self):
    query, *rest = self.arrays(1, True, "float32")
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    query = jax.device_put(query, NamedSharding(mesh, P(None, None, "tp")))
    with jax.set_mesh(mesh):
      out = jax.eval_shape(lambda x: self.attended(mesh, x, *rest)[0], query)
    self.assertEqual(out.sharding.spec, P(None, None, None))

  def test_no_collective_and_pages_stay_where_they_are(self):
    query, rows, cache, metadata = self.arrays(2, False, "float32")
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    placed = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    given = (placed(query, "dp", "tp"), placed(rows, "dp"),
             jax.tree.map(lambda x: placed(x, "dp"), cache), metadata)
    compiled = jax.jit(lambda *x: self.attended(mesh, *x)).lower(*given).compile()
    self.assertEmpty(COLLECTIVE.findall(compiled.as_text()))
    held = compiled(*given)[2].pages
    self.assertTrue(held.sharding.is_equivalent_to(given[2].pages.sharding, 3), held.sharding)

  @parameterized.parameters("float32", "int8")
  def test_stripes_of_pages_over_sp(self, dtype):
    """A request's pages are dealt out to devices, each of which reads its own."""
    query, rows, cache, metadata = self.arrays(1, False, dtype)
    # Page n of a request is number n // 2 of stripe n % 2, which has half of the pool.
    whole = metadata._replace(page_tables=np.int32([[0, 3, 1], [2, 4, 9]]))
    striped = jax.tree.map(lambda x: x[None], whole)._replace(
        page_tables=np.int32([[[[0, 1], [2, 9]], [[0, 9], [1, 9]]]]))
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    given = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("sp"))), cache)
    found = jax.jit(lambda *x: self.attended(mesh, *x))(query, rows, given, striped)
    close(found, jax.jit(functools.partial(self.attended, None))(query, rows, cache, whole))

  def test_init(self):
    mesh = create_mesh((1, 1, 1, 4, 2))
    like = jax.device_put(jnp.ones((2, 3, H, 9)), NamedSharding(mesh, P("sp", None, "tp")))
    self.assertEqual(latent.init_like(like, 4, (L, R)).latents.sharding.spec, P("sp"))
    held = latent_pages.init(4, 2, (L, R), dtype="int8", sharding=NamedSharding(mesh, P("sp")))
    for x in jax.tree.leaves(held):
      self.assertEqual(x.sharding.spec[0], "sp")
    like = jax.device_put(jnp.ones((4, H, 9)), NamedSharding(mesh, P("sp", "tp")))
    self.assertEqual(latent_pages.init_like(like, 4, 2, (L, R), groups=2).pages.sharding.spec[0],
                     "sp")
    with self.assertRaisesRegex(ValueError, "axes for the pages of .*only"):
      latent_pages.init(4, 2, (L, R), sharding=NamedSharding(mesh, P(None, None, "tp")))


if __name__ == "__main__":
  absltest.main()
