"""The workers of xdist: which tests each gets, and what follows when one of them dies."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# whose tests share what takes long to make: the runs of a trainer or of programs side by side, compiled code
_TOGETHER = (
    "examples/snakes_ddpg",
    "launchers/test_slurm.py",
    "launchers/test_torchrun.py",
    "watch/test_main_thread.py",
    "test_robot_trainer.py",
    "test_video_trainer.py",
)

# what waits for seconds, the longest first: some of the workers begin with it, so that the others compute meanwhile
_WAITING = tuple(
    f"tests/{folder}/"
    for folder in ("tools", "job", "rendezvous", "watch", "survival", "stop", "guard", "testing", "faults", "check")
)
_WAITERS = ("gw0", "gw1", "gw2")

_has_lost_one = pytest.StashKey[bool]()


class _Groups(LoadScopeScheduling):
    """Hands a group of tests to one worker of xdist: each worker that runs one of them makes anew what they share.

    The marker `xdist_group` says the same, but xdist 3.8 does not find it with pytest 9.2.
    """

    _is_sorted = False

    def _split_scope(self, nodeid: str) -> str:
        return next((part for part in _TOGETHER if part in nodeid), nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if not self._is_sorted:
            self._sort()
            self._is_sorted = True
        if node.gateway.id not in _WAITERS:  # they begin with the last, which compute
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _sort(self) -> None:
        """Put what waits first, and what computes behind it from the last to the first."""
        places = {}
        for number, (scope, tests) in enumerate(self.workqueue.items()):
            folders = [i for i, folder in enumerate(_WAITING) if next(iter(tests)).startswith(folder)]
            places[scope] = (folders[0] if folders else len(_WAITING), -number)
        for scope in sorted(places, key=places.__getitem__):
            self.workqueue.move_to_end(scope)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups | None:
    """Keep groups of tests together, unless `--dist` asks for something else."""
    return _Groups(config, log) if config.option.dist == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note that a worker has died: xdist names it and the test in which it was."""
    if error:
        node.config.stash[_has_lost_one] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End as an interrupted run does if a worker has died: there are tests that nobody has run."""
    if session.config.stash.get(_has_lost_one, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
