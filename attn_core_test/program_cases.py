# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs whose operations are recorded: every form of every kernel, by shapes alone.

Each is chosen for what switches the code of a kernel: a mask, a feature, a width, a dtype or a
number of blocks. Nothing is compiled or run.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, attention, create_mesh, masks,
                       table)
from attn_core_test import decode_cases, gpu_cases, property_cases, ring_cases, tpu_cases


class Program(NamedTuple):
  """A function and its arguments, or their shapes."""

  run: Callable[..., Any]
  arguments: tuple


Programs = dict[str, Program]
CPU = OperationMetadata(platform="cpu")
BLOCKS = BlockSizes(4, 3, 5, 4, 1)


def derivatives(run: Callable[[Any], tuple[jax.Array, jax.Array]], arrays: Any,
                forward_mode: bool = True) -> Program:
  """Returns a program of a value, its gradient and its tangent; run: arrays -> (out, lse)."""
  def loss(arrays: Any) -> Any:
    out, lse = run(arrays)
    return out.astype(jnp.float32).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)
  def everything(arrays: Any, moves: Any) -> Any:
    tangent = jax.jvp(run, (arrays,), (moves,))[1] if forward_mode else None
    return jax.grad(loss, has_aux=True)(arrays), tangent
  return Program(everything, (arrays, arrays))


def second_derivatives(run: Callable[[Any], tuple[jax.Array, jax.Array]], arrays: Any) -> Program:
  """Returns a program of the tangents of a gradient and of a tangent."""
  def twice(arrays: Any, moves: Any) -> Any:
    gradient = jax.grad(lambda x: run(x)[0].astype(jnp.float32).sum())
    tangent = lambda x: jax.jvp(run, (x,), (moves,))[1]
    mixed = jax.grad(lambda x: sum(y.astype(jnp.float32).sum() for y in tangent(x)))
    twice = lambda x: jax.jvp(tangent, (x,), (moves,))[1]
    return mixed(arrays), [jax.jvp(f, (arrays,), (moves,))[1] for f in (gradient, twice)]
  return Program(twice, (arrays, arrays))


