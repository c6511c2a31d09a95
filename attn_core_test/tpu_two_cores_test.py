# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels over caches and pages on TPUs whose chips have two cores.

Interpret mode runs both cores, in threads, and watches for races. The bits are those of one core.
"""

import contextlib
import itertools
import re
from unittest import mock
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from attn_core import (BlockSizes, Heads, LatentOptions, OperationMetadata, PagesMetadata, PagesV2,
                       PagesV3, attention)
from attn_core.benchmark.static import profile as static_profile
from attn_core.caches import dense, latent, pages
from attn_core.caches.paged import latent_pages
from attn_core.config import metadata as metadata_lib
from attn_core_test import tpu_interpret

TPU = OperationMetadata(platform="tpu")
LENGTHS, QUERIES, PAGE, COLUMNS = (37, 0, 1, 30, 64, 9), (1, 0, 1, 5, 3, 1), 8, 8
SPAN = BlockSizes(block_q=2, block_kv=16)


@contextlib.contextmanager
def cores(count, transfers="on_wait"):
  """Runs calls as on a chip with several cores; yields places of the grid with their cores.

  Fails on a race but that of both cores, which write the same new tokens.
  """
  places = []
  def record(*numbers):
    *token, place, core = numbers  # newer JAX passes a token on
    places.append((tuple(map(int, place)), int(core)))
    return token[0] if token else ()

  with (mock.patch.object(metadata_lib, "resolved_num_cores", lambda _: count),
        tpu_interpret.watched(transfers, num_cores_or_threads=count,
                              grid_point_recorder=record) as printed):
    yield places
  for race in printed.getvalue().split("RACE DETECTED")[1:]:
    writes = [line for line in race.splitlines() if re.match(r" *write of .*hbm", line)]
    assert count == 2 and any(re.search(r"(new_tokens|row_writes)\.py", x) for x in writes), race


def paged_call(form, dtype="float32", tokens=sum(QUERIES) + 2, **more):
  """Returns a function of metadata that attends to pages, some of which it writes."""
  rng = np.random.default_rng(0)
  heads = Heads(2, 128, 128)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  cache = pages.init(form, COLUMNS * len(LENGTHS), PAGE, heads, dtype,
                     "tensor" if dtype == "int8" else None)
  cache = cache._replace(pages=normal(*cache.pages.shape).astype(dtype))
  new = (normal(tokens, 2, 128), normal(tokens, 2, 128)) if form is PagesV3 else (None, None)
  return lambda about: attention(
      normal(tokens, 4, 128), *new, layout="thd", cache_view=cache, cache_metadata=about,
      metadata=TPU, block_sizes=SPAN, return_lse=True, **more)


def latent_call(dtype="float32", tokens=sum(QUERIES) + 2):
  """Returns a function of metadata that writes and attends to pages of latent rows."""
  rng = np.random.default_rng(1)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  cache = latent_pages.init(COLUMNS * len(LENGTHS), PAGE, (128, 32), dtype=dtype, padded=True)
  numbers = normal(*cache.pages.shape)
  codes = jnp.round(20 * numbers).astype(dtype) if dtype == "int8" else numbers
  cache = cache._replace(pages=codes)
  return lambda about: attention(
      normal(tokens, 4, 160), normal(tokens, 160), None, layout="thd", cache_view=cache,
      cache_metadata=about, metadata=TPU, latent_options=LatentOptions(128, 32), return_lse=True,
      softmax_scale=0.1)


def about(used=len(LENGTHS)):
  """Returns the metadata of the requests, of which some are in use."""
  tables = np.random.default_rng(2).permutation(COLUMNS * len(LENGTHS)).reshape(-1, COLUMNS)
  return PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
      tables, LENGTHS, np.cumsum([0, *QUERIES]), used)))


PAGED = {
    "reads": (lambda: paged_call(PagesV2), about()),
    "writes": (lambda: paged_call(PagesV3), about()),
    "one_request_in_use": (lambda: paged_call(PagesV3), about(used=1)),
    "none_in_use": (lambda: paged_call(PagesV3), about(used=0)),
    "in_8_bits_with_a_window": (lambda: paged_call(PagesV3, "int8", sliding_window=9), about()),
    "latent_rows": (latent_call, about()),
    "latent_rows_in_8_bits": (lambda: latent_call("int8"), about()),
    "one_step": (lambda: paged_call(PagesV3, tokens=1), PagesMetadata(*(jnp.asarray(x, jnp.int32)
                                                                       for x in (
        [[0, 1, 2, 3, 4, 5, 6, 7]], [13], [0, 1])))),
}


class PagesTest(parameterized.TestCase):

  def test_scales_that_cores_cannot_both_write(self):
    """Checks that one core runs where the scales of a page are written in two parts."""
    tokens = 200
    requests = PagesMetadata(*(jnp.asarray(x, jnp.int32) for x in (
        np.arange(COLUMNS * len(LENGTHS))[None], [203], [0, tokens])))
    with jax.enable_x64(False), cores(2) as places:
      jax.block_until_ready(latent_call("int8", tokens)(requests))
    self.assertEqual(set(places), {((0,), 0)})

  @parameterized.parameters(*PAGED)
  def test_the_bits_of_one_core(self, name):
    make, requests = PAGED[name]
    found = []
    for count in (1, 2):
      with jax.enable_x64(False), cores(count) as places:
        found.append(jax.block_until_ready(make()(requests)))
      self.assertEqual(set(places), {((n,), n) for n in range(count)})
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
      self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())


class DenseTest(parameterized.TestCase):

  def call(self, rows, is_latent):
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    cache = (latent.init(rows, 256, (512, 64), dtype="bfloat16", padded=True) if is_latent else
             dense.init(rows, 256, (2, 128), dtype="float32"))
    cache = jax.tree.map(lambda x: normal(*x.shape).astype(x.dtype) if jnp.issubdtype(
        x.dtype, jnp.floating) else x, cache)
    cache = cache._replace(lengths=jnp.asarray(rng.integers(1, 256, rows), jnp.int32))
    options = {"mechanism": "autoregressive_decodeattn"}
    query = normal(rows, 2, 4, 128)
    if is_latent:
      query = normal(rows, 1, 8, 576).astype("bfloat16")
      options = {"mechanism": "multi_latent_attention", "softmax_scale": 0.1,
                 "latent_options": LatentOptions(512, 64)}
    return attention(query, None, None, cache_view=cache, metadata=TPU, return_lse=True,
                     mode="__autoregressive__", **options)

  @parameterized.parameters(*itertools.product((1, 2, 5), (False, True)))
  def test_the_bits_of_one_core(self, rows, is_latent):
    found = []
    for count in (1, 2):
      with jax.enable_x64(False), cores(count) as places:
        found.append(jax.block_until_ready(self.call(rows, is_latent)))
      half = -(-rows // 2)
      grid = {((n,), 0) for n in range(rows)} if min(count, rows) == 1 else {
          ((core, n), core) for core in range(2) for n in range(half)}
      self.assertEqual(set(places), grid)
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
      self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  @parameterized.parameters("dense", "pages", "latent_rows")
  def test_a_v5p_runs_both_cores(self, name):
    """Compiles for the device that an abstract mesh names: two cores, and no copy of the pages."""
    device = static_profile.devices("v5p")[0]
    kind = jax.sharding.AbstractDevice(device.device_kind, device.num_cores, "tpu")
    place = SingleDeviceSharding(device)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    on = lambda tree: jax.tree.map(lambda x: array(x.dtype, *x.shape), tree)
    metadata = PagesMetadata(*(array(jnp.int32, *x) for x in ((8, 64), (8,), (9,))))
    if name == "dense":
      cache = on(jax.eval_shape(lambda: dense.init(8, 1024, (8, 128), dtype="bfloat16")))
      call = lambda query, cache: attention(query, None, None, cache_view=cache, metadata=TPU)[0]
      operands = array("bfloat16", 8, 1, 32, 128), cache
    elif name == "pages":
      cache = on(jax.eval_shape(
          lambda: pages.init(PagesV3, 512, 16, Heads(8, 128, 128), "bfloat16")))
      call = lambda query, cache, new, about: attention(
          query, new, new, layout="thd", cache_view=cache, cache_metadata=about, metadata=TPU)[::3]
      operands = array("bfloat16", 8, 32, 128), cache, array("bfloat16", 8, 8, 128), metadata
    else:
      cache = on(jax.eval_shape(
          lambda: latent_pages.init(512, 16, (512, 64), dtype="bfloat16", padded=True)))
      call = lambda query, cache, new, about: attention(
          query, new, None, layout="thd", cache_view=cache, cache_metadata=about, metadata=TPU,
          softmax_scale=0.1, latent_options=LatentOptions(512, 64))[::3]
      operands = array("bfloat16", 8, 16, 576), cache, array("bfloat16", 8, 576), metadata
    with (jax.enable_x64(False), jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=kind))):
      self.assertEqual(metadata_lib.resolved_num_cores(TPU), 2)
      lowered = jax.jit(call, donate_argnums=() if name == "dense" else 1).trace(*operands).lower(
          lowering_platforms=("tpu",))
    found = lowered.compile()
    self.assertEqual(found.as_text().count('custom_call_target="tpu_custom_call"'), 1)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    self.assertLess(found.memory_analysis().temp_size_in_bytes, size // 8)


if __name__ == "__main__":
  absltest.main()
