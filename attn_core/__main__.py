"""What is here: versions, devices, and which mechanism honours what on which platform.

    python3 -m attn_core                as text
    python3 -m attn_core --markdown     the table as README.md shows it

Everything is read from `attn_core.table`; what a limit refuses is found by asking it.
"""

import argparse
import collections
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import attn_core
from attn_core import table
from attn_core.masks import leaves as algebra
from attn_core.types import PLATFORMS

HONOURED, LIMITED, REFUSED = "honoured", "honoured within limits", "refused"
TEXT_MARKS = {HONOURED: "+", LIMITED: "~", REFUSED: "."}
MARKDOWN_MARKS = {HONOURED: "✓", LIMITED: "(✓)", REFUSED: "–"}

# What a limit may depend on besides the features: dtypes, and widths that are common, odd and wide.
DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTHS = (64, 7, 1024)
# A mask that asks for a feature in a way that not everybody has.
MASKS = {"window": algebra.window(7, 7), "positions": algebra.offset(algebra.causal(), 1)}
LENGTHS = (1024, 1024)


class Row(NamedTuple):
  """One mechanism in those places where it is the same."""

  mechanism: str
  platforms: tuple[str, ...]  # a GPU's compute capability after it, where the row is for that only
  runs: str  # the function, by its module below mechanisms/; with another that goes before it
  memory: str
  marks: dict[str, str]  # feature -> HONOURED, LIMITED or REFUSED
  limits: tuple[str, ...]  # reasons, each from one request that is refused


def rows() -> tuple[Row, ...]:
  """The table of the library, in the order in which mechanisms are named."""
  same = collections.defaultdict(list)
  for name, place in itertools.product(table.names(), places()):
    if (name, place) in table.TABLE:
      same[name, table.TABLE[name, place]].append(place)
  return tuple(
      Row(name, tuple(platforms), _runs(implementation), implementation.memory,
          {feature: _mark(implementation, feature) for feature in table.FEATURES},
          _limits(implementation))
      for (name, implementation), platforms in same.items())


def places() -> tuple[str, ...]:
  """Every platform, and every compute capability that has rows of its own."""
  return (*PLATFORMS, *sorted({place for _, place in table.TABLE} - set(PLATFORMS)))


def _runs(implementation) -> str:
  first = implementation.preferred
  return f"{first.name}, else {implementation.name}" if first else implementation.name


def missing() -> tuple[tuple[str, tuple[str, ...], str], ...]:
  """(mechanism, platforms, why) of every name without a row there."""
  found = []
  for name in table.names():
    platforms = tuple(p for p in PLATFORMS if (name, p) not in table.TABLE)
    if platforms and name != "auto":
      found.append((name, platforms, table.MISSING[name]))
  return tuple(found)


def _requests(feature: str | None):
  """Requests for one feature, or for none, of every dtype and width that go with it."""
  for dtype, width in itertools.product(DTYPES, WIDTHS):
    of_dtype = {dtype} & set(table.FEATURES)
    if feature in DTYPES and feature != dtype:
      continue
    features = of_dtype | ({feature} if feature else set())
    mask = jax.tree.structure(MASKS.get(feature, algebra.causal()))
    yield table.Request(dict.fromkeys(features, feature), jnp.dtype(dtype), width, width, mask,
                        LENGTHS)


def _refusals(implementation, feature: str | None) -> dict[tuple[str, int], str]:
  """(dtype, width) -> why the limits refuse it with this feature."""
  reasons = {(request.dtype.name, request.width): implementation.limits(request)
             for request in _requests(feature)
             if not set(request.features) - {feature} - implementation.features}
  return {where: reason for where, reason in reasons.items() if reason}


def _mark(implementation, feature: str) -> str:
  """Whether a feature is honoured, and whether it is refused where the rest would not be."""
  if feature not in implementation.features:
    return REFUSED
  more = set(_refusals(implementation, feature)) - set(_refusals(implementation, None))
  return LIMITED if more else HONOURED


def _limits(implementation) -> tuple[str, ...]:
  """Every reason that the limits give, once."""
  reasons = {}
  for feature in (None, *table.FEATURES):
    if feature is None or feature in implementation.features:
      for reason in _refusals(implementation, feature).values():
        reasons.setdefault(reason.partition(": ")[2], reason)  # by what is said of the example
  return tuple(reasons.values())


# --- As text. ------------------------------------------------------------------------------------


def text() -> str:
  """The table for a terminal: a column a feature, its name written downwards."""
  found = rows()
  names = [(row.mechanism, ", ".join(row.platforms)) for row in found]
  widths = [max(map(len, column)) for column in zip(*names)]
  margin = " " * (sum(widths) + 4)
  height = max(map(len, table.FEATURES))
  heads = [feature.rjust(height) for feature in table.FEATURES]
  lines = [(margin + " ".join(letters)).rstrip() for letters in zip(*heads)]
  for row, cells in zip(found, names):
    marks = " ".join(TEXT_MARKS[row.marks[feature]] for feature in table.FEATURES)
    name = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths))
    lines.append(f"{name}  {marks}  {row.memory}, {row.runs}")
  return "\n".join(lines + ["", _legend(TEXT_MARKS), *_notes(str)])


def markdown() -> str:
  """The table as README.md shows it."""
  features = [feature.replace("_", " ") for feature in table.FEATURES]
  lines = [["mechanism", "platform", "runs", "memory", *features]]
  lines.append(["---"] * 4 + [":-:"] * len(table.FEATURES))
  lines += [[f"`{row.mechanism}`", ", ".join(row.platforms), row.runs, row.memory,
             *(MARKDOWN_MARKS[row.marks[feature]] for feature in table.FEATURES)] for row in rows()]
  legend = [_legend(MARKDOWN_MARKS), "", *(f"* {note}" for note in _notes("`{}`".format))]
  return "\n".join([f"| {' | '.join(line)} |" for line in lines] + ["", *legend])


def _legend(marks: dict[str, str]) -> str:
  return (f"{marks[HONOURED]} honoured, {marks[LIMITED]} honoured but not always, "
          f"{marks[REFUSED]} refused by an error that says so; memory: how it grows with the "
          "sequence. A kernel with another after `else` runs where it honours everything in linear "
          "memory, the other elsewhere. A row with a compute capability goes before that of all "
          "GPUs.")


def _notes(quote) -> list[str]:
  """What the marks do not say: limits, names that are missing, what `auto` tries."""
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
  parser = argparse.ArgumentParser(prog="python3 -m attn_core", description="What is here.")
  parser.add_argument("--markdown", action="store_true", help="only the table, as in README.md")
  if parser.parse_args().markdown:
    print(markdown())
    return
  kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
  devices = ", ".join(f"{n} x {platform} ({kind})" for (platform, kind), n in kinds.items())
  print(f"attn_core {attn_core.__version__}, jax {jax.__version__}, devices: {devices}\n")
  print(text(), "\n\nfeatures:", sep="")
  width = max(map(len, table.FEATURES))
  for feature, meaning in table.FEATURES.items():
    print(f"  {feature:{width}}  {meaning}")


if __name__ == "__main__":
  main()
