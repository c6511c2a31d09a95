# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak rates of devices, as published by their makers.

A device is one of JAX: a whole chip, except for tpu7x, half a chip.
"""

from typing import NamedTuple


class Device(NamedTuple):
  """Peak rates of one device."""

  flops: float  # per second, bfloat16 without sparsity
  memory_bytes: float  # per second
  link_bytes: float  # per second, in one direction of one link to a neighbor
  is_torus: bool  # links lead to two neighbors per mesh axis; else to a switch of all devices
  domain: int  # largest number of devices that these links connect
  network_bytes: float  # per second and device, in one direction, between domains
  kinds: tuple[str, ...]  # prefixes of `jax.Device.device_kind`, in lower case


DEVICES = {
    # TPUs: https://docs.cloud.google.com/tpu/docs/v5e, .../v5p, .../v6e and .../tpu7x. Published
    # are the sums over the links of a chip: v5e 1,600 Gbit/s per direction over 4, v6e 3,200 over
    # 4, v5p and tpu7x 1,200 GB/s in both directions over 6; and the network of a pod of v5e or v6e.
    # The network of a tpu7x chip is assumed to be that of a v6e.
    "v5e": Device(197e12, 819e9, 50e9, True, 256, 3.125e9, ("tpu v5 lite", "tpu v5e")),
    "v5p": Device(459e12, 2765e9, 100e9, True, 8960, 6.25e9, ("tpu v5p", "tpu v5")),
    "v6e": Device(918e12, 1640e9, 100e9, True, 256, 12.5e9, ("tpu v6 lite", "tpu v6e")),
    "tpu7x": Device(1153.5e12, 3690e9, 100e9, True, 2 * 9216, 6.25e9, ("tpu7x", "tpu v7x")),
    # https://www.nvidia.com/en-us/data-center/h100/ and .../h200/, SXM: NVLink 900 GB/s, sum
    # of both directions; a DGX H100 or H200 has 8, with a 400 Gbit/s adapter each.
    "h100": Device(989.4e12, 3350e9, 450e9, False, 8, 50e9, ("nvidia h100 80gb hbm3",)),
    "h200": Device(989.4e12, 4800e9, 450e9, False, 8, 50e9, ("nvidia h200",)),
    # Nominal, not from a datasheet: a core at 2.5 GHz with two float32 AVX2 multiply-adds per
    # cycle, and copies in memory by one thread.
    "cpu": Device(80e9, 24e9, 12e9, False, 2**31, 12e9, ("cpu",)),
}


def find(device_kind: str) -> Device:
  """Returns the device of a key of DEVICES, or of a `jax.Device.device_kind`.

  Raises:
    ValueError: `device_kind` is unknown, or not a string.
  """
  name = device_kind.lower() if isinstance(device_kind, str) else device_kind
  for known, device in DEVICES.items():
    if name == known or isinstance(name, str) and name.startswith(device.kinds):
      return device
  raise ValueError(f"device_kind={device_kind!r}: expected one of "
                   f"{', '.join(map(repr, DEVICES))}, or the device_kind of such a jax.Device")
