from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import launch

from ddpkit.launch.process_tree import Agent, ancestors, born, runs_since

WITHOUT_DESCRIPTORS = """
import os, resource
from ddpkit.launch.process_tree import Agent, born, runs_since

above = os.getppid()
start = born(above)
assert start and runs_since(above, start) is True
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    open("/dev/null")
except OSError as error:
    print(error)
print(runs_since(above, start), repr(Agent(above, start, {}).lost()))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_cannot_be_looked_at_has_not_gone() -> None:
    (ended,) = launch([sys.executable, "-c", WITHOUT_DESCRIPTORS])
    assert "Too many open files" in ended.output and ended.output.strip().endswith("None ''"), ended


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_has_ended_has_gone_also_where_its_number_is_given_again() -> None:
    mine = born(os.getpid())
    assert runs_since(os.getpid(), mine) is True
    assert runs_since(os.getpid(), "1") is False
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert runs_since(gone, mine) is False
    assert "was killed or crashed" in Agent(gone, mine, {}).lost()
    assert ancestors()[os.getppid()] == born(os.getppid())
