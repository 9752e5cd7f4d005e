"""A run of two seconds that may be stopped: it saves, ends as it should, and goes on where it stopped.

Each rank notes in the folder when it is in its loop, with its process and the one that started it, and what came of it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from itertools import chain
from pathlib import Path

import ddpkit

SAMPLES = 600


def main(folder: Path, job: ddpkit.Context) -> int:
    loader = ddpkit.make_loader(range(SAMPLES), 6 // job.world_size or 1, seed=1, num_workers=1)
    checkpoints = ddpkit.Checkpointer(folder / "checkpoints")
    saved = checkpoints.load_latest(loader=loader) or {"step": 0, "seen": []}
    step, seen = saved["step"], []
    with ddpkit.stopping() as stop:
        for batch in loader:
            if step == saved["step"]:
                (folder / f"rank {job.rank} from step {step}").write_text(
                    f"{os.getpid()} {os.getppid()} {socket.gethostname()}"
                )
            seen += batch.tolist()
            step += 1
            time.sleep(0.02)
            if stop.now():
                break
    seen = [*saved["seen"], *chain.from_iterable(ddpkit.all_gather_object(seen))]
    if stop.reason:
        checkpoints.save(step, loader=loader, seen=seen)
        (folder / f"rank {job.rank} stopped after step {step}").write_text(stop.reason)
        return stop.exit_code
    assert sorted(seen) == list(range(SAMPLES))
    (folder / f"rank {job.rank} done").touch()
    return 0


if __name__ == "__main__":
    with ddpkit.distributed() as job:
        code = main(Path(sys.argv[1]), job)
    sys.exit(code)
