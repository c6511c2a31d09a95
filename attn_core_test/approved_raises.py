# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The places where the library refuses arguments, and those that no approved call reaches."""

import ast
import collections
from typing import Iterator

from attn_core_test import import_graph
from attn_core_test.approved_text import REACHED

# Rooms whose errors have tests of their own: they need devices, compilers or other programs.
OTHER_ROOMS = ("kernels", "autodiff", "mechanisms", "benchmark", "references", "__main__")


def places() -> Iterator[tuple[str, int, int, str]]:
  """Yields (module, first line, last line, its function and text) of each `raise` and check."""
  for module, path in import_graph.library_modules().items():
    if import_graph.room(module) in OTHER_ROOMS:
      continue
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    stack: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while stack:
      node, inside = stack.pop()
      if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        inside = f"{inside}.{node.name}".lstrip(".")
      if isinstance(node, ast.Raise) or _is_check(node):
        yield module, node.lineno, node.end_lineno, f"{inside}: {lines[node.lineno - 1].strip()}"
      stack += [(child, inside) for child in ast.iter_child_nodes(node)]


def _is_check(node: ast.AST) -> bool:
  """Whether a node calls a function of `attn_core.checks`."""
  return (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
          and isinstance(node.func.value, ast.Name) and node.func.value.id == "checks"
          and node.func.attr not in ("describe", "suggestion"))


def not_reached() -> Iterator[str]:
  """Yields the places that no error of the calls of this process came through."""
  lines = collections.defaultdict(set)
  for module, line in REACHED:
    lines[module].add(line)
  total = 0
  missing = collections.defaultdict(list)
  for module, first, last, said in places():
    total += 1
    if not lines[module] & set(range(first, last + 1)):
      missing[module].append(said)
  yield f"{total - sum(map(len, missing.values()))} of {total} places are reached, not:"
  for module, found in sorted(missing.items()):
    yield module.removeprefix("attn_core.")
    yield from (f"  {said}" for said in sorted(found))
