# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks and normalizes the fields of an `OperationMetadata`."""

from collections.abc import Mapping
import enum
import math
import re
from typing import Any

from jax.sharding import AbstractMesh, Mesh
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.config.other_names import OTHER_MECHANISM_NAMES
from attn_core.sharding import partition, token_order
from attn_core.types import (RING_TRANSFERS, RING_VARIANTS, AttentionMechanism, BlockSizes,
                             RingConfig)

# The backends of JAX, and the platform whose kernels run on each.
BACKENDS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


def normalized(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Checks all fields and normalizes them.

  Args:
    fields: the fields of an `OperationMetadata` by name.

  Returns:
    The fields that have a normal form, by name.

  Raises:
    ValueError: the value of a field is not what its comment in `OperationMetadata` describes.
  """
  backend = _backend("platform", fields["platform"])
  normal = {
      **{name: _dtype(name, fields[name]) for name in ("runtime_dtype", "runtime_softmax_dtype")},
      "platform": None if backend is None else BACKENDS[backend],
      "backend": _backend("backend", fields["backend"]),
      "compute_capability": _capability("compute_capability", fields["compute_capability"]),
      "partition_axis": _partition_axis(fields["partition_axis"]),
      "softmax_scale": _number("softmax_scale", fields["softmax_scale"], "None or a finite number"),
      "dropout_prob": _probability("dropout_prob", fields["dropout_prob"]),
      **{name: _block(name, fields[name])
         for name in ("blocksize_q", "blocksize_k", "blocksize_b")},
      "operation_configs": _operation_configs(fields["operation_configs"]),
      "ring": _ring(fields["ring"]),
  }
  sequence_axis, mesh, scan = (
      fields[name] for name in ("sequence_axis_name", "mesh", "scan_ring_attention"))
  if not isinstance(sequence_axis, str) or not sequence_axis:
    raise error("sequence_axis_name", sequence_axis, "the name of a mesh axis")
  if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
    raise error("mesh", mesh, "a jax.sharding.Mesh, as create_mesh gives, or None")
  if not isinstance(scan, (bool, np.bool_)):
    raise error("scan_ring_attention", scan, "True or False")
  return {**normal, "scan_ring_attention": bool(scan)}


def error(name: str, value: object, expectation: str) -> ValueError:
  """An error with the name of a field, its value and the expected value."""
  return ValueError(f"{name}={value!r}: expected {expectation}")


def plain_value(value: Any) -> Any:
  """The value of an enum member; any other value unchanged."""
  return value.value if isinstance(value, enum.Enum) else value


def _dtype(name: str, value: Any) -> np.dtype:
  """Converts to a floating-point dtype; None: float32."""
  expectation = "a floating dtype, such as jnp.bfloat16 or 'float32'"
  try:
    dtype = np.dtype("float32" if value is None else value)
  except TypeError as cause:
    raise error(name, value, expectation) from cause
  if not jnp.issubdtype(dtype, jnp.floating) or not dtype.isnative:
    raise error(name, value, expectation)
  return dtype


def _backend(name: str, value: Any) -> str | None:
  """Converts to a key of BACKENDS in lower case; None or "": None."""
  plain = plain_value(value)
  if plain is None or plain == "":
    return None
  if not isinstance(plain, str) or plain.lower() not in BACKENDS:
    raise error(name, value, f"None or one of {', '.join(map(repr, BACKENDS))}")
  return plain.lower()


def _capability(name: str, value: Any) -> str | None:
  """Checks a compute capability: major and minor number with a dot between, or None."""
  plain = plain_value(value)
  if plain is not None and not (isinstance(plain, str) and re.fullmatch(r"\d+\.\d+", plain)):
    raise error(name, value, "a string such as '9.0' (Hopper) or '8.0' (A100), or None for that "
                 "of the attached GPU")
  return plain


def _partition_axis(value: Any) -> partition.PartitionAxis:
  """Checks a PartitionAxis and converts its lists to tuples; None: PartitionAxis()."""
  if value is None:
    return partition.PartitionAxis()
  if not isinstance(value, partition.PartitionAxis):
    raise error("partition_axis", value, "a PartitionAxis, or None for PartitionAxis()")
  for field, axes in value._asdict().items():
    partition.axis_names(axes, f"partition_axis.{field}")
  return partition.PartitionAxis(*[tuple(a) if isinstance(a, list) else a for a in value])


def _ring(value: Any) -> RingConfig:
  """Checks that the fields of a RingConfig are compatible; None: RingConfig()."""
  if value is None:
    return RingConfig()
  if not isinstance(value, RingConfig):
    raise error("ring", value, "a RingConfig, or None for RingConfig()")
  choices: tuple[tuple[str, tuple[str, ...]], ...] = (
      ("variant", RING_VARIANTS), ("layout", token_order.TOKEN_ORDERS),
      ("transfer", RING_TRANSFERS))
  for field, known in choices:
    if getattr(value, field) not in known:
      raise error(f"ring.{field}", getattr(value, field), f"one of {', '.join(map(repr, known))}")
  name, hybrid = value.heads_axis_name, value.variant == "hybrid"
  if (hybrid and not (isinstance(name, str) and name)) or (not hybrid and name is not None):
    raise error("ring.heads_axis_name", name, "the name of a mesh axis with variant 'hybrid', "
                "for its all-to-all, and None with any other variant")
  if value.transfer == "remote" and value.variant not in ("ring", "hybrid"):
    raise error("ring.transfer", value.transfer, f"'collective' with variant {value.variant!r}, "
                 "which has no ring; 'remote' is for 'ring' and 'hybrid'")
  return value


def _number(name: str, value: Any, expectation: str) -> float | None:
  """Converts to a finite Python float; None stays None."""
  if value is None:
    return None
  if isinstance(value, (bool, str)) or np.ndim(value):
    raise error(name, value, expectation)
  try:
    number = float(value)
  except (TypeError, ValueError) as cause:
    raise error(name, value, expectation) from cause
  if not math.isfinite(number):
    raise error(name, value, expectation)
  return number


def _probability(name: str, value: Any) -> float:
  """Converts to a Python float in [0, 1)."""
  expectation = "a number in [0, 1)"
  number = _number(name, value, expectation)
  if number is None or not 0 <= number < 1:
    raise error(name, value, expectation)
  return number


def _block(name: str, value: Any) -> int | None:
  """Converts to a Python int of at least 1; None stays None."""
  if value is None:
    return None
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
    raise error(name, value, "an integer of at least 1, or None for the tuned size")
  return int(value)


def mechanism(name: str, value: object) -> str:
  """Converts the name of a mechanism to a plain string."""
  try:
    return AttentionMechanism(value).value
  except ValueError as cause:
    names = tuple(known.value for known in AttentionMechanism)
    meant = checks.suggestion(value, names, OTHER_MECHANISM_NAMES)
    raise error(name, value,
                f"a mechanism, one of {', '.join(map(repr, names))}{meant}") from cause


def _operation_configs(value: Any) -> tuple[tuple[str, BlockSizes], ...]:
  """Converts a mapping, pairs or None to sorted pairs (mechanism, block sizes)."""
  expectation = "a mapping from mechanisms to BlockSizes, or None"
  try:
    pairs = [] if value is None else list(dict(value).items())
    size = 0 if value is None else len(value)
  except (TypeError, ValueError) as cause:
    raise error("operation_configs", value, expectation) from cause
  normal = {}
  for key, sizes in pairs:
    name = f"operation_configs[{plain_value(key)!r}]"
    if not isinstance(sizes, BlockSizes):
      raise error(name, sizes, "a BlockSizes")
    normal[mechanism("operation_configs key", key)] = BlockSizes(
        *[_block(f"{name}.{field}", tokens) for field, tokens in sizes._asdict().items()])
  if len(normal) != size:
    raise error("operation_configs", value, "every mechanism once")
  return tuple(sorted(normal.items()))
