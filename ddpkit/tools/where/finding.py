"""Finding the jobs of which ranks run on this machine, by the environments of its processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...errors import LaunchError
from ...launch.detection import detect_launch
from ...launch.process_tree import environment_of


def jobs_here(processes: Path = Path("/proc")) -> list[tuple[str, int]]:
    """Return the address of each job, MASTER_ADDR and MASTER_PORT; Linux shows those of one's own processes."""
    jobs = set()
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError, LaunchError):  # another user's; ended; hints that contradict each other
            env = environment_of(int(folder.name), processes)
            if env.get("MASTER_PORT") is None:
                continue
            launch = detect_launch(env)
            if launch.world_size > 1 and launch.master_addr and launch.master_port:
                jobs.add((launch.master_addr, launch.master_port))
    return sorted(jobs)
