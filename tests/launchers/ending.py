"""Rank 1 fails: `ending.py FOLDER raise|kill SECONDS`. Rank 0 writes what reaches it then: ddpkit's word, and its
launcher's signal, or none in these seconds after rank 1 has gone.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import ddpkit


def main(folder: Path, fault: str, patience: float) -> None:
    job = ddpkit.setup()
    signal.signal(signal.SIGTERM, lambda *_: say(folder, "got SIGTERM") or os._exit(1))
    life = os.open(folder / "life", os.O_RDWR | os.O_CREAT)  # locked as long as rank 1 lives
    if job.rank == 1:
        fcntl.flock(life, fcntl.LOCK_EX)
    ddpkit.barrier()
    if job.rank == 1 and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 1:
        raise ArithmeticError("the fault of this test")
    try:
        time.sleep(60)
    except ddpkit.PeerError as error:
        say(folder, f"heard of rank {error.rank}")
        fcntl.flock(life, fcntl.LOCK_EX)
        time.sleep(patience)
        say(folder, "stayed")
        raise


def say(folder: Path, words: str) -> None:
    with open(folder / "said", "a") as file:
        file.write(f"{words}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
