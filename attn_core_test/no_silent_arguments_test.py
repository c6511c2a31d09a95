# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every argument and field has an effect or is documented as unused.

An effect is a result, error or explanation of a call that changes with the value.
"""

from collections.abc import Callable
import dataclasses
import inspect
import re
import types
from typing import Any, NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

import attn_core
from attn_core import (AttnConfig, BlockSizes, CacheMetadata, Heads, LatentOptions, MaskInfo,
                       OperationMetadata, PagedOptions, PagesMetadata, PagesV1, PagesV2, PagesV3,
                       PartitionAxis, RingConfig, Rope, attention, attention_arguments, caches,
                       create_mesh, explain, masks, score_mods, resolve)
from attn_core.arguments.arguments import AttentionArguments
from attn_core.caches import allocator, dense, prefixes, window
from attn_core.config import config as config_lib
from attn_core.sharding import partition
from attn_core_test import code_measures

jax.config.update("jax_num_cpu_devices", 8)

KEY = jax.random.key(0)
CPU = OperationMetadata(platform="cpu")


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ints(values: list[Any]) -> np.ndarray:
  return np.array(values, np.int32)


def outcome(function: Callable[[], Any]) -> str:
  """Returns the result or error of a call as text; equal results give equal texts."""
  try:
    result = function()
  except (ValueError, NotImplementedError) as error:
    return f"{type(error).__name__}: {error}"
  leaves, structure = jax.tree.flatten(result)
  text = [f"{x.dtype}{x.shape}{np.asarray(x).tobytes().hex()}" if hasattr(x, "dtype") else repr(x)
          for x in leaves]
  return re.sub("0x[0-9a-f]+", "", f"{structure}{text}")


class Effect(NamedTuple):
  """A function whose outcome depends on the value of one argument."""

  function: Callable[..., Any]
  value: Any  # differs from that of `base`, or from the default
  base: dict[str, Any] = {}


# --- Arguments of attention. ----------------------------------------------------------------------

Q, K, V = numbers(1, 8, 4, 16), numbers(1, 8, 2, 16, seed=1), numbers(1, 8, 2, 16, seed=2)
PACKED = {"query": Q[0], "key": K[0], "value": V[0], "layout": "thd",
          "cum_seqlens_q": ints([0, 3, 8])}
CACHED = {"mode": "__autoregressive__", "causal": True}
DROPPED = {"dropout_prob": 0.5, "dropout_rng": KEY}


def run(**arguments: Any) -> Any:
  return attention(**{"query": Q, "key": K, "value": V, **arguments})


def program(**arguments: Any) -> str:
  """Returns the traced program of the call and its gradients."""
  given = {"query": Q, "key": K, "value": V, **arguments}
  names = ("query", "key", "value")
  loss = lambda *x: attention(**{**given, **dict(zip(names, x))}).attention_outputs.sum()
  return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*(given[name] for name in names)))


def explained(**arguments: Any) -> str:
  return str(explain(**{"query": Q, "key": K, "value": V, **arguments}))


def mesh() -> jax.sharding.Mesh:
  return create_mesh((2, 1, 1, 2, 2))  # dp, fsdp, ep, tp, sp


def sharded(**fields: Any) -> OperationMetadata:
  return OperationMetadata(mesh=mesh(), **fields)


TWO_ROWS = {name: np.concatenate([x, x]) for name, x in (("query", Q), ("key", K), ("value", V))}
NO_BATCH_AXIS = PartitionAxis(decode_batch_axis=None)
ARGUMENTS = {
    "query": Effect(run, numbers(1, 8, 4, 16, seed=3)),
    "key": Effect(run, numbers(1, 8, 2, 16, seed=3)),
    "value": Effect(run, numbers(1, 8, 2, 16, seed=3)),
    "mechanism": Effect(run, "cudnn"),
    "metadata": Effect(run, OperationMetadata(softmax_scale=2.0)),
    "mode": Effect(
        lambda **a: explained(**TWO_ROWS, metadata=sharded(partition_axis=NO_BATCH_AXIS), **a),
        "__autoregressive__"),
    "layout": Effect(run, "bhtd"),
    "mask": Effect(run, masks.window(1, 0)),
    "mask_info": Effect(run, MaskInfo(q_segment_ids=ints([[0] * 4 + [1] * 4]),
                                      kv_segment_ids=ints([[0] * 4 + [1] * 4]))),
    "bias": Effect(run, numbers(1, 4, 8, 8)),
    "init_bias": Effect(run, lambda: numbers(1, 4, 8, 8)),
    "score_mod": Effect(run, score_mods.soft_cap(0.5)),
    "causal": Effect(run, False),
    "query_offset": Effect(run, -3),
    "sliding_window": Effect(run, 1),
    "chunk_size": Effect(run, 2),
    "softmax_scale": Effect(run, 2.0),
    "logits_soft_cap": Effect(run, 0.5),
    "softmax_aux": Effect(run, np.ones(4, np.float32)),
    "dropout_prob": Effect(run, 0.5, {"dropout_rng": KEY}),
    "dropout_rng": Effect(run, KEY, {"dropout_prob": 0.5}),
    "deterministic": Effect(run, True, DROPPED),
    "cum_seqlens_q": Effect(run, ints([0, 5, 8]), PACKED),
    "cum_seqlens_k": Effect(run, ints([0, 5, 8]), {**PACKED, "query_offset": 0}),
    "cache_view": Effect(run, dense.init(1, 16, (2, 16), dtype="float32"), CACHED),
    "cache_metadata": Effect(
        lambda **a: run(cache_view=dense.init(1, 16, (2, 16), dtype="float32"), **a),
        CacheMetadata(lengths=ints([3])), CACHED),
    "latent_options": Effect(
        run, LatentOptions(12, 4, 4), {"key": Q[:, :, 0], "value": None, "softmax_scale": 1.0}),
    "normalize_output": Effect(run, False),
    "precision": Effect(run, "default", {"mechanism": "sdpa"}),
    "compute_dtype": Effect(run, jnp.bfloat16),
    "block_sizes": Effect(program, BlockSizes(2, 2), {"mechanism": "flash_attn2"}),
    "policy": Effect(program, "nothing_saveable"),
    "prevent_cse": Effect(program, False, {"policy": "nothing_saveable"}),
    "optimized": Effect(run, True, {"mechanism": "vanilla"}),
    "mask_value": Effect(run, -1.0),
    "vmem_limit_bytes": Effect(run, 2**20),
    "return_lse": Effect(run, True),
    "return_weights": Effect(run, True),
}


# --- Fields. --------------------------------------------------------------------------------------


def with_metadata(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
  return lambda **fields: function(**arguments, metadata=OperationMetadata(**fields))


RUN, SAID, PROGRAM = with_metadata(run), with_metadata(explained), with_metadata(program)
RING = {"mesh": mesh()}
RING_PROGRAM = with_metadata(program, mechanism="ring")
FLASH_PROGRAM = with_metadata(program, mechanism="flash_attn2")
METADATA = {
    "runtime_dtype": Effect(RUN, "bfloat16"),
    "runtime_softmax_dtype": Effect(RUN, "bfloat16"),
    "sequence_axis_name": Effect(with_metadata(explained, mechanism="ring"), "tp", RING),
    "mesh": Effect(with_metadata(explained, **TWO_ROWS), mesh()),
    "platform": Effect(SAID, "tpu"),
    "backend": Effect(SAID, "tpu"),
    "partition_axis": Effect(with_metadata(explained, **TWO_ROWS), PartitionAxis(batch_axis=None),
                             RING),
    "base_config": Effect(with_metadata(explained, **TWO_ROWS),
                          types.SimpleNamespace(mesh=mesh())),
    "scan_ring_attention": Effect(RING_PROGRAM, False, RING),
    "softmax_scale": Effect(RUN, 2.0),
    "dropout_prob": Effect(with_metadata(run, dropout_rng=KEY), 0.5),
    "blocksize_q": Effect(FLASH_PROGRAM, 2),
    "blocksize_k": Effect(FLASH_PROGRAM, 2),
    "operation_configs": Effect(FLASH_PROGRAM, {"flash_attn2": BlockSizes(2, 2)}),
    "compute_capability": Effect(SAID, "9.0", {"platform": "gpu"}),
    "ring": Effect(RING_PROGRAM, RingConfig("all_gather"), RING),
}


def ring_program(**fields: Any) -> str:
  return program(mechanism="ring", metadata=sharded(ring=RingConfig(**fields)))


RINGS = {
    "variant": Effect(ring_program, "all_gather"),
    "layout": Effect(ring_program, "zigzag"),
    "heads_axis_name": Effect(ring_program, "tp", {"variant": "hybrid"}),
    "transfer": Effect(ring_program, "remote"),
}


def latent(**fields: Any) -> Any:
  """Latent attention, absorbed or with up-projections."""
  options = LatentOptions(**{"latent_width": 12, "rope_width": 4, **fields})
  width = 16 if options.key_up is None else options.key_up.shape[2] + options.rope_width
  return attn_core.multi_latent_attention(
      numbers(1, 8, 4, width), numbers(1, 8, 16), latent_options=options)


UP = {"key_up": numbers(12, 4, 6), "value_up": numbers(12, 4, 5)}
LATENT = {
    "latent_width": Effect(latent, 10, {"rope_width": 4, "nope_width": 4}),
    "rope_width": Effect(latent, 6, {"nope_width": 4}),
    "nope_width": Effect(latent, 6, {"nope_width": 4}),
    "key_up": Effect(latent, numbers(12, 4, 6, seed=1), UP),
    "value_up": Effect(latent, numbers(12, 4, 5, seed=1), UP),
}


def block_program(**fields: Any) -> str:
  return program(mechanism="flash_attn2", block_sizes=BlockSizes(**fields), metadata=CPU)


BLOCKS = {
    "block_q": Effect(block_program, 2), "block_kv": Effect(block_program, 2),
    "block_q_backward": Effect(block_program, 2), "block_kv_backward": Effect(block_program, 2),
    "block_heads": Effect(block_program, 1), "vmem_limit_bytes": Effect(block_program, 2**20),
}


def axes(**fields: Any) -> list[Any]:
  """Returns the spec of every meaning of a dimension in both kinds of modes."""
  return [repr(resolve(PartitionAxis(**fields), [meaning], mode).spec)
          for meaning in partition.SEMANTIC_AXES for mode in ("__train__", "__autoregressive__")]


AXES = {name: Effect(axes, "other") for name in PartitionAxis._fields}


def with_config(function: Callable[[AttnConfig], Any]) -> Callable[..., Any]:
  return lambda **fields: function(AttnConfig(**fields))


METADATA_OF = with_config(
    lambda config: repr(OperationMetadata.from_config(config).replace(base_config=None)))
LAYER, MESH_OF = with_config(attention_arguments), with_config(
    lambda config: repr(attn_core.get_mesh(config).shape))
ROPE, WIDTH = with_config(attn_core.layer_rope), with_config(config_lib.get_head_dim)
HEADS = with_config(lambda config: config_lib.get_key_value_heads(config, 0))
KEEP = with_config(lambda config: attn_core.get_fcm_mask(config, 1, 64, False, KEY))
TEMPERATURE = with_config(lambda config: attn_core.query_temperature(config, ints([[5]])))
BIAS = with_config(attn_core.layer_score_mod)
WINDOWED = {"num_hidden_layers": 1, "sliding_window": (1, 0)}
CONFIG = {
    "sharding_axis_dims": Effect(MESH_OF, (1, 1, 1, 1, -1)),
    "sharding_dcn_axis_dims": Effect(MESH_OF, (3, 1, 1, 1, 1)),
    "sharding_axis_names": Effect(MESH_OF, ("a", "b", "c", "d", "e")),
    "attn_mechanism": Effect(LAYER, "sdpa"),
    "decode_attn_mechanism": Effect(with_config(
        lambda config: attention_arguments(config, mode="__autoregressive__")), "sdpa"),
    "blocksize_k": Effect(METADATA_OF, 64), "blocksize_q": Effect(METADATA_OF, 64),
    "partition_axis": Effect(METADATA_OF, PartitionAxis(batch_axis=None)),
    "backend": Effect(METADATA_OF, "tpu"), "platform": Effect(METADATA_OF, "gpu"),
    "scan_ring_attention": Effect(METADATA_OF, False),
    "sequence_axis_name": Effect(METADATA_OF, "tp"),
    "attn_dtype": Effect(METADATA_OF, jnp.dtype("float16")),
    "attn_softmax_dtype": Effect(METADATA_OF, jnp.dtype("bfloat16")),
    "fcm_max_ratio": Effect(KEEP, 0.9),
    "fcm_min_ratio": Effect(KEEP, 0.8, {"fcm_max_ratio": 0.9}),
    "operation_configs": Effect(METADATA_OF, (("vanilla", BlockSizes(8)),)),
    "num_hidden_layers": Effect(
        with_config(lambda config: attention_arguments(config, 1)), 2, {"num_hidden_layers": 1}),
    "hidden_size": Effect(WIDTH, 64, {"num_attention_heads": 4}),
    "num_attention_heads": Effect(WIDTH, 4, {"hidden_size": 64}),
    "num_key_value_heads": Effect(HEADS, 2, {"num_attention_heads": 4}),
    "layer_key_value_heads": Effect(HEADS, (("full_attention", 2),), {"num_attention_heads": 4}),
    "head_dim": Effect(WIDTH, 16),
    "layer_head_dims": Effect(
        with_config(lambda config: config_lib.get_head_dim(config, 0)), (("full_attention", 8),),
        {"head_dim": 16}),
    "latent_width": Effect(with_config(attn_core.latent_options), 8,
                           {"head_dim": 16, "rope_head_dim": 4}),
    "rope_head_dim": Effect(with_config(attn_core.get_basic_inv_frequencies), 8, {"head_dim": 16}),
    "causal": Effect(LAYER, False), "softmax_scale": Effect(LAYER, 2.0),
    "logits_soft_cap": Effect(LAYER, 2.0), "dropout_prob": Effect(LAYER, 0.5),
    "layer_types": Effect(LAYER, ("full_attention",), WINDOWED),
    "sliding_window": Effect(LAYER, (1, 0)), "chunk_size": Effect(LAYER, 4),
    "index_topk": Effect(
        with_config(lambda config: attn_core.index_mask(config, numbers(1, 2, 4))), 2),
    "rope": Effect(ROPE, Rope(rope_theta=5.0)),
    "layer_ropes": Effect(ROPE, (("full_attention", Rope(rope_theta=5.0)),),
                          {"num_hidden_layers": 1, "layer_types": ("full_attention",)}),
    "layers_without_rope": Effect(ROPE, (0,), {"num_hidden_layers": 1}),
    "temperature_tuning": Effect(
        TEMPERATURE, (1.0, 2), {"num_hidden_layers": 1, "layers_without_rope": (0,)}),
    "temperature_offset": Effect(
        TEMPERATURE, 0, {"temperature_tuning": (1.0, 2), "temperature_with_rope": True}),
    "temperature_with_rope": Effect(TEMPERATURE, True, {"temperature_tuning": (1.0, 2)}),
    "alibi_bias_max": Effect(BIAS, 8.0, {"num_attention_heads": 4}),
    "alibi_scaled": Effect(BIAS, True, {
        "num_attention_heads": 4, "alibi_bias_max": 8.0, "softmax_scale": 0.5}),
    "relative_buckets": Effect(with_config(lambda config: attn_core.layer_score_mod(
        config, config.relative_buckets and np.zeros((8, 4), np.float32))), (8, 9)),
    "max_position_embeddings": Effect(
        with_config(attn_core.granted_freq_max_position_embedding), 8),
    "freq_max_position_embeddings": Effect(
        with_config(attn_core.granted_freq_max_position_embedding), 4,
        {"max_position_embeddings": 8}),
    "mask_max_position_embeddings": Effect(
        with_config(attn_core.granted_mask_max_position_embedding), 4,
        {"max_position_embeddings": 8}),
    "partition_rules": Effect(with_config(attn_core.get_partition_rules),
                              ((".*", PartitionSpec()),)),
    "mesh": Effect(MESH_OF, mesh()),
    "extras": Effect(with_config(attn_core.extras_of), (("name", "1"),)),
    "unset": Effect(LAYER, (), {}),
}


# --- Caches. --------------------------------------------------------------------------------------

WHOLE = NamedSharding(jax.make_mesh((1,), ("devices",)), PartitionSpec("devices"))
SLOTTED = {"batch": 1, "heads": (2, 16), "dtype": "float32"}
PAGES = {"layout": PagesV1, "num_pages": 4, "page_size": 8, "heads": Heads(2, 16, 16),
         "dtype": "float32"}


def slotted(init: Callable[..., Any], length: str) -> dict[str, Effect]:
  """The effects of the arguments of `dense.init` or `window.init`."""
  base = {**SLOTTED, length: 8}
  found = {name: Effect(init, value, base) for name, value in (
      ("batch", 2), (length, 4), ("heads", (1, 16)), ("dtype", "int8"))}
  return {**found, "sharding": Effect(lambda **a: str(init(**a).key.sharding), WHOLE, base)}


def with_cache(**fields: Any) -> Any:
  """A decoding step, or an insertion where slots are given."""
  mode = "__insert__" if "slots" in fields else "__autoregressive__"
  cache = dense.init(2 if "slots" in fields else 1, 16, (2, 16), dtype="float32")
  return run(cache_view=cache, mode=mode, cache_metadata=CacheMetadata(**fields))


def with_pages(options: PagedOptions = PagedOptions(), **fields: Any) -> Any:
  """Two requests over pages that hold other numbers in every slot."""
  pages = PagesV2(numbers(4, 8, 4, 16))
  metadata = PagesMetadata(**{
      "page_tables": ints([[0, 1], [2, 3]]), "context_lens": ints([9, 12]),
      "query_start_loc": ints([0, 1, 4]), **fields})
  return attn_core.ragged_page_attention_v2(Q[0, :4], pages, metadata, options)


def with_stored_heads(**fields: Any) -> Any:
  """A request over pages that are read only."""
  metadata = PagesMetadata(ints([[0, 1]]), ints([9]), **fields)
  return attn_core.ragged_page_attention_v3(
      Q[0, :1], None, None, PagesV3(numbers(2, 8, 4, 1, 128)), metadata).out


def with_paged_options(**fields: Any) -> Any:
  output = with_pages(PagedOptions(**fields))
  program = jax.make_jaxpr(lambda: with_pages(PagedOptions(**fields)))()
  return output, str(program)


def latent_cache(**arguments: Any) -> Any:
  cache = caches.latent.init(**arguments)
  return cache, str(cache.latents.sharding)


LATENT_CACHE = {name: Effect(latent_cache, value, {
    "batch": 2, "slots": 8, "widths": (12, 4), "dtype": "int8", "rope_dtype": "float32"})
                for name, value in (("batch", 1), ("slots", 4), ("widths", (8, 8)),
                                    ("dtype", "bfloat16"), ("rope_dtype", "bfloat16"),
                                    ("sharding", WHOLE), ("padded", True))}
CACHE_STEP = {"lengths": Effect(with_cache, ints([3])), "starts": Effect(with_cache, ints([2])),
              "slots": Effect(with_cache, ints([1]), {"slots": ints([0])})}
PAGES_STEP = {
    "page_tables": Effect(with_pages, ints([[1, 0], [2, 3]])),
    "context_lens": Effect(with_pages, ints([8, 12])),
    "query_start_loc": Effect(with_pages, ints([0, 2, 4])),
    "num_requests": Effect(with_pages, ints(1)),
    "distribution": Effect(
        lambda **fields: str(jax.make_jaxpr(lambda: with_pages(**fields))()), ints([1, 1, 2])),
    "draft_mask": Effect(with_pages, np.tile(np.eye(3, dtype=bool), (2, 1, 1))),
    "scope": Effect(with_pages, attn_core.caches.pages.Scope.NEW),
    "prefixes": Effect(lambda **fields: str(jax.make_jaxpr(lambda: with_pages(**fields))()),
                       prefixes.find(np.int32([[0, 1], [2, 3]]), np.int32([0, 0]))),
    "stored_heads": Effect(with_stored_heads, attn_core.caches.pages.StoredHeads(1, 16, 16), {
        "stored_heads": attn_core.caches.pages.StoredHeads(2, 16, 16)}),
}
PAGED_OPTIONS = {name: Effect(with_paged_options, value) for name, value in (
    ("causal", False), ("sliding_window", (2, 0)), ("softmax_scale", 2.0),
    ("logits_soft_cap", 0.5), ("softmax_aux", np.ones(4, np.float32)), ("precision", "default"),
    ("block_sizes", BlockSizes(2, 8)), ("return_lse", True),
    ("metadata", OperationMetadata(softmax_scale=2.0)),
    ("score_mod", score_mods.soft_cap(0.5)))}
INIT_PAGES = {name: Effect(attn_core.caches.pages.init, value, PAGES) for name, value in (
    ("layout", PagesV2), ("num_pages", 2), ("page_size", 4), ("heads", Heads(1, 16, 16)),
    ("dtype", "bfloat16"), ("scales", "token"))}
INIT_PAGES["sharding"] = Effect(
    lambda **a: str(attn_core.caches.pages.init(**a).key_pages.sharding), WHOLE, PAGES)
CREATE_ALLOCATOR = {name: Effect(allocator.create, value, {"num_pages": 4, "page_size": 8})
                    for name, value in (("num_pages", 2), ("page_size", 4))}


# --- Documentation. -------------------------------------------------------------------------------


def documented_arguments(function: Callable[..., Any]) -> dict[str, str]:
  """Returns the text about each argument in the section Args of a docstring."""
  section = inspect.cleandoc(function.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
  return {name: " ".join(text.split())
          for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)}


def documented_fields(kind: type) -> dict[str, str]:
  """Returns the comment of each field of a class: behind it, or in the lines above it."""
  found, above = {}, ""
  classes = [base for base in kind.__mro__ if base.__module__ == kind.__module__]
  for line in "\n".join(map(inspect.getsource, classes)).splitlines():
    code, _, comment = line.partition("#")
    field = re.match(r"  (\w+): ", code)
    if field:
      found[field[1]] = f"{above} {comment}"
    above = f"{above} {comment}" if not code.strip() and comment else ""
  return found


TABLES = {
    "attention": (ARGUMENTS, documented_arguments(attention)),
    "OperationMetadata": (METADATA, documented_fields(OperationMetadata)),
    "AttnConfig": (CONFIG, documented_fields(AttnConfig)),
    "BlockSizes": (BLOCKS, documented_fields(BlockSizes)),
    "RingConfig": (RINGS, documented_fields(RingConfig)),
    "LatentOptions": (LATENT, documented_fields(LatentOptions)),
    "PartitionAxis": (AXES, documented_fields(PartitionAxis)),
    "CacheMetadata": (CACHE_STEP, documented_fields(CacheMetadata)),
    "PagesMetadata": (PAGES_STEP, documented_fields(PagesMetadata)),
    "PagedOptions": (PAGED_OPTIONS, documented_fields(PagedOptions)),
    "dense.init": (slotted(dense.init, "slots"), documented_arguments(dense.init)),
    "window.init": (slotted(window.init, "window"), documented_arguments(window.init)),
    "latent.init": (LATENT_CACHE, documented_arguments(caches.latent.init)),
    "pages.init": (INIT_PAGES, documented_arguments(attn_core.caches.pages.init)),
    "allocator.create": (CREATE_ALLOCATOR, documented_arguments(allocator.create)),
}


class NoSilentArgumentsTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in TABLES)
  def test_each_has_an_effect_or_is_unused(self, name):
    effects, documented = TABLES[name]
    unused = {field for field, text in documented.items() if re.search(r"\b[Uu]nused\b", text)}
    print(f"{code_measures.MARK}{name}: {len(effects)} with an effect; documented as unused: "
          f"{', '.join(sorted(unused)) or 'none'}")
    self.assertEqual(set(effects) | unused, set(documented))
    self.assertEmpty(set(effects) & unused, "documented as unused, and has an effect")

  def test_all_names_are_found(self):
    self.assertEqual(list(TABLES["attention"][1]), list(inspect.signature(attention).parameters))
    self.assertEqual(list(TABLES["attention"][1]), list(AttentionArguments._fields))
    for name, function in (("dense.init", dense.init), ("window.init", window.init),
                           ("latent.init", caches.latent.init),
                           ("pages.init", attn_core.caches.pages.init),
                           ("allocator.create", allocator.create)):
      self.assertEqual(list(TABLES[name][1]), list(inspect.signature(function).parameters))
    for kind in (AttnConfig, BlockSizes, RingConfig, LatentOptions, PartitionAxis, CacheMetadata,
                 PagesMetadata, PagedOptions):
      self.assertEqual(tuple(TABLES[kind.__name__][1]), kind._fields)
    self.assertEqual(list(TABLES["OperationMetadata"][1]),
                     [field.name for field in dataclasses.fields(OperationMetadata)])

  @parameterized.named_parameters(
      (f"{table}_{name}", table, name) for table in TABLES for name in TABLES[table][0])
  def test_effect(self, table, name):
    effect = TABLES[table][0][name]
    plain = outcome(lambda: effect.function(**effect.base))
    changed = outcome(lambda: effect.function(**{**effect.base, name: effect.value}))
    self.assertNotEqual(plain, changed)


if __name__ == "__main__":
  absltest.main()
