# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation: `python3 -m sphinx -W -b html docs docs/_build/html`."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the pages describe this checkout, installed or not

import attn_core  # pylint: disable=wrong-import-position

project = "attn_core"
author = "The attn_core Authors"
copyright = f"2026, {author}"  # pylint: disable=redefined-builtin
version = release = attn_core.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon",
              "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks keep their outputs; a test executes them

html_theme = "furo"
html_title = f"attn_core {version}"
html_static_path = ["_static"]
