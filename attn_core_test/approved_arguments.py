# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong and right arguments of `attention`, its mechanisms and adapters as text."""

import inspect
import itertools
import types
from typing import Any, Iterator
from unittest import mock

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import (BlockSizes, MaskInfo, OperationMetadata, PagedOptions, PagesMetadata,
                       PagesV1, PagesV2, PagesV3, adapters, attention, caches, create_mesh, masks,
                       mechanism_functions)
from attn_core.adapters import common
from attn_core.arguments.arguments import AttentionOptions
from attn_core.types import AttentionMechanism, AttentionOutput
from attn_core_test import approved_calls, bad_input_cases
from attn_core_test.approved_text import Line, attempt, text
from attn_core_test.approved_values import alternatives, shapes_of

B, T, S, H, K, D, E = 2, 5, 7, 6, 3, 4, 8
numbers = approved_calls.numbers
METADATA = OperationMetadata(platform="cpu")
GOOD: dict[str, Any] = {
    "query": numbers(B, T, H, D), "key": numbers(B, S, K, D), "value": numbers(B, S, K, E),
    "mechanism": "auto", "metadata": METADATA, "mode": "__train__", "layout": "bthd",
    "mask": np.ones((1, 1, T, S), bool), "mask_info": None, "bias": numbers(1, H, T, S),
    "init_bias": None, "causal": True, "query_offset": np.int32([2, 1]), "sliding_window": (3, 1),
    "chunk_size": 4, "softmax_scale": 0.5, "logits_soft_cap": 20.0, "softmax_aux": numbers(H, 2),
    "dropout_prob": 0.25, "dropout_rng": np.uint32([3, 4]), "deterministic": None,
    "cum_seqlens_q": None, "cum_seqlens_k": None, "cache_view": None, "cache_metadata": None,
    "normalize_output": True, "precision": None, "compute_dtype": None, "block_sizes": None,
    "policy": None, "prevent_cse": True, "fused_backward": False, "optimized": False,
    "mask_value": -1e30, "vmem_limit_bytes": None, "return_lse": False, "return_weights": False}
MORE: dict[str, tuple[Any, ...]] = {
    "mechanism": (*AttentionMechanism, "flash", "Splash", "vanila"),
    "mode": ("train", "__insert__"),
    "layout": ("bhtd", "BTHD"), "block_sizes": (BlockSizes(8), BlockSizes(0), BlockSizes(2.0)),
    "policy": ("dots_saveable", "save"),
    "precision": ("highest", ("high", "default"), ["high"] * 3),
    "compute_dtype": ("bfloat16", jnp.float64, "int8"), "deterministic": (False,),
    "mask_value": (-1e9, -1e8), "init_bias": (lambda: numbers(1, 1, T, S), lambda: 3),
    "mask_info": (MaskInfo(), MaskInfo(q_positions=np.zeros((B, T), np.int32)),
                  MaskInfo.from_segments(np.zeros((B, T)), np.zeros((B, S)))),
    "query_offset": (2**30, -2**30 + 1, np.int32([1, 2, 3])), "mask": (masks.full(), masks.causal)}


def _noted(**given: Any) -> list[str]:
  """Returns the call that the mechanism would get, in one line, or raises its error."""
  approved_calls.NOTED.clear()
  with mock.patch.object(approved_calls.attention_module, "_execute", approved_calls.as_run):
    output = shapes_of(lambda: attention(**given))
  first = approved_calls.NOTED[0] if approved_calls.NOTED else "nothing runs"
  return [first.replace("AttentionSpec", ""), text(output[:3])]


def of_attention() -> Iterator[str]:
  """Yields what `attention` makes of one other argument."""
  yield f"plain: {attempt(lambda: _noted(**GOOD))}"
  yield from alternatives(_noted, {name: GOOD[name] for name in GOOD}, MORE)


def bad_input() -> Iterator[str]:
  """Yields the messages to bad calls that others of the tests know by some words only."""
  for name, changes, *_ in bad_input_cases.VALUES:
    said = attempt(lambda changes=changes: _noted(**{**bad_input_cases.GOOD, **changes}))
    yield f"{name}: {said}"


