"""What a kind of device is best at, by name."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core import checks
from attn_core.types import AttentionMechanism

# The first whose pattern the platform, a space and the kind of device match.
OPTIMAL = (
    (r"tpu .*v[23]\b", AttentionMechanism.FLASH_ATTN2, "float32"),
    (r"tpu ", AttentionMechanism.SPLASH, "bfloat16"),
    (r"gpu ", AttentionMechanism.FLASH_ATTN2, "float16"),
    (r"", AttentionMechanism.FLASH_ATTN2, "bfloat16"),
)

# Kind of device, as JAX names it, -> the name of its generation.
TPU_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v5p": "v5p", "v6 lite": "v6e",
             "v6e": "v6e", "7x": "v7x", "v7x": "v7x"}
TPU_VERSIONS = ("v2", "v3", "v4", "v5", "v5e", "v5p", "v6", "v6e", "v7", "v7x")


class OptimalConfig(NamedTuple):
  """A mechanism and the dtype of its products."""

  mechanism: AttentionMechanism
  dtype: Any


def get_optimal_config(device: Any = None) -> OptimalConfig:
  """The mechanism and the dtype that suit a kind of device; for a call, `auto` asks more.

  Args:
    device: anything with `platform` and `device_kind`, as a `jax.Device`; None: the first one.

  Returns:
    The mechanism, and the dtype of its query, key and value.

  Raises:
    ValueError: `device` has no platform or no kind.
  """
  device = _device(device)
  name = f"{_platform(device)} {device.device_kind}".lower()
  return next(OptimalConfig(mechanism, jnp.dtype(dtype))
              for pattern, mechanism, dtype in OPTIMAL if re.match(pattern, name))


def tpu_version_check(version: str = "v4", device: Any = None) -> bool:
  """Whether a device is a TPU of a version; "v5" is v5e and v5p, "v6" is v6e.

  Args:
    version: one of TPU_VERSIONS.
    device: as for `get_optimal_config`.

  Raises:
    ValueError: an unknown version, or as `get_optimal_config`.
  """
  checks.one_of("version", version, TPU_VERSIONS)
  device = _device(device)
  if _platform(device) != "tpu":
    return False
  kind = re.sub(r"^tpu ?", "", device.device_kind.lower())
  return TPU_KINDS.get(kind, kind).startswith(version)


def _device(device: Any) -> Any:
  """The device, or the first one."""
  device = jax.devices()[0] if device is None else device
  checks.require(hasattr(device, "platform") and hasattr(device, "device_kind"), "device",
                 repr(device), "a jax.Device, or None for the first one")
  return device


def _platform(device: Any) -> str:
  return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
