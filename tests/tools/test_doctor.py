"""The doctor on healthy and on broken machines and jobs: real processes, started as a person or a launcher would."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import CLEAN, ROOT, TORCHRUN, free_port, platform_env, run

import ddpkit
from ddpkit import LaunchError, detect_launch
from ddpkit.tools import cli
from ddpkit.tools import doctor as tool
from ddpkit.tools.doctor import MARK, Report, checks, merge, print_report, read_launch, read_results, render
from ddpkit.tools.doctor.checks import Check, roll_call, same_versions

MACHINE = ["launch", "versions", "devices", "interface", "ports"]
MACHINE += ["shm", "cores", "collective"]
JOB = ["launch", "versions", "devices", "interface", "ports", "shm", "cores"]
JOB += ["master", "join", "ranks", "same versions", "mean"]
LATE = 120.0  # seconds for a doctor with a time-out of a few; torch would take longer, and a busy machine does not

ELSEWHERE = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]


def can_be(there: list[str]) -> bool:
    """Whether this process may give a child a host name, or a network, of its own."""
    return bool(shutil.which("unshare")) and not subprocess.run([*there, "true"], capture_output=True).returncode


def popen(command: list[str], stdin: int, env: dict[str, str]) -> subprocess.Popen[str]:
    env = {**CLEAN, "OMP_NUM_THREADS": "1", **env}
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def start(*flags: str, on: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
    return popen([*on, sys.executable, "-m", "ddpkit", "doctor", *flags], subprocess.DEVNULL, env)


def meet(*args: Any, **kwargs: Any) -> list[Check]:
    """Stand for the two processes that meet, where they are not what is tested."""
    return [Check("ok", "right")] * 2


def examine(folder: str, flags: Sequence[str]) -> None:
    """Do what `python -m ddpkit doctor` does, in a process that has imported torch."""
    tool.spawn = meet  # type: ignore[assignment]
    errors = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.close(errors)
    print(os.getpid(), flush=True)
    sys.exit(cli.main(["doctor", *flags]))


def at_once(*flags: str, envs: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of ranks that start together."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run(examine, [{"OMP_NUM_THREADS": "1", **env} for env in envs], folder, flags, timeout=600)
        results = []
        for end in ended:
            pid, _, out = end.output.partition("\n")
            results.append((end.code, out, Path(folder, pid).read_text()))
        return results


def doctor(*flags: str, **env: str) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr and seconds of one run."""
    begin = time.monotonic()
    (result,) = at_once(*flags, envs=[env])
    return *result, time.monotonic() - begin


def found(out: str) -> dict[str, dict[str, Any]]:
    """The checks of a report in JSON, by name."""
    return {check["name"]: check for check in json.loads(out)["checks"]}


def failed(out: str) -> list[str]:
    return [name for name, check in found(out).items() if check["status"] == "failed"]


def test_a_healthy_machine_passes_and_the_json_has_its_schema() -> None:
    process = start("--json", "--device", "cpu")
    (out, err), code = process.communicate(timeout=600), process.returncode
    report = json.loads(out)  # and nothing else is on stdout
    assert code == 0, out + err
    assert report.keys() == {
        "schema",
        "scope",
        "status",
        "host",
        "world_size",
        "versions",
        "checks",
        "ranks",
    }
    assert (report["schema"], report["scope"], report["world_size"]) == (2, "machine", 1)
    assert report["host"] == socket.gethostname() and report["versions"]["torch"] == torch.__version__
    assert report["status"] in ("ok", "warning") and report["ranks"] == []
    assert [check["name"] for check in report["checks"]] == MACHINE
    for check in report["checks"]:
        assert check.keys() == {"name", "status", "found", "remedy", "details"}
        assert bool(check["remedy"]) == (check["status"] in ("warning", "failed")), check
    assert "the mean of the ranks' numbers is 0.5" in found(out)["collective"]["found"]
    assert found(out)["launch"]["details"] == ["no launcher: one process"]
    assert "two processes meet" in err


def test_a_report_for_people_is_aligned_and_says_what_to_do() -> None:
    code, out, _, _ = doctor("--device", "cpu", MASTER_PORT="http")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == f"ddpkit doctor: this machine, {socket.gethostname()}"
    place = lines.index("failed   ports       MASTER_PORT=http is no port")
    assert lines[place + 1].startswith(" " * 21 + "-> Set it to a number from 1 to 65535.")
    assert lines[-1].endswith("1 failed (ports)") and "\033" not in out and out.isascii()


