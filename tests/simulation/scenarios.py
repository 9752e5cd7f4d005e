"""What happens in a simulated world, and what must hold whatever the order: each scenario returns what is wrong."""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import timedelta
from typing import Any

from outside import cut, lose, sleep
from starts import BOUND, Rank, Start
from store import Server
from survivors import GLOBAL_BATCH, History, train
from world import Process, World

from ddpkit.errors import BarrierTimeoutError, LaunchError, PeerError
from ddpkit.job.job import Job
from ddpkit.rendezvous.failures import JobContinues
from ddpkit.rendezvous.generation import StoreLost
from ddpkit.stop import _wait_for_decision
from ddpkit.watch.messages import StopRequest


def joining(world: World) -> list[str]:
    """Ranks join: some late, killed, stopped for a while, twice, told another size, or started anew."""
    draw = world.random
    size = draw.randint(2, 4)
    outlives = draw.random() < 0.5
    server = Server(world, None) if outlives else None
    hosts = ["here", draw.choice(["here", "there"])]
    start = Start(world, size, server)
    latest = draw.choice([0.2, 2.0, 15.0])
    fault = draw.choice(["", "killed", "killed", "stopped", "twice", "another size", "anew"])
    for rank in range(size):
        told = size + (fault == "another size" and rank == size - 1)
        start.start(rank, _meet_once, draw.uniform(0, latest), hosts[rank % 2], told)
    starts = [start]
    victim = draw.choice(start.ranks)
    when = world.now + draw.uniform(0, latest + 1)
    if fault == "killed":
        world.at(when, lambda: victim.process.end(-9))
    elif fault == "stopped":
        _stop_for(world, victim.process, when, draw.uniform(0, 3))
    elif fault == "twice":
        twice = draw.randrange(1, size)
        start.start(
            twice, _meet_once, start.begins[twice] + draw.choice([1e-4, latest]) * draw.random(), draw.choice(hosts)
        )
    elif fault == "anew" and outlives:
        world.at(when, lambda: _start_anew(world, starts, server, hosts))
    world.run(2 * BOUND)

    everyone = [rank for each in starts for rank in each.ranks]
    wrong = _hangs(everyone)
    wrong += _unexplained(everyone, (LaunchError, PeerError, BarrierTimeoutError))
    joined: dict[tuple[str, int], Rank] = {}
    for rank in everyone:
        if not rank.token:
            continue
        if (rank.token, rank.rank) in joined:
            wrong.append(f"{rank.process.name} and {joined[rank.token, rank.rank].process.name} have one number")
        joined[rank.token, rank.rank] = rank
    if latest < 5 and (not fault or (fault == "anew" and not outlives)):
        wrong += [f"{rank}, and nothing was wrong" for rank in everyone if not rank.has_ended_well]
    if fault == "anew" and outlives and latest < 5:
        wrong += [f"{rank}, started anew" for rank in starts[-1].ranks if not rank.has_ended_well]
    if fault == "another size":
        wrong += [f"{rank}, with another size" for rank in everyone if rank.session is not None]
    return wrong


def _start_anew(world: World, starts: list[Start], server: Server | None, hosts: list[str]) -> None:
    """End all ranks and start them again, as torchrun does."""
    first = starts[0]
    for rank in first.ranks:
        rank.process.end(-15)
    again = Start(world, first.size, server)
    starts.append(again)
    for rank in range(first.size):
        again.start(rank, _meet_once, world.random.uniform(0, 1), hosts[rank % 2])


def _meet_once(mine: Rank, job: Job) -> None:
    session = job.session
    assert session is not None
    session.barrier(session.count("once"))


