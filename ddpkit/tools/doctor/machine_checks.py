"""Check this machine: versions, devices, and the limits of the process."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ...collectives.differences import differing_parts
from ...collectives.ops import all_reduce, all_reduce_mean
from ...collectives.sync import barrier
from ...errors import LaunchError
from ...job.current_job import get_device
from ...job.device import MASKS, choose_device, default_backend
from ...job.job import Context
from ...job.launching import check_torch
from ...job.lifecycle import distributed
from ...join.members import usable_cores
from ...launch import ranks
from ...parsing import parse, refuse_text
from ..terminal import count, table
from .report import Check, set_variables

_GIB = 1 << 30
_KIB = 1 << 10
_DRIVERS = {"/proc/driver/nvidia/version": "an NVIDIA", "/dev/kfd": "an AMD"}
_GET_TORCH = "https://pytorch.org/get-started"
_FEW_FILES = 1024


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
    if dist.is_available() and dist.is_nccl_available():
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, numbers))
    return found


def versions() -> Check:
    """Check Python, torch and the libraries that torch was built with."""
    found = ", ".join(f"{name} {number}" for name, number in installed().items())
    try:
        check_torch()
    except LaunchError as error:
        return Check("versions", "failed", f"{error} ({found})", "pip install --upgrade torch")
    if not dist.is_available():
        found = f"this torch is built without torch.distributed ({found})"
        return Check("versions", "failed", found, f"Install a build of torch from {_GET_TORCH}.")
    return Check("versions", "ok", found)


def devices(look_inside: bool) -> Check:
    """List the accelerator that each local rank would get.

    Args:
        look_inside: Open each, and read its free memory.
    """
    kind = None
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
    if kind is None:
        return _no_accelerator()
    module = getattr(torch, kind.type)
    count = int(module.device_count())
    lines = []
    problems = []
    for local_rank in range(count):
        device = choose_device(None, local_rank, count)
        line = f"local rank {local_rank} -> {device}"
        try:
            if look_inside:
                line += _look_inside(module, device)
            lines.append(line)
        except RuntimeError as error:
            problems.append(f"{device} cannot be used: {str(error).splitlines()[0]}")
    if problems:
        remedy = "See with nvidia-smi whether another process fills the device or it needs a "
        remedy += "reset; hide it with CUDA_VISIBLE_DEVICES."
        return Check("devices", "failed", "; ".join(problems), remedy, lines)
    backend = default_backend(torch.device(kind.type, 0), shared=False)
    hidden = set_variables(*MASKS) or "no device is hidden"
    found = f"{count} x {kind.type}, backend {backend}; {hidden}"
    if any("in use" in line for line in lines):
        remedy = "See with nvidia-smi who uses it, or hide it with CUDA_VISIBLE_DEVICES."
        return Check("devices", "warning", found, remedy, lines)
    return Check("devices", "ok", found, "", lines)


def _no_accelerator() -> Check:
    found = "no accelerator: every rank computes on the CPU, backend gloo"
    drivers = [name for path, name in _DRIVERS.items() if Path(path).exists()]
    if not drivers:
        return Check("devices", "ok", found)
    found += f", although {drivers[0]} driver is loaded"
    hidden = set_variables(*MASKS)
    if not torch.version.cuda and not torch.version.hip:
        build = f"install a build for the GPU from {_GET_TORCH}"
        remedy = f"This torch is built for the CPU only: {build}."
    elif hidden:
        remedy = f"Unset it to use them: {hidden}."
    else:
        remedy = "Compare the driver with the versions above (nvidia-smi)."
    return Check("devices", "warning", found, remedy)


def _look_inside(module: object, device: torch.device) -> str:
    """Open a device and write its name and, for CUDA, its free memory."""
    name = getattr(module, "get_device_name", str)(device)
    if device.type != "cuda":
        return f" ({name})"
    free, total = torch.cuda.mem_get_info(device)
    text = f" ({name}), {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    if free < 0.8 * total:
        text += ": in use by another process"
    return text


def shared_memory() -> Check:
    """Check /dev/shm, which carries batches from loader workers, and NCCL's messages on a node."""
    if not Path("/dev/shm").is_dir():
        return Check("shm", "skipped", "there is no /dev/shm on this system")
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free >= _GIB:
        return Check("shm", "ok", found)
    found += ": loader workers may die with a bus error"
    if usage.total >= _GIB:
        remedy = "Delete what ended jobs left there (ls -l /dev/shm)."
    else:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of "
        remedy += "medium Memory at /dev/shm."
    return Check("shm", "warning", found, remedy)


