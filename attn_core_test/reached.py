# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of the library's functions that neither recorded programs nor texts execute.

    python3 -m attn_core_test.reached           all of them: some minutes, on Python 3.12 or newer
    python3 -m attn_core_test.reached kernels/  those of paths that begin so

A change of such a line is surely not noticed by `programs_test` and `approved_test`. Where one is
executed the change is noticed if the numbers, shapes and masks of a case tell it from the right
one, so cases have no two equal dimensions and no symmetric masks.
"""

import pathlib
import sys
from types import CodeType
from typing import Any, Iterator

LIBRARY = pathlib.Path(__file__).absolute().parent.parent / "attn_core"
# Rooms that are printed, measured or compared with, and have tests of their own.
OTHER_ROOMS = ("benchmark/", "references/", "masks/render.py", "plan/__main__.py", "__main__.py")

Place = tuple[str, int]  # path in the library, line


def watch() -> set[Place]:
  """Returns a set that receives the lines of the library that execute from now on."""
  found, folder = set[Place](), f"{LIBRARY}/"
  monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
  def note(code: CodeType, line: int) -> Any:
    if code.co_filename.startswith(folder):
      found.add((code.co_filename.removeprefix(folder), line))
    return monitoring.DISABLE  # once is enough
  monitoring.use_tool_id(monitoring.COVERAGE_ID, "reached")
  monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, note)
  monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
  return found


def executable(path: pathlib.Path) -> Iterator[int]:
  """Yields the lines of functions of a file, but for errors and the first lines of functions."""
  source = path.read_text(encoding="utf-8")
  lines, codes = source.splitlines(), [compile(source, str(path), "exec")]
  while codes:
    code = codes.pop()
    codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    if code.co_flags & 2:  # of a function, and not of a module or a class
      yield from (line for _, _, line in code.co_lines() if line and line != code.co_firstlineno
                  and not lines[line - 1].lstrip().startswith("raise "))


def main(prefixes: list[str]) -> None:
  """Executes the cases of both nets, and prints what they leave out."""
  found = watch()
  # What executes while modules are imported counts, so they are imported now.
  from attn_core_test import approved_cases, recorded_programs
  for name in recorded_programs.FILES:
    for program in recorded_programs.programs(name).values():
      recorded_programs.text_of(program)
  for name in approved_cases.FILES:
    approved_cases.generated(name)
  total = missing = 0
  for path in sorted(LIBRARY.rglob("*.py")):
    name = path.relative_to(LIBRARY).as_posix()
    if name.startswith(OTHER_ROOMS) or prefixes and not name.startswith(tuple(prefixes)):
      continue
    lines = sorted(set(executable(path)))
    left = [line for line in lines if (name, line) not in found]
    total, missing = total + len(lines), missing + len(left)
    text = path.read_text(encoding="utf-8").splitlines()
    for line in left:
      print(f"{name}:{line}: {text[line - 1].strip()}")
  print(f"{total - missing} of {total} lines are executed")


if __name__ == "__main__":
  main(sys.argv[1:])
