# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""All approved texts: which there are, how each is generated, and where it is stored."""

from collections.abc import Callable, Iterator
import functools
import os
import pathlib

from attn_core_test import (approved_arguments, approved_caches, approved_calls, approved_config,
                            approved_features, approved_masks, approved_metadata,
                            approved_placements, approved_raises, approved_sharding)

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
FOLDER = pathlib.Path(os.path.abspath(__file__)).parent / "approved"

# Name of a file -> generator of its lines.
FILES: dict[str, Callable[[], Iterator[str]]] = {
    name: generate for module in (approved_arguments, approved_caches, approved_calls,
                                  approved_config, approved_features, approved_masks,
                                  approved_metadata, approved_placements, approved_sharding)
    for name, generate in module.FILES.items()}
FILES["raises"] = approved_raises.not_reached  # after all others, whose errors it counts
WIDTH = 4000  # of the longest line; a line is one fact, and is compared whole


@functools.cache
def generated(name: str) -> str:
  """Returns the text of a file as the library is now."""
  if name == "raises":
    for other in FILES.keys() - {name}:
      generated(other)
  lines = [line.rstrip() for line in FILES[name]()]
  assert max(map(len, lines)) <= WIDTH, (name, max(lines, key=len))
  return "\n".join(lines) + "\n"


def path_of(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.txt"


def present() -> list[pathlib.Path]:
  """Returns the files that exist, apart from those of `recorded_programs`."""
  return sorted(path for path in FOLDER.glob("*.txt") if not path.stem.startswith("programs_"))
