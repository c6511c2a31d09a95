# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes autodoc show signatures and fields as the source writes them.

Types keep the names of the source, such as `ArrayLike`, where autodoc would print the union of
eight classes behind it. The fields of a named tuple or a dataclass become a list of attributes with
their types, defaults and comments, where autodoc would print "Alias for field number 0".
"""

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import re
import textwrap
import typing
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import roles
from sphinx.application import Sphinx

NAME = re.compile(r"[A-Za-z_][\w.]*")
ELLIPSIS = "doctest: +ELLIPSIS"
BEFORE_NAPOLEON, AFTER_NAPOLEON = 100, 900  # napoleon's handler has priority 500
MANY_FIELDS = 12  # the signature of a class with more of them is left out: the list follows


class Field(NamedTuple):
  """One field of a class as its source writes it."""

  name: str
  annotation: str
  default: str  # "": none
  comment: str  # at the end of its line, or in the lines above


@functools.cache
def _class_source(cls: type) -> tuple[ast.ClassDef, list[str]]:
  """Returns the definition of a class and the lines of its source."""
  text = textwrap.dedent(inspect.getsource(cls))
  definition = ast.parse(text).body[0]
  assert isinstance(definition, ast.ClassDef)
  return definition, text.splitlines()


def _comment_of(node: ast.AnnAssign, lines: list[str]) -> str:
  """Returns the comment of a field: at the end of its line, or else in the lines above."""
  assert node.end_lineno is not None and node.end_col_offset is not None
  rest = lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode().strip()
  if rest.startswith("#"):
    return rest.lstrip("# ")
  above: list[str] = []
  for line in reversed(lines[:node.lineno - 1]):
    if not line.strip().startswith("#"):
      break
    above.insert(0, line.strip().lstrip("# "))
  return " ".join(above)


def _default_of(value: ast.expr) -> str:
  """Returns the default of a field, which `dataclasses.field` may give."""
  if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
    return next((ast.unparse(word.value) for word in value.keywords if word.arg == "default"), "")
  return ast.unparse(value)


def has_fields(cls: Any) -> bool:
  """Returns whether an object is a named tuple or a dataclass."""
  return inspect.isclass(cls) and (hasattr(cls, "_fields") or dataclasses.is_dataclass(cls))


def fields_of(cls: type) -> list[Field]:
  """Returns the fields of a named tuple or a dataclass, those of its base classes included."""
  found: dict[str, Field] = {}
  for base in reversed(cls.__mro__):
    if not base.__module__.startswith("attn_core"):
      continue
    definition, lines = _class_source(base)
    for node in definition.body:
      if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        default = "" if node.value is None else _default_of(node.value)
        annotation = ast.unparse(node.annotation).strip("'\"")
        found[node.target.id] = Field(node.target.id, annotation, default, _comment_of(node, lines))
  return [field for field in found.values() if not field.annotation.startswith("ClassVar")]


def _signature_of_class(cls: type) -> str:
  """Returns the parameters of a class with fields, without types."""
  fields = fields_of(cls)
  if len(fields) > MANY_FIELDS:
    return "(**fields)"
  return f"({', '.join(f'{f.name}={f.default}' if f.default else f.name for f in fields)})"


def _signature_of_function(function: Any) -> tuple[str, str | None]:
  """Returns the parameters and the type of the result of a function or method."""
  function = inspect.unwrap(getattr(function, "__func__", function))
  definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
  assert isinstance(definition, ast.FunctionDef)
  arguments = definition.args
  first = (arguments.posonlyargs + arguments.args)[:1]
  if first and first[0].arg in ("self", "cls") and first[0].annotation is None:
    (arguments.posonlyargs or arguments.args).pop(0)
  result = None if definition.returns is None else ast.unparse(definition.returns).strip("'\"")
  return f"({ast.unparse(arguments)})", result


def process_signature(  # pylint: disable=unused-argument
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None,
    result: str | None) -> tuple[str | None, str | None]:
  """Replaces the signature that autodoc found by that of the source."""
  if what == "class" and has_fields(obj):
    return _signature_of_class(obj), None
  if what == "class" and (typing.is_typeddict(obj) or issubclass(obj, enum.Enum)):
    return "", None
  if obj is dataclasses.replace:
    return "(**changes)", None
  if what in ("function", "method") and inspect.isroutine(inspect.unwrap(obj)):
    return _signature_of_function(obj)
  return signature, result


def process_docstring(  # pylint: disable=unused-argument
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  """Adds the fields of a class to its docstring, and marks indented formulas as literal."""
  mark_literal_blocks(lines)
  keep_results_in_one_piece(lines)
  if obj is dataclasses.replace:  # as a method of a class
    lines[:] = ["Returns a copy with other values of some fields."]
  if any(ELLIPSIS in line for line in lines):  # what an example leaves out of its output
    lines[:] = [line for line in lines if line.strip() != "..."]
  # A letter with a period would begin a list.
  lines[:] = [re.sub(r"^(\s*\w+: \w)\.(?=\s|$)", r"\1\\.", line) for line in lines]
  if what == "class" and typing.is_typeddict(obj):
    lines += ["", ":Keys: " + ", ".join(f"``{key}``" for key in obj.__annotations__), ""]
  if what == "class" and has_fields(obj):
    lines += ["", ":Fields:"]
    for field in fields_of(obj):
      default = f" = {field.default}" if field.default else ""
      comment = f" -- {field.comment}" if field.comment else ""
      lines.append(f"  * **{field.name}** (``{field.annotation}{default}``){comment}")
    lines.append("")


def keep_docstring(  # pylint: disable=unused-argument
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  """Restores the docstring of a property, whose words before a colon napoleon takes for a type."""
  if what == "property":
    lines[:] = [*(inspect.getdoc(obj) or "").splitlines(), ""]


def keep_results_in_one_piece(lines: list[str]) -> None:
  """Writes "Returns:" as a field, since napoleon takes words before a colon for a type."""
  if "Returns:" not in lines:
    return
  first = lines.index("Returns:")
  block = list(itertools.takewhile(lambda line: not line or line.startswith(" "),
                                   lines[first + 1:]))
  text = textwrap.dedent("\n".join(block)).strip().splitlines()
  lines[first:first + 1 + len(block)] = [f":returns: {text[0]}", *(f"  {x}" for x in text[1:]), ""]


def mark_literal_blocks(lines: list[str]) -> None:
  """Makes a block of code of lines that are indented more than the paragraph before them."""
  for number in range(len(lines) - 1, 1, -1):
    above, line = lines[number - 2], lines[number]
    if lines[number - 1].strip() or not above.strip() or not line.strip():
      continue
    depth = _depth(above)
    if _depth(line) > depth and not above.lstrip().startswith("* ") and not above.endswith("::"):
      block = itertools.takewhile(lambda line: not line.strip() or _depth(line) > depth,
                                  lines[number:])
      language = "python" if _is_python("\n".join(block)) else "text"
      lines[number - 1:number] = ["", f"{' ' * depth}.. code-block:: {language}", ""]


def _depth(line: str) -> int:
  return len(line) - len(line.lstrip())


def _is_python(text: str) -> bool:
  """Returns whether a text can be read as a program; formulas in words cannot."""
  try:
    ast.parse(textwrap.dedent(text))
  except SyntaxError:
    return False
  return True


def skip_member(  # pylint: disable=unused-argument
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
  """Leaves out the members that stand for fields: `process_docstring` lists them."""
  return True if type(obj).__name__ == "_tuplegetter" else None


def code_role(name: str, rawtext: str, text: str, lineno: int, inliner: Any,
              options: Any = None, content: Any = ()) -> tuple[list, list]:
  """Role of single backquotes: a link where the reference has the name, else plain code."""
  if NAME.fullmatch(text):
    role = inliner.document.settings.env.get_domain("py").role("obj")
    return role(name, rawtext, text, lineno, inliner, options or {}, content)
  code = text.replace("\\", "").replace("\x00", "")  # backslashes, and what docutils makes of them
  return [nodes.literal(rawtext, code)], []


def setup(app: Sphinx) -> dict[str, bool]:
  """Registers the handlers."""
  app.connect("autodoc-process-signature", process_signature)
  app.connect("autodoc-process-docstring", process_docstring, priority=BEFORE_NAPOLEON)
  app.connect("autodoc-process-docstring", keep_docstring, priority=AFTER_NAPOLEON)
  app.connect("autodoc-skip-member", skip_member)
  roles.register_canonical_role("name_or_code", code_role)
  return {"parallel_read_safe": True}