def gpu() -> Programs:
  """Forward and backward for Hopper, and decoding from dense caches."""
  found = {}
  wide = {name: gpu_cases.FEATURES[name]._replace(
      B=2, T=gpu_cases.LENGTH, H=gpu_cases.HEADS, K=gpu_cases.HEADS // 2, D=128)
          for name in ("everything", "chunk", "chunk_of_any_size", "positions", "bias_row")}
  for name, case in {**gpu_cases.INTERPRETED, **wide}.items():
    found[f"forward {name}"] = Program(case.forward, (case.shapes,))
  del wide["positions"], wide["chunk_of_any_size"]
  for name, case in {**gpu_cases.GRADIENTS, **wide}.items():
    if name not in ("empty_rows", "width_96_float16", "causal_odd_length"):
      found[f"backward {name}"] = Program(case.backward, _residuals(case))
  for name, case in gpu_cases.BIASES.items():
    run = lambda *arrays, case=case: case.backward(*arrays, ("bias",))
    found[f"bias {name}"] = Program(run, _residuals(case))
  decoded = gpu_cases.decoded()
  for name in ("width_64", "width_256_int8", "width_64_float8", "group_of_16_float8",
               "group_of_32_soft_cap_sinks_float16"):
    found[f"decode many {name}"] = _decoded(decoded[name])
  for name, case in gpu_cases.DECODED.items():
    if name in ("score_mods", "score_mods_of_rows_and_heads") or case.mod is None:
      found[f"decode {name}"] = _decoded(case)
  _, arrays, run = gpu_cases.property_call("everything")
  found["attention everything"] = derivatives(run, _shapes(arrays))
  run = functools.partial(decode_cases.decoded, _SPLIT, metadata=gpu_cases.HOPPER)
  found["attention decode"] = derivatives(run, decode_cases.shapes(_SPLIT, "bfloat16", None)[0])
  return found


_SPLIT = decode_cases.Case((300, 0, 9), S=304, D=64, E=64, logits_soft_cap=1.5, sinks=True,
                           block=None)


def _decoded(case: gpu_cases.Case) -> Program:
  return Program(case.decode, (case.shapes,))


def _residuals(case: gpu_cases.Case) -> tuple:
  """Returns shapes of what a backward reads: operands, residuals and cotangents."""
  residuals = case.residual_shapes
  return case.shapes, residuals, residuals


# Cases of the TPU kernels whose features are all in another case here.
IN_EVERYTHING = ("window", "empty_rows", "segments", "soft_cap", "sinks", "bias", "dropout",
                 "lengths", "causal_odd_length")


def tpu() -> Programs:
  """Forward and backward for TPUs, and decoding from dense caches."""
  found = {}
  for name, case in tpu_cases.CASES.items():
    if name in IN_EVERYTHING:
      continue
    found[f"flash {name}"] = derivatives(case.call, case.shapes(), False)
  ids = np.repeat(np.array([[0, 1], [2, -1]], np.int32), 100, 1)
  everything = tpu_cases.Case(
      dict(mask_info=MaskInfo.from_segments(ids), sliding_window=(50, 0), logits_soft_cap=3.0,
           softmax_scale=-0.3, dropout_prob=0.3, dropout_rng=tpu_cases.KEY, deterministic=False),
      B=2, T=200, H=2, K=1, D=32, E=16, blocks=BlockSizes(256, 256, 256, 256),
      floats={"bias": (1, 2, 200, 200), "softmax_aux": (2,)})
  for dtype in ("float32", "bfloat16"):
    case = everything._replace(dtype=dtype)
    found[f"flash everything {dtype}"] = derivatives(
        case.call, case.shapes(), False)
  case = tpu_cases.CASES["bfloat16"]  # without a gradient outputs and sums are rounded otherwise
  found["flash forward bfloat16"] = Program(case.call, (case.shapes(),))
  traced = tpu_cases.Case({}, B=2, T=700, H=2, K=1)
  run = lambda arrays, ids: attention(
      **arrays, mechanism="flash_attn2", metadata=tpu_cases.TPU, mask_info=MaskInfo.from_segments(
          ids), return_lse=True)[:4]
  for B, T in ((2, 700), (1, 2**18)):
    case = traced._replace(B=B, T=T, blocks=None if B == 1 else tpu_cases.BLOCKS)
    found[f"flash traced_segments {B} {T}"] = Program(
        run, (case.shapes(), jax.ShapeDtypeStruct((B, T), jnp.int32)))
  for name, (case, dtype, stored, _) in decode_cases.ON_TPU.items():
    run = functools.partial(decode_cases.from_cache, case, metadata=tpu_cases.TPU)
    found[f"decode {name}"] = Program(run, decode_cases.shapes(case, dtype, stored))
  return found


# Mechanism -> property cases that switch its code.
ON_CPU = {
    "blockwise": ("everything", "dense_mask_per_head", "sinks_several_empty_rows",
                  "dropout_at_positions", "bias_and_mask", "custom_predicate",
                  "layout_thd_other_keys", "one_query_one_key"),
    "vanilla": ("everything", "one_key", "unnormalized", "soft_cap", "custom_predicate"),
    "sdpa": ("causal_gqa", "window_both_sides", "window_left_inclusive", "lengths",
             "bias_full", "bias_and_mask", "padding_mask", "segments_with_padding"),
    "autoregressive_decodeattn": ("one_query_bottom_right", "dense_mask_per_head",
                                  "sinks_several_empty_rows", "custom_predicate", "unnormalized")}
# More arguments of `attention` that switch code -> mechanism.
MORE = (("vanilla", dict(precision="highest")),
        ("vanilla", dict(return_weights=True)), ("blockwise", dict(compute_dtype="bfloat16")),
        ("autoregressive_decodeattn", dict(precision="high")))


def on_cpu(case: property_cases.Case, mechanism: str, **more: Any) -> Callable:
  """Returns a property case by a mechanism in plain XLA: arrays -> (out, lse)."""
  arguments = dict(case.arguments, mechanism=mechanism, return_lse=True, **more)
  arguments.setdefault("metadata", CPU)
  if "block_sizes" in table.TABLE[mechanism, "cpu"].general.features:
    arguments["block_sizes"] = BLOCKS
  if mechanism == "sdpa":
    del arguments["return_lse"]
  def run(arrays: dict) -> tuple[jax.Array, jax.Array]:
    output = attention(**arguments, **arrays)
    lse = jnp.zeros(()) if output.lse is None else output.lse
    return output.attention_outputs, lse
  return run


def xla() -> Programs:
  """Mechanisms in plain XLA with all their derivatives, and under vmap."""
  found = {}
  shapes = lambda case, dtype="float32": jax.eval_shape(
      lambda: property_cases.operands(case, dtype))
  for mechanism, names in ON_CPU.items():
    for name in names:
      case = property_cases.BY_NAME[name]
      found[f"{mechanism} {name}"] = derivatives(on_cpu(case, mechanism), shapes(case))
  everything = property_cases.BY_NAME["everything"]
  plain = property_cases.BY_NAME["causal_gqa"]
  for mechanism in ("blockwise", "vanilla"):
    if mechanism == "vanilla":
      found["vanilla everything bfloat16"] = derivatives(
          on_cpu(everything, mechanism), shapes(everything, "bfloat16"))
    found[f"{mechanism} forward bfloat16"] = Program(
        on_cpu(everything, mechanism), (shapes(everything, "bfloat16"),))
    found[f"{mechanism} second derivatives"] = second_derivatives(
        on_cpu(plain, mechanism), shapes(plain))
    run = on_cpu(plain, mechanism)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), shapes(plain))
    found[f"{mechanism} vmap"] = derivatives(jax.vmap(run), stacked)
  for name, mapped in (("everything", ("bias", "softmax_aux")), ("dense_mask_per_head", ("key",))):
    case = property_cases.BY_NAME[name]
    run = jax.vmap(on_cpu(case, "blockwise"), ({x: 0 if x in mapped else None for x in shapes(
        case)},))
    found[f"blockwise vmap {name}"] = derivatives(run, {
        x: jax.ShapeDtypeStruct((3, *y.shape), y.dtype) if x in mapped else y
        for x, y in shapes(case).items()})
  run = lambda arrays, numbers: jax.vmap(lambda n: on_cpu(plain, "blockwise", mask=masks.custom(
      lambda b, h, q, k, n: q + k + b < n[0], n))(arrays))(numbers)
  found["blockwise vmap of a predicate"] = Program(
      run, (shapes(plain), jax.ShapeDtypeStruct((3, 1), jnp.int32)))
  metadata = CPU.replace(mesh=create_mesh((1, 1, 1, 1, 8)))
  run = functools.partial(decode_cases.decoded, decode_cases.SHARDED, metadata=metadata)
  found["decode sharded"] = derivatives(run, jax.eval_shape(functools.partial(
      decode_cases.arrays, decode_cases.SHARDED, "float32")))
  found["vanilla everything float16"] = derivatives(
      on_cpu(everything, "vanilla"), shapes(everything, "float16"))
  case = decode_cases.ON_TPU["int8"][0]
  operands, cache = decode_cases.shapes(case, "float32", "int8")
  run = lambda operands, cache: jax.grad(lambda x: decode_cases.from_cache(
      case, x, cache, metadata=CPU)[0].sum())(operands)
  found["decode int8 derivatives"] = Program(run, (operands, cache))
  for mechanism, more in MORE:
    name, = more
    found[f"{mechanism} {name}"] = derivatives(
        on_cpu(plain, mechanism, **more), shapes(plain, "bfloat16"))
  for name in ("window", "soft_cap_and_sinks", "one_head", "every_query_head_has_its_own",
               "many_rows", "one_block", "large_blocks"):
    case = decode_cases.CASES[name]
    arrays = jax.eval_shape(functools.partial(decode_cases.arrays, case, "float32"))
    found[f"decode {name}"] = derivatives(
        functools.partial(decode_cases.decoded, case, metadata=CPU), arrays)
  for name, (case, dtype, stored, _) in decode_cases.ON_TPU.items():
    run = functools.partial(decode_cases.from_cache, case, metadata=CPU)
    found[f"decode cache {name}"] = Program(run, decode_cases.shapes(case, dtype, stored))
  return found


