"""submitit's LocalExecutor, for real; `pip install submitit` where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import CLEAN, launch

pytest.importorskip("submitit", reason="needs submitit: pip install submitit")

JOB = """
import sys, submitit

def work():
    import ddpkit
    with ddpkit.distributed() as context:
        return context.rank, context.world_size, context.local_rank, context.launcher, ddpkit.all_reduce(1.0)

if __name__ == "__main__":
    executor = submitit.LocalExecutor(folder="logs")
    executor.update_parameters(tasks_per_node=int(sys.argv[1]), timeout_min=3)
    jobs = [executor.submit(work) for _ in range(2)]
    for job in jobs:
        print(job.results())
"""


@pytest.mark.storm
@pytest.mark.parametrize("tasks", [1, 2])
def test_two_jobs_of_the_local_executor_are_two_worlds(tmp_path: Path, tasks: int) -> None:
    (tmp_path / "job.py").write_text(JOB)
    paths = ":".join([CLEAN["PYTHONPATH"], *filter(None, sys.path)])
    command = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} job.py {tasks}"]
    (ended,) = launch(command, env={**CLEAN, "PYTHONPATH": paths}, timeout=170)
    kind = "submitit" if tasks > 1 else "single"
    expected = [(rank, tasks, rank, kind, float(tasks)) for rank in range(tasks)]
    assert ended.output.splitlines() == [str(expected)] * 2, ended
