# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every example runs as a newcomer would run it, with small settings."""

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from attn_core import attention
from attn_core_test import optional_deps, sampling
from attn_core_test.example_files import ROOT, load_example


class ExamplesTest(parameterized.TestCase):

  def run_example(self, name, *arguments, status=0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, str(ROOT / "examples" / name), *arguments],
                             capture_output=True, text=True, env=environment, check=False)
    self.assertEqual(process.returncode, status, process.stdout + process.stderr)
    return process.stdout + process.stderr

  @parameterized.parameters(sorted(path.name for path in (ROOT / "examples").glob("*.py")))
  def test_begins_with_its_purpose(self, name):
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text("utf-8")))
    self.assertGreaterEqual(len(docstring.splitlines()), 10)
    self.assertIn(f"    python3 examples/{name}\n", docstring)

  @parameterized.parameters("long_context", "masks", "serve", "train_and_generate")
  def test_does_not_log_the_platforms_that_are_missing(self, name):
    # The example itself, but for its `main`; absl has set the level of its logs by then. Without
    # libtpu one platform is missing everywhere, and the lock on TPUs is left to other tests.
    program = ("import runpy, sys; sys.modules['libtpu'] = None; "
               "from absl import app; import jax; run = app.run; "
               "app.run = lambda main: run(lambda argv: print(jax.devices()), argv=sys.argv[:1]); "
               "runpy.run_path(sys.argv[1], run_name='__main__')")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
    environment.pop("JAX_PLATFORMS", None)  # jax then looks for all of them
    process = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "examples" / f"{name}.py")],
        capture_output=True, text=True, env=environment, check=True)
    self.assertIn("Device", process.stdout)
    self.assertNotIn("Unable to initialize backend", process.stderr)

  def test_attend(self):
    self.assertIn("largest difference from the definition", self.run_example("attend.py"))

  def test_flex(self):
    lines = self.run_example("flex.py").splitlines()
    self.assertLen([line for line in lines if " gradients " in line], 10)

  def test_masks(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.run_example("masks.py", f"--out={folder}")
    self.assertIn("packed_documents.txt", os.listdir(folder))

  def test_train_and_generate(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    small = ("--layers=2", "--width=32", "--hidden=64", "--head_dim=16", "--length=64", "--batch=4",
             "--max_bytes=200000", "--steps=4", "--report_every=2", "--noverify", "--generate=8")
    printed = self.run_example("train_and_generate.py", *small, f"--save={folder / 'model.npz'}")
    self.assertIn("8 devices: dp=4, tp=2", printed)
    self.assertIn("step 4:", printed)
    self.assertIn("held-out loss", printed)
    again = self.run_example("train_and_generate.py", *small, f"--load={folder / 'model.npz'}",
                             "--steps=0", "--mechanism=vanilla", "--verify", status=1)
    self.assertIn("attention by vanilla", again)
    self.assertIn(re.search("held-out loss.*", printed)[0], again)
    self.assertIn("FAILED: the loss", again)  # not learned enough

  def test_long_context(self):
    printed = self.run_example("long_context.py", "--length=512", "--steps=2", "--layout=striped")
    self.assertRegex(printed, "contiguous  .* the busiest one visits 1.78 times the mean")
    self.assertRegex(printed, "zigzag      .* the busiest one visits 1.00 times the mean")
    # The sharded and permuted run has the loss of one device.
    sys.path.insert(0, str(ROOT / "examples"))
    self.addCleanup(sys.path.remove, str(ROOT / "examples"))
    example = load_example("long_context")
    text = example.document(513).astype(np.int32)[None]
    value = jax.jit(lambda *batch: example.loss(
        example.model.init(jax.random.key(0), example.CONFIG), batch, example.CONFIG,
        lambda *x: attention(*x).attention_outputs))(
            text[:, :-1], text[:, 1:], np.arange(512)[None])
    self.assertIn(f"striped, step 1: {value:.3f} bits per byte", printed)
    self.assertIn("striped, step 2:", printed)

  def test_serve(self):
    path = self.serve()
    self.assertIn("expected at least 15", self.run_example(
        "serve.py", f"--model={path}", "--pages=10", "--page_size=8", "--prefix_length=20",
        "--prefixes=2", "--longest_prompt=40", "--longest_answer=60", status=1))

  @sampling.slow("serve.py on latent rows")
  def test_serve_latent_rows(self):
    self.serve("--latent")

  def serve(self, *more: str) -> pathlib.Path:
    """Serves a model without training; returns its file."""
    example = load_example("train_and_generate")
    config = example.Config(
        layers=2, width=32, heads=4, key_heads=2, head_dim=8, hidden=32, window=8)
    path = pathlib.Path(self.create_tempdir().full_path) / "model.npz"
    example.save(path, example.init(jax.random.key(0), config), config)
    printed = self.run_example(
        "serve.py", f"--model={path}", "--requests=12", "--pages=24", "--page_size=8", "--rows=6",
        "--budget=32", "--chunk=16", "--prefixes=2", "--prefix_length=20", "--longest_prompt=40",
        "--longest_answer=60", "--arrivals=1", "--report_every=0", *more)
    self.assertIn("12 of 12 requests equal those without a cache", printed)
    self.assertRegex(printed, r" a second; [1-9]\d* preemptions")
    self.assertRegex(printed, r"[1-9]\d*% of .* found, [1-9]\d* pages evicted; at most 24 of 24")
    self.assertRegex(printed, r"guesses: [1-9]\d* of \d+ right")
    self.assertRegex(printed, r"first byte: p50 [\d.]+ ms, p99 [\d.]+ ms; between bytes: p50 \d")
    self.assertRegex(printed, r"call 5, \d+ done, \d+ running, \d+ waiting, \d+ pages in use, ")
    self.assertRegex(printed, r"prefixes: [1-9]\d* pages read .*, [1-9]\d* if every")
    return path


class FlexTest(parameterized.TestCase):
  """The examples of `flex.py` against torch: its flex_attention, and gradients of the formulas."""

  def torch_functions(self, name, torch, flex, arrays):
    """Returns (mask_mod, score_mod or None) of an example."""
    causal = lambda b, h, q, k: q >= k
    known = lambda x: torch.tensor(np.asarray(x))
    documents, prefix, tree = map(known, (flex.DOCUMENTS, flex.PREFIX, flex.ancestors()))
    row, column = (lambda x: x // flex.WIDTH), (lambda x: x % flex.WIDTH)
    return {
        "causal": (causal, None),
        "sliding window": (lambda b, h, q, k: (q >= k) & (q - k <= 16), None),
        "prefix LM": (lambda b, h, q, k: (k < prefix[b]) | (q >= k), None),
        "documents": (lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]), None),
        "ALiBi": (causal, lambda x, b, h, q, k: x + arrays[0][h] * (k - q)),
        "relative bias": (None, lambda x, b, h, q, k: x + arrays[0][
            torch.clamp(k - q, -8, 8) + 8, h]),
        "soft cap": (causal, lambda x, b, h, q, k: 2 * torch.tanh(x / 2)),
        "2-D neighborhood": (lambda b, h, q, k: ((row(q) - row(k)).abs() <= 2) & (
            (column(q) - column(k)).abs() <= 2), None),
        "tree": (lambda b, h, q, k: tree[q, k], None),
        "a function": (None, lambda x, b, h, q, k: torch.where(
            documents[b, q] == documents[b, k], x, x - arrays[0][h] ** 2)),
    }[name]

  @parameterized.parameters("causal", "sliding window", "prefix LM", "documents", "ALiBi",
                            "relative bias", "soft cap", "2-D neighborhood", "tree", "a function")
  def test_equals_torch(self, name):
    """In value, and in the gradients of query, key, value and the arrays of the score mod."""
    torch, _ = optional_deps.torch_and_transformers(self)
    theirs = importlib.import_module("torch.nn.attention.flex_attention")
    flex = load_example("flex")
    example = flex.EXAMPLES[name]
    self.assertLen(flex.EXAMPLES, 10)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32)
              for shape in ((flex.B, flex.T, flex.H, flex.D),) * 3 + example.shapes]
    weights = rng.normal(size=arrays[0].shape).astype(np.float32)
    out, pull = jax.vjp(lambda *arrays: flex.computed(example, *arrays), *arrays)
    given = [torch.tensor(x, requires_grad=True) for x in arrays]
    mask_mod, score_mod = self.torch_functions(name, torch, flex, given[3:])
    query, key, value = (x.transpose(1, 2) for x in given[:3])
    with torch.no_grad():  # on CPUs it has no backward
      found = theirs.flex_attention(
          query.detach(), key.detach(), value.detach(), score_mod=score_mod,
          block_mask=mask_mod and theirs.create_block_mask(
              mask_mod, flex.B, flex.H, flex.T, flex.T, device="cpu"))
    np.testing.assert_allclose(out, found.transpose(1, 2), rtol=1e-5, atol=1e-5)
    scores = query @ key.transpose(2, 3) * flex.D**-0.5
    indices = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod:
      scores = score_mod(scores, *indices)
    if mask_mod:
      scores = scores.masked_fill(~mask_mod(*indices), -torch.inf)
    written = (scores.softmax(-1) @ value).transpose(1, 2)
    np.testing.assert_allclose(out, written.detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad((written * torch.tensor(weights)).sum(), given)
    for x, y in zip(pull(weights), wanted, strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


class GuessesTest(absltest.TestCase):
  """The trees of guesses of serve.py."""

  def setUp(self):
    super().setUp()
    sys.path.insert(0, str(ROOT / "examples"))
    self.addCleanup(sys.path.remove, str(ROOT / "examples"))
    self.serve = load_example("serve")

  def test_a_tree_of_what_followed_before(self):
    tokens, parents = self.serve.guess(b"abcabdab", 4)
    self.assertEqual((bytes(tokens), parents), (b"bdaca", [-1, 0, 1, 0, 3]))
    tokens, parents = self.serve.guess(b"abcdabceab", 4)  # both continue with c
    self.assertEqual((bytes(tokens), parents), (b"bced", [-1, 0, 1, 1]))
    self.assertEqual(self.serve.guess(b"abc", 4), ([ord("c")], [-1]))
    for most in range(4):
      self.assertLen(self.serve.guess(b"abcabdab", most)[0], most + 1)

  def test_only_the_path_of_likeliest_bytes_is_right(self):
    chunk = self.serve.Chunk(None, *self.serve.guess(b"abcabdab", 4))
    self.assertEqual(self.serve.verify(chunk, b"c__ax"), ([0, 3, 4], b"cax"))
    self.assertEqual(self.serve.verify(chunk, b"dx___"), ([0, 1], b"dx"))
    self.assertEqual(self.serve.verify(chunk, b"x____"), ([0], b"x"))


def attend(*arrays, sliding_window):
  return attention(*arrays, sliding_window=sliding_window).attention_outputs


class ModelTest(absltest.TestCase):
  """The model of train_and_generate.py computes what its docstrings promise."""

  def setUp(self):
    super().setUp()
    self.example = load_example("train_and_generate")
    self.config = self.example.Config(
        layers=2, width=16, heads=2, key_heads=1, head_dim=8, hidden=32, window=4)
    self.params = self.example.init(jax.random.key(0), self.config)

  def test_a_byte_changes_the_logits_that_see_it(self):
    tokens = np.arange(32).reshape(2, 16)
    changed = tokens.copy()
    changed[1, 5] = 200
    for pattern, last in (("L", 5 + 2 * 3), ("LF", 15)):  # each of two layers sees 3 earlier bytes
      config = self.config._replace(pattern=pattern)
      one, other = (self.example.forward(self.params, x, config, attend) for x in (tokens, changed))
      moved = np.argwhere(np.abs(one - other).max(-1) > 1e-6).tolist()
      self.assertEqual(moved, [[1, n] for n in range(5, last + 1)], pattern)

  def test_generation_equals_the_forward_of_the_whole_text(self):
    prompt = np.array([[3, 1, 4], [1, 5, 9]], np.int32)
    text = np.asarray(self.example.generate(
        self.params, prompt, jax.random.key(2), config=self.config, attend=attend, amount=6,
        context=9, temperature=1e-6))
    likeliest = self.example.forward(self.params, text, self.config, attend).argmax(-1)
    np.testing.assert_array_equal(text[:, :3], prompt)
    np.testing.assert_array_equal(text[:, 3:], likeliest[:, 2:-1])

  def test_entropy(self):
    self.assertAlmostEqual(self.example.entropy(np.arange(8, dtype=np.uint8)), 3.0)
    self.assertEqual(self.example.entropy(np.zeros(5, np.uint8)), 0.0)


if __name__ == "__main__":
  absltest.main()
