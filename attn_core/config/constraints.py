# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers around an attention: repeated heads, positions in a cache, sharding constraints."""

from typing import Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.config.metadata import OperationMetadata, resolved_mesh
from attn_core.sharding import partition
from attn_core.types import MODES, ArrayLayout, Mode

Array = jax.Array | np.ndarray


def repeat_key_value(key: Array, value: Array, num_reps: int) -> tuple[jax.Array, jax.Array]:
  """Repeats every key head `num_reps` times; the mechanisms here take K key heads without this.

  Args:
    key: [B, S, K, D].
    value: [B, S, K, E].
    num_reps: H / K.

  Returns:
    (key [B, S, K * num_reps, D], value [B, S, K * num_reps, E]).

  Raises:
    ValueError: an array does not have 4 dimensions, key and value differ in B, S or K, or
      `num_reps` is not an int >= 1.
  """
  checks.integer("num_reps", num_reps, "an int >= 1", lambda x: x >= 1)
  for name, x in (("key", key), ("value", value)):
    checks.array(name, x, "[B, S, K, D]")
    checks.require(x.ndim == 4, name, checks.describe(x), "[B, S, K, D]")
  checks.require(key.shape[:3] == value.shape[:3], "value", checks.describe(value),
                 f"{list(key.shape[:3])} and any width, as the key {checks.describe(key)}")
  return jnp.repeat(key, num_reps, 2), jnp.repeat(value, num_reps, 2)


class Indexed(Protocol):
  """A cache that counts the tokens of each row."""

  @property
  def indexs(self) -> Array: ...


def build_cache_pos(attention_mask: Array, mode: Mode | None = None,
                    cache_view: Indexed | None = None) -> jax.Array:
  """The position of every query: the number of cached tokens plus that of earlier queries.

  A query without a visible key is padding: it does not count, and has its predecessor's position.

  Args:
    attention_mask: bool [B, H, T, S]; True = visible.
    mode: one of MODES or None; checked, but unused: the positions do not depend on it.
    cache_view: a cache with `indexs`, int32 [B], the number of cached tokens of each row; None: no
      cached tokens.

  Returns:
    int32 [B, T].

  Raises:
    ValueError: `attention_mask` has another rank or dtype, `mode` is unknown, or `cache_view` has
      no `indexs` or another number of rows.
  """
  checks.one_of("mode", mode, (*MODES, None))
  checks.array("attention_mask", attention_mask, "bool [B, H, T, S]")
  checks.require(attention_mask.ndim == 4 and attention_mask.dtype == bool, "attention_mask",
                 checks.describe(attention_mask), "bool [B, H, T, S]")
  seen = jnp.cumsum(jnp.any(attention_mask, (1, 3)), -1, dtype=jnp.int32)
  positions = jnp.maximum(seen - 1, 0)
  if cache_view is None:
    return positions
  checks.require(
      hasattr(cache_view, "indexs") and jnp.size(cache_view.indexs) in (1, positions.shape[0]),
      "cache_view", checks.describe(getattr(cache_view, "indexs", cache_view)),
      f"a cache with indexs, int32 [{positions.shape[0]}], as the rows of attention_mask")
  return positions + jnp.reshape(cache_view.indexs, (-1, 1)).astype(jnp.int32)


def apply_qk_shardings(query: Array, key: Array, metadata: OperationMetadata,
                       mode: Mode = "__train__", layout: ArrayLayout = "bthd",
                       ) -> tuple[Array, Array]:
  """Constrains query and key to the shardings of `metadata.get_shardings`.

  Mesh axes that do not divide a dimension are left out. Without a mesh nothing is done.

  Args:
    query: [B, T, H, D] in layout bthd.
    key: [B, S, K, D].
    metadata: mesh and axes.
    mode: one of MODES.
    layout: one of ARRAY_LAYOUTS.

  Returns:
    (query, key), with the same values.

  Raises:
    ValueError: an argument is not an array, `metadata` is not an OperationMetadata, or as
      `OperationMetadata.get_shardings`.
  """
  rules = _checked(metadata).get_shardings(mode, layout)
  return (_constrained(query, rules.query, metadata, "query"),
          _constrained(key, rules.key, metadata, "key"))


