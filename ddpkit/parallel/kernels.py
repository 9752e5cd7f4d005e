"""Describe what the bits of a computation depend on, besides the program and its input."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


def describe_kernels(device: torch.device) -> str:
    """Say in one line by which kernels a device computes: two processes with equal lines compute equal bits."""
    if device.type != "cpu":
        name = torch.get_device_module(device.type).get_device_name(device)
        return f"torch {torch.__version__}, {name}"
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {_cpu_name()}, {capability}, {threads} thread{plural}"


@functools.cache
def _cpu_name() -> str:
    """Return the name of this machine's kind of CPU, as Linux tells it; else that of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
