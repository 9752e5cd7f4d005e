"""Let a script meet its ranks here: those that a tool has started stand for those that the script starts itself."""

from __future__ import annotations

import os
import pickle
import random
import re
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .cuda import put_cuda_on_the_cpu
from .recorder import Function, before, replace

_DEPTH = 5  # of the functions that are looked through for one that joins a group
_started: list[Any] = []  # what the script would run as ranks
_kept: list[Any] = []  # process groups, whose destructors may hang


def join_here() -> None:
    """Prepare the process of a rank: its script may start ranks, and ask for NCCL and CUDA where there is no GPU."""
    world_size = int(os.environ["WORLD_SIZE"])
    has_gpus = torch.cuda.is_available()
    replace(dist, "init_process_group", lambda original: _joining(original, world_size, has_gpus))
    replace(torch.multiprocessing, "spawn", lambda original: _calling(original, world_size))
    replace(BaseProcess, "start", _running_ranks)
    if not has_gpus:
        put_cuda_on_the_cpu()


def _joining(original: Function, world_size: int, has_gpus: bool) -> Function:
    """Let ranks meet where the script says, unless it starts them itself, and by gloo where there is no GPU."""
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}

    def join(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not has_gpus:
            backend = None if backend is None else "gloo"
            kwargs.pop("device_id", None)
        tell_others()
        ranks = kwargs.get("world_size", -1)
        ranks = ranks if ranks > 0 else int(os.environ["WORLD_SIZE"])
        if ranks > world_size or (_started and ranks < world_size):
            raise _error(ranks, world_size)
        port = _port_of(init_method) or os.environ.get("MASTER_PORT")
        if _started and port != address["MASTER_PORT"]:
            init_method = None
            os.environ |= address
        elif port != address["MASTER_PORT"]:  # nobody serves a store there yet
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        original(backend, init_method, *args, **kwargs)
        _kept.append(dist.group.WORLD)

    return join


def _port_of(method: str | None) -> str:
    """Return the port of an address at which ranks are told to meet, "" if they are not."""
    return str(urlsplit(method).port) if method and method.startswith("tcp://") else ""


def _error(ranks: int, world_size: int) -> ValueError:
    return ValueError(f"the script wants {ranks} ranks, and runs on {world_size}: see -n")


def _calling(original: Function, world_size: int) -> Function:
    """Stand for `spawn`: each rank calls the function, the first one's with its arguments where the others wait."""
    seed = torch.initial_seed()

    def spawn(fn: Function, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        if not _joins(fn):
            return original(fn, args, nprocs, *rest, **kwargs)
        if nprocs != world_size:
            raise _error(nprocs, world_size)
        _started.append(fn)
        tell_others((fn, args))
        torch.manual_seed(seed)  # as a new process has it
        random.seed()
        np.random.seed()
        return fn(int(os.environ["RANK"]), *args)

    return spawn


def _running_ranks(original: Function) -> Function:
    """Stand for the `start` of processes that become ranks: each rank runs the one of its number, and no other."""

    def start(process: Any) -> None:
        if not _joins(process._target):
            original(process)
            return
        process._popen = _Ended()
        _started.append(process)
        if len(_started) == int(os.environ["RANK"]) + 1:
            process.run()

    return start


class _Ended:
    """Stands for a process that has ended well."""

    def poll(self, *args: Any) -> int:
        return 0

    wait = terminate = kill = poll


def _joins(function: Any, depth: int = _DEPTH) -> bool:
    """Return whether a function joins a process group, itself or by those that it names."""
    code = getattr(function, "__code__", None)
    if not depth or code is None:
        return False
    named = (function.__globals__.get(name) for name in code.co_names)
    return "init_process_group" in code.co_names or any(_joins(each, depth - 1) for each in named)


# The first rank stands for the parent of spawned ranks: what comes before and after runs there only.

_SPAWN = re.compile(rb"\bspawn\(")
_PATIENCE = timedelta(days=1)
_listening: list[dist.Store] = []  # of the first rank, while the others wait


def await_first_rank(source: bytes) -> bytes:
    """Wait, where a script may spawn its ranks, for what the first one says; b"" to run the script as it is."""
    if not _SPAWN.search(source):
        return b""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    if os.environ["RANK"] != "0":
        return bytes.fromhex(store.get("ddpkit/spawn").decode())
    _listening.append(store)
    before(Optimizer, "__init__", lambda: tell_others())
    return b""


def tell_others(task: Any = None) -> None:
    """Let the other ranks begin, if they still wait: with a function and its arguments, or with the script."""
    if not _listening:
        return
    pickled = b""
    with suppress(Exception):  # what cannot be sent, each rank makes itself
        pickled = pickle.dumps(task) if task else b""
    _listening.pop().set("ddpkit/spawn", pickled.hex())


def call_as_spawned(task: bytes) -> None:
    """Call what the first rank has spawned, in a process that has loaded the script."""
    fn, args = pickle.loads(task)
    _started.append(fn)
    fn(int(os.environ["RANK"]), *args)
