"""Measures how much memory a rank needs to save and load a sharded model, beside what it holds of the model.

python tests/benchmarks/sharded_memory.py --ranks 4 --megabytes 400
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import ddpkit


def peak() -> float:
    """The most megabytes that this process had in memory since the peak was last cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("this system does not tell the peak of memory")


def clear_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def make_run(megabytes: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of this size in 20 layers, sharded over all ranks, and Adam's state, which is twice as large."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = 20
    width = int((megabytes * 2**20 / 4 / layers) ** 0.5)
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (ddpkit.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(folder: str, megabytes: int) -> dict[str, float]:
    ddpkit.setup(device="cpu")
    model, optimizer = make_run(megabytes, 0)
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters()) / 2**20
    checkpoints = ddpkit.Checkpointer(folder)
    found = {"shard with Adam's state": 3 * shard}
    before = clear_peak()
    checkpoints.save(1, model=model, optimizer=optimizer)
    found["save()"] = peak() - before
    del optimizer
    fresh = torch.optim.Adam(model.parameters())
    before = clear_peak()
    checkpoints.load_latest(model=model, optimizer=fresh)
    found["load_latest()"] = peak() - before
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start")
    parser.add_argument("--megabytes", type=int, default=400, help="of the whole model, in MiB")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        results = ddpkit.spawn(measure, args.ranks, folder, args.megabytes)
    print(f"{'MiB, the most of any rank':32} one tensor: {args.megabytes / 20:.0f}")
    for name in results[0]:
        print(f"{name:32}{max(result[name] for result in results):8.0f}")
