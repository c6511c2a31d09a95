# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the ragged kernel finds the arrays of a score mod, and the numbers that it reads.

An array has a number for each row of a step, which is a pair of a query and a query head, or a
number for each key of a request, or for each pair of both, or for each row and each distance of a
key. All are kept as int32: floats by their bits.
"""

from typing import Any, NamedTuple

import jax

FIXED = "fixed"  # a number for each row of a step, the same in every step
STEP = "step"  # a number for each row of a step
KEYS = "keys"  # a number for each key, shared by all rows
PAIRS = "pairs"  # a number for each row of a step and each key
LINES = "lines"  # a number for each row of a step and each distance of a key to the first query


class ModArray(NamedTuple):
  """The place of an array: its number among those of the same kind; static."""

  kind: str  # one of the above
  number: int
  first: int = 0  # of LINES: the distance of the first number of the table
  size: int = 0  # of LINES: numbers of the table


class ModForm(NamedTuple):
  """The score mod of a kernel; static and hashable."""

  term: jax.tree_util.PyTreeDef
  arrays: tuple[ModArray, ...]  # of the term
  # Those of `Coordinates` that arrays hold, by name. Positions that are not among them count from
  # the first token of a request.
  coordinates: tuple[tuple[str, ModArray], ...]
  shared_rows: int = 0  # rows of `ModInputs.keys` before those of pairs
  key_rows: int = 0  # all rows of `ModInputs.keys`

  @property
  def kinds(self) -> frozenset[str]:
    """The kinds of arrays that there are."""
    return frozenset(x.kind for x in (*self.arrays, *dict(self.coordinates).values()))


class ModInputs(NamedTuple):
  """Arrays of the score mod for the kernel, int32; None: there are none of the kind."""

  form: ModForm
  # [1 or num_steps, head_groups, group_rows, n] with few rows, else [..., n, group_rows]
  fixed: jax.Array | None
  by_step: jax.Array | None
  keys: jax.Array | None  # [B or 1, key_rows, padded_keys]
  lines: jax.Array | None = None  # [num_lines, head_groups, group_rows, length]

  def numbers(self) -> list[jax.Array]:
    """Returns those arrays that have numbers for rows."""
    return [x for x in (self.fixed, self.by_step, self.lines) if x is not None]


class ModRefs(NamedTuple):
  """References to the numbers of a step; those of the keys are copied with the keys."""

  fixed: Any
  by_step: Any
  lines: Any
