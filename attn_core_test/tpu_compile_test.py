# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels compiled ahead of time, without a chip."""

import itertools
import unittest
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np

from attn_core import OperationMetadata, attention
from attn_core.benchmark.static import profile as static_profile
from attn_core.kernels.tpu.flash import call, tiling
from attn_core_test import sampling
from attn_core_test.tpu_cases import CASES, Case, compiled_for

KINDS = {"full": {"causal": False}, "causal": {"causal": True},
         "window": {"sliding_window": (511, 0)}}
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


def compiled():
  """Yields (chip, dtype, D, E, kind of mask) of the programs to compile.

  Every dtype of every width for one chip, with chips and kinds of masks in turns, and the program
  that needs most memory for the chip with the least. The slow ones are every chip and kind of mask
  for each of them, which take an hour.
  """
  for (i, chip), (n, dtype), (j, (d, e)) in itertools.product(
      enumerate(static_profile.CHIPS), enumerate(("bfloat16", "float32")), enumerate(WIDTHS)):
    kinds = {kind for kind in KINDS if sampling.chosen(f"{chip} {dtype} {d} {e} {kind}")}
    if (i + j + 2 * n) % len(static_profile.CHIPS) == 0:
      kinds.add(tuple(KINDS)[(j + n) % len(KINDS)])
    if (chip, d) == ("tpu7x", 256):
      kinds.add("full")
    for kind in sorted(kinds):
      yield chip, dtype, d, e, kind


@unittest.skipIf(static_profile.missing(), f"nothing to compile with: {static_profile.missing()}")
class CompileTest(parameterized.TestCase):

  def compile(self, chip, case, rows=None, in_hbm=True):
    """Compiles values and gradients of a case, or of one like it with many batch rows.

    Args:
      chip: its name.
      case: what is computed.
      rows: number of batch rows; None: those of the case.
      in_hbm: whether small arrays are kept in HBM like large ones, so that the kernels copy blocks
        of all of them. From vector memory they read some without a copy, and need less.
    """
    placement = SingleDeviceSharding(static_profile.devices(chip)[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
        (jax.eval_shape(case.arrays), {}) if rows is None else case.shapes_of_rows(rows))
    def both(arrays, masks):
      out, pull = jax.vjp(lambda arrays: case.call({**arrays, **masks}), arrays)
      return pull(out)
    limits: list[int] = []
    def vmem_limit(*arguments, **keywords):
      limits.append(int(tiling.SLACK * tiling.needed_vmem(
          arguments[1], arguments[2], keywords["backward"])))
      return limit(*arguments, **keywords)
    limit = tiling.vmem_limit
    most = 0 if in_hbm else call.MOST_VMEM_BYTES
    with mock.patch.object(tiling, "vmem_limit", vmem_limit), mock.patch.object(
        call, "MOST_VMEM_BYTES", most):
      text = jax.jit(both).trace(*shapes).lower(lowering_platforms=("tpu",)).compile().as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)
    # The compiler's count of vector memory; XLA places small outputs there by itself, uncounted.
    used = max(static_profile.kernel_memory(text).values())
    self.assertBetween(used, max(limits) // 5 if in_hbm else 1, max(limits))

  @parameterized.named_parameters(("_".join(map(str, case)), *case) for case in compiled())
  def test_widths(self, chip, dtype, width, value_width, kind):
    tokens = tiling.WHOLE_KEYS[kind == "full"]
    self.compile(chip, Case(KINDS[kind], T=tokens, D=width, E=value_width, dtype=dtype,
                            blocks=None))

  @parameterized.parameters(
      [chip] for chip in static_profile.CHIPS
      if chip == "tpu7x" or sampling.chosen(f"long {chip}"))
  def test_long(self, chip):
    self.compile(chip, Case(KINDS["causal"], T=tiling.LONG_KEYS, D=128, dtype="bfloat16",
                            blocks=None))

  @parameterized.named_parameters(
      *((name, name) for name in CASES), ("segments_512_rows", "segments", 512),
      *((f"{name}_512_rows", name, 512) for name in CASES
        if name != "segments" and sampling.chosen(f"{name} 512 rows")))
  def test_features(self, name, rows=None):
    """Compiles what is interpreted elsewhere, in rotation for every chip and configuration."""
    chip, precision = compiled_for(name)
    # The kernels use 32 bits all the same.
    with jax.enable_x64(True), jax.default_matmul_precision(precision):
      self.compile(chip, CASES[name], rows)

  @parameterized.parameters(*sampling.with_slow(("gqa_batch", "segments"), *(
      name for name in CASES if name not in ("gqa_batch", "segments"))))
  def test_small_arrays_in_vector_memory(self, name):
    jax.clear_caches()  # of the programs of `test_features`
    self.compile(compiled_for(name)[0], CASES[name], in_hbm=False)

  @parameterized.parameters(
      *sampling.with_slow((("v5e", None), ("v5p", True), ("v5e", False)),
                          ("v5p", None), ("v5e", True), ("v5p", False)))
  def test_four_chips(self, chip, check_vma):
    """Compiles under the library's shard_map (check_vma None) or the caller's."""
    mesh = Mesh(np.array(static_profile.devices(chip)).reshape(2, 2), ("dp", "tp"))
    spec = P("dp", None, "tp")
    x = jax.ShapeDtypeStruct((4, 512, 8, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    metadata = OperationMetadata(platform="tpu", mesh=mesh if check_vma is None else None)
    def run(q, k, v):
      return jax.grad(lambda *x: attention(*x, mechanism="flash_attn2", metadata=metadata)
                      .attention_outputs.astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)
    if check_vma is not None:
      run = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3,
                          check_vma=check_vma)
    compiled = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    # The forward, the sums of d_out * out, and the backward.
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 3)
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
      self.assertNotIn(f" {collective}(", text)


if __name__ == "__main__":
  absltest.main()
