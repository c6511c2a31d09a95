# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mechanism and dtype that suit a kind of device, and versions of TPUs."""

import re
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks
from attn_core.types import AttentionMechanism

# The first row whose pattern matches "platform kind" applies.
OPTIMAL = (
    (r"tpu .*v[23]\b", AttentionMechanism.BLOCKWISE, "float32"),  # too old for the TPU kernels
    (r"tpu ", AttentionMechanism.SPLASH, "bfloat16"),
    (r"gpu ", AttentionMechanism.FLASH_ATTN2, "float16"),
    (r"", AttentionMechanism.FLASH_ATTN2, "bfloat16"),
)

# Kind of device in JAX -> the name of its generation.
TPU_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v5p": "v5p", "v6 lite": "v6e",
             "v6e": "v6e", "7x": "v7x", "v7x": "v7x"}
TPU_VERSIONS = ("v2", "v3", "v4", "v5", "v5e", "v5p", "v6", "v6e", "v7", "v7x")
# Bytes of vector memory of the TPUs that have less than the kernels' default blocks need; newer
# ones have at least 64 MiB.
SMALL_VMEM_BYTES = {"v4": 2**24}
# Numbers of a row that the matrix unit of a TPU multiplies at once, where these are more than 128.
MATRIX_DEPTHS: dict[str | None, int] = {"v6e": 256}
# TPUs whose matrix unit multiplies int8 by int8; others convert both before.
INT8_PRODUCTS: frozenset[str | None] = frozenset({"v5e", "v5p", "v6e"})


class AnyDevice(Protocol):
  """A `jax.Device`, or what is named like one."""

  @property
  def platform(self) -> str: ...

  @property
  def device_kind(self) -> str: ...


class OptimalConfig(NamedTuple):
  """A mechanism and the dtype of its matrix products."""

  mechanism: AttentionMechanism
  dtype: np.dtype


def get_optimal_config(device: AnyDevice | None = None) -> OptimalConfig:
  """The mechanism and the dtype that suit a kind of device.

  Mechanism `auto` of a call also considers shapes, masks and caches.

  Args:
    device: an object with `platform` and `device_kind`, such as a `jax.Device`; None: the first
      device.

  Returns:
    The mechanism, and the dtype of its query, key and value.

  Raises:
    ValueError: `device` lacks `platform` or `device_kind`.
  """
  device = _device(device)
  name = f"{_platform(device)} {device.device_kind}".lower()
  return next(OptimalConfig(mechanism, jnp.dtype(dtype))
              for pattern, mechanism, dtype in OPTIMAL if re.match(pattern, name))


def tpu_version_check(version: str = "v4", device: AnyDevice | None = None) -> bool:
  """Whether a device is a TPU of a version; "v5" means v5e or v5p, "v6" means v6e.

  Args:
    version: one of TPU_VERSIONS.
    device: as for `get_optimal_config`.

  Raises:
    ValueError: `version` is unknown, or as `get_optimal_config`.
  """
  checks.one_of("version", version, TPU_VERSIONS)
  device = _device(device)
  if _platform(device) != "tpu":
    return False
  return tpu_version(device.device_kind).startswith(version)


def tpu_version(device_kind: str) -> str:
  """The generation of a `jax.Device.device_kind` of a TPU: "v5e" for "TPU v5 lite"."""
  kind = re.sub(r"^tpu ?", "", device_kind.lower())
  return TPU_KINDS.get(kind, kind)


def matrix_depth(version: str | None) -> int:
  """Numbers of a row that the matrix unit of a TPU multiplies at once; the least, if not known."""
  return MATRIX_DEPTHS.get(version, 128)


def multiplies_int8(version: str | None) -> bool:
  """Whether the matrix unit of a TPU multiplies int8 by int8; False if not known."""
  return version in INT8_PRODUCTS


def _device(device: AnyDevice | None) -> AnyDevice:
  """Returns the device, or the first device for None."""
  device = jax.devices()[0] if device is None else device
  checks.require(hasattr(device, "platform") and hasattr(device, "device_kind"), "device",
                 repr(device), "a jax.Device, or None for the first device")
  return device


def _platform(device: AnyDevice) -> str:
  """The platform of a device, with "gpu" for CUDA and ROCm."""
  return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
