# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints versions, devices, and the features that each mechanism supports on each platform.

    python3 -m attn_core                as text
    python3 -m attn_core --markdown     the table as README.md shows it

The rows are those of `attn_core.table`; limits are found by asking them about example requests.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
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
  return "\n".join(lines + ["", _legend(TEXT_MARKS), *_notes(str)])


def markdown() -> str:
  """Returns the table as README.md shows it."""
  features = [feature.replace("_", " ") for feature in capabilities.FEATURES]
  lines = [["mechanism", "platform", "runs", "memory", *features]]
  lines.append(["---"] * 4 + [":-:"] * len(capabilities.FEATURES))
  lines += [[f"`{row.mechanism}`", ", ".join(row.platforms), row.runs, row.memory,
             *(MARKDOWN_MARKS[row.marks[feature]] for feature in capabilities.FEATURES)]
            for row in rows()]
  legend = [_legend(MARKDOWN_MARKS), "", *(f"* {note}" for note in _notes("`{}`".format))]
  return "\n".join([f"| {' | '.join(line)} |" for line in lines] + ["", *legend])


def _legend(marks: dict[str, str]) -> str:
  return (f"{marks[SUPPORTED]} supported, {marks[LIMITED]} supported within limits, "
          f"{marks[REFUSED]} refused by an error that names it; memory: its growth with the "
          "sequence length. Of two kernels, `first, else second`, the first runs the calls that it "
          "supports in linear memory, the second all others. A row with a compute capability takes "
          "precedence over that of all GPUs.")


def _notes(quote: Callable[[str], str]) -> list[str]:
  """Returns notes: limits, missing names, and the order in which `auto` tries names."""
  limits, absent = collections.defaultdict(list), collections.defaultdict(list)
  for row in rows():
    for reason in row.limits:
      limits[reason].append(f"{quote(row.mechanism)} on {', '.join(row.platforms)}")
  for name, platforms, why in missing():
    absent[why, platforms].append(quote(name))
  notes = [f"Refused, for example, {reason} ({'; '.join(who)})." for reason, who in limits.items()]
  notes += [f"Not on {', '.join(platforms)}: {', '.join(names)}; {why}."
            for (why, platforms), names in absent.items()]
  notes += [f"{quote('auto')} on {platform} tries {', '.join(map(quote, names))}."
            for platform, names in table.AUTO.items()]
  notes += [f"{quote('auto')} on {platform} tries {quote(name)} first for one query a row."
            for platform, name in table.AUTO_ONE_QUERY.items()]
  return notes


def main() -> None:
  """Prints what the command line asks for."""
  parser = argparse.ArgumentParser(prog="python3 -m attn_core",
                                   description="Versions, devices, mechanisms.")
  parser.add_argument("--markdown", action="store_true", help="only the table, as in README.md")
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