PAGES = {"page_attention": PagesV1, "ragged_page_attention_v2": PagesV2,
         "ragged_page_attention_v3": PagesV3}


def over_pages() -> Iterator[str]:
  """Yields what calls over pages make of one other argument."""
  tables, contexts, starts = np.int32([[4, 0], [2, 3]]), np.int32([6, 5]), np.int32([0, 2, 3])
  for name, layout in PAGES.items():
    held = {layout: caches.pages.init(layout, 5, 4, caches.pages.Heads(K, D, D), "float32")
            for layout in PAGES.values()}
    tokens = 2 if layout is PagesV1 else 3
    new = (None if layout is not PagesV3 else numbers(tokens, K, D))
    requests = PagesMetadata(tables, contexts, None if layout is PagesV1 else starts)
    good = {"query": numbers(tokens, H, D), "key": new, "value": new, "mechanism": name,
            "metadata": METADATA, "mode": None, "layout": "thd", "cache_view": held[layout],
            "cache_metadata": requests, "sliding_window": (3, 0), "compute_dtype": None,
            "cum_seqlens_q": None, "bias": None, "mask": None, "query_offset": None,
            "softmax_aux": numbers(H), "dropout_prob": 0.0, "return_lse": True}
    more = {"cache_view": (*held.values(), caches.pages.init(
        layout, 5, 4, caches.pages.Heads(K, D, D), "bfloat16"), caches.pages.init(
            layout, 5, 4, caches.pages.Heads(K, D, D), "int8", "token")),
            "cache_metadata": (requests._replace(context_lens=np.int32([9, 5])),
                               requests._replace(query_start_loc=starts), tuple(requests)),
            "mechanism": (*PAGES, "vanilla"), "compute_dtype": ("bfloat16",),
            "sliding_window": ((2**31 - 1, 0), (3, 5))}
    yield f"{name}: {attempt(lambda good=good: _noted(**good))}"
    tried = good if layout is PagesV2 else {"key": new, "value": new, "query": good["query"]}
    for argument in tried:
      refused = alternatives(lambda g=good, **x: _noted(**{**g, **x}), {argument: good[argument]})
      yield from (f"{name}: {line}" for line in refused if "Error" in line)
    for argument, values in more.items():
      for value in values:
        yield f"{name}: {argument} = {text(value)[:60]}: " + attempt(
            lambda g={**good, argument: value}: _noted(**g))


# --- Functions that call `attention`. ------------------------------------------------------------


def _said(query: Any, key: Any, value: Any, **given: Any) -> AttentionOutput:
  """Notes the arguments of `attention`, and returns results of the right shapes."""
  parts = [f"{name}={text(x)}" for name, x in sorted(
      {"query": query, "key": key, "value": value, **given}.items()) if x is not None]
  named = lambda some: {name for name, equals, _ in (part.partition("=") for part in some)
                        if equals and name.isidentifier()}
  absent = named(PLAIN) - named(parts)
  SAID.append(", ".join([part for part in parts if part not in PLAIN]
                        + [f"no {name}" for name in sorted(absent)]) or "the same")
  LAST[:] = parts
  rows = query.shape[:-1]
  out = jnp.asarray(numbers(*rows, value.shape[-1] if value is not None else query.shape[-1]))
  swapped = (*rows[:-2], rows[-1], rows[-2])
  weights = jnp.asarray(numbers(*swapped, 2))
  return AttentionOutput(out, weights if given.get("return_weights") else None,
                         jnp.asarray(numbers(*swapped)))


SAID: list[str] = []
LAST: list[str] = []  # the arguments of the last call
RESULT: list[str] = []  # of the last call, as text
PLAIN: set[str] = set()  # those of a plain call, which are not written again


def _is_plain() -> None:
  """Remembers the arguments of the last call as those of a plain one."""
  PLAIN.clear()
  PLAIN.update(LAST, RESULT)


def _through(caller: Any, function: Any, /, *arrays: Any, **given: Any) -> str:
  """Returns the arguments of `attention` that a function makes, and its results."""
  SAID.clear()
  with mock.patch.object(caller, "attention", _said):
    said = attempt(lambda: function(*arrays, **given))
  RESULT[:] = [said]
  return " ; ".join([*SAID, *([f"-> {said}"] if said not in PLAIN else [])])


