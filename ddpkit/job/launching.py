"""Which launch this process is in, as the caller or the environment says, and if it can be joined."""

from __future__ import annotations

import logging
import os
import re
from importlib import import_module

import torch

from ..errors import LaunchError
from ..launch.detection import detect_launch
from ..launch.launch import Launch, forgotten_launcher
from ..launch.process_tree import Agent, find_agent, outer_launch, typed_in_terminal
from .job import Options

log = logging.getLogger(__name__)
_OLDEST_TORCH = (2, 6)  # the first with torch.accelerator; also in pyproject.toml


def check_torch(version: str = torch.__version__) -> None:
    """Raise if torch is too old: vendors' builds of it are often installed past pip's own check."""
    release = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if tuple(release) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise LaunchError(f"ddpkit needs torch {oldest} or newer, found {version}.")


def checked_launch(asked: Options) -> Launch:
    """Return the launch that the caller or the environment describes; if it is refused, tell peers that may wait."""
    launch, warning = asked.origin.launch, ""
    try:
        check_torch()
        if launch is None:
            launch, warning = unnested_launch()
        if launch.world_size > 1:
            import_module(".joining", __package__).check_open_files(launch, asked)
    except LaunchError as error:
        import_module(".refusal", __package__).tell_peers(error, asked.origin)
        raise
    if warning:
        log.warning("%s", warning)
    return launch


def unnested_launch() -> tuple[Launch, str]:
    """Return the launch that the environment describes, and a warning if it may not be what was meant, else "".

    Raises:
        LaunchError: If it is refused, or nested in another.
    """
    launch = detect_launch(os.environ)
    agent = agent_of(launch)
    outer = outer_launch(agent.env, launch, os.environ) if agent else None
    if outer:
        raise LaunchError(outer)
    if typed_in_terminal(launch, os.environ, os.getpid()):
        shells = f"{launch.world_size} shells that srun opened"
        return Launch("single", 0, 1, 0, 1, 0, 1), f"This was typed into one of {shells}, so it runs alone"
    return launch, forgotten_launcher(launch) or ""


def agent_of(launch: Launch) -> Agent | None:
    """Find torchrun's agent above this process; None where there is none."""
    if launch.kind != "torchrun":
        return None
    return find_agent(os.environ, os.getpid())
