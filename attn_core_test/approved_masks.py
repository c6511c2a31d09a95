# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks as text: pictures, block maps, formulas, bounds and dropout, and rotary embeddings."""

import itertools
from typing import Any, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import attn_core
from attn_core import MaskInfo, Rope, masks
from attn_core.masks import (banded, block_map, dropout, mask as mask_lib, materialize,
                             position_range, render, tile)
from attn_core.rope import frequencies, rope as rope_lib
from attn_core.types import MaskOperands
from attn_core_test import masks_cases
from attn_core_test.approved_text import array, attempt, text
from attn_core_test.approved_values import alternatives

SHAPE = B, H, T, S = 2, 3, 11, 13
SIZES = block_map.Sizes(T, S, 3, 4)
RANDOM = 24  # random masks


def ints(*values: Any) -> np.ndarray:
  return np.array(values, np.int32)


Q_IDS, K_IDS = ints([0] * 4 + [1] * 5 + [-1] * 2), ints([0] * 5 + [1] * 6 + [2, -1])
LEAVES: dict[str, masks.Mask] = {
    "full": masks.full(), "causal": masks.causal(), "window(2, 1)": masks.window(2, 1),
    "window(None, 3)": masks.window(None, 3), "window(4, None)": masks.window(4, None),
    "window(-1, 3)": masks.window(-1, 3), "chunk(4)": masks.chunk(4), "prefix(5)": masks.prefix(5),
    "prefix of rows": masks.prefix(ints(2, 7)),
    "segments": masks.segments(Q_IDS, K_IDS),
    "segments of rows": masks.segments(np.concatenate([Q_IDS, Q_IDS[:, ::-1]]), K_IDS),
    "lengths": masks.lengths(ints(6, 11), ints(9, 3)),
    "key lengths": masks.lengths(None, ints(4, 0)),
    "query lengths": masks.lengths(ints(3, 7)),
    "dense": masks.dense(np.arange(T * S).reshape(1, 1, T, S) % 7 < 4),
    "dense of heads": masks.dense(np.arange(B * H * S).reshape(B, H, 1, S) % 5 < 3),
    "custom": masks.custom(masks_cases.even_sum),
    "custom, table": masks.custom(masks_cases.from_table, ints(1, 5, 9)),
    "offset 2": masks.offset(masks.causal(), 2), "offset of rows": masks.offset(
        masks.window(1, 0), ints(3, -1)),
    "positions": masks.positions(np.arange(T, dtype=np.int32)[None, ::-1] + 2, None),
    "key positions": masks.positions(None, np.arange(S, dtype=np.int32)[None] * 2, masks.chunk(3)),
    "placed": masks.placed(masks.causal(), ints(range(1, 23, 2)), ints(
        range(0, 26, 2)), (20, 23))}


AT = mask_lib.Coordinates(*(x.astype(np.int32) for x in np.ogrid[:B, :H, :T, :S]), *(
    x.astype(np.int32) for x in np.ogrid[:1, :1, :T, :S][2:]))


def _by_role(mask: masks.Mask) -> masks.Mask:
  """Returns a mask whose arrays are numpy's, and broadcast to the logits."""
  shapes = {mask_lib.QUERY: (-1, 1, T, 1), mask_lib.KEY: (-1, 1, 1, S),
            mask_lib.BATCH: (-1, 1, 1, 1)}
  arrays, structure = jax.tree.flatten(mask)
  return jax.tree.unflatten(structure, [
      np.asarray(x).reshape(shapes.get(role, np.shape(x)))
      for x, role in zip(arrays, mask_lib.leaf_roles(mask))])


def picture(mask: masks.Mask) -> str:
  """Returns the mask of the first row and head, the others by a digest, or an error."""
  try:
    seen = np.broadcast_to(_by_role(mask).visible(AT), SHAPE)
    return f"{array(seen[0, 0])} {array(seen.astype(np.int32))}"
  except (ValueError, TypeError) as exception:
    return f"{type(exception).__name__}: {exception}"


