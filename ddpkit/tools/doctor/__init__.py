"""Run `python -m ddpkit doctor`: find out if all is well here.

Without a launcher it checks this machine and lets two processes meet; under one it checks the job
that was launched. It leaves other jobs alone: where somebody else holds the master's port it says
so and does not join.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ... import Context, Launch, LaunchError, distributed, spawn
from ...collectives.differences import first_of, name_ranks
from ...errors import DdpkitError, describe_error
from ...job.device import count_accelerators
from ...job.job import checked_backend, checked_device
from ...job.joining import offer_store
from ...launch.launch import MPI_AND_SLURM
from ...launch.process_tree import unnested_launch
from ...parsing import parse, refuse_text
from ...rendezvous.store import find_master, open_store, polls, store_outlives_ranks
from ..cli import announce, checked_by, count, paint, positive_seconds, show, wrap
from . import checks
from .checks import Check

_NCCL_ENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
_MARK_WAIT = 5.0  # seconds in which rank 0 of a doctor's job marks its store
_BEYOND_TIMEOUT = 20.0  # seconds beyond the time-out after which the process ends, wherever it stands
_NOTICE = 5.0  # seconds from a launcher's signal to the report; torchrun kills after 30
_POLL = 0.05  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object to stdout and nothing else")
    add(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="bound on the ranks' meeting (default 60)",
    )
    add(
        "--backend",
        type=checked_by(checked_backend),
        help="as setup(backend=...) takes it, for example gloo (default: the one that suits)",
    )
    add(
        "--device",
        type=checked_by(checked_device),
        help="as setup(device=...) takes it, for example cpu (default: the accelerator)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and print the report; return 1 if any failed, else 0."""
    job, first = read_launch()
    is_refused = first.status == "failed"
    if is_refused and _is_a_task():  # each would report the same machine
        show(f"ddpkit doctor: launch: {first.found} {first.remedy}", on_stderr=True)
        time.sleep(5)  # for rank 0 to report, before the launcher ends all
        return 1
    report = Report(job, args.timeout, first)

    def check() -> None:
        try:
            if job is not None:
                _check_job(report, job, args)
            elif not (is_refused and "TORCHELASTIC_RUN_ID" in os.environ):  # torchrun ends all ranks soon
                _check_machine(report, args)
        except Exception as error:
            report.fail(error)

    return _report_in_time(report, check, args.json)


def _report_in_time(report: Report, check: Callable[[], None], as_json: bool) -> int:
    """Run the checks in a thread, and print the report, alone on stdout, also if they never end; return the exit code.

    Rank 0 outlives SIGTERM for a while: torchrun sends it when another rank ends with an error.
    """
    seconds = report.timeout + _BEYOND_TIMEOUT
    deadline = time.monotonic() + seconds
    reason = f"The check did not finish within {seconds:g} s."

    def on_sigterm(number: int, frame: object) -> None:
        nonlocal deadline, reason
        deadline = min(deadline, time.monotonic() + _NOTICE)
        reason = "The check did not finish before the launcher's signal: another rank has failed."

    if report.launch is not None and report.rank == 0:
        signal.signal(signal.SIGTERM, on_sigterm)
    stdout = os.dup(1)
    os.dup2(2, 1)  # C++ code may print, too
    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_POLL)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    if thread.is_alive():
        report = report.copy()  # the thread may still add results
        report.fail(LaunchError(reason))
    code = print_report(report, as_json)
    if thread.is_alive():
        os._exit(code)
    return code


def read_launch() -> tuple[Launch | None, Check]:
    """Read the launch that the environment describes, without telling other processes.

    Returns:
        The launch, None if it is refused or one process that nobody else can meet; and the check that says so.
    """
    try:
        launch, warning = unnested_launch()
    except LaunchError as error:
        found, start, rest = str(error).partition(". Start ")
        remedy = f"Start {rest}" if start else "See what is an error in the guide to launching."
        return None, Check("failed", found, remedy)
    job = launch if launch.world_size > 1 or launch.master_addr else None
    if warning:
        remedy = "Start the doctor as the ranks are started; srun needs --overlap inside of a step."
        return job, Check("warning", warning, remedy)
    found = f"{launch.kind}: rank {launch.rank} of {launch.world_size}"
    if launch.local_rank is not None:
        found += f", local rank {launch.local_rank}"
    if launch.local_world_size:
        found += f" of {launch.local_world_size}"
    return job, Check("ok", found, details=launch.evidence)


def _is_a_task() -> bool:
    """Return true if a launcher has started this process beside a first one."""
    names = [launcher.needs["rank"] for launcher in MPI_AND_SLURM]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.append("RANK")
    return any(os.environ.get(name, "0").strip() not in ("", "0") for name in names)