def meeting(world: World) -> list[str]:
    """Ranks meet again and again, about as late as they may; some fail, are killed, stopped, or leave."""
    draw = world.random
    size = draw.randint(2, 4)
    start = Start(world, size, Server(world, None) if draw.random() < 0.5 else None)
    rounds = draw.randint(1, 5)
    kinds = [draw.choice(["meet", "exchange"]) for _ in range(rounds)]
    is_late = draw.random() < 0.5
    timeouts = [draw.uniform(0.05, 0.4) if is_late else 20.0 for _ in range(rounds)]
    outcomes: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    culprit = draw.randrange(size) if draw.random() < 0.6 else None
    deed = draw.choice(["raises", "killed", "stopped", "leaves"])
    which = draw.randrange(rounds)

    def script(mine: Rank, job: Job) -> None:
        session = job.session
        assert session is not None
        for number, (kind, seconds) in enumerate(zip(kinds, timeouts, strict=True)):
            longest = 1.3 * seconds if is_late else 0.01
            sleep(draw.uniform(0, longest))
            if mine.rank == culprit and number == which and deed == "leaves":
                return
            if mine.rank == culprit and number == which and deed == "raises":
                raise ValueError("broken")
            try:
                if kind == "meet":
                    session.barrier(session.count("round"), timedelta(seconds=seconds))
                else:
                    texts = session.exchange(f"{mine.rank}/{number}", "texts", timedelta(seconds=seconds))
                    if texts != [f"{rank}/{number}" for rank in range(size)]:
                        outcomes[number]["mixed"].append(texts)
            except BarrierTimeoutError as error:
                if "did not answer" in str(error):  # the first, who may have passed
                    raise
                outcomes[number]["gave up"].append((mine.rank, [rank for rank, _ in error.missing]))
                raise
            outcomes[number]["passed"].append(mine.rank)

    for rank in range(size):
        start.start(rank, script, draw.uniform(0, 0.2), draw.choice(["here", "there"]))
    if culprit is not None and deed in ("killed", "stopped"):
        process = start.ranks[culprit].process
        when = world.now + draw.uniform(0, 4)
        if deed == "killed":
            world.at(when, lambda: process.end(-9))
        else:
            _stop_for(world, process, when, draw.uniform(0.1, 3))
    world.run(2 * BOUND)

    wrong = _hangs(start.ranks) + _unexplained(start.ranks, (PeerError, BarrierTimeoutError, LaunchError, ValueError))
    for number, found in outcomes.items():
        if found["mixed"]:
            wrong.append(f"round {number} mixed texts: {found['mixed']}")
        if found["passed"] and found["gave up"]:
            wrong.append(f"round {number}: ranks {found['passed']} passed, {found['gave up']} gave up")
    if culprit is None and not is_late:
        wrong += [f"{rank}, and nothing was wrong" for rank in start.ranks if not rank.has_ended_well]
    if culprit is not None and not is_late and deed in ("killed", "raises"):
        wrong += _other_culprits(start.ranks, {culprit})
    return wrong


def failing(world: World) -> list[str]:
    """Ranks take steps, and one or two of them raise, are killed, or end by themselves."""
    draw = world.random
    size = draw.randint(2, 6)
    start = Start(world, size, Server(world, None) if draw.random() < 0.5 else None)
    culprits = draw.sample(range(size), draw.choice([1, 1, 1, 2]))
    deeds = {culprit: draw.choice(["raises", "killed", "exits"]) for culprit in culprits}
    moments = {culprit: draw.randint(0, 6) for culprit in culprits}

    def script(mine: Rank, job: Job) -> None:
        assert job.session is not None
        group = start.group_of(job.session, mine.token)
        for number in range(6):
            sleep(draw.uniform(0, 0.05))
            if moments.get(mine.rank) == number and deeds[mine.rank] == "raises":
                raise ValueError(f"broken {mine.rank}")
            if moments.get(mine.rank) == number and deeds[mine.rank] == "exits":
                mine.process.end(3)
            group.all_gather(number, mine.rank)
        sleep(draw.uniform(0, 0.3))
        if moments.get(mine.rank) == 6 and deeds[mine.rank] == "raises":
            raise ValueError(f"broken {mine.rank}")
        job.session.barrier(job.session.count("end"))

    for rank in range(size):
        start.start(rank, script, draw.uniform(0, 0.2), draw.choice(["here", "there"]))
    for culprit, deed in deeds.items():
        if deed == "killed":
            world.at(world.now + draw.uniform(0, 2), lambda culprit=culprit: start.ranks[culprit].process.end(-9))
    world.run(BOUND)
    wrong = _hangs(start.ranks)
    wrong += _unexplained(start.ranks, (PeerError, BarrierTimeoutError, LaunchError, ValueError))
    return wrong + _other_culprits(start.ranks, set(culprits))


