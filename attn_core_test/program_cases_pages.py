# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs over pages whose operations are recorded; see program_cases."""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesV1, PagesV2,
                       PagesV3, attention)
from attn_core.caches import pages, quantize
from attn_core.caches.paged import page_stripes, request_groups
from attn_core.kernels.gpu.split_kv import paged as gpu_paged
from attn_core.kernels.xla import paged_forward
from attn_core.mechanisms import paged as mechanism
from attn_core.types import PagedSpec
from attn_core_test import gpu_cases, paged_shard_cases
from attn_core_test.paged_cases import Case
from attn_core_test.program_cases import Program, Programs, derivatives

MECHANISMS = {PagesV1: "page_attention", PagesV2: "ragged_page_attention_v2",
              PagesV3: "ragged_page_attention_v3"}
CPU, TPU = OperationMetadata(platform="cpu"), OperationMetadata(platform="tpu")
INT8, FLOAT8 = ("int8", "token"), ("float8_e4m3fn", "tensor")


class Call(NamedTuple):
  """One call: the case, the layout of its pages, and how they are stored."""

  case: Case
  layout: type = PagesV2
  stored: tuple[str, str] | None = None  # dtype in 8 bits and kind of scales
  blocks: BlockSizes = BlockSizes(block_q=4, block_kv=16)
  precision: str | None = None
  traced: bool = True  # the metadata are arguments of the program
  chunk_size: int | None = None

  def program(self, metadata: OperationMetadata, gradients: bool = False) -> Program:
    """Returns the call on a platform, with derivatives or not."""
    case, o = self.case, self.case.options
    tokens = sum(case.queries) + case.rest
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))
    cache = jax.eval_shape(lambda: pages.init(
        self.layout, case.pool, case.page, Heads(case.K, case.D, case.D),
        *(self.stored or (case.dtype, None))))
    new = [array(tokens, case.K, case.D)] * 2 if self.layout is PagesV3 else [None, None]
    sinks = jax.ShapeDtypeStruct((case.H,), jnp.float32) if case.sinks else None
    table = case.metadata(single=self.layout is PagesV1)
    def run(arrays: tuple, table: Any = table) -> tuple[jax.Array, jax.Array]:
      query, key, value, cache, sinks = arrays
      output = attention(
          query, key, value, mechanism=MECHANISMS[self.layout], layout="thd", cache_view=cache,
          cache_metadata=table, softmax_aux=sinks, metadata=metadata, return_lse=True,
          block_sizes=self.blocks, causal=o.causal, sliding_window=o.sliding_window,
          logits_soft_cap=o.logits_soft_cap, softmax_scale=o.softmax_scale,
          precision=self.precision, chunk_size=self.chunk_size)
      return output.attention_outputs, output.lse
    arrays = (array(tokens, case.H, case.D), *new, cache, sinks)
    if gradients:
      return derivatives(run, arrays)
    if not self.traced:
      return Program(run, (arrays,))
    return Program(run, (arrays, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), table)))


_RAGGED = Case((9, 0, 17, 33, 24, 5), (9, 0, 5, 1, 1, 2), page=8, D=128, unused=1, sinks=True,
               options=PagedOptions(sliding_window=(11, 0), logits_soft_cap=2.0))
