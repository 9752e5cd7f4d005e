"""A worker of xdist that dies ends the run: by its name, with an exit code of its own, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
import os, signal
import pytest

if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
    {when_imported}

@pytest.mark.parametrize("number", range(40))
def test_it(number):
    if number == 17:
        {in_a_test}
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
DEATHS = {
    "in a test": ({"when_imported": "pass", "in_a_test": DIE}, "crashed while running 'test_dies.py::test_it[[]17[]]'"),
    "while it collects": ({"when_imported": DIE, "in_a_test": "pass"}, "worker gw1 crashed"),
}


@pytest.mark.parametrize("when", DEATHS)
def test_a_worker_that_dies_ends_the_run_with_its_name(
    when: str, pytester: pytest.Pytester, pytestconfig: pytest.Config
) -> None:
    lines, words = DEATHS[when]
    pytester.makepyfile(test_dies=TESTS.format(**lines))
    pytester.makeconftest(Path(__file__).with_name("workers.py").read_text())
    options = [option for option in pytestconfig.getini("addopts") if "restart" in option]
    done = pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup", *options, timeout=120)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines([f"*{words}*"])
