"""The processes of a case, plain or under a launcher: what they noted and printed, and when each of them ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from processes import CLEAN, ROOT, TORCHRUN, begin

PYTHON = sys.executable


class Run:
    """The processes of one case. What they note and print lies in a folder of their own; that is how they are found.

    Args:
        folder: The folder.
        limit: Seconds after which the case is given up.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit, self.end = folder, limit, 0.0
        self.members: list[Any] = []  # what this process has started
        self.knew: dict[int, float] = {}  # rank -> when it had raised, passed or ended

    def plain(self, fn: Callable[..., Any], env: dict[str, str], *words: str) -> None:
        """Starts a rank as a platform does: no agent looks after it."""
        self.members.append(begin(fn, env, *words, output=str(self._log())))

    def command(self, *words: str, **env: str) -> None:
        """Starts a command."""
        env = CLEAN | {"PYTHONPATH": f"{CLEAN['PYTHONPATH']}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"} | env
        with open(self._log(), "w") as log:
            self.members.append(subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True))

    def torchrun(self, *words: str, nprocs: int, **env: str) -> None:
        """Starts torchrun, with a log for each rank."""
        flags = [f"--nproc_per_node={nprocs}", "--redirects=3", f"--log_dir={self.folder}/logs"]
        self.command(*TORCHRUN, *flags, *words, **env)

    def _log(self) -> Path:
        self.end = self.end or time.time() + self.limit
        return self.folder / f"{len(self.members)}.log"

    def codes(self) -> list[int | None]:
        """The exit codes of what was started, None while it runs."""
        return [m.poll() if isinstance(m, subprocess.Popen) else m.exitcode for m in self.members]

    def over(self) -> bool:
        """Whether what was started has ended, and so have the ranks, which outlive a torchrun that is killed."""
        return None not in self.codes() and not any(alive(entry["pid"]) for entry in self.noted("begin"))

    def noted(self, word: str) -> list[dict[str, Any]]:
        """Who noted this word, and when, in order."""
        path = self.folder / "events"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [entry for entry in entries if entry["word"] == word]

    def until(self, happened: Callable[[], Any]) -> Iterator[None]:
        """Waits for something, but not beyond the limit, nor the end of all processes by more than 5 s."""
        over = None
        while not happened() and time.time() < min(self.end, (over or self.end) + 5):
            for entry in self.noted("raised") + self.noted("passed"):
                self.knew.setdefault(entry["rank"], entry["time"])
            for entry in self.noted("begin"):
                if not alive(entry["pid"]):
                    self.knew.setdefault(entry["rank"], time.time())
            over = over or (time.time() if self.over() else None)
            yield

    def logs(self) -> list[Path]:
        """What the ranks said of their errors."""
        return sorted(self.folder.glob("logs/*/attempt_*/*/stderr.log")) or sorted(self.folder.glob("*.log"))

    def text(self, pattern: str = "**/*.log") -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(pattern)))

    def text_of(self, rank: int) -> str:
        """What a rank printed."""
        return self.text(f"logs/*/attempt_*/{rank}/std*.log") or self.text(f"{rank}.log")

    def how(self, rank: int, text: str) -> str:
        """What became of a rank."""
        if f"Rank {rank} ends: its main thread" in text:
            return "verdict"
        words = [word for word in ("raised", "passed") for entry in self.noted(word) if entry["rank"] == rank]
        return words[0] if words else "was ended"

    def left_behind(self) -> list[int]:
        """The processes of this case that live: those that print into its folder."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                outputs = [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
            except OSError:
                continue
            if alive(int(pid)) and any(output.startswith(f"{self.folder}/") for output in outputs):
                found.append(int(pid))
        return found

    def close(self) -> list[int]:
        """Ends what is left; returns what that was."""
        left = self.left_behind()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for member in self.members:
            member.wait() if isinstance(member, subprocess.Popen) else member.join()
        return left


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to hear it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def side_by_side(tasks: list[Iterator[None]], width: int) -> None:
    """Runs tasks that yield while they wait, `width` at a time."""
    waiting, running = list(tasks), []
    while waiting or running:
        while waiting and len(running) < width:
            running.append(waiting.pop(0))
        running = [task for task in running if next(task, task) is None]
        time.sleep(0.02)