def of_mechanisms() -> Iterator[str]:
  """Yields the arguments that each mechanism's function passes to `attention`."""
  x = numbers(B, T, H, D)
  requests = PagesMetadata(np.int32([[0, 1]]), np.int32([3]), np.int32([0, 2]))
  for mechanism in (*AttentionMechanism, "ring_attention", "blockwise_attn"):
    name = str(mechanism)
    function = getattr(mechanism_functions, name, None)
    if function is None:
      yield f"{name}: no function"
      continue
    held = [caches.pages.init(layout, 5, 4, caches.pages.Heads(H, D, D), "float32")
            for layout in PAGES.values() if PAGES.get(name) is layout]
    new = (numbers(2, H, D),) * 2 if name.endswith("v3") else ()
    if name == "multi_latent_ragged_page_attention":
      held, new = [caches.latent_pages.init(5, 4, (D - 1, 1), dtype="float32")], (numbers(2, D),)
    arrays = (x, x, x) if not held else (numbers(2, H, D), *new, *held, requests)
    names = list(inspect.signature(function).parameters)
    PLAIN.clear()
    yield f"{name}{names}: {_through(mechanism_functions.call, function, *arrays)}"
    _is_plain()
    for given in ({"causal": False}, {"mechanism": "ring"}, {"foo": 3}, {"query_offset": 2},
                  {"options": PagedOptions()}, {"block_sizes": BlockSizes(3)},
                  {"query_chunk_size": 4, "key_chunk_size": 5}, {"blocksize_q": 3}):
      yield f"  {given}: {_through(mechanism_functions.call, function, *arrays, **given)}"
  yield f"options {sorted(AttentionOptions.__annotations__)}"
  yield f"options over pages {PagedOptions._fields if hasattr(PagedOptions, '_fields') else ''}"


class _Sows:
  """Prints what is stored in it."""

  def sow(self, collection: str, name: str, value: Any) -> None:
    SAID.append(f"sow {collection} {name} {text(value)}")


