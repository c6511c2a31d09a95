# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages in shard_map, vmap and scan."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np

from attn_core import (Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       page_attention, ragged_page_attention_v2, ragged_page_attention_v3)
from attn_core.caches import pages
from attn_core_test.paged_cases import Case, plain

jax.config.update("jax_num_cpu_devices", 8)


class TransformationTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.query, self.cache, self.metadata = plain(Case((9, 6), (4, 2), rest=2))
    self.mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

  def run_v2(self, query, cache, metadata):
    return ragged_page_attention_v2(query, cache, metadata).attention_outputs

  def gradient(self, query, cache, metadata):
    def loss(query, cache):
      out = self.run_v2(query, cache, metadata)
      return (out**2).sum(), out
    (total, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(query, cache)
    axes = jax.typeof(total).manual_axis_type.varying
    return (jax.lax.psum(total, tuple(axes)) if axes else total, out), gradients

  def test_requests_and_heads_over_devices(self):
    """Shards requests with their tables and pages over one axis, and heads over the other.

    The key and value rows of a head are adjacent, so pages are sharded like heads.
    """
    arrays = (self.query, self.cache, self.metadata)
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), arrays)
    query, cache = P("x", "y"), PagesV2(P("x", None, "y"))
    sharded = jax.shard_map(self.gradient, mesh=self.mesh, in_specs=(query, cache, P("x")),
                            out_specs=((P(), query), (query, cache)))
    (_, out), gradients = jax.jit(sharded)(*two)
    (_, want), expected = jax.jit(self.gradient)(*arrays)
    for got, one in zip(*map(jax.tree.leaves, ((out, gradients), (want, expected))), strict=True):
      np.testing.assert_allclose(got, jnp.concatenate([one, one]), atol=1e-6)

  def test_axes_that_the_caller_has_split(self):
    """Checks that an axis that is Manual shards nothing again, and that the other one does."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    def run(query, cache, metadata):
      return ragged_page_attention_v2(query, cache, pages_metadata=metadata,
                                      metadata=OperationMetadata(mesh=mesh)).attention_outputs
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]),
                       (self.query, self.cache, self.metadata))
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                                  axis_names={"dp"}))(*two)
    one = self.run_v2(self.query, self.cache, self.metadata)
    np.testing.assert_allclose(found, jnp.concatenate([one, one]), atol=1e-6)

  def test_maps_over_pools(self):
    pools = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), self.cache)
    run = lambda cache: self.run_v2(self.query, cache, self.metadata)
    mapped, gradient = jax.jit(jax.value_and_grad(
        lambda pools: (lambda x: (jnp.sin(x).sum(), x))(jax.vmap(run)(pools)), has_aux=True))(pools)
    one = jax.jit(jax.value_and_grad(lambda cache: (lambda x: (jnp.sin(x).sum(), x))(run(cache)),
                                     has_aux=True))
    for row in range(2):
      (_, want), of_pages = one(jax.tree.map(lambda x, row=row: x[row], pools))
      np.testing.assert_allclose(mapped[1][row], want, atol=1e-6)
      np.testing.assert_allclose(gradient.pages[row], of_pages.pages, atol=1e-6)

  def test_maps_tangents_over_any_axis(self):
    run = lambda pages: self.run_v2(self.query, PagesV2(pages), self.metadata)
    held = self.cache.pages
    tangents = np.random.default_rng(0).normal(size=(3, *held.shape)).astype(np.float32)
    along = lambda tangent: jax.jvp(run, (held,), (tangent,))[1]
    want = np.stack([along(tangent) for tangent in tangents])
    for axis in (1, held.ndim):
      found = jax.vmap(along, in_axes=axis)(np.moveaxis(tangents, 0, axis))
      np.testing.assert_allclose(found, want, atol=1e-6)
    # Along one operand alone, and with zeros along the other.
    query = self.query
    both = lambda *moves: jax.jvp(lambda query, pages: self.run_v2(
        query, PagesV2(pages), self.metadata), (query, held), moves)[1]
    np.testing.assert_allclose(want[0], both(jnp.zeros_like(query), tangents[0]), atol=1e-6)
    alone = jax.jvp(lambda query: self.run_v2(query, self.cache, self.metadata),
                    (query,), (query[::-1],))[1]
    np.testing.assert_allclose(alone, both(query[::-1], jnp.zeros_like(held)), atol=1e-6)
    self.assertTrue(np.any(want[0]) and np.any(alone))

  def test_gradients_of_a_shared_page_add_up(self):
    """Compares two requests that share their first page with two that have a copy of it each."""
    query = self.query[:2]
    held = pages.convert(self.cache, PagesV1)
    def gradient(held, tables):
      metadata = PagesMetadata(np.array(tables, np.int32), np.array([7, 8], np.int32))
      return jax.grad(lambda held: jnp.sin(page_attention(
          query, held, metadata).attention_outputs).sum())(held)
    apart = jax.tree.map(lambda x: x.at[:, 3].set(x[:, 0]), held)
    shared, single = gradient(held, [[0, 1], [0, 2]]), gradient(apart, [[0, 1], [3, 2]])
    for found, copies in zip(jax.tree.leaves(shared), jax.tree.leaves(single), strict=True):
      np.testing.assert_allclose(found[:, 0], copies[:, 0] + copies[:, 3], atol=1e-6)
      self.assertTrue(np.any(copies[:, 0]) and np.any(copies[:, 3]))

  def test_scans_over_layers(self):
    """Scans over layers, each with a cache that the scan updates, as an engine does."""
    heads = Heads(2, 6, 6)
    caches = jax.tree.map(lambda x: jnp.stack([x] * 3),
                          pages.init(PagesV3, 16, 4, heads, jnp.float32))
    metadata = self.metadata._replace(context_lens=np.array([4, 2], np.int32))
    def layer(x, cache):
      output = ragged_page_attention_v3(x, x[:, :2], x[:, 2:], cache, metadata)
      return x + output.attention_outputs, output.cache_view
    out, filled = jax.lax.scan(layer, self.query, caches)
    x = self.query
    for index in range(3):
      x, cache = layer(x, jax.tree.map(lambda x: x[0], caches))
      np.testing.assert_allclose(filled.pages[index], cache.pages, atol=1e-6)
    np.testing.assert_allclose(out, x, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
