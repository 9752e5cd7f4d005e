"""The pytest plugin, tried as its users have it: small runs of pytest inside the tests, with ranks of their own."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import begin

import ddpkit.testing.dispatch
from ddpkit.testing import hooks, on_ranks

ROOT = Path(__file__).parents[2]
HEAD = "import logging, os, signal, sys, threading, time, pytest, torch, ddpkit\n"
WITHOUT = ["-p", "no:randomly", "-p", "no:zarr"]  # plugins that may be installed, and are not ours
HANG = 400.0  # seconds: longer than any run may take, however loaded the machine is


def run(pytester: pytest.Pytester, source: str, *options: str) -> tuple[dict[str, str], str]:
    """What became of each test, and what pytest printed."""
    pytester.makepyfile(HEAD + source)
    result = pytester.runpytest_inprocess(*WITHOUT, "-rA", "-v", *options)
    text = result.stdout.str()
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) \S*?::(\S+)", text, re.MULTILINE)
    return {name: outcome for outcome, name in found}, text


def test_the_body_runs_on_so_many_ranks_that_have_joined(pytester: pytest.Pytester) -> None:
    outcomes, text = run(
        pytester,
        """
@pytest.mark.ranks(1, 2, 3)
def test_mean(rank, world_size):
    assert ddpkit.all_gather_object(rank) == list(range(world_size))
    assert torch.distributed.get_world_size() == world_size

@pytest.mark.ranks(2)
class TestTogether:
    @pytest.mark.parametrize("word", ["a", "b"])
    def test_of_a_class_with_parameters(self, rank, word):
        assert ddpkit.all_gather_object(word) == [word, word]

def test_elsewhere():
    assert not torch.distributed.is_initialized()
""",
    )
    names = ["test_mean[1ranks]", "test_mean[2ranks]", "test_mean[3ranks]", "test_elsewhere"]
    names += [f"TestTogether::test_of_a_class_with_parameters[{p}]" for p in ("2ranks-a", "2ranks-b")]
    assert outcomes == dict.fromkeys(names, "PASSED"), text


FAILURES = """
@pytest.mark.ranks(3)
def test_one_fails(rank):
    seen = [1, 2, rank]
    print("said by", rank)
    ddpkit.barrier("all have said it")
    if rank == 1:
        assert seen == [1, 2, 3]
    ddpkit.barrier()

@pytest.mark.ranks(2, timeout=1)
def test_one_hangs(rank):
    if rank == 1:
        wait_for_godot()

def wait_for_godot():
    time.sleep(60)

@pytest.mark.ranks(2)
def test_one_is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ddpkit.barrier()

@pytest.mark.ranks(2)
def test_one_is_killed_when_the_other_is_done(rank):
    if rank == 1:
        ddpkit.barrier("first")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    ddpkit.barrier("first")

@pytest.fixture
def broken(rank):
    if rank == 1:
        raise LookupError("no such thing")

@pytest.mark.ranks(2)
def test_a_fixture_fails(broken):
    ddpkit.barrier()

@pytest.fixture
def slow(rank):
    if rank == 0:
        time.sleep(600)

@pytest.mark.ranks(2)
def test_one_fails_while_anothers_fixture_is_made(slow):
    raise LookupError("not even begun")

@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2)
def test_one_fails_as_expected_while_anothers_fixture_is_made(slow):
    raise LookupError("not even begun")

@pytest.mark.ranks(2)
def test_the_next_one_is_well(rank):
    ddpkit.barrier()

@pytest.mark.ranks(2)
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("not here")

@pytest.mark.ranks(2)
def test_all_skip(rank):
    pytest.skip("nowhere")

@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2)
def test_is_expected_to_fail(rank):
    assert rank == 0

@pytest.mark.ranks(2, join=False)
def test_joins_by_itself(rank):
    assert not torch.distributed.is_initialized()
    with ddpkit.distributed():
        ddpkit.barrier()