def described(mask: masks.Mask) -> Iterator[str]:
  """Yields all that the library says about a mask without evaluating attention."""
  yield render.describe(mask)
  yield picture(mask)
  yield f"blocks {''.join('.+#'[kind] for kind in _kinds(mask).reshape(-1))}"
  structure = jax.tree.structure(mask)
  yield "; ".join((
      f"roles {' '.join(mask_lib.leaf_roles(mask))}", f"bounds {position_range.bounds(mask)}",
      f"narrow {position_range.is_narrow(mask)}", attempt(
          lambda: position_range.static_superset(mask)),
      attempt(lambda: banded.from_mask(mask, T, S)),
      attempt(lambda: banded.from_structure(structure, T, S, has_bias=False)),
      attempt(lambda: banded.from_structure(structure, T, S, has_bias=True))))


def _kinds(mask: masks.Mask) -> np.ndarray:
  on_host = jax.tree.map(np.asarray, mask)
  return block_map.host_kinds(on_host, SIZES)


def leaves() -> Iterator[str]:
  """Yields every constructor's mask, and drawings of some."""
  for name, mask in LEAVES.items():
    yield name
    yield from (f"  {line}" for line in described(mask))
    evaluated = jax.jit(lambda mask: materialize.to_dense(mask, SHAPE))
    yield f"  evaluated {attempt(lambda mask=mask, run=evaluated: run(mask))}"
    kinds = jax.jit(lambda mask: block_map.block_kinds(mask, SIZES))
    traced = attempt(lambda mask=mask, run=kinds: run(mask))
    if "Error" not in traced:
      yield f"  traced {traced}"
  for name, mask in LEAVES.items():
    yield f"{name}, drawn"
    yield from (f"  {line}".rstrip() for line in attempt(lambda mask=mask: render.show(
        mask, T, S, block_q=4, block_kv=5, row=1, head=2)).strip("'").split("\\n"))
  for queries, keys, blocks in ((300, 200, (None, None)), (64, 96, (8, 8)), (5, None, (2, 2)),
                                (1000, 5000, (128, 256)), (9, 9, (100, 3))):
    yield f"causal & window, {queries} x {keys}, blocks {blocks}"
    drawn = render.show(masks.causal() & masks.window(queries // 3, 0), queries, keys,
                        block_q=blocks[0], block_kv=blocks[1])
    lines = drawn.split("\n")
    yield from (f"  {line}".rstrip() for line in (lines if len(lines) < 24 else [
        *lines[:9], *lines[-9:]]))


def pairs() -> Iterator[str]:
  """Yields pairs of masks, and random deeper ones."""
  names = list(LEAVES)
  for index, (one, two) in enumerate(itertools.combinations(names, 2)):
    mask = (LEAVES[one] & LEAVES[two], LEAVES[one] | LEAVES[two], LEAVES[one] & ~LEAVES[two],
            ~(LEAVES[one] | ~LEAVES[two]))[index % 4]
    kinds = "".join(".+#"[kind] for kind in _kinds(mask).reshape(-1))
    yield f"{'and or andnot nor'.split()[index % 4]} {one}, {two}: {kinds} " + "; ".join((
        f"{position_range.bounds(mask)}", attempt(
            lambda mask=mask: position_range.static_superset(mask)),
        attempt(lambda mask=mask: banded.from_mask(mask, T, S))))
  for seed in range(RANDOM):
    rng = np.random.default_rng(seed)
    recipe = masks_cases.Draw(rng, rng, SHAPE).recipe(3, seed % 3 > 0)
    yield f"random {seed}"
    yield from (f"  {line}" for line in described(masks_cases.build(recipe)))


def algebra() -> Iterator[str]:
  """Yields equality, hashes, and the block maps of kinds of blocks."""
  some = [masks.causal(), masks.causal() & masks.full(), masks.full() & masks.causal(),
          masks.full() | masks.causal(), ~~masks.causal(), ~masks.full(), masks.window(None, 0),
          masks.window(None, None), masks.chunk(4), masks.chunk(5), masks.prefix(ints(3, 4)),
          masks.prefix(jnp.asarray(ints(3, 4))), masks.prefix(ints(3, 5)), masks.offset(
              masks.causal(), 0), masks.offset(masks.full(), 3), masks.offset(
                  masks.offset(masks.causal(), 2), 3)]
  yield from (text(mask) for mask in some)
  for row in some:
    yield "equal " + "".join("#" if row == other else "." for other in some)
  yield f"hashes {len({hash(m) for m in some[:10]})} of {len(set(some[:10]))}"
  for made in (masks.prefix, masks.dense, lambda x: masks.custom(lambda *at: True, x)):
    yield "arrays stay where they are: " + " ".join(type(leaf).__module__.split(".")[0] for x in (
        np.ones((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool), np.ones(2, np.int32),
        jnp.ones(2, jnp.int32)) for leaf in _leaves_or_none(made, x))
  yield "bool: " + attempt(lambda: bool(masks.causal()))
  yield "and 3: " + attempt(lambda: masks.causal() & 3)
  kinds = np.random.default_rng(1).integers(0, 3, (2, 4, 5, 7)).astype(np.int8)
  for name, function in {
      "map": lambda: block_map.block_map(kinds), "traced": lambda: block_map.block_map(
          jnp.asarray(kinds)), "full": lambda: block_map.full_map(np.where(kinds == 1, 0, kinds)),
      "any": lambda: [(m.any_full, m.any_partial) for m in (
          block_map.block_map(kinds), block_map.block_map(np.where(kinds == 1, 0, kinds)),
          block_map.full_map(jnp.asarray(kinds)), block_map.block_map(jnp.asarray(kinds)),
          block_map.block_map(np.where(kinds == 2, 1, kinds)))],
      "merged": lambda: block_map.merge_heads(kinds, 2),
      "merged, one": lambda: block_map.merge_heads(kinds[:, :1], 4),
      "joined": lambda: block_map.join_full(kinds, 2), "joined, 3": lambda: block_map.join_full(
          np.where(kinds[..., :6] == 1, 2, kinds[..., :6]), 3),
      "sizes": lambda: [(s.num_query_blocks, s.num_key_blocks, s.query_padding, s.key_padding)
                        for s in (SIZES, block_map.Sizes(12, 12, 4, 5), block_map.Sizes(1, 7, 8, 7)
                                  )],
      "tiles": _tiles, "padded": lambda: [tile.pad_mask(*parts, 2, 3) for parts in map(
          _parts, (LEAVES["segments"], LEAVES["dense"], LEAVES["placed"], LEAVES["lengths"]))],
      "slices": lambda: [tile.slice_at(jnp.arange(35).reshape(5, 7), starts, (2, 3)) for starts in (
          (1, 2), (jnp.int32(4), 6), (0, jnp.int32(1)))],
  }.items():
    yield f"{name}: {attempt(function)}"


def _leaves_or_none(made: Any, x: Any) -> list[Any]:
  try:
    return jax.tree.leaves(made(x))
  except ValueError:
    return [None]


def _parts(mask: masks.Mask) -> tuple[Any, MaskOperands]:
  arrays, structure = jax.tree.flatten(mask)
  return structure, MaskOperands(tuple(map(jnp.asarray, arrays)))


def _tiles() -> list[Any]:
  """Returns a tile of each mask with arrays."""
  at = tile.Tile(1, 2, 3, 4, 1, 5, 6)
  found = []
  for mask in LEAVES.values():
    structure, operands = _parts(mask)
    if operands.arrays:
      part, coordinates = tile.slice_mask(structure, operands, at)
      found.append((render.describe(part), np.asarray(jnp.broadcast_to(
          part.visible(coordinates), (1, 1, 5, 6)))))
  return found


def constructors() -> Iterator[str]:
  """Yields what the constructors make of other arguments."""
  yield from alternatives(lambda left, right: text(masks.window(left, right)),
                          {"left": 3, "right": 2}, {"left": (-3, -2**31), "right": (2**31 - 1,)})
  yield from alternatives(lambda size: masks.chunk(size), {"size": 3})
  for name, good in {"prefix": {"length": ints(3, 4)}, "dense": {"array": np.ones((2, 1, 3, 4),
                                                                              bool)},
                     "segments": {"query_ids": ints([1, 2], [3, 4]), "key_ids": ints([1, 2, 3])},
                     "lengths": {"query_lengths": ints(2, 3), "key_lengths": ints(1, 2)},
                     "positions": {"query": ints([1, 2]), "key": ints([3, 4]),
                                   "mask": masks.causal()},
                     "offset": {"mask": masks.causal(), "amount": ints(1, 2)},
                     "placed": {"mask": masks.causal(), "query": ints([1, 2]), "key": ints([0, 3]),
                                "size": (4, 5)}}.items():
    for line in alternatives(getattr(masks, name), good):
      yield f"{name}: {line}"
  predicates = {
      "a number": 3, "3 arguments": lambda b, h, q: q, "5 arguments": lambda b, h, q, k, x: q,
      "any": lambda *x: x[0] > 0, "keyword": lambda b, h, q, k, *, y: q, "builtin": max,
      "array held": (lambda table: lambda b, h, q, k: table[h] > k)(ints(1, 2, 3)),
      "array default": lambda b, h, q, k, t=ints(1, 2): t[0] > k}
  for name, predicate in predicates.items():
    yield f"custom {name}: {attempt(lambda p=predicate: masks.custom(p))}"
    yield f"custom {name}, operand: {attempt(lambda p=predicate: masks.custom(p, ints(1, 2)))}"
  for name, good in {
      "from_segments": {"q_segment_ids": Q_IDS, "kv_segment_ids": K_IDS},
      "from_attention_mask": {"attention_mask": np.ones((2, 5), bool)},
      "from_cu_seqlens": {"cu_seqlens_q": ints(0, 3, 3, 7), "total_q": 9,
                          "cu_seqlens_k": ints(0, 2, 4, 5), "total_k": 5}}.items():
    for line in alternatives(lambda name=name, **given: getattr(MaskInfo, name)(**given), good):
      yield f"{name}: {line}"
  for info in (MaskInfo(), MaskInfo(np.ones((2, 1, 3, 4), bool)), MaskInfo(
      None, ints([1]), ints([2]), ints([3]), ints([4])), MaskInfo(q_positions=ints([3])),
               MaskInfo(None, None, ints([2])), MaskInfo(None, ints([2]))):
    yield f"to_mask {text(info)}: {attempt(lambda info=info: info.to_mask(masks.causal()))}"
  good = {"mask": masks.causal(), "queries": 9, "keys": 7, "block_q": 2, "block_kv": 3, "row": 0,
          "head": 0}
  yield from alternatives(lambda **given: len(render.show(**given)) if 2**31 not in (
      given["queries"], given["keys"]) else None, good)
  yield from alternatives(lambda **given: len(render.show(**{**good, **given})), {
      "mask": LEAVES["dense of heads"], "row": 2, "head": 3}, {"row": (1,), "head": (2,)})


def dropouts() -> Iterator[str]:
  """Yields which weights are dropped, and at which positions a mask looks."""
  batch, head, query, key = np.ogrid[:2, :2, :5, :7]
  at = mask_lib.Coordinates(*(jnp.int32(x) for x in (batch, head, query, key, query, key)))
  for seed in (0, 3):
    for name, rng in (("key", jax.random.key(seed)), ("raw", jax.random.PRNGKey(seed)),
                      ("rbg", jax.random.key(seed, impl="rbg"))):
      words = dropout.key_words(rng)[0]
      for probability in (0.0, 0.3, 0.999):
        yield f"{name} {seed} {probability}: {text(words)} " + array(np.asarray(
            dropout.keep_mask(words, at, probability)).reshape(-1, 7)[:5])
  yield f"kept {[dropout.kept_scale(p) for p in (0.0, 0.25, 0.9)]}"
  for name, mask in {**LEAVES, "and": LEAVES["positions"] & LEAVES["segments"],
                     "and causal": LEAVES["positions"] & masks.causal(),
                     "not": ~LEAVES["offset 2"], "or": LEAVES["dense"] | LEAVES["offset 2"],
                     "deep": masks.offset(LEAVES["positions"], 5)}.items():
    if all(np.shape(x)[0] in (1, 2) for x in jax.tree.leaves(mask)):
      structure, operands = _parts(mask)
      expanded, coordinates = materialize.expand(structure, operands, SHAPE)
      moved = dropout.move_to_positions(expanded, coordinates)
      yield f"{name}: " + " ".join(array(jnp.ravel(x[-1:])) for x in (
          moved.query_position, moved.key_position))


# --- Rotary embeddings. --------------------------------------------------------------------------

FACTORS = {"short_factor": (1.0, 1.5, 2.0, 2.5, 3.0), "long_factor": (2.0, 3.0, 5.0, 7.0, 11.0)}
ROPES = {
    "default": Rope(), "theta": Rope(rope_theta=500.0), "none": Rope("none"),
    "partial": Rope(partial_rotary_factor=0.6), "linear": Rope("linear", factor=4.0),
    "dynamic": Rope("dynamic", factor=2.0, max_position_embeddings=16),
    "yarn": Rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0,
                 beta_slow=2.0),
    "yarn, mscale": Rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=0.7,
                         mscale_all_dim=0.3, truncate=False),
    "yarn, factor": Rope("yarn", factor=8.0, original_max_position_embeddings=32,
                         attention_factor=1.25),
    "yarn by lengths": Rope("yarn", max_position_embeddings=96,
                            original_max_position_embeddings=32),
    "longrope": Rope("longrope", factor=4.0, original_max_position_embeddings=32,
                     max_position_embeddings=128, **FACTORS),
    "longrope by lengths": Rope("longrope", original_max_position_embeddings=32,
                                max_position_embeddings=64, **FACTORS),
    "llama3": Rope("llama3", factor=8.0, original_max_position_embeddings=512,
                   low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500.0),
    "proportional": Rope("proportional", partial_rotary_factor=0.4),
    "mrope": Rope("mrope", mrope_section=(2, 1, 2)),
    "mrope, interleaved": Rope("mrope", mrope_section=(3, 1, 1), mrope_interleaved=True),
    "interleaved": Rope(interleaved=True)}


