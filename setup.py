# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs attn_core: `pip install .`, or `pip install -e '.[test]'` to work on it."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent


def read_version() -> str:
  """The version in attn_core/__init__.py, read as text so that building needs no jax."""
  path = ROOT / "attn_core" / "__init__.py"
  match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
  if match is None:
    raise RuntimeError(f'{path} has no line of the form __version__ = "0.1.0"')
  return match.group(1)


setuptools.setup(
    name="attn_core",
    version=read_version(),
    description="Every attention mechanism a JAX user knows by name, as plain functions",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["attn_core", "attn_core.*"]),
    package_data={"attn_core": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["jax>=0.10.2", "numpy", "chex", "absl-py"],
    extras_require={
        "test": ["matplotlib", "mypy"],
        "parity": ["torch", "transformers"],
        "adapters": ["flax", "equinox", "keras"],
        "plot": ["matplotlib"],
        "progress": ["tqdm"],
        "docs": ["sphinx", "myst-nb", "furo", "sphinx-copybutton", "matplotlib"],
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        # To compile for a GPU that is not there.
        "cuda-compiler": ["jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm",
                          "nvidia-cuda-nvdisasm"],
    },
    # The default, build/, is the Bazel file BUILD on a disk that ignores case.
    options={"build": {"build_base": ".build"}},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
