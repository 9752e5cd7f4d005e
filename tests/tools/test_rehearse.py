"""Rehearsals of real scripts on real ranks: right ones, and ones whose bug only shows when they are started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import CLEAN, run

from ddpkit.tools import cli
from ddpkit.tools.recorder import Recorder
from ddpkit.tools.rehearse import trials
from ddpkit.tools.rehearse.rank import KINDS, Disturbance
from ddpkit.tools.rehearse.trials import RankEvents, Reference, Run, plan_trial

SCRIPT = Path(__file__).parent / "rehearsed.py"
ACCELERATE = pytest.mark.peers("accelerate")
FABRIC = pytest.mark.peers("lightning_fabric")
LATE = 600.0  # seconds, which only a hang needs


def begin(words: list[str], out: str) -> None:
    """Be the command line, in a process that has imported torch."""
    os.chdir(out)
    sys.path[0] = out
    sys.exit(cli.main(["rehearse", *words]))


def rehearse(out: Path, *words: str) -> tuple[int | None, str]:
    """Run the command; return its exit code and its output."""
    (ended,) = run(begin, [{"OMP_NUM_THREADS": "1"}], list(words), str(out), timeout=LATE)
    return ended.code, ended.output


def kill_rank_0_before(what: str, words: list[str], out: str) -> None:
    """Be the command line, with one trial: rank 0 is killed at its last event of this name."""

    def plan(seed: int, number: int, kinds: Any, undisturbed: dict[int, RankEvents]) -> list[Run]:
        (ranks,) = undisturbed
        last = max(number for number, record in enumerate(undisturbed[ranks][0]) if record["what"] == what)
        return [Run(ranks, Disturbance("kill", 0, last, 0.0)), Run(ranks, None)]

    trials.plan_trial = plan
    begin(["--trials", "1", *words], out)


def report_of(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("{\n") :])


def rehearse_bug(bug: str, out: Path, *flags: str) -> tuple[int | None, dict[str, Any]]:
    code, output = rehearse(out, "--json", *flags, str(SCRIPT), bug, "{folder}")
    return code, report_of(output)


def test_a_script_that_resumes_ends_like_the_undisturbed_run(tmp_path: Path) -> None:
    code, report = rehearse_bug("none", tmp_path, "--trials", "2", "--kinds", "kill,kill-all", "--seed", "1")
    assert code == 0, report
    assert report["steps"] == 40 and report["excluded"] == {}
    for trial in report["trials"]:
        assert trial["wrong"] == [] and trial["files"]["compared"] == ["last.pt"]
        first, *others = trial["starts"]
        assert first["is_disturbed"]
        if not others:  # it came to its end, though one rank was killed
            continue
        assert not others[-1]["is_disturbed"]
        *_, last = [start for start in trial["starts"] if start["steps"]]  # it may be killed after its last step
        assert last["steps"][-1][-1] == 40 and {*others[-1]["ends"].values()} == {"exited with code 0"}
        assert first["ranks"] != others[0]["ranks"]
    assert any(len(trial["starts"]) > 1 for trial in report["trials"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        ("epoch", "with the same learning rate and weights: the inputs are those of step "),
        pytest.param(
            "optimizer", "learning rate, weights and inputs: the optimizer state or random", marks=pytest.mark.storm
        ),
        pytest.param("schedule", "learning rate [0.05], not [0.025]", marks=pytest.mark.storm),
    ],
)
def test_states_that_are_not_restored_are_found_with_the_step_and_the_cause(
    bug: str, found: str, tmp_path: Path
) -> None:
    code, report = rehearse_bug(bug, tmp_path, "-n", "2", "--only", "2", "--kinds", "kill-all", "--seed", "11")
    wrong = [text for trial in report["trials"] for text in trial["wrong"]]
    assert code == 1 and any(found in text for text in wrong), report


NESTED = """
import torch
class Both(torch.optim.Optimizer):
    def __init__(self, one, other):
        self.inner = (one, other)
        super().__init__([*one.param_groups, *other.param_groups], {})
    def step(self):
        for optimizer in self.inner:
            optimizer.step()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
both = Both(*(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model))
for _ in range(4):
    both.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    both.step()
