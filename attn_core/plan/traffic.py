# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic between the devices of a sharded sequence: collectives, bytes and links.

Counts are those of the compiled program, whose ring steps are not steps of a loop. B, H and K are
those of one device, before an exchange of heads; a sequence has `members` groups of `group`
devices each.
"""

from typing import NamedTuple

import numpy as np

from attn_core.plan.peaks import Device
from attn_core.sharding.context_parallel import Sequence

GRADIENT_BYTES = 4  # gradients travel in float32


class Collective(NamedTuple):
  """Operations of one kind that a pass issues."""

  name: str  # as compiled programs name it
  number: int
  bytes: int  # of its results on a device, all operations together
  link_bytes: float  # through the busiest link in one direction, all operations together
  seconds: float  # link_bytes over the bandwidth of the link


class Sizes(NamedTuple):
  """Bytes of a device's arrays, of its own shard and all its heads."""

  query: int  # B L H D
  output: int  # B L H E
  keys: int  # B L K (D + E)
  exchanged_keys: int  # the same of the key heads that a group's devices need, some needed twice
  itemsize: int
  # Of the mask's arrays, each: with a number per query, per key, and those with one per pair, of
  # which a device has its own queries and all keys.
  of_queries: tuple[int, ...] = ()
  of_keys: tuple[int, ...] = ()
  of_pairs: tuple["Pairs", ...] = ()


class Pairs(NamedTuple):
  """An array [B or 1, H or 1, T or 1, S or 1] of a mask."""

  size: int  # bytes on a device
  by_head: bool
  by_query: bool


class Link(NamedTuple):
  """How the devices that exchange with each other are joined."""

  devices: int
  bandwidth: float  # bytes a second in one direction
  is_ring: bool  # each to its two neighbours; else each to a switch
  stride: int = 1  # they are so far from each other, on a ring of `devices` times that
  is_part: bool = False  # of a ring: neighbours in a row, the last not joined to the first

  def permute(self, size: float, distance: int) -> float:
    """Bytes through the busiest link if each device sends `size` bytes `distance` devices on."""
    distance = abs(distance) % self.devices
    return size * self.stride * min(distance, self.devices - distance) if self.is_ring else size

  def gather(self, size: float) -> float:
    """Bytes through the busiest link if all devices gather `size` bytes of each other."""
    return size * (self.devices - 1) / (2 if self.is_ring and not self.is_part else 1)

  def exchange(self, size: float) -> float:
    """Bytes through the busiest link if each device sends an equal part of `size` bytes to each.

    A ring of n: n / 8 times the size, the mean distance n / 4 over two directions; n in a row:
    n / 4 times, what either half has for the other. A switch: all but one's own part, (n - 1) / n.
    """
    n = self.devices
    if self.is_ring:
      return size * n / (4 if self.is_part else 8)
    return size * (n - 1) / n


def links(sequence: Sequence, device: Device, one_axis: bool) -> tuple[Link, Link]:
  """Between members, and within a group; the network where devices are of several domains.

  Args:
    sequence: its devices.
    device: what each is.
    one_axis: whether they are one axis of the mesh: groups of neighbours on one ring, and not a
      ring each.
  """
  def link(devices: int, span: int, stride: int, is_part: bool) -> Link:
    if span > device.domain:
      return Link(devices, device.network_bytes, False)
    return Link(devices, device.link_bytes, device.is_torus, stride, is_part)
  return (link(sequence.members, sequence.shards, sequence.group if one_axis else 1, False),
          link(sequence.group, sequence.group, 1, one_axis and sequence.members > 1))


def exchanges(sequence: Sequence, sizes: Sizes, link: Link, backward: bool) -> list[Collective]:
  """All-to-all of query, key, value and output; backward: of their gradients.

  The mask's arrays are exchanged once, for both passes: each device gets those of its group, and
  for arrays per head all tokens of its own heads. (An array that is given both for queries and for
  keys is counted twice.)
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
  """All-gather of key, value and the mask's arrays that belong to keys.

  Backward: again, and the gradients of the first two summed by reduce-scatter.
  """
  if not sequence.gathers:
    return []
  size = sizes.keys + sum(sizes.of_keys)
  found = [_collective("all-gather", 2 + len(sizes.of_keys), size * sequence.members, link,
                       link.gather(size))]
  return found + ([_collective("reduce-scatter", 2, sizes.keys, link, link.gather(sizes.keys))]
                  if backward else [])


def hop_by_hop(sequence: Sequence, sizes: Sizes, link: Link, shifts: tuple[int, ...],
               backward: bool) -> list[list[Collective]]:
  """What is sent while each hop computes, and last what is sent after all of them.

  Key, value and the mask's arrays that belong to keys go to the next hop's members. Backward also
  the gradients of the first two, in float32, one step behind; the last exchange returns them to
  the owning members.
  """
  gradients = sizes.exchanged_keys // sizes.itemsize * GRADIENT_BYTES
  # U L K' / U: the group's tokens; of arrays that are alike for all heads, U L.
  number = 2 + len(sizes.of_keys)
  size = sizes.exchanged_keys + sum(sizes.of_keys) * sequence.group
  send = lambda number, size, distance: _collective(
      "collective-permute", number, size, link, link.permute(size, int(distance)))
  strides = np.diff(shifts)
  found = [[send(number, size, stride)] for stride in strides] + [[], []]
  if backward and len(shifts) > 1:
    for hop, stride in enumerate(strides[1:], 2):
      found[hop].append(send(2, gradients, stride))
    found[-1].append(send(2, gradients, shifts[-1]))
  return found


def _collective(name: str, number: int, size: int, link: Link, through: float) -> Collective:
  return Collective(name, number, size, through, through / link.bandwidth)


def total(found: list[Collective]) -> tuple[Collective, ...]:
  """One Collective a name, in order."""
  names = dict.fromkeys(each.name for each in found)
  return tuple(Collective(name, *map(sum, zip(*(each[1:] for each in found if each.name == name))))
               for name in names)
