"""Sphinx: the guides are Markdown, the reference comes from the docstrings of the source beside this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ddpkit

project = "ddpkit"
author = "The ddpkit authors"
copyright = "2026, The ddpkit authors"
version = release = ddpkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ddpkit {version}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["landing.css"]

nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!ddpkit\.\w+$).*")]  # only our public names have an entry here
default_role = "code"  # single backticks in docstrings
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

doctest_global_setup = """
import numpy as np
import torch
from torch import nn

import ddpkit
from ddpkit import *
"""
