"""Check this machine and the job: versions, devices, limits, the network, and what the ranks compute together."""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from ... import LaunchError, all_reduce_mean, distributed, get_device, get_rank, get_world_size
from ...collectives.differences import differing_parts
from ...job.device import MASKS, choose_device, count_accelerators, default_backend
from ...job.lifecycle import check_torch
from ...launch import detection
from ...rendezvous.members import usable_cores
from ...rendezvous.sockets import LOOPBACKS
from ..cli import count, table

_GIB = 1 << 30
_DRIVERS = {"/proc/driver/nvidia/version": "an NVIDIA", "/dev/kfd": "an AMD"}
_GET_TORCH = "https://pytorch.org/get-started"
_BUSY_DEVICE = "See with nvidia-smi who uses it, or hide it with CUDA_VISIBLE_DEVICES."
_COLUMNS = ("rank", "host", "pid", "node_rank", "local_rank", "device")
_BLOCK = 1 << 18  # float32 elements, 1 MiB: they pass in packets of full size


class Check(NamedTuple):
    """The result of one check, which is one line of the report.

    Attributes:
        status: "ok", "skipped", "warning" or "failed".
        found: The finding, in one sentence.
        remedy: Advice; "" where there is nothing to do.
        details: More lines of the finding.
    """

    status: str
    found: str
    remedy: str = ""
    details: Sequence[str] = ()


def set_variables(*names: str) -> str:
    """Write those of these environment variables that are set, as "A=1, B=2"."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def installed() -> dict[str, str]:
    """List by name the versions that must be the same on every rank."""
    found = {
        "ddpkit": str(sys.modules["ddpkit"].__version__),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if dist.is_nccl_available():
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, numbers))
    return found


def versions() -> Check:
    """Check Python, torch and the libraries that torch was built with."""
    found = ", ".join(f"{name} {number}" for name, number in installed().items())
    try:
        check_torch()
    except LaunchError as error:
        return Check("failed", f"{error} ({found})", "pip install --upgrade torch")
    return Check("ok", found)


def devices(look_inside: bool) -> Check:
    """List the accelerator that each local rank would get.

    Args:
        look_inside: Open each, and read its free memory.
    """
    number = count_accelerators()
    if not number:
        return _no_accelerator()
    first = choose_device(None, 0, number)
    status, remedy = "ok", ""
    lines: list[str] = []
    for local_rank in range(number):
        device = choose_device(None, local_rank, number)
        line = f"local rank {local_rank} -> {device}"
        if look_inside and first.type == "cuda":
            try:
                free, total = torch.cuda.mem_get_info(device)
            except RuntimeError as error:
                found = f"{device} cannot be used: {str(error).splitlines()[0]}"
                return Check("failed", found, f"{_BUSY_DEVICE} It may need a reset.", lines)
            line += f" ({torch.cuda.get_device_name(device)}), {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
            if free < 0.8 * total:
                line += ": in use by another process"
                status, remedy = "warning", _BUSY_DEVICE
        lines.append(line)
    backend = default_backend(first, shared=False)
    found = f"{number} x {first.type}, backend {backend}; {set_variables(*MASKS) or 'no device is hidden'}"
    return Check(status, found, remedy, lines)


def _no_accelerator() -> Check:
    found = "no accelerator: every rank computes on the CPU, backend gloo"
    drivers = [name for path, name in _DRIVERS.items() if Path(path).exists()]
    if not drivers:
        return Check("ok", found)
    hidden = set_variables(*MASKS)
    remedy = "Compare the driver with the versions above (nvidia-smi)."
    if not torch.version.cuda and not torch.version.hip:
        remedy = f"This torch is built for the CPU only: install a build for the GPU from {_GET_TORCH}."
    elif hidden:
        remedy = f"Unset it to use them: {hidden}."
    return Check("warning", f"{found}, although {drivers[0]} driver is loaded", remedy)


def shared_memory() -> Check:
    """Check /dev/shm, which carries batches from loader workers, and NCCL's messages on a node."""
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free >= _GIB:
        return Check("ok", found)
    remedy = "Delete what ended jobs left there (ls -l /dev/shm)."
    if usage.total < _GIB:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium Memory there."
    return Check("warning", f"{found}: loader workers may die with a bus error", remedy)