"""


def test_an_optimizer_may_call_others_in_its_step(tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    _, output = rehearse(tmp_path, "-n", "1", "--trials", "1", "--kinds", "kill", str(script))
    assert "undisturbed  12 steps; weights of undisturbed runs equal" in output, output


def test_a_file_that_is_written_in_place_is_found_by_killing_its_writer(tmp_path: Path) -> None:
    words = ["--json", "-n", "2", str(SCRIPT), "in-place", "{folder}"]
    (ended,) = run(kill_rank_0_before, [{}], "write last.pt", words, str(tmp_path), timeout=LATE)
    (trial,) = report_of(ended.output)["trials"]
    assert trial["starts"][0]["event"] == "write last.pt", trial
    assert ended.code == 1 and "started again on 2 ranks, it failed: rank 0 exited with code 1" in trial["wrong"][0], (
        trial
    )


@pytest.mark.storm
def test_a_rank_that_is_killed_in_its_last_save_is_started_again_though_others_ended_well(
    tmp_path: Path,
) -> None:
    words = ["--json", "-n", "2", str(SCRIPT), "last", "{folder}"]
    (ended,) = run(kill_rank_0_before, [{}], "rename last.pt.tmp", words, str(tmp_path), timeout=LATE)
    report = report_of(ended.output)
    (trial,) = report["trials"]
    assert ended.code == 0 and trial["starts"][0]["ends"]["0"] == "was killed by SIGKILL", ended.output
    assert trial["starts"][0]["ends"]["1"] == "exited with code 0" and len(trial["starts"]) == 2


def test_a_handler_of_signals_may_tell_something_while_a_record_is_written() -> None:
    reader, writer = os.pipe()
    recorder = Recorder(writer)
    former = signal.signal(signal.SIGALRM, lambda *_: recorder.tell("handled"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        timer = threading.Timer(0.5, lambda: read.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
        read: list[bytes] = []
        timer.start()
        recorder.tell("step", weights=[0.123456789] * 50_000)  # more than a pipe holds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        os.close(writer)
    timer.join()
    os.close(reader)
    kinds = [json.loads(line)["kind"] for line in b"".join(read).splitlines()]
    assert kinds.count("step") == 1 and kinds.count("handled") >= 5


@pytest.mark.storm
@pytest.mark.parametrize(
    ("package", "bug", "wrong"),
    [
        pytest.param("lightning_fabric", "none", "", marks=FABRIC),
        pytest.param("lightning_fabric", "loader", "the inputs are those of step 1", marks=FABRIC),
        pytest.param("accelerate", "none", "", marks=ACCELERATE),
        pytest.param("accelerate", "sampler", "the inputs are those of step 8", marks=ACCELERATE),
    ],
)
def test_what_other_libraries_save_is_rehearsed(package: str, bug: str, wrong: str, tmp_path: Path) -> None:
    script = SCRIPT.with_name(f"rehearsed_{package}.py")
    words = ["--json", "-n", "2", str(script), bug, "{folder}"]
    (ended,) = run(kill_rank_0_before, [{"OMP_NUM_THREADS": "1"}], "step", words, str(tmp_path), timeout=LATE)
    (trial,) = report_of(ended.output)["trials"]
    found = [text[-len(wrong) :] for text in trial["wrong"]]
    assert ended.code == bool(wrong) and found == [wrong] * bool(wrong), ended.output
    assert trial["files"]["compared"]


@pytest.mark.storm
def test_a_script_that_never_resumes_is_told_so(tmp_path: Path) -> None:
    code, output = rehearse(tmp_path, "-n", "2", "--trials", "4", "--kinds", "kill", str(SCRIPT), "anew", "{folder}")
    assert code == 1 and "no start continued from the last one" in output, output


@pytest.mark.storm
def test_a_script_that_fails_when_it_is_started_again_is_shown_with_its_error(tmp_path: Path) -> None:
    flags = ("-n", "2", "--only", "2", "--kinds", "terminate-all", "--seed", "2")
    code, output = rehearse(tmp_path, *flags, str(SCRIPT), "raises", "{folder}")
    assert code == 1 and "ValueError: this script does not resume" in output, output
    assert "to repeat the first that went wrong: the same command with --only 2" in output


@pytest.mark.storm
def test_ranks_that_wait_for_one_that_was_killed_are_shown_with_their_stacks(tmp_path: Path) -> None:
    flags = ("-n", "2", "--only", "1", "--kinds", "kill", "--seed", "7", "--grace", "5")
    code, report = rehearse_bug("waits", tmp_path, *flags)
    (trial,) = report["trials"]
    assert code == 0, trial
    assert "on 2 ranks, some did not end within 5 s" in trial["notes"]
    assert any("wait_for_rank_0" in line for line in trial["notes"]), trial


@pytest.mark.storm
def test_a_run_that_depends_on_the_number_of_ranks_is_resumed_on_the_same_number(tmp_path: Path) -> None:
    code, report = rehearse_bug("per-rank", tmp_path, "--trials", "2", "--kinds", "kill-all")
    assert code == 0 and "steps, not" in report["excluded"]["3"], report
    assert {start["ranks"] for trial in report["trials"] for start in trial["starts"]} == {2}


@pytest.mark.storm
def test_a_script_without_a_seed_is_told_that_nothing_can_be_compared(tmp_path: Path) -> None:
    code, output = rehearse(tmp_path, "-n", "2", "--trials", "1", str(SCRIPT), "seed", "{folder}")
    assert code == 2 and "Is a seed missing?" in output and "no undisturbed run to compare with" in output, output


@pytest.mark.storm
def test_ranks_that_survive_the_loss_of_one_need_no_second_start(tmp_path: Path) -> None:
    script = tmp_path / "survives.py"
    script.write_text(
        """