def _check_here(report: Report, checks_port: bool) -> None:
    """Run the checks that need no other process.

    Args:
        report: Takes the results.
        checks_port: True if rank 0 is about to listen here.
    """
    launch = report.launch
    report.attempt("versions", checks.versions)
    report.begin("devices", "looking at the devices")
    report.attempt("devices", checks.devices, launch is None)
    report.begin("interface", "resolving the host's name")
    report.attempt("interface", checks.interface)
    if launch is None or checks_port:
        report.attempt("ports", checks.ports, launch.master_port if launch else None, checks_port)
    report.attempt("shm", checks.shared_memory)
    report.attempt("cores", checks.cores)


def _check_machine(report: Report, args: argparse.Namespace) -> None:
    """Check this machine, and let two processes meet on it."""
    master = os.environ.get("MASTER_ADDR", "").strip()
    _check_here(report, checks_port=not master or any(map(checks.is_local, checks.resolve(master))))
    if report.checks["interface"].status == "failed":
        return  # processes cannot connect to each other
    device = args.device
    if device is None and count_accelerators() < 2:
        device = "cpu"
    report.begin("collective", f"two processes meet and average numbers (at most {args.timeout:g} s)")
    bound = report.time_left()
    mean, _ = spawn(checks.two_ranks, 2, args.backend, device, bound, timeout=bound + timedelta(seconds=10))
    report.add(mean._replace(found=f"two processes on {device or 'two accelerators'}: {mean.found}"))


def _check_job(report: Report, launch: Launch, args: argparse.Namespace) -> None:
    """Check the job that was launched, on every rank. Collective, as far as ranks come."""
    hosts_store = launch.rank == 0 and not store_outlives_ranks(launch)
    checks_port = hosts_store and launch.master_port is not None
    _check_here(report, checks_port)
    if checks_port and report.checks["ports"].status == "failed":
        report.skip_rest("rank 0 cannot listen at its port")
        return
    ranks = count(launch.world_size, "rank")
    address = "of the launcher"
    if launch.master_addr:
        address = f"at {launch.master_addr}:{launch.master_port}"
    report.begin("master", f"opening the store {address}")
    store = _open_store(report, launch, hosts_store)
    report.begin("join", f"waiting for {ranks} (at most {args.timeout:g} s)")
    report.share(store)
    for name in _NCCL_ENDS:  # NCCL would end the process before it can report
        os.environ.setdefault(name, "0")
    with distributed(
        backend=args.backend,
        device=args.device,
        timeout=report.time_left(),
        watch=False,  # it, too, ends a process that is stuck
    ) as context:
        report.add(Check("ok", f"{ranks} over {context.backend or 'no backend'}"))
        _check_together(report, context, store)


def _check_together(report: Report, context: Context, store: dist.Store) -> None:
    """Run the checks of the joined job, and share all results, so that all exit alike."""
    report.begin("ranks", "asking every rank where it is")
    own = {"node_rank": context.node_rank, "local_rank": context.local_rank, "device": str(context.device)}
    report.record.update(own)
    report.share(store)
    report.places = [record for record, _ in report.ranks.values()]
    report.add(checks.roll_call(report.places))
    report.checks["same versions"] = checks.same_versions(report.places)
    report.begin("mean", "averaging numbers")
    report.add(checks.mean())
    report.begin("report", "gathering the ranks' findings")
    report.share(store)


def _open_store(report: Report, launch: Launch, hosts_store: bool) -> dist.Store:
    """Open the store that `setup()` will use, unless it is another job's.

    To join that one would end it: a number would be claimed twice.
    """
    address, port = launch.master_addr, launch.master_port
    if address and port:
        store: dist.Store = open_store(address, port, hosts_store, report.time_left())
    else:
        store, address, port = find_master(launch, report.time_left())
    if hosts_store:
        store.set(MARK, "")
    elif not store_outlives_ranks(launch):
        _await_mark(store, report, f"{address}:{port}")
    offer_store(launch, store, address, port)
    role = "this rank hosts the store" if hosts_store else "reached"
    addresses = ", ".join(checks.resolve(address))
    report.add(Check("ok", f"{address}:{port} ({addresses}), {role}"))
    return store


def _await_mark(store: dist.Store, report: Report, address: str) -> None:
    """Wait for the mark with which a doctor's rank 0 says that the store is its own."""
    deadline = time.monotonic() + min(_MARK_WAIT, report.time_left().total_seconds())
    while not store.check([MARK]):
        if time.monotonic() > deadline:
            raise LaunchError(f"Another job meets at {address}; the doctor leaves it alone.")
        time.sleep(0.02)


# Collect the results of checks, those of this process and of the job's other ranks.

