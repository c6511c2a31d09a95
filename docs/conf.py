# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation: `python3 -m sphinx -W -b html docs docs/_build/html`."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the pages describe this checkout, installed or not
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import attn_core  # pylint: disable=wrong-import-position

project = "attn_core"
author = "The attn_core Authors"
copyright = f"2026, {author}"  # pylint: disable=redefined-builtin
version = release = attn_core.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
              "source_signatures"]
exclude_patterns = ["_build"]
# Formulas are text: MathJax would have to be downloaded by every reader.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks keep their outputs; a test executes them
nb_mime_priority_overrides = [("html", "text/html", None)]  # text and pictures are enough

# Names between single backquotes in docstrings are links where the reference has such a name.
default_role = "name_or_code"
smartquotes = False  # quoted words are often arguments, to be copied
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # source_signatures writes them
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Prompts and printed output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"attn_core {version}"
html_static_path = ["_static"]
html_css_files = ["attn_core.css"]
html_show_sourcelink = False
html_theme_options = {
    # Contrast of at least 4.5 with the background in both modes.
    "light_css_variables": {"color-brand-primary": "#1a5fb4", "color-brand-content": "#1a5fb4"},
    "dark_css_variables": {"color-brand-primary": "#78aeed", "color-brand-content": "#78aeed"},
}
