"""Where errors lead those who read them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port, platform_env, run

import ddpkit

GUIDE = Path(__file__).parents[1] / "docs/guide"
KINDS = [name for name in ddpkit.__all__ if name.endswith("Error") and name != "DdpkitError"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
@pytest.mark.parametrize("name", KINDS)
def test_a_traceback_ends_with_the_page_that_explains_the_error(name: str) -> None:
    kind = getattr(ddpkit, name)
    error = kind.__new__(kind, "A message.")
    sent = pickle.loads(pickle.dumps(error))
    *_, message, docs = traceback.format_exception(sent)
    page = docs.removeprefix("Docs: https://ddpkit.readthedocs.io/en/latest/guide/").rstrip().removesuffix(".html")
    assert message == f"ddpkit.errors.{name}: A message.\n"
    assert name in (GUIDE / f"{page}.md").read_text()


# Mistakes before there is a job: the first line is the cause, and the frames are those of the script.

MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "no setup": (lambda: ddpkit.all_reduce_mean(1.0), "NotSetUpError: 2 processes were launched (platform), but"),
    "no setup, a model": (
        lambda: ddpkit.wrap_model(torch.nn.Linear(1, 1)),
        "NotSetUpError: 2 processes were launched (platform), but",
    ),
    "no setup, gradients": (
        lambda: ddpkit.average_gradients(torch.nn.Linear(1, 1)),
        "NotSetUpError: 2 processes were launched (platform), but",
    ),
    "no setup, no model": (
        lambda: ddpkit.wrap_model(torch.nn.Linear),  # type: ignore[arg-type, type-var]
        "TypeError: wrap_model() takes a torch.nn.Module, got type.",
    ),
    "an option": (
        lambda: ddpkit.setup(timout=3),  # type: ignore[call-arg]
        "TypeError: setup() has no option timout: did you mean timeout?",
    ),
    "an option of a block": (
        lambda: ddpkit.distributed(timout=3),  # type: ignore[call-arg]
        "TypeError: distributed() has no option timout: did you mean timeout?",
    ),
    "a value": (lambda: ddpkit.setup(timeout=3), "TypeError: timeout must be a datetime.timedelta"),  # type: ignore[arg-type]
    "a device": (lambda: ddpkit.setup(device="gpu"), "ValueError: device='gpu' is not a device"),
}
ALONE = {"RANK": "0"}  # a launch that setup() refuses


def make_mistake() -> None:
    call, _ = MISTAKES[os.environ["MISTAKE"]]
    call()


def set_up() -> None:
    ddpkit.setup()


def check_cause_comes_first(output: str, words: str) -> None:
    lines = [line for line in output.splitlines() if not line.startswith("waiting for rank 0")]
    assert lines[0].startswith(words), output
    assert "During handling" not in output and "direct cause" not in output, output
    for frame in (os.path.dirname(ddpkit.__file__), "<string>", "contextlib.py"):
        assert frame not in output, output


def test_a_mistake_before_the_job_is_shown_cause_first_and_to_torchrun(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(len(MISTAKES))]
    envs = [
        platform_env(1, 2, free_port(), MISTAKE=name, TORCHELASTIC_ERROR_FILE=str(file))
        for name, file in zip(MISTAKES, files, strict=True)
    ]
    for file, end, (_, words) in zip(files, run(make_mistake, envs), MISTAKES.values(), strict=True):
        check_cause_comes_first(end.output, words)
        report = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
        assert end.code == 1 and end.output.endswith(report)


def test_a_refused_launch_is_shown_cause_first() -> None:
    (end,) = run(set_up, [ALONE])
    check_cause_comes_first(end.output, "LaunchError: This looks like a distributed job, but WORLD_SIZE")


def fail_alone(rank: int) -> None:
    ddpkit.setup()
    if ddpkit.get_rank() == rank:
        raise ValueError("bad image")
    ddpkit.barrier()


def test_torchruns_report_has_a_traceback_once(tmp_path: Path) -> None:
    port = free_port()
    envs = [platform_env(rank, 2, port, TORCHELASTIC_ERROR_FILE=str(tmp_path / f"{rank}")) for rank in range(2)]
    other, _ = run(fail_alone, envs, 1)
    reports = [json.loads((tmp_path / f"{rank}").read_text())["message"] for rank in range(2)]
    shown = [report["extraInfo"]["py_callstack"] for report in reports]
    assert 'raise ValueError("bad image")' in shown[1]
    assert "ValueError: bad image" in shown[0] and "ddpkit.barrier()" in shown[0] and "raise" not in shown[0]
    assert "raise ValueError" in reports[0]["message"] and "raise ValueError" in other.output


def catch_before_setup() -> None:
    before = sys.excepthook
    with pytest.raises(ValueError, match="is not a device"):
        ddpkit.setup(device="gpu")
    assert sys.excepthook is not before
    ddpkit.setup()
    ddpkit.teardown()
    assert sys.excepthook is before


def test_a_caught_mistake_leaves_no_hook_behind_setup() -> None:
    (end,) = run(catch_before_setup, [platform_env(0, 1, free_port())])
    assert end.code == 0, end.output


def fail_while_handling() -> None:
    ddpkit.setup()
    try:
        raise RuntimeError("the real bug")
    except RuntimeError:
        ddpkit.all_reduce(1, "product")  # type: ignore[call-overload]


def fail_with_a_note() -> None:
    ddpkit.setup()
    try:
        ddpkit.all_reduce(1, "product")  # type: ignore[call-overload]
    except ValueError as error:
        if sys.version_info >= (3, 11):
            error.add_note("while reading config.yaml")
        raise


def test_what_led_to_a_mistake_and_its_notes_are_shown() -> None:
    for script, words in ((fail_while_handling, "the real bug"), (fail_with_a_note, "while reading config.yaml")):
        (end,) = run(script, [platform_env(0, 1, free_port())])
        if script is fail_while_handling or sys.version_info >= (3, 11):
            assert end.code == 1 and words in end.output, end.output


def chain_hooks() -> None:
    with pytest.raises(ValueError, match="is not a device"):
        ddpkit.setup(device="gpu")
    former = sys.excepthook

    def mine(kind: Any, error: Any, trace: Any) -> None:
        print("mine", file=sys.stderr)
        former(kind, error, trace)

    sys.excepthook = mine
    ddpkit.setup()
    raise RuntimeError("broken")


def test_a_hook_that_was_chained_before_the_job_is_called_once() -> None:
    (end,) = run(chain_hooks, [platform_env(0, 1, free_port())])
    assert end.code == 1 and end.output.count("mine") == 1 and "RuntimeError: broken" in end.output, end.output


def test_a_program_of_a_rank_does_not_report_for_it(tmp_path: Path) -> None:
    program = "import ddpkit; ddpkit.all_reduce(1.0)"
    rank = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {program!r}]).returncode)"
    file = tmp_path / "error.json"
    env = {**os.environ, **platform_env(1, 2, free_port()), "TORCHELASTIC_ERROR_FILE": str(file)}
    for script, reports in ((rank, False), (program, True)):
        ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
        assert ended.returncode == 1 and ended.stderr.startswith("NotSetUpError"), ended.stderr
        assert file.exists() == reports
