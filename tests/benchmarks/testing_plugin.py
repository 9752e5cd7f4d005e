"""Time a trivial test on two ranks: marked `ranks(2)`, written with `mp.spawn`, and with torch's own test class.

    python tests/benchmarks/testing_plugin.py --tests 50

Each way runs as a pytest of its own; the first test, which starts everything, and the last, after which it ends, are
left out of the median. torch's own class needs the package expecttest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOTING = """
import os, time

def pytest_runtest_logstart():
    if "DDPKIT_TESTING_RANKS" not in os.environ:  # else this is a rank
        print("@", time.perf_counter(), flush=True)

def pytest_sessionfinish():
    pytest_runtest_logstart()
"""

MARKED = """
import pytest, ddpkit

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range({tests}))
def test_trivial(rank, number):
    assert ddpkit.all_reduce_mean(float(rank)) == 0.5
"""

SPAWNED = """
import os, socket, pytest, torch, torch.distributed as dist, torch.multiprocessing as mp

def body(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert value.item() == 1.0
    dist.destroy_process_group()

@pytest.mark.parametrize("number", range({tests}))
def test_trivial(number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(body, (port,), nprocs=2)
"""

TORCHS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestTrivial(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def body(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        assert value.item() == 1.0
        dist.destroy_process_group()

for number in range({tests}):
    setattr(TestTrivial, f"test_trivial_{{number}}", lambda self: self.body())
"""


def seconds_of_each(source: str, tests: int) -> list[float]:
    """The time from each test's beginning to that of the next, as the tests themselves note it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "conftest.py").write_text(NOTING)
        Path(folder, "test_trivial.py").write_text(source.format(tests=tests))
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "ddpkit.testing.hooks", "-p", "no:randomly"]
        environment = {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
        assert f"{tests} passed" in done.stdout, done.stdout + done.stderr
        times = [float(time) for time in re.findall(r"@ (\S+)", done.stdout)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def main() -> None:
    """Time the three ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=50, help="marked tests; the other ways run a twentieth of them")
    tests = parser.parse_args().tests
    few = max(3, tests // 20)
    ways = {"@pytest.mark.ranks(2)": (MARKED, tests), "mp.spawn": (SPAWNED, few), "MultiProcessTestCase": (TORCHS, few)}
    print(f"{'way':24}{'first, s':>10}{'later: median, s':>18}{'best, s':>10}")
    for name, (source, number) in ways.items():
        first, *later, _ = seconds_of_each(source, number)
        print(f"{name:24}{first:10.2f}{statistics.median(later):18.3f}{min(later):10.3f}", flush=True)


if __name__ == "__main__":
    main()
