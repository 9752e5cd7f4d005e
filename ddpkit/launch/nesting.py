"""Detect a torchrun that was started by each rank of another launch, so that each runs a job of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import LaunchError
from .detection import detect_launch
from .launch import Launch
from .launchers import MPI_AND_SLURM, PLATFORM, RANKS
from .reading import Reading, filled


def outer_launch(agent_env: Mapping[str, str], launch: Launch, env: Mapping[str, str]) -> str | None:
    """Explain of which launch torchrun itself was part, if that launch's processes have started separate torchrun jobs.

    It is right that each process of a launch starts one agent of one torchrun job. That job then has as many agents as
    the launch has processes (in any order: torchrun's rendezvous sorts them by host name). Where a platform configures
    torchrun by PET_NNODES, that is their number, or its range.

    Args:
        agent_env: The environment in which torchrun was started.
        launch: This process's launch.
        env: This process's environment.

    Returns:
        The error's text; None if all is right, or if torchrun's environment makes no sense by itself.
    """
    outside = filled(agent_env)
    agents = env.get("GROUP_WORLD_SIZE", "")
    try:
        outer = _launch_around(outside)
    except LaunchError:
        return None
    if launch.kind != "torchrun" or outer.world_size == 1 or not agents:
        return None
    if int(agents) in _expected_agents(outside, outer):
        return None
    signs = [*RANKS.values(), *(sign for launcher in MPI_AND_SLURM for sign in launcher.signs)]
    unset = [name for name in signs if name in outside]
    count = "1 agent" if agents == "1" else f"{agents} agents"
    return (
        f"torchrun was started by rank {outer.rank} of {outer.world_size} of another launch "
        f"({', '.join(outer.evidence[:2])}), but its job has {count}: "
        "the outer ranks would run separate jobs. Start torchrun once per node with --nnodes, or leave out one of the "
        f"two launchers; if this is meant, unset {', '.join(unset)} in front of torchrun."
    )


def _launch_around(outside: Mapping[str, str]) -> Launch:
    if not all(name in outside for name in RANKS.values()):
        return detect_launch(outside)
    without_address = PLATFORM._replace(signs=(), needs=RANKS, takes={})  # torchrun brings its own
    return Reading(without_address, outside).launch()


def _expected_agents(outside: Mapping[str, str], outer: Launch) -> range:
    """Return the numbers of agents that a torchrun job in this environment may have."""
    nodes = outside.get("PET_NNODES", "")
    if "TORCHELASTIC_RUN_ID" in outside or not re.fullmatch("[0-9]+(:[0-9]+)?", nodes):
        nodes = str(outer.world_size)
    low, _, high = nodes.partition(":")
    return range(int(low), int(high or low) + 1)
