# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain` names the implementation that is in the traced program, for random calls."""

import collections
import functools
from typing import Any, Iterator
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core import (Heads, MaskInfo, OperationMetadata, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       RingConfig, attention, caches, explain, masks)
from attn_core.caches import pages
from attn_core.caches.paged import request_groups
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.gpu.split_kv import decode as gpu_decode, paged as gpu_paged
from attn_core.kernels.tpu.ragged import decode as tpu_decode, paged as tpu_paged
from attn_core.kernels.xla import decode, dense, flash, paged_forward
from attn_core.mechanisms import flash as flash_mechanism

jax.config.update("jax_num_cpu_devices", 8)

TARGETS = (("cpu", None), ("gpu", None), ("gpu", "8.0"), ("gpu", "9.0"), ("tpu", None))
PAGED = {"page_attention": PagesV1, "ragged_page_attention_v2": PagesV2,
         "ragged_page_attention_v3": PagesV3}
MARK = "ran:"

# The kernel of each implementation that goes through `autodiff.primitives`.
KERNELS = {
    "flash.xla": flash.KERNEL, "flash.tpu": flash_mechanism.tpu_kernel(),
    "flash.gpu": flash_mechanism.gpu_kernel(), "decode.xla": decode.KERNEL,
    "decode.tpu": tpu_decode.make_kernel(decode.KERNEL),
    "decode.gpu": gpu_decode.make_kernel(decode.KERNEL),
}
RING_KERNELS = {
    "context_parallel.xla": flash.KERNEL, "context_parallel.tpu": flash_mechanism.tpu_kernel(),
    "context_parallel.tpu_remote": flash_mechanism.tpu_kernel(sends=True),
    "context_parallel.gpu": flash_mechanism.gpu_kernel(),
}


def mesh_of(*sizes: int) -> Mesh:
  """Returns a mesh of the first devices over the axes that `create_mesh` names."""
  devices = np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes)
  return Mesh(devices, ("dp", "fsdp", "ep", "tp", "sp"))


def _marked(function, name):
  """Wraps a function of arrays so that its program contains `name`."""
  def run(query, *args, **kwargs):
    label = name if isinstance(name, str) else name(kwargs)
    if isinstance(query, tuple):
      query = query._replace(query=checkpoint_name(query.query, MARK + label))
    else:
      query = checkpoint_name(query, MARK + label)
    return function(query, *args, **kwargs)
  return run


def _paged_stub(operands, spec, heads, block_sizes) -> Residuals:
  """Returns an output of the right shape; the kernel itself is not traced."""
  del spec, block_sizes
  out = jnp.broadcast_to(operands.query[..., :1], (*operands.query.shape[:2], heads.value_width))
  return Residuals(out, out[..., :1].astype(jnp.float32))


def _dot_product_attention(original, *args, implementation, **kwargs):
  """Calls JAX's function by XLA, since cuDNN cannot be asked for shapes everywhere."""
  del implementation
  return original(*args, implementation="xla", **kwargs)


PATCHES = (
    mock.patch.object(dense, "attend", _marked(dense.attend, "dense.vanilla")),
    mock.patch.object(jax.nn, "dot_product_attention", _marked(
        functools.partial(_dot_product_attention, jax.nn.dot_product_attention),
        lambda kwargs: f"sdpa.{kwargs['implementation']}")),
    *(mock.patch.object(module, "forward", _marked(_paged_stub, f"paged.{name}"))
      for module, name in ((paged_forward, "xla"), (tpu_paged, "tpu"), (gpu_paged, "gpu"))))


def setUpModule():
  jax.clear_caches()  # forget programs without marks
  for patch in PATCHES:
    patch.start()


