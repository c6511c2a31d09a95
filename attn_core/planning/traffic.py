"""What the devices of a spread sequence send each other, and over how many links.

Counts are those of the compiled program, with hops that are not steps of a loop.

Letters: B batch rows of a device, H and K query and key heads of a device before an exchange of
heads, D and E widths, L queries or keys of a shard, M members of U devices each, N = M U shards.
"""

from typing import NamedTuple

import numpy as np

from attn_core.planning.devices import Device
from attn_core.sharding.sequence import Sequence

OWED_BYTES = 4  # gradients travel in float32


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


class Link(NamedTuple):
  """How the devices of one mesh axis are joined."""

  devices: int
  bandwidth: float  # bytes a second in one direction
  is_ring: bool  # each to its two neighbours; else each to a switch

  def permute(self, size: float, distance: int) -> float:
    """Bytes through the busiest link when everybody sends `size` bytes `distance` devices on."""
    distance = abs(distance) % self.devices
    return size * min(distance, self.devices - distance) if self.is_ring else size

  def gather(self, size: float) -> float:
    """... when everybody's `size` bytes go to everybody, both ways around a ring."""
    return size * (self.devices - 1) / (2 if self.is_ring else 1)

  def exchange(self, size: float) -> float:
    """... when everybody has `size` bytes, an equal part for each.

    A ring of n: n / 8 times the size, the mean distance n / 4 over two directions. A switch: all
    but one's own part, (n - 1) / n.
    """
    n = self.devices
    return size * (n / 8 if self.is_ring else (n - 1) / n)


def links(sequence: Sequence, device: Device) -> tuple[Link, Link]:
  """Between members, and within a group; the network where devices are of several domains."""
  def link(devices, span):
    if span > device.domain:
      return Link(devices, device.network_bytes, False)
    return Link(devices, device.link_bytes, device.is_torus)
  return link(sequence.members, sequence.shards), link(sequence.group, sequence.group)


def exchanges(sequence: Sequence, sizes: Sizes, device: Device, backward: bool) -> list[Collective]:
  """All-to-all of query, key, value and output; backward: of their gradients."""
  if sequence.group == 1:
    return []
  size = sizes.query + sizes.output + sizes.exchanged_keys
  return [_collective("all-to-all", 4, size, links(sequence, device)[1],
                      lambda link: link.exchange(size))]


def gathers(sequence: Sequence, sizes: Sizes, device: Device, backward: bool) -> list[Collective]:
  """All-gather of key and value; backward: again, and their gradients summed by reduce-scatter."""
  if not sequence.gathers:
    return []
  link, size = links(sequence, device)[0], sizes.keys
  moved = lambda link: link.gather(size)
  found = [_collective("all-gather", 2, size * sequence.members, link, moved)]
  return found + ([_collective("reduce-scatter", 2, size, link, moved)] if backward else [])


def hop_by_hop(sequence: Sequence, sizes: Sizes, device: Device, shifts: tuple[int, ...],
               backward: bool) -> list[list[Collective]]:
  """What is sent while each hop computes, and last what is sent after all of them.

  Key and value go to the next hop's members. Backward also what is owed to them, in float32, one
  exchange behind; what a member owes to itself stays, and the last exchange brings all home.
  """
  link, size = links(sequence, device)[0], sizes.exchanged_keys  # U L K' / U: the group's tokens
  owed = size // sizes.itemsize * OWED_BYTES
  send = lambda size, distance: _collective(
      "collective-permute", 2, size, link, lambda link: link.permute(size, int(distance)))
  strides = np.diff(shifts)
  found = [[send(size, stride)] for stride in strides] + [[], []]
  if backward and len(shifts) > 1:
    for hop, stride in enumerate(strides[1:], 2):
      found[hop].append(send(owed, stride))
    found[-1].append(send(owed, shifts[-1]))
  return found


def _collective(name, number, size, link, moved) -> Collective:
  through = moved(link)
  return Collective(name, number, size, through, through / link.bandwidth)


def total(found: list[Collective]) -> tuple[Collective, ...]:
  """One Collective a name, in order."""
  names = dict.fromkeys(each.name for each in found)
  return tuple(Collective(name, *map(sum, zip(*(each[1:] for each in found if each.name == name))))
               for name in names)
