"""`python -m ddpkit doctor`: is all well here? Without a launcher it looks at this machine and lets two processes
meet; under one it looks at the job that was launched.

It leaves other jobs alone: where somebody else holds the master's port it says so and does not join.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ...collectives.sync import exchange
from ...errors import LaunchError
from ...launch.launchers import Launch, forgotten_launcher
from ...launch.process_tree import typed_in_terminal
from ...process_group.lifecycle import distributed
from ...process_group.startup import Context, has_agent, offer_store, unnested_launch
from ...process_group.tcp_store import connect, find_master
from ...spawning.spawn import spawn
from . import job_checks, machine_checks, network_checks
from .report import Check, attempt, number_of, worst
from .visit import MARK, Visit, read_report

_TASKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
_NCCL_ENDS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the tool."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object to stdout and nothing else")
    add("--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="bound on the ranks' meeting (default 60)")
    add("--backend", type=_backend, help="as setup(backend=...) takes it, for example gloo (default: what suits)")
    add("--device", type=_device, help="as setup(device=...) takes it, for example cpu (default: the accelerator)")


def run(args: argparse.Namespace) -> int:
    """Makes the checks and prints the report; returns 1 if any failed, else 0."""
    launch, first = read_launch()
    if launch is None and _is_a_task():  # of a refused launch: each would report the same machine
        print(f"ddpkit doctor: launch: {first.found} {first.remedy}", file=sys.stderr)
        time.sleep(5)  # for rank 0 to report, before the launcher ends all
        return 1
    joins = launch is not None and (launch.world_size > 1 or launch.master_addr is not None)
    visit = Visit(args, launch if joins else None, first)
    with visit.kept_stdout():
        if launch or "TORCHELASTIC_RUN_ID" not in os.environ:  # else a refused job of torchrun, which is about to end
            (_job if joins else _machine)(visit)
        return visit.speak()


def read_launch() -> tuple[Launch | None, Check]:
    """The launch that the environment describes, None if it is refused; nobody is told, for nobody is to be stopped."""
    try:
        launch = unnested_launch()
    except LaunchError as error:
        found, start, rest = str(error).partition(". Start ")
        remedy = f"Start {rest}" if start else "See what is an error in the guide to launching."
        return None, Check("launch", "failed", found, remedy)
    evidence = list(launch.evidence)
    if typed_in_terminal(launch, os.environ, os.getpid()):
        found = f"typed into one of {launch.world_size} shells that srun opened, so it runs alone"
        single = Launch("single", 0, 1, 0, 1, 0, 1)
        return single, Check("launch", "warning", found, "Start the ranks with srun --overlap.", evidence)
    if forgotten := forgotten_launcher(launch):
        remedy = "srun python -m ddpkit doctor examines the whole job."
        evidence = [line for line in evidence if not line.endswith(forgotten)]
        return launch, Check("launch", "warning", forgotten, remedy, evidence)
    place = "" if launch.local_rank is None else f", local rank {launch.local_rank}"
    place += f" of {launch.local_world_size}" if place and launch.local_world_size else ""
    found = f"{launch.kind}: rank {launch.rank} of {launch.world_size}{place}"
    return launch, Check("launch", "ok", found, "", evidence)


def _here(visit: Visit, hosts: bool) -> None:
    """The checks that need no other process. The port matters where rank 0 is about to listen on it."""
    launch, add = visit.launch, visit.add
    port = launch.master_port if launch else None
    add(attempt("versions", machine_checks.versions))
    visit.begin("devices", "looking at the devices")
    add(attempt("devices", machine_checks.devices, launch is None))
    visit.begin("interface", "resolving the host's name")
    add(attempt("interface", network_checks.interface))
    if launch is None:
        add(attempt("master", network_checks.master))
    if launch is None or hosts:
        add(attempt("ports", network_checks.ports, port, hosts))
    for name in ("shared_memory", "cores", "memory", "open_files", "locked_memory"):
        add(attempt("shm" if name == "shared_memory" else name.replace("_", " "), getattr(machine_checks, name)))


def _machine(visit: Visit) -> None:
    master = os.environ.get("MASTER_ADDR", "").strip()
    _here(visit, not master or any(map(network_checks.is_local, network_checks.resolve(master))))
    device = visit.args.device
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    several = kind is not None and kind.type != "mps" and torch.accelerator.device_count() > 1
    shared = device is None and kind is not None and kind.type != "mps" and not several
    if shared:  # two processes on one device: over gloo
        device = f"{kind}:0"
    visit.begin("collective", f"two processes meet and average numbers (at most {visit.args.timeout:g} s)")
    try:
        bound = visit.left()
        asked = (visit.args.backend, device, bound.total_seconds())
        (mean, latency), _ = spawn(job_checks.two_ranks, 2, *asked, timeout=bound + timedelta(seconds=10))
    except Exception as error:
        visit.fail(error)
        return
    where = f"two processes on {device or (f'{kind}:0 and {kind}:1' if several else 'the CPU')}"
    text = f"{where}: {mean.found}; {latency.found}"
    notes = ["one accelerator only: shared over gloo; NCCL needs one for each rank"] if shared else []
    remedy = mean.remedy or latency.remedy
    visit.add(Check("collective", worst([mean, latency]), text, remedy, notes, latency.measured))


def _job(visit: Visit) -> None:
    launch = visit.launch
    assert launch is not None
    under_agent = has_agent(launch)
    hosts = launch.rank == 0 and not under_agent
    _here(visit, hosts and launch.master_port is not None)
    ranks = number_of("rank", launch.world_size)
    if any(check.name == "ports" and check.status == "failed" for check in visit.checks):
        visit.skip_rest("rank 0 cannot listen at its port")
        return
    try:
        place = f"at {launch.master_addr}:{launch.master_port}" if launch.master_addr else "where the launcher leads"
        visit.begin("master", f"opening the store {place}")
        visit.store = _open_store(visit, launch, hosts, under_agent)
        visit.post()
        visit.begin("join", f"waiting for {ranks} (at most {visit.args.timeout:g} s)")
        visit.await_posts(launch.world_size)
        for name in _NCCL_ENDS:  # NCCL would end the process before it can report
            os.environ.setdefault(name, "0")
        options = {"backend": visit.args.backend, "device": visit.args.device, "timeout": visit.left()}
        with distributed(**options, watch=False) as context:  # the watch, too, ends a process that is stuck
            visit.add(Check("join", "ok", f"{ranks} over {context.backend or 'no backend'}"))
            _together(visit, context)
    except Exception as error:
        visit.fail(error)
        visit.skip_rest(f"{visit.doing} failed")


def _together(visit: Visit, context: Context) -> None:
    """The checks of the joined job, and everybody's findings on every rank, so that all end with the same code."""
    visit.begin("ranks", "asking every rank where it is")
    visit.places = job_checks.read_places(exchange(json.dumps(job_checks.place(context))))
    visit.hosts = [place["host"] for place in visit.places]
    visit.add(job_checks.roll_call(visit.places))
    visit.add(job_checks.same_versions(visit.places))
    visit.begin("mean", "averaging numbers")
    visit.add(job_checks.mean())
    visit.begin("latency", "timing a small collective")
    visit.add(job_checks.latency())
    visit.begin("clocks", "comparing the clocks")
    visit.add(job_checks.clocks(visit.hosts))
    visit.begin("report", "gathering what the ranks have found")
    reports = exchange(visit.dump())
    visit.peers = {rank: read_report(text, f"report of rank {rank}")[1] for rank, text in enumerate(reports)}


