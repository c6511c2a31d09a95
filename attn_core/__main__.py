# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints versions, devices, and the features that each mechanism supports on each platform.

    python3 -m attn_core                as text
    python3 -m attn_core --markdown     the page docs/reference/support_matrix.md

The rows are those of `attn_core.table`; limits are found by asking them about example requests.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import attn_core
from attn_core import table
from attn_core.dispatch import capabilities
from attn_core.dispatch.capabilities import Implementation
from attn_core.masks import constructors
from attn_core.types import PLATFORMS

SUPPORTED, LIMITED, REFUSED = "supported", "supported within limits", "refused"
TEXT_MARKS = {SUPPORTED: "+", LIMITED: "~", REFUSED: "."}
MARKDOWN_MARKS = {SUPPORTED: "✓", LIMITED: "(✓)", REFUSED: "–"}

# Limits may depend on dtypes, and on widths: a common, an odd and a large one.
DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTHS = (64, 7, 1024)
# Masks that need a feature in a form that some implementations lack.
MASKS = {"window": constructors.window(7, 7),
         "positions": constructors.offset(constructors.causal(), 1)}
LENGTH = 1024


class Row(NamedTuple):
  """One mechanism on the platforms where its row is the same."""

  mechanism: str
  platforms: tuple[str, ...]  # such as "gpu", or "gpu 9.0" for one compute capability
  runs: str  # functions by their modules below mechanisms/, in the order in which they are asked
  memory: str
  marks: dict[str, str]  # feature -> SUPPORTED, LIMITED or REFUSED
  limits: tuple[str, ...]  # reasons, each from one request that is refused


def rows() -> tuple[Row, ...]:
  """Returns the table of the library, in the order in which mechanisms are named."""
  same = collections.defaultdict(list)
  for name, place in itertools.product(table.names(), places()):
    if (name, place) in table.TABLE:
      same[name, table.TABLE[name, place]].append(place)
  return tuple(
      Row(name, tuple(platforms), _runs(implementation), implementation.general.memory,
          {feature: _mark(implementation.general, feature) for feature in capabilities.FEATURES},
          _limits(implementation.general))
      for (name, implementation), platforms in same.items())


def places() -> tuple[str, ...]:
  """Returns every platform, and every compute capability with separate rows."""
  return (*PLATFORMS, *sorted({place for _, place in table.TABLE} - set(PLATFORMS)))


def _runs(row: Implementation) -> str:
  """Returns the names of a row's implementations, in the order in which they are asked."""
  return ", else ".join(implementation.name for implementation in row.chain)


def missing() -> tuple[tuple[str, tuple[str, ...], str], ...]:
  """Returns (mechanism, platforms, why) of every name without a row on some platforms."""
  found = []
  for name in table.names():
    platforms = tuple(p for p in PLATFORMS if (name, p) not in table.TABLE)
    if platforms and name != "auto":
      found.append((name, platforms, table.MISSING[name]))
  return tuple(found)


def _requests(feature: str | None) -> Iterator[capabilities.Request]:
  """Yields requests for one feature, or for none, of every dtype and width that go with it."""
  for dtype, width in itertools.product(DTYPES, WIDTHS):
    of_dtype = {dtype} & set(capabilities.FEATURES)
    if feature in DTYPES and feature != dtype:
      continue
    features = of_dtype | ({feature} if feature else set())
    mask = jax.tree.structure(MASKS.get(feature or "", constructors.causal()))
    shape = jax.ShapeDtypeStruct((1, LENGTH, 1, width), jnp.dtype(dtype))
    yield capabilities.Request(dict.fromkeys(features, feature or ""), shape, shape, shape, mask)


def _refusals(implementation: Implementation, feature: str | None) -> dict[tuple[str, int], str]:
  """Returns (dtype, width) -> why the limits refuse it with this feature."""
  reasons = {(request.dtype.name, request.widths[0]): implementation.limits(request)
             for request in _requests(feature)
             if not set(request.features) - {feature} - implementation.features}
  return {where: reason for where, reason in reasons.items() if reason}


def _mark(implementation: Implementation, feature: str) -> str:
  """Returns the mark of a feature: supported, refused, or refused for some requests only."""
  if feature not in implementation.features:
    return REFUSED
  more = set(_refusals(implementation, feature)) - set(_refusals(implementation, None))
  return LIMITED if more else SUPPORTED


def _limits(implementation: Implementation) -> tuple[str, ...]:
  """Returns every reason that the limits give, once."""
  reasons: dict[str, str] = {}
  for feature in (None, *capabilities.FEATURES):
    if feature is None or feature in implementation.features:
      for reason in _refusals(implementation, feature).values():
        reasons.setdefault(reason.partition(": ")[2], reason)  # keyed by the explanation
  return tuple(reasons.values())


# --- As text. ------------------------------------------------------------------------------------


def text() -> str:
  """Returns the table for a terminal: a column for each feature, with its name downwards."""
  found = rows()
  names = [(row.mechanism, ", ".join(row.platforms)) for row in found]
  widths = [max(map(len, column)) for column in zip(*names)]
  margin = " " * (sum(widths) + 4)
  height = max(map(len, capabilities.FEATURES))
  heads = [feature.rjust(height) for feature in capabilities.FEATURES]
  lines = [(margin + " ".join(letters)).rstrip() for letters in zip(*heads)]
  for row, cells in zip(found, names):
    marks = " ".join(TEXT_MARKS[row.marks[feature]] for feature in capabilities.FEATURES)
    name = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths))
    lines.append(f"{name}  {marks}  {row.memory}, {row.runs}")
  return "\n".join(lines + ["", _legend(TEXT_MARKS), *_notes(found)])


