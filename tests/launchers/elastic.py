"""Trains with a fault in the middle: `elastic.py FOLDER raise|kill|wait [RANK]`. In the end it says which samples it
has seen.

That rank, -1 for the last one, fails, once, two steps after a checkpoint and in the middle of an epoch: it writes a
file, and then raises, is killed, or waits to be lost with its node.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import ddpkit

SAMPLES, EPOCHS, GLOBAL_BATCH, SAVE_EVERY, FAIL_AT = 120, 2, 12, 3, 8  # ten steps are an epoch


def fail_once(folder: Path, fault: str) -> None:
    if (folder / "failed").exists():
        return
    (folder / "failed").touch()
    if fault == "raise":
        raise ArithmeticError("the fault of this test")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "wait":
        time.sleep(600)


def main(folder: Path, fault: str, faulty: int = -1) -> None:
    job = ddpkit.setup()
    samples = TensorDataset(torch.arange(SAMPLES), torch.linspace(-1, 1, SAMPLES).unsqueeze(1))
    loader = ddpkit.make_loader(samples, GLOBAL_BATCH // job.world_size)
    torch.manual_seed(0)
    model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = ddpkit.Checkpointer(folder)
    saved = checkpoints.load_latest(**state) or {"step": 0, "seen": torch.zeros(SAMPLES, dtype=torch.int64)}
    step, seen = saved["step"], saved["seen"]
    if job.rank == 0:
        print(f"{job.world_size} ranks start after step {step}", flush=True)
    for _ in range(loader.epoch, EPOCHS):
        for numbers, x in loader:
            loss = torch.nn.functional.mse_loss(model(x), 3 * x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            seen[torch.cat(ddpkit.all_gather(numbers))] += 1
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, **state, seen=seen)
            if step == FAIL_AT and job.rank == faulty % job.world_size:
                fail_once(folder, fault)
    if job.rank == 0:
        weight = ddpkit.unwrap_model(model).weight.item()
        print(f"ended after step {step}, saw each sample {set(seen.tolist())} times, weight {weight:.5f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
