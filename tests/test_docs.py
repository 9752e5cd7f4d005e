"""Each page's ```python blocks run, in order, as one test file: a page may show tests, and `spawn` finds its code."""

from __future__ import annotations

import contextlib
import io
import os
import pydoc
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import ROOT, run
from stand_in import use_stand_in

QUIET = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "-p", "no:zarr"]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES = [ROOT / "README.md", *DOCS, *sorted((ROOT / ".github").glob("*.md"))]


FENCE = re.compile(r"( *)(`{3,}|~{3,}) *(.*)")


def python_of(text: str) -> str:
    """The page with all but its ```python blocks blanked out, so that line numbers stay those of the page.

    A block may stand in a list, indented, or in a directive, whose own fence is longer.
    """
    out = []
    fences: list[re.Match[str]] = []  # those that are open
    for line in text.splitlines():
        found = FENCE.fullmatch(line)
        indent, marks, language = fences[-1].groups() if fences else ("", "", "{page}")
        closes = bool(fences) and found is not None and not found[3] and found[2].startswith(marks)
        out.append("" if closes or language != "python" else line.removeprefix(indent))
        if closes:
            fences.pop()
        elif found and language.startswith("{"):
            fences.append(found)
    return "\n".join(out).rstrip() + "\n"


SOURCES = {page.relative_to(ROOT).as_posix(): python_of(page.read_text()) for page in PAGES}


def marked(page: str) -> Any:
    """A page as a parameter; what a Chinese page shows, an English one does, too."""
    return pytest.param(page, marks=[pytest.mark.storm] if "/zh/" in page else [])


@pytest.mark.parametrize("page", [marked(page) for page, source in SOURCES.items() if source.strip()])
def test_the_examples_of_a_page_run_on_one_process(page: str, tmp_path: Path) -> None:
    name = "test_" + re.sub(r"\W", "_", page)
    (tmp_path / f"{name}.py").write_text(SOURCES[page])
    (done,) = run(run_page, [{}], str(tmp_path), f"{name}.py", timeout=900)
    no_tests = pytest.ExitCode.NO_TESTS_COLLECTED  # the page was imported, which ran it, and defines none
    assert done.code in (0, no_tests), done.output


def run_page(folder: str, name: str) -> None:
    use_stand_in()
    os.chdir(folder)
    plugins = ["-p", "ddpkit.testing.hooks", *QUIET]
    warnings = ["-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # they were imported before the fork
    sys.exit(pytest.main(["-q", *warnings, *plugins, name]))


def test_only_fences_marked_python_count_and_keep_their_line_numbers() -> None:
    text = "a\n```bash\nls\n```\n```python\nx = 1\n```\n```{eval-rst}\ny\n```\n```python\nx += 1\n```\n"
    assert python_of(text).splitlines() == [""] * 5 + ["x = 1"] + [""] * 5 + ["x += 1"]


def test_fences_in_lists_and_directives_count_as_well() -> None:
    listed = "- a:\n\n  ```python\n  if x:\n\n      y = 1\n  ```\n"
    assert python_of(listed).splitlines() == ["", "", "", "if x:", "", "    y = 1"]
    inner = "````{dropdown} More\n```python\nx = 1\n```\n````\n~~~python\ny = 2\n~~~\n"
    assert python_of(inner).splitlines() == ["", "", "x = 1", "", "", "", "y = 2"]
    quoted = "````markdown\n```python\nx = 1\n```\n````\n```{code-block} python\ny = 2\n```\n"
    assert python_of(quoted).strip() == ""


def test_the_readme_is_short_and_has_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 560
    trainer, tests = re.findall(r"^pip install .*", text, re.MULTILINE)
    assert "torchrun --nproc_per_node=2 examples/" in trainer
    assert tests.endswith("pytest")


def test_the_docs_can_be_read_in_an_afternoon() -> None:
    words = {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in DOCS}
    assert len(words) <= 31
    assert sum(words.values()) <= 32_000
    assert words["docs/design.md"] <= 5_000


@pytest.mark.parametrize("page", SOURCES)
def test_code_fits_a_page_of_1280_pixels(page: str) -> None:
    assert [line for line in SOURCES[page].splitlines() if len(line) > 88] == []


def run_in_float64(program: str) -> tuple[list[float], str]:
    """Run a program; return its model's weights and what it prints."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, names)
    finally:
        torch.set_default_dtype(torch.float32)
    return [parameter.item() for parameter in names["model"].parameters()], printed.getvalue()


@pytest.mark.parametrize("samples", [240, 241])
def test_the_program_of_the_readme_trains_the_same_weights_on_any_number_of_ranks(samples: int) -> None:
    program = (ROOT / "docs/coming_from/small.py").read_text()
    program = program.replace("240", str(samples))
    [(expected, output)] = on_ranks(run_in_float64, 1, program)
    assert re.fullmatch(r"(epoch \d: [\d.]+\n){3}", output)
    for ranks in (2, 3, 7):
        found = on_ranks(run_in_float64, ranks, program)
        assert [printed for _, printed in found] == [output] + [""] * (ranks - 1)
        for weights, _ in found:
            assert weights == pytest.approx(expected, rel=1e-12)


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[`(examples/\w+\.py)`\]\(\1\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!\w+:)([^)#]+)", (ROOT / page).read_text())
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


@pytest.mark.parametrize("inventory", sorted((ROOT / "docs/inventories").iterdir()), ids=lambda path: path.stem)
def test_names_that_the_reference_links_to_exist(inventory: Path) -> None:
    names = [line.split()[0] for line in inventory.read_text().splitlines() if not line.startswith("#")]
    assert [name for name in names if name != "None" and pydoc.locate(name) is None] == []


@pytest.mark.storm
def test_the_reference_shows_what_users_pass_and_get(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    alone = "-D root_doc=reference -D exclude_patterns=_build,guide,index.md,design.md,CONTRIBUTING.md,changelog.md"
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", *alone.split()]
    subprocess.run([*build, ROOT / "docs", tmp_path], check=True, capture_output=True)
    page = (tmp_path / "reference.html").read_text()
    text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))
    assert "all_reduce_mean(value: Tensor, …) → Tensor" in text
    assert "unwrap_model(model: M | DistributedDataParallel | DataParallel[M]) → M" in text
    assert "run_on_main( fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs, ) → T" in text
    assert "timeout: timedelta = timedelta(minutes=10)," in text
    assert "group: ProcessGroup | DeviceMesh | None = None, ) → None" in text
    assert "→ AbstractContextManager[Context]" in text
    assert "class ddpkit.Loader[source]" in text
    assert "exception ddpkit.LaunchError[source]" in text
    assert page.count('<span class="badge">Collective</span>') > 20
    assert 'href="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module"' in page
    assert 'href="_modules/ddpkit/collectives/ops.html#all_reduce_mean"' in page
