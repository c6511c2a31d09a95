# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The recorded texts of programs, in approved/programs_*.txt, and the command that writes them.

`python3 -m attn_core_test.recorded_programs` writes them for the version of JAX that runs it, with
names of files to write only these: after a change of a kernel that is meant, run it on each
recorded version and read the difference: only programs whose operations were meant to change may
change. A program that differs between versions is recorded for each.
"""

import pathlib
import sys
from typing import Callable

import jax

from attn_core_test import (program_cases, program_cases_features, program_cases_pages,
                            program_text)
from attn_core_test.program_cases import Program, Programs

FOLDER = pathlib.Path(__file__).parent / "approved"
FILES: dict[str, Callable[[], Programs]] = {
    "gpu": program_cases.gpu, "tpu": program_cases.tpu, "xla": program_cases.xla,
    "ring": program_cases.ring, "pages": program_cases_pages.over_pages,
    "operations": program_cases_pages.operations, "features": program_cases_features.features}
VERSION = ".".join(map(str, jax.__version_info__[:2]))  # of JAX, without the patch
_HEAD = ("Operations of programs, see recorded_programs.py. "
         "Written by `python3 -m attn_core_test.recorded_programs`.")

# By the name of the program and the version of JAX.
Texts = dict[tuple[str, str], tuple[str, ...]]


def read(file: str) -> Texts:
  """Returns the recorded texts."""
  path, found = path_of(file), dict[tuple[str, str], list[str]]()
  lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
  keys = list[tuple[str, str]]()
  for line in lines[1:]:
    if line.startswith("== "):
      name, versions = line[3:].rsplit(" | ", 1)
      keys = [(name, version) for version in versions.split(", ")]
      found.update((key, []) for key in keys)
    else:
      for key in keys:
        found[key].append(line)
  return {key: tuple(text) for key, text in found.items()}


def versions_of(texts: Texts) -> set[str]:
  return {version for _, version in texts}


def path_of(file: str) -> pathlib.Path:
  return FOLDER / f"programs_{file}.txt"


def text_of(program: Program) -> tuple[str, ...]:
  """Returns the text of a program as it is now."""
  with jax.enable_x64(False):
    return tuple(program_text.text(program_text.program(*program)))


def programs(file: str) -> Programs:
  with jax.enable_x64(False):
    return FILES[file]()


def write(file: str) -> None:
  """Records the programs of a file for this version of JAX, and drops those that are no more."""
  recorded, now = read(file), programs(file)
  texts = {key: text for key, text in recorded.items() if key[0] in now and key[1] != VERSION}
  texts.update(((name, VERSION), text_of(program)) for name, program in now.items())
  lines = [_HEAD]
  for name in now:
    alike = dict[tuple[str, ...], list[str]]()
    for version in sorted(versions_of(texts)):
      if (text := texts.get((name, version))) is not None:
        alike.setdefault(text, []).append(version)
    for text, versions in alike.items():
      lines += [f"== {name} | {', '.join(versions)}", *text]
  FOLDER.mkdir(exist_ok=True)
  path_of(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
  for chosen in sys.argv[1:] or FILES:
    write(chosen)
