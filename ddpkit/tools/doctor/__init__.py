"""Run `python -m ddpkit doctor`: find out if all is well here.

Without a launcher it checks this machine and lets two processes meet; under one it checks the job
that was launched. It leaves other jobs alone: where somebody else holds the master's port it says
so and does not join.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ... import Context, Launch, LaunchError, distributed, spawn
from ...job.device import count_accelerators
from ...job.job import checked_backend, checked_device
from ...job.joining import offer_store
from ...join.store import find_master, open_store, store_outlives_ranks
from ...launch.launch import MPI_AND_SLURM
from ...launch.process_tree import unnested_launch
from ..cli import checked_by, count, positive_seconds, show
from . import checks
from .report import MARK, Check, Report, print_report

_NCCL_ENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
_MARK_WAIT = 5.0  # seconds in which rank 0 of a doctor's job marks its store
_BEYOND_TIMEOUT = 20.0  # seconds beyond the time-out after which the process ends, wherever it stands
_NOTICE = 5.0  # seconds from a launcher's signal to the report; torchrun kills after 30
_POLL = 0.05  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    backends = "as setup(backend=...) takes it, for example gloo (default: the one that suits)"
    devices = "as setup(device=...) takes it, for example cpu (default: the accelerator)"
    meeting = "bound on the ranks' meeting (default 60)"
    add("--json", action="store_true", help="print one JSON object to stdout and nothing else")
    add("--timeout", type=positive_seconds, default=60.0, metavar="SECONDS", help=meeting)
    add("--backend", type=checked_by(checked_backend), help=backends)
    add("--device", type=checked_by(checked_device), help=devices)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print the report; return 1 if any failed, else 0."""
    launch, first = read_launch()
    if launch is None and _is_a_task():  # each would report the same machine
        show(f"ddpkit doctor: launch: {first.found} {first.remedy}", on_stderr=True)
        time.sleep(5)  # for rank 0 to report, before the launcher ends all
        return 1
    job = launch
    if launch is not None and launch.world_size == 1 and launch.master_addr is None:
        job = None  # one process that nobody else can meet
    report = Report(job, args.timeout, first)
    ends_soon = launch is None and "TORCHELASTIC_RUN_ID" in os.environ  # refused under torchrun

    def check() -> None:
        try:
            if job is not None:
                _check_job(report, job, args)
            elif not ends_soon:
                _check_machine(report, args)
        except Exception as error:
            report.fail(error)
            report.skip_rest(f"{report.doing} failed")

    return _report_in_time(report, check, args.json)


