"""The functions of a `utils_dist.py` that the trainer beside it calls."""

import functools
import os
import subprocess

import torch
import torch.distributed as dist


def init_dist(launcher: str) -> None:
    if launcher == "slurm":
        nodes = os.environ["SLURM_NODELIST"]
        first = subprocess.getoutput(f"scontrol show hostname {nodes} | head -n1")
        os.environ["MASTER_ADDR"] = first
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    elif launcher != "pytorch":
        raise ValueError(f"Invalid launcher type: {launcher}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def get_dist_info() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def master_only(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        if get_dist_info()[0] == 0:
            return func(*args, **kwargs)

    return wrapper


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor
