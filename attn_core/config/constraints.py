"""Small steps around an attention: repeated heads, positions in a cache, sharding constraints.

Letters: B batch, T query length, S key length, H query heads, K key heads, D width.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp

from attn_core import checks
from attn_core.config.metadata import OperationMetadata, resolved_mesh
from attn_core.sharding import partition
from attn_core.types import MODES


def repeat_key_value(key, value, num_reps: int):
  """Every key head `num_reps` times in a row; no mechanism here needs it: all take K key heads.

  Args:
    key: [B, S, K, D].
    value: [B, S, K, E].
    num_reps: H / K.

  Returns:
    (key [B, S, K * num_reps, D], value [B, S, K * num_reps, E]).

  Raises:
    ValueError: other ranks, a key and a value of other rows, tokens or heads, or a `num_reps` that
      is no int >= 1.
  """
  checks.integer("num_reps", num_reps, "an int >= 1", lambda x: x >= 1)
  for name, x in (("key", key), ("value", value)):
    checks.array(name, x, "[B, S, K, D]")
    checks.require(x.ndim == 4, name, checks.describe(x), "[B, S, K, D]")
  checks.require(key.shape[:3] == value.shape[:3], "value", checks.describe(value),
                 f"{list(key.shape[:3])} and any width, as the key {checks.describe(key)}")
  return jnp.repeat(key, num_reps, 2), jnp.repeat(value, num_reps, 2)


def build_cache_pos(attention_mask, mode: str, cache_view: Any = None):
  """The position of every query: how many queries before it are no padding, after those cached.

  A query that sees nothing is padding and stands where its predecessor does.

  Args:
    attention_mask: bool [B, H, T, S]; True = visible.
    mode: one of MODES; it says nothing that the arguments do not.
    cache_view: a cache with `indexs`, int32 [B]: how many tokens each row has cached; None: none.

  Returns:
    int32 [B, T].

  Raises:
    ValueError: a mask of another rank or dtype, an unknown mode, or a `cache_view` that is no
      cache of as many rows.
  """
  checks.one_of("mode", mode, MODES)
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


def apply_qk_shardings(query, key, metadata: OperationMetadata, mode: str = "__train__",
                       layout: str = "bthd"):
  """Query and key with the sharding that `metadata.get_shardings` gives them.

  Mesh axes that do not divide a dimension are left out, as everywhere. Without a mesh nothing is
  done.

  Args:
    query: [B, T, H, D] in layout bthd.
    key: [B, S, K, D].
    metadata: mesh and axes.
    mode: one of MODES.
    layout: one of LAYOUTS.

  Returns:
    (query, key), the same numbers.

  Raises:
    ValueError: no arrays of the layout's rank, no OperationMetadata, or as
      `OperationMetadata.get_shardings`.
  """
  rules = _checked(metadata).get_shardings(mode, layout)
  return (_constrained(query, rules.query, metadata, "query"),
          _constrained(key, rules.key, metadata, "key"))


def apply_qkv_shardings(query, key, value, metadata: OperationMetadata, mode: str = "__train__",
                        layout: str = "bthd"):
  """As `apply_qk_shardings`, same arguments and errors, and the value [B, S, K, E] too.

  Returns:
    (query, key, value), the same numbers.
  """
  rules = _checked(metadata).get_shardings(mode, layout)
  return (*apply_qk_shardings(query, key, metadata, mode, layout),
          _constrained(value, rules.value, metadata, "value"))


def shard_attention_prod(attn_output, metadata: OperationMetadata, mode: str = "__train__"):
  """An attention's output with its sharding, before the heads are projected back.

  Args:
    attn_output: [B, T, H, E], or [B, T, H * E] with the heads' axes on the last dimension.
    metadata: mesh and axes.
    mode: one of MODES.

  Returns:
    attn_output, the same numbers.

  Raises:
    ValueError: another rank, an unknown mode, or no OperationMetadata.
  """
  checks.array("attn_output", attn_output, "[B, T, H, E] or [B, T, H * E]")
  checks.require(attn_output.ndim in (3, 4), "attn_output", checks.describe(attn_output),
                 "[B, T, H, E] or [B, T, H * E]")
  spec = _checked(metadata).get_shardings(mode).output
  return _constrained(attn_output, PartitionSpec(*spec[:attn_output.ndim]), metadata, "attn_output")


def default_key_value_sharding(
    metadata: OperationMetadata, mode: str = "__train__") -> NamedSharding | None:
  """How keys and values [B, S, K, D] are sharded; None: there is no mesh.

  Args:
    metadata: mesh and axes.
    mode: one of MODES.

  Raises:
    ValueError: an unknown mode, or no OperationMetadata.
  """
  mesh = resolved_mesh(_checked(metadata))
  if mesh is None:
    return None
  return NamedSharding(mesh, partition.fit(metadata.get_shardings(mode).key, None, mesh).spec)


def get_sharding_safely(tensor, metadata: OperationMetadata) -> PartitionSpec:
  """The spec of a tensor, where it has none that of keys and values.

  A tensor that is being traced has the spec of its type, which says nothing where axes are Auto.

  Args:
    tensor: any array.
    metadata: mesh and axes of the fallback; without a mesh that is not sharded at all.

  Raises:
    ValueError: `tensor` is no array, or `metadata` no OperationMetadata.
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
  """The same metadata.

  Raises:
    ValueError: it is none.
  """
  checks.require(isinstance(metadata, OperationMetadata), "metadata", repr(metadata),
                 "an OperationMetadata, such as OperationMetadata(mesh=create_mesh())")
  return metadata


def _constrained(x, spec: PartitionSpec, metadata: OperationMetadata, name: str):
  checks.array(name, x, f"of {len(spec)} dimensions")
  mesh = resolved_mesh(metadata)
  if mesh is None:
    return x
  fitted = partition.fit(spec, x.shape, mesh, name).spec
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fitted))