import torch
from torch.utils.data import TensorDataset
import ddpkit

torch.manual_seed(0)
data = TensorDataset(torch.randn(240, 2), torch.randn(240, 1))
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(net.parameters())
for attempt in ddpkit.survive(net, optimizer):
    with attempt as context:
        loader = attempt.resume(ddpkit.make_loader(data, batch_size=12 // context.world_size))
        model = ddpkit.wrap_model(net)
        for epoch in loader.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                attempt.commit()
"""
    )
    code, output = rehearse(
        tmp_path, "--json", "-n", "3,2", "--only", "3", "--kinds", "kill", "--seed", "4", str(script)
    )
    (trial,) = report_of(output)["trials"]
    (start,) = trial["starts"]
    assert code == 0 and start["is_disturbed"], output
    assert sorted(start["ends"].values())[-1] == "was killed by SIGKILL" and start["steps"][-1][-1] == 40


CHECKPOINTED = """
import sys
import torch
import ddpkit

with ddpkit.distributed() as context:
    ddpkit.seed_everything(0)
    net = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.Adam(net.parameters())
    model = ddpkit.wrap_model(net)
    checkpoints = ddpkit.Checkpointer("saved")
    saved = checkpoints.load_latest(model=net, optimizer=optimizer)
    for step in range(saved["step"] + 1 if saved else 1, 61):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 2).double()).square().mean().backward()
        optimizer.step()
        if step % 5 == 0:
            checkpoints.save(step, model=net, optimizer=optimizer, wait=bool(sys.argv[1:]))
