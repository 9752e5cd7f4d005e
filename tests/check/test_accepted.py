"""What is accepted, by comments and by files, and what fails a check then."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path

import pytest
from processes import run
from test_check import HERE, LATE, begin, check

from ddpkit.tools import cli
from ddpkit.tools.check import Accepted
from ddpkit.tools.check.facts import KINDS, Finding
from ddpkit.tools.check.source import Place, accepted_in

GUIDE = HERE.parents[1] / "docs" / "guide" / "check.md"
COMMENTED = '''\
a = 1  # ddpkit: accept same-file
b = [  # noqa: E501  # ddpkit: accept epoch-not-set, loads-itself: it is meant
    """
    # ddpkit: accept same-samples
    """,
]
for c in b:  #ddpkit:accept requires-grad
    d = "# ddpkit: accept same-file"
    if c:
        # ddpkit: accept own-values-saved
        e = 2

    f = 3  # a word on ddpkit: accept same-file
    # ddpkit: accept mean-of-means
g = 4; h = 5
i = 6
'''


def test_a_comment_accepts_what_is_found_in_its_statement_or_the_next(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMMENTED)
    lines: dict[str, list[int]] = {}
    for line, kinds in accepted_in(str(script)).items():
        for kind in kinds:
            lines.setdefault(kind, []).append(line)
    assert lines == {
        "same-file": [1],
        "epoch-not-set": [2, 3, 5, 6],
        "loads-itself": [2, 3, 5, 6],
        "requires-grad": [7],
        "own-values-saved": [10, 11],
        "mean-of-means": [14, 15],
    }


def finding(path: Path, line: int, kind: str = "same-file") -> Finding:
    return Finding(kind, "wrong", Place(str(path), line, "<module>"), [0], "", "", "", [])


def test_a_file_accepts_as_many_findings_as_it_lists_wherever_their_lines_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accepted"
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_text("save(1)\nsave(2)\n")
    nowhere = Finding("epoch-not-set", "wrong", None, [0], "", "", "", [])
    Accepted(str(path)).update([finding(script, 2), nowhere])
    assert f"{path} is new: the next check accepts 2 findings by it" in capsys.readouterr().err
    assert path.read_text().splitlines()[1:] == ["same-file src/train.py: save(2)", "epoch-not-set"]
    moved = tmp_path / "src" / "moved.py"
    script.rename(moved)
    script.write_text("# A file of that name with more above.\nif True:\n    save(2)\nsave(2)\n")
    linecache.clearcache()
    accepted = Accepted(str(path))
    places = [finding(script, 3), finding(script, 4), finding(moved, 2), finding(script, 3, "loads-itself")]
    assert [accepted.take(each) for each in places] == [True, False, False, False]
    accepted.update(places[1:])
    assert capsys.readouterr().err.endswith("lists what is no longer found, delete it there: epoch-not-set\n")
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--accept", "bad"], "bad: the line '<<<<<<< ours' does not begin with a kind of finding"),
        (["--accept", "binary"], "binary cannot be read: 'utf-8' codec"),
        (["--accept", "."], "argument --accept: . cannot be read: "),
        (["--accept", "no/file"], "no/file does not exist, and cannot be made"),
        (["--fail-on", "samefile"], "invalid choice: 'samefile' (choose from "),
        (["--steps", "0"], "'0' is not a positive number"),
    ],
)
def test_bad_flags_are_refused_before_the_script_runs(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("# A comment.\n\nsame-file a.py: b\n<<<<<<< ours\n")
    Path("binary").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as end:
        cli.main(["check", *flags, "train.py"])
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_the_guide_has_the_kinds_that_flags_and_comments_take() -> None:
    rows = re.findall(r"^\| ([a-z-]+(?:, [a-z-]+)*) \| ", GUIDE.read_text().partition("| finding |")[2], re.MULTILINE)
    assert sorted(", ".join(rows).split(", ")) == KINDS


def output_of(folder: Path, *words: str) -> tuple[int | None, str]:
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], list(words), str(folder), timeout=LATE)
    return ended.code, ended.output


def test_what_is_new_fails_with_an_annotation_and_what_is_accepted_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "divided_twice.py"
    text = (HERE / "wrong" / script.name).read_text()
    script.write_text(text)
    flags = ["--accept", str(tmp_path / "accepted"), "--fail-on", "suspicious", "--github"]
    code, output = output_of(tmp_path, *flags, str(script))
    assert code == 1 and "1 suspicious\n" in output and "the next check accepts 1 finding" in output
    place = re.findall(r"^::warning title=wrong-divisor,file=(.*),line=(\d+)::.*%0Afix: ", output, re.MULTILINE)
    assert place == [(str(script), "28")]
    script.write_text("\n" + text)
    code, report = check(script, tmp_path, *flags)
    assert (code, report["findings"]) == (0, [])
    assert [(each["kind"], each["where"]["line"]) for each in report["accepted"]] == [("wrong-divisor", 29)]
    script.write_text(text.replace("  # <- wrong-divisor", "  # ddpkit: accept wrong-divisor"))
    code, output = output_of(tmp_path, *flags, str(script))
    assert code == 0 and "\n1 accepted\n" in output and "::" not in output
    assert "lists what is no longer found" in output


def test_a_script_that_fails_writes_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1 / 0\n")
    code, _ = output_of(tmp_path, "--accept", str(tmp_path / "accepted"), str(tmp_path / "train.py"))
    assert code == 2 and not os.path.exists(tmp_path / "accepted")
