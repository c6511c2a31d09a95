# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic between the devices of a sharded sequence: collectives, bytes and links.

Counts are those of the compiled program with an unrolled ring. B, H and K are those of one device
before heads are exchanged; the devices form `members` groups of `group` devices each.
"""

from typing import NamedTuple

import numpy as np

from attn_core.plan.peaks import Device
from attn_core.sharding.context_parallel import Sequence

GRADIENT_BYTES = 4  # gradients are sent in float32


class Collective(NamedTuple):
  """All collectives of one kind in a forward or backward."""

  name: str  # in compiled programs
  number: int
  bytes: int  # of their results on one device
  link_bytes: float  # through the busiest link in one direction
  seconds: float  # link_bytes / bandwidth of the link


class Sizes(NamedTuple):
  """Bytes of one device's arrays."""

  query: int  # B * D * H * tokens of the shard
  output: int  # B * E * H * tokens of the shard
  keys: int  # B * (D + E) * K * tokens of the shard
  exchanged_keys: int  # `keys`, with the key heads repeated that several devices of a group need
  itemsize: int
  # The mask's arrays with a number per query, per key and per pair; a device has the pairs of its
  # queries with all keys.
  of_queries: tuple[int, ...] = ()
  of_keys: tuple[int, ...] = ()
  of_pairs: tuple["Pairs", ...] = ()


class Pairs(NamedTuple):
  """An array [B or 1, H or 1, T or 1, S or 1] of a mask."""

  size: int  # bytes on a device
  by_head: bool
  by_query: bool


class Link(NamedTuple):
  """The network between devices that exchange arrays."""

  devices: int
  bandwidth: float  # bytes per second in one direction
  is_ring: bool  # links lead to two neighbors; else to a switch
  stride: int = 1  # distance of these devices on a ring of `stride * devices` devices
  is_part: bool = False  # consecutive devices of a ring, without a link from the last to the first

  def permute(self, size: float, distance: int) -> float:
    """Returns the bytes through the busiest link if all send `size` bytes over a distance."""
    distance = abs(distance) % self.devices
    return size * self.stride * min(distance, self.devices - distance) if self.is_ring else size

  def gather(self, size: float) -> float:
    """Returns the bytes through the busiest link if all gather `size` bytes from each device."""
    return size * (self.devices - 1) / (2 if self.is_ring and not self.is_part else 1)

  def exchange(self, size: float) -> float:
    """Returns the bytes through the busiest link of an all-to-all of `size` bytes per device.

    With n devices, size times n / 8 on a ring (mean distance n / 4, two directions), n / 4 on a
    part of a ring (the bytes from one half to the other), (n - 1) / n on a switch (all but the
    device's own part).
    """
    n = self.devices
    if self.is_ring:
      return size * n / (4 if self.is_part else 8)
    return size * (n - 1) / n


def links(sequence: Sequence, device: Device, one_axis: bool) -> tuple[Link, Link]:
  """Returns the links between members and within a group.

  Devices of several domains communicate over the network of the data center.

  Args:
    sequence: the sharding of the sequence.
    device: the kind of its devices.
    one_axis: whether one mesh axis holds all devices, so that groups are neighbors on one ring;
      otherwise each group is a ring.
  """
  def link(devices: int, span: int, stride: int, is_part: bool) -> Link:
    if span > device.domain:
      return Link(devices, device.network_bytes, False)
    return Link(devices, device.link_bytes, device.is_torus, stride, is_part)
  return (link(sequence.members, sequence.shards, sequence.group if one_axis else 1, False),
          link(sequence.group, sequence.group, 1, one_axis and sequence.members > 1))


def exchanges(sequence: Sequence, sizes: Sizes, link: Link, backward: bool) -> list[Collective]:
  """Returns the all-to-alls of query, key, value and output, or in the backward of their gradients.

  The mask's arrays are exchanged once for both passes: each device gets those of its group, and of
  arrays per head all tokens of its own heads. An array that is both per query and per key is
  counted twice.
  """
  group = sequence.group
  if group == 1:
    return []
  size = sizes.query + sizes.output + sizes.exchanged_keys
  found = [_collective("all-to-all", 4, size, link, link.exchange(size))]
  if backward:
    return found
  for size in (x.size for x in sizes.of_pairs if x.by_query and x.by_head):
    found.append(_collective("all-to-all", 1, size, link, link.exchange(size)))
  for size in (*sizes.of_queries, *sizes.of_keys,
               *(x.size for x in sizes.of_pairs if x.by_query and not x.by_head)):
    found.append(_collective("all-gather", 1, size * group, link, link.gather(size)))
  return found


def gathers(sequence: Sequence, sizes: Sizes, link: Link, backward: bool) -> list[Collective]:
  """Returns the all-gathers of keys, values and the mask's arrays per key.

  The backward gathers again, and sums the gradients of keys and values by reduce-scatters.
  """
  if not sequence.gathers:
    return []
  size = sizes.keys + sum(sizes.of_keys)
  found = [_collective("all-gather", 2 + len(sizes.of_keys), size * sequence.members, link,
                       link.gather(size))]
  return found + ([_collective("reduce-scatter", 2, sizes.keys, link, link.gather(sizes.keys))]
                  if backward else [])


def ring_exchanges(sequence: Sequence, sizes: Sizes, link: Link, shifts: tuple[int, ...],
                   backward: bool) -> list[list[Collective]]:
  """Returns the exchanges that overlap with each step of a ring, and last those after all steps.

  Keys, values and the mask's arrays per key are sent to the members of the next step. In the
  backward the gradients of keys and values follow one step behind, in float32, and are finally
  returned to the owning members.
  """
  gradients = sizes.exchanged_keys // sizes.itemsize * GRADIENT_BYTES
  # After the exchange of heads: the group's tokens of 1 / group of the key heads; arrays without
  # heads have all of the group's tokens.
  number = 2 + len(sizes.of_keys)
  size = sizes.exchanged_keys + sum(sizes.of_keys) * sequence.group
  send = lambda number, size, distance: _collective(
      "collective-permute", number, size, link, link.permute(size, int(distance)))
  strides = np.diff(shifts)
  found = [[send(number, size, stride)] for stride in strides] + [[], []]
  if backward and len(shifts) > 1:
    for step, stride in enumerate(strides[1:], 2):
      found[step].append(send(2, gradients, stride))
    found[-1].append(send(2, gradients, shifts[-1]))
  return found


def _collective(name: str, number: int, size: int, link: Link,
                link_bytes: float) -> Collective:
  return Collective(name, number, size, link_bytes, link_bytes / link.bandwidth)


def total(found: list[Collective]) -> tuple[Collective, ...]:
  """Sums collectives of the same name, in the order of their first occurrence."""
  names = dict.fromkeys(each.name for each in found)
  return tuple(Collective(name, *map(sum, zip(*(each[1:] for each in found if each.name == name))))
               for name in names)