"""


def test_failures_say_which_rank_and_why(pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes, text = run(pytester, FAILURES)
    assert {name.split("[")[0]: outcome for name, outcome in outcomes.items()} == {
        "test_one_fails": "FAILED",
        "test_one_hangs": "FAILED",
        "test_one_is_killed": "FAILED",
        "test_one_is_killed_when_the_other_is_done": "FAILED",
        "test_a_fixture_fails": "ERROR",
        "test_one_fails_while_anothers_fixture_is_made": "FAILED",
        "test_one_fails_as_expected_while_anothers_fixture_is_made": "XFAIL",
        "test_the_next_one_is_well": "PASSED",
        "test_one_skips": "FAILED",
        "test_is_expected_to_fail": "XFAIL",
        "test_joins_by_itself": "PASSED",
    }, text
    assert "At index 2 diff: 1 != 3" in text and "That was rank 1 of 3" in text
    assert re.search(r"rank 0: failed: .*PeerError: rank 1 .* AssertionError: assert \[1, 2, 1\] == \[1, 2, 3\]", text)
    assert re.search(r"Captured stdout call \(rank 2\) -+\nsaid by 2", text)
    hung = re.search(r"Rank 1 of 2 did not finish within 1 s\.\nIt was here:\n(.|\n)*?\nrank 0: passed", text)
    assert hung and "wait_for_godot" in hung[0] and "_pytest" not in hung[0]
    assert "rank 1: passed" not in text
    assert text.partition("short test summary info")[0].count("Rank 1 of 2 was killed by SIGKILL.") == 2
    assert "INTERNALERROR" not in "".join(capfd.readouterr())
    assert re.search(
        r"LookupError: no such thing\n(.*\n)*?-+ That was rank 1 of 2 -+\nrank 0: failed: .*PeerError", text
    )
    assert re.search(
        r"LookupError: not even begun\n(.*\n)*?-+ That was rank 1 of 2 -+\nrank 0: failed: .*PeerError", text
    )
    assert "Rank 1 skipped the test, other ranks did not. Skip it on all ranks or on none." in text
    assert re.search(r"^SKIPPED .*: nowhere", text, re.MULTILINE)


XFAILS = """
@pytest.mark.ranks(2)
def test_of_all_ranks_called(rank):
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, reason="known")
def test_marked_others_hear_of_it(rank):
    if rank == 1:
        raise ValueError
    ddpkit.barrier()

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError)
def test_marked_and_another_rank_fails_otherwise(rank):
    if rank == 1:
        raise TypeError
    ddpkit.barrier()

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_marked_and_all_pass(rank):
    pass
"""


def test_an_expected_failure_hides_no_other(pytester: pytest.Pytester) -> None:
    outcomes, text = run(pytester, XFAILS)
    assert {name.removesuffix("[2ranks]"): outcome for name, outcome in outcomes.items()} == {
        "test_of_all_ranks_called": "XFAIL",
        "test_marked_others_hear_of_it": "XFAIL",
        "test_marked_and_another_rank_fails_otherwise": "FAILED",
        "test_marked_and_all_pass": "FAILED",
    }, text


REFUSED = """
import unittest

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_marked(self):
        pass

    def test_plain(self):
        pass

@pytest.mark.ranks(2)
class TestMarked(unittest.TestCase):
    def test_it(self):
        pass

def test_marked_too_late():
    pass

@pytest.mark.ranks(1)
def test_of_a_function(rank):
    pass
"""


def test_a_marker_without_effect_is_an_error_of_that_test_alone(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_marked_too_late":
            item.add_marker(pytest.mark.ranks(2))
"""
    )
    outcomes, text = run(pytester, REFUSED)
    refused = ["TestOfUnittest::test_marked", "TestMarked::test_it", "test_marked_too_late"]
    passed = ["TestOfUnittest::test_plain", "test_of_a_function[1ranks]"]
    assert outcomes == dict.fromkeys(refused, "ERROR") | dict.fromkeys(passed, "PASSED"), text
    shown = text.partition("short test summary info")[0]
    assert shown.count("not of unittest.TestCase, and must be set when tests are collected.\n") == 3, text


HANGS_AT_THE_END = """
@pytest.fixture
def slow_end():
    yield
    time.sleep(60)

@pytest.mark.ranks(2, timeout=2)
def test_fails_and_hangs(rank, slow_end):
    assert rank == 0, "the cause"
"""


def test_a_failure_is_shown_also_where_its_rank_hangs_afterwards(pytester: pytest.Pytester) -> None:
    outcomes, text = run(pytester, HANGS_AT_THE_END)
    assert outcomes == {"test_fails_and_hangs[2ranks]": "FAILED"}, text
    assert "AssertionError: the cause" in text and "Rank 1 of 2 did not finish within 2 s." in text
    assert "in slow_end" in text


REPEATS = """
import pytest
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        report.outcome = "rerun"
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logreport(report=runtestprotocol(item, log=False, nextitem=nextitem)[1])
    return True
"""


