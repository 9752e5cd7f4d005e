"""What the ranks of a case do: they join and save a checkpoint; then one fails, and the others are somewhere."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddpkit

FOLDER = Path()


def note(word: str) -> None:
    """Leaves a word and the time for whoever watches the case."""
    entry = {"time": time.time(), "pid": os.getpid(), "rank": int(os.environ.get("RANK", "0")), "word": word}
    with open(FOLDER / "events", "ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")


def fail_or_stay(folder: str, fault: str, place: str, faulty: str, timeout: str) -> None:
    """The program of a fault: rank `faulty` does what `fault` says while the others do what `place` says."""
    global FOLDER
    FOLDER = Path(folder)
    note("begin")
    while (FOLDER / "events").read_text().count("begin") < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # the time-outs of some cases are shorter than importing torch may take
    try:
        with ddpkit.distributed(timeout=timedelta(seconds=float(timeout))) as context:
            model = ddpkit.wrap_model(nn.Linear(2, 2))
            ddpkit.Checkpointer(FOLDER / "disk").save(1, model=model)
            dist.all_reduce(torch.ones(1))
            note("joined")
            if context.rank == int(faulty):
                time.sleep(0.5)  # the others are there
                ACTIONS[fault](model)
            else:
                ACTIONS[place](model)
        note("passed")
    except BaseException:
        note("raised")
        raise


def join_and_stay(folder: str, timeout: str, seconds: str) -> None:
    """The program of a disagreement."""
    global FOLDER
    FOLDER = Path(folder)
    note("begin")
    try:
        with ddpkit.distributed(timeout=timedelta(seconds=float(timeout))):
            note("joined")
            time.sleep(float(seconds))
        note("passed")
    except BaseException:
        note("raised")
        raise


def fail(_: object = None) -> None:
    note("fault")
    raise ValueError("boom")


def send(number: signal.Signals) -> Callable[[object], None]:
    def action(_: object) -> None:
        note("fault")
        os.kill(os.getpid(), number)
        stay()

    return action


def crash(_: object) -> None:
    note("fault")
    ctypes.string_at(0)


def exit_early(code: int) -> Callable[[object], None]:
    def action(_: object) -> None:
        note("fault")
        sys.exit(code)

    return action


def exit_at_once(_: object) -> None:
    note("fault")
    os._exit(0)


def stay(_: object = None) -> None:
    note("fault")
    time.sleep(300)


def compute(_: object) -> None:
    while True:
        torch.ones(100).sum()


def hold_the_lock(_: object) -> None:
    ctypes.PyDLL(None).sleep(4)  # a C call that keeps the interpreter lock
    stay()


def all_reduce(size: int) -> Callable[[object], None]:
    def action(_: object) -> None:
        if size != 1:
            note("fault")
        dist.all_reduce(torch.ones(size))

    return action


def broadcast(_: object) -> None:
    note("fault")
    dist.broadcast(torch.ones(1), 0)


def mean(_: object) -> None:
    ddpkit.all_reduce_mean(torch.ones(3))


def mean_of_a_word(_: object) -> None:
    note("fault")
    ddpkit.all_reduce_mean("three")


def mean_of_another_shape(_: object) -> None:
    note("fault")
    ddpkit.all_reduce_mean(torch.ones(4))


def our_broadcast(_: object) -> None:
    note("fault")
    ddpkit.broadcast(torch.ones(3))


def run_on_main(_: object) -> None:
    ddpkit.run_on_main(fail)


def first(_: object) -> None:
    with ddpkit.main_process_first():
        fail()


def slowly_first(_: object) -> None:
    with ddpkit.main_process_first():
        if ddpkit.is_main_process():
            note("fault")
            time.sleep(15)
    dist.all_reduce(torch.ones(1))


class Unreadable(torch.utils.data.Dataset):
    """A dataset that a loader's worker cannot read to its end."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1) if index < 5 else fail()


def read_with_a_worker(_: object) -> None:
    for _ in torch.utils.data.DataLoader(Unreadable(), num_workers=1):
        pass


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def gather_batch(_: object) -> torch.Tensor:
    return ddpkit.gather_batch(torch.ones(1, 2, requires_grad=True))


def gather(model: nn.Module) -> None:
    gather_batch(model).sum().backward()


def after_gathering(act: Callable) -> Callable:
    """What a rank does while the others are in the backward of what all have gathered."""

    def gather_and_act(model: nn.Module) -> None:
        gather_batch(model)
        time.sleep(0.5)
        act(model)

    return gather_and_act


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def train_on(model: nn.Module) -> None:
    """Train; after some seconds, in which the ranks are asked how long their steps take, say that this is the time."""
    threading.Timer(5, note, ["fault"]).start()
    train(model)


def broken_backward(model: nn.Module) -> None:
    out = model(torch.ones(1, 2))
    out.register_hook(fail)
    out.sum().backward()


def save_too_much(_: object) -> None:
    if ddpkit.is_main_process():
        note("fault")
    ddpkit.Checkpointer(FOLDER / "disk").save(2, fill=torch.ones(1 << 20))


def save_forever(_: object) -> None:
    for step in range(2, 100_000):
        ddpkit.Checkpointer(FOLDER / "disk").save(step, fill=torch.ones(1 << 20))


def die_while_saving(_: object) -> None:
    def kill() -> None:
        note("fault")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(random.random(), kill).start()
    save_forever(_)


ACTIONS: dict[str, Callable] = {
    "fail": fail,
    "kill": send(signal.SIGKILL),
    "fail_after_gathering": after_gathering(fail),
    "kill_after_gathering": after_gathering(send(signal.SIGKILL)),
    "stop": send(signal.SIGSTOP),
    "interrupt": send(signal.SIGINT),
    "crash": crash,
    "exit_early": exit_early(0),
    "exit_3": exit_early(3),
    "exit_at_once": exit_at_once,
    "stay": stay,
    "compute": compute,
    "hold_the_lock": hold_the_lock,
    "all_reduce": all_reduce(1),
    "all_reduce_more": all_reduce(1000),
    "broadcast": broadcast,
    "barrier": lambda _: ddpkit.barrier(),
    "mean": mean,
    "mean_of_a_word": mean_of_a_word,
    "mean_of_another_shape": mean_of_another_shape,
    "our_broadcast": our_broadcast,
    "run_on_main": run_on_main,
    "first": first,
    "slowly_first": slowly_first,
    "read_with_a_worker": read_with_a_worker,
    "backward": backward,
    "gather": gather,
    "broken_backward": broken_backward,
    "train": train,
    "train_on": train_on,
    "save_too_much": save_too_much,
    "save_forever": save_forever,
    "die_while_saving": die_while_saving,
}

if __name__ == "__main__":  # as torchrun starts it
    {"fail_or_stay": fail_or_stay, "join_and_stay": join_and_stay}[sys.argv[1]](*sys.argv[2:])