def cores() -> Check:
    """Compare the cores that this process may use with those that torch counts."""
    usable = len(usable_cores())
    total = os.cpu_count() or 1
    quota = cpu_quota()
    limit = f"{quota:g} by the cgroup" if quota else "no cgroup limit"
    threads = set_variables("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = f"{usable} of {total} cores, {limit}; {threads or 'OMP_NUM_THREADS is not set'}"
    if quota and quota < usable and not threads:
        remedy = f"Threads beyond {quota:g} only wait: set OMP_NUM_THREADS to {max(1, int(quota))} / ranks on the node."
        return Check("warning", found, remedy)
    if usable == 1 < total:
        remedy = "The launcher bound it: mpirun --bind-to none, or srun --cpus-per-task=N."
        return Check("warning", f"{found}: tied to one core", remedy)
    return Check("ok", found)


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Read how many cores this container gives its processes, None without a limit."""
    limit, _, period = file.read_text().partition(" ") if file.is_file() else ("max", "", "")
    return None if limit == "max" else int(limit) / int(period)


# Check the network: the interface that a backend would use, and the port.

_DEFAULT_PORT = 29500  # torch's
_LISTENS = "0A"  # in /proc/net/tcp


def interface() -> Check:
    """Check the interface that gloo would use between nodes: can another node reach it?"""
    host = socket.gethostname()
    here = [name for _, name in socket.if_nameindex()]
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError as error:
        found = f"processes here cannot connect to 127.0.0.1: {error}"
        return Check("failed", found, "Bring the loopback interface up: ip link set lo up")
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in named.split(",") if name and name not in here]
    if missing:
        found = (
            f"GLOO_SOCKET_IFNAME={named}, but there is no {', '.join(missing)}; "
            f"the interfaces of {host} are {', '.join(here)}"
        )
        return Check("failed", found, "Name one that every node has, or unset the variable.")
    if named:
        found = f"gloo uses {named} (GLOO_SOCKET_IFNAME)"
        is_reachable = named.split(",")[0] not in LOOPBACKS
    else:
        addresses = resolve(host)
        found = f"{host} resolves to {', '.join(addresses) or 'nothing'}, which gloo uses between nodes"
        own = next(filter(is_local, addresses), "127.0.0.1")
        is_reachable = not ipaddress.ip_address(own.partition("%")[0]).is_loopback
    if is_reachable:
        return Check("ok", found)
    others = " or ".join(name for name in here if name not in LOOPBACKS) or "<interface>"
    remedy = (
        f"For jobs on several nodes, on each: export GLOO_SOCKET_IFNAME={others} (or give {host} its own "
        f"address in /etc/hosts). Where other nodes cannot resolve {host}, torchrun hangs: give it "
        "--local-addr=<address of its node>."
    )
    return Check("warning", f"{found}, but other nodes cannot reach it", remedy)


def resolve(name: str) -> list[str]:
    """Look up the addresses of a host, none if it is unknown."""
    try:
        infos = socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def is_local(address: str) -> bool:
    """Return whether a socket can be bound to this address, which is then one of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def ports(port: int | None, checks_if_free: bool) -> Check:
    """Check that the master's port is free, and safe from outgoing connections.

    Args:
        port: The port of the launch, if there is one.
        checks_if_free: True if it must be free, because rank 0 is about to listen here.
    """
    text = os.environ.get("MASTER_PORT", "").strip()
    named = detection.port(text)
    if port is None and text and not named:
        remedy = "Set it to a number from 1 to 65535."
        return Check("failed", f"MASTER_PORT={text} is no port", remedy)
    number = port or named or _DEFAULT_PORT
    found = f"the port of this launch {number}" if port else f"torch's default port {number}"
    if text:
        found = f"MASTER_PORT {number}"
    if not checks_if_free:
        return Check("ok", f"{found}; only rank 0 needs it to be free")
    reason = _explain_not_free(number)
    if not reason:
        return Check("ok", f"{found} is free")
    remedy = "End it, or give this job another port: export MASTER_PORT=... (torchrun: --master-port, --standalone)."
    status = "failed" if text or port else "warning"
    return Check(status, f"{found} is not free: {reason}", remedy)


def _explain_not_free(port: int) -> str:
    """Say why nobody can listen at this port, "" if one can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:  # without listening: other ranks may already try to connect
                trial.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return f"{_name_holder(port)} listens there"
                if error.errno == errno.EACCES:
                    return "ports below 1024 are for root"
    return ""


def _name_holder(port: int) -> str:
    """Name the process that listens at a port, as far as `/proc` tells."""
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file) in links:
                command = file.parents[1].joinpath("cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {file.parts[2]} ({command.decode(errors='replace').strip()[:60]})"
    return "a process of another user"


def _listening_inodes(port: int) -> set[str]:
    """Find the sockets that listen at a port."""
    inodes = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(path) as file:
            for line in list(file)[1:]:
                _, address, _, state, *rest = line.split()
                if state == _LISTENS and int(address.rpartition(":")[2], 16) == port:
                    inodes.add(rest[5])
    return inodes


# Check a job on several ranks: values, versions, and where each rank is.


def two_ranks(backend: str | None, device: str | None, timeout: timedelta) -> Check:
    """Join a job and run the check for which two processes on one machine suffice."""
    with distributed(backend=backend, device=device, timeout=timeout):
        return mean()


def mean() -> Check:
    """Average one number, and a block of numbers. Collective."""
    rank = get_rank()
    world_size = get_world_size()
    ramp = torch.arange(_BLOCK, device=get_device(), dtype=torch.float32) % 1024
    number = all_reduce_mean(float(rank))
    block = all_reduce_mean(ramp + rank)
    expected = (world_size - 1) / 2
    wrong = int((block != ramp + expected).sum())
    if number == expected and not wrong:
        found = f"the mean of the ranks' numbers is {number:g}, and that of 1 MiB is right"
        return Check("ok", found)
    found = f"the mean of 0 to {world_size - 1} came out as {number:g}, and {wrong} of {_BLOCK} elements are wrong"
    remedy = "Run again with --backend gloo: if that is right, the accelerators' links or driver give wrong values."
    return Check("failed", found, remedy)


def roll_call(records: list[dict[str, Any]]) -> Check:
    """List the ranks, and where each runs."""
    header = [name.replace("_", " ") for name in _COLUMNS]
    rows = [[record[name] for name in _COLUMNS] for record in records]
    hosts = {record["host"] for record in records}
    found = f"{count(len(records), 'rank')} on {count(len(hosts), 'host')}"
    return Check("ok", found, "", table(header, rows))


def same_versions(records: list[dict[str, Any]]) -> Check:
    """Compare the versions that must be the same on every rank."""
    versions = {record["rank"]: record["versions"] for record in records}
    different = differing_parts(versions)
    if not different:
        names = ", ".join(records[0]["versions"])
        return Check("ok", f"{names} are the same on every rank")
    found = f"the ranks differ in {', '.join(different)}"
    remedy = "Install the same on every node, or start all ranks from one environment or image."
    details = [f"{name}: {numbers}" for name, numbers in different.items()]
    return Check("failed", found, remedy, details)