def apply_qkv_shardings(query: Array, key: Array, value: Array, metadata: OperationMetadata,
                        mode: Mode = "__train__", layout: ArrayLayout = "bthd",
                        ) -> tuple[Array, Array, Array]:
  """Same as `apply_qk_shardings`, with the value [B, S, K, E] as well.

  Returns:
    (query, key, value), with the same values.
  """
  rules = _checked(metadata).get_shardings(mode, layout)
  return (*apply_qk_shardings(query, key, metadata, mode, layout),
          _constrained(value, rules.value, metadata, "value"))


def shard_attention_prod(attn_output: Array, metadata: OperationMetadata,
                         mode: Mode = "__train__") -> Array:
  """Constrains an attention's output to its sharding, before the output projection.

  Args:
    attn_output: [B, T, H, E], or [B, T, H * E] with the mesh axes of heads on the last dimension.
    metadata: mesh and axes.
    mode: one of MODES.

  Returns:
    attn_output, with the same values.

  Raises:
    ValueError: `attn_output` has another rank, `mode` is unknown, or `metadata` is not an
      OperationMetadata.
  """
  checks.array("attn_output", attn_output, "[B, T, H, E] or [B, T, H * E]")
  checks.require(attn_output.ndim in (3, 4), "attn_output", checks.describe(attn_output),
                 "[B, T, H, E] or [B, T, H * E]")
  spec = _checked(metadata).get_shardings(mode).output
  return _constrained(attn_output, PartitionSpec(*spec[:attn_output.ndim]), metadata, "attn_output")


def default_key_value_sharding(
    metadata: OperationMetadata, mode: Mode = "__train__") -> NamedSharding | None:
  """The sharding of keys and values [B, S, K, D]; None without a mesh.

  Args:
    metadata: mesh and axes.
    mode: one of MODES.

  Raises:
    ValueError: `mode` is unknown, or `metadata` is not an OperationMetadata.
  """
  mesh = resolved_mesh(_checked(metadata))
  if mesh is None:
    return None
  return NamedSharding(mesh, partition.fit(metadata.get_shardings(mode).key, None, mesh).spec)


def get_sharding_safely(tensor: Array, metadata: OperationMetadata) -> PartitionSpec:
  """The spec of a tensor, or that of keys and values if the tensor is not sharded.

  A traced tensor has the spec of its type, which is empty for Auto axes.

  Args:
    tensor: any array.
    metadata: mesh and axes of the fallback, which is not sharded without a mesh.

  Raises:
    ValueError: `tensor` is not an array, or `metadata` is not an OperationMetadata.
  """
  checks.array("tensor", tensor, "of any shape")
  _checked(metadata)
  traced = isinstance(tensor, jax.core.Tracer)
  sharding = jax.typeof(tensor).sharding if traced else getattr(tensor, "sharding", None)
  if isinstance(sharding, NamedSharding) and any(entry is not None for entry in sharding.spec):
    return sharding.spec
  default = default_key_value_sharding(metadata)
  return PartitionSpec() if default is None else default.spec


def _checked(metadata: OperationMetadata) -> OperationMetadata:
  """Returns the argument if it is an OperationMetadata.

  Raises:
    ValueError: `metadata` is not an OperationMetadata.
  """
  checks.require(isinstance(metadata, OperationMetadata), "metadata", repr(metadata),
                 "an OperationMetadata, such as OperationMetadata(mesh=create_mesh())")
  return metadata


def _constrained(x: Array, spec: PartitionSpec, metadata: OperationMetadata, name: str) -> Array:
  """Constrains an array to the part of a spec that fits its shape and the mesh."""
  checks.array(name, x, f"of {len(spec)} dimensions")
  mesh = resolved_mesh(metadata)
  if mesh is None:
    return x
  fitted = partition.fit(spec, x.shape, mesh, name).spec
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fitted))
