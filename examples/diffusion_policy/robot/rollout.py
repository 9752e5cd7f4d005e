"""Measure the success of policies, the scripted expert and random actions on unseen seeds.

From the folder above, on one process; on two, which share the episodes; and with a film and a strip of one episode::

    python -m robot.rollout runs/fetch_pick_and_place/20250101120000/last.pth
    torchrun --nproc_per_node=2 -m robot.rollout runs/.../last.pth --players ema raw
    python -m robot.rollout runs/.../last.pth --players ema --episodes 1 --film rollout --strip rollout.png
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from shared.program import Parser, one_message

import ddpkit

from . import drawing
from .checkpoints import load_policies
from .environments import EXPERTS, FINAL, Expert, Learned, Player, Random, evaluate
from .samples import Entries

log = logging.getLogger("robot")


def read_settings() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="last.pth or models/model_epoch_N.pth of a run")
    add("--players", nargs="+", help="some of ema, raw, random, expert (default: all)")
    add("--episodes", type=int, default=100, help="episodes, over all ranks")
    add("--horizon", type=int, default=50, help="steps in an episode")
    help = f"seed of the first episode ({FINAL}); demonstrations, and rollouts that choose a model, have smaller ones"
    add("--first-seed", type=int, default=FINAL, help=help)
    add("--json", type=Path, help="file for the scores and the outcome of each seed")
    add("--film", type=Path, help="file, without a suffix, for a film of the first player's first episode")
    add("--strip", type=Path, help="file for some of the film's frames side by side")
    settings = parser.parse_args()
    for path in (settings.json, settings.film, settings.strip):
        if path and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    if settings.strip and not settings.film:
        parser.error("--strip is made of a film: give --film too")
    return settings


def main(settings: argparse.Namespace) -> None:
    policies, saved = load_policies(settings.checkpoint)
    entries, picture_size = Entries(**saved["entries"]), saved["picture_size"]
    players: dict[str, Player] = {name: Learned(policy, entries) for name, policy in policies.items()}
    low, high = (policies["raw"].get_buffer(name).cpu() for name in ("low", "high"))
    players["random"] = Random(low, high)
    if saved["env_id"] in EXPERTS:
        players["expert"] = Expert(saved["env_id"])
    names = settings.players or list(players)
    if unknown := [name for name in names if name not in players]:
        raise ddpkit.CheckpointError(
            f"{settings.checkpoint} has no player {', '.join(unknown)}, only {', '.join(players)}"
        )
    log.info("%s after %d steps of training, in %s", settings.checkpoint, saved["step"], saved["env_id"])
    scores = {}
    for name in names:
        size = picture_size if name in policies else None  # the others use no pictures
        score = evaluate(saved["env_id"], players[name], settings.episodes, settings.horizon, settings.first_seed, size)
        log.info("%-6s  %s", name, score)
        scores[name] = score.summary()
    if settings.json:
        ddpkit.run_on_main(settings.json.write_text, json.dumps(scores, indent=4) + "\n")
    if settings.film:
        ddpkit.run_on_main(draw, settings, saved["env_id"], players[names[0]], picture_size)


def draw(settings: argparse.Namespace, env_id: str, player: Player, picture_size: tuple[int, int] | None) -> None:
    written = drawing.film(env_id, player, settings.first_seed, settings.horizon, settings.film, picture_size)
    if written:
        log.info("wrote %s", written)
    if settings.strip and written and written.suffix == ".gif":
        drawing.strip(written, settings.strip)


if __name__ == "__main__":
    with one_message(), ddpkit.distributed(num_threads=1):
        main(read_settings())
