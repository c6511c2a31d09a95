# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages that are sharded over a mesh, compared with one device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV1,
                       PagesV2, PagesV3, page_attention, ragged_page_attention_v2,
                       ragged_page_attention_v3)
from attn_core.caches import pages
from attn_core.caches.paged import request_groups

jax.config.update("jax_num_cpu_devices", 8)

SENT = "all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter"
PAGE, D, R, TABLE_WIDTH = 4, 8, 3, 4
POOL, TOKENS = 8, 7  # per group
# Per group: queries and lengths of its requests, and the number of rows in use.
GROUPS = (((3, 0, 2), (9, 4, 6), 3), ((1, 1, 4), (1, 16, 4), 3), ((5, 2, 9), (5, 8, 99), 2),
          ((7, 8, 9), (12, 99, 99), 1))


class Case(NamedTuple):
  """Arrays of G groups of requests."""

  G: int = 1
  H: int = 4
  K: int = 2
  dtype: str = "float32"
  layout: type = PagesV2
  grouped: bool = True
  scales: str | None = None
  window: tuple[int, int] | None = (7, 0)

  def metadata(self) -> PagesMetadata:
    rng, found = np.random.default_rng(0), []
    for queries, lengths, used in GROUPS[:self.G]:
      tables, free = np.full((R, TABLE_WIDTH), 10**6, np.int32), rng.permutation(POOL)
      for row in range(used):
        held = -(-lengths[row] // PAGE)
        tables[row, :held], free = free[:held], free[held:]
      starts = np.cumsum([0, *queries])
      starts[used + 1:] = -5
      found.append(PagesMetadata(*(np.array(x, np.int32) for x in (tables, lengths, starts, used))))
    return request_groups.stack(*found) if self.grouped else found[0]

  def single(self) -> PagesMetadata:
    """Metadata of the same requests with one query each, T = G * R."""
    lengths = np.array([[9, 4, 6], [1, 16, 4], [5, 8, 0], [12, 4, 3]], np.int32)[:self.G]
    tables = np.stack([[[0, 1, 2, 3], [7, 6, 5, 4], [3, 2, 9, 9]]] * self.G).astype(np.int32)
    tables[0] = [[5, 6, 7, 9], [3, 9, 9, 9], [4, 0, 9, 9]]
    return PagesMetadata(tables, lengths)

  @functools.cache
  def arrays(self):
    """Returns query, key, value, cache, sinks."""
    rng, tokens = np.random.default_rng(1), R if self.layout is PagesV1 else TOKENS
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), self.dtype)
    query, key, value = (array(self.G * tokens, n, D) for n in (self.H, self.K, self.K))
    pool = self.G * POOL
    dense = array(pool * PAGE, self.K, D), array(pool * PAGE, self.K, D)
    empty = pages.init(self.layout, pool, PAGE, Heads(self.K, D, D),
                       "int8" if self.scales else self.dtype, self.scales)
    cache = jax.jit(pages.append)(empty, *dense, jnp.arange(pool * PAGE))
    return query, key, value, cache, jnp.asarray(rng.normal(size=self.H), jnp.float32)


def mesh_of(**sizes) -> Mesh:
  count = int(np.prod(list(sizes.values())))
  return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def run(case: Case, mesh, query, key, value, cache, sinks, metadata=None):
  """Returns (output, lse, cache or None); metadata: None: the case's."""
  if metadata is None:
    metadata = case.single() if case.layout is PagesV1 else case.metadata()
  options = PagedOptions(sliding_window=case.window, softmax_aux=sinks, return_lse=True,
                         block_sizes=BlockSizes(4, 8), logits_soft_cap=3.0,
                         metadata=OperationMetadata(mesh=mesh))
  if case.layout is PagesV1:
    output = page_attention(query, cache, metadata, options)
  elif case.layout is PagesV2:
    output = ragged_page_attention_v2(query, cache, metadata, options)
  else:
    output = ragged_page_attention_v3(query, key, value, cache, metadata, options)
  return output.attention_outputs, output.lse, output.cache_view


def values(case: Case, mesh, metadata=None):
  """Returns [output, lse, cache]."""
  return jax.tree.leaves(jax.jit(functools.partial(run, case, mesh, metadata=metadata))(
      *case.arrays()))


def gradients(case: Case, mesh, metadata=None):
  """Returns [output, lse, cache, gradients of query, key, value, pages and sinks]."""
  arrays = case.arrays()
  differentiable = arrays if case.layout is PagesV3 else (arrays[0], *arrays[3:])
  def loss(differentiable):
    out, lse, cache = run(case, mesh, *(differentiable if case.layout is PagesV3 else (
        differentiable[0], None, None, *differentiable[1:])), metadata)
    return jnp.sin(out).sum() + (jnp.where(lse == -jnp.inf, 0, lse)**2).sum(), (out, lse, cache)
  (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(differentiable)
  return jax.tree.leaves((found, gradient))


CASES = {
    "heads_of_one_group": (gradients, Case(grouped=False), dict(dp=2, tp=2)),
    "writes": (gradients, Case(G=2, layout=PagesV3), dict(dp=2, tp=2)),
    "two_groups_a_device_one_key_head": (values, Case(G=4, layout=PagesV3, K=1),
                                         dict(dp=2, tp=4)),
    "decode": (values, Case(G=4, layout=PagesV1), dict(fsdp=2, dp=2, tp=2)),
    "writes_8_bits": (values, Case(G=2, layout=PagesV3, K=4, scales="token"), dict(dp=2, tp=2)),
}


def assert_near(got, want, tolerance=3e-6):
  """Compares arrays with those of one device, of which none may hold NaN."""
  for index, (x, y) in enumerate(zip(got, want, strict=True)):
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    assert not np.isnan(y).any(), index
    scale = max(1, np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max())
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale, err_msg=str(index))