def losing(world: World) -> list[str]:
    """Ranks train for minutes over a link that loses much; one may be killed, or the link be cut, at some moment."""
    draw = world.random
    size = draw.randint(2, 4)
    start = Start(world, size, Server(world, None))
    lose(draw.choice([0.01, 0.1, 0.3]))
    fault = draw.choice(["", "killed", "cut"])
    heard: list[float] = []

    def script(mine: Rank, job: Job) -> None:
        assert job.session is not None
        group = start.group_of(job.session, mine.token)
        try:
            for number in range(100):
                sleep(draw.uniform(0, 5))
                group.all_gather(number, mine.rank)
            job.session.barrier(job.session.count("end"))
        except BaseException:
            heard.append(world.now)
            raise

    for rank in range(size):
        start.start(rank, script, draw.uniform(0, 0.2), ["here", "there"][rank % 2])
    moment = world.now + draw.uniform(20, 120)
    victim = draw.choice(start.ranks)
    if fault == "killed":
        world.at(moment, lambda: victim.process.end(-9))
    elif fault == "cut":
        world.at(moment, lambda: cut("here", "there"))
    world.run(1200)

    wrong = _hangs(start.ranks) + _unexplained(start.ranks, (PeerError,))
    if not fault:
        wrong += [f"{rank}, and nothing was wrong" for rank in start.ranks if not rank.has_ended_well]
    else:
        wrong += [f"heard of it after {when - moment:.1f} s" for when in heard if not 0 < when - moment < 20]
        wrong += [f"{rank} did not hear of it" for rank in start.ranks if rank.has_ended_well]
    if fault == "killed":
        wrong += _other_culprits(start.ranks, {victim.rank})
    return wrong


def stopping(world: World) -> list[str]:
    """Ranks take steps, and one or several are asked to stop; perhaps one is killed."""
    draw = world.random
    size = draw.randint(2, 6)
    start = Start(world, size, Server(world, None) if draw.random() < 0.5 else None)
    steps = draw.randint(1, 12)
    meets = draw.random() < 0.5  # in each step, so that none is far ahead
    stops: dict[int, int] = {}
    pace = draw.choice([0.001, 0.05])

    def script(mine: Rank, job: Job) -> None:
        session = job.session
        assert session is not None
        group = start.group_of(session, mine.token)
        agreement = session.watch().stop_agreement
        for _ in range(steps):
            number, must_wait = agreement.next_step()
            if must_wait and agreement.decision is None:
                _wait_for_decision(session, agreement)
            if agreement.decision is not None and number >= agreement.decision.step:
                stops[mine.rank] = number
                break
            sleep(draw.uniform(0, pace))
            if meets:
                group.all_gather(number, mine.rank)
        session.barrier(session.count("end"))

    def ask(mine: Rank) -> None:
        monitor = None if mine.session is None else mine.session.watch()
        if monitor is not None and monitor.stop_agreement.request is None:
            monitor.stop_agreement.request = StopRequest(mine.rank, "here", "asks", 15)
            if not mine.process.is_dead:
                world.current = mine.process.main
                monitor.connections.wake()
                world.current = None

    for rank in range(size):
        start.start(rank, script, draw.uniform(0, 0.2), draw.choice(["here", "there"]))
    for _ in range(draw.choice([1, 1, 2])):
        asks = draw.choice(start.ranks)
        world.at(world.now + draw.uniform(0.2, 1.5), lambda asks=asks: ask(asks))
    victim = draw.choice(start.ranks) if draw.random() < 0.3 else None
    if victim is not None:
        world.at(world.now + draw.uniform(0.2, 1.5), lambda: victim.process.end(-9))
    world.run(BOUND)

    wrong = _hangs(start.ranks) + _unexplained(start.ranks, (PeerError, BarrierTimeoutError, LaunchError))
    if len(set(stops.values())) > 1:
        wrong.append(f"they stopped at steps {stops}")
    if victim is None and stops and len(stops) < size:
        wrong.append(f"only some stopped: {stops}")
    if victim is None:
        wrong += [f"{rank}, and nobody failed" for rank in start.ranks if not rank.has_ended_well]
    else:
        wrong += _other_culprits(start.ranks, {victim.rank})
    return wrong


# of a rank that failed while another was about to be connected with it, or waited for that
_NAMED_IN_WORDS = (
    r"cannot connect to rank %d",
    r"group made: [^.]*rank %d \(",
)


