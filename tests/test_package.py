"""What holds for the package as a whole: its layers, its import, its public names, and what a wheel contains."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import ddpkit

ROOT = Path(__file__).parents[1]
TESTING = {path.name: ast.parse(path.read_text()) for path in sorted((ROOT / "ddpkit" / "testing").glob("*.py"))}
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted((ROOT / "ddpkit").glob("*.py"))}
IMPORT = """
import json, logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch

def world():
    return {
        "environment": str(dict(os.environ)),
        "random": str(random.getstate()),
        "numpy": str(numpy.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "threads": str((threading.enumerate(), torch.get_num_threads())),
        "hooks": str((sys.excepthook, threading.excepthook, sys.stdout, sys.stderr)),
        "signals": str({s: signal.getsignal(s) for s in signal.valid_signals()}),
        "logging": str((logging.root.handlers, logging.root.level, logging.root.filters)),
        "warnings": str(warnings.filters),
        "start method": str(multiprocessing.get_start_method(allow_none=True)),
        "torch defaults": str((torch.get_default_dtype(), torch.is_grad_enabled(), torch.distributed.is_initialized())),
    }

before = world()
modules = set(sys.modules)
import ddpkit
added = sorted(set(sys.modules) - modules)
after = world()
print(json.dumps([added, [name for name in before if before[name] != after[name]]]))
"""


def layers() -> dict[str, int]:
    """The layer of each module, as docs/design.md states it."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    return {module: int(layer) for layer, cell in rows for module in re.findall(r"`(\w+)\.py`", cell)}


def imports(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Modules of ddpkit, and packages from elsewhere, that a module imports anywhere in its text."""
    inside: set[str] = set()
    outside: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            inside |= {node.module} if node.module else {alias.name for alias in node.names}
    return inside, outside


def test_every_module_has_a_layer_in_the_design_page() -> None:
    assert layers().keys() == MODULES.keys() - {"__init__"}


def test_a_module_imports_only_from_layers_below_its_own() -> None:
    layer = layers()
    edges = [(name, other) for name in layer for other in imports(MODULES[name])[0]]
    assert [f"{a} -> {b}" for a, b in edges if layer[a] <= layer.get(b, layer[a])] == []


def test_nothing_imports_the_plugin_which_needs_pytest_besides() -> None:
    assert [name for name, tree in MODULES.items() if "testing" in imports(tree)[0]] == []
    outside = set().union(*(imports(tree)[1] for tree in TESTING.values()))
    assert outside <= sys.stdlib_module_names | {"torch", "numpy", "pytest", "coverage", "ddpkit"}
    assert [name for name, tree in TESTING.items() if "hooks" in imports(tree)[0]] == []  # elsewhere in a wheel
    assert [name for name, tree in TESTING.items() if not ast.get_docstring(tree)] == []


def test_what_pytest_loads_at_its_start_imports_neither_torch_nor_ddpkit() -> None:
    top = ast.Module([node for node in TESTING["hooks.py"].body if not isinstance(node, ast.FunctionDef)], [])
    inside, outside = imports(top)
    assert not inside and not outside & {"torch", "numpy", "ddpkit"}


def test_no_module_needs_more_than_the_three_dependencies() -> None:
    outside = set().union(*(imports(tree)[1] for tree in MODULES.values()))
    assert outside <= sys.stdlib_module_names | {"torch", "numpy", "packaging"}


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, tree in MODULES.items() if not ast.get_docstring(tree)] == []


def test_importing_is_small_and_touches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    added, touched = json.loads(done.stdout)
    assert "ddpkit" in added
    others = [name for name in added if name.partition(".")[0] != "ddpkit"]
    assert len(others) < 5 and len(added) < 55, added
    assert touched == []


def test_the_reference_lists_every_public_name_once_in_the_order_of_the_package() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    assert re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE) == list(ddpkit.__all__)


def test_every_public_name_is_documented_and_begins_with_one_sentence() -> None:
    documents = {name: inspect.getdoc(getattr(ddpkit, name)) or "" for name in ddpkit.__all__}
    assert [name for name, text in documents.items() if not re.match(r"\S.*[.](\n|$)", text)] == []


def test_nothing_but_modules_is_visible_beside_the_public_names() -> None:
    visible = {name for name, value in vars(ddpkit).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible == set(ddpkit.__all__)


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    library = {f"ddpkit/{module}.py" for module in MODULES} | {"ddpkit/py.typed"}
    testing = {f"ddpkit/testing/{name}" for name in TESTING if name != "hooks.py"}
    assert package == library | testing | {"ddpkit_pytest.py"}
    assert {name.split("/")[0] for name in names - package} == {f"ddpkit-{ddpkit.__version__}.dist-info"}


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## [{ddpkit.__version__}] - " in (ROOT / "docs/changelog.md").read_text()
