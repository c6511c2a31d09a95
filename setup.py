# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs attn_core: `pip install .`, or `pip install -e '.[test]'` to work on it."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent
REPOSITORY = "https://github.com/attn-core/attn_core"
# Shows files as bytes, so that a page elsewhere can contain a picture.
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com")

# Code in a text, which stays as it is, or a link: (mark of a picture, text, target).
CODE_OR_LINK = re.compile(r"^```.*?^```$|`[^`\n]*`(?!\])|(!?)\[((?:[^\]`]|`[^`\n]*`)*)\]\(([^)\s]+)\)",
                          re.MULTILINE | re.DOTALL)


def read_version() -> str:
  """The version in attn_core/__init__.py, read as text so that building needs no jax."""
  path = ROOT / "attn_core" / "__init__.py"
  match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
  if match is None:
    raise RuntimeError(f'{path} has no line of the form __version__ = "0.1.0"')
  return match.group(1)


def absolute_links(text: str) -> str:
  """Replaces relative links and pictures of a Markdown text by addresses in the repository.

  A package index shows README.md without the files next to it.
  """
  def absolute(match: re.Match[str]) -> str:
    picture, words, target = match.groups()
    if target is None or re.match(r"[a-z]+:|#", target):
      return match[0]
    kind = "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
    address = f"{RAW}/main" if picture else f"{REPOSITORY}/{kind}/main"
    return f"{picture}[{words}]({address}/{target})"

  return CODE_OR_LINK.sub(absolute, text)


def arguments() -> dict[str, object]:
  """The arguments of `setuptools.setup`."""
  return dict(
      name="attn_core",
      version=read_version(),
      description="Every attention mechanism a JAX user knows by name, as plain functions",
      long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
      long_description_content_type="text/markdown",
      author="The attn_core Authors",
      url=REPOSITORY,
      project_urls={
          "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
          "Source": REPOSITORY,
          "Issues": f"{REPOSITORY}/issues",
          "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
      },
      keywords=["attention", "JAX", "Pallas", "FlashAttention", "ring attention",
                "paged attention", "KV cache", "transformer", "TPU", "GPU"],
      license="Apache-2.0",
      license_files=["LICENSE"],
      packages=setuptools.find_packages(include=["attn_core", "attn_core.*"]),
      package_data={"attn_core": ["py.typed"]},
      python_requires=">=3.11",
      install_requires=["jax>=0.10.2", "numpy", "chex", "absl-py"],
      extras_require=EXTRAS,
      # The default, build/, is the Bazel file BUILD on a disk that ignores case.
      options={"build": {"build_base": ".build"}},
      classifiers=[
          "Development Status :: 3 - Alpha",
          "Intended Audience :: Developers",
          "Intended Audience :: Science/Research",
          "Operating System :: OS Independent",
          "Programming Language :: Python :: 3",
          "Programming Language :: Python :: 3 :: Only",
          "Programming Language :: Python :: 3.11",
          "Programming Language :: Python :: 3.12",
          "Topic :: Scientific/Engineering :: Artificial Intelligence",
          "Topic :: Software Development :: Libraries :: Python Modules",
          "Typing :: Typed",
      ],
  )


EXTRAS = {
    "test": ["matplotlib", "mypy"],
    "parity": ["torch", "transformers"],
    "adapters": ["flax", "equinox", "keras"],
    "plot": ["matplotlib"],
    "progress": ["tqdm"],
    # The documentation and its checks; the package as an index gets it.
    "docs": ["sphinx>=8.2.3", "myst-nb>=1.3.0", "furo>=2025.7.19", "sphinx-copybutton>=0.5.2",
             "matplotlib>=3.10.9", "nbclient>=0.10.2", "ipykernel>=6.29.5",
             "pyspellchecker>=0.9.1", "build>=1.2.2", "twine>=6.1.0", "setuptools>=77.0.3",
             "readme_renderer[md]>=44.0"],
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda13]"],
    # To compile for a GPU that is not there.
    "cuda-compiler": ["jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm",
                      "nvidia-cuda-nvdisasm"],
}

if __name__ == "__main__":
  setuptools.setup(**arguments())
