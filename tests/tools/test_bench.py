from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpkit
from ddpkit.tools import bench as tool
from ddpkit.tools.bench import Case, bandwidths, summary, time_cases
from ddpkit.tools.cli import main

ROOT = Path(__file__).parents[2]
QUICK = ["--seconds", "0.001", "--sizes", "1K", "64K"]


@pytest.mark.parametrize(
    ("collective", "ranks", "busbw"),
    [("all_reduce", 2, 4.0), ("all_reduce", 8, 7.0), ("all_gather", 8, 3.5), ("reduce_scatter", 4, 3.0)]
    + [("broadcast", 2, 4.0), ("broadcast", 8, 4.0), ("reduce_scatter", 2, 2.0), ("all_reduce", 1, 0.0)],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, ranks: int, busbw: float) -> None:
    found = bandwidths(collective, ranks, size=2_000_000_000, seconds=0.5)  # 4 GB/s
    assert found == {"algbw": 4.0, "busbw": pytest.approx(busbw)}


def test_a_summary_is_the_median_and_the_quartiles() -> None:
    assert summary([5.0, 1.0, 2.0, 100.0, 3.0]) == {"seconds": 3.0, "low": 2.0, "high": 5.0, "rounds": 5}
    assert summary([2.0]) == {"seconds": 2.0, "low": 2.0, "high": 2.0, "rounds": 1}


def test_a_slow_case_ends_after_three_rounds_and_a_quick_one_is_repeated() -> None:
    calls = {"slow": 0, "quick": 0}

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.05)

    def quick() -> None:
        calls["quick"] += 1

    said: list[str] = []
    cases = [Case({}, slow), Case({}, quick)]
    slows, quicks = time_cases(cases, 0.08, torch.device("cpu"), said.append)
    assert len(slows) == 3 and calls["slow"] == 2 + 3
    assert min(slows) >= 0.05
    assert calls["quick"] > 200 and min(quicks) < 20e-6
    assert said == ["warming up, 2 measurements", *(f"round {i} of 8" for i in range(1, 9))]


def test_a_first_call_that_was_disturbed_does_not_spoil_the_measurement() -> None:
    calls = 0

    def slow_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            time.sleep(0.05)

    time_cases([Case({}, slow_at_first)], 0.08, torch.device("cpu"), lambda text: None)
    assert calls > 200  # in rounds of 10 ms each


def outcome(ranks: int, *results: dict[str, Any]) -> dict[str, Any]:
    about = {"device": "cpu", "backend": "gloo", "launcher": "spawn", "nodes": 1}
    return {"ranks": ranks, "results": list(results)} | about


def reduced(size: int, *times: float) -> dict[str, Any]:
    return {"name": "all_reduce", "ranks": 2, "bytes": size, "times": [*times]}


def test_the_table_shows_units() -> None:
    results = [reduced(3 << 20, 1e-3), reduced(65532, 1.5)]
    lines = tool.text(tool.make_report([outcome(2, *results)])).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "all_reduce 2 3 MiB 1 ms 0% 3.15 3.15" in rows
    assert "all_reduce 2 65532 B 1.5 s 0% 4.37e-05 4.37e-05" in rows
    assert not any("vary" in line for line in lines)


def test_times_that_vary_are_remarked_upon() -> None:
    notes = tool.make_report([outcome(2, reduced(8, 0.5, 1.0, 1.5), reduced(8, 1.0))])["notes"]
    assert any(note.startswith("1 of 2 measurements vary by more than +-20%") for note in notes)


def bench(*words: str) -> int:
    return main(["bench", *words])


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as out:
        code = bench("--ranks", "3", "2", *QUICK, "--json")
    assert code == 0
    return json.loads(out.getvalue())  # type: ignore[no-any-return]


def run_tool(command: list[str], folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_everything_is_measured_on_two_and_three_ranks(report: dict[str, Any]) -> None:
    found = [(result["ranks"], result["name"], result["bytes"]) for result in report["results"]]
    talk = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    sizes = {2: (1024, 65536), 3: (1020, 65532)}  # whole numbers of floats on each rank
    assert found == [(ranks, name, size) for ranks in sizes for size in sizes[ranks] for name in talk]


def test_the_json_report_has_the_documented_keys(report: dict[str, Any]) -> None:
    page = (ROOT / "docs/guide/troubleshooting.md").read_text()
    assert all(f"`{key}`" in page for key in report)
    assert all(f"`{key}`" in page for result in report["results"] for key in result)
    about = {key: report[key] for key in ("schema", "ddpkit", "ranks", "backend", "device", "launcher")}
    known = {"schema": 3, "ddpkit": ddpkit.__version__, "ranks": [2, 3], "backend": "gloo"}
    assert about == known | {"device": "cpu", "launcher": "spawn"}
    for result in report["results"]:
        assert 0 < result["low"] <= result["seconds"] <= result["high"] < 60 and result["rounds"] >= 3
        assert result["algbw"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)


@pytest.mark.storm
def test_under_torchrun_the_jobs_own_ranks_are_measured() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "ddpkit", "bench", *QUICK, "--json"]
    done = run_tool([*torchrun, *words])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # rank 0 alone prints
    assert (report["launcher"], report["ranks"]) == ("torchrun", [2])
    assert len(report["results"]) == 2 * 4
    assert done.stderr.count("warming up") == 1
    assert "2 ranks: round 1 of 8 ...\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "argument --ranks: '0' is not a positive number"),
        ("--ranks 2 -1", "argument --ranks: '-1' is not a positive number"),
        ("--ranks two", "argument --ranks: 'two' is not a positive number"),
        ("--ranks 1 2", "--ranks 1: one rank cannot communicate"),
        ("--seconds 0", "argument --seconds: '0' is not a positive number of seconds"),
        ("--seconds nan", "'nan' is not a positive number of seconds"),
        ("--seconds inf", "'inf' is not a positive number of seconds"),
        ("--sizes 64K 10X", "argument --sizes: 10X is no size; write bytes, or 64K, 16M, 1G"),
        ("--sizes 0", "argument --sizes: 0 is no size"),
        ("--device gpu", "argument --device: device='gpu' is not a device"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = bench(*words.split())
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.startswith("python -m ddpkit bench: error: ") and said.err.count("\n") == 1
    assert message in said.err


def test_a_rank_that_fails_ends_the_bench_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    more_than_any_machine_has = "4000000G"
    words = ["--ranks", "2", "--sizes", more_than_any_machine_has]
    assert bench(*words, "--json") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"error: rank [01] \(.*\) failed: RuntimeError: .*alloc", said.err)
    assert re.search(r"Traceback of rank [01]:", said.err) and "bench.py" in said.err


def test_under_a_launcher_no_other_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in ((0, 1), (1, 0)):  # one line, not one from each rank
        for name, value in (("RANK", f"{rank}"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)
        assert bench("--ranks", "2") == 2
        assert capsys.readouterr().err.count("leave it out") == lines
