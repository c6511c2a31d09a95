"""Every example runs as a newcomer would run it, with small settings."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

# Not resolve(): a file that Bazel runs is a link, and its neighbours are those of the link.
ROOT = pathlib.Path(os.path.abspath(__file__)).parent.parent


class ExamplesTest(absltest.TestCase):

  def run_example(self, name, *arguments) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, str(ROOT / "examples" / name), *arguments],
                             capture_output=True, text=True, env=environment, check=False)
    self.assertEqual(process.returncode, 0, process.stdout + process.stderr)
    return process.stdout + process.stderr

  def test_attend(self):
    self.assertIn("largest difference from the definition", self.run_example("attend.py"))

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
                             "--steps=0", "--mechanism=vanilla")
    self.assertIn("attention by vanilla", again)


if __name__ == "__main__":
  absltest.main()
