"""The command line: help, versions, and what is wrong with flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpkit
from ddpkit import errors
from ddpkit.tools import cli

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["doctor", "--timeout", "0"], "'0' is not a positive number of seconds"),
        (["doctor", "--timeout", "soon"], "'soon' is not a positive number of seconds"),
        (["doctor", "--timeout", "nan"], "'nan' is not a positive number of seconds"),
        (["doctor", "--device", "gpu"], "device='gpu' is not a device: "),
        (["doctor", "--backend", "cpu:gloo,cuda:nocl"], "backend='cpu:gloo,cuda:nocl' is unknown to torch"),
        (["doctor", "--backend", "fake"], "backend='fake' is unknown to torch"),
        (["doctor", "--jsn"], "unrecognized arguments: --jsn (--help"),
        (["doctor", "--timeuot=3"], "unrecognized arguments: --timeuot=3 (--help"),
        (["doctor", "--bakcend", "gloo"], "unrecognized arguments: --bakcend gloo (--help"),
        (["doctor", "--xyz"], "unrecognized arguments: --xyz (--help"),
        (["surgeon"], "invalid choice: 'surgeon'"),
    ],
)
def test_bad_flags_are_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(flags)
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("tool", cli._TOOLS)
def test_each_tool_says_how_to_start_it_and_which_page_explains_it(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([tool, "--help"])
    example, page = re.findall(r"^(?:Example|Docs): (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert end.value.code == 0 and f"-m ddpkit {tool}" in example
    assert f"ddpkit {tool}" in (GUIDE / page.removeprefix(errors.GUIDE).replace(".html", ".md")).read_text()


def test_without_a_word_there_is_a_line_for_each_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert re.findall(r"^    (\w+) ", shown.err, re.MULTILINE) == list(cli._TOOLS)
    assert shown.out == "" and "error" not in shown.err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"ddpkit {ddpkit.__version__}\n"