def cores() -> Check:
    """Compare the cores that this process may use with those that torch counts."""
    usable = len(usable_cores())
    total = os.cpu_count() or 1
    quota = cpu_quota()
    limit = f"{quota:g} by the cgroup" if quota else "no cgroup limit"
    threads = set_variables("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = f"{usable} of {total} cores, {limit}; {threads or 'OMP_NUM_THREADS is not set'}"
    if quota and quota < usable:
        if threads:
            return Check("cores", "ok", found)
        remedy = f"Threads beyond {quota:g} only wait: set OMP_NUM_THREADS to "
        remedy += f"{max(1, int(quota))} / ranks on the node."
        return Check("cores", "warning", found, remedy)
    if usable == 1 < total:
        remedy = "The launcher bound it: mpirun --bind-to none, or srun --cpus-per-task=N."
        return Check("cores", "warning", f"{found}: tied to one core", remedy)
    return Check("cores", "ok", found)


def memory() -> Check:
    """Check the memory of the machine and of the cgroup, and the kernel's kills for lack of it."""
    free = _read_meminfo("MemAvailable")
    total = _read_meminfo("MemTotal")
    limit = memory_limit()
    found = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    if limit is not None and limit < total:
        found += f"; the cgroup allows {limit / _GIB:.1f} GiB"
    else:
        found += "; no cgroup limit"
    killed = oom_kills()
    if killed:
        found += f"; the kernel killed {killed} processes of this cgroup for it"
        remedy = "A rank that ended with SIGKILL may be one of them: ask for more memory, or use "
        return Check("memory", "warning", found, f"{remedy}fewer loader workers.")
    if min(free, limit or free) < _GIB:
        remedy = "A rank takes about 0.3 GiB before it loads anything: ask for more memory or "
        return Check("memory", "warning", found, f"{remedy}start fewer ranks.")
    return Check("memory", "ok", found)


def _read_meminfo(name: str) -> int:
    """Read a field of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, amount = line.partition(":")
        if field == name:
            return int(amount.split()[0]) * _KIB
    raise KeyError(name)


def open_files() -> Check:
    """Check the limit of open files: each connection and each batch from a loader worker is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = _write_limit(soft)
    if soft != hard:
        found += f", may be raised to {_write_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Check("open files", "ok", found)
    enough = _write_limit(hard) if hard > soft else "65536"
    remedy = f"ulimit -n {enough} in front of the launcher, or LimitNOFILE= of its service."
    found += ': loaders fail with "Too many open files"'
    return Check("open files", "warning", found, remedy)


def locked_memory() -> Check:
    """Check the limit of memory that is not swapped out, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = _write_limit(soft, _KIB)
    cards = Path("/sys/class/infiniband")
    if not cards.is_dir() or not any(cards.iterdir()):
        found = f"{limit} KiB; it matters with InfiniBand only, and there is none"
        return Check("locked memory", "ok", found)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    remedy = "ulimit -l unlimited in front of the launcher (docker run --ulimit memlock=-1; "
    remedy += "LimitMEMLOCK= of slurmd)."
    found = f"{limit} KiB: NCCL may not open InfiniBand"
    return Check("locked memory", "warning", found, remedy)


def cpu_quota() -> float | None:
    """Read how many cores the cgroups of this process give it, None without a limit."""
    limits = []
    for folder in _cgroups("cpu"):
        words = _words(folder / "cpu.max")
        if not words:  # the older kind
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit():
            quota, period = map(int, words)
            limits.append(quota / period)
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Read how many bytes the cgroups of this process allow, None without a limit."""
    limits = []
    for folder in _cgroups("memory"):
        words = _words(folder / "memory.max") + _words(folder / "memory.limit_in_bytes")
        limits += [int(word) for word in words if word.isdigit()]
    return min(limits, default=None)


def oom_kills() -> int:
    """Count the processes of this very cgroup that the kernel has killed for memory."""
    folder = next(_cgroups("memory"), Path("/"))
    words = _words(folder / "memory.events") + _words(folder / "memory.oom_control")
    if "oom_kill" not in words:
        return 0
    return int(words[words.index("oom_kill") + 1])


def _cgroups(controller: str) -> Iterator[Path]:
    """List the folders of this process's cgroup and of those above it.

    The older kind of cgroups has a tree for each controller.
    """
    mount = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        inner = mount / controllers / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mount) and folder.is_dir():
                yield folder