CALLS = {
    "ragged": Call(_RAGGED),
    "ragged of constant tables": Call(_RAGGED, traced=False),
    "16 bits many rows": Call(Case((47, 5), (31, 2), page=8, H=24, K=8, D=64, dtype="bfloat16"),
                              blocks=BlockSizes(block_q=32, block_kv=16)),
    "not causal wide": Call(Case((9, 20), (3, 5), page=8, H=2, K=1, D=256, rest=1,
                                 dtype="bfloat16", options=PagedOptions(causal=False))),
    "window both sides": Call(Case((9, 21), (9, 5), page=8, D=128, options=PagedOptions(
        sliding_window=(3, 2), causal=False, softmax_scale=-30.0))),
    "one query each": Call(Case((29, 0, 1, 17), (1,) * 4, page=4, H=6, K=3, rest=0,
                                dtype="bfloat16"), PagesV1, blocks=BlockSizes(block_kv=8)),
    "three heads of whole lanes": Call(
        Case((13, 6), (1, 1), page=8, H=3, K=3, D=128, rest=0)),
    "writes": Call(Case((20, 11, 3), (1, 1, 3), page=8, H=16, K=8, D=128, distribution=(2, 2, 3),
                        unused=1, dtype="bfloat16"), PagesV3),
    "writes 8 bits": Call(Case((13, 6), (4, 1), page=8, H=2, K=1), PagesV3, FLOAT8),
    "scales per token": Call(Case((19, 5), (3, 2), page=8, D=8), PagesV2, INT8),
    "words of four": Call(Case((19, 5), (1, 1), page=8, D=8, rest=0, sinks=True), PagesV1,
                          ("float8_e4m3fn", "token"), BlockSizes(block_kv=8)),
}
# In plain XLA alone.
ON_CPU = {
    "odd pages one head": Call(Case((13, 1), (7, 1), page=3, unused=3, rest=7, K=1)),
    "highest precision": Call(_RAGGED._replace(dtype="bfloat16"), precision="highest"),
    "blocks chosen": Call(_RAGGED, blocks=BlockSizes()),
    "float16": Call(_RAGGED._replace(dtype="float16")),
    "chunk": Call(Case((13, 21), (7, 1)), chunk_size=5),
}


def over_pages() -> Programs:
  """Attention over pages on every platform, and in plain XLA with its derivatives."""
  found = {}
  for name, call in {**CALLS, **ON_CPU}.items():
    found[f"xla {name}"] = call.program(CPU, gradients=call.stored is None)
  for name, call in CALLS.items():
    found[f"tpu {name}"] = call.program(TPU)
  for name, (operands, heads) in gpu_cases.paged().items():
    spec = gpu_cases.paged_spec(operands)
    run = lambda x, heads=heads, spec=spec: tuple(gpu_paged.forward(x, spec, heads, BlockSizes()))
    if name == "v2_score_mods_64" or not spec.has_score_mod:
      found[f"gpu {name}"] = Program(run, (operands,))
  operands, heads = gpu_cases.paged()["v2_pages_of_32_few_queries"]
  operands = operands._replace(sinks=jax.ShapeDtypeStruct((32,), jnp.float32))
  for name, spec in {"plain": PagedSpec(-0.1), "cap": PagedSpec(0.1, 3.0),
                     "both sides": PagedSpec(0.1, None, False, (70, 3))}.items():
    run = lambda x, spec=spec: tuple(gpu_paged.forward(x, spec, heads, BlockSizes(block_kv=128)))
    found[f"gpu sinks {name}"] = Program(run, (operands,))
  stripe = page_stripes.Stripe(*[jax.ShapeDtypeStruct((), jnp.int32)] * 3)
  operands = operands._replace(stripe=stripe, metadata=operands.metadata._replace(
      query_start_loc=None), query=jax.ShapeDtypeStruct((8, 32, 64), jnp.bfloat16))
  for name, forward in {"xla": paged_forward.forward, "gpu": mechanism.gpu_forward(),
                        "tpu": mechanism.tpu_forward()}.items():
    run = lambda x, forward=forward: tuple(forward(x, PagedSpec(0.1), heads, BlockSizes(8, 128)))
    found[f"{name} stripes"] = Program(run, (operands,))
  found["xla two groups"] = _of_groups(paged_shard_cases.Case(G=2), None)
  found["xla two groups of stripes"] = _of_groups(
      paged_shard_cases.Case(G=2), paged_shard_cases.mesh_of(dp=2, sp=2), stripes=2)
  call = ON_CPU["odd pages one head"].program(CPU, gradients=True)
  found["xla second derivatives"] = Program(
      lambda x, y: jax.jvp(lambda z: call.run(z, y), (x,), (x,))[1], call.arguments)
  found["xla vmap"] = Program(lambda x, y: jax.vmap(call.run)(x, y), jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), call.arguments))
  for name in ("heads_of_one_group", "writes", "writes_8_bits"):
    _, case, sizes = paged_shard_cases.CASES[name]
    run = functools.partial(paged_shard_cases.run, case, paged_shard_cases.mesh_of(**sizes))
    found[f"sharded {name}"] = Program(run, jax.eval_shape(case.arrays))
  return found


