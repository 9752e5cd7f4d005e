"""Record demonstrations of the scripted expert.

On one process, and on two, which share the work and write the same files::

    python -m robot.collect
    torchrun --nproc_per_node=2 -m robot.collect --episodes 1000 --folder data/more --seed 1000

Noise is added to the executed actions, not to the recorded ones, so that the demonstrations also show how to get back
from states that the expert would never reach.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shared.program import Parser, UserError, hides_bar, one_message, user_error
from tqdm import tqdm

import ddpkit

from .environments import AT_ONCE, EXPERTS, UNSEEN, Arena, Expert, Seen
from .samples import write_shard

log = logging.getLogger("robot")


class Demonstrator(Expert):
    """The expert with noise on its actions, and a record of its observations and intended actions."""

    def __init__(self, env_id: str, noise: float, kept: Sequence[str] = ("observations",)) -> None:
        super().__init__(env_id)
        self.noise, self.kept = noise, kept

    def begin(self, seeds: Sequence[int]) -> None:
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.record: dict[str, list[np.ndarray]] = {name: [] for name in (*self.kept, "actions")}

    def act(self, seen: Seen) -> np.ndarray:
        meant = super().act(seen)
        for name, values in (seen | {"actions": meant}).items():
            if name in self.record:
                self.record[name].append(values)
        trembling = np.stack([rng.normal(0, self.noise, 4) for rng in self.rngs])
        return (meant + trembling).clip(-1, 1).astype(np.float32)

    def episodes(self) -> list[dict[str, np.ndarray]]:
        """Return observations and intended actions of the last episodes, by name, each (steps, ...)."""
        stacked = {name: np.stack(moments, 1) for name, moments in self.record.items()}
        return [{name: values[number] for name, values in stacked.items()} for number in range(len(self.rngs))]


def read_settings() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--env", default="FetchPickAndPlace-v4", choices=list(EXPERTS), help="environment")
    add("--episodes", type=int, default=200, help="how many to play")
    add("--per-shard", type=int, default=20, help="episodes in a file, at most 25")
    add("--horizon", type=int, default=50, help="steps in an episode")
    add("--noise", type=float, default=0.1, help="standard deviation of the noise; the largest action is 1")
    add("--pictures", type=int, metavar="SIZE", help="also record pictures of a camera, SIZE x SIZE pixels")
    add("--seed", type=int, default=0, help="seed of the first episode; each further one adds 1")
    add("--folder", type=Path, default=Path("data/fetch_pick_and_place"), help="folder to write to")
    settings = parser.parse_args()
    if not 0 < settings.per_shard <= AT_ONCE:
        parser.error(f"--per-shard must be from 1 to {AT_ONCE}, the episodes that are played at once")
    if not 0 <= settings.seed <= UNSEEN - settings.episodes:
        parser.error(f"seeds must be at least 0 and below {UNSEEN}: evaluation uses the others")
    return settings


def main(settings: argparse.Namespace, job: ddpkit.Context) -> None:
    ddpkit.run_on_main(prepare, settings.folder)
    size, kept = settings.pictures, ["observations"]
    if size:
        kept += ["proprioception", "desired_goal", "camera"]
    arena = Arena(settings.env, settings.horizon, (size, size) if size else None)
    player = Demonstrator(settings.env, settings.noise, kept)
    seeds = range(settings.seed, settings.seed + settings.episodes)
    shards = [seeds[start : start + settings.per_shard] for start in range(0, len(seeds), settings.per_shard)]
    mine, reached = range(job.rank, len(shards), job.world_size), 0
    for number in tqdm(mine, "shards", disable=hides_bar()):
        reached += sum(arena.play(player, shards[number]))
        write_shard(settings.folder / f"episodes-{number:05d}.npz", settings.env, player.episodes())
    arena.close()
    reached = ddpkit.all_reduce(reached)
    log.info("%d episodes in %s, %.1f %% reach the goal", len(seeds), settings.folder, 100 * reached / len(seeds))


def prepare(folder: Path) -> None:
    with user_error("--folder", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("episodes-*.npz")):
        raise UserError(f"{folder} already holds episodes: delete them, or write to another --folder")


if __name__ == "__main__":
    with one_message(), ddpkit.distributed(num_threads=1) as job:
        main(read_settings(), job)
