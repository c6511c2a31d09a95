# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/parity.md: every documented name has a row, and every row names a target that is tested."""

import ast
import importlib
import inspect
import os
import pathlib
import re
import typing

from absl.testing import absltest

import attn_core
from attn_core.config import remat
from attn_core.config.config import BASICS

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
TESTS = pathlib.Path(os.path.abspath(__file__)).parent
PARITY = TESTS.parent / "docs" / "parity.md"

_IMPLEMENTATION = ("forward_cpu forward_cuda forward_gpu forward_native forward_rocm forward_tpu "
                   "get_impl_metadata get_impl_name")
_JSON = "from_dict from_json replace to_dict to_json"

# Names in the other library's documents, class by class: a name before the colon, its members
# after.
DOCUMENTED = f"""
AttnShardingRules: query3d query key value bias mask output q_segment_ids kv_segment_ids softmax_aux
OperationMetadata: runtime_dtype runtime_softmax_dtype sequence_axis_name mesh platform backend
  partition_axis partition_manager base_config scan_ring_attention softmax_scale dropout_prob
  blocksize_q blocksize_k blocksize_b operation_configs from_config get_operation_config
  get_shardings set_attrs_carefully {_JSON}
AttentionMechanisms: AUTO BLOCKSPARSE BLOCKWISE CUDA_FLASH_ATTN2 CUDNN FLASH_ATTN2
  MULTI_LATENT_RAGGED_PAGE_ATTENTION_V1 MULTI_LATENT_RAGGED_PAGE_ATTENTION_V2 PAGED_ATTENTION
  RAGGED_PAGE_ATTENTION_V2 RAGGED_PAGE_ATTENTION_V3 REGRESSIVE_DECODE RING SDPA SPLASH VANILLA
AttentionModule: config cached_key cached_value cache_index apply_complex_rotary apply_qk_shardings
  apply_qkv_shardings build_cache_pos concatenate default_key_value_sharding get_sharding_safely
  quantizer repeat_key_value shard_attention_prod
Cfg:
FlexibleAttentionModule: config dtype param_dtype precision attention_mechanism mesh implementation
  impl deterministic metadata run_attention_benchmarks forward
AttentionOutput:
TransformerCacheView:
TransformerMetadata:
RaggedPagesCacheView:
RaggedPagesMetadata:
EasyQuantizer:
get_optimal_config:
tpu_version_check:
DEFAULT_ATTENTION_MECHANISM:
_get_jax_dtype_from_string:
Carry: numerator denominator max_so_far
RingAttn: {_IMPLEMENTATION}
blockwise_attn:
ScaledDotProductAttn: {_IMPLEMENTATION}
EasyDeLBaseConfig: add_basic_configurations attach_custom_arguments auto_expert_mesh create_mesh
  expert_abstract_mesh expert_mesh from_pretrained get_axis_dims get_axis_names get_backend
  get_basic_causal_mask get_basic_frequencies get_basic_inv_frequencies get_basic_rope get_fcm_mask
  get_mask_details get_partition_rules granted_freq_max_position_embedding
  granted_mask_max_position_embedding jax_mesh mesh partition_manager read_basics_from_config
  save_pretrained set_model_mesh to_dict to_diff_dict to_json_file
AttnMaskDetail:
EasyDeLBackends:
EasyDeLPlatforms:
EasyDeLGradientCheckPointers:
EasyDeLQuantizationConfig:
PartitionAxis:
PartitionManager:
BaseOperationConfig:
EasyDeLBaseConfigDict:
EasyMethod: TRAIN SERVE EVAL CONVERT {_JSON}
extract_commit_hash:
set_attrs_smartly:
"""

# Attributes of MaskInfo, which the documents name outside the page of its class.
ATTRIBUTES = {"MaskInfo": "attention_mask q_segment_ids kv_segment_ids q_positions kv_positions"}
ARGUMENTS = {
    "forward": """
        query_states key_states value_states mode mask_info bias sliding_window cache_metadata
        cache_view init_bias causal softmax_aux softmax_scale logits_soft_cap dropout_prob
        dropout_rng deterministic precision prevent_cse cum_seqlens_q cum_seqlens_k
        normalize_output fused_backward compute_dtype optimized mask_value vmem_limit_bytes
        policy""",
    "blockwise_attn": """
        query key value bias deterministic dropout_rng attn_pdrop causal query_chunk_size
        key_chunk_size dtype policy precision float32_logits prevent_cse""",
}
TARGETS = """
    attn_dense attn_key attn_key_value attn_output attn_qkv attn_query attn_receptance attn_value
    attn_weights embeddings layer_output lm_head_output mlp_down mlp_gate mlp_output mlp_up
    model_output moe_expert_output moe_gate_logits moe_output moe_router_logits normed_input
    residual"""

NONE = "–"


class Row(typing.NamedTuple):
  there: str
  here: str
  tested: str
  difference: str