# name -> (case, variant, order of tokens, more fields of the metadata)
RINGS = {
    "everything": ("everything", "ring", "contiguous", {}),
    "padded unrolled": ("padded", "ring", "contiguous", {"scan_ring_attention": False}),
    "everything all_gather": ("everything", "all_gather", "contiguous", {}),
    "everything ulysses": ("everything", "ulysses", "contiguous", {}),
    "everything hybrid": ("everything", "hybrid", "zigzag", {}),
    "positions": ("positions", "ring", "striped", {}),
    "padded": ("padded", "ring", "contiguous", {}),
    "padded all_gather": ("padded", "all_gather", "contiguous", {})}


def ring() -> Programs:
  """Rings in plain XLA, and for TPUs with kernels that send keys and values."""
  found = {}
  for name, (case, variant, layout, fields) in RINGS.items():
    case = getattr(ring_cases, case)()
    metadata = ring_cases.metadata_of(variant, layout, platform="cpu", **fields)
    found[name] = derivatives(case.run(metadata, ring_cases.SHARDS), _shapes(case.floats))
  for variant, layout in (("ring", "contiguous"), ("hybrid", "contiguous")):
    case = (ring_cases.everything if variant == "ring" else ring_cases.padded)()
    metadata = ring_cases.metadata_of(variant, layout, platform="tpu")
    metadata = metadata.replace(ring=metadata.ring._replace(transfer="remote"))
    run = case.run(metadata, ring_cases.SHARDS, BlockSizes())
    found[f"tpu {variant}"] = derivatives(run, _shapes(case.floats), False)
  return found


def _shapes(arrays: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
