"""Check this machine and the job: versions, devices, limits of the process, and what the ranks compute together."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import LaunchError, all_reduce, all_reduce_mean, barrier, distributed, get_device, get_rank, get_world_size
from ...collectives.differences import differing_parts
from ...job.device import MASKS, choose_device, default_backend
from ...job.lifecycle import check_torch
from ...join.members import usable_cores
from ..terminal import count, table
from .report import Check, installed

_GIB = 1 << 30
_DRIVERS = {"/proc/driver/nvidia/version": "an NVIDIA", "/dev/kfd": "an AMD"}
_GET_TORCH = "https://pytorch.org/get-started"
_FEW_FILES = 1024
_COLUMNS = ("rank", "host", "pid", "node_rank", "local_rank", "device")
_WARM_UP = 10  # calls that are not counted
_TIMED = 50  # calls that are
_BLOCK = 1 << 18  # float32 elements, 1 MiB: they pass in packets of full size
_SLOW_US = 20e3  # a small collective takes 100 to 1000 us, on several nodes up to a few times that


def set_variables(*names: str) -> str:
    """Write those of these environment variables that are set, as "A=1, B=2"."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


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


def accelerator() -> str | None:
    """Return the kind of this machine's accelerators, None without any."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return device.type if device else None


def devices(look_inside: bool) -> Check:
    """List the accelerator that each local rank would get.

    Args:
        look_inside: Open each, and read its free memory.
    """
    kind = accelerator()
    if kind is None:
        return _no_accelerator()
    module = getattr(torch, kind)
    number = int(module.device_count())
    lines = []
    problems = []
    for local_rank in range(number):
        device = choose_device(None, local_rank, number)
        inside = ""
        try:
            if look_inside:
                inside = _look_inside(module, device)
        except RuntimeError as error:
            problems.append(f"{device} cannot be used: {str(error).splitlines()[0]}")
            continue
        lines.append(f"local rank {local_rank} -> {device}{inside}")
    if problems:
        remedy = "See with nvidia-smi whether another process fills the device or it needs a reset; "
        remedy += "hide it with CUDA_VISIBLE_DEVICES."
        return Check("devices", "failed", "; ".join(problems), remedy, lines)
    backend = default_backend(torch.device(kind, 0), shared=False)
    found = f"{number} x {kind}, backend {backend}; {set_variables(*MASKS) or 'no device is hidden'}"
    if any("in use" in line for line in lines):
        remedy = "See with nvidia-smi who uses it, or hide it with CUDA_VISIBLE_DEVICES."
        return Check("devices", "warning", found, remedy, lines)
    return Check("devices", "ok", found, "", lines)


def _no_accelerator() -> Check:
    found = "no accelerator: every rank computes on the CPU, backend gloo"
    drivers = [name for path, name in _DRIVERS.items() if Path(path).exists()]
    if not drivers:
        return Check("devices", "ok", found)
    hidden = set_variables(*MASKS)
    remedy = "Compare the driver with the versions above (nvidia-smi)."
    if not torch.version.cuda and not torch.version.hip:
        remedy = f"This torch is built for the CPU only: install a build for the GPU from {_GET_TORCH}."
    elif hidden:
        remedy = f"Unset it to use them: {hidden}."
    return Check("devices", "warning", f"{found}, although {drivers[0]} driver is loaded", remedy)


def _look_inside(module: object, device: torch.device) -> str:
    """Open a device and write its name and, for CUDA, its free memory."""
    text = f" ({getattr(module, 'get_device_name', str)(device)})"
    if device.type != "cuda":
        return text
    free, total = torch.cuda.mem_get_info(device)
    text += f", {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    if free < 0.8 * total:
        text += ": in use by another process"
    return text


def shared_memory() -> Check:
    """Check /dev/shm, which carries batches from loader workers, and NCCL's messages on a node."""
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free >= _GIB:
        return Check("shm", "ok", found)
    remedy = "Delete what ended jobs left there (ls -l /dev/shm)."
    if usage.total < _GIB:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of "
        remedy += "medium Memory at /dev/shm."
    return Check("shm", "warning", f"{found}: loader workers may die with a bus error", remedy)


def cores() -> Check:
    """Compare the cores that this process may use with those that torch counts."""
    usable = len(usable_cores())
    total = os.cpu_count() or 1
    quota = cpu_quota()
    limit = f"{quota:g} by the cgroup" if quota else "no cgroup limit"
    threads = set_variables("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = f"{usable} of {total} cores, {limit}; {threads or 'OMP_NUM_THREADS is not set'}"
    if quota and quota < usable and not threads:
        remedy = f"Threads beyond {quota:g} only wait: set OMP_NUM_THREADS to "
        remedy += f"{max(1, int(quota))} / ranks on the node."
        return Check("cores", "warning", found, remedy)
    if usable == 1 < total:
        remedy = "The launcher bound it: mpirun --bind-to none, or srun --cpus-per-task=N."
        return Check("cores", "warning", f"{found}: tied to one core", remedy)
    return Check("cores", "ok", found)


def cpu_quota() -> float | None:
    """Read how many cores the cgroups of this process give it, None without a limit."""
    limits = []
    for folder in _cgroups():
        words = _words(folder / "cpu.max")
        if not words:  # the older kind
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit():
            quota, period = map(int, words)
            limits.append(quota / period)
    return min(limits, default=None)


def _cgroups() -> Iterator[Path]:
    """List the folders of this process's cgroup for cores, and of those above it."""
    mount = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = mount / controllers / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mount) and folder.is_dir():
                yield folder


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def open_files() -> Check:
    """Check the limit of open files: each connection and each batch from a loader worker is one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits]
    found = soft if soft == hard else f"{soft}, may be raised to {hard}"
    if soft == "unlimited" or limits[0] >= _FEW_FILES:
        return Check("open files", "ok", found)
    enough = "65536" if soft == hard else hard
    remedy = f"ulimit -n {enough} in front of the launcher, or LimitNOFILE= of its service."
    return Check("open files", "warning", f'{found}: loaders fail with "Too many open files"', remedy)


# Check a job on several ranks: values, latency, versions, and where each rank is.


def two_ranks(backend: str | None, device: str | None, seconds: float) -> list[Check]:
    """Join a job and run the checks for which two processes on one machine suffice."""
    with distributed(backend=backend, device=device, timeout=timedelta(seconds=seconds)):
        return [mean(), latency()]


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
        return Check("mean", "ok", found)
    found = f"the mean of 0 to {world_size - 1} came out as {number:g}, "
    found += f"and {wrong} of {_BLOCK} elements of 1 MiB are wrong"
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
    if reduce_us <= _SLOW_US:
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
