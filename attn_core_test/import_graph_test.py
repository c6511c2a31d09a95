"""The shape of the library: imports point downwards, dependencies are few, signatures short."""

import ast
import difflib
import sys

from absl.testing import absltest

from attn_core_test import import_graph as layers

DEPENDENCIES = {"absl", "chex", "jax", "numpy"}

# Named by an extra of setup.py or by the user; imported only inside the function that needs them.
OPTIONAL = {"ejkernel", "flash_attn", "matplotlib", "tokamax", "torch", "tqdm"}

MAX_PARAMETERS = 8

# Signatures that are documented elsewhere, as users know them.
DOCUMENTED = {
    "attn_core.attention.attention",
    "attn_core.attention.explain",
    "attn_core.benchmark.run_attention_benchmarks",
    "attn_core.config_merge.add_basic_configurations",
    "attn_core.config_merge.attach_custom_arguments",
    "attn_core.config_json.from_pretrained",
    "attn_core.named.blockwise_attn",
    "attn_core.sharding.mesh.create_mesh",
}


class LayersTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.modules = layers.library_modules()
    cls.imports = {name: layers.imports_of(name, cls.modules) for name in cls.modules}

  def assert_none(self, errors):
    if errors:
      self.fail("\n" + "\n".join(errors))

  def where(self, module, found):
    return f"{self.modules[module].relative_to(layers.ROOT)}:{found.line}"

  def internal(self):
    """Every import of one of the library's modules by another: (importer, import)."""
    for module, imports in self.imports.items():
      for found in imports:
        if found.name.split(".")[0] == layers.LIBRARY:
          yield module, found

  def test_finds_the_library(self):
    self.assertIn("attn_core.types", self.modules)
    self.assertIn("jax", {found.name for found in self.imports["attn_core.types"]})

  def test_every_module_has_a_room(self):
    self.assert_none([
        f"{name}: its room {layers.room(name)!r} is not in layers.LAYERS"
        for name in self.modules if layers.rank(name) == len(layers.LAYERS)
    ])

  def test_imports_exist(self):
    self.assert_none([
        f"{self.where(module, found)}: there is no module {found.name}"
        for module, found in self.internal() if found.name not in self.modules
    ])

  def test_imports_point_downwards(self):
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name} from a room above its own"
        for module, found in self.internal() if layers.rank(found.name) > layers.rank(module)
    ])

  def test_references_and_kernels_are_apart(self):
    apart = {"references", "kernels"}
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name}"
        for module, found in self.internal()
        if {layers.room(module), layers.room(found.name)} == apart
    ])

  def test_targets_have_no_cycles(self):
    left = layers.targets(self.modules)
    while free := [target for target, deps in left.items() if not deps & set(left)]:
      for target in free:
        del left[target]
    self.assert_none([f"{target} <-> {sorted(deps & set(left))}" for target, deps in left.items()])

  def test_depends_on_little(self):
    errors = []
    for module, imports in self.imports.items():
      for found in imports:
        origin = found.name.split(".")[0]
        allowed = DEPENDENCIES | {layers.LIBRARY} | sys.stdlib_module_names
        if origin not in (allowed if found.at_top else allowed | OPTIONAL):
          place = "at its top" if found.at_top else "inside a function"
          errors.append(f"{self.where(module, found)}: imports {found.name} {place}")
    self.assert_none(errors)

  def test_signatures_are_short(self):
    errors = []
    for module, path in self.modules.items():
      for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
          continue
        name = getattr(node, "name", "lambda")
        if f"{module}.{name}" in DOCUMENTED:
          continue
        given = node.args
        count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
        place = f"{path.relative_to(layers.ROOT)}:{node.lineno}: {name}"
        if count > MAX_PARAMETERS:
          errors.append(f"{place} has {count} parameters; more than {MAX_PARAMETERS} want a tuple")
        if given.kwarg:
          errors.append(f"{place} takes **{given.kwarg.arg}")
    self.assert_none(errors)

  def test_documented_signatures_exist(self):
    self.assert_none([
        f"{name} is in DOCUMENTED and not in the library"
        for name in sorted(DOCUMENTED)
        if (module := name.rpartition(".")[0]) not in self.modules
        or f"\ndef {name.rpartition('.')[2]}(" not in self.modules[module].read_text("utf-8")
    ])

  def test_build_files_follow_from_imports(self):
    errors = []
    for name, expected in layers.build_files().items():
      path = layers.ROOT / name
      actual = path.read_text(encoding="utf-8") if path.exists() else ""
      errors += difflib.unified_diff(
          actual.splitlines(), expected.splitlines(), name, f"{name} as it must be", lineterm="")
    if errors:
      self.fail("\n".join(["run python3 -m attn_core_test.layers, which writes:"] + errors))


if __name__ == "__main__":
  absltest.main()
