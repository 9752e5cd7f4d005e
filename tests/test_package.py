"""What holds for the package as a whole: its layers, its import, its public names, and what a wheel contains."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path, PurePath

import pytest
from packages import MODULES, PICTURE, draw, imports, package_of, tree_of

import ddpkit

ROOT = Path(__file__).parents[1]
IMPORT = """
import gc, json, logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed

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

gc.collect(), gc.disable()
before = world()
modules = set(sys.modules)
containers = len(gc.get_objects())
import ddpkit
containers = len(gc.get_objects()) - containers
added = sorted(set(sys.modules) - modules)
after = world()
print(json.dumps([added, containers, [name for name in before if before[name] != after[name]]]))
"""


SCRIPT = """
import json, sys
import torch, ddpkit

ddpkit.setup(device="cpu")
data = torch.utils.data.TensorDataset(torch.ones(4, 2))
model = ddpkit.wrap_model(torch.nn.Linear(2, 1))
first = ddpkit.Checkpointer("first")
first.save(1, model=model)
first.load_latest(model=model)
plan = ddpkit.ScalePlan(2, 0.1, ddpkit.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr)
saver = ddpkit.Checkpointer("runs")
loader = ddpkit.make_loader(data, batch_size=2)
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
ddpkit.all_reduce_mean(1.0)
saver.save(1, model=model, optimizer=optimizer)
ddpkit.teardown()
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "ddpkit")
print(json.dumps(loaded))
"""

TESTING = [module for module in MODULES if package_of(module) == "testing"]
LIBRARY = [module for module in MODULES if module not in TESTING and str(module) not in ("__init__", "__main__")]


def packages() -> list[str]:
    """The packages in the order of docs/design.md; the last one imports none of the others."""
    return [*packages_under("optional"), *packages_under("core")]


def packages_under(head: str) -> list[str]:
    """The packages in one of the tables of docs/design.md."""
    text = (ROOT / "docs/design.md").read_text()
    table = text[text.index(f"| {head} | what is in it |") :].partition("\n\n")[0]
    return re.findall(r"^\| `([\w.]+)/?` \|", table, re.MULTILINE)


def test_every_package_is_in_the_design_page() -> None:
    assert sorted(packages()) == sorted({package_of(module) for module in [*LIBRARY, *TESTING]})


def test_a_package_imports_only_from_packages_below_it() -> None:
    place = {package: number for number, package in enumerate(packages())}
    arrows = [(module, other) for module in [*LIBRARY, *TESTING] for other in imports(module)[0]]
    assert [f"{a} -> {b}" for a, b in arrows if place[package_of(a)] > place[package_of(b)]] == []


def test_the_core_imports_no_optional_package() -> None:
    core, optional = packages_under("core"), packages_under("optional")
    arrows = [(module, other) for module in LIBRARY if package_of(module) in core for other in imports(module)[0]]
    assert [f"{a} -> {b}" for a, b in arrows if package_of(b) in optional] == []


def test_type_checkers_see_the_names_that_are_loaded_at_use() -> None:
    for node in tree_of(PurePath("__init__")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            seen = {alias.name: each.module for each in node.body for alias in each.names}  # type: ignore[attr-defined]
    assert seen == ddpkit._LOADED_AT_USE


def test_an_ordinary_script_on_one_process_loads_little(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not [name for name in loaded if name.startswith(("ddpkit.rendezvous", "ddpkit.watch"))]
    assert len(loaded) <= 50, loaded


def test_the_picture_of_the_packages_is_true() -> None:
    assert PICTURE.read_text() == draw(), "run python docs/packages.py"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: imports(module)[0] for module in MODULES}).prepare()


def test_nothing_imports_the_plugin_which_needs_pytest_besides() -> None:
    assert [module for module in LIBRARY if {package_of(other) for other in imports(module)[0]} & {"testing"}] == []
    outside = set().union(*(imports(module)[1] for module in TESTING))
    assert outside <= sys.stdlib_module_names | {"torch", "numpy", "pytest", "coverage", "ddpkit"}
    hooks = PurePath("testing/hooks")  # elsewhere in a wheel
    assert [module for module in TESTING if hooks in imports(module)[0]] == []


def test_what_pytest_loads_at_its_start_imports_neither_torch_nor_ddpkit() -> None:
    top = [node for node in tree_of(PurePath("testing/hooks")).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not {name for node in top for name in ("torch", "numpy", "ddpkit") if name in ast.unparse(node)}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in top)


def test_no_module_needs_more_than_the_two_dependencies() -> None:
    outside = set().union(*(imports(module)[1] for module in LIBRARY))
    assert outside <= sys.stdlib_module_names | {"torch", "numpy"}


def test_every_module_says_what_it_is_for() -> None:
    assert [module for module in MODULES if not ast.get_docstring(tree_of(module))] == []


def test_importing_is_small_and_touches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    added, containers, touched = json.loads(done.stdout)
    assert "ddpkit" in added
    others = [name for name in added if name.partition(".")[0] != "ddpkit"]
    assert len(others) < 5 and len(added) <= 45, added
    assert touched == []
    assert containers < 11_000, "they set off a full collection of torch's"


def test_the_reference_lists_every_public_name_once_in_the_order_of_the_package() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE)
    listed.remove("ddpkit.testing.on_ranks")  # which needs pytest
    assert listed == list(ddpkit.__all__)


def test_every_public_name_is_documented_and_begins_with_one_sentence() -> None:
    documents = {name: inspect.getdoc(getattr(ddpkit, name)) or "" for name in ddpkit.__all__}
    assert [name for name, text in documents.items() if not re.match(r"\S.*[.](\n|$)", text)] == []


def test_every_public_name_has_an_example() -> None:
    assert [name for name in ddpkit.__all__ if ">>> " not in (getattr(ddpkit, name).__doc__ or "")] == []


def test_what_is_collective_says_so_at_the_end_of_its_first_line() -> None:
    public = [getattr(ddpkit, name) for name in ddpkit.__all__]
    members = [member for each in public if inspect.isclass(each) for member in vars(each).values()]
    documents = [inspect.getdoc(each) or "" for each in [*public, *members]]
    collective = [text.split("\n") for text in documents if "Collective" in text]
    assert len(collective) > 20
    assert [lines[0] for lines in collective if not lines[0].endswith(". Collective.")] == []
    assert [lines[0] for lines in collective if "Collective" in "".join(lines[1:])] == []


def test_only_public_names_are_visible() -> None:
    assert {name for name in dir(ddpkit) if not name.startswith("_")} == set(ddpkit.__all__)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """As a release builds it: from the files in the source archive."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.iterdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    sources = folder / archive.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=sources, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_a_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    modules = {f"ddpkit/{module}.py" for module in MODULES} - {"ddpkit/testing/hooks.py"}
    assert package == modules | {"ddpkit/py.typed", "ddpkit_pytest.py", "ddpkit/tools/check/rules.json"}
    assert {name.split("/")[0] for name in names - package} == {f"ddpkit-{ddpkit.__version__}.dist-info"}


def test_the_links_of_the_readme_lead_to_files_from_a_package_index_too(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(f"ddpkit-{ddpkit.__version__}.dist-info/METADATA").decode()
    (repository,) = re.findall(r"^Project-URL: Repository, (.*)", metadata, re.MULTILINE)
    files = f"{repository}/blob/v{ddpkit.__version__}/"
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    assert len(links) > 10 and [link for link in links if not link.startswith("https://")] == []
    ours = [link.replace("/raw/", "/blob/").removeprefix(files) for link in links if link.startswith(repository)]
    assert ours == re.findall(r"\]\((?!\w+:)([^)]*)\)", (ROOT / "README.md").read_text())
    assert [name for name in ours if not (ROOT / name).is_file()] == []


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## [{ddpkit.__version__}] - " in (ROOT / "docs/changelog.md").read_text()
