"""What the pages name exists: functions, flags, error messages; and the Chinese guide keeps up with the others."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, free_port, platform_env, run
from test_sentences import texts_of_the_library

import ddpkit
from ddpkit.tools.cli import _parser

GUIDE = ROOT / "docs/guide"
CHINESE = [GUIDE / "zh.md", *sorted((GUIDE / "zh").glob("*.md"))]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
TOOL = re.compile(r"(?:python|torchrun .*) -m ddpkit (\w+.*)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_calls_is_public(page: Path) -> None:
    names = set(re.findall(r"(?<![\w./])ddpkit\.([A-Za-z]\w*)\b(?!\.\w)", page.read_text()))
    modules = {path.stem for path in (ROOT / "ddpkit").iterdir()}
    assert sorted(names - modules - set(ddpkit.__all__)) == []


def commands() -> Iterator[str]:
    for page in PAGES:
        lines = "".join(blocks(page, "bash")).splitlines() + re.findall(r"`([^`\n]+)`", page.read_text())
        for line in lines:
            found = TOOL.search(line)
            if found and " " in found[1] and "..." not in found[1]:
                yield found[1]


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_tool_takes_the_flags_that_a_page_shows(command: str) -> None:
    words = shlex.split(command.split(">")[0].split("&&")[0], comments=True)
    assert _parser(words).parse_args(words).tool == words[0]


def test_the_chinese_quick_start_has_the_script_of_the_english_one() -> None:
    (english,), (chinese,) = blocks(GUIDE / "quick-start.md", "python"), blocks(GUIDE / "zh.md", "python")
    assert ast.dump(ast.parse(chinese)) == ast.dump(ast.parse(english))


def test_the_chinese_guide_leads_to_every_page() -> None:
    linked = {name for page in CHINESE for name in re.findall(r"\]\((?:\.\./)?([\w-]+)\.md", page.read_text())}
    assert {page.stem for page in GUIDE.glob("*.md")} - linked - {"zh", "quick-start"} == set()


def run_page(source: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(source, "page.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", ["training", "long-runs"])
def test_a_chinese_page_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    source = "\n".join(blocks(GUIDE / "zh" / f"{page}.md", "python"))
    port = free_port()
    for end in run(run_page, [platform_env(rank, 2, port) for rank in range(2)], source, str(tmp_path)):
        assert end.code == 0, end.output


def test_the_errors_that_the_chinese_guide_explains_are_the_library_s() -> None:
    text = (GUIDE / "zh/errors.md").read_text()
    section = re.search(r"^## ddpkit 的报错\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    quoted = re.findall(r"^- `([^`]+)`", section[1], re.MULTILINE)
    assert len(quoted) > 20
    library = "\n".join(text.replace("{}", "…").replace("\n", " ") for text in texts_of_the_library())
    missing = []
    for message in quoted:
        pieces = [re.escape(piece) for piece in message.split("…")]
        if not re.search(".*".join(pieces), library):
            missing.append(message)
    assert missing == []
