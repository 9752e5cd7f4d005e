"""Sphinx: the guides are Markdown, the reference comes from the docstrings of the source beside this folder."""

import inspect
import re
import sys
from pathlib import Path

import torch.distributed as dist
from docutils.parsers.rst import roles
from sphinx import addnodes
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import ddpkit
from ddpkit.collectives import groups, ops, sync
from ddpkit.exact import gather

project = "ddpkit"
author = "The ddpkit authors"
copyright = "2026, The ddpkit authors"
version = release = ddpkit.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ddpkit {version}"
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/ddpkit/ddpkit",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_static_path = ["_static"]
html_css_files = ["reference.css", "landing.css"]

# the names of others that the reference links to, as text: a build needs no network
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
}
DOCUMENTED_AS = {
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.distributed.distributed_c10d.Store": "torch.distributed.Store",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.parallel.data_parallel.DataParallel": "torch.nn.DataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.DistributedSampler": "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.utils.data.sampler.Sampler": "torch.utils.data.Sampler",
}
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),  # of text in backticks only names have an entry
    ("py:class", r"(.*\.)?(T|K|M|P(\.\w+)?|Integer|Loss)"),  # type variables
]
default_role = "py:obj"  # single backticks in docstrings: a link if there is an entry, else code
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_type_aliases = {"npt.ArrayLike": "numpy.typing.ArrayLike"}
maximum_signature_line_length = 80
python_display_short_literal_types = True
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

for module in (groups, ops, sync, gather):
    module.Group = dist.ProcessGroup | DeviceMesh  # text in the source, which does not import meshes


def setup(app):
    app.add_role("badge", roles.CustomRole("badge", roles.generic_custom_role, {"class": ["badge"]}))
    app.connect("autodoc-process-docstring", show_collective)
    app.connect("autodoc-process-signature", show_signature)
    app.connect("doctree-read", shorten_overloads)
    app.connect("missing-reference", use_documented_name, priority=400)  # before intersphinx looks
    app.connect("html-page-context", let_names_break)


def let_names_break(app, page, template, context, doctree):
    """Let code break behind the words of a name, where a narrow table has no room for it."""
    code = re.compile(r'(?<=<span class="pre">)[^<]+')
    context["body"] = code.sub(lambda found: re.sub(r"(?<=[_.(=])(?=\w)", "<wbr>", found[0]), context.get("body", ""))


def show_collective(app, what, name, obj, options, lines):
    """Make a badge of the word with which the first line of a docstring ends."""
    if lines:
        lines[0] = re.sub(r"Collective\.$", ":badge:`Collective`", lines[0])


def show_signature(app, what, name, obj, options, signature, returns):
    """Show what users pass and get: no constructor that is not theirs, and context managers as such."""
    if obj in (ddpkit.Loader, ddpkit.MicroBatches, ddpkit.Attempt) or (signature or "").startswith(
        "(*args: ~typing.Any, **kwargs"
    ):
        return "", None
    function = inspect.unwrap(obj)
    if what == "function" and function is not obj and inspect.isgeneratorfunction(function):  # a context manager
        returns = returns.replace("collections.abc.Iterator", "contextlib.AbstractContextManager")
    return _as_in_source(signature), _as_in_source(returns)


def _as_in_source(text):
    """Write `Callable` and the parameters of a `ParamSpec` as the source does, which autodoc does not."""
    if text is None:
        return None
    text = text.replace("[[...]", "[...").replace("[[~P]", "[~P")
    return text.replace("*args: ~typing.~P", "*args: P.args").replace("**kwargs: ~typing.~P", "**kwargs: P.kwargs")


def shorten_overloads(app, doctree):
    """Leave out of further signatures of a function the parameters that are as in the first one."""
    for entry in doctree.findall(addnodes.desc):
        first, *others = (child for child in entry if isinstance(child, addnodes.desc_signature))
        known = {parameter.astext() for parameter in first.findall(addnodes.desc_parameter)}
        for other in others:
            (parameters,) = other.findall(addnodes.desc_parameterlist)
            parameters["multi_line_parameter_list"] = False
            kept = [parameter for parameter in parameters if parameter.astext() not in known]
            if len(kept) < len(parameters):
                kept.append(addnodes.desc_parameter("", "…"))
            parameters.clear()
            parameters += kept


def use_documented_name(app, env, node, contnode):
    """Look for names where they are documented, which need not be where they are defined."""
    target = node["reftarget"].removesuffix("()")
    node["reftarget"] = DOCUMENTED_AS.get(target, target)