def _open_store(visit: Visit, launch: Launch, hosts: bool, under_agent: bool) -> dist.Store:
    """Opens the store that `setup()` will use, unless it is another job's, which a number claimed twice would end."""
    address, port = launch.master_addr, launch.master_port
    if address and port:
        opened = connect(address, port, hosts, visit.left()), address, port
    else:
        opened = find_master(launch, visit.left())
    store, address, port = opened
    if hosts:
        store.set(MARK, "")
    elif not under_agent:
        end = time.monotonic() + min(5.0, visit.left().total_seconds())
        while not store.check([MARK]):
            if time.monotonic() > end:
                raise LaunchError(f"Another job meets at {address}:{port}; the doctor leaves it alone.")
            time.sleep(0.02)
    offer_store(launch, store, address, port)
    role = "this rank hosts the store" if hosts else "reached"
    visit.add(Check("master", "ok", f"{address}:{port} ({', '.join(network_checks.resolve(address))}), {role}"))
    return store


def _is_a_task() -> bool:
    """Whether a launcher has started this process beside a first one, whatever else its environment says."""
    names = (*_TASKS, *(["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else []))
    return any(os.environ.get(name, "0").strip() not in ("", "0") for name in names)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _device(text: str) -> str:
    try:
        return str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; name one as torch does: cpu, cuda, cuda:0") from None


def _backend(text: str) -> str:
    names = [part.rpartition(":")[2] for part in text.split(",")]
    known = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
    known = [name for name in known if name not in ("undefined", "fake")]  # which carry nothing
    if missing := [name for name in names if name not in known]:
        what = f"{', '.join(missing)!r} is not available"
        raise argparse.ArgumentTypeError(f"{what} in this torch; there is {', '.join(known)}")
    return text
