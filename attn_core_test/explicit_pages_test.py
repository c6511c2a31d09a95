# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages follows the arrays on 8 virtual devices, whatever the mesh axes are called.

On Explicit axes outputs have the type of the query, and caches and gradients keep their own types.
"""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (Heads, OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       PartitionAxis, attention, explain)
from attn_core.caches import groups, pages
from attn_core_test.paged_shard_cases import SENT

jax.config.update("jax_num_cpu_devices", 8)

# Of a group: requests R, pages, tokens of a page, and tokens of a call.
R, POOL, PAGE, TOKENS = 2, 8, 4, 8
H, K, D = 8, 4, 8
MESHES = {"dm": ((4, 2), ("data", "model")), "x": ((4,), ("x",)), "dt": ((2, 2), ("dp", "tp")),
          "dft": ((2, 2, 2), ("dp", "fsdp", "tp"))}
BOTH = ("dp", "fsdp")

# Mesh, number of groups (None: no groups), rows and heads of the tokens, pages and heads of a pool.
CASES = {
    "data_and_model": ("dm", 4, ("data", "model"), ("data", "model")),
    "groups_over_x": ("x", 4, ("x", None), ("x", None)),
    "heads_over_x": ("x", None, (None, "x"), (None, "x")),
    "order_of_the_arrays": ("dft", 4, (BOTH, "tp"), (BOTH, "tp")),
    "other_order": ("dft", 4, (BOTH[::-1], "tp"), (BOTH[::-1], "tp")),
    "heads_over_two_axes": ("dt", 2, (None, ("dp", "tp")), (None, ("dp", "tp"))),
    "groups_over_two_axes": ("dt", 4, (("tp", "dp"), None), (("tp", "dp"), None)),
    "tokens_only": ("dt", 2, ("tp", "dp"), (None, None)),
    "tokens_only_of_one_group": ("dm", None, ("data", "model"), (None, None)),
    "pages_only": ("dm", 4, (None, None), ("data", "model")),
    "pages_otherwise": ("dt", 2, ("tp", "dp"), ("dp", "tp")),
    "nothing": ("dt", 2, (None, None), (None, None)),
}


@functools.cache
def mesh_of(name, kind="Explicit"):
  sizes, names = MESHES[name]
  return jax.make_mesh(sizes, names, axis_types=(getattr(AxisType, kind),) * len(names))


def numbers(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def metadata_of(layout, number):
  """Returns the metadata of `number` groups; None: of one group without an axis of groups."""
  if layout is PagesV1:
    tables = np.arange(TOKENS, dtype=np.int32)[:, None]
    one = PagesMetadata(tables, np.arange(TOKENS, dtype=np.int32) % PAGE + 1)
  else:
    one = PagesMetadata(np.array([[0, 1, 2], [5, 3, 4]], np.int32), np.array([9, 7], np.int32),
                        np.array([0, 5, TOKENS], np.int32))
  return one if number is None else groups.stack(*[one] * number)


def arguments_of(case, layout, dtype="float32"):
  """Returns query, key, value and cache, and the spec of each."""
  _, number, tokens, (pool, heads) = case
  count = number or 1
  scales = "token" if dtype == "int8" else None
  cache = pages.init(layout, count * POOL, PAGE, Heads(K, D, D), dtype, scales)
  if scales is None:
    cache = jax.tree.map(lambda x: jnp.asarray(numbers(*x.shape, seed=3)), cache)
  spec = P(heads, pool) if layout is PagesV1 else P(pool, None, heads)
  of_pages = jax.tree.map(lambda x: P(pool, None, heads) if x.ndim == 3 else spec, cache)
  arrays = *(numbers(count * TOKENS, n, D, seed=n) for n in (H, K, K)), cache
  return arrays, (*[P(*tokens)] * 3, of_pages)


def put(mesh, arrays, specs):
  return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs)


def outputs(query, key, value, cache, number, **arguments):
  """Returns query + output, lse, and the cache where it is written."""
  writes = isinstance(cache, PagesV3)
  out = attention(query, key if writes else None, value if writes else None, layout="thd",
                  cache_view=cache, cache_metadata=metadata_of(type(cache), number),
                  return_lse=True, **arguments)
  return query + out.attention_outputs, out.lse, out.cache_view


def with_gradients(number, query, key, value, cache):
  """Returns the outputs, and the gradients of all arrays."""
  def loss(*arrays):
    found = outputs(*arrays, number)
    return sum(jnp.sin(x).sum() for x in jax.tree.leaves(found)), found
  (_, found), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(
      query, key, value, cache)
  return found, gradients


def normal(x):
  """Returns the spec of a type with an entry for each dimension, as tuples."""
  entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e)
             for e in jax.typeof(x).sharding.spec]
  return entries + [()] * (x.ndim - len(entries))


def close(got, want):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5 * max(1, np.abs(y).max())), got, want)


class TypesTest(parameterized.TestCase):

  @parameterized.product(name=tuple(CASES), layout=pages.PAGES)
  def test_outputs_caches_and_gradients(self, name, layout):
    """Checks the types that a call and its gradient have; nothing is computed."""
    arrays, specs = arguments_of(CASES[name], layout)
    mesh = mesh_of(CASES[name][0])
    shapes = jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), arrays, specs)
    with jax.set_mesh(mesh):
      (out, lse, cache), gradients = jax.eval_shape(
          functools.partial(with_gradients, CASES[name][1]), *shapes)
    query, *_, held = shapes
    self.assertEqual(normal(out), normal(query))
    rows, heads, _ = normal(query)
    self.assertEqual(normal(lse), [heads, rows])
    if layout is PagesV3:
      self.assertEqual(jax.tree.map(normal, cache), jax.tree.map(normal, held))
    self.assertEqual(jax.tree.map(normal, gradients), jax.tree.map(normal, shapes))

  def test_scales_of_tokens(self):
    arrays, specs = arguments_of(CASES["data_and_model"], PagesV3, "int8")
    mesh = mesh_of("dm")
    with jax.set_mesh(mesh):
      placed = put(mesh, arrays, specs)
      _, _, cache = jax.eval_shape(lambda *x: outputs(*x, 4), *placed)
    self.assertEqual(jax.tree.map(normal, cache), jax.tree.map(normal, placed[3]))

  def test_metadata_that_is_sharded_and_axes_of_one_device(self):
    arrays, specs = arguments_of(CASES["data_and_model"], PagesV2)
    for sizes in ((4, 2), (4, 1), (1, 1)):
      mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
      with jax.set_mesh(mesh):
        query, _, _, cache = put(mesh, arrays, specs)
        metadata = jax.device_put(metadata_of(PagesV2, 4), NamedSharding(mesh, P("data")))
        out = jax.eval_shape(lambda query, cache, metadata: query + attention(
            query, None, None, layout="thd", cache_view=cache,
            cache_metadata=metadata).attention_outputs, query, cache, metadata)
      self.assertEqual(normal(out), normal(query))


class ValuesTest(parameterized.TestCase):

  def check(self, name, layout):
    arrays, specs = arguments_of(CASES[name], layout)
    run = jax.jit(functools.partial(with_gradients, CASES[name][1]))
    want, mesh = run(*arrays), mesh_of(CASES[name][0])
    with jax.set_mesh(mesh):
      close(run(*put(mesh, arrays, specs)), want)

  @parameterized.parameters(
      ("data_and_model", PagesV3), ("heads_over_x", PagesV2), ("other_order", PagesV1),
      ("tokens_only", PagesV2), ("pages_otherwise", PagesV3))
  def test_those_of_one_device(self, name, layout):
    self.check(name, layout)

  @parameterized.parameters(*pages.PAGES)
  def test_4_bits(self, layout):
    """Compares outputs and pages whose heads are sharded; keys have 2 scales, and values 1."""
    metadata, mesh, heads = metadata_of(layout, None), mesh_of("dm"), Heads(8, 64, 32)
    arrays = [numbers(TOKENS, *n, seed=7) for n in ((16, 64), (8, 64), (8, 32))]
    @jax.jit
    def run(query, key, value, cache):
      if layout is not PagesV3:
        cache = pages.append(cache, key, value, pages.slots(metadata, PAGE, TOKENS))
        key = value = None
      out = attention(query, key, value, layout="thd", cache_view=cache, cache_metadata=metadata)
      return out.attention_outputs, out.cache_view if layout is PagesV3 else cache
    make = functools.partial(pages.init, layout, POOL, PAGE, heads, "int4", "group")
    want = run(*arrays, make())
    with jax.set_mesh(mesh):
      placed = [jax.device_put(x, NamedSharding(mesh, P(None, "model"))) for x in arrays]
      spec = P("model") if layout is PagesV1 else P(None, None, "model")
      close(run(*placed, make(sharding=spec)), want)

  def test_stripes(self):
    """Checks pages of requests in stripes, over the axes that shard the pool behind the groups."""
    mesh = jax.make_mesh((2, 4), ("rows", "keys"), axis_types=(AxisType.Explicit,) * 2)
    tables = np.random.default_rng(0).permutation(8).reshape(4, 1, 2).astype(np.int32)
    one = PagesMetadata(tables, np.array([29], np.int32))
    metadata = groups.stack(one._replace(page_tables=tables // 4), one._replace(
        page_tables=tables[::-1] // 4))
    query, cache = numbers(2, H, D), PagesV2(jnp.asarray(numbers(2 * 4 * 2, PAGE, 2 * K, D)))
    run = lambda query, cache: attention(
        query, None, None, layout="thd", cache_view=cache, cache_metadata=metadata, causal=True,
        return_lse=True)[::2]
    want = jax.jit(run)(query, cache)
    with jax.set_mesh(mesh):
      placed = put(mesh, (query, cache), (P("rows"), PagesV2(P(("rows", "keys")))))
      said = str(explain(placed[0], None, None, layout="thd", cache_view=placed[1],
                         cache_metadata=metadata))
      got = jax.jit(run)(*placed)
    close(got, want)
    self.assertIn("keys over keys=4", said)
    self.assertIn("groups of requests over rows=2", said)

  def test_axes_of_tokens_that_pages_lack_are_dropped_where_pages_are_written(self):
    mesh = mesh_of("dt")
    for layout, written in ((PagesV2, False), (PagesV3, True)):
      arrays, specs = arguments_of(CASES["tokens_only"], layout)
      with jax.set_mesh(mesh):
        query, key, value, cache = put(mesh, arrays, specs)
        said = explain(query, key if written else None, value if written else None, layout="thd",
                       cache_view=cache, cache_metadata=metadata_of(layout, 2)).axes
      self.assertEqual(["the pages are not sharded over it" in line for line in said],
                       [written] * 2, said)

  def test_nothing_is_sent(self):
    mesh = mesh_of("dm")
    arrays, specs = arguments_of(CASES["data_and_model"], PagesV3)
    with jax.set_mesh(mesh):
      text = jax.jit(lambda *x: outputs(*x, 4), donate_argnums=3).lower(
          *put(mesh, arrays, specs)).compile().as_text()
    self.assertEmpty(re.findall(SENT, text))
    self.assertIn("input_output_alias={", text)


class InitLikeTest(parameterized.TestCase):

  @parameterized.product(kind=["Explicit", "Auto"], layout=pages.PAGES)
  def test_heads_and_pages(self, kind, layout):
    mesh = mesh_of("dm", kind)
    query, key = (jax.device_put(numbers(TOKENS, heads, D), NamedSharding(mesh, P("data", "model")))
                  for heads in (H, K))
    plain = pages.init(layout, 32, PAGE, Heads(K, D, D), "float32")
    axes = lambda x: (x.sharding.spec + (None,) * 5)[:3]
    for made, pool, heads in (
        (pages.init_like(layout, key, 32, PAGE, groups=4), "data", "model"),
        (pages.init_like(layout, query, 32, PAGE, Heads(K, D, D), groups=2), None, "model"),
        (pages.init_like(layout, jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=key.sharding),
                         32, PAGE), None, "model")):
      self.assertEqual(jax.tree.map(lambda x: (x.shape, x.dtype), made),
                       jax.tree.map(lambda x: (x.shape, x.dtype), plain))
      for x in jax.tree.leaves(made):
        self.assertEqual(axes(x), (heads, pool, None) if layout is PagesV1 else (pool, None, heads))
    one_head = pages.init_like(layout, query, 32, PAGE, Heads(1, D, D), dtype="int8",
                               scales="token", groups=4)
    self.assertEqual(axes(one_head.key_scales), ("data", None, None))

  def test_rows_that_hold_a_half_of_a_head(self):
    key = jax.device_put(numbers(TOKENS, 2, D), NamedSharding(mesh_of("x"), P()))
    query = jax.device_put(numbers(TOKENS, H, D), NamedSharding(mesh_of("x"), P(None, "x")))
    made = pages.init_like(PagesV2, query, 32, PAGE, Heads(2, D, D))
    self.assertEqual(made.pages.sharding.spec, pages.init_like(
        PagesV2, key, 32, PAGE).pages.sharding.spec)

  @parameterized.parameters(
      ((2, 3), 1, r"like: .*an array \[T, K, D\]"),
      ((TOKENS, K, D), 0, "groups: got 0; expected an int >= 1"))
  def test_refuses(self, shape, number, words):
    with self.assertRaisesRegex(ValueError, words):
      pages.init_like(PagesV2, np.zeros(shape), 8, PAGE, groups=number)


class RefusalsTest(parameterized.TestCase):

  def check(self, mesh, number, specs, words, error=NotImplementedError, **metadata):
    query = jax.ShapeDtypeStruct(((number or 1) * TOKENS, H, D), np.float32,
                                 sharding=NamedSharding(mesh, specs[0]))
    cache = PagesV2(jax.ShapeDtypeStruct(((number or 1) * POOL, PAGE, 2 * K, D), np.float32,
                                         sharding=NamedSharding(mesh, specs[1])))
    run = lambda query, cache: attention(
        query, None, None, layout="thd", cache_view=cache,
        cache_metadata=metadata_of(PagesV2, number), metadata=OperationMetadata(**metadata))
    with jax.set_mesh(mesh):
      if not words:
        return jax.eval_shape(run, query, cache)
      with self.assertRaisesRegex(error, words):
        jax.eval_shape(run, query, cache)

  def test_a_pool_that_would_be_gathered(self):
    self.check(mesh_of("x"), None, (P(), P("x")),
               "pages over x=4 with all requests in one group.*caches.groups")

  def test_tokens_of_pages(self):
    self.check(mesh_of("x"), 4, (P(), P(None, "x")), "tokens or columns of pages over x=4")

  def test_groups_that_do_not_divide(self):
    self.check(mesh_of("x"), 2, (P(), P("x")), "2 groups of requests over x=4")

  def test_heads_that_do_not_divide(self):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    self.check(mesh, None, (P(), P(None, None, "x")), "4 key heads over x=8")

  def test_auto_axes_that_no_metadata_names(self):
    mesh, specs = mesh_of("dm", "Auto"), (P("data", "model"), P("data", None, "model"))
    self.check(mesh, 4, specs, "names no mesh axis 'data', 'model', an Auto axis of a call over "
               "pages.*PartitionAxis", ValueError)
    self.check(mesh, 4, specs, None, partition_axis=PartitionAxis(
        batch_axis="data", head_axis="model", kv_head_axis="model"))


if __name__ == "__main__":
  absltest.main()
