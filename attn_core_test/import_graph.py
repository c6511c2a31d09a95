# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rooms of the library, their imports, and the BUILD files that follow from these.

`python3 -m attn_core_test.import_graph` writes those files and docs/architecture.svg, a picture of
the rooms; `--picture PATH` writes the picture alone. import_graph_test checks that both are
current.
"""

import argparse
import ast
import os
import pathlib
from typing import Iterable, NamedTuple

from attn_core_test import sampling

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
LIBRARY = "attn_core"
TESTS = "attn_core_test"

# Folders with a Bazel target for each module; every other folder is one target.
BY_MODULE = (LIBRARY, f"{LIBRARY}/benchmark", f"{LIBRARY}/caches")

# Rooms, lowest first: a module imports from its own row and from rows above it in this list only.
LAYERS = (
    ("types",),
    ("array_axes",),
    ("operations",),
    ("checks",),
    ("partials",),
    ("masks",),
    ("score_mods",),
    ("rope",),
    ("caches",),
    ("references",),
    ("sharding",),
    ("config",),
    ("kernels",),
    ("autodiff",),
    ("mechanisms",),
    ("dispatch",),
    ("table",),
    ("arguments",),
    ("attention",),
    ("mechanism_functions",),
    ("adapters",),
    ("plan",),
    ("benchmark",),
    ("__init__", "__main__"),
)

HEADER = f"""\
# Written by `python3 -m {TESTS}.import_graph` from the imports of the modules.

load("@rules_python//python:defs.bzl", %s)

package(default_visibility = ["//visibility:public"])

exports_files(["BUILD"])
"""


class Import(NamedTuple):
  """One module that an import statement imports."""

  name: str  # "attn_core.masks.mask" or "numpy"
  at_top: bool  # executed at the import of its module; False: inside a function
  line: int


def library_modules() -> dict[str, pathlib.Path]:
  """Every module of the library by its dotted name, lowest room first."""
  modules = {}
  for path in (ROOT / LIBRARY).rglob("*.py"):
    parts = path.relative_to(ROOT).with_suffix("").parts
    modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  return dict(sorted(modules.items(), key=lambda item: (rank(item[0]), item[0])))


def test_modules() -> dict[str, pathlib.Path]:
  """Every module of the tests by its dotted name."""
  return {f"{TESTS}.{path.stem}": path for path in sorted((ROOT / TESTS).glob("*.py"))}


def module_graph(modules: dict[str, pathlib.Path]) -> dict[str, set[str]]:
  """Returns module -> the modules among `modules` that it imports, at its top or in functions."""
  return {module: {found.name for found in imports_of(module, modules)} & set(modules) - {module}
          for module in modules}


def room_graph() -> dict[str, set[str]]:
  """Returns room -> the rooms that it imports, lowest floor first."""
  graph: dict[str, set[str]] = {}
  for module, names in module_graph(library_modules()).items():
    graph.setdefault(room(module), set()).update(map(room, names))
  return {name: targets - {name} for name, targets in graph.items()}


def floors() -> list[tuple[str, int]]:
  """Returns (room, number of its modules), lowest first."""
  counts: dict[str, int] = {}
  for module in library_modules():
    counts[room(module)] = counts.get(room(module), 0) + 1
  return list(counts.items())


def room(module: str) -> str:
  """Room of a module: the second part of its name, "__init__" for the library itself."""
  return (module.split(".") + ["__init__"])[1]


def rank(module: str) -> int:
  """Row of a module's room in LAYERS; the number of rows if it is in none."""
  rows = [index for index, row in enumerate(LAYERS) if room(module) in row]
  return rows[0] if rows else len(LAYERS)


