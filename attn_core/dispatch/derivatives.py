# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The implementations that compute the derivatives of a call."""

from typing import NamedTuple


class Rows(NamedTuple):
  """The implementations that compute the derivatives of a row of the table, by their names."""

  gradient: str | None = None  # reverse mode; None: the row itself
  # A second backward, for gradients of a bias and of numbers for all pairs; None: the same one.
  added: str | None = None
  tangent: str | None = None  # forward mode; None: that of the gradient
  has_tangent: bool = True  # whether there is forward mode
  of_lse: bool = True  # whether a call that returns the lse may be differentiated
  even: bool = False  # whether gradients take even numbers of queries and keys only
  # Whether second derivatives have reverse mode over either mode; forward mode over either is
  # there wherever forward mode is.
  reverses_twice: bool = True


class Derivatives(NamedTuple):
  """The implementations that compute the derivatives of a call; `print` it."""

  gradient: str | None  # runs the backward; None: the call has no gradient
  tangent: str | None  # runs forward mode; None: the call has none
  memory: str  # how memory of the backward grows with the sequence length: "linear" or "quadratic"
  # (implementation, arguments): runs a second backward if these have gradients; None: there is one.
  added: tuple[str, tuple[str, ...]] | None = None
  why: str = ""  # why the call has no gradient
  reverses_twice: bool = True  # whether second derivatives have reverse mode over either mode

  def __str__(self) -> str:
    """Returns one line on first derivatives, and one on second derivatives if there are first."""
    if self.gradient is None:
      return f"derivatives: none, {self.why}"
    added = "" if self.added is None else (
        f", and by {self.added[0]} once more for {' and '.join(self.added[1])}")
    tangent = "no forward mode" if self.tangent is None else f"forward mode by {self.tangent}"
    first = f"derivatives: backward by {self.gradient}, in {self.memory} memory{added}; {tangent}"
    if self.tangent is None:
      return f"{first}\nsecond derivatives: none; mechanism='blockwise' has them"
    modes = ("forward and reverse mode in any order" if self.reverses_twice else
             "forward mode over forward or reverse mode")
    return f"{first}\nsecond derivatives: by {self.tangent}, in {self.memory} memory, {modes}"


def of_call(name: str, rows: Rows, memory: str, *, lengths: tuple[int, int], returns_lse: bool,
            added: tuple[str, ...]) -> Derivatives:
  """Returns the derivatives of a call.

  Args:
    name: of the implementation that runs the call.
    rows: of that implementation.
    memory: of the implementation, for the call.
    lengths: (T, S).
    returns_lse: whether the call returns the lse.
    added: the arguments of the call that have a number for every pair.
  """
  why = ""
  if not rows.of_lse and returns_lse:
    why = "JAX drops the cotangent of the lse (return_lse=True)"
  elif rows.even and any(n % 2 for n in lengths):
    why = f"cuDNN's gradients take even lengths, and these are {lengths[0]} and {lengths[1]}"
  if why:
    return Derivatives(None, None, memory, why=why)
  gradient = rows.gradient or name
  tangent = (rows.tangent or gradient) if rows.has_tangent else None
  return Derivatives(gradient, tangent, memory,
                     (rows.added, added) if rows.added and added else None,
                     reverses_twice=rows.reverses_twice)