Record = dict[str, Any]
MARK = "ddpkit/doctor"  # in the store of a doctor's job
_COLOURS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "red"}
STATUSES = tuple(_COLOURS)  # from good to bad
_MANY_LINES = 16  # of details; a job has more ranks than a terminal has lines
_MANY_HOSTS = 4
_RECORD = {  # fields of a rank's record, and their types
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_CHECKS = dict[str, tuple[str, str, str, tuple[str, ...]]]  # as JSON has them
_OF_A_JOB = ("master", "join", "ranks", "same versions", "mean")
_REMEDIES = {
    "master": (
        "Set MASTER_ADDR to a name or address of rank 0's host that every node reaches, "
        "MASTER_PORT to a port that is free there and open in the firewall, and start rank 0."
    ),
    "join": (
        "Start every rank with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and look at the "
        "output of the missing ones. If a connection failed, see interface above."
    ),
}
_OTHER_REMEDY = (
    "If it is about a connection, see interface above. If --backend gloo or --device cpu helps, "
    "the accelerators' backend fails: set NCCL_DEBUG=INFO for details."
)


class Report:
    """A report in the making.

    Args:
        launch: Of the job to examine; None for this machine.
        timeout: Bound on the meeting of the ranks, in seconds.
        first: The result of the first check.

    Attributes:
        rank: This process's rank, 0 without a job.
        record: A description of this rank.
        checks: The results of this process, by name.
        ranks: The record and the results of this and each other rank, as far as they are known.
        places: The records of all ranks, once they have joined.
        doing: The name of the check that runs now.
    """

    def __init__(self, launch: Launch | None, timeout: float, first: Check) -> None:
        self.launch = launch
        self.timeout = timeout
        self.rank = launch.rank if launch else 0
        self.world_size = launch.world_size if launch else 1
        self.doing = "launch"
        self.record: Record = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node_rank": -1,  # not known before the ranks have joined
            "local_rank": -1,
            "device": "",
            "versions": checks.installed(),
        }
        self.checks = {"launch": first}
        self.ranks = {self.rank: (self.record, self.checks)}
        self.places: list[Record] = []
        self._deadline = time.monotonic() + timeout
        self._shared = 0

    def time_left(self) -> timedelta:
        """Return the rest of the time-out, in whole seconds, at least one."""
        return timedelta(seconds=max(1, math.ceil(self._deadline - time.monotonic())))

    def begin(self, name: str, text: str) -> None:
        """Note the name of the check that begins and would fail, and tell the person what it does."""
        self.doing = name
        if self.rank == 0:
            announce(text)

    def add(self, check: Check) -> None:
        """Add the result of the check that runs now."""
        self.checks[self.doing] = check

    def attempt(self, name: str, probe: Callable[..., Check], *args: Any) -> None:
        """Run a check; if it cannot run, report that as its result."""
        self.doing = name
        try:
            self.add(probe(*args))
        except Exception as error:
            self.add(Check("skipped", f"cannot be checked here: {describe_error(error)}"))

    def copy(self) -> Report:
        """Return a report with the same results, to which the checks add nothing."""
        found = copy.copy(self)
        found.checks = dict(self.checks)
        found.ranks = {**self.ranks, self.rank: (self.record, found.checks)}
        return found

    def fail(self, error: Exception) -> None:
        """Add the failure of the check that runs now: the error's first line, and its last ones as details."""
        text = str(error) if isinstance(error, DdpkitError) else describe_error(error)
        found, *rest = text.strip().splitlines()
        self.add(Check("failed", found, _REMEDIES.get(self.doing, _OTHER_REMEDY), rest[-_MANY_LINES:]))
        self.skip_rest(f"{self.doing} failed")

    def skip_rest(self, reason: str) -> None:
        """Mark as skipped all checks of a job that have not run."""
        for name in _OF_A_JOB if self.launch else ():
            self.checks.setdefault(name, Check("skipped", reason))

    def share(self, store: dist.Store) -> None:
        """Exchange results with the other ranks in the store, so that rank 0 reports them even if ranks cannot join.

        Raises:
            LaunchError: If ranks do not come in time; it names them. If the store has gone.
        """
        deadline = self._deadline
        if self._shared:  # all have joined; what came since may have taken long
            deadline = time.monotonic() + self.timeout
        self._shared += 1
        keys = [f"{MARK}/{self._shared}/{rank}" for rank in range(self.world_size)]
        try:
            store.set(keys[self.rank], json.dumps({"record": self.record, "checks": self.checks}))
            for _ in polls(deadline - time.monotonic()):
                if store.check(keys):
                    break
            texts = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
        except RuntimeError as error:
            raise LaunchError("The store is closed, because rank 0 has ended: see its report.") from error
        others = {rank: text for rank, text in texts.items() if rank != self.rank}
        self.ranks |= {rank: read_results(text, keys[rank], rank) for rank, text in others.items()}
        missing = [rank for rank in range(len(keys)) if rank not in texts]
        if missing:
            raise LaunchError(
                f"{name_ranks(missing).capitalize()} of {len(keys)} did not come within {self.timeout:g} s. "
                "Check that each one is running, with this MASTER_ADDR and MASTER_PORT."
            )