def imports_of(module: str, modules: dict[str, pathlib.Path]) -> list[Import]:
  """Returns the imports of a module, inside functions too, with absolute names."""
  path = modules[module]
  package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
  found = []

  def visit(node: ast.AST, at_top: bool) -> None:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
      return  # never executed
    if isinstance(node, ast.Import):
      found.extend(Import(alias.name, at_top, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      parts = package[:len(package) - node.level + 1] if node.level else []
      source = ".".join(parts + ([node.module] if node.module else []))
      names = [f"{source}.{alias.name}" for alias in node.names]
      names = [name if name in modules else source for name in names]
      found.extend(Import(name, at_top, node.lineno) for name in dict.fromkeys(names))
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
      visit(child, at_top and not is_function)

  visit(ast.parse(path.read_text(encoding="utf-8")), True)
  return found


def label(module: str, modules: dict[str, pathlib.Path]) -> str:
  """Bazel target of a module: its folder, or the module in the folders of BY_MODULE."""
  folder = modules[module].parent.relative_to(ROOT).as_posix()
  if folder not in BY_MODULE or modules[module].name == "__init__.py":
    return f"//{folder}"
  return f"//{folder}:{module.split('.')[-1]}"


def targets(modules: dict[str, pathlib.Path]) -> dict[str, set[str]]:
  """Every target's label, lowest room first, with the labels it depends on."""
  deps = {}
  for module in modules:
    mine = label(module, modules)
    names = {found.name for found in imports_of(module, modules)} & set(modules)
    deps.setdefault(mine, set()).update(label(name, modules) for name in names)
    deps[mine].discard(mine)
  return deps


def build_files() -> dict[str, str]:
  """Returns the text of every BUILD file that depends on imports, by its path from the root."""
  modules = library_modules()
  deps = targets(modules)
  files = {f"{LIBRARY}/BUILD": HEADER % '"py_library"' + '\nexports_files(["py.typed"])\n'}
  for target in deps:
    folder, _, name = target[2:].partition(":")
    path = f"{folder}/BUILD"
    sources = "glob([\"*.py\"])"
    if folder in BY_MODULE:
      sources = f'["{name or "__init__"}.py"]'
    files.setdefault(path, HEADER % '"py_library"')
    files[path] += rule("py_library", name or folder.split("/")[-1], sources,
                        [shorten(dep, folder) for dep in deps[target]])
  files[f"{LIBRARY}/BUILD"] += rule(
      "py_library", "everything", None, [shorten(target, LIBRARY) for target in deps])

  builds = ["BUILD"] + [f"//{path.removesuffix('/BUILD')}:BUILD" for path in files]
  shards = "".join(f'    "{name}": {number},\n' for name, number in sorted(sampling.SHARDS.items()))
  files[f"{TESTS}/BUILD"] = (
      HEADER % '"py_library", "py_test"' + TEST_RULES % (
          listing(builds), "{\n" + shards + "}" if shards else "{}", listing(deps)))
  return files


def shorten(target: str, folder: str) -> str:
  """Writes a label as a BUILD file in `folder` does."""
  if target == f"//{folder}":
    return f":{folder.split('/')[-1]}"
  return target.removeprefix(f"//{folder}") if target.startswith(f"//{folder}:") else target


def listing(labels: Iterable[str], indent: str = "") -> str:
  """Writes a Starlark list, one label a line, in buildifier's order."""
  labels = sorted(labels, key=lambda item: item.replace(":", "!"))
  return "[\n" + "".join(f'{indent}    "{item}",\n' for item in labels) + f"{indent}]"


def rule(kind: str, name: str, sources: str | None, deps: list[str]) -> str:
  """Writes one rule of a BUILD file."""
  text = f'\n{kind}(\n    name = "{name}",\n'
  if sources:
    text += f"    srcs = {sources},\n"
  if deps:
    text += f"    deps = {listing(deps, '    ')},\n"
  return text + ")\n"


TEST_RULES = """
BUILD_FILES = %s

SHARDS = %s

LIBRARIES = %s

DATA = BUILD_FILES + glob([
    "*.py",
    "approved/*.txt",
    "results/*.json",
    "results/*_static.md",
    "typed_programs/*.py",
]) + [
    "//:documents",
    "//attn_core:py.typed",
    "//examples:sources",
]

py_library(
    name = "support",
    srcs = glob(
        ["*.py"],
        exclude = ["*_test.py"],
    ),
    deps = ["//attn_core:everything"],
)

[
    py_test(
        name = file[:-len(".py")],
        timeout = "long",
        srcs = [
            file,
            "run_module.py",
        ],
        args = [file[:-len(".py")]],
        data = DATA,
        legacy_create_init = 1,
        main = "run_module.py",
        shard_count = SHARDS.get(file[:-len(".py")]),
        tags = ["one_module"],
        deps = [":support"],
    )
    for file in glob(["*_test.py"])
]

# All modules that are not long, in copies of a few processes: each needs seconds to start.
py_test(
    name = "short_modules",
    timeout = "eternal",
    srcs = glob(["*_test.py"]) + [
        "__main__.py",
        "run_module.py",
    ],
    args = ["--short"],
    data = DATA,
    legacy_create_init = 1,
    main = "__main__.py",
    tags = ["cpu:2"],
    deps = [":support"],
)

# A library must be importable where there is nothing but its deps.
[
    genquery(
        name = "sources_" + target[2:].replace("/", "_").replace(":", "_"),
        expression = "kind('source file', deps(%%s))" %% target,
        scope = [target],
    )
    for target in LIBRARIES
]

SOURCES = [":sources_" + target[2:].replace("/", "_").replace(":", "_") for target in LIBRARIES]

py_test(
    name = "alone",
    srcs = ["import_alone.py"],
    args = ["$(location %%s)" %% sources for sources in SOURCES],
    data = SOURCES,
    legacy_create_init = 1,
    main = "import_alone.py",
    shard_count = 2,
    deps = ["//attn_core:everything"],
)
"""


# Sizes in the picture, in pixels.
ROW, LEFT, BOX, TOP = 44, 24, 210, 56


def picture() -> str:
  """Draws the rooms as an SVG picture, highest floor first, with an arc for every import."""
  graph, sizes = room_graph(), dict(floors())
  names = [name for name in reversed(list(graph)) if name != "__main__"]
  middle = {name: TOP + ROW * index + 15 for index, name in enumerate(names)}
  shapes, arcs = [], []
  for name in names:
    y, count = middle[name], sizes[name]
    title = LIBRARY if name == "__init__" else name
    shapes.append(
        f'<rect x="{LEFT}" y="{y - 15}" width="{BOX}" height="30" rx="4"/>'
        f'<text x="{LEFT + 10}" y="{y + 5}">{title}</text>'
        f'<text x="{LEFT + BOX - 10}" y="{y + 5}" class="size">{count}</text>')
    for target in sorted(graph[name] & set(names), key=middle.get):
      reach = LEFT + BOX + 24 + abs(middle[target] - y) * 0.55
      arcs.append(f'<path d="M {LEFT + BOX} {y + 4} C {reach:.0f} {y + 4}, {reach:.0f} '
                  f'{middle[target] - 4}, {LEFT + BOX + 3} {middle[target] - 4}"/>')
  height = TOP + ROW * len(names)
  return "\n".join([
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" width="640" '
      f'height="{height}">',
      f"<!-- Written by `python3 -m {TESTS}.import_graph` from the imports of the modules. -->",
      "<style>text{font:14px sans-serif;fill:#222}.size{text-anchor:end;fill:#777}"
      "rect{fill:#eef3fb;stroke:#4a6da7}path{fill:none;stroke:#4a6da7;stroke-opacity:.55;"
      "marker-end:url(#tip)}.paper{fill:#fff;stroke:none}.tip{fill:#4a6da7;stroke:none;"
      "stroke-opacity:1;marker-end:none}@media (prefers-color-scheme:dark){text{fill:#ddd}"
      ".size{fill:#999}rect{fill:#1d2a40;stroke:#78aeed}path{stroke:#78aeed}.paper{fill:#14161a}"
      ".tip{fill:#78aeed}}</style>",
      '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
      'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" class="tip"/></marker></defs>',
      f'<rect width="640" height="{height}" class="paper"/>',
      f'<text x="{LEFT}" y="28">Packages of {LIBRARY}, numbers of modules, imports</text>',
      *arcs, *shapes, "</svg>"]) + "\n"


def main() -> None:
  """Writes the files that follow from the imports."""
  parser = argparse.ArgumentParser(prog=f"python3 -m {TESTS}.import_graph")
  parser.add_argument("--picture", help="write only the picture, to this path")
  path = parser.parse_args().picture
  files = {path: picture()} if path else {**build_files(), "docs/architecture.svg": picture()}
  for name, text in files.items():
    (ROOT / name).write_text(text, encoding="utf-8")
    print(name)


if __name__ == "__main__":
  main()