def _report_in_time(report: Report, check: Callable[[], None], as_json: bool) -> int:
    """Run the checks in a thread, and print the report, alone on stdout, also if they never end; return the exit code.

    Rank 0 outlives SIGTERM for a while: torchrun sends it when another rank ends with an error.
    """
    seconds = report.timeout + _BEYOND_TIMEOUT
    deadline = time.monotonic() + seconds
    reason = f"The check did not finish within {seconds:g} s."

    def hurry(number: int, frame: object) -> None:
        nonlocal deadline, reason
        deadline = min(deadline, time.monotonic() + _NOTICE)
        reason = "The check did not finish before the launcher's signal: another rank has failed."

    if report.launch is not None and report.rank == 0:
        signal.signal(signal.SIGTERM, hurry)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # C++ code may print, too
    try:
        thread = threading.Thread(target=check, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(_POLL)
        sys.stdout.flush()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    if thread.is_alive():
        report.fail(LaunchError(reason))
        print_report(report, as_json)
        os._exit(1)
    return print_report(report, as_json)


def read_launch() -> tuple[Launch | None, Check]:
    """Read the launch that the environment describes, without telling other processes.

    Returns:
        The launch, None if it is refused; and the check that says so.
    """
    try:
        launch, warning = unnested_launch()
    except LaunchError as error:
        found, start, rest = str(error).partition(". Start ")
        remedy = f"Start {rest}" if start else "See what is an error in the guide to launching."
        return None, Check("launch", "failed", found, remedy)
    if warning:
        remedy = "Start the doctor as the ranks are started; srun needs --overlap inside of a step."
        return launch, Check("launch", "warning", warning, remedy)
    found = f"{launch.kind}: rank {launch.rank} of {launch.world_size}"
    if launch.local_rank is not None:
        found += f", local rank {launch.local_rank}"
    if launch.local_world_size:
        found += f" of {launch.local_world_size}"
    return launch, Check("launch", "ok", found, "", list(launch.evidence))


def _check_here(report: Report, checks_ports: bool) -> None:
    """Run the checks that need no other process.

    Args:
        report: Takes the results.
        checks_ports: True if rank 0 is about to listen here.
    """
    launch = report.launch
    report.attempt("versions", checks.versions)
    report.begin("devices", "looking at the devices")
    report.attempt("devices", checks.devices, launch is None)
    report.begin("interface", "resolving the host's name")
    report.attempt("interface", checks.interface)
    if launch is None or checks_ports:
        report.attempt("ports", checks.ports, launch.master_port if launch else None, checks_ports)
    report.attempt("shm", checks.shared_memory)
    report.attempt("cores", checks.cores)


def _check_machine(report: Report, args: argparse.Namespace) -> None:
    """Check this machine, and let two processes meet on it."""
    master = os.environ.get("MASTER_ADDR", "").strip()
    _check_here(report, checks_ports=not master or any(map(checks.is_local, checks.resolve(master))))
    if report.has_failed("interface"):
        report.skip_rest("processes cannot connect to each other")
        return
    device = args.device
    if device is None and count_accelerators() < 2:
        device = "cpu"
    report.begin("collective", f"two processes meet and average numbers (at most {args.timeout:g} s)")
    bound = report.time_left()
    settings = (args.backend, device, bound.total_seconds())
    mean = spawn(checks.two_ranks, 2, *settings, timeout=bound + timedelta(seconds=10))[0]
    found = f"two processes on {device or 'two accelerators'}: {mean.found}"
    report.add(Check("collective", mean.status, found, mean.remedy))


def _check_job(report: Report, launch: Launch, args: argparse.Namespace) -> None:
    """Check the job that was launched, on every rank. Collective, as far as ranks come."""
    hosts_store = launch.rank == 0 and not store_outlives_ranks(launch)
    _check_here(report, checks_ports=hosts_store and launch.master_port is not None)
    if report.has_failed("ports"):
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
        report.add(Check("join", "ok", f"{ranks} over {context.backend or 'no backend'}"))
        _check_together(report, context, store)


def _check_together(report: Report, context: Context, store: dist.Store) -> None:
    """Run the checks of the joined job, and share all results, so that all exit alike."""
    report.begin("ranks", "asking every rank where it is")
    report.record |= {name: getattr(context, name) for name in ("node_rank", "local_rank")}
    report.record["device"] = str(context.device)
    report.share(store)
    report.add(checks.roll_call(report.records))
    report.add(checks.same_versions(report.records))
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
    report.add(Check("master", "ok", f"{address}:{port} ({addresses}), {role}"))
    return store


def _await_mark(store: dist.Store, report: Report, address: str) -> None:
    """Wait for the mark with which a doctor's rank 0 says that the store is its own."""
    deadline = time.monotonic() + min(_MARK_WAIT, report.time_left().total_seconds())
    while not store.check([MARK]):
        if time.monotonic() > deadline:
            raise LaunchError(f"Another job meets at {address}; the doctor leaves it alone.")
        time.sleep(0.02)


def _is_a_task() -> bool:
    """Return true if a launcher has started this process beside a first one."""
    names = [launcher.needs["rank"] for launcher in MPI_AND_SLURM]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.append("RANK")
    return any(os.environ.get(name, "0").strip() not in ("", "0") for name in names)
