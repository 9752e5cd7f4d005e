"""Draw an episode: a film and a strip of frames or, without rendering, the paths of gripper and block."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from shared.program import UserError

from .environments import EXPERTS, Arena, Player, Seen

log = logging.getLogger("robot")
SIZE = (240, 240)  # height and width of a frame, in pixels, at least


def film(
    env_id: str, player: Player, seed: int, horizon: int, path: Path, picture_size: Sequence[int] | None = None
) -> Path | None:
    """Play one episode and draw it, with its seed and its outcome; return the file's path.

    The file is `path` with .gif or, if this machine cannot render the Fetch robot, a plot of the paths with .png; a
    warning says so.
    """
    seen: list[Seen] = []
    arena = Arena(env_id, horizon, picture_size or SIZE)
    try:
        (reached,) = arena.play(player, [seed], seen.append)
    except UserError as error:
        if env_id not in EXPERTS:
            log.warning("%s; there is no film", error)
            return None
        log.warning("%s; plotting paths instead of a film", error)
        seen.clear()
        arena = Arena(env_id, horizon)
        (reached,) = arena.play(player, [seed], seen.append)
    finally:
        arena.close()
    title = f"episode {seed}: goal {'reached' if reached else 'missed'}"
    if "camera" not in seen[0]:
        return plot(np.stack([moment["observations"] for moment in seen]), title, path.with_suffix(".png"))
    frames = [label(Image.fromarray(moment["camera"]), title) for moment in seen]
    frames[0].save(path.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=80, loop=0)
    return path.with_suffix(".gif")


def label(frame: Image.Image, title: str) -> Image.Image:
    """Write a title into a frame; enlarge small frames first."""
    times = max(1, -(-SIZE[1] // frame.width))
    frame = frame.resize((times * frame.width, times * frame.height))
    ImageDraw.Draw(frame).text((6, 4), title, fill="white", stroke_width=2, stroke_fill="black")
    return frame


def strip(film: Path, path: Path, moments: int = 6) -> None:
    """Write evenly spaced frames of a film side by side into one picture."""
    with Image.open(film) as frames:
        whole = Image.new("RGB", (moments * frames.width, frames.height))
        for place, number in enumerate(np.linspace(0, frames.n_frames - 1, moments).round()):
            frames.seek(int(number))
            whole.paste(frames.convert("RGB"), (place * frames.width, 0))
    whole.save(path, optimize=True)


def plot(observations: np.ndarray, title: str, path: Path) -> Path:
    """Plot the paths of gripper and block from above and from the side, with the goal."""
    from matplotlib.figure import Figure

    paths = {"gripper": observations[:, :3]}
    if observations.shape[1] == 28:  # of environments with a block
        paths["block"] = observations[:, 3:6]
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (across, up) in zip(figure.subplots(1, 2), ((0, 1), (0, 2)), strict=True):
        for name, places in paths.items():
            axes.plot(places[:, across], places[:, up], marker=".", label=name)
        axes.plot(*observations[-1, [across - 3, up - 3]], "*", markersize=15, label="goal")
        axes.set(xlabel=f"{'xyz'[across]} (m)", ylabel=f"{'xyz'[up]} (m)", aspect="equal")
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path)
    return path
