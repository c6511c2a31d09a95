# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain` names the implementation that is in the traced program, for random calls."""

import collections
import functools
import itertools
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
import numpy as np

from attn_core import (BlockSizes, OperationMetadata, PagesMetadata, PagesV2, attention, explain,
                       masks, score_mods, table)
from attn_core.caches import dense as dense_cache, pages
from attn_core.dispatch import dequantized
from attn_core.kernels.common.contract import Kernel, Residuals
from attn_core.kernels.gpu.flash import kernel as gpu_flash
from attn_core.kernels.gpu.split_kv import decode as gpu_decode, paged as gpu_paged
from attn_core.kernels.tpu.flash import kernel as tpu_flash
from attn_core.kernels.tpu.ragged import decode as tpu_decode, paged as tpu_paged
from attn_core.kernels.xla import decode, dense, flash, paged_forward, plain
from attn_core.mechanisms import flash as flash_mechanism
from attn_core.types import AttentionSpec, Operands
from attn_core_test import code_measures, program_text, random_calls

jax.config.update("jax_num_cpu_devices", 8)

CALLS = 480  # random ones
MARK = "ran:"

# The kernel of each implementation that goes through `autodiff.primitives`.
KERNELS = {
    "flash.xla": flash.KERNEL, "flash.tpu": flash_mechanism.tpu_kernel(),
    "flash.gpu": flash_mechanism.gpu_kernel(), "decode.xla": decode.KERNEL,
    "decode.tpu": tpu_decode.make_kernel(decode.KERNEL),
    "decode.gpu": gpu_decode.make_kernel(decode.KERNEL),
    "decode.dequantized": flash.KERNEL, "decode.dequantized_tpu": flash_mechanism.tpu_kernel(),
    "decode.dequantized_gpu": flash_mechanism.gpu_kernel(),
    # The kernel is the same whether latent rows are projected or absorbed.
    "latent.projected": flash.KERNEL, "latent.absorbed": flash.KERNEL,
    "latent.projected_tpu": flash_mechanism.tpu_kernel(),
    "latent.projected_gpu": flash_mechanism.gpu_kernel(),
    "latent.decode": decode.KERNEL, "latent.decode_tpu": tpu_decode.make_kernel(decode.KERNEL),
    "latent.decode_gpu": gpu_decode.make_kernel(decode.KERNEL),
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


def _writing_stub(operands, spec, heads, block_sizes) -> tuple:
  """Returns `_paged_stub`, and the pages as they were."""
  return _paged_stub(operands, spec, heads, block_sizes), operands.cache


def _dot_product_attention(original, *args, implementation, **kwargs):
  """Calls JAX's function by XLA, since cuDNN cannot be asked for shapes everywhere."""
  del implementation
  return original(*args, implementation="xla", **kwargs)


PATCHES = (
    mock.patch.object(dense, "attend", _marked(dense.attend, "dense.vanilla")),
    mock.patch.object(jax.nn, "dot_product_attention", _marked(
        functools.partial(_dot_product_attention, jax.nn.dot_product_attention),
        lambda kwargs: f"sdpa.{kwargs['implementation']}")),
    mock.patch.object(tpu_paged, "forward_writing", _marked(_writing_stub, "paged.tpu")),
    # The random calls over caches have one query or three.
    mock.patch.object(dequantized, "MANY_QUERIES", 1),
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


def names_in(jaxpr: Any) -> set[str]:
  """Returns the implementations, or the names of their kernels, that a program runs."""
  found = set()
  for equation in program_text.equations(jaxpr):
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
  if implementation.startswith("latent.pages"):  # by the kernel of all pages
    place = implementation.removeprefix("latent.pages").removeprefix("_")
    return {f"paged.{place or 'xla'}"}
  if implementation == "dense.vanilla":
    return {implementation, plain.KERNEL.name}
  return {implementation.removesuffix("_writing")}


def unsharded(metadata: OperationMetadata) -> OperationMetadata:
  """The metadata without a mesh, whatever the current one is."""
  return metadata.replace(mesh=AbstractMesh((), ()))


def unknown_gpu(metadata: OperationMetadata) -> OperationMetadata:
  """The metadata without a compute capability."""
  return metadata.replace(compute_capability=None)


def raised(function):
  """Returns (the function's result, None), or (None, its error)."""
  try:
    return function(), None
  except (AssertionError, ValueError, NotImplementedError) as error:
    return None, error


class Traced(NamedTuple):
  """A traced call of `attention`."""

  names: set[str]  # as `names_in` finds them; empty where it raises
  error: Exception | None


def traced(operands: tuple, arguments: dict[str, Any]) -> Traced:
  """Traces a call."""
  leaves, structure = jax.tree.flatten(operands)
  program, error = raised(lambda: jax.make_jaxpr(lambda *x: tuple(jax.tree.leaves(attention(
      *jax.tree.unflatten(structure, x), **arguments)._replace(cache_view=None))))(*leaves))
  return Traced(set() if program is None else names_in(program.jaxpr), error)


# Several tests are about the same random calls, each of which takes 50 ms to trace and explain.
random_call = functools.cache(random_calls.make)


@functools.cache
def traced_random(seed: int) -> Traced:
  call = random_call(seed)
  with call.context():
    return traced(call.operands, call.arguments)


def explained(seed: int) -> tuple[Any, Exception | None]:
  """Returns what `explain` says about a random call, or its error."""
  call = random_call(seed)
  with call.context():
    return raised(lambda: explain(*call.operands, **call.arguments))


# By `explain` itself; tests replace it elsewhere.
explained_once = functools.cache(explained)


class ExplainTest(parameterized.TestCase):

  def check(self, said, said_error, program: Traced) -> str | None:
    """Compares an explanation, or its error, with the program; returns the implementation."""
    error = program.error
    if said is None:
      self.assertEqual((type(said_error), str(said_error)), (type(error), str(error)))
      return None
    if said.chosen is None:
      self.assertIsInstance(error, NotImplementedError, said)
      self.assertEmpty(said.spread)
      return None
    if error is not None:
      raise AssertionError(f"{said}\nand it raises") from error
    verdict, = (v for v in said.verdicts if v.mechanism == said.chosen)
    self.assertEmpty(verdict.reasons)
    self.assertLen(program.names, 1, said)
    self.assertContainsSubset(program.names, expected(verdict.kernel), said)
    return verdict.kernel

  @parameterized.parameters(*range(10))
  def test_random_calls(self, part):
    for seed in range(CALLS * part // 10, CALLS * (part + 1) // 10):
      with self.subTest(seed=seed):
        self.check(*explained_once(seed), traced_random(seed))

  def test_calls_have_every_dimension_and_kernel(self):
    """Prints how many of the random calls have each value of each dimension, and each kernel."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for seed in range(CALLS):
      for dimension, value in random_call(seed).choices:
        counts[dimension][value] += 1
      said, error = explained_once(seed)
      if said is None:
        counts["answer"][type(error).__name__] += 1
      elif said.chosen is None:
        counts["answer"]["none runs"] += 1
      else:
        counts["answer"]["one runs"] += 1
        verdict, = (v for v in said.verdicts if v.mechanism == said.chosen)
        counts["kernel"][verdict.kernel] += 1
        counts["sharded"].update(line.partition(" over ")[0] for line in said.spread)
    for dimension, found in counts.items():
      print(f"{code_measures.MARK}{dimension}: "
            + ", ".join(f"{value} {count}" for value, count in found.most_common()))
    kernels = {candidate.name for row in table.TABLE.values() for candidate in row.chain}
    self.assertEqual(set(counts["kernel"]), kernels)
    self.assertEqual(set(counts["sharded"]), {
        "rows of the batch", "groups of requests", "query heads", "key heads", "keys",
        "the sequence"})
    # The same calls are projected, or dequantized, by one kernel for each platform: they count
    # together.
    for name, suffix in itertools.product(("latent.projected", "decode.dequantized"),
                                          ("_tpu", "_gpu")):
      counts["kernel"][name] += counts["kernel"].pop(f"{name}{suffix}")
    rare = {f"{dimension}: {value}": count for dimension, found in counts.items()
            for value, count in found.items() if count < 3}
    self.assertEmpty(rare)
    self.assertGreater(counts["answer"]["one runs"], CALLS // 2)

  @parameterized.parameters(unsharded, unknown_gpu)
  def test_a_wrong_explanation_fails(self, forget):
    """An explanation that ignores a part of the metadata does not pass."""
    def wrong(*operands, metadata, **arguments):
      return right(*operands, metadata=forget(metadata), **arguments)
    right, failed = explain, 0
    for seed in range(CALLS // 4):
      with mock.patch.dict(globals(), explain=wrong):
        found = explained(seed)
      _, error = raised(functools.partial(self.check, *found, traced_random(seed)))
      failed += error is not None
    print(f"{code_measures.MARK}an explanation of the {forget.__name__} call fails {failed} of "
          f"{CALLS // 4} calls")
    self.assertGreater(failed, 3)

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
    said = explain(*operands, **arguments)
    self.assertEqual(self.check(said, None, traced(operands, arguments)), kernel)
    self.assertIn(words, str(explain(*operands, **arguments)))
    # No answer depends on who was asked before.
    for mechanism in ("auto", "vanilla", "ring"):
      found = explain(*operands, **arguments | {"mechanism": mechanism}).verdicts
      self.assertEqual([*map(str, found)], [*map(str, explain(*operands, **arguments).verdicts)])

  @parameterized.parameters(
      ("gpu", "9.0", BlockSizes(block_q=16)), ("gpu", "9.0", BlockSizes(block_heads=2)),
      ("tpu", None, BlockSizes(block_kv=16)), ("tpu", None, BlockSizes(block_heads=2)),
      ("cpu", None, BlockSizes(block_heads=3)))
  def test_block_sizes_that_the_kernel_refuses(self, platform, capability, block_sizes):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), "bfloat16")
    arguments = dict(block_sizes=block_sizes, mechanism="flash_attn2", metadata=OperationMetadata(
        platform=platform, compute_capability=capability))
    with self.assertRaises(ValueError) as explained:
      explain(x, x, x, **arguments)
    with self.assertRaises(ValueError) as run:
      jax.eval_shape(lambda x: attention(x, x, x, **arguments), x)
    self.assertEqual(str(explained.exception), str(run.exception))


class DerivativesTest(parameterized.TestCase):
  """`Explanation.derivatives`, compared with what kernels call."""

  @parameterized.parameters("flash.tpu", "flash.gpu", "decode.tpu", "decode.gpu")
  def test_what_plain_xla_computes_for_other_kernels(self, name):
    row, = {candidate for row in table.TABLE.values() for candidate in row.chain
            if candidate.name == name}
    general = "decode.xla" if name.startswith("decode") else "flash.xla"
    base, asked = KERNELS[general], []
    def backward(operands, *args):
      asked.append(args[-1])
      return tuple(getattr(operands, x) for x in args[-1])
    make = {"flash.tpu": tpu_flash.make_kernel, "flash.gpu": gpu_flash.make_kernel,
            "decode.tpu": tpu_decode.make_kernel, "decode.gpu": gpu_decode.make_kernel}[name]
    made = make(base._replace(backward=backward))
    self.assertIs(made.tangent, base.tangent)
    self.assertEqual(row.derivatives.tangent or "flash.xla", "flash.xla")
    if row.derivatives.gradient is not None:  # all by plain XLA
      self.assertEqual(row.derivatives.gradient, "flash.xla")
      self.assertIs(made.backward, backward)
      return
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 2, 256, 256), "bfloat16")
    def run(query, bias, lse):
      operands = Operands(query, query, query, bias=bias)
      spec = AttentionSpec(mask=jax.tree.structure(masks.causal()), softmax_scale=0.125)
      return made.backward(operands, spec, BlockSizes(), Residuals(query, lse),
                           Residuals(query, lse), ("query", "key", "value", "bias"))
    jax.eval_shape(run, x, bias, jax.ShapeDtypeStruct((1, 2, 256), "float32"))
    self.assertEqual(asked, [("bias",)] if row.derivatives.added else [])

  def test_decoding_in_plain_xla_has_the_block_wise_gradient(self):
    for kind, others in (("backward", 5), ("tangent", 4)):
      with mock.patch.object(flash, kind, return_value=kind) as called:
        operands = mock.Mock(key_scale=None, value_scale=None)
        self.assertEqual(getattr(decode, kind)(operands, *[None] * others), kind)
        called.assert_called_once()

  @parameterized.parameters(
      (dict(platform="tpu"), {}, "flash.tpu", "flash.xla", "linear", None),
      (dict(platform="tpu"), dict(bias=True), "flash.tpu", "flash.xla", "linear",
       ("flash.xla", ("bias",))),
      (dict(platform="tpu"), dict(score_mod=True), "flash.tpu", "flash.xla", "linear", None),
      (dict(platform="tpu"),
       dict(score_mod=score_mods.dense(np.zeros((1, 2, 256, 256), "float32"))), "flash.tpu",
       "flash.xla", "linear", ("flash.xla", ("score_mods.dense",))),
      (dict(platform="tpu"), dict(score_mod=True, mechanism="blockwise"), "flash.xla", "flash.xla",
       "linear", None),
      (dict(platform="gpu", compute_capability="9.0"), dict(bias=True), "flash.gpu", "flash.xla",
       "linear", None),
      (dict(platform="gpu", compute_capability="9.0"),
       dict(score_mod=score_mods.by_distance(np.zeros((3, 2), "float32"))), "flash.gpu",
       "flash.xla", "linear", None),
      (dict(platform="gpu", compute_capability="8.0"), {}, "sdpa.cudnn", None, "linear", None),
      (dict(platform="cpu"), dict(return_weights=True), "dense.vanilla", "dense.vanilla",
       "quadratic", None))
  def test_of_calls(self, metadata, arguments, gradient, tangent, memory, added):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 2, 256, 256), "bfloat16")
    arrays = dict(bias=bias, score_mod=score_mods.alibi(jnp.ones(2)))
    arguments = {name: arrays[name] if value is True and name in arrays else value
                 for name, value in arguments.items()}
    said = explain(x, x, x, metadata=OperationMetadata(**metadata), **arguments)
    self.assertEqual(tuple(said.derivatives), (gradient, tangent, memory, added, "", True))
    self.assertIn(f"backward by {gradient}", str(said))
    second = ("none; mechanism='blockwise' has them" if tangent is None else
              f"by {tangent}, in {memory} memory, forward and reverse mode in any order")
    self.assertIn(f"\n  second derivatives: {second}", str(said))

  @parameterized.parameters("vanilla", "blockwise", "autoregressive_decodeattn",
                            "ragged_page_attention_v2")
  def test_second_derivatives_in_every_mixture(self, mechanism):
    x, arguments = jnp.ones((2, 3, 2, 8)), dict(mechanism=mechanism)
    if mechanism == "autoregressive_decodeattn":
      x, arguments["cache_view"] = x[:, :1], dense_cache.init(2, 8, (2, 8), dtype=x.dtype)
    elif mechanism == "ragged_page_attention_v2":
      x = x[:, 0]
      arguments |= dict(layout="thd", cache_view=pages.init(PagesV2, 8, 4, (2, 8), x.dtype),
                        cache_metadata=PagesMetadata([[0, 1], [2, 3]], [5, 4], [0, 1, 2]))
    elif mechanism == "blockwise":
      arguments["block_sizes"] = BlockSizes(block_q=2)  # else computed in one piece
    keys = lambda x: (None, None) if "cache_view" in arguments else (x, x)
    loss = lambda x: jnp.sin(attention(x, *keys(x), **arguments).attention_outputs).sum()
    move = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]
    second = {"forward over forward": move(move(loss)),
              "forward over reverse": move(jax.grad(loss)),
              "reverse over reverse": jax.grad(lambda x: (jax.grad(loss)(x) * x).sum()),
              "reverse over forward": jax.grad(move(loss))}
    said = explain(x, *keys(x), **arguments)
    for name, f in second.items():
      if said.derivatives.reverses_twice or not name.startswith("reverse"):
        jax.make_jaxpr(f)(x)
      else:
        self.assertIn("forward mode over forward or reverse mode", str(said))
        with self.assertRaisesRegex(ValueError, "Reverse-mode"):
          jax.make_jaxpr(f)(x)

  def test_none(self):
    x = jnp.ones((1, 8, 2, 16))
    arguments = dict(mechanism="sdpa", return_lse=True)
    said = explain(x, x, x, **arguments)
    self.assertIsNone(said.derivatives.gradient)
    self.assertIn("derivatives: none, JAX drops the cotangent of the lse", str(said))
    with self.assertRaisesRegex(NotImplementedError, "cotangent"):
      jax.grad(lambda x: attention(x, x, x, **arguments).attention_outputs.sum())(x)
    refused = explain(x, x, x, mechanism="sdpa", dropout_prob=0.1, dropout_rng=jax.random.key(0))
    self.assertIsNone(refused.derivatives)

  def test_names_are_rows(self):
    rows = {candidate for row in table.TABLE.values() for candidate in row.chain}
    for row in rows:
      for name in row.derivatives[:3]:
        self.assertIn(name, {None, *(other.name for other in rows)})


if __name__ == "__main__":
  absltest.main()