def surviving(world: World) -> list[str]:
    """Ranks train by `survive`, and some are killed, stopped for long, raise, or are cut off."""
    draw = world.random
    size = draw.randint(2, 5)
    start = Start(world, size, Server(world, None) if draw.random() < 0.5 else None)
    steps = draw.randint(1, 8)
    pace = draw.choice([0.002, 0.05])
    commits: list[tuple[int, str, str]] = []
    fault = draw.choice(["killed", "killed", "killed and stopped", "stopped", "raises", "cut", "killed and cut"])
    raises_at = draw.randrange(steps) if fault == "raises" else -1
    culprit = draw.randrange(size)

    def script(mine: Rank, job: Job) -> History:
        ends_at = raises_at if mine.rank == culprit else -1
        return train(mine, start, job, steps, pace, commits, ends_at)

    hosts = ["here", "there"] if "cut" in fault or draw.random() < 0.3 else ["here"]
    for rank in range(size):
        start.start(rank, script, draw.uniform(0, 0.1), hosts[rank % len(hosts)], joins=False)
    killed = set()
    moment = world.now + draw.uniform(0.3, 1.5)
    had_begun: list[bool] = []  # whether all were in an attempt when the first was lost
    world.at(moment, lambda: had_begun.append(True) if all(rank.notes for rank in start.ranks) else None)
    if fault == "killed":
        for _ in range(draw.choice([1, 1, 2, 3])):
            victim = draw.choice(start.ranks)
            killed.add(victim.process.name)
            world.at(moment, lambda victim=victim: victim.process.end(-9))
            moment += draw.choice([0.0, draw.uniform(0, 0.1), draw.uniform(0, 2)])
    elif fault == "killed and stopped":
        victim, stopped = draw.sample(start.ranks, 2)
        killed |= {victim.process.name, stopped.process.name}
        world.at(moment, lambda: victim.process.end(-9))
        _stop_for(world, stopped.process, moment + draw.uniform(0, 1), 40.0)
    elif fault == "stopped":
        killed.add(start.ranks[culprit].process.name)
        _stop_for(world, start.ranks[culprit].process, moment, draw.choice([1.0, 5.0, 40.0]))
    elif fault == "raises":
        killed.add(start.ranks[culprit].process.name)
    elif "cut" in fault:
        killed |= {rank.process.name for rank in start.ranks}
        if fault == "killed and cut":
            world.at(moment, lambda: start.ranks[culprit].process.end(-9))
            moment += draw.choice([draw.uniform(0, 0.05), draw.uniform(0, 0.5)])
        world.at(moment, lambda: cut("here", "there"))
    world.run(4 * BOUND)

    wrong = _hangs(start.ranks)
    explained = [rank for rank in start.ranks if "stopped" not in fault or rank.process.name not in killed]
    wrong += _unexplained(explained, (PeerError, BarrierTimeoutError, LaunchError, ValueError))
    ended = [rank for rank in start.ranks if rank.has_ended_well]
    expected = [tuple(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(steps)]
    wrong += [f"{rank} with {rank.value.steps}" for rank in ended if rank.value.steps != expected]
    if had_begun:
        lost = [rank for rank in start.ranks if _is_lost(rank, killed)]
        wrong += [f"{rank}, and was not killed" for rank in lost]
    # the last that committed a step: those before may have lost it with all who had it
    finals = {generation for step, generation, name in commits if step == steps - 1 and name in _names(ended)}
    if len(finals) > 1 and ("cut" in fault or "stopped" in fault):
        wrong.append(f"two jobs ended well: {finals}")
    return wrong


_REFUSING = 8.0  # seconds from the last loss, or from its coming, in which a late process is refused


def coming_late(world: World) -> list[str]:
    """Ranks train by `survive`, and where some are killed new processes come, which are refused."""
    draw = world.random
    size = draw.randint(2, 4)
    start = Start(world, size)
    steps = draw.randint(4, 40)
    pace = draw.choice([0.05, 0.5, 1.0])
    commits: list[tuple[int, str, str]] = []
    hosts = draw.choice([["here"], ["here", "there"]])
    ends: list[float] = []
    came_at: dict[Rank, float] = {}
    ended_at: dict[Rank, float] = {}

    def script(mine: Rank, job: Job) -> History:
        history = train(mine, start, job, steps, pace, commits, raises_at=-1)
        ends.append(world.now)
        return history

    def begin(rank: int) -> Rank:
        return start.start(rank, script, draw.uniform(0, 0.1), hosts[rank % len(hosts)], joins=False)

    def end(victim: Rank) -> None:
        if not victim.process.is_dead:
            killed.add(victim.process.name)
            victim.process.end(-9)

    def come(rank: int) -> None:
        if any(former.rank == rank and not former.process.is_dead for former in start.ranks):
            return  # a platform starts a process again when it has ended
        late = begin(rank)
        came_at[late] = world.now
        late.process.at_end.append(lambda: ended_at.setdefault(late, world.now))

    first = [begin(rank) for rank in range(size)]
    killed: set[str] = set()
    moment = world.now + draw.uniform(0.4, 1.5)
    had_begun: list[bool] = []  # whether all were in an attempt when the first was lost
    world.at(moment, lambda: had_begun.append(True) if all(rank.notes for rank in first) else None)
    for victim in draw.sample(first, draw.randint(1, size - 1)):
        last_loss = moment
        world.at(moment, lambda victim=victim: end(victim))
        for _ in range(draw.choice([1, 1, 2])):  # a platform starts it again and again
            world.at(moment + draw.choice([0.01, draw.uniform(0, 12)]), lambda rank=victim.rank: come(rank))
        moment += draw.choice([0.0, draw.uniform(0, 0.2), draw.uniform(0, 4)])
    world.run(4 * BOUND)

    wrong = _hangs(start.ranks) + _unexplained(start.ranks, (PeerError, BarrierTimeoutError, LaunchError))
    ended = [rank for rank in start.ranks if rank.has_ended_well]
    expected = [tuple(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(steps)]
    wrong += [f"{rank} with {rank.value.steps}" for rank in ended if rank.value.steps != expected]
    wrong += [f"{rank}, and came late" for rank in came_at if rank.has_ended_well]
    if had_begun:
        wrong += [f"{rank}, and was not killed" for rank in first if _is_lost(rank, killed)]
        for late, when in came_at.items():
            is_answered = hosts == ["here"] or late.rank == 0  # elsewhere only a new rank 0 opens the address
            bound = max(when, last_loss) + _REFUSING
            if not is_answered or bound > min(ends, default=0.0):
                continue
            if not isinstance(late.error, JobContinues | StoreLost) or ended_at[late] > bound:
                wrong.append(f"{late}, after {ended_at[late] - when:.1f} s")
    world.note(f"{len(ended)} of {size} ended well, {len(came_at)} came late")
    return wrong


def _is_lost(rank: Rank, killed: set[str]) -> bool:
    is_outvoted = isinstance(rank.error, LaunchError) and "may continue without this rank" in str(rank.error)
    return not rank.has_ended_well and not is_outvoted and rank.process.name not in killed


def _names(ranks: list[Rank]) -> set[str]:
    return {rank.process.name for rank in ranks}


def _stop_for(world: World, process: Process, when: float, seconds: float) -> None:
    world.at(when, process.stop)
    world.at(when + seconds, process.go_on)


def _hangs(ranks: list[Rank]) -> list[str]:
    return [f"{rank.process.name} hangs" for rank in ranks if not rank.process.is_dead]


def _unexplained(ranks: list[Rank], kinds: tuple[type[BaseException], ...]) -> list[str]:
    """List ranks that ended with an error which is none of ddpkit's, nor the script's own."""
    return [f"{rank}" for rank in ranks if rank.error is not None and not isinstance(rank.error, kinds)]


def _other_culprits(ranks: list[Rank], culprits: set[int]) -> list[str]:
    """List ranks that name another than the one that failed, and those that name different ones."""
    wrong = []
    for rank in ranks:
        if rank.rank in culprits or rank.error is None:
            continue
        named = {rank.error.rank} if isinstance(rank.error, PeerError) else set()
        if isinstance(rank.error, BarrierTimeoutError):
            named = {missing for missing, _ in rank.error.missing} & culprits
        unconnected = re.search(r"Ranks \[([\d, ]+)\] did not connect to the watch", str(rank.error))
        if unconnected:
            named = set(map(int, unconnected[1].split(", ")))
        if isinstance(rank.error, LaunchError) and rank.session is None:
            continue
        if any(re.search(words % culprit, str(rank.error)) for culprit in culprits for words in _NAMED_IN_WORDS):
            continue
        if not named or not named <= culprits:
            wrong.append(f"{rank}, but {culprits} failed")
    return wrong


SCENARIOS = {
    scenario.__name__: scenario for scenario in (joining, meeting, failing, losing, stopping, surviving, coming_late)
}