def tearDownModule():
  for patch in PATCHES:
    patch.stop()
  jax.clear_caches()


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields every equation of a program and of the programs nested in it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(
        x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
        yield from equations(inner if hasattr(inner, "eqns") else inner.jaxpr)


def names_in(jaxpr: Any) -> set[str]:
  """Returns the implementations, or the names of their kernels, that a program runs."""
  found = set()
  for equation in equations(jaxpr):
    if isinstance(getattr(equation.params.get("call"), "kernel", None), Kernel):
      found.add(equation.params["call"].kernel.name)
    if str(equation.params.get("name", "")).startswith(MARK):
      found.add(equation.params["name"].removeprefix(MARK))
  return found


def expected(implementation: str) -> set[str]:
  """Returns the names that `names_in` may find for an implementation."""
  if implementation in KERNELS:
    return {KERNELS[implementation].name}
  if implementation in RING_KERNELS:
    name = RING_KERNELS[implementation].name
    return {name, f"ring_{name}"}
  return {implementation.removesuffix("_writing")}


class Sample:
  """A stream of random choices, from which calls are made."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng(seed)

  def one(self, *choices):
    return choices[self.rng.integers(len(choices))]

  def maybe(self, probability: float = 0.2) -> bool:
    return self.rng.random() < probability

  def metadata(self, mesh, **fields) -> OperationMetadata:
    platform, capability = self.one(*TARGETS)
    return OperationMetadata(platform=platform, compute_capability=capability, mesh=mesh, **fields)


def dense_call(seed: int) -> tuple[tuple, dict]:
  """Returns (query, key, value) and the other arguments of a call without pages."""
  sample = Sample(seed)
  heads, key_heads = sample.one((4, 2), (4, 4), (2, 1), (8, 2), (6, 3))
  batch, width = sample.one(1, 2, 4), sample.one(64, 64, 128, 96, 72, 32)
  dtype = sample.one("bfloat16", "bfloat16", "float16", "float32")
  few = sample.maybe(0.6)
  queries = sample.one(1, 1, 3) if few else sample.one(16, 64, 65)
  keys = sample.one(16, 24, 32, 48, 64, 136) if few else queries
  mesh = mesh_of(*sample.one((1, 1, 1, 1, 2), (2, 1, 1, 1, 4), (1, 2, 1, 2, 2), (2, 2, 1, 2, 1),
                                (1, 1, 1, 1, 8))) if sample.maybe(0.6) else None
  variant = sample.one("ring", "ring", "ring", "all_gather", "ulysses")
  ring = RingConfig(variant, sample.one("contiguous", "contiguous", "zigzag"), transfer=sample.one(
      "collective", "remote") if variant == "ring" else "collective")
  arguments: dict[str, Any] = {
      "metadata": sample.metadata(mesh, ring=ring if sample.maybe() else RingConfig()),
      "mode": "__autoregressive__" if few else "__train__", "return_lse": sample.maybe(),
      "mechanism": sample.one("auto", *(["autoregressive_decodeattn"] * 4 if few else []),
                              "flash_attn2", "blocksparse", "blockwise", "vanilla", "sdpa",
                              "cuda_flash_attn2", "ring", "ring")}
  options = {
      "sliding_window": (5, 0), "logits_soft_cap": 20.0, "chunk_size": 8,
      "softmax_aux": jnp.zeros(heads), "bias": jnp.zeros((1, 1, queries, keys), dtype),
      "mask": sample.one(np.ones((1, 1, queries, keys), bool), masks.custom(
          lambda b, h, q, k: (q + k) % 3 == 0)), "optimized": True, "return_weights": True,
      "precision": "highest", "normalize_output": False}
  arguments.update({name: value for name, value in options.items() if sample.maybe(0.06)})
  shape = lambda length, heads, width: jax.ShapeDtypeStruct((batch, length, heads, width), dtype)
  query = shape(queries, heads, width)
  if few and sample.maybe(0.5):
    stored = sample.one(dtype, dtype, "int8", "float8_e4m3fn")
    arguments["cache_view"] = caches.dense.init(batch, keys, (key_heads, width), dtype=stored)
    for name in ("bias", "mask"):
      arguments.pop(name, None)
    new = shape(queries, key_heads, width) if sample.maybe(0.5) else None
    return (query, new, new), arguments
  if queries != keys:
    arguments["query_offset"] = keys - queries
  if sample.maybe(0.1):
    arguments["mask_info"] = MaskInfo(None, np.zeros((batch, queries), np.int32),
                                      np.zeros((batch, keys), np.int32))
  values = width if sample.maybe(0.9) else 64
  return (query, shape(keys, key_heads, width), shape(keys, key_heads, values)), arguments


def paged_call(seed: int) -> tuple[tuple, dict]:
  """Returns (query, key, value) and the other arguments of a call over pages."""
  sample = Sample(seed)
  mechanism = sample.one(*PAGED)
  layout, requests, row_pages = PAGED[mechanism], sample.one(2, 4), 4
  heads, key_heads = sample.one((4, 2), (4, 4), (4, 1), (8, 4))
  width, page = sample.one(64, 128, 128, 96), sample.one(8, 16, 16, 4)
  dtype = sample.one("bfloat16", "bfloat16", "float16", "float32")
  scales = "token" if sample.maybe() else None
  mesh, groups, stripes = sample.one(
      (None, 1, None), (None, 2, None), ((2, 1, 1, 2, 1), 2, None), ((1, 1, 1, 2, 1), 1, None),
      ((1, 1, 1, 1, 2), 1, 2), ((2, 1, 1, 1, 2), 2, 2), ((1, 1, 1, 1, 2), 1, 3))
  queries = 1 if mechanism == "page_attention" or sample.maybe(0.5) else 3
  pool = groups * (stripes or 1) * requests * row_pages
  tables = np.tile(np.arange(requests * row_pages, dtype=np.int32).reshape(requests, row_pages),
                   (stripes or 1, 1, 1))
  one = PagesMetadata(tables if stripes else tables[0], np.full(requests, 2 * page, np.int32),
                      None if queries == 1 and layout is not PagesV3 and sample.maybe(0.5)
                      or mechanism == "page_attention"
                      else np.arange(requests + 1, dtype=np.int32) * queries)
  if one.query_start_loc is None:
    queries = 1
  grouped = groups > 1 or stripes
  cache = pages.init(layout, pool, page, Heads(key_heads, width, width),
                     "int8" if scales else dtype, scales)
  tokens = groups * requests * queries
  array = lambda heads: jax.ShapeDtypeStruct((tokens, heads, width), dtype)
  arguments = dict(
      layout="thd", mechanism=sample.one(mechanism, "auto"), cache_view=cache,
      cache_metadata=request_groups.stack(*[one] * groups) if grouped else one,
      metadata=sample.metadata(mesh_of(*mesh) if mesh else None), return_lse=sample.maybe())
  options = {"sliding_window": (9, 0), "softmax_aux": jnp.zeros(heads), "logits_soft_cap": 9.0,
             "precision": "highest"}
  arguments.update({name: value for name, value in options.items() if sample.maybe(0.15)})
  new = array(key_heads) if layout is PagesV3 else None
  return (array(heads), new, new), arguments


def raised(function):
  """Returns (the function's result, None), or (None, its error)."""
  try:
    return function(), None
  except (ValueError, NotImplementedError) as error:
    return None, error


class ExplainTest(parameterized.TestCase):
  seen = collections.Counter()

  def check(self, operands, arguments) -> str | None:
    """Compares a call's explanation with its program; returns the implementation."""
    leaves, structure = jax.tree.flatten(operands)
    said, said_error = raised(lambda: explain(*operands, **arguments))
    program, error = raised(lambda: jax.make_jaxpr(lambda *x: tuple(jax.tree.leaves(attention(
        *jax.tree.unflatten(structure, x), **arguments)._replace(cache_view=None))))(*leaves))
    if said is None:
      self.assertEqual((type(said_error), str(said_error)), (type(error), str(error)))
      return None
    if said.chosen is None:
      self.assertIsInstance(error, NotImplementedError, said)
      return None
    if error is not None:
      raise AssertionError(f"{said}\nand it raises") from error
    verdict, = (v for v in said.verdicts if v.mechanism == said.chosen)
    self.assertEmpty(verdict.reasons)
    found = names_in(program.jaxpr)
    self.assertLen(found, 1, said)
    self.assertContainsSubset(found, expected(verdict.kernel), said)
    return verdict.kernel

  @classmethod
  def tearDownClass(cls):
    super().tearDownClass()
    print("calls of each implementation:", dict(cls.seen))

  @parameterized.parameters(*range(8))
  def test_random_calls(self, part):
    for seed in range(40 * part, 40 * (part + 1)):
      with self.subTest(seed=seed):
        make = paged_call if seed % 4 == 3 else dense_call
        self.seen[self.check(*make(seed))] += 1

  @parameterized.parameters(
      (24, 2, "decode.xla", "a cache of 12 slots"), (32, 2, "decode.gpu", "goes before"),
      (16, 4, "decode.xla", "a cache of 4 slots"), (24, 1, "decode.gpu", "goes before"))
  def test_decode_over_sharded_keys(self, slots, shards, kernel, words):
    """Checks multiples of 8 slots: Hopper's kernel copies them from one device's shard."""
    shape = lambda length: jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16")
    metadata = OperationMetadata(platform="gpu", compute_capability="9.0",
                                 mesh=mesh_of(1, 1, 1, 1, shards))
    operands = shape(1), shape(slots), shape(slots)
    arguments = dict(mechanism="autoregressive_decodeattn", mode="__autoregressive__",
                     query_offset=slots - 1, metadata=metadata)
    self.assertEqual(self.check(operands, arguments), kernel)
    self.assertIn(words, str(explain(*operands, **arguments)))


if __name__ == "__main__":
  absltest.main()
