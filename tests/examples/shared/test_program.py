"""How the trainers end: on several ranks, one message of all, whatever the reason."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import on_ranks
from processes import Ended, free_port, platform_env, run
from shared.networks import NO_STEP, evaluating, find_class, stop_if_not_finite, trying
from shared.program import Parser, UserError, one_message, user_error, users_code
from torch import nn

import ddpkit

TIME = r"\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def end(reason: Callable[[], None]) -> None:
    """Does what a trainer does, which ends by `reason`."""
    sys.argv = ["folder/trainer.py"]
    logging.getLogger("ddpkit").setLevel(logging.WARNING)
    with one_message(), ddpkit.distributed(num_threads=1):
        reason()
        ddpkit.barrier()


def end_ranks(ranks: int, reason: Callable[[], None]) -> list[Ended]:
    port = free_port()
    return run(end, [platform_env(rank, ranks, port) for rank in range(ranks)], reason)


def messages(ended: list[Ended]) -> list[str]:
    """What was said of the end, by rank."""
    return [re.sub(TIME, "TIME", process.output).strip() for process in ended]


def all_find_it() -> None:
    raise UserError("no such folder: make it\nor name another")


def one_finds_it() -> None:
    if ddpkit.get_rank() == 1:
        raise UserError("cannot read 3.png")


def main_cannot_write() -> None:
    ddpkit.run_on_main(user_error("cannot save", OSError)(Path("/no/where").write_text), "")


def all_are_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def one_is_interrupted() -> None:
    if ddpkit.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        (all_find_it, 2, "error: no such folder: make it\nor name another"),
        (one_finds_it, 2, "error: cannot read 3.png"),
        (main_cannot_write, 2, "error: cannot save: [Errno 2] No such file or directory: '/no/where'"),
        (all_are_interrupted, 130, "interrupted"),
        (one_is_interrupted, 130, "interrupted"),
    ],
)
def test_the_end_is_said_once(reason: Callable[[], None], code: int, message: str) -> None:
    ended = end_ranks(3, reason)
    assert [process.code for process in ended] == [code] * 3, ended
    first, *others = messages(ended)
    assert others == ["", ""] and first.startswith(f"TIME : trainer.py: {message}"), ended
    assert "Traceback" not in first


def one_has_an_error() -> None:
    if ddpkit.get_rank() == 1:
        raise RuntimeError("Error(s) in loading:\n\tMissing key: weight")


def test_another_error_is_the_traceback_of_its_rank_and_what_it_says_on_the_main_process() -> None:
    ended = end_ranks(3, one_has_an_error)
    assert [process.code for process in ended] == [1, 1, 1], ended
    first, second, third = messages(ended)
    said = "RuntimeError: Error(s) in loading:\n\tMissing key: weight"
    assert re.fullmatch(rf"TIME : trainer.py: error: rank 1 \(.*\) failed: {re.escape(said)}", first)
    assert second.count("Traceback") == 1 and second.endswith("Missing key: weight")
    assert third == ""


def main_is_killed() -> None:
    if ddpkit.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_main_process_that_is_killed_is_named_by_the_next() -> None:
    first, second, third = end_ranks(3, main_is_killed)
    assert (first.code, second.code, third.code) == (-signal.SIGKILL, 1, 1)
    line = " : trainer.py: error: rank 0 .* was lost: "
    assert len(re.findall(line, second.output)) == 1 and not re.findall(line, third.output)
    assert "Traceback" not in second.output + third.output


def test_an_environment_that_contradicts_itself_is_one_line() -> None:
    (ended,) = run(end, [{"RANK": "0", "OMP_NUM_THREADS": "1"}], all_find_it)
    assert ended.code == 2 and ended.output.count("\n") == 1
    assert " : trainer.py: error: This looks like a distributed job, but WORLD_SIZE" in ended.output


def test_a_users_class_that_cannot_be_imported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken_net.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    with pytest.raises(UserError, match="net: cannot import broken_net:Net: OSError: libcudart.so.12: cannot open"):
        find_class("net", "broken_net:Net")
    with pytest.raises(UserError, match="net: cannot import nothing_here:Net: ModuleNotFoundError: No module named"):
        find_class("net", "nothing_here:Net")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nn.Linear("three", 1)  # torch raises, some calls below


def test_an_error_of_a_users_class_names_the_line_of_that_class() -> None:
    with pytest.raises(UserError) as caught, users_code("net: cannot make it", ": mend it"):
        Broken()
    assert re.fullmatch(
        r"net: cannot make it: TypeError: .* \(in __init__, .*test_program.py, line \d+\): mend it",
        str(caught.value),
        re.S,
    )


def test_an_error_below_an_installed_package_names_its_line() -> None:
    with pytest.raises(UserError, match=r"in \w+, .*torch.*, line \d+\)"), users_code("net"):
        nn.Linear("three", 1)
    with pytest.raises(UserError, match="^as it was$"), users_code("net"):
        raise UserError("as it was")


def test_a_model_evaluates_in_a_block_and_each_part_is_then_as_it_was() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2).eval())
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def find_bad_loss(steps: list[int]) -> str:
    first_bad = torch.tensor(steps[ddpkit.get_rank()])
    with pytest.raises(UserError) as error:
        stop_if_not_finite(first_bad, 9, nn.Linear(1, 1), "rest")
    return str(error.value)


def test_a_loss_that_is_not_finite_is_named_with_the_rank_that_met_it_first() -> None:
    expected = "since iteration 4, first on rank 1; nothing was saved after it: rest"
    assert all(expected in said for said in on_ranks(find_bad_loss, 3, [5, 4, NO_STEP]))
    model = nn.Linear(2, 1)
    stop_if_not_finite(torch.tensor(NO_STEP), 9, model, "rest")
    with torch.no_grad():
        model.weight[0, 1] = torch.inf
    with pytest.raises(UserError, match="since iteration 9, first on rank 0"):
        stop_if_not_finite(torch.tensor(NO_STEP), 9, model, "rest")


@pytest.mark.parametrize("added", ["--local-rank=1", "--local_rank 1", "--dist True --launcher pytorch"])
def test_what_launchers_add_is_passed_over(added: str) -> None:
    parser = Parser("Trains.")
    parser.add_argument("--opt")
    assert parser.parse_args([*added.split(), "--opt", "a.json"]).opt == "a.json"
    with pytest.raises(UserError, match="unrecognized arguments: --other\nusage:"):
        parser.parse_args([*added.split(), "--other"])


class Drifting(torch.nn.BatchNorm1d):
    """Changes one buffer, and replaces another, also in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked += 1
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0)
        return super().forward(x)


def test_a_call_that_tries_a_model_leaves_its_buffers_as_they_were() -> None:
    model, lazy = Drifting(3), torch.nn.LazyBatchNorm1d()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with trying(model), trying(lazy):
        lazy(model(torch.ones(2, 3)))
        assert model.num_batches_tracked == 1 and model.running_mean[0] != 0
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0] and torch.equal(buffer, before[name][1])
    assert lazy.running_mean.shape == (3,) and model.training