def _words(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return path.read_text().split()


def _write_limit(value: int, unit: int = 1) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value // unit)


# Check a job on several ranks: values, latency, versions, and a record of each rank.

_RECORD = {
    **dict.fromkeys(("rank", "pid", "node_rank", "local_rank"), int),
    **dict.fromkeys(("host", "device"), str),
    "versions": dict[str, str],
}
_COLUMNS = ("rank", "host", "pid", "node_rank", "local_rank", "device")
_WARM_UP = 10  # calls that are not counted
_TIMED = 50  # calls that are
_BLOCK = 1 << 18  # float32 elements, 1 MiB: they pass in packets of full size
_SLOW = 20e-3  # seconds; a small collective takes 0.1 to 1 ms, on several nodes up to a few


def two_ranks(backend: str | None, device: str | None, seconds: float) -> list[Check]:
    """Join a job and run the checks for which two processes on one machine suffice."""
    with distributed(backend=backend, device=device, timeout=timedelta(seconds=seconds)):
        return [mean(), latency()]


def mean() -> Check:
    """Average one number, and a block of numbers. Collective."""
    rank = ranks.get_rank()
    world_size = ranks.get_world_size()
    ramp = torch.arange(_BLOCK, device=get_device(), dtype=torch.float32) % 1024
    number = all_reduce_mean(float(rank))
    block = all_reduce_mean(ramp + rank)
    expected = (world_size - 1) / 2
    wrong = int((block != ramp + expected).sum())
    if number == expected and not wrong:
        found = f"the mean of the ranks' numbers is {number:g}, and that of 1 MiB is right"
        return Check("mean", "ok", found)
    found = f"the mean of 0 to {world_size - 1} came out as {number:g}"
    found += f", and {wrong} of {_BLOCK} elements of 1 MiB are wrong"
    remedy = "Run again with --backend gloo: if that is right, the accelerators' links or their "
    remedy += "driver give wrong values."
    return Check("mean", "failed", found, remedy)


def latency() -> Check:
    """Time a small all-reduce and a barrier. Collective."""
    device = get_device()
    value = torch.zeros(1, device=device)

    def reduce() -> None:
        dist.all_reduce(value)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    own = {"all_reduce_us": _time_us(reduce), "barrier_us": _time_us(barrier)}
    slowest = all_reduce(own, "max")
    reduce_us = slowest["all_reduce_us"]
    found = f"all-reduce of one number {reduce_us:.0f} us (median of {_TIMED}), "
    found += f"barrier {slowest['barrier_us']:.0f} us"
    if reduce_us <= 1e6 * _SLOW:
        return Check("latency", "ok", found, measured=slowest)
    remedy = "Are the cores busy with something else, or is the interface above the slow one?"
    return Check("latency", "warning", found, remedy, measured=slowest)


def _time_us(call: Callable[[], object]) -> float:
    """Time a call in microseconds, as the median of many."""
    seconds = []
    for _ in range(_WARM_UP + _TIMED):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(seconds[_WARM_UP:]), 1)


def own_record(context: Context) -> dict[str, Any]:
    """Describe this rank, for the others."""
    return {
        "rank": context.rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "node_rank": context.node_rank,
        "local_rank": context.local_rank,
        "device": str(context.device),
        "versions": installed(),
    }


def read_records(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Read the records of all ranks; raise `LaunchError` if no rank wrote them."""
    records = []
    for rank, text in enumerate(texts):
        key = f"record of rank {rank}"
        record = parse(text, key, _RECORD)
        if record["rank"] != rank:
            refuse_text(text, key)
        records.append(record)
    return records


def roll_call(records: list[dict[str, Any]]) -> Check:
    """List the ranks, and where each runs."""
    header = [name.replace("_", " ") for name in _COLUMNS]
    rows = [[record[name] for name in _COLUMNS] for record in records]
    hosts = {record["host"] for record in records}
    found = f"{count(len(records), 'rank')} on {count(len(hosts), 'host')}"
    return Check("ranks", "ok", found, "", table(header, rows))


def same_versions(records: list[dict[str, Any]]) -> Check:
    """Compare the versions that must be the same on every rank."""
    versions = {record["rank"]: record["versions"] for record in records}
    different = differing_parts(versions)
    if not different:
        names = ", ".join(records[0]["versions"])
        return Check("same versions", "ok", f"{names} are the same on every rank")
    found = f"the ranks differ in {', '.join(different)}"
    remedy = "Install the same on every node, or start all ranks from one environment or image."
    details = [f"{name}: {numbers}" for name, numbers in different.items()]
    return Check("same versions", "failed", found, remedy, details)
