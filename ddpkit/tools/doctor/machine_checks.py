"""The doctor's checks of this machine: what is installed, which devices there are, and what limits the process."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from ...errors import LaunchError
from ...process_group.devices import choose_device, default_backend
from ...process_group.startup import check_torch
from .report import Check, variables

_GIB = 1 << 30
_DRIVERS = {"/proc/driver/nvidia/version": "an NVIDIA", "/dev/kfd": "an AMD"}
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def installed() -> dict[str, str]:
    """What must be the same on every rank, by name."""
    ours = str(sys.modules["ddpkit"].__version__)
    found = {
        "ddpkit": ours,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if dist.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def versions() -> Check:
    """Python, torch and what torch was built with."""
    found = ", ".join(f"{name} {number}" for name, number in installed().items())
    try:
        check_torch()
    except LaunchError as error:
        return Check("versions", "failed", f"{error} ({found})", "pip install --upgrade torch")
    if not dist.is_available():
        remedy = "Install a build of torch from https://pytorch.org/get-started."
        return Check("versions", "failed", f"this torch is built without torch.distributed ({found})", remedy)
    return Check("versions", "ok", found)


def devices(look_inside: bool) -> Check:
    """Which local rank would get which accelerator; with `look_inside` each is opened, and its free memory read."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return _no_accelerator()
    module = getattr(torch, kind.type)
    count = int(module.device_count())
    backend = default_backend(torch.device(kind.type, 0), shared=False)
    lines, problems = [], []
    for place in range(count):
        device = choose_device(None, place, count)
        try:
            lines.append(f"local rank {place} → {device}{_inside(module, device) if look_inside else ''}")
        except RuntimeError as error:
            problems.append(f"{device} cannot be used: {str(error).splitlines()[0]}")
    found = f"{count} × {kind.type}, backend {backend}; {variables(*_MASKS) or 'no device is hidden'}"
    if problems:
        remedy = "See with nvidia-smi whether another process fills the device or it needs a reset; hide it with "
        return Check("devices", "failed", "; ".join(problems), f"{remedy}CUDA_VISIBLE_DEVICES.", lines)
    full = [line for line in lines if "in use" in line]
    remedy = "See with nvidia-smi who uses it, or hide it with CUDA_VISIBLE_DEVICES." if full else ""
    return Check("devices", "warning" if full else "ok", found, remedy, lines)


def _no_accelerator() -> Check:
    found = "no accelerator: every rank computes on the CPU, backend gloo"
    driver = next((name for path, name in _DRIVERS.items() if Path(path).exists()), None)
    if not driver:
        return Check("devices", "ok", found)
    hidden = variables(*_MASKS)
    remedy = (
        f"Unset it to use them: {hidden}." if hidden else "Compare the driver with the versions above (nvidia-smi)."
    )
    if not torch.version.cuda and not torch.version.hip:
        remedy = (
            "This torch is built for the CPU only: install a build for the GPU from https://pytorch.org/get-started."
        )
    return Check("devices", "warning", f"{found}, although {driver} driver is loaded", remedy)


def _inside(module: object, device: torch.device) -> str:
    name = getattr(module, "get_device_name", str)(device)
    if device.type != "cuda":
        return f" ({name})"
    free, total = torch.cuda.mem_get_info(device)
    used = ": in use by another process" if free < 0.8 * total else ""
    return f" ({name}), {free / _GIB:.0f} of {total / _GIB:.0f} GiB free{used}"


def shared_memory() -> Check:
    """/dev/shm carries batches from loader workers, and NCCL's messages on one node."""
    if not Path("/dev/shm").is_dir():
        return Check("shm", "skipped", "there is no /dev/shm on this system")
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.free >= _GIB:
        return Check("shm", "ok", found)
    remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium Memory at /dev/shm."
    if usage.total >= _GIB:
        remedy = "Delete what ended jobs left there (ls -l /dev/shm)."
    return Check("shm", "warning", f"{found}: loader workers may die with a bus error", remedy)


def cores() -> Check:
    """Whether this process may use the cores that torch counts."""
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota()
    threads = variables("OMP_NUM_THREADS", "MKL_NUM_THREADS") or "OMP_NUM_THREADS is not set"
    found = (
        f"{usable} of {os.cpu_count()} cores, {f'{quota:g} by the cgroup' if quota else 'no cgroup limit'}; {threads}"
    )
    if quota and quota < usable:
        remedy = (
            f"Threads beyond {quota:g} only wait: export OMP_NUM_THREADS={max(1, int(quota))} divided by the ranks."
        )
        return Check("cores", "ok" if "=" in threads else "warning", found, "" if "=" in threads else remedy)
    if usable == 1 < (os.cpu_count() or 1):
        remedy = "The launcher bound it: mpirun --bind-to none, or srun --cpus-per-task=N."
        return Check("cores", "warning", f"{found}: tied to one core", remedy)
    return Check("cores", "ok", found)


def memory() -> Check:
    """The memory of the machine and of the cgroup, and whether the kernel has killed for it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    limit = memory_limit()
    limited = limit is not None and limit < total
    found = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
    found += f"; the cgroup allows {(limit or 0) / _GIB:.1f} GiB" if limited else "; no cgroup limit"
    if killed := oom_kills():
        remedy = "A rank that ended with SIGKILL may be one of them: ask for more memory, or use fewer loader workers."
        return Check(
            "memory", "warning", f"{found}; the kernel killed {killed} processes of this cgroup for it", remedy
        )
    if min(free, limit or free) < _GIB:
        remedy = "A rank takes about 0.3 GiB before it loads anything: ask for more memory or start fewer ranks."
        return Check("memory", "warning", found, remedy)
    return Check("memory", "ok", found)


def open_files() -> Check:
    """Each connection between ranks and each batch on its way from a loader worker is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, may be raised to {_limit(hard)}" if soft != hard else _limit(soft)
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Check("open files", "ok", found)
    remedy = (
        f"ulimit -n {_limit(hard) if hard > soft else 65536} in front of the launcher, or LimitNOFILE= of its service."
    )
    return Check("open files", "warning", f'{found}: loaders fail with "Too many open files"', remedy)


def locked_memory() -> Check:
    """InfiniBand needs memory that is not swapped out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = Path("/sys/class/infiniband")
    if not cards.is_dir() or not any(cards.iterdir()):
        return Check(
            "locked memory", "ok", f"{_limit(soft, 1024)} KiB; it matters with InfiniBand only, and there is none"
        )
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    remedy = "ulimit -l unlimited in front of the launcher (docker run --ulimit memlock=-1; LimitMEMLOCK= of slurmd)."
    return Check("locked memory", "warning", f"{_limit(soft, 1024)} KiB: NCCL may not open InfiniBand", remedy)


def cpu_quota() -> float | None:
    """Cores that the cgroups of this process give it, None without a limit."""
    limits = []
    for folder in _cgroups("cpu"):
        words = _words(folder / "cpu.max")
        words = words or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit():
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Bytes that the cgroups of this process allow, None without a limit."""
    found = [
        int(word)
        for folder in _cgroups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        for word in _words(folder / name)
        if word.isdigit()
    ]
    return min(found, default=None)


def oom_kills() -> int:
    """How many processes of this very cgroup the kernel has killed for memory."""
    folder = next(_cgroups("memory"), Path("/"))
    words = [*_words(folder / "memory.events"), *_words(folder / "memory.oom_control")]
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it; the older kind has a tree for each controller."""
    mount = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, owners, path = line.split(":", 2)
        if owners and controller not in owners.split(","):
            continue
        here = mount / owners / path.strip("/")
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def _limit(value: int, unit: int = 1) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // unit)
