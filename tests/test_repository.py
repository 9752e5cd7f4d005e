"""The files around the package: what CI, the site of the docs, people who report, and a release need."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from conftest import collect_ignore
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddpkit

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CI = (GITHUB / "workflows/ci.yml").read_text()
SCHEMAS = {
    "vendor.github-workflows": [GITHUB / "workflows/ci.yml"],
    "vendor.github-issue-forms": sorted((GITHUB / "ISSUE_TEMPLATE").iterdir()),
    "vendor.readthedocs": [ROOT / ".readthedocs.yaml"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_for_a_service_is_as_the_service_wants_it(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_scripts_that_are_here() -> None:
    scripts = re.findall(r"\.ci/\w+", CI)
    assert scripts == [".ci/run", ".ci/core"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_ci_tries_each_python_that_the_package_names() -> None:
    named = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert yaml.safe_load(CI)["jobs"]["core"]["strategy"]["matrix"]["python"] == named
    assert f'requires-python = ">={named[0]}"' in PYPROJECT
    assert f"Python {named[0]} to {named[-1]}, and torch from 2.6" in (ROOT / "docs/changelog.md").read_text()
    assert '"torch>=2.6"' in PYPROJECT


def test_everything_names_one_torch_and_one_address() -> None:
    files = [*GITHUB.rglob("*.*"), *(ROOT / ".ci").iterdir(), *(ROOT / "docs").glob("*.md")]
    files += [ROOT / name for name in (".readthedocs.yaml", "pyproject.toml", "ddpkit/__init__.py")]
    text = "\n".join(path.read_text() for path in files)
    assert len(set(re.findall(r"torch(?:==|_torch='==)(\d[\d.]+\d)\b", text))) == 1
    urls = set(re.findall(r"https://github\.com/\w+/ddpkit\b|https://\w+\.readthedocs\.io", text))
    assert urls == set(re.findall(r'^(?:Documentation|Repository) = "(.*)"', PYPROJECT, re.MULTILINE))


# The second command of the README


def installed_by(text: str, found: dict[str, set[str]]) -> None:
    """Add each package that pip installs for a requirement, with its extras."""
    requirement = Requirement(text)
    name = canonicalize_name(requirement.name)
    extras = {"", *requirement.extras} - found.setdefault(name, set())
    found[name] |= extras
    with suppress(metadata.PackageNotFoundError):  # a marker may ask for another platform
        for needed in metadata.requires(name) or []:
            marker = Requirement(needed).marker
            if any(marker is None or marker.evaluate({"extra": extra}) for extra in extras):
                installed_by(needed, found)


def imported_by(path: Path) -> Iterator[str]:
    """Yield the names that a file imports as soon as it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def in_folders(name: str, folders: set[Path]) -> set[Path]:
    """Find the files of modules on the way to a name, in any of the folders."""
    parts = name.split(".")
    stems = [folder.joinpath(*parts[:n]) for folder in folders for n in range(1, len(parts) + 1)]
    files = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")]
    return {path for path in files if path.is_file()}


def test_what_pytest_collects_imports_only_what_the_readmes_command_installs(pytestconfig: pytest.Config) -> None:
    (extras,) = re.findall(r"^pip install -e '\.(\[.*\])' && pytest$", (ROOT / "README.md").read_text(), re.MULTILINE)
    installed: dict[str, set[str]] = {}
    installed_by(f"ddpkit{extras}", installed)
    packages = metadata.packages_distributions()
    known = {name for name in packages if installed.keys() & set(map(canonicalize_name, packages[name]))}
    known |= sys.stdlib_module_names
    left_out = {ROOT / name for name in pytestconfig.getoption("ignore")}
    left_out |= {ROOT / "tests" / name for name in collect_ignore}
    every = [path for folder in pytestconfig.getini("testpaths") for path in (ROOT / folder).rglob("*.py")]
    todo = {path for path in every if not left_out & {path, *path.parents}}
    folders = {ROOT, *pytestconfig.getini("pythonpath"), *(path.parent for path in todo)}
    holders: dict[str, set[Path]] = {}  # of each top-level name of ours
    for folder in folders:
        for path in folder.iterdir():
            holders.setdefault(path.stem, set()).add(folder)
    seen, unknown = set(), set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in imported_by(path):
            top = name.partition(".")[0]
            if top in holders:
                todo |= in_folders(name, holders[top]) - seen
            elif top not in known:
                unknown.add(f"{path.relative_to(ROOT)}: {name}")
    assert not unknown


# A release


def git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def release(folder: Path) -> tuple[int, str]:
    """Run the script as far as it looks at the repository: its Python ends with 7."""
    python = folder.with_name("bin") / "python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci/release"], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_release_is_a_clean_commit_with_its_tag_and_date(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    for name in (".ci/common", ".ci/release", "ddpkit/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changelog = folder / "docs/changelog.md"
    changelog.parent.mkdir()
    version = ddpkit.__version__
    changelog.write_text(f"## [{version}] - Unreleased\n")
    git(folder, "init")
    assert release(folder) == (1, "The working tree is not that of the commit: see git status.\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "First")
    assert release(folder) == (1, f"The commit has no tag: git tag v{version}\n")
    git(folder, "tag", f"v{version}")
    assert release(folder) == (1, f"docs/changelog.md has no date for {version}.\n")
    changelog.write_text(f"## [{version}] - 2030-01-31\n")
    git(folder, "commit", "-a", "-m", "Second")
    assert release(folder)[0] == 1  # the tag is that of the first
    git(folder, "tag", "--force", f"v{version}")
    code, output = release(folder)
    assert code == 7 and "== python3 -m venv" in output, output