def documented() -> set[str]:
  """Yields every documented name as the row of a table has it."""
  names = set()
  for entry in re.sub(r"\n  +", " ", DOCUMENTED.strip()).splitlines():
    name, _, members = entry.partition(":")
    names |= {name, *(f"{name}.{member}" for member in members.split())}
  for name, members in ATTRIBUTES.items():
    names |= {f"{name}.{member}" for member in members.split()}
  for name, arguments in ARGUMENTS.items():
    names |= {f"{name}({argument})" for argument in arguments.split()}
  names |= {f"EasyDeLBaseConfig({field})" for field in (*BASICS, "**kwargs")}
  return names | {f"target {target}" for target in TARGETS.split()}


def rows() -> list[Row]:
  """Returns the rows of all tables, without their heads."""
  found = []
  for line in PARITY.read_text(encoding="utf-8").splitlines():
    if line.startswith("| `"):
      cells = [cell.strip() for cell in line.strip("|").split(" | ")]
      found.append(Row(*[cell.strip("`") for cell in cells[:3]], " | ".join(cells[3:])))
  return found


def resolve(target: str):
  """Returns what a dotted name below attn_core is; `name(argument=)` must have that argument."""
  name, _, argument = target.partition("(")
  found, parts = attn_core, name.split(".")
  for i, part in enumerate(parts):
    if not hasattr(found, part) and inspect.ismodule(found):
      found = importlib.import_module(".".join(["attn_core", *parts[:i + 1]]))
    elif part in getattr(found, "__dataclass_fields__", ()):
      return found  # a field without a default is not an attribute of its class
    else:
      found = getattr(found, part)
  if argument:
    inspect.signature(found).parameters[argument.rstrip("=)")]
  return found


def tests_of(text: str) -> set[str]:
  """Returns classes and methods of a test module, as "Class" and "Class.test_method"."""
  found = set()
  for node in ast.parse(text).body:
    if isinstance(node, ast.ClassDef):
      found |= {node.name, *(f"{node.name}.{item.name}" for item in node.body
                             if isinstance(item, ast.FunctionDef))}
  return found


def cases_of(text: str) -> set[str]:
  """The modules of cases that a test module imports, such as "property_cases"."""
  imports = "".join(line for line in text.splitlines() if line.startswith("from attn_core_test"))
  return set(re.findall(r"\b\w+_cases\b", imports))


def words_for(row: Row) -> set[str]:
  """Returns words of which a row's test module must contain one."""
  if row.there.startswith("target "):
    return {row.there.split()[1]} if row.here.startswith("config.remat.") else {"checkpoint_policy"}
  word = re.split(r"[.(]", row.here.rstrip("=)"))[-1]
  if row.here.startswith("AttentionMechanism"):
    return {word, str(getattr(attn_core.AttentionMechanism, word, word)), "names"}
  return {word}


class ParityTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    if not PARITY.exists():
      self.fail(f"there is no {PARITY}; under Bazel name it in the test's data")
    self.rows = rows()

  def test_every_documented_name_has_one_row(self):
    names = [row.there for row in self.rows]
    self.assertCountEqual(names, set(names))
    self.assertEqual(set(names), documented())

  def test_every_target_exists_or_says_why_not(self):
    for row in self.rows:
      with self.subTest(row.there):
        if row.here == NONE:
          self.assertGreater(len(row.difference), 10, "a reason")
          continue
        resolve(row.here)

  def test_every_target_is_tested(self):
    texts = {path.stem: path.read_text(encoding="utf-8") for path in TESTS.glob("*.py")}
    for row in self.rows:
      with self.subTest(row.there):
        if row.here == NONE:
          self.assertEqual(row.tested, NONE)
          continue
        module, _, path = row.tested.partition(".")
        self.assertIn(module, texts)
        self.assertIn(path, tests_of(texts[module]))
        text = texts[module] + "".join(texts[name] for name in cases_of(texts[module]))
        words = words_for(row)
        self.assertTrue(any(re.search(rf"\b{word}\b", text) for word in words),
                        f"{row.tested} does not mention {sorted(words)}")

  def test_rematerialization_targets_are_where_the_table_says(self):
    for row in self.rows:
      if row.there.startswith("target "):
        name = row.there.split()[1]
        expected = ("config.remat.NAMES" if name in remat.NAMES else
                    "config.remat.IMPLIED" if name in remat.IMPLIED else "checkpoint_policy")
        self.assertEqual(row.here, expected, name)

  def test_output_has_the_documented_fields(self):
    self.assertContainsSubset({"attention_outputs", "attention_weights"},
                              attn_core.AttentionOutput._fields)

  def test_public_names_exist(self):
    for name in attn_core.__all__:
      self.assertTrue(hasattr(attn_core, name), name)
    self.assertEqual(sorted(attn_core.__all__), list(dict.fromkeys(sorted(attn_core.__all__))))


if __name__ == "__main__":
  absltest.main()
