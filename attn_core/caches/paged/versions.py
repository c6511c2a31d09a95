# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Versions of a mutable state, each of which stays usable as a value.

The newest version holds the state; every older one holds the changes that lead back to it. An
operation on the newest version takes time for its own changes only, however large the state. An
operation on an older version first takes the state back, change by change. Changes of versions
that nothing refers to are freed.

Baker, Shallow binding makes functional arrays fast, https://doi.org/10.1145/122598.122614.
"""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

_ABSENT: Any = object()

State = TypeVar("State")
Entries = Any  # a list, a dict or an array
Change = tuple[Entries, Hashable, object]  # key's value before; _ABSENT: the dict lacked the key


class Changes:
  """Changes entries of containers (lists, dicts, arrays) and remembers what they were."""

  __slots__ = ("made",)

  def __init__(self) -> None:
    self.made: list[Change] = []

  def set(self, container: Entries, key: Hashable, value: object) -> None:
    """Sets container[key]."""
    before = container.get(key, _ABSENT) if type(container) is dict else container[key]
    self.made.append((container, key, before))
    container[key] = value

  def delete(self, container: Entries, key: Hashable) -> None:
    """Deletes container[key]."""
    self.made.append((container, key, container.pop(key)))

  def undo(self) -> list[Change]:
    """Takes all changes back; returns the changes that make them again."""
    redo = Changes()
    for container, key, before in reversed(self.made):
      if before is _ABSENT:
        redo.delete(container, key)
      else:
        redo.set(container, key, before)
    return redo.made


class Version(Generic[State]):
  """One version of a state, which is not used by several threads at once."""

  __slots__ = ("_state", "_changes", "_later")

  def __init__(self, state: State) -> None:
    self._state: State | None = state
    self._changes: Changes | None = None  # made between this version and the later one
    self._later: Version[State] | None = None

  def state(self) -> State:
    """Returns the state as it was in this version, to read, or to change for a `successor`."""
    older, at = [], self
    while at._later is not None:
      older.append(at)
      at = at._later
    for version in reversed(older):
      version._take_from(at)
      at = version
    assert at._state is not None
    return at._state

  def _take_from(self, later: "Version[State]") -> None:
    """Takes the state from the next version, which gets the changes that lead back to it."""
    assert self._changes is not None
    redo = Changes()
    redo.made = self._changes.undo()
    self._state, self._changes, self._later = later._state, None, None
    later._state, later._changes, later._later = None, redo, self

  def successor(self, changes: Changes) -> "Version[State]":
    """Returns the version after changes of this version's state."""
    assert self._state is not None
    later = Version(self._state)
    self._state, self._changes, self._later = None, changes, later
    return later
