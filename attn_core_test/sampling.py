# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tags slow tests, and chooses those that a run takes: the same on every Python.

`python3 -m attn_core_test` runs every test that is not tagged slow here; with `--slow` it runs the
slow ones too, and with `--slow --rotation K/N` the K-th of N parts of them, so that the rotations
0/N to (N-1)/N together run everything. The whole of it takes hours.

A test is slow in one of two ways. Of the tests that QUICK names one in n of each class is quick,
and the others are slow: many tests that are alike and take seconds each. Single tests and cases are
tagged where they are defined, by `slow`, `slow_parameters`, `with_slow` and the like.
"""

import collections
import fnmatch
import hashlib
import os
import platform
from typing import Any, Callable, Iterable, NamedTuple, Sequence
import unittest

from absl.testing import parameterized
import jax

# Pattern of "module.Class.test" -> n: one test in n is quick. The first that matches counts.
QUICK = {
    "caches_sharding_test.InitTest.*": 1, "caches_sharding_test.*explicit_types*": 7,
    "caches_sharding_test.*.test_a_window*": 1, "caches_sharding_test.*": 3,
    "properties_test.*.test_every_table_entry*": 1, "properties_test.*": 6, "shard_test.Pred*": 1,
    "shard_test.*": 4, "derivatives_test.*.test_vmap_o*": 1, "derivatives_test.*": 4,
    "easydel_*test.*": 4, "dropout_test.*.test_in_jit_and_vmap*": 1,
    "dropout_test.MechanismsTest.*": 3, "dropout_test.PositionsTest.*": 3,
    "examples_test.[GM]*": 1, "examples_test.*": 3,
    "blockwise_test.BlockSizesTest.*": 1, "blockwise_test.*": 2,
    "tpu_test.InterpretTest.test_every*": 1, "tpu_test.InterpretTest.*_by_row": 1,
    "tpu_test.InterpretTest.*": 8,
    "tpu_softmax_test.F*": 6, "tpu_softmax_test.Ch*": 3, "tpu_pages_write_test.B*.test_[as8]*": 2,
    "short_test.PrecisionTest.test_b*": 1, "short_test.PrecisionTest.*": 3,
    "short_test.ValuesTest.test_float32*": 2, "short_test.NonfiniteTest.test_[rw]*": 2,
    "partials_test.*.test_equals*": 3, "score_mods_attention_test.CacheTest.*": 2,
    "selected_test.MeaningTest.test_every_derivative*": 4,
    "selected_test.MeaningTest.test_unions*": 2, "selected_test.TpuTest.test_visits_what*": 5,
    "score_mods_attention_test.DtypesTest.test_16*": 2,
    "ring_*test.BadInputTest.*": 1, "ring_test.*.test_one_number*": 1, "ring_*test.*": 3,
    "paged_bad_input_test.*": 1, "paged_score_mods_test.[RT]*": 1, "paged_score_mods_test.*": 2,
    "decode_score_mods_test.*.test_value*": 1, "decode_score_mods_test.[CT]*": 1,
    "paged_shard_test.EqualityTest.*": 3, "paged_shard_test.*": 1,
    "paged_meaning_test.*.test_[dwq]*": 1, "paged_meaning_test.*.test_a_query*": 1,
    "paged_meaning_test.*.test_att*": 1,
    "paged_test.DerivativesTest.*": 1, "paged_transformation_test.*.test_maps_tangents*": 1,
    "paged_few_queries_test.PartsTest.test_every*": 12,
    "paged_few_queries_test.ValuesTest.test_equals*": 2, "paged_few_queries_test.*": 1,
    "paged_*test.*": 3, "decode_test.*.test_hidden_scales*": 1,
    "decode_test.*.test_a_step_sends_only_results1": 1, "decode_*test.*": 3,
    "caches_attention_test.*refuse*": 1, "caches_attention_test.*.test_requests*": 1,
    "caches_attention_test.*first_token*": 1,
    "caches_attention_test.*": 3, "plan_test.CollectivesTest.*": 2,
    "cudnn_test.*.test_a_nan*": 1, "cudnn_test.*.test_a_length*": 1,
    "cudnn_test.ValuesTest.*": 2, "gpu_suite_test.*": 2, "tpu_suite_test.*": 2,
    "page_stripes_test.EqualityTest.*": 2, "page_layouts_test.*.test_same*": 6,
    "page_layouts_test.*.test_exchange[0-9]*": 4,
    "adapters*test.*.test_refuses*": 1, "adapters*test.*.test_every_case": 1,
    "adapters*test.*": 3,
    "batch_dimensions_test.*.test_refuses*": 1, "batch_dimensions_test.*.test_explained*": 1,
    "batch_dimensions_test.*": 3,
    "calls_test.IntegersTest.*": 4, "calls_test.DtypesTest.test_cache*": 3,
    "calls_test.NamesTest.*unknown*": 2, "calls_test.PlatformTest.test_running*": 2,
    "strict_modes_test.CacheTest.test_caches*": 3, "strict_modes_test.CacheTest.test_pages*": 3,
    "strict_modes_test.PromotionTest.test_token*": 3, "strict_modes_test.TransformationTest.*": 2,
    "strict_modes_test.NanTest.test_calls*": 4, "strict_modes_test.NanTest.test_infinite*": 6,
    "strict_modes_test.NanTest.test_nan_in*": 2,
    "explicit_axes_test.ExplicitValuesTest.test_keys_otherwise*": 3,
    "export_test.MeshTest.test_auto_axes*": 4,
    "explicit_pages_test.TypesTest.test_outputs*": 4,
    "explicit_pages_test.ValuesTest.test_those*": 3,
    "latent_pages_test.B*": 1, "latent_pages_test.C*": 2, "latent_pages_test.T*": 1,
    "latent_pages_test.*": 6,
    "latent_test.[BE]*": 1, "latent_test.*": 6, "latent_shard_test.MeshTest.test_eq*": 4,
    "latent_shard_test.PagesTest.test_eq*": 3, "latent_shard_test.CacheTest.test_slots*": 4,
    "latent_shard_test.MeshTest.test_no*": 2,
    "selected_test.PlacementTest.*": 2, "selected_test.WorkTest.test_memory*": 2,
    "score_mods_operations_test.DerivativesTest.*": 3,
    "selected_test.MeaningTest.test_block_map*": 2, "page_drafts_test.*.test_equals*": 3,
    "pages_test.*.test_a_dense_cache*": 2, "pages_test.*.test_4*": 3,
    "caches_test.*.test_donated*": 2}

# Module -> number of processes that share its tests. These start first, in this order. Bazel, which
# passes `--short`, leaves them out.
SHARDS = {
    "properties_test": 2, "easydel_regressions_test": 1, "easydel_arguments_test": 1, "tpu_test": 1,
    "derivatives_test": 1, "ring_test": 1, "ring_mesh_test": 1, "ring_compiled_test": 1,
    "documents_test": 2,
    "examples_test": 1, "shard_test": 1, "tpu_paged_test": 1, "decode_test": 1, "dropout_test": 1,
    "caches_test": 1, "caches_attention_test": 1, "paged_test": 1, "paged_meaning_test": 1,
    "paged_batch_invariance_test": 1, "blockwise_test": 1, "plan_test": 1, "tpu_compile_test": 2,
    "gpu_test": 1, "gpu_backward_test": 1, "gpu_decode_test": 1, "tpu_ring_test": 1,
    "tpu_decode_test": 1, "paged_shard_test": 1, "page_stripes_test": 1, "cudnn_test": 1,
    "gpu_suite_test": 1, "benchmark_test": 1, "pages_test": 1,
    "distributed_test": 1, "caches_sharding_test": 1, "ring_split_test": 1, "adapters_test": 1,
    "short_test": 1, "explicit_axes_test": 1, "explicit_pages_test": 1, "collectives_test": 1,
    "strict_modes_test": 1, "calls_test": 1,
    "batch_dimensions_test": 1, "manual_axes_test": 1, "programs_test": 1, "whole_calls_test": 1,
    "approved_test": 1, "score_mods_attention_test": 1, "tpu_softmax_test": 1,
    "tpu_pages_write_test": 1, "partials_test": 1, "latent_test": 1, "selected_test": 1,
    "tpu_score_mods_test": 1, "latent_shard_test": 1, "paged_score_mods_test": 1,
    "decode_score_mods_test": 1, "gradient_precision_test": 1, "latent_pages_test": 1,
    "explain_test": 1, "paged_few_queries_test": 1, "nonfinite_padding_test": 1,
    "page_prefixes_test": 1, "tpu_paged_tokens_test": 1, "paged_widths_test": 1}

# These start next, in this order, and the others at last, so that none runs alone in the end.
LONG = ("static_tpu_test", "gpu_paged_test", "page_reading_test", "tpu_memory_test",
        "page_drafts_test", "matmul_precision_test", "gpu_split_kv_test", "export_test",
        "static_gpu_test", "tpu_schedule_test", "masks_block_map_test", "tpu_long_test",
        "paged_transformation_test", "gpu_odd_lengths_test", "import_graph_test", "render_test",
        "odd_lengths_test", "typing_test", "loss_scaling_test", "tpu_versions_test")

# Modules that read files of the checkout, which Bazel has to know. Of the others `--short` runs one
# test: README.md's command runs all of them with the same packages.
READERS = ("adapters_recipes_test", "doctest_test", "english_test",
           "equivalents_test", "gpu_faults_test", "import_graph_test", "mesh_test",
           "notebooks_test", "packaging_test", "parity_test", "pictures_test", "readme_test",
           "render_test", "sampling_test", "serve_soak_test", "site_test", "spelling_test",
           "static_tpu_test", "support_matrix_test", "tpu_suite_test", "typing_test")

# Modules about texts and the structure of the library, which no version of Python or JAX changes:
# a run with other versions leaves them out by `--again`. Some of what it tests takes turns, see
# `in_turn`: a quarter of the pages that need no package besides JAX, a quarter of the programs
# whose operations are recorded alike for all versions of JAX, and half of each class of OF_MEANING.
ONCE = ("english_test", "import_graph_test", "parity_test", "pictures_test", "readme_test",
        "spelling_test")

# Modules whose programs emulate kernels of other chips, are only traced and lowered, show how the
# library is used, or shard over emulated devices, each of which runs what the modules of one device
# test: what XLA's optimizations for this CPU make of them is not what they test, and takes a fifth
# of their time.
EMULATING = ("tpu_*test", "gpu_*test", "strict_modes_test", "documents_test", "benchmark_test",
             "programs_test", "ring_test", "numpy_*test", "score_mods_operations_test",
             "score_mods_lookups_test", "mask_lookups_test")

# Options of a compiler for results that a test compares with, such as an oracle's in float64, and
# for kernels of other chips: `jax.jit(function, compiler_options=sampling.LEAST)`.
LEAST: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
  LEAST["xla_cpu_use_fusion_emitters"] = False  # see `optimize_least`

# Modules that test what surrounds the kernels: which arguments mean the same, where arrays are kept
# and sent, what is exported and how others call it; or random calls by all of them; or variations,
# such as score mods, of calls that properties_test has too. The kernels that they run are those of
# properties_test, short_test, decode_test, paged_meaning_test and others, which XLA optimizes: on
# jax 0.10 that takes four times as long.
OF_MEANING = ("adapters*test", "approved_test", "arguments_test", "bad_input_test",
              "batch_dimensions_test", "caches_attention_test", "caches_sharding_test",
              "caches_test", "calls_test", "collectives_test", "cudnn_test",
              "decode_score_mods_test", "distributed_test", "doctest_test", "dropout_test",
              "easydel_*test", "examples_test", "explain_test", "explicit_*test", "export_test",
              "latent_pages_test", "latent_shard_test", "manual_axes_test", "masks_*test",
              "no_silent_arguments_test", "page_drafts_test",
              "page_layouts_test", "page_prefixes_test", "page_reading_test", "page_stripes_test",
              "paged_few_queries_test", "paged_score_mods_test", "paged_shard_test",
              "paged_transformation_test", "paged_widths_test", "pages_test", "partials_test",
              "plan_test", "refusals_test", "ring_mesh_test", "ring_split_test",
              "score_mods_attention_test", "selected_test", "shard_test", "table_refusals_test",
              "whole_calls_test")

VARIABLE = "ATTN_CORE_SLOW"  # "K/N" in the environment: the slow tests of this rotation run
FEW = "ATTN_CORE_FEW"  # in the environment: one test of each module runs
AGAIN = "ATTN_CORE_AGAIN"  # in the environment: README.md's command ran before, by other versions
SKIPPED = "slow: `python3 -m attn_core_test --slow` runs it"


class Rotation(NamedTuple):
  """One of `parts` parts of the slow tests."""

  index: int  # 0 <= index < parts
  parts: int

  def __str__(self) -> str:
    return f"{self.index}/{self.parts}"


def rotation_of(text: str) -> Rotation:
  """Reads "K/N".

  Raises:
    ValueError: text is not of this form, or K is not one of 0 to N - 1.
  """
  index, slash, parts = text.partition("/")
  if not (slash and index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
    raise ValueError(f"rotation={text!r}: expected K/N with 0 <= K < N, such as 3/24")
  return Rotation(int(index), int(parts))


ROTATION = rotation_of(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


IS_AGAIN = bool(os.environ.get(AGAIN))


def in_turn(cases: Iterable[Any], parts: int, again: bool = IS_AGAIN,
            rotation: Rotation | None = ROTATION) -> list:
  """Returns all cases; in a run again one in `parts`, so that as many rotations take all of them.

  A single case is always taken.
  """
  every = list(cases)
  if not again or len(every) == 1:
    return every
  turn = 0 if rotation is None else rotation.index
  return [case for n, case in enumerate(every) if (n - turn) % parts == 0]


def number_of(name: str) -> int:
  """A number that depends on the name alone."""
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def chosen(name: str, rotation: Rotation | None = ROTATION) -> bool:
  """Says if the rotation takes the slow test or case of this name."""
  return rotation is not None and number_of(name) % rotation.parts == rotation.index


def with_slow(quick: Iterable[Any], *slow_ones: Any) -> list:
  """The quick cases, and after them those of the slow ones that this run takes."""
  return [*quick, *(case for case in slow_ones if chosen(repr(case)))]


def names(every: Iterable[str], quick: Sequence[str]) -> list[str]:
  """Returns the quick names, and those of the others that this run takes, in their order."""
  return [name for name in every if name in quick or chosen(name)]


def slow(name: str) -> Callable:
  """Decorates a test or a class that is slow; `name` decides which rotation takes it."""
  return unittest.skipUnless(chosen(name), SKIPPED)


def slow_parameters(*cases: tuple, named: bool = False) -> Callable:
  """Like parameterized.parameters, or with `named` named_parameters, for slow cases."""
  taken = with_slow((), *cases)
  if not taken:
    return unittest.skip(SKIPPED)
  return (parameterized.named_parameters if named else parameterized.parameters)(*taken)


def is_of(patterns: Iterable[str], module: str) -> bool:
  """Says if a pattern, such as one of OF_MEANING, names the module."""
  return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def emulates(module: str) -> bool:
  """Says if EMULATING or OF_MEANING names the module."""
  return is_of((*EMULATING, *OF_MEANING), module)


def optimize_least() -> None:
  """Lets XLA compile quickly; called before JAX finds its devices, which reads this once."""
  flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
  if jax.__version_info__ < (0, 11):
    # A pipeline of MLIR for each fused loop, two thirds of what is left; later ones have no choice.
    flags.append("--xla_cpu_use_fusion_emitters=false")
    if platform.machine() == "x86_64":
      # Without it LLVM fuses some products and sums of a loop and not those of another, so that
      # equal sums differ in their last bit; AVX has no such instruction.
      flags.append("--xla_cpu_max_isa=AVX")
  os.environ["XLA_FLAGS"] = " ".join(flags)


def share_of(test: str) -> int:
  """One test in how many like "module.Class.test" is quick."""
  return next((n for pattern, n in QUICK.items() if fnmatch.fnmatchcase(test, pattern)), 1)


class OneTest:
  """Takes one test of a module: of each class until one is found that is not skipped."""

  def __init__(self) -> None:
    self._taken: dict[type, list[str]] = {}
    self._found = False

  def of_class(self, case: type, tests: Sequence[str]) -> list[str]:
    """Returns the test to run, or none, of the tests of one class; the same whenever asked."""
    if case not in self._taken:
      skipped = lambda name: any(getattr(x, "__unittest_skip__", False)
                                 for x in (case, getattr(case, name)))
      first = sorted(tests, key=lambda name: (skipped(name), number_of(name)))[:1]
      self._taken[case] = [] if self._found else first
      self._found |= not all(map(skipped, first))
    return self._taken[case]


def taken_of(tests: Sequence[str], group: str, rotation: Rotation | None = ROTATION,
             again: bool = IS_AGAIN) -> list[str]:
  """Returns the tests of one class that a run of the suite takes, in their order.

  Args:
    tests: names of methods.
    group: name of the class with its module.
    rotation: which of the slow ones run too; None: none.
    again: whether the tests of OF_MEANING take turns.
  """
  again = again and is_of(OF_MEANING, group.split(".")[0])
  alike = collections.defaultdict(list)
  # By a hash, since every n-th case may well be of one kind.
  for name in sorted(tests, key=lambda name: (number_of(name), name)):
    alike[share_of(f"{group}.{name}")].append(name)
  taken = set()
  for share, ordered in alike.items():
    quick = -(-len(ordered) // share)
    taken.update(in_turn(ordered[:quick], 2, again, rotation))
    if rotation is not None:
      taken.update(name for index, name in enumerate(ordered[quick:], number_of(group))
                   if index % rotation.parts == rotation.index)
  return [name for name in tests if name in taken]