def _layer(**fields: Any) -> Any:
  projection = lambda x: jnp.concatenate([x] * (H * D // 8))
  return types.SimpleNamespace(**{
      "query_proj": projection, "key_proj": projection, "value_proj": projection,
      "output_proj": lambda x: x[:3], "num_heads": H,
      "dropout": types.SimpleNamespace(p=0.25, inference=False), **fields})


# Adapter -> its keywords, of which one at a time is left out or replaced.
ADAPTERS: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "jax_nn": (adapters.dot_product_attention, {
        "bias": numbers(H, T, S), "mask": np.arange(S) < 5, "scale": 0.5, "is_causal": True,
        "query_seq_lengths": np.int32([4, 5]), "key_value_seq_lengths": np.int32([7, 3]),
        "local_window_size": (2, 1), "implementation": "xla", "return_residual": True},
               {"implementation": ("cudnn", "flash_attn2")}),
    "tokamax": (adapters.tokamax_dot_product_attention, {
        "bias": numbers(1, H, 1, S), "mask": masks.causal(), "scale": 0.5, "is_causal": False,
        "query_seq_lengths": None, "key_value_seq_lengths": np.int32([7, 3]),
        "local_window_size": 2, "logits_soft_cap": None, "precision": "highest",
        "implementation": ("mosaic", "xla"), "q_sharding": None},
                {"implementation": ("mosaic", "triton", "xla_chunked", ["cudnn", "xla"], ())}),
    "flax": (adapters.flax_attention_fn, {
        "bias": numbers(B, H, T, S), "mask": np.ones((B, 1, T, S), np.float32),
        "broadcast_dropout": False, "dropout_rng": np.uint32([1, 2]), "dropout_rate": 0.25,
        "deterministic": False, "dtype": "bfloat16", "precision": "high", "module": None,
        "is_causal": True, "force_fp32_for_softmax": True, "einsum_dot_general": None,
        "qk_attn_weights_einsum": None, "attn_weights_value_einsum": None,
        "input_positions": None}, {"module": (_Sows(),), "dtype": ("float16",)}),
    "keras": (adapters.keras_dot_product_attention, {
        "bias": None, "mask": np.ones((B, 1, T, S), bool), "scale": 0.5, "is_causal": True,
        "flash_attention": None, "attn_logits_soft_cap": 20.0}, {})}


def of_adapters() -> Iterator[str]:
  """Yields the arguments that each adapter passes to `attention`."""
  arrays = numbers(B, T, H, D), numbers(B, S, K, D), numbers(B, S, K, E)
  for name, (function, good, more) in ADAPTERS.items():
    run = lambda function=function, arrays=arrays, **given: Line(_through(
        common, function, *arrays, **given))
    PLAIN.clear()
    yield f"{name}: {run()}"
    yield f"{name}: {run(**good)}"
    _is_plain()
    yield from (f"{name}: {line}" for line in alternatives(run, good, more))
    for given in ({"softmax_scale": 3}, {"causal": True}, {"foo": 1}, {"optimized": True},
                  {"query_offset": 2}, {"compute_dtype": "bfloat16"}, {"mechanism": "ring"},
                  {"mask_info": MaskInfo(q_positions=np.zeros((B, T), np.int32))},
                  {"mask_info": MaskInfo(np.ones((B, 1, T, S), bool))},
                  {"chunk_size": 3, "sliding_window": 4}, {"logits_soft_cap": 3.0}):
      yield f"{name} {text(given)}: {run(**given)}"
    for one in ((numbers(T, H, D), numbers(S, K, D), numbers(S, K, E)),
                tuple(x[None] for x in arrays), (arrays[0][:, :, 0], *arrays[1:]),
                (arrays[0].astype("float16"), *arrays[1:]), (1, 2, 3), ("x", None, [1])):
      first = dict(list(good.items())[:1])
      yield f"{name} {text(one)[:90]}: {_through(common, function, *one, **first)}"
    traced = jax.make_jaxpr(lambda s, f=function: f(*arrays, **(
        {"scale": s} if "scale" in good else {})))
    yield f"{name} traced: {_through(common, lambda: len(traced(0.5).out_avals))}"


def of_layers() -> Iterator[str]:
  """Yields the arguments that a layer of Equinox passes, and shardings that tokamax reads."""
  arrays = numbers(T, 8), numbers(S, 8), numbers(S, 8)
  good = {"mask": np.ones((T, S), bool), "key": np.uint32([1, 2]), "inference": None,
          "process_heads": None}
  run = lambda layer=_layer(), arrays=arrays, **given: Line(_through(
      common, attn_core.adapters.equinox_attention, layer, *arrays, **given))
  PLAIN.clear()
  yield run(**good)
  _is_plain()
  yield from alternatives(run, good, {"process_heads": (
      lambda *x: x, lambda *x: (x[0][:1], *x[1:]), lambda q, k, v: (q + 1, k, v))})
  dropouts = [types.SimpleNamespace(p=p, inference=off)
              for p in (0.0, 0.5) for off in (True, False)]
  for dropout, key, inference in itertools.product(dropouts, (None, np.uint32([1, 2])),
                                                   (None, True, False)):
    yield f"{dropout} {key is not None} {inference}: " + run(
        _layer(dropout=dropout), key=key, inference=inference)
  yield run(arrays=tuple(x[None] for x in arrays), key=np.uint32([1, 2]))
  for given in ({"causal": True}, {"foo": 1}, {"dropout_prob": 0.1}, {"softmax_scale": 0.5}):
    yield f"{given}: {run(key=np.uint32([1, 2]), **given)}"
  mesh = create_mesh((2, 1, 1, 2, 2))
  x = numbers(B, T, H, D), numbers(B, S, K, D), numbers(B, S, K, E)
  for spec in (P("dp", "sp", "tp"), P(("dp", "sp"), None, None), P(None, None, "tp", "sp"), P(),
               P(None, None, ("tp", "dp"))):
    yield f"{text(spec)}: " + _through(
        common, adapters.tokamax_dot_product_attention, *x, q_sharding=NamedSharding(mesh, spec))


FILES = {"arguments_attention": of_attention, "arguments_bad_input": bad_input,
         "arguments_pages": over_pages, "arguments_mechanisms": of_mechanisms,
         "arguments_adapters": of_adapters, "arguments_layers": of_layers}