WARNS = """
import warnings

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        warnings.warn("of another plugin")
"""


def test_other_plugins_neither_repeat_the_tests_on_ranks_nor_warn_on_each(
    pytester: pytest.Pytester, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytester.makeconftest(REPEATS + WARNS)
    source = f"""
@pytest.mark.ranks(2)
def test_it(rank):
    with open({str(tmp_path / "times")!r} + str(rank), "a") as file:
        file.write("x")
    ddpkit.barrier()
    assert rank == 0
"""
    outcomes, text = run(pytester, source)
    assert outcomes == {"test_it[2ranks]": "FAILED"} and "1 failed" in text, text
    assert [(tmp_path / f"times{rank}").read_text() for rank in range(2)] == ["x", "x"]
    assert "of another plugin" not in "".join(capfd.readouterr())


ALONE = """
@pytest.mark.ranks(2, timeout=2)
def test_one_is_alone_in_a_collective(rank):
    if rank == 0:
        ddpkit.all_reduce_mean(1.0)
"""


def test_a_rank_that_is_done_is_not_the_cause_where_another_waits_for_it(pytester: pytest.Pytester) -> None:
    outcomes, text = run(pytester, ALONE)
    assert outcomes == {"test_one_is_alone_in_a_collective[2ranks]": "FAILED"}, text
    assert "Rank 0 of 2 did not finish within 2 s." in text and "in test_one_is_alone_in_a_collective" in text
    assert "rank 1: passed" in text and "lost" not in text, text


FIXTURES = """
@pytest.fixture(scope="session")
def once(world_size_of_session):
    return os.getpid(), ddpkit.all_gather_object(ddpkit.get_rank())

@pytest.fixture(scope="session")
def world_size_of_session():
    return int(os.environ["WORLD_SIZE"])

pids = []

@pytest.fixture
def noted(once):
    pids.append(once[0])
    yield once[1]
    pids.append("end")

@pytest.mark.ranks(2)
def test_a(noted, tmp_path, monkeypatch, capsys, rank):
    assert noted == [0, 1] and ddpkit.all_gather_object(str(tmp_path)) == [str(tmp_path)] * 2
    (tmp_path / str(rank)).write_text("")
    ddpkit.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setenv("A_WORD", "set")
    print("hello")
    assert capsys.readouterr().out == "hello\\n"

@pytest.mark.ranks(2)
def test_b(noted, tmp_path, rank):
    assert pids == [os.getpid(), "end", os.getpid()] and not list(tmp_path.iterdir())
    assert "A_WORD" not in os.environ

@pytest.mark.ranks(2)
def test_with_subtests(rank, subtests):
    pass
"""


def test_fixtures_run_in_each_rank_and_tmp_path_is_shared(pytester: pytest.Pytester) -> None:
    outcomes, text = run(pytester, FIXTURES)
    assert outcomes == {
        "test_a[2ranks]": "PASSED",
        "test_b[2ranks]": "PASSED",
        "test_with_subtests[2ranks]": "ERROR",
    }, text
    assert "Tests on ranks have no subtests: use @pytest.mark.parametrize." in text


SAME = """
def same_processes(folder, rank):
    path = folder / f"pid{rank}"
    before = path.read_text() if path.exists() else str(os.getpid())
    path.write_text(str(os.getpid()))
    return before == str(os.getpid())
"""

DIRT = """
@pytest.mark.ranks(2)
def test_0(rank):
    assert same_processes(HERE, rank)
    os.environ["LEFT"] = "behind"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 5)
    os.chdir("/")
    sys.argv.append("more")

@pytest.mark.ranks(2)
def test_1_is_reset(rank):
    assert same_processes(HERE, rank)
    assert "LEFT" not in os.environ and "more" not in sys.argv and os.getcwd() != "/"
    assert torch.get_default_dtype() == torch.float32
    assert len({*ddpkit.all_gather_object(torch.rand(()).item())}) == 1

@pytest.mark.ranks(2)
def test_2_leaves(rank):
    assert same_processes(HERE, rank)
    ddpkit.teardown()

@pytest.mark.ranks(2)
def test_3_joins_again_and_leaves_a_thread(rank):
    assert same_processes(HERE, rank)
    ddpkit.barrier()
    if rank == 1:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

@pytest.mark.ranks(2)
def test_4_has_new_processes_and_leaves_a_child(rank):
    assert not same_processes(HERE, rank)
    if rank == 0:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")

@pytest.mark.ranks(2)
def test_5_has_new_processes_and_does_a_step_alone(rank):
    assert not same_processes(HERE, rank)
    if rank == 0:
        work = torch.distributed.all_reduce(torch.ones(1), async_op=True)

@pytest.mark.ranks(2)
def test_6_has_new_processes(rank):
    assert not same_processes(HERE, rank)
    assert ddpkit.all_reduce_mean(1.0) == 1.0

@pytest.mark.ranks(2, fresh=True)
def test_7_asks_for_new_processes_and_leaves_a_level(rank):
    assert not same_processes(HERE, rank)
    logging.getLogger("another").setLevel("ERROR")  # which nobody else has yet
    if rank == 1:
        logging.getLogger("ddpkit").setLevel("ERROR")

@pytest.mark.ranks(2)
def test_8_has_new_processes(rank):
    assert not same_processes(HERE, rank)
"""


def test_ranks_are_used_again_when_a_test_left_them_as_they_were(pytester: pytest.Pytester, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    source = f"import pathlib\nHERE = pathlib.Path({str(tmp_path / 'pids')!r})\n" + SAME + DIRT
    outcomes, text = run(pytester, source)
    assert len(outcomes) == 9 and {*outcomes.values()} == {"PASSED"}, text
    assert processes_of(str(tmp_path)) == []


def test_a_rank_that_hears_of_a_failure_outside_of_the_test_is_not_the_cause(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        """
import os, time
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if os.environ.get("RANK") == "0":
        time.sleep(600)  # the news comes while it is in a hook of pytest's
    return (yield)
"""
    )
    outcomes, text = run(pytester, "@pytest.mark.ranks(2)\ndef test_fails(rank):\n    assert rank == 0\n")
    assert outcomes == {"test_fails[2ranks]": "FAILED"}, text
    assert re.search(r"That was rank 1 of 2 -+\nrank 0: failed: PeerError: rank 1 .* AssertionError", text), text


@pytest.mark.parametrize("kind", ["as an ImportError", "as a module without tests"])
def test_a_rank_that_hears_of_a_failure_while_it_imports_the_test_is_not_the_cause(
    kind: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        slow="""
import os, time
if os.environ.get("RANK") == "1":
    time.sleep(600)  # the news comes while it imports
"""
    )
    imports = {
        "as an ImportError": "try: import slow\nexcept Exception: raise ImportError('no slow') from None",
        "as a module without tests": "try: import slow\nexcept Exception: pytest.skip(allow_module_level=True)",
    }
    source = """
@pytest.mark.ranks(2)
def test_fails(rank):
    raise ValueError("the cause")
"""
    outcomes, text = run(pytester, f"{imports[kind]}\n{source}")
    assert outcomes == {"test_fails[2ranks]": "FAILED"}, text
    assert re.search(r"ValueError: the cause\n(.*\n)*?-+ That was rank 0 of 2 -+\nrank 1: failed: PeerError", text), (
        text
    )


PATCHES = """
class Mine:
    def method(self):
        return "mine"

@pytest.mark.ranks(2)
def test_0_patches_for_as_long_as_it_runs(rank, monkeypatch):
    assert same_processes(HERE, rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "patched")
    monkeypatch.setattr(Mine, "method", lambda self: "patched")
    assert torch.cuda.is_available() == Mine().method() == "patched"

@pytest.mark.ranks(2)
def test_1_lets_torch_replace_its_own_and_set_a_signal_handler(rank):
    assert same_processes(HERE, rank)
    model = torch.nn.Linear(1, 1)
    torch.optim.Adam(model.parameters()).step()
    assert len([*torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")]) == 4

class Mean(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

@pytest.mark.ranks(2)
def test_1_uses_an_optimizer_of_its_own_and_stops(rank):
    assert same_processes(HERE, rank)
    model = torch.nn.Linear(1, 1)
    Mean(model.parameters(), lr=0.1).step()
    with ddpkit.stopping() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.now():
            ddpkit.barrier()

@pytest.mark.ranks(2)
def test_1_is_not_stopped_and_finds_the_handlers_from_before(rank):
    with ddpkit.stopping() as stop:
        assert not stop.now()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert same_processes(HERE, rank)
"""


def test_ranks_in_which_a_test_has_put_back_what_it_changed_are_used_again(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    outcomes, text = run(pytester, f"import pathlib\nHERE = pathlib.Path({str(tmp_path)!r})\n" + SAME + PATCHES)
    assert len(outcomes) == 4 and {*outcomes.values()} == {"PASSED"}, text


GROUPS = """
@pytest.mark.ranks(2)
def test_1_keeps_its_group(rank):
    ddpkit.barrier()

@pytest.mark.ranks(2, join=False)
def test_2_makes_its_own(rank):
    with ddpkit.distributed():
        ddpkit.barrier()

@pytest.mark.ranks(2)
def test_3_needs_another(rank):
    ddpkit.barrier()

@pytest.mark.ranks(2, timeout=300)
def test_4_needs_one_with_more_time(rank):
    ddpkit.barrier()
"""


def test_ranks_change_from_one_group_to_the_next_in_silence(
    pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes, text = run(pytester, GROUPS)
    assert len(outcomes) == 4 and {*outcomes.values()} == {"PASSED"}, text
    assert "TCPStore" not in "".join(capfd.readouterr())


KILLED = """
@pytest.mark.ranks(2)
def test_a(rank):
    (HERE / f"pid{rank}").write_text(str(os.getpid()))

def test_b():
    pids = [int((HERE / f"pid{rank}").read_text()) for rank in range(2)]
    time.sleep(DELAY)
    os.kill(pids[1], signal.SIGKILL)
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):  # the others end as well
        time.sleep(0.05)

@pytest.mark.ranks(2)
def test_c(rank):
    assert (HERE / f"pid{rank}").read_text() != str(os.getpid())
    assert ddpkit.all_reduce_mean(1.0) == 1.0
"""


@pytest.mark.parametrize("delay", [0, 1])  # while it cleans up, and afterwards
def test_ranks_of_which_one_is_killed_between_tests_are_replaced_in_silence(
    delay: int, pytester: pytest.Pytester, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    header = f"import pathlib\nHERE, DELAY = pathlib.Path({str(tmp_path)!r}), {delay}\n"
    outcomes, text = run(pytester, header + KILLED)
    assert len(outcomes) == 3 and {*outcomes.values()} == {"PASSED"}, text
    said = capfd.readouterr()
    assert "Error" not in said.out + said.err and "ERROR" not in said.out + said.err, said


def processes_of(word: str) -> list[str]:
    """The commands of processes whose environment or command line has this word in it, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in text and folder.name != str(os.getpid()):
            found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


def test_x_ends_the_run_and_last_failed_repeats_what_failed(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(4))
def test_it(rank, number):
    assert number != 1 or rank != 1
"""
    outcomes, text = run(pytester, source, "-x")
    assert list(outcomes.values()) == ["PASSED", "FAILED"] and "stopping after 1 failures" in text
    outcomes, text = run(pytester, source, "--lf", "-k", "2ranks-1")
    assert outcomes == {"test_it[2ranks-1]": "FAILED"}, text


def test_mistakes_in_the_marker_are_said_when_tests_are_collected(pytester: pytest.Pytester) -> None:
    _, text = run(pytester, "@pytest.mark.ranks()\ndef test_it(): pass\n")
    assert "ranks() takes numbers of ranks, for example ranks(1, 2, 3)" in text
    with pytest.raises(pytest.UsageError, match=r"ranks\(\) takes \['fresh', 'join', 'timeout'\], got \['limit'\]"):
        hooks._check(pytest.mark.ranks(2, limit=3).mark, "test_it")
    with pytest.raises(pytest.UsageError, match=r"ranks\(\) takes a timeout in seconds above 0, got '3'"):
        hooks._check(pytest.mark.ranks(2, timeout="3").mark, "test_it")
    said = pytester.runpytest_inprocess(*WITHOUT, "-o", "ranks_timeout=soon").stderr.str()
    assert "ranks_timeout must be seconds above 0, got 'soon'" in said
    _, text = run(pytester, "def test_it(rank): pass\n")
    assert "The fixture rank is for tests marked with @pytest.mark.ranks" in text


@dataclass
class Run:
    """A run of pytest in a process of its own, which may be interrupted and killed."""

    process: Any
    output: Path

    def wait_for(self, *signs: Callable[[], bool]) -> None:
        """Wait until all of these are true."""
        while not all(sign() for sign in signs):
            assert self.process.is_alive(), self.text()
            time.sleep(0.05)

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> str:
        self.process.join(HANG)
        assert self.process.exitcode is not None, self.text()
        return self.text()


def run_pytest(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    sys.path[:0] = ["", str(ROOT)]
    sys.exit(int(pytest.main([*arguments, "test_inner.py"])))


@contextmanager
def started(folder: Path, source: str, *options: str) -> Iterator[Run]:
    """Run pytest beside this one, in a process that need not import torch."""
    (folder / "test_inner.py").write_text(HEAD + source)
    arguments = ["-p", "ddpkit.testing.hooks", *WITHOUT, "-p", "no:cacheprovider", *options]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins were imported before the fork
    environment = {"A_WORD": f"of {folder}"}
    process = begin(run_pytest, environment, folder, arguments, output=str(folder / "output"))
    try:
        yield Run(process, folder / "output")
    finally:
        process.kill()
        process.join()


@pytest.mark.storm
def test_no_process_outlives_a_run_that_is_interrupted_or_killed(tmp_path: Path) -> None:
    source = """
@pytest.mark.ranks(2)
def test_it(rank):
    open(f"begun{rank}", "w").close()
    time.sleep(6000)
"""
    folders = [tmp_path / "interrupted", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    with started(folders[0], source) as interrupted, started(folders[1], source) as killed:
        for run in (interrupted, killed):
            folder = run.output.parent
            run.wait_for((folder / "begun0").exists, (folder / "begun1").exists)
        os.kill(interrupted.process.pid, signal.SIGINT)
        os.kill(killed.process.pid, signal.SIGKILL)
        assert "KeyboardInterrupt" in interrupted.end()
        killed.end()
        end = time.monotonic() + HANG
        while processes_of(f"of {tmp_path}") and time.monotonic() < end:
            time.sleep(0.1)
        assert processes_of(f"of {tmp_path}") == []


def test_a_debugger_is_refused_and_coverage_counts(pytester: pytest.Pytester) -> None:
    coverage = pytest.importorskip("pytest_cov.engine").coverage
    if coverage.Coverage.current() is not None:
        pytest.skip("this run measures coverage itself")
    pytester.makepyfile(lib="def on_rank_1():\n    return 1\n\n\ndef nowhere():\n    return 2\n")
    source = """
import lib

@pytest.mark.ranks(2)
def test_stops(rank):
    if rank == 1:
        lib.on_rank_1()
        breakpoint()
    ddpkit.barrier()
"""
    outcomes, text = run(pytester, source, "-p", "no:xdist", "--cov=lib", "--cov-report=term-missing")
    assert outcomes == {"test_stops[2ranks]": "FAILED"} and "Ranks have no debugger" in text, text
    assert re.search(r"^lib\.py +4 +1 +75% +6$", text, re.MULTILINE), text


@pytest.mark.storm
def test_several_workers_of_xdist_have_ranks_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    source = """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(8))
def test_it(rank, number):
    assert ddpkit.all_gather_object(number) == [number] * 2
"""
    with started(tmp_path, source, "-n2") as run:
        text = run.end()
    assert "8 passed" in text, text


def double(number: int) -> tuple[int, int]:
    return 2 * number, ddpkit.get_world_size()


def fail_on_1() -> None:
    if ddpkit.get_rank() == 1:
        raise ZeroDivisionError("oh")
    ddpkit.barrier()


def exit_on_1() -> None:
    if ddpkit.get_rank() == 1:
        sys.exit(0)
    ddpkit.barrier()


def sleep_on_1() -> None:
    if ddpkit.get_rank() == 1:
        time.sleep(60)


def die_on_1() -> None:
    if ddpkit.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def join_and_count_connections() -> int:
    with ddpkit.distributed():
        return sum(opens_socket(file) for file in Path("/proc/self/fd").iterdir())


def opens_socket(descriptor: Path) -> bool:
    try:
        return os.readlink(descriptor).startswith("socket:")
    except FileNotFoundError:  # closed meanwhile
        return False


def test_ranks_that_join_by_themselves_keep_no_store_of_the_call_before() -> None:
    _, second, *_, last = (on_ranks(join_and_count_connections, 2, join=False) for _ in range(6))
    assert sum(last) <= sum(second) + 2  # connections of a group that has ended close on their own threads


def test_functions_are_called_on_warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for nprocs in (1, 2, 3):
        assert on_ranks(double, nprocs, 4) == [(8, nprocs)] * nprocs
    first, second, fresh = (on_ranks(os.getpid, 2, fresh=fresh) for fresh in (False, False, True))
    assert first == second and not {*first} & {*fresh}
    with pytest.raises(ZeroDivisionError, match="oh") as caught:
        on_ranks(fail_on_1, 2)
    assert isinstance(caught.value.__cause__, ddpkit.PeerError) and caught.value.__cause__.rank == 1
    with pytest.raises(ddpkit.PeerError, match="rank 1 .* failed: SystemExit: 0"):
        on_ranks(exit_on_1, 2)
    with pytest.raises(TimeoutError, match="rank 1:\n(.|\n)*sleep_on_1"):
        on_ranks(sleep_on_1, 2, timeout=1)
    with pytest.raises(ddpkit.PeerError, match="rank 1 .* lost: was killed by SIGKILL"):
        on_ranks(die_on_1, 2)
    assert on_ranks(lambda: double(3), 2) == [(6, 2)] * 2  # with cloudpickle
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"on_ranks\(\) cannot send"):
        on_ranks(lambda: None, 2)
    with pytest.raises(ValueError, match="positive integer, got 0"):
        on_ranks(double, 0)
    for timeout in (0, -1.0, float("inf"), float("nan"), "5", None):
        with pytest.raises(ValueError, match="timeout must be seconds above 0, got"):
            on_ranks(double, 2, 1, timeout=timeout)  # type: ignore[arg-type]


ENDINGS = """
def ends_badly(scope):
    @pytest.fixture(scope=scope)
    def fixture(rank_of):
        yield
        assert rank_of() == 0, f"the {scope} ends badly"
    return fixture

@pytest.fixture(scope="session")
def rank_of():
    return ddpkit.get_rank

of_class = ends_badly("class")
of_module = ends_badly("module")
of_session = ends_badly("session")

@pytest.mark.ranks(2)
class TestFirst:
    def test_of_class(self, of_class): pass

@pytest.mark.ranks(2)
class TestSecond:
    @classmethod
    def teardown_class(cls):
        assert ddpkit.get_rank() == 0, "teardown_class ends badly"

    def test_of_teardown_class(self): pass

@pytest.mark.ranks(2)
def test_next_to_it(): pass

@pytest.mark.ranks(1)
def test_elsewhere(): pass

@pytest.mark.ranks(2)
def test_of_module(of_module): pass
"""
SECOND_FILE = """
import pytest
from test_a import of_session, rank_of

@pytest.mark.ranks(2)
def test_of_session(of_session): pass

def test_on_no_rank(): pass
"""


def test_fixtures_that_end_badly_are_errors_of_the_last_test_that_had_them(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # for whole messages in the summary
    pytester.makepyfile(test_a=HEAD + ENDINGS, test_b=SECOND_FILE)
    result = pytester.runpytest_inprocess(*WITHOUT, "-rA")
    text = result.stdout.str()
    result.assert_outcomes(passed=7, errors=4)
    assert result.ret == 1
    blamed = re.findall(r"^ERROR (\S+) - (.*)$", text, re.MULTILINE)
    assert dict(blamed) == {
        "test_a.py::TestFirst::test_of_class[2ranks]": "AssertionError: the class ends badly",
        "test_a.py::TestSecond::test_of_teardown_class[2ranks]": "AssertionError: teardown_class ends badly",
        "test_a.py::test_of_module[2ranks]": "AssertionError: the module ends badly",
        "test_b.py::test_of_session[2ranks]": "AssertionError: the session ends badly",
    }, text
    assert "That was rank 1 of 2" in text
    assert "INTERNALERROR" not in text


STILL_IN_THE_TEST = """
@pytest.fixture
def ends_badly():
    yield
    assert ddpkit.get_rank() == 0, "the fixture ends badly"

@pytest.mark.ranks(2)
def test_of_a_slow_rank(ends_badly):
    if ddpkit.get_rank() == 0:
        time.sleep(60)  # until it hears of the failure
"""


def test_a_fixture_that_ends_badly_fails_no_test_that_other_ranks_are_in(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # for whole messages in the summary
    pytester.makepyfile(HEAD + "import time\n" + STILL_IN_THE_TEST)
    result = pytester.runpytest_inprocess(*WITHOUT, "-rA")
    result.assert_outcomes(passed=1, errors=1)
    assert re.search(r"^ERROR .* - AssertionError: the fixture ends badly", result.stdout.str(), re.MULTILINE)


def test_an_error_at_a_fixtures_end_is_not_hidden_by_that_of_another_after_a_failure(pytester: pytest.Pytester) -> None:
    _, text = run(
        pytester,
        """
@pytest.fixture(scope="session")
def communicates():
    yield
    ddpkit.all_reduce(1)

@pytest.fixture(scope="session")
def ends_badly():
    yield
    raise ValueError("it was not well")

@pytest.mark.ranks(2)
def test_passes(communicates, ends_badly): pass

@pytest.mark.ranks(2)
def test_fails(): assert 0
""",
    )
    assert "test_passes[2ranks] PASSED" in text, text
    assert re.search("1 failed, 1 passed, [12] errors?", text), text  # a rank may end its fixtures before the other
    assert "ValueError: it was not well" in text, text


def test_fixtures_that_end_badly_when_the_ranks_end_are_errors_too(
    pytester: pytest.Pytester,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # for whole messages in the summary
    outcomes, text = run(
        pytester,
        """
@pytest.fixture(scope="module")
def server():
    yield
    ddpkit.barrier()  # does not fail because a test has
    assert False, "the server was not well"

@pytest.fixture(scope="module")
def group():
    yield
    torch.distributed.barrier()

@pytest.mark.ranks(2)
def test_leaves_a_thread(server):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_fails(group, rank):
    assert rank == 0

@pytest.mark.ranks(2)
def test_next(): pass
""",
    )
    assert outcomes["test_fails[2ranks]"] == "XFAIL"
    assert outcomes["test_next[2ranks]"] == "PASSED"
    assert re.findall(r"^ERROR \S+::(\S+) - (.*)$", text, re.MULTILINE) == [
        ("test_leaves_a_thread[2ranks]", "AssertionError: the server was not well"),
    ], text
    assert "INTERNALERROR" not in text + capfd.readouterr().err


@pytest.mark.storm
def test_fixtures_that_end_badly_after_the_next_test_are_errors_with_xdist(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    source = """
@pytest.fixture(scope="module")
def server():
    yield
    assert False, "the server was not well"

@pytest.mark.ranks(2)
def test_leaves_a_thread(server):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

@pytest.mark.ranks(2)
def test_next(): pass
"""
    with started(tmp_path, source, "-n1") as run:
        text = run.end()
    assert "2 passed, 1 error" in text, text
    assert "ERROR at teardown of test_leaves_a_thread[2ranks]" in text, text


WARNINGS = """
import warnings

class OfThisFile(UserWarning):
    def __init__(self, one, two):  # cannot be made anew from its text
        super().__init__(f"{one} and {two}")

@pytest.mark.ranks(2)
def test_warns(rank):
    warnings.warn("all say this", DeprecationWarning)
    warnings.warn(OfThisFile("one", "two"))
    if rank == 1:
        warnings.warn("one says this", RuntimeWarning)
"""


def test_warnings_of_ranks_are_shown_once(pytester: pytest.Pytester) -> None:
    outcomes, text = run(pytester, WARNINGS)
    assert outcomes == {"test_warns[2ranks]": "PASSED"}, text
    assert text.count("DeprecationWarning: all say this") == 1, text
    assert text.count("OfThisFile: one and two") == 1, text
    assert text.count("RuntimeWarning: one says this") == 1, text
    assert "1 passed, 3 warnings" in text, text


def test_filters_of_warnings_on_the_command_line_hold_on_ranks(pytester: pytest.Pytester) -> None:
    errors = ("-W", "ignore", "-W", "error::RuntimeWarning")
    outcomes, text = run(pytester, WARNINGS, *errors)
    assert outcomes == {"test_warns[2ranks]": "FAILED"}, text
    assert "RuntimeWarning: one says this" in text
    assert "That was rank 1 of 2" in text
    assert "1 failed in" in text, text  # no warnings


def test_a_script_is_compared_with_one_process(pytester: pytest.Pytester) -> None:
    scripts = ROOT / "tests" / "parity" / "scripts"
    outcomes, text = run(
        pytester,
        f"""
def test_right(parity):
    parity("{scripts}/port.py", reference="{scripts}/single.py")

def test_wrong(parity):
    parity("{scripts}/port.py", "twice", reference="{scripts}/single.py", ranks=3)
""",
    )
    assert outcomes == {"test_right": "PASSED", "test_wrong": "FAILED"}, text
    assert "on 3 ranks" in text and "as if the loss were divided by the number of ranks" in text