def _of_groups(case: paged_shard_cases.Case, mesh: Mesh | None,
               stripes: int | None = None) -> Program:
  """Returns a call with groups of requests, whose pages are striped or not."""
  metadata = case.metadata()
  if stripes:
    metadata = metadata._replace(page_tables=np.stack([metadata.page_tables] * stripes, 1))
  run = functools.partial(paged_shard_cases.run, case, mesh)
  return Program(lambda *x: run(*x[:-1], metadata=x[-1]), (
      *jax.eval_shape(case.arrays), metadata))


def operations() -> Programs:
  """Functions that write, read, convert and copy pages and caches."""
  found = {}
  for layout in MECHANISMS:
    for stored in (("float32", None), INT8, FLOAT8):
      name = f"{layout.__name__} {stored[0]}"
      for operation, program in _of_layout(layout, stored).items():
        found[f"{name} {operation}"] = program
  array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
  table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), Case().metadata())
  groups = request_groups.stack(*[Case().metadata()] * 2)
  found["slots"] = Program(lambda x: pages.slots(x, 4, 21), (table,))
  found["joined"] = Program(lambda x: request_groups.joined(x, 96), (groups,))
  found["whole"] = Program(lambda x: request_groups.whole(x, 96), (groups,))
  found["pool ids"] = Program(lambda x: request_groups.with_pool_ids(x, 96), (groups,))
  for name, function in {"held": page_stripes.held, "position": page_stripes.position_of}.items():
    run = lambda x, function=function: function(page_stripes.Stripe(*x[0]), x[1])
    found[f"stripes {name}"] = Program(run, ((
        [array(dtype="int32")] * 3, array(7, dtype="int32")),))
  for dtype in quantize.LIMITS:
    found[f"quantize {dtype}"] = Program(
        functools.partial(quantize.quantize, dtype=dtype), (array(2, 3, 5),))
    found[f"dequantize {dtype}"] = Program(
        quantize.dequantize, (array(2, 3, 5, dtype=dtype), array(2, 3)))
  return found


def _of_layout(layout: type, stored: tuple) -> dict[str, Program]:
  """Returns the operations on pages of a layout."""
  heads = Heads(2, 6, 6) if layout is not PagesV3 else Heads(3, 6, 6)
  cache = jax.eval_shape(lambda: pages.init(layout, 8, 4, heads, *stored))
  new = jax.ShapeDtypeStruct((5, heads.key_heads, 6), jnp.float32)
  whole = jax.ShapeDtypeStruct((3, 9, heads.key_heads, 6), jnp.float32)
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  table = pages.PagesMetadata(number(3, 3), number(3))
  programs: dict[str, tuple[Callable, tuple]] = {
      "append": (pages.append, (cache, new, new, number(5))),
      "copy_pages": (pages.copy_pages, (cache, number(2), number(2))),
      "take": (pages.take, (cache, number(2))),
      "to_dense": (lambda x, y: pages.to_dense(x, y, heads), (cache, table)),
      "from_dense": (pages.from_dense, (cache, whole, whole, table)),
      "read": (lambda x, y: pages.read(x, y, heads, jnp.float32), (cache, number(2)))}
  for other in MECHANISMS:
    if other is not layout:
      programs[f"to {other.__name__}"] = (
          functools.partial(pages.convert, layout=other, heads=heads), (cache,))
  return {name: Program(*x) for name, x in programs.items()}