"""


@pytest.mark.storm
@pytest.mark.parametrize("waits", [[], ["--wait"]])
def test_a_rank_that_is_killed_while_a_checkpointer_writes_loses_that_checkpoint_alone(
    waits: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHECKPOINTED)
    code, output = rehearse(tmp_path, "--json", "--trials", "6", "--kinds", "kill,kill-all", str(script), *waits)
    starts = [start for trial in report_of(output)["trials"] for start in trial["starts"]]
    assert code == 0 and any(start["event"].startswith("write ") for start in starts), output


@pytest.mark.storm
def test_an_orderly_stop_loses_no_step_and_its_bits_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    digits = Path(__file__).parents[2] / "examples/digits.py"
    flags = ("--json", "--exact", "-n", "1,2,3", "--trials", "3", "--kinds", "terminate,terminate-all,kill")
    words = ("--deterministic", "--epochs", "3", "--save-every", "10", "--folder", "{folder}", "--resume")
    code, output = rehearse(tmp_path, *flags, str(digits), *words)
    report = report_of(output)
    assert code == 0 and report["distance"] == 0, output
    assert all(trial["files"]["bits"] for trial in report["trials"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "there is no such file"),
        (["-n", "2,x", str(SCRIPT)], "-n takes numbers of ranks"),
        (["--kinds", "flood", str(SCRIPT)], "--kinds knows kill"),
        (["--trials", "0", str(SCRIPT)], "'0' is not a positive number"),
        (["-n", "1", "stepless.py"], "made fewer than two steps of a torch optimizer"),
        (["-n", "1", "raises.py"], "rank 0 exited with code 1: ZeroDivisionError"),
        (["-n", "1", "--timeout", "3", "hangs.py"], "the script hangs on 1 rank"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_a_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "stepless.py").write_text("print('hello')\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "hangs.py").write_text("import time\n\n\ndef rest():\n    time.sleep(1000)\n\n\nrest()\n")
    code, output = rehearse(tmp_path, *words)
    assert code == 2 and said in output, output


@pytest.mark.storm
def test_an_interrupted_rehearsal_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ddpkit", "rehearse", "-n", "2", str(tmp_path / "hangs.py")]
    (tmp_path / "hangs.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'up').touch()\ntime.sleep(1000)\n"
    )
    (tmp_path / "tmp").mkdir()
    env = CLEAN | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(words, env=env, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(LATE) == 130
    assert not list((tmp_path / "tmp").iterdir())
    running = subprocess.run(["pgrep", "-f", str(tmp_path / "hangs.py")], stdout=subprocess.PIPE, check=False)
    assert running.stdout == b""


def events_of(what: list[str]) -> RankEvents:
    return {0: [{"what": text, "time": float(number)} for number, text in enumerate(what)]}


def test_a_seed_draws_the_same_disturbances_again_and_kinds_take_turns() -> None:
    undisturbed = {
        2: events_of(["start", "step", "step", "rename last.tmp", "end"]),
        3: events_of(["start", "step", "end"]),
    }
    plans = [plan_trial(5, number, list(KINDS), undisturbed) for number in range(1, 41)]
    assert plans == [plan_trial(5, number, list(KINDS), undisturbed) for number in range(1, 41)]
    assert plans != [plan_trial(6, number, list(KINDS), undisturbed) for number in range(1, 41)]
    for number, starts in enumerate(plans):
        first = starts[0].disturbance
        assert first is not None and first.kind == list(KINDS)[number % len(KINDS)]
        assert starts[-1].disturbance is None and len(starts) in (2, 3)
        assert all(before.ranks != after.ranks for before, after in pairwise(starts))


def test_half_of_the_disturbances_come_between_the_changes_of_files_and_none_of_them_before_the_first() -> None:
    step = ["step"] * 4
    events = events_of(["start", *step, "write", *step, "write", *step, "end"])
    numbers = [plan_trial(0, number, ["kill"], {2: events})[0].disturbance.event for number in range(1, 41)]  # type: ignore[union-attr]
    assert {*numbers[::2]} == {5, 10} and {*numbers[1::2]} == {6, 7, 8, 11, 12, 13, 14}
    assert plan_trial(0, 2, ["kill"], {2: events_of(["start", "step", "end"])})[0].disturbance is not None


def run_of(weights: list[float], rate: float = 0.1, before: list[float] | None = None, inputs: str = "") -> Run:
    """A run, each of whose steps has the weights of the step before, and the inputs of a letter; "" for none known."""
    rows = zip(before or [0.0, *weights], weights, inputs or [""] * len(weights), strict=False)
    common = {"optimizer": 0, "rates": [rate], "rank": 0}
    return Run(
        1,
        None,
        steps=[common | {"before": [b], "weights": [w], "inputs": ord(i) if i else 0} for b, w, i in rows],
    )


def test_steps_are_found_again_wherever_a_life_begins() -> None:
    reference = Reference(run_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    alignment = reference.follow(run_of([3.0, 4.0, 4.0, 5.0, 6.0]))
    assert alignment.stretches == [[3, 4], [4, 6]] and not alignment.first_difference
    alignment = reference.follow(run_of([2.0, 3.0, 5.0]))
    assert alignment.stretches == [[2, 3], [5, 5]]
    assert "step 3 is 0.4 of a step away" in reference.follow(run_of([2.0, 3.4])).first_difference
    flat = Reference(run_of([1.0, 2.0, 3.0, 3.0, 3.0, 3.0]))
    assert flat.follow(run_of([3.0, 3.0]), made=4).stretches == [[5, 6]]
    assert "step 2 is nan" in reference.follow(run_of([1.0, float("nan")])).first_difference
    assert "it continued after step 6" in reference.follow(run_of([6.0, 9.0])).first_difference


def test_learning_rates_are_told_from_other_weights() -> None:
    reference = Reference(run_of([1.0, 2.0, 3.0, 4.0]))
    assert "learning rate [0.2], not [0.1]" in reference.follow(run_of([3.3], rate=0.2)).first_difference
    assert reference.follow(run_of([3.3], before=[2.5])).first_difference.endswith(": the weights differ before it")


def test_weights_and_inputs_are_compared_before_an_optimizer_is_blamed() -> None:
    reference = Reference(run_of([1.0, 2.0, 3.0, 4.0], inputs="abcd"))

    def explain(inputs: str) -> str:
        return reference.follow(run_of([3.6], before=[2.0], inputs=inputs)).first_difference

    assert explain("a") == (
        "step 3 is 0.6 of a step away from the undisturbed run's, with the same learning rate and weights: "
        "the inputs are those of step 1"
    )
    assert explain("x").endswith("the inputs differ")
    assert explain("c").endswith("weights and inputs: the optimizer state or random numbers differ")
    assert explain("").endswith("samples, optimizer state or random numbers")


def test_undisturbed_runs_that_differ_set_the_tolerance_or_are_left_out() -> None:
    reference = Reference(run_of([1.0, 2.0, 3.0]))
    assert reference.add(run_of([1.0, 2.0, 3.01])) == ""
    assert reference.tolerance == pytest.approx(0.1)
    assert reference.follow(run_of([2.0, 3.05])).first_difference == ""
    assert reference.add(run_of([1.0, 2.5, 3.0])) == "weights up to 0.5 of a step apart"
    assert reference.add(run_of([1.0, 2.0])) == "2 steps, not 3"


def test_files_are_compared_by_the_tensors_and_numbers_that_both_folders_have(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def save(folder: Path, net: list[Any], rng: int = 0, **numbers: Any) -> None:
        state = (3, tuple(range(rng, 625)), None)
        torch.save(
            {"net": net, "rng": torch.full((4,), rng, dtype=torch.uint8), "random": state} | numbers,
            folder / "deep/a.pt",
        )

    def compare() -> trials.Difference:
        return trials.compare_files(first, second, {"time in deep/a.pt"})

    for folder in (first, second):
        (folder / "deep").mkdir(parents=True)
        save(folder, [torch.ones(3)])
        np.save(folder / "other.npy", np.ones(3))
    assert compare().bits and compare().compared == ["deep/a.pt"]
    save(second, [torch.tensor([1.0, 1.0, 1.5])], rng=1)
    assert (compare().greatest, compare().where, compare().bits) == (0.5, "net.0 in deep/a.pt", False)
    save(second, [torch.tensor([1.0, 1.0, torch.nan])])
    assert compare().greatest == np.inf
    save(first, [torch.tensor([1.0, 1.0, torch.nan])])
    assert compare().bits and compare().greatest == 0
    save(first, [torch.ones(3)])
    save(second, [])
    assert compare().where == "net.0 in deep/a.pt"

    save(first, [], scaler={"scale": 4194304.0}, step=100, time=1.0)
    save(second, [], scaler={"scale": 16384.0}, step=100, time=2.0)
    assert compare().where == "scaler.scale in deep/a.pt" and 0.99 < compare().greatest < 1
    save(second, [], scaler={"scale": 4194304.0}, step=101, time=2.0)
    assert compare().where == "step in deep/a.pt" and compare().greatest == np.inf
    varying: set[str] = set()
    assert trials.compare_files(first, second, varying, is_undisturbed=True).bits
    assert varying == {"step in deep/a.pt", "time in deep/a.pt"}

    (second / "deep/a.pt").unlink()
    assert (compare().greatest, compare().where) == (np.inf, "deep/a.pt")