def test_hints_that_are_refused_are_named_with_the_way_out() -> None:
    code, out, _, _ = doctor("--json", "--device", "cpu", RANK="0")
    assert code == 1 and failed(out) == ["launch"]
    launch = found(out)["launch"]
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set. Found: RANK=0" in launch["found"]
    assert launch["remedy"].startswith("Start every process with torchrun") and "unset RANK" in launch["remedy"]
    assert found(out)["collective"]["status"] == "ok"  # the machine itself is well


def test_a_forgotten_srun_is_one_warning(monkeypatch: Any) -> None:
    for name, text in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, text)
    _, check = read_launch()
    assert check.status == "warning" and check.found.startswith("SLURM_NTASKS=4, but this process")
    assert check.remedy.startswith("Start the doctor as the ranks are started")


def test_a_refused_task_of_a_launcher_says_one_line_only() -> None:
    code, out, err, _ = doctor("--json", RANK="0", SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1 and "RANK=0" in err


def test_a_taken_port_is_named_with_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        code, out, _, _ = doctor("--json", "--device", "cpu", MASTER_PORT=f"{port}")
        assert code == 1 and failed(out) == ["ports"]
        assert f"MASTER_PORT {port} is not free: process {os.getpid()} (" in found(out)["ports"]["found"]
        code, out, _, seconds = doctor("--json", **platform_env(0, 2, port))
    assert code == 1 and failed(out) == ["ports"] and seconds < LATE
    assert [found(out)[name]["status"] for name in ("master", "join", "mean")] == ["skipped"] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_master_address_fails_the_step_within_the_time_out(rank: int) -> None:
    env = platform_env(rank, 2, free_port(), MASTER_ADDR="no.such.host.invalid")
    code, out, err, seconds = doctor("--timeout", "3", "--json", **env)
    assert code == 1 and seconds < LATE
    if rank == 0:
        assert failed(out) == ["master"]
        assert "MASTER_ADDR='no.such.host.invalid' did not resolve within 3 s" in found(out)["master"]["found"]
        assert found(out)["master"]["remedy"].startswith("Set MASTER_ADDR")
    else:  # rank 0 cannot speak for it
        assert out == "" and f"rank 1 ({socket.gethostname()}): master: MASTER_ADDR=" in err


def torchrun(nprocs: int, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, f"--nproc-per-node={nprocs}", "-m", "ddpkit", "doctor"]
    env = {**CLEAN, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.storm
def test_a_job_of_one_rank_is_a_job() -> None:
    done = torchrun(1, "--json", "--device", "cpu")
    assert done.returncode == 0 and json.loads(done.stdout)["scope"] == "job"
    assert found(done.stdout)["join"]["found"] == "1 rank over gloo"


DIES_WHILE_JOINING = """
import os, sys
import torch.distributed as dist
from ddpkit.tools import cli

if os.environ["RANK"] == "1":
    dist.init_process_group = lambda *args, **more: os._exit(3)
sys.exit(cli.main(["doctor", "--json", "--timeout", "100"]))
"""


@pytest.mark.storm
def test_the_report_comes_although_torchrun_ends_all_when_one_rank_has_failed(tmp_path: Path) -> None:
    """Rank 0 waits in gloo, in a C call, when torchrun's signal comes."""
    (tmp_path / "doctor.py").write_text(DIES_WHILE_JOINING)
    command = [*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "doctor.py")]
    env = {**CLEAN, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and failed(done.stdout) == ["join"], done.stderr
    assert "another rank has failed" in found(done.stdout)["join"]["found"]


@pytest.mark.storm
def test_a_nested_launch_is_refused_on_every_rank_and_reported_once() -> None:
    done = torchrun(2, "--json", "--device", "cpu", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1 and failed(done.stdout) == ["launch"]
    assert "torchrun was started by rank 0 of 2 of another launch" in found(done.stdout)["launch"]["found"]
    assert found(done.stdout)["launch"]["remedy"].startswith("Start torchrun once per node with --nnodes")


@pytest.mark.storm
def test_a_job_under_torchrun_is_examined_and_only_the_main_process_prints() -> None:
    done = torchrun(2, "--json", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["scope"], report["world_size"]) == ("job", 2)
    assert [check["name"] for check in report["checks"]] == [name for name in JOB if name != "ports"]  # the agent's
    assert [(place["rank"], place["device"]) for place in report["ranks"]] == [(0, "cpu"), (1, "cpu")]
    assert len({place["pid"] for place in report["ranks"]}) == 2
    assert found(done.stdout)["launch"]["found"] == "torchrun: rank 0 of 2, local rank 0 of 2"


def test_a_job_of_a_platform_is_examined() -> None:
    port = free_port()
    (code, out, err), other = at_once(
        "--json", "--device", "cpu", envs=[platform_env(rank, 2, port) for rank in (0, 1)]
    )
    assert code == 0, out + err
    assert (other[0], other[1]) == (0, "")
    assert [check["name"] for check in json.loads(out)["checks"]] == JOB
    assert found(out)["join"]["found"] == "2 ranks over gloo"
    assert found(out)["ranks"]["found"] == "2 ranks on 1 host"
    assert f"rank 1 ({socket.gethostname()}): platform: rank 1 of 2" in found(out)["launch"]["details"]


@pytest.mark.storm
@pytest.mark.skipif(not can_be(ELSEWHERE), reason="needs the right to make a UTS namespace")
def test_ranks_on_different_hosts_are_told_apart() -> None:
    port = free_port()
    places = [[], ELSEWHERE]
    ranks = [start("--json", on=on, **platform_env(rank, 2, port)) for rank, on in enumerate(places)]
    (out, err), *_ = [process.communicate(timeout=600) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], err
    assert [place["node_rank"] for place in json.loads(out)["ranks"]] == [0, 1]
    assert found(out)["ranks"]["found"] == "2 ranks on 2 hosts"


@pytest.mark.skipif(not can_be(["unshare", "--net"]), reason="needs the right to make a network namespace")
def test_a_loopback_interface_that_is_down_is_named() -> None:
    out, err = start("--json", on=["unshare", "--net"]).communicate(timeout=600)
    assert "cannot connect to 127.0.0.1: [Errno 101]" in found(out)["interface"]["found"]
    assert "ip link set lo up" in found(out)["interface"]["remedy"] and "frame #" not in err


def test_what_one_rank_alone_finds_is_reported_with_its_name_and_fails_all() -> None:
    port = free_port()
    envs = [platform_env(0, 2, port), platform_env(1, 2, port, GLOO_SOCKET_IFNAME="nosuch0")]
    (code, out, _), (other, nothing, err) = at_once("--json", "--timeout", "10", envs=envs)
    assert (code, other) == (1, 1) and nothing == "" and "ddpkit doctor:" not in err  # the main process speaks for it
    assert f"rank 1 ({socket.gethostname()}): GLOO_SOCKET_IFNAME=nosuch0" in found(out)["interface"]["found"]
    assert "interface" in failed(out) and "join" in failed(out)
    assert "nosuch0" in str(found(out)["join"])  # gloo's own words, on the rank that had them


def test_a_rank_that_does_not_come_is_named_when_the_time_is_up() -> None:
    begin = time.monotonic()
    first, second = at_once("--json", "--timeout", "3", envs=[platform_env(rank, 2, free_port()) for rank in (0, 1)])
    assert time.monotonic() < begin + LATE
    assert first[0] == 1 and failed(first[1]) == ["join"]
    assert "Rank 1 of 2 did not come within 3 s" in found(first[1])["join"]["found"]
    assert second[:2] == (1, "")
    assert "rank 1" in second[2] and "Nobody answers at MASTER_ADDR:MASTER_PORT" in second[2]


def test_a_rank_that_does_not_come_is_named_beside_those_who_did() -> None:
    port = free_port()
    first, third = at_once("--json", "--timeout", "10", envs=[platform_env(rank, 3, port) for rank in (0, 2)])
    out = first[1]
    assert (first[0], third[:2]) == (1, (1, ""))
    assert "Rank 1 of 3 did not come within 10 s" in found(out)["join"]["found"]
    assert len(found(out)["launch"]["details"]) == 5  # rank 2 has told what it is


def test_a_rank_that_has_read_others_before_the_store_went_fails_all_the_same() -> None:
    report = Report(detect_launch(platform_env(2, 3, 1)), 60.0, Check("ok", "x"))
    report.ranks[0] = (report.record | {"rank": 0}, {"launch": Check("ok", "x")})  # and then the store went
    report.fail(LaunchError("The store has gone."))
    assert print_report(report, as_json=True) == 1


def work_until_told() -> None:
    with ddpkit.distributed():
        print("joined", flush=True)
        sys.stdin.readline()
        print(ddpkit.all_reduce_mean(1.0), flush=True)


def examine_rank(rank: int, port: int) -> list[Any]:
    return list(doctor("--json", "--timeout", "8", **platform_env(rank, 2, port)))


@pytest.mark.storm
def test_the_doctor_does_not_disturb_a_job_that_runs_with_the_same_variables() -> None:
    """As in a shell that was opened in a pod where the job runs."""
    port = free_port()
    code = "import test_doctor; test_doctor.work_until_told()"
    paths = [CLEAN["PYTHONPATH"], f"{ROOT}/tests", f"{ROOT}/tests/tools"]
    env = {**CLEAN, "PYTHONPATH": os.pathsep.join(paths)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    job = [
        subprocess.Popen([sys.executable, "-c", code], env=env | platform_env(rank, 2, port), **pipes)
        for rank in range(2)
    ]
    assert job[0].stdout and job[0].stdout.readline() == b"joined\n"
    first, second = examine_rank(0, port), examine_rank(1, port)
    assert first[0] == second[0] == 1
    assert failed(first[1]) == ["ports"] and f"process {job[0].pid} (" in found(first[1])["ports"]["found"]
    assert f"Another job meets at 127.0.0.1:{port}" in second[2]
    for process in job:
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=600)[0] for process in job]
    assert [process.returncode for process in job] == [0, 0]
    assert outputs == [b"1.0\n", b"joined\n1.0\n"]  # rank 0's first line has been read


def in_child(probe: Any, core: int, pipe: Any) -> None:
    os.sched_setaffinity(0, {core})
    pipe.send(probe())


def probed(probe: Any, core: int) -> Check:
    """What a probe finds in a process that may use one core."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(probe, core, theirs))
    child.start()
    check: Check = mine.recv()
    child.join()
    return check


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_process_tied_to_one_core_is_a_warning() -> None:
    check = probed(checks.cores, min(os.sched_getaffinity(0)))
    assert check.status == "warning" and "mpirun --bind-to none" in check.remedy


@pytest.mark.parametrize(("text", "quota"), [("150000 100000", 1.5), ("50000 100000", 0.5), ("max 100000", None)])
def test_the_limit_of_a_container_is_read(text: str, quota: float | None, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "cpu.max"
    assert checks.cpu_quota(file) is None
    file.write_text(f"{text}\n")
    assert checks.cpu_quota(file) == quota
    monkeypatch.setattr(checks, "cpu_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert checks.cores().status == ("warning" if quota and quota < len(os.sched_getaffinity(0)) else "ok")


@pytest.mark.parametrize(
    ("names", "status", "words"),
    [("lo,nosuch0", "failed", "there is no nosuch0"), ("lo", "warning", "but other nodes cannot reach it")],
)
def test_a_variable_that_names_no_interface_fails(names: str, status: str, words: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    check = checks.interface()
    assert check.status == status and words in check.found


@pytest.mark.parametrize(("text", "free"), [("0", False), ("http", False), ("70000", False), ("23999", True)])
def test_a_port_that_is_none_is_refused(text: str, free: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_PORT", text)
    check = checks.ports(None, True)
    assert (check.status == "failed") != free and text in check.found


def test_the_ranks_reports_become_one_that_says_each_thing_once() -> None:
    on_a, on_b = {"host": "a"}, {"host": "b"}
    well, ill = {"shm": Check("ok", "23 GiB free")}, {"shm": Check("warning", "64 MiB free", "--shm-size")}
    (check,) = merge({0: (on_a, well), 1: (on_a, well), 2: (on_b, well)}).values()
    assert check == Check("ok", "23 GiB free", details=[])
    (check,) = merge({0: (on_a, well), 1: (on_a, well), 2: (on_b, ill)}).values()
    assert (check.status, check.found, check.remedy) == ("warning", "rank 2 (b): 64 MiB free", "--shm-size")
    assert check.details == ["ranks 0, 1 (a): 23 GiB free"]
    only_there = merge({0: (on_a, well), 2: (on_b, {"extra": Check("failed", "x", "y")})})
    assert [(name, one.status) for name, one in only_there.items()] == [("shm", "ok"), ("extra", "failed")]
    many = {rank: (on_a, {"ports": Check("ok", f"port {rank}")}) for rank in range(40)}
    details = merge(many)["ports"].details
    assert len(details) == 17 and "23 more" in details[-1]


def place(rank: int, host: str, **versions: str) -> dict[str, Any]:
    both = {"torch": "2.13.0", "python": "3.11.7"} | versions
    return {"rank": rank, "host": host, "pid": 1, "node_rank": 0, "local_rank": 0, "device": "cpu", "versions": both}


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    everybody = [place(0, "a"), place(1, "a"), place(2, "b")]
    assert same_versions(everybody).status == "ok"
    check = same_versions([*everybody, place(3, "b", torch="2.12.1"), place(4, "b", NCCL="2.27.5")])
    assert check.status == "failed" and check.found == "the ranks differ in torch, NCCL"
    assert check.details == [
        "torch: 2.13.0 on ranks 0, 1, 2, 4; 2.12.1 on rank 3",
        "NCCL: missing on ranks 0, 1, 2, 3; 2.27.5 on rank 4",
    ]
    assert roll_call(everybody).found == "3 ranks on 2 hosts"


GARBAGE = [
    b"",
    b"a word",
    b"\x80\x04",
    b"[]",
    b"{}",
    b"7",
    b'{"record": {}, "checks": {}}',
    b"[" * 10_000,
]
ODD_CHECK = Check("well", "b")
ODD = [
    {"record": place(0, "a"), "checks": {"a": ODD_CHECK}},
    {"record": place(1, "a"), "checks": {}},
]  # of another rank


@pytest.mark.parametrize("garbage", [*GARBAGE, *(json.dumps(odd).encode() for odd in ODD)])
def test_what_a_stranger_wrote_in_place_of_a_report_is_refused(garbage: bytes) -> None:
    with pytest.raises(LaunchError, match="no rank of this job wrote"):
        read_results(garbage, "report of rank 0", 0)
    report = Report(detect_launch(platform_env(0, 2, 1)), 60.0, Check("ok", "x"))
    store = dist.HashStore()
    store.set(f"{MARK}/1/1", garbage.decode("latin-1"))
    if garbage != json.dumps(ODD[1]).encode():
        with pytest.raises(LaunchError, match=f"under '{MARK}/1/1', which no rank of this job wrote"):
            report.share(store)


def on_terminal(columns: int, monkeypatch: Any) -> str:
    """A report as a terminal of so many columns gets it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", f"{columns}")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        text = render("title", {"shm": Check("failed", "full [bold]of[/bold] batches " * 3, "empty it")})
    os.close(leader)
    return text


def unpainted(text: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", text)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_it_wants_none(no_color: str, coloured: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    text = on_terminal(80, monkeypatch)
    assert ("\033[31m" in text) == coloured and "failed   shm" in text and "-> empty it" in text


def test_a_report_fits_into_the_terminal_and_loses_nothing(monkeypatch: Any) -> None:
    lines = unpainted(on_terminal(60, monkeypatch)).splitlines()
    assert max(map(len, lines)) <= 60
    words = " ".join(lines).split()
    assert words.count("[bold]of[/bold]") == 3 and words[-3:] == ["1", "failed", "(shm)"]


@pytest.mark.storm
def test_an_encoding_without_a_letter_gets_its_number() -> None:
    process = start("--device", "cpu", PYTHONIOENCODING="ascii", GLOO_SOCKET_IFNAME="Büro")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "there is no B\\xfcro" in out


def hang(report: Report, args: Any) -> None:
    report.begin("collective", "hanging")
    print("noise")
    time.sleep(200)


def get_stuck() -> None:
    tool._BEYOND_TIMEOUT = 0.5
    tool._check_machine = hang
    sys.exit(cli.main(["doctor", "--json", "--timeout", "0.5"]))


def test_checks_that_never_end_are_reported_and_ended() -> None:
    (ended,) = run(get_stuck, [{}], timeout=600)
    out = ended.output[ended.output.index("{\n") :]
    assert ended.code == 1 and failed(out) == ["collective"]
    assert "did not finish within 1 s" in found(out)["collective"]["found"]


def examine_for_nobody() -> None:
    """As in `python -m ddpkit doctor | head -3`."""
    tool.spawn = meet  # type: ignore[assignment]
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os._exit(cli.main(["doctor", "--device", "cpu"]))


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    (ended,) = run(examine_for_nobody, [{}], timeout=600)
    assert ended.code == 141 and "Traceback" not in ended.output and "BrokenPipe" not in ended.output
