# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The shape of the library: imports point downwards, dependencies are few, signatures are short."""

import ast
import difflib
import re
import subprocess
import sys

from absl.testing import absltest

from attn_core_test import code_measures, import_graph

DEPENDENCIES = {"absl", "chex", "jax", "numpy"}

# Named by an extra of setup.py, or installed by the user; imported only inside functions.
OPTIONAL = {"ejkernel", "flash_attn", "matplotlib", "tokamax", "torch", "tqdm"}

MAX_PARAMETERS = 8

# (importer, imported): a back end that runs another, given as `fallback` by its row of the table.
FALLBACKS: set[tuple[str, str]] = set()

# Signatures that are documented for users and may be long, or those of any decorated function.
DOCUMENTED = {
    "attn_core.adapters.equinox.equinox_attention",
    "attn_core.adapters.flax.flax_attention_fn",
    "attn_core.adapters.jax_nn.dot_product_attention",
    "attn_core.adapters.keras.keras_dot_product_attention",
    "attn_core.adapters.tokamax.tokamax_dot_product_attention",
    "attn_core.arguments.other_keywords.checked",
    "attn_core.attention.attention",
    "attn_core.attention.explain",
    "attn_core.benchmark.runner.run_attention_benchmarks",
    "attn_core.benchmark.static.tpu_pages_programs._known",  # stands for another library's function
    "attn_core.benchmark.static.tpu_pages_programs._known_loop",
    "attn_core.caches.paged.layouts.renamed",
    "attn_core.config.config.__new__",
    "attn_core.config.config._replace",
    "attn_core.config.merge.add_basic_configurations",
    "attn_core.config.merge.attach_custom_arguments",
    "attn_core.config.json.from_pretrained",
    "attn_core.mechanism_functions.dense.autoregressive_decodeattn",
    "attn_core.mechanism_functions.dense.blocksparse",
    "attn_core.mechanism_functions.dense.blockwise",
    "attn_core.mechanism_functions.dense.blockwise_attn",
    "attn_core.mechanism_functions.dense.cuda_flash_attn2",
    "attn_core.mechanism_functions.dense.cudnn",
    "attn_core.mechanism_functions.dense.flash_attn2",
    "attn_core.mechanism_functions.latent.multi_latent_attention",
    "attn_core.mechanism_functions.latent.multi_latent_ragged_page_attention",
    "attn_core.mechanism_functions.pages.page_attention",
    "attn_core.mechanism_functions.pages.ragged_page_attention_v2",
    "attn_core.mechanism_functions.pages.ragged_page_attention_v3",
    "attn_core.mechanism_functions.dense.ring_attention",
    "attn_core.mechanism_functions.dense.sdpa",
    "attn_core.mechanism_functions.dense.vanilla",
    "attn_core.plan.context_parallel.plan_context_parallel",
    "attn_core.sharding.mesh.create_mesh",
}


class ImportGraphTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.modules = import_graph.library_modules()
    cls.imports = {name: import_graph.imports_of(name, cls.modules) for name in cls.modules}

  def assert_none(self, errors):
    if errors:
      self.fail("\n" + "\n".join(errors))

  def where(self, module, found):
    return f"{self.modules[module].relative_to(import_graph.ROOT)}:{found.line}"

  def internal(self):
    """Yields (importer, import) of every import of a module of the library by another one."""
    for module, imports in self.imports.items():
      for found in imports:
        if found.name.split(".")[0] == import_graph.LIBRARY:
          yield module, found

  def test_finds_the_library(self):
    self.assertIn("attn_core.types", self.modules)
    self.assertIn("jax", {found.name for found in self.imports["attn_core.types"]})

  def test_back_ends_are_imported_when_chosen(self):
    code = ("import time, jax, jax.numpy, sys; start = time.perf_counter(); import attn_core; "
            "print(time.perf_counter() - start); print(*sys.modules)")
    seconds, modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        cwd=import_graph.ROOT).stdout.splitlines()[-2:]
    print(f"import attn_core: {float(seconds):.2f} s on top of import jax")
    late = ("jax.experimental.pallas", "jax.experimental.mosaic", "attn_core.kernels.gpu",
            "attn_core.kernels.tpu", "chex")
    self.assertEmpty([name for name in modules.split() if name.startswith(late)])

  def test_every_module_has_a_room(self):
    self.assert_none([
        f"{name}: its room {import_graph.room(name)!r} is not in import_graph.LAYERS"
        for name in self.modules if import_graph.rank(name) == len(import_graph.LAYERS)
    ])

  def test_imports_exist(self):
    self.assert_none([
        f"{self.where(module, found)}: there is no module {found.name}"
        for module, found in self.internal() if found.name not in self.modules
    ])

  def test_imports_point_downwards(self):
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name} from a room above its own"
        for module, found in self.internal()
        if import_graph.rank(found.name) > import_graph.rank(module)
    ])

  def test_references_and_kernels_do_not_import_each_other(self):
    apart = {"references", "kernels"}
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name}"
        for module, found in self.internal()
        if {import_graph.room(module), import_graph.room(found.name)} == apart
    ])

  def test_back_ends_do_not_import_each_other(self):
    back_ends = {"gpu", "tpu", "xla"}
    def end(name):
      return name.split(".")[2] if name.startswith("attn_core.kernels.") else ""
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name}"
        for module, found in self.internal()
        if {end(module), end(found.name)} <= back_ends and end(module) != end(found.name)
        and (module, found.name) not in FALLBACKS
    ])

  def test_normalization_imports_no_kernel(self):
    self.assert_none([
        f"{self.where(module, found)}: {module} imports {found.name}"
        for module, found in self.internal()
        if import_graph.room(module) == "arguments" and import_graph.room(found.name) == "kernels"
    ])

  def test_every_row_has_one_room(self):
    self.assert_none([f"{row} share a row of LAYERS" for row in import_graph.LAYERS
                      if len(row) > 1 and row != ("__init__", "__main__")])

  def test_modules_have_no_cycle(self):
    for name, modules in (("library", self.modules), ("tests", import_graph.test_modules())):
      with self.subTest(name):
        self.assertEmpty(code_measures.cycle(import_graph.module_graph(modules)))

  def test_cycles_are_found(self):
    graph = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}
    self.assertEqual(code_measures.cycle(graph), ["b", "c"])
    self.assertEmpty(code_measures.cycle({**graph, "c": ["d", "c"]}))

  def test_no_test_module_imports_another(self):
    graph = import_graph.module_graph(import_graph.test_modules())
    self.assert_none([
        f"{module} imports {name}; put what they share into a module that is not a test"
        for module, names in graph.items() for name in sorted(names)
        if module.endswith("_test") and name.endswith("_test")
    ])

  def test_measures(self):
    """Checks the numbers and prints them; the test runner shows them also when all tests pass."""
    print("", *code_measures.lines(), sep="\n")
    found = code_measures.measure()
    self.assertLessEqual(len(found.top_level), code_measures.MAX_TOP_LEVEL_FILES, found.top_level)
    self.assertEmpty(found.long_functions())
    self.assertEmpty(found.long_files())
    self.assertContainsSubset(found.with_arguments(MAX_PARAMETERS + 1), DOCUMENTED)
    self.assertGreaterEqual(found.typed_percent(), code_measures.MIN_TYPED_PERCENT)
    self.assertEmpty(found.untyped_public())
    self.assertLessEqual(found.public_any(), code_measures.MAX_ANY)

  def test_picture_is_current(self):
    path = import_graph.ROOT / "docs" / "architecture.svg"
    self.assertEqual(path.read_text(encoding="utf-8"), import_graph.picture(),
                     "run python3 -m attn_core_test.import_graph")

  def test_targets_have_no_cycles(self):
    left = import_graph.targets(self.modules)
    while free := [target for target, deps in left.items() if not deps & set(left)]:
      for target in free:
        del left[target]
    self.assert_none([f"{target} <-> {sorted(deps & set(left))}" for target, deps in left.items()])

  def test_dependencies_are_few(self):
    errors = []
    for module, imports in self.imports.items():
      for found in imports:
        origin = found.name.split(".")[0]
        allowed = DEPENDENCIES | {import_graph.LIBRARY} | sys.stdlib_module_names
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
        place = f"{path.relative_to(import_graph.ROOT)}:{node.lineno}: {name}"
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
        or not re.search(rf"^ *def {name.rpartition('.')[2]}\(",
                         self.modules[module].read_text("utf-8"), re.MULTILINE)
    ])

  def test_build_files_follow_from_imports(self):
    errors = []
    for name, expected in import_graph.build_files().items():
      path = import_graph.ROOT / name
      actual = path.read_text(encoding="utf-8") if path.exists() else ""
      errors += difflib.unified_diff(
          actual.splitlines(), expected.splitlines(), name, f"{name} as it must be", lineterm="")
    if errors:
      self.fail("\n".join(["run python3 -m attn_core_test.import_graph, which writes:"] + errors))


if __name__ == "__main__":
  absltest.main()
