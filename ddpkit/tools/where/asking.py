"""Asking a running job what its ranks are doing, over the store where they have met and the watch of rank 0."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from ...errors import LaunchError
from ...join.members import Members
from ...join.rendezvous import Generation
from ...join.sockets import connect
from ...join.store import connect as connect_to_store
from ...join.store import wait_for_listener
from ...join.store_values import encode
from ...timing import Pace
from ...watch.messages import Activity, Lines, parse

_STORE_SECONDS = 5.0  # in which the store must answer


@dataclass(frozen=True)
class Answer:
    """What the ranks of a job have answered.

    Attributes:
        members: The ranks of the job.
        activities: Of those that have answered.
        paces: How long the last steps took, of all ranks or of none.
    """

    members: Members
    activities: list[Activity]
    paces: list[Pace]


def ask(address: str, port: int, seconds: float) -> Answer:
    """Ask all ranks of the job that has met at this address; wait at most so many seconds for answers.

    Raises:
        LaunchError: If no job runs there, it has no watch, or rank 0's cannot be reached from here.
    """
    members = _find_members(address, port)
    if members.monitor_address is None:
        raise LaunchError("The job runs without the watch, setup(watch=False), so its ranks cannot be asked.")
    try:
        connection = connect(*members.monitor_address, seconds)
    except OSError as error:
        host, number = members.monitor_address
        raise LaunchError(
            f"The watch of rank 0 at {host}:{number} cannot be reached from here: {error}. Ask on the node of rank 0, "
            f"{members.nodes[members.runs[0].node]}; if that is here, the process may have ended."
        ) from None
    activities: dict[int, Activity] = {}
    paces: dict[int, Pace] = {}
    lines = Lines()
    deadline = time.monotonic() + seconds
    with connection:
        connection.sendall(encode(token=members.token, asks=True))
        while len(activities) < members.world_size and time.monotonic() < deadline:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = connection.recv(1 << 16)
            except OSError:  # late, or cut
                break
            if not data:
                break
            for line in lines.feed(data):
                message = parse(line, members.world_size)
                if message is not None and message.activity is not None:
                    activities[message.activity.rank] = message.activity
                if message is not None and message.pace is not None:
                    paces[message.pace.rank] = message.pace
    return Answer(members, list(activities.values()), list(paces.values()))


def _find_members(address: str, port: int) -> Members:
    """Read in the store who the ranks of the job are that meets there now."""
    wait_for_listener(address, port, time.monotonic())
    store = connect_to_store(address, port, timedelta(seconds=_STORE_SECONDS))
    generation = Generation.latest(store)
    if generation is None:
        raise LaunchError(f"No job has joined with ddpkit.setup() at {address}:{port}.")
    if not generation.is_complete():
        raise LaunchError(f"The ranks at {address}:{port} are still joining.")
    if generation.is_over():
        raise LaunchError(f"The job at {address}:{port} has ended.")
    return generation.members()
