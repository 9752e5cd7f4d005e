"""`survive` in a simulated world: its loop, states and regrouping are the real ones; models and gloo are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import outside
from outside import HostedStore
from starts import TIMEOUT, Group, Rank, Start, leave, report
from store import PrefixStore
from world import Killed

from ddpkit.job import joining as startup
from ddpkit.job.job import Context, Job, Options, context_of
from ddpkit.launch.launch import Launch
from ddpkit.rendezvous.store import without_prefixes
from ddpkit.survival import states as kept_states
from ddpkit.survival import survive as survival

PATIENCE = timedelta(seconds=3)
GLOBAL_BATCH = 6  # samples of a step


class History:
    """What stands for a model: the samples of which it was made, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return a copy."""
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take one over."""
        self.steps = list(state["steps"])


class Survivor:
    """The job of one simulated process, which `survive` joins, leaves and joins anew."""

    group: Group

    def __init__(self, start: Start, mine: Rank, job: Job) -> None:
        self.start = start
        self.mine = mine
        self.job = job
        self.launch = job.launch
        self.generation = ""
        self.store: HostedStore | None = None  # where the job began, if this process hosts it

    @property
    def session(self) -> Any:
        """The session of the job that it is in."""
        return self.job.session

    def setup(self) -> Context:
        """Do as `lifecycle.setup()`."""
        self.job = self.start.new_job(self.launch.rank, self.launch.world_size)
        with self._joining():
            self.start.join(self.mine, self.job)
        server = without_prefixes(self.session.store)
        self.store = server if isinstance(server, HostedStore) else None
        self._enter(self.mine.token)
        return self.job.context

    def rejoin(
        self,
        asked: Options,
        store: PrefixStore,
        rank: int,
        size: int,
        store_host: int,
        lost: Callable[[], str],
    ) -> Context:
        """Do as `lifecycle.rejoin()`."""
        launch = Launch("platform", rank, size)
        job = self.job = Job(launch, asked, context_of(launch, self.job.context.device), lost)
        if size == 1:
            self.group = Group(self.start.world, 1)
            self.group.enter()
            self.generation = f"{self.mine.process.name} alone"
            return job.context
        opened = startup.OpenStore(store, host=store_host)
        with self._joining():
            session, members = startup.join_and_watch(job, opened)
            session.barrier(session.count("group made"))  # as gloo connects each rank with each
        self._enter(members.token)
        return job.context

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Do as `lifecycle._begin()` with an error."""
        try:
            yield
        except Killed:
            raise
        except BaseException as error:
            if self.session is not None:
                cause = report(self.job, error)
                self.leave()
                raise cause from error
            raise

    def _enter(self, token: str) -> None:
        self.generation = token
        self.group = self.start.group_of(self.session, token)

    def leave(self) -> None:
        """Do as `teardown()`."""
        if self.job.session is not None:
            leave(self.job)
            self.job.session = None

    def leave_to_rejoin(self) -> None:
        """Do as `lifecycle.leave_to_rejoin()`."""
        self.job.hosts_store = False  # as if it did not linger
        self.leave()

    def report(self, error: BaseException) -> None:
        """Do as `lifecycle.report()`."""
        if self.session is not None:
            report(self.job, error)


def _mine() -> Survivor:
    return outside.running().survivor


def _hold(hold: bool, grace: float | None = None) -> None:
    session = _mine().session
    if session is None:
        return
    session.failures.held = hold
    if grace is not None:
        session.failures.grace = grace


def _broadcast(value: Any, src: int) -> Any:
    return _mine().group.all_gather(value, _mine().job.launch.rank)[src]


def _barrier() -> None:
    session = _mine().session
    if session is not None:
        session.barrier(session.count("barrier"))


def put_in_place() -> None:
    """Put the simulated job under `survive`."""
    survival.lifecycle = SimpleNamespace(
        setup=lambda **_: _mine().setup(),
        teardown=lambda: _mine().leave(),
        leave_to_rejoin=lambda: _mine().leave_to_rejoin(),
        rejoin=lambda *args: _mine().rejoin(*args),
        enter_collective=lambda: _mine().session,
        report=lambda error: _mine().report(error),
    )
    survival.current_job = SimpleNamespace(
        owns_group=lambda: True,
        hold_failures=_hold,
        asked_options=lambda: _mine().job.asked,
        has_unfinished=lambda: False,
        session=lambda: _mine().session,
        finish=lambda: None,
    )
    survival.stop_agreement = SimpleNamespace(current=lambda: SimpleNamespace(request=None, decision=None))
    survival.ranks = SimpleNamespace(get_rank=lambda: _mine().job.launch.rank)
    survival.hosted_store = lambda _: _mine().store
    survival.time = outside.TIME
    survival.dist = outside.DIST
    kept_states.current_job = survival.current_job
    kept_states.share_data = _broadcast
    survival.broadcast_bytes = lambda *_: b"the secret of all jobs"
    survival.check_members = lambda *_: None
    survival.log = SimpleNamespace(warning=lambda text, *args: outside.note(text % args))
    kept_states.release_models = lambda _: None
    kept_states.get_rng_state = kept_states.set_rng_state = lambda *_: None
    survival.barrier = _barrier


def train(mine: Rank, start: Start, job: Job, steps: int, pace: float, commits: list[Any], raises_at: int) -> History:
    """Train with `survive`: each step deals its samples to the ranks that are there."""
    survivor = mine.process.survivor = Survivor(start, mine, job)
    history = History()
    attempts = survival.survive(history, patience=PATIENCE, timeout=TIMEOUT)
    try:
        for attempt in attempts:
            with attempt as context:
                mine.notes.append("began")
                while attempt.steps < steps:
                    _take_step(survivor, history, attempt, context, pace, commits, raises_at)
    finally:
        attempts.close()
    return history


def _take_step(
    survivor: Survivor,
    history: History,
    attempt: survival.Attempt,
    context: Context,
    pace: float,
    commits: list[Any],
    raises_at: int,
) -> None:
    draw = survivor.start.world.random
    outside.sleep(draw.uniform(0, pace))
    step = attempt.steps
    if step == raises_at:
        raise ValueError("broken")
    everyone = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    share = list(everyone)[context.rank :: context.world_size]
    found = survivor.group.all_gather(share, context.rank)
    attempt._survivors.kept._begin_step()  # as the optimizer's hook does
    outside.sleep(draw.uniform(0, pace / 4))
    history.steps.append(tuple(sorted(sample for part in found for sample in part)))
    attempt.commit()
    commits.append((step, survivor.generation, survivor.mine.process.name))
    if len(history.steps) != attempt.steps:
        raise AssertionError(f"{len(history.steps)} steps in the model, {attempt.steps} counted")