def read_results(text: bytes | str, key: str, rank: int) -> tuple[Record, dict[str, Check]]:
    """Read another rank's record and results, which came from this key of the store.

    Raises:
        LaunchError: If that rank did not write them.
    """
    results = parse(text, key, {"record": _RECORD, "checks": _CHECKS})
    found = {name: Check(*fields) for name, fields in results["checks"].items()}
    if results["record"]["rank"] != rank or not {check.status for check in found.values()} <= {*STATUSES}:
        refuse_text(text, key)
    return results["record"], found


# Merge the results of a job's ranks, and print them for people or as JSON.

SCHEMA = 2  # of the JSON object; raised when a field changes its meaning or goes away


def print_report(report: Report, as_json: bool) -> int:
    """Print the report; rank 0 does for all if it has heard of them. Return the exit code."""
    results = merge(report.ranks)
    host = report.record["host"]
    if report.rank == 0 and as_json:
        print(_as_json(report, results), flush=True)
    elif report.rank == 0:
        subject = f"the job of {count(report.world_size, 'rank')}" if report.launch else f"this machine, {host}"
        show(render(f"ddpkit doctor: {subject}", results))
    elif 0 not in report.ranks:  # rank 0 cannot speak for this one
        for name, check in results.items():
            if check.status == "failed":
                where = f"rank {report.rank} ({host})"
                show(f"ddpkit doctor: {where}: {name}: {check.found} {check.remedy}", on_stderr=True)
    return int(worst(results.values()).status == "failed")


def worst(results: Collection[Check]) -> Check:
    """Return the first of the results with the worst status."""
    return max(results, key=lambda check: STATUSES.index(check.status))


def merge(ranks: Mapping[int, tuple[Record, dict[str, Check]]]) -> dict[str, Check]:
    """Merge the results of a job's ranks, so that a common finding is said once."""
    hosts = {rank: record["host"] for rank, (record, _) in ranks.items()}
    merged = {}
    for name in dict.fromkeys(name for _, results in ranks.values() for name in results):
        of_ranks = {rank: results[name] for rank, (_, results) in ranks.items() if name in results}
        ranks_with: dict[str, list[int]] = {}
        for rank, check in of_ranks.items():
            ranks_with.setdefault(check.found, []).append(rank)
        texts = {}
        for found, those in ranks_with.items():
            names = first_of(list(dict.fromkeys(hosts[rank] for rank in those)), _MANY_HOSTS)
            texts[found] = f"{name_ranks(those)} ({', '.join(names)}): {found}"
        check = worst(of_ranks.values())
        text = texts.pop(check.found)
        if texts and check.status != "ok":
            check = check._replace(found=text)
        shown = first_of([*texts.values()], _MANY_LINES)
        merged[name] = check._replace(details=[*check.details, *shown])
    return merged


def _as_json(report: Report, results: dict[str, Check]) -> str:
    fields = {
        "schema": SCHEMA,
        "scope": "job" if report.launch else "machine",
        "status": worst(results.values()).status,
        "host": report.record["host"],
        "world_size": report.world_size,
        "versions": report.record["versions"],
        "checks": [{"name": name, **check._asdict()} for name, check in results.items()],
        "ranks": report.places,
    }
    return json.dumps(fields, indent=2)


def render(title: str, results: dict[str, Check]) -> str:
    """Write a report for stdout: aligned, and coloured on a terminal."""
    lines = [paint(title, "bold"), ""]
    name_width = max(map(len, results))
    for name, check in results.items():
        head = f"{check.status:<9}{name:<{name_width}}  "
        texts = [check.found, *check.details]
        if check.remedy:
            texts.append(f"-> {check.remedy}")
        first, *more = wrap(texts, len(head))
        lines.append(paint(head, _COLOURS[check.status]) + first)
        lines += [" " * len(head) + line for line in more]
    return "\n".join([*lines, "", paint(tally(results), _COLOURS[worst(results.values()).status])])


def tally(results: dict[str, Check]) -> str:
    """Count the checks of each status, and name the bad ones: "2 ok, 1 failed (ports)"."""
    parts = []
    for status in STATUSES:
        names = [name for name, check in results.items() if check.status == status]
        number = count(len(names), status) if status == "warning" else f"{len(names)} {status}"
        if names and status == "ok":
            parts.append(number)
        elif names:
            parts.append(f"{number} ({', '.join(names)})")
    return ", ".join(parts)
