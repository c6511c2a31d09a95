# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of the library's source code: lengths, parameters, types, and its import graph."""

import ast
import pathlib
from typing import Iterable, Iterator, NamedTuple

from attn_core_test import import_graph

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400
MAX_TOP_LEVEL_FILES = 9
MIN_TYPED_PERCENT = 95.0
# Annotations with Any in signatures of public functions: pytrees, values read from JSON, and what
# a function accepts in order to refuse it by an error.
MAX_ANY = 92

# Lines with this prefix are shown by the test runner also when the tests pass.
MARK = "measured: "

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Function(NamedTuple):
  """One function or method of the library."""

  name: str  # "attn_core.attention.attention"
  # False if its name, or that of a module, class or function around it, begins with "_"
  public: bool
  parameters: int
  typed: int  # parameters with an annotation; both counts leave out self and cls
  returns: bool  # has an annotation of its return
  with_any: int  # annotations that mention Any
  lines: int  # its docstring included
  docstring_lines: int
  raises: bool  # has a section Raises in its docstring


class Measures(NamedTuple):
  """Numbers of the whole library."""

  functions: tuple[Function, ...]
  file_lines: dict[str, int]  # path relative to the root -> lines
  top_level: tuple[str, ...]  # names of the files in attn_core/

  def typed_percent(self) -> float:
    """Percentage of parameters that have an annotation."""
    total = sum(function.parameters for function in self.functions)
    return 100 * sum(function.typed for function in self.functions) / total

  def long_functions(self) -> list[str]:
    """Names of functions longer than MAX_FUNCTION_LINES without their docstrings."""
    return [function.name for function in self.functions
            if function.lines - function.docstring_lines > MAX_FUNCTION_LINES]

  def long_with_docstrings(self) -> list[str]:
    """Names of functions longer than MAX_FUNCTION_LINES, docstrings included."""
    return [function.name for function in self.functions if function.lines > MAX_FUNCTION_LINES]

  def long_files(self) -> list[str]:
    """Paths of files longer than MAX_FILE_LINES."""
    return [path for path, lines in self.file_lines.items() if lines > MAX_FILE_LINES]

  def untyped_public(self) -> list[str]:
    """Names of public functions with a parameter or a return that lacks an annotation."""
    return [function.name for function in self.functions if function.public
            and not (function.returns and function.typed == function.parameters)]

  def public_any(self) -> int:
    """Annotations with Any in the signatures of public functions."""
    return sum(function.with_any for function in self.functions if function.public)

  def with_arguments(self, least: int) -> list[str]:
    """Names of functions with `least` parameters or more."""
    return [function.name for function in self.functions if function.parameters >= least]


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
  """Parameters of a function, *args and **kwargs included, self and cls left out."""
  given = function.args
  found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
  found += [argument for argument in (given.vararg, given.kwarg) if argument]
  return [argument for argument in found if argument.arg not in ("self", "cls")]


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  """Lines of a function's docstring; 0: it has none."""
  if ast.get_docstring(function) is None:
    return 0
  return function.body[0].end_lineno - function.body[0].lineno + 1


def _with_any(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  """Annotations of a function that mention Any."""
  annotations = [argument.annotation for argument in parameters_of(function)] + [function.returns]
  return sum(any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))
             for annotation in annotations if annotation is not None)


def functions_of(module: str, path: pathlib.Path) -> Iterator[Function]:
  """Yields every function of a file, nested ones included; lambdas are left out."""
  def visit(node: ast.AST, name: str, public: bool) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
      if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
        yield from visit(child, name, public)
        continue
      own, shown = f"{name}.{child.name}", public and not child.name.startswith("_")
      if isinstance(child, ast.ClassDef):
        yield from visit(child, own, shown)
        continue
      parameters = parameters_of(child)
      yield Function(own, shown, len(parameters),
                     sum(argument.annotation is not None for argument in parameters),
                     child.returns is not None, _with_any(child),
                     child.end_lineno - child.lineno + 1, _docstring_lines(child),
                     "Raises:" in (ast.get_docstring(child) or ""))
      yield from visit(child, own, False)
  yield from visit(ast.parse(path.read_text(encoding="utf-8")), module,
                   not any(part.startswith("_") for part in module.split(".")))


def measure() -> Measures:
  """Measures every file of the library."""
  modules = import_graph.library_modules()
  functions = tuple(function for module, path in modules.items()
                    for function in functions_of(module, path))
  lengths = {path.relative_to(import_graph.ROOT).as_posix():
             len(path.read_text(encoding="utf-8").splitlines()) for path in modules.values()}
  top = import_graph.ROOT / import_graph.LIBRARY
  return Measures(functions, lengths, tuple(sorted(path.name for path in top.glob("*.py"))))


def cycle(imports: dict[str, Iterable[str]]) -> list[str]:
  """Returns the sorted nodes of a graph that lie on a cycle or between two cycles."""
  left = {name: set(targets) & set(imports) - {name} for name, targets in imports.items()}
  while free := [name for name, targets in left.items() if not targets & set(left)]:
    for name in free:
      del left[name]
  while free := [name for name in left if not any(name in targets for targets in left.values())]:
    for name in free:
      del left[name]
  return sorted(left)


def lines() -> list[str]:
  """Returns the report that import_graph_test prints: floors, top-level files, cycles, numbers."""
  found, floors = measure(), import_graph.floors()
  count = len(found.functions)
  cycles = {"library": cycle(import_graph.module_graph(import_graph.library_modules())),
            "tests": cycle(import_graph.module_graph(import_graph.test_modules()))}
  lengths = sorted(function.lines for function in found.functions)
  untyped = found.untyped_public()
  report = [f"floor {number:2}: {room} ({size} modules)"
            for number, (room, size) in enumerate(floors)]
  report += [f"top-level files: {len(found.top_level)} (at most {MAX_TOP_LEVEL_FILES})"]
  report += [f"cycles of imports, {name}: {', '.join(members) or 'none'}"
             for name, members in cycles.items()]
  report += [
      f"functions: {count}, of which {len(found.with_arguments(9))} have 9 or more arguments and "
      f"{len(found.with_arguments(12))} have 12 or more",
      f"functions longer than {MAX_FUNCTION_LINES} lines: {len(found.long_functions())} without "
      f"their docstrings ({len(found.long_with_docstrings())} with)",
      f"files longer than {MAX_FILE_LINES} lines: {len(found.long_files())} "
      f"of {len(found.file_lines)}",
      f"95th percentile of function length: {lengths[int(0.95 * count)]} lines",
      f"parameters with a type: {found.typed_percent():.1f}%",
      f"docstrings with Raises: {sum(function.raises for function in found.functions)}",
      f"public functions with a parameter or return untyped: {len(untyped)}",
      f"annotations with Any in public signatures: {found.public_any()} (at most {MAX_ANY})"]
  return [MARK + line for line in report]