def _legend(marks: dict[str, str]) -> str:
  return (f"{marks[SUPPORTED]} supported, {marks[LIMITED]} supported within limits, "
          f"{marks[REFUSED]} refused by an error that names it; memory: its growth with the "
          "sequence length. Of two kernels, `first, else second`, the first runs the calls that it "
          "supports in linear memory, the second all others. A row with a compute capability takes "
          "precedence over that of all GPUs.")


def _notes(found: tuple[Row, ...]) -> list[str]:
  """Returns notes: limits, missing names, and the order in which `auto` tries names."""
  limits, absent = collections.defaultdict(list), collections.defaultdict(list)
  for row in found:
    for reason in row.limits:
      limits[reason].append(f"{row.mechanism} on {', '.join(row.platforms)}")
  for name, platforms, why in missing():
    absent[why, platforms].append(name)
  notes = [f"Refused, for example, {reason} ({'; '.join(who)})." for reason, who in limits.items()]
  notes += [f"Not on {', '.join(platforms)}: {', '.join(names)}; {why}."
            for (why, platforms), names in absent.items()]
  return [*notes, *(f"auto on {platform} {order}" for platform in PLATFORMS
                    for order in _orders(platform, str))]


def _orders(platform: str, quote: Callable[[str], str]) -> list[str]:
  """Returns the orders in which `auto` tries mechanisms on a platform, as ends of sentences."""
  orders = [f"tries {', '.join(map(quote, table.AUTO[platform]))}."]
  for place, few in table.AUTO_FEW_QUERIES.items():
    if place.split()[0] == platform:
      cached = f", or at most {few.most_cached} over a dense cache" if few.most_cached > 1 else ""
      on = "" if place == platform else f" of compute capability {place.split()[1]}"
      kernel = "" if place == "cpu" else ", and its kernel computes the call"
      orders.append(f"{on} tries {quote(few.mechanism)} first where each row has one query{cached}"
                    f"{kernel}.".strip())
  return orders


# --- As a page of the documentation. -------------------------------------------------------------


INTRODUCTION = """\
<!-- Written by `python3 -m attn_core --markdown`. -->

# Support matrix

Arguments of `attention` that each mechanism supports, by platform. A mechanism refuses any other
argument by an error that names it. `explain` answers the same question for one call.

A check mark means supported. A check mark in parentheses means supported within the limits below
the table. A dash means refused. "runs" names the kernel. Of two kernels, "first, else second", the
first runs the calls that it supports in linear memory, and the second runs all others. "memory" is
its growth with the sequence length.
"""


def markdown() -> str:
  """Returns the page docs/reference/support_matrix.md."""
  every = rows()
  sections = [INTRODUCTION, *(_section(place, every) for place in places())]
  meanings = [(feature.replace("_", " "), meaning)
              for feature, meaning in capabilities.FEATURES.items()]
  return "\n".join([*sections, "## Features\n", *_grid(("feature", "meaning"), meanings)])


def _rows_at(place: str, every: tuple[Row, ...]) -> list[Row]:
  """Returns the rows that hold at a place; a GPU has those of all GPUs unless it has its own."""
  platform = place.split()[0]
  return [row for row in every if place in row.platforms or (
      platform in row.platforms and (row.mechanism, place) not in table.TABLE)]


def _section(place: str, every: tuple[Row, ...]) -> str:
  """Returns the tables and the notes of one place."""
  platform, *capability = place.split()
  found = _rows_at(place, every)
  names = [_code(row.mechanism) for row in found]
  marks = [(feature.replace("_", " "), *(MARKDOWN_MARKS[row.marks[feature]] for row in found))
           for feature in capabilities.FEATURES]
  kernels = [(name, row.runs, row.memory) for name, row in zip(names, found)]
  limits = collections.defaultdict(list)
  for name, row in zip(names, found):
    for reason in row.limits:
      limits[reason].append(name)
  notes = ["Calls that are refused, by mechanism:", ""] if limits else []
  notes += [f"* {', '.join(who)}: {reason}." for reason, who in limits.items()]
  notes += ["", *(f"{_code(name)} is not available: {why}."
                  for name, platforms, why in missing() if platform in platforms)]
  notes += ["", *(f"{_code('auto')} {order}" for order in _orders(platform, _code))]
  title = " ".join([platform.upper(), *(f"of compute capability {x}" for x in capability)])
  return "\n".join([
      f"## {title}\n", ":::{table}", ":class: matrix\n", *_grid(("feature", *names), marks, ":-:"),
      ":::\n", *_grid(("mechanism", "runs", "memory"), kernels), "", *notes, ""])


def _grid(head: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "---") -> list[str]:
  """Returns the lines of a table; `rule` aligns all columns but the first."""
  rules = ["---", *[rule] * (len(head) - 1)]
  return [f"| {' | '.join(line)} |" for line in (head, rules, *lines)]


def _code(name: str) -> str:
  return f"`{name}`"


def main() -> None:
  """Prints what the command line asks for."""
  parser = argparse.ArgumentParser(prog="python3 -m attn_core",
                                   description="Versions, devices, mechanisms.")
  parser.add_argument("--markdown", action="store_true",
                      help="only the tables, as docs/reference/support_matrix.md has them")
  if parser.parse_args().markdown:
    print(markdown())
    return
  kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
  devices = ", ".join(f"{n} x {platform} ({kind})" for (platform, kind), n in kinds.items())
  print(f"attn_core {attn_core.__version__}, jax {jax.__version__}, devices: {devices}\n")
  print(text(), "\n\nfeatures:", sep="")
  width = max(map(len, capabilities.FEATURES))
  for feature, meaning in capabilities.FEATURES.items():
    print(f"  {feature:{width}}  {meaning}")


if __name__ == "__main__":
  main()