def ropes() -> Iterator[str]:
  """Yields frequencies, factors and tables of each rotary embedding."""
  positions = ints([0, 1, 7, 31, 32, 100, 40000], [3, 3, 2, 1, 0, -1, 5])
  for name, rope in ROPES.items():
    yield name
    for width in (10, 14, 7, 2):
      yield f"  width {width}: " + "; ".join(attempt(
          lambda r=rope, w=width, f=function: f(r, w)) for function in (
              frequencies.rotary_width, frequencies.inverse_frequencies))
    for length in (16, 31, 32, 33, 100, None, jnp.int32(33), jnp.int32(15), 0, "x"):
      yield f"  length {text(length)}: " + attempt(
          lambda r=rope, n=length: frequencies.inverse_frequencies(r, 10, n))
    yield "  " + "; ".join(attempt(lambda r=rope, f=function: f(r)) for function in (
        frequencies.scale_of, frequencies.attention_factor, frequencies.check_rope))
    yield f"  axes {attempt(lambda r=rope: frequencies.position_axes(r, 10))}"
    at = np.stack([positions, positions // 2, positions[::-1]]) if name.startswith("mrope") else (
        positions)
    yield f"  table {attempt(lambda r=rope, at=at: rope_lib.rotary_table(r, at, 10))}"
    x = np.arange(2 * 7 * 3 * 10, dtype=np.float32).reshape(2, 7, 3, 10) % 11
    yield f"  rotated {attempt(lambda r=rope, at=at, x=x: rope_lib.rotary(x, x[:, :, :1], at, r))}"
  yield f"mscale {[frequencies.yarn_mscale(a, b) for a in (0.5, 1.0, 2.0) for b in (1.0, 0.7)]}"


def rope_arguments() -> Iterator[str]:
  """Yields what the functions of rotary embeddings make of other arguments."""
  owners = {"short": "longrope", "long_": "longrope", "low_f": "llama3", "high_": "llama3",
            "mrope": "mrope", "max_p": "dynamic", "rope_": "linear", "inter": "none"}
  for field in Rope._fields:
    for kind in dict.fromkeys((owners.get(field[:5], "yarn"),
                               "longrope" if field == "factor" else "yarn")):
      rope = ROPES[kind]
      for line in alternatives(lambda rope=rope, **given: text(frequencies.check_rope(
          rope._replace(**given))), {field: 0}, {field: ("su", (1.0, 2.0), (1, -2), (1, 2, 3))}):
        if "Error" in line:
          yield f"{kind}: {line}"
  for given in (None, {}, {"rope_type": "linear", "factor": 2}, {"type": "su", **FACTORS},
                {"rope_type": "x"}, {"type": "linear", "rope_type": "yarn"}, {"factor": 3.0},
                {"rope_type": "dynamic", "factor": 2.0}, {"mrope_section": [1, 2, 2]},
                {"type": "mrope", "mrope_section": [2, 1]}, {"rope_type": "default", "a": 1},
                {"rope_theta": 7.0, "rope_type": "default"}, {"rope_type": None}, 3, [1],
                {"rope_type": "yarn", "factor": 2.0, "beta_fast": 3, "finetuned": True},
                {"rope_type": "llama3", "factor": 2.0}, {"rope_type": "linear", "factor": "x"},
                {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 3}):
    for more in ({}, {"rope_theta": 5.0, "max_position_embeddings": 70, "interleaved": True}):
      yield f"{given} {more}: " + attempt(
          lambda given=given, more=more: frequencies.rope_from_dict(given, **more))
  x = np.arange(2 * 3 * 2 * 6, dtype=np.float32).reshape(2, 3, 2, 6) % 7
  at = ints([0, 2, 5])
  good = {"query": x, "key": x[:, :, :1], "positions": at, "rope": Rope(), "layout": "bthd",
          "key_positions": at}
  yield from alternatives(rope_lib.rotary, good, {
      "layout": ("bhtd", "thd"), "rope": (Rope("none"), Rope("x")), "key_positions": (at + 1,)},
                          traced=True)
  cosine, sine = rope_lib.rotary_table(Rope(), at, 4)
  good = {"x": x, "cosine": np.asarray(cosine), "sine": np.asarray(sine), "interleaved": False,
          "layout": "bthd"}
  yield from alternatives(rope_lib.apply_rotary, good, {"layout": ("bhtd", "thd")}, traced=True)
  for interleaved, layout, half in itertools.product((False, True), ("bthd", "bhtd"),
                                                     ("float32", "bfloat16")):
    y = x.swapaxes(1, 2) if layout == "bhtd" else x
    yield f"{interleaved} {layout} {half}: " + attempt(
        lambda a=(interleaved, layout), y=y.astype(jnp.dtype(half)): rope_lib.apply_rotary(
            y, cosine, sine, *a))
  good = {"xq": x, "xk": x[:, :, :1], "freqs_cis": np.exp(1j * np.arange(9)).reshape(1, 3, 3)
          .astype(np.complex64)[0]}
  yield "complex: " + attempt(lambda: attn_core.apply_complex_rotary(**good))
  yield from alternatives(attn_core.apply_complex_rotary, good, traced=True)
  good = {"rope": Rope(), "positions": at, "head_dim": 6, "length": None}
  yield from alternatives(rope_lib.rotary_table, good, {"rope": (ROPES["mrope"], ROPES["dynamic"])})


FILES = {"masks_leaves": leaves, "masks_pairs": pairs, "masks_algebra": algebra,
         "masks_arguments": constructors, "masks_dropout": dropouts, "rope_numbers": ropes,
         "rope_arguments": rope_arguments}
