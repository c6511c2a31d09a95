# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports every module of each library where there is nothing but its dependencies.

Every argument is a file that Bazel writes for a library: the labels of its sources and of what it
depends on. Other modules of attn_core do not exist for it, so that a dependency missing from a
BUILD file is an ImportError. Each library is imported in a copy of this process, which has
imported JAX; TEST_SHARD_INDEX of TEST_TOTAL_SHARDS says which libraries are this process's.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import tempfile
import traceback
from types import ModuleType
from typing import NoReturn, Sequence

import jax
from jax.experimental.pallas import mosaic_gpu, tpu

LOADED = (jax, mosaic_gpu, tpu)

# Not resolve(): Bazel runs a link to this file, and the files next to the link are the ones meant.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent
LIBRARY = "attn_core"


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Hides the modules of attn_core that are not among some files."""

  def __init__(self, labels: Sequence[str]):
    """Takes labels such as "//attn_core/masks:tree.py"; skips those of other repositories."""
    self.files = {label[2:].replace(":", "/") for label in labels
                  if label.startswith((f"//{LIBRARY}/", f"//{LIBRARY}:"))}

  def names(self) -> list[str]:
    """The modules, as an import names them."""
    return sorted(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                  for file in self.files if file.endswith(".py"))

  def find_spec(self, fullname: str, path: Sequence[str] | None = None,
                target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
    if fullname.partition(".")[0] != LIBRARY:
      return None
    file = fullname.replace(".", "/")
    if self.files & {f"{file}.py", f"{file}/__init__.py"}:
      return None  # as without this finder
    if any(name.startswith(f"{file}/") for name in self.files):
      spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
      spec.submodule_search_locations = [str(ROOT / file)]
      return spec
    raise ModuleNotFoundError(f"No module named {fullname!r} among the sources", name=fullname)

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
    """Packages whose own file is not among the files are empty."""

  def exec_module(self, module: ModuleType) -> None:
    pass


def import_all(sources: Sources) -> None:
  """Imports all of a library's sources; raises SystemExit where one is not this checkout's."""
  if not sources.names():
    raise SystemExit("no module")
  sys.meta_path.insert(0, sources)
  for name in sources.names():
    module = importlib.import_module(name)
    if not pathlib.Path(module.__file__ or "").is_relative_to(ROOT):
      raise SystemExit(f"{name} came from {module.__file__}, which is outside {ROOT}")


def end(sources: Sources) -> NoReturn:
  """Imports a library's sources and ends this process, whose status says how it came."""
  status = 1
  try:
    import_all(sources)
    status = 0
  except BaseException:  # pylint: disable=broad-exception-caught
    traceback.print_exc()
  finally:
    os._exit(status)


def main(files: Sequence[str]) -> None:
  """Imports the libraries, each in a process of its own; raises SystemExit if one cannot be."""
  index, total = (int(os.environ.get(f"TEST_{name}", default)) for name, default in (
      ("SHARD_INDEX", "0"), ("TOTAL_SHARDS", "1")))
  if "TEST_SHARD_STATUS_FILE" in os.environ:
    pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
  failed = []
  gc.freeze()
  with tempfile.TemporaryDirectory() as compiled:
    sys.pycache_prefix = compiled  # a module is compiled once for all libraries
    for file in files[index::total]:
      sources = Sources(pathlib.Path(file).read_text(encoding="utf-8").split())
      child = os.fork()
      if not child:
        end(sources)
      status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
      print(f"{file}: {len(sources.names())} modules, {'ok' if status == 0 else 'FAILED'}",
            flush=True)
      failed += [file] * (status != 0)
  if not files or failed:
    raise SystemExit(f"cannot be imported alone: {failed}" if files else "no library is given")


if __name__ == "__main__":
  main(sys.argv[1:])
