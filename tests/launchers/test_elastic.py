"""Restarts by torchrun: the ranks find each other again and go on from the last checkpoint."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import elastic
import pytest
from conftest import on_ranks
from jobs import DIGITS
from nodes import needs
from processes import Ended
from restarts import kill_ranks_when, lose_when, on_one_node, on_two_nodes

pytestmark = pytest.mark.storm  # ranks start again and again
ELASTIC = str(Path(elastic.__file__))
LAST_SAVED = elastic.FAIL_AT // elastic.SAVE_EVERY * elastic.SAVE_EVERY


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the last line says of a run on one rank that nothing happens to."""
    (line,) = on_ranks(train_alone, 1, tmp_path_factory.mktemp("alone"))
    assert line.startswith(f"ended after step 20, saw each sample {{{elastic.EPOCHS}}} times, weight "), line
    return line


def train_alone(folder: Path) -> str:
    (folder / "failed").touch()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        elastic.main(folder, "none")
    return output.getvalue().splitlines()[-1]


def assert_recovered(ended: list[Ended], first: int, then: int, undisturbed: str) -> None:
    """So many ranks began, so many went on from the last checkpoint, and the result is that of the undisturbed run."""
    output = "".join(end.output for end in ended)
    said = re.findall(r"^(?:\d+ ranks start|ended) after .*$", output, re.MULTILINE)
    assert said == [f"{first} ranks start after step 0", f"{then} ranks start after step {LAST_SAVED}", undisturbed]


def test_a_restart_on_one_node_goes_on(tmp_path: Path, undisturbed: str) -> None:
    ended = on_one_node(ELASTIC, str(tmp_path), "raise", static=True)
    assert [end.code for end in ended] == [0], ended
    assert_recovered(ended, 2, 2, undisturbed)


@needs(nodes=True)
@pytest.mark.parametrize(("static", "fault", "faulty"), [(False, "kill", "-1"), (True, "raise", "0")])
def test_a_restart_on_two_nodes_goes_on(
    static: bool, fault: str, faulty: str, tmp_path: Path, undisturbed: str
) -> None:
    ended = on_two_nodes(ELASTIC, str(tmp_path), fault, faulty, static=static)
    assert [end.code for end in ended] == [0, 0], ended
    assert_recovered(ended, 4, 4, undisturbed)


@needs(nodes=True)
def test_a_job_that_loses_a_node_goes_on_with_the_other(tmp_path: Path, undisturbed: str) -> None:
    ended = on_two_nodes(ELASTIC, str(tmp_path), "wait", nodes="1:2", strike=lose_when(tmp_path / "failed"))
    assert ended[0].code == 0, ended
    assert_recovered(ended, 4, 2, undisturbed)


@needs(nodes=True)
def test_the_digits_go_on_when_a_rank_on_another_node_is_killed(tmp_path: Path) -> None:
    train = [DIGITS, f"--folder={tmp_path}", "--save-every=5", "--resume"]
    ended = on_two_nodes(*train, ranks=1, strike=kill_ranks_when(tmp_path / "latest"))
    assert [end.code for end in ended] == [0, 0], ended
    before, after = re.split(r"^resumed after step .* of 300$", ended[0].output, flags=re.MULTILINE)
    assert "world size: 2 on 2 nodes" in before and "nothing to resume: starting from step 0" in before
    steps = int(re.findall(r"^resumed after step (\d+)", ended[0].output, re.MULTILINE)[0])
    epochs = re.findall(r"^epoch (\d+): training loss \S+, test: (\d+) of 360 right$", after, re.MULTILINE)
    assert [int(epoch) for epoch, _ in epochs] == list(range(steps // 15, 20))
    assert int(epochs[-1][1]) >= 0.985 * 360
