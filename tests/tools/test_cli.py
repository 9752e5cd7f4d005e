"""The command line: help, versions, and what is wrong with flags."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ddpkit
from ddpkit import errors
from ddpkit.rendezvous.members import Member, Members
from ddpkit.tools import cli, where
from ddpkit.tools.doctor import Report, checks, print_report
from ddpkit.tools.where import Answer
from ddpkit.watch.messages import STACK_SIGNAL, STACKS

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
        (["doctor", "--jsn"], "unrecognized arguments: --jsn; did you mean --json? (--help"),
        (["doctor", "--timeuot=3"], "unrecognized arguments: --timeuot=3; did you mean --timeout? (--help"),
        (["doctor", "--bakcend", "gloo"], "unrecognized arguments: --bakcend gloo; did you mean --backend? (--help"),
        (["doctor", "--xyz"], "unrecognized arguments: --xyz (--help"),
        (["surgeon"], "invalid choice: 'surgeon'"),
        (["docter"], "; did you mean doctor? (--help"),
        (["doctor", "--time", "3"], "unrecognized arguments: --time 3; did you mean --timeout?"),
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


# Texts of other processes: what is in them does nothing to the terminal.

CLEAR = "\x1b[2J"


def is_escaped(text: str) -> bool:
    return r"\x1b[2J" in text and "\x1b" not in text


def test_a_text_for_people_keeps_the_tools_own_colours_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.show(f"\x1b[31mred\x1b[0m {CLEAR}\x1b[8m größer\n", on_stderr=True)
    assert capsys.readouterr() == ("", "\x1b[31mred\x1b[0m \\x1b[2J\\x1b[8m größer\n\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    cli.show("größer")
    sys.stdout.seek(0)
    assert sys.stdout.read() == "gr\\xf6\\xdfer\n"


def test_an_annotation_is_one_line_that_github_reads_as_it_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    cli.annotate("error", "97%: a,\r\nb::c %0A", title="50%", file="a:b,c.py", line=3)
    line = "::error title=50%25,file=a%3Ab%2Cc.py,line=3::97%25: a,%0D%0Ab::c %250A\n"
    assert capsys.readouterr() == ("", line)


def test_the_tools_print_through_one_function_or_json() -> None:
    found = []
    for file in Path(cli.__file__).parent.rglob("*.py"):
        found += re.findall(r"^ +((?:print|sys\.std\w+\.write)\(.*)", file.read_text(), re.MULTILINE)
    others = [line for line in found if not re.match(r"print\((json\.dumps|_?as_json)\(", line)]
    assert sorted(others) == [
        'print("".join(parts).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)',
        "print(end.code, file=sys.stderr)",  # as Python does for the script
    ]


STRANGER = f"""
import os, signal, socket, sys, time
file = os.memfd_create({STACKS!r})
line = b'  File "{CLEAR}.py", line 1 in {CLEAR}\\n'
signal.signal({int(STACK_SIGNAL)}, lambda *_: os.write(file, line))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_what_a_strangers_process_says_of_itself_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [f"{CLEAR}.py", "-c", STRANGER]
    stranger = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True)
    assert stranger.stdout is not None
    try:
        port = int(stranger.stdout.readline())
        claim = Member(0, 1, None, False, pid=stranger.pid)
        answer = Answer(Members.of([claim]), [claim], [])
        monkeypatch.setattr(where, "ask", lambda *_: answer)
        assert cli.main(["where", "--job", "127.0.0.1:1"]) == 1
        shown = capsys.readouterr().out
        assert is_escaped(shown) and shown.endswith(r"\x1b[2J.py:1 \x1b[2J" + "\n")

        print_report(Report(None, 1.0, checks.ports(port, True)), as_json=False)
        assert is_escaped(capsys.readouterr().out)

        for pid in "12":
            (tmp_path / pid).mkdir()
            env = f"RANK=0\0WORLD_SIZE=2\0MASTER_ADDR={CLEAR}{pid}\0MASTER_PORT=29500\0"
            (tmp_path / pid / "environ").write_text(env)
            (tmp_path / pid / "cmdline").write_bytes(f"{CLEAR}.py\0".encode() + b"\xff")
            (tmp_path / pid / "exe").symlink_to(sys.executable)
        found = where.jobs_here(tmp_path)
        monkeypatch.setattr(where, "jobs_here", lambda: found)
        assert cli.main(["where"]) == 1
        assert is_escaped(capsys.readouterr().err)
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.communicate()
