"""Pictures of an episode: a film and a strip of frames or, where nothing can render, the paths of gripper and block."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import gymnasium
import numpy as np
from PIL import Image

from .environments import Arena, Player

log = logging.getLogger("robot")
logging.getLogger("OpenGL").setLevel(logging.WARNING)
SIZE = 240  # pixels, of a frame
CAMERA = {"distance": 1.6, "azimuth": 140.0, "elevation": -20.0, "lookat": np.array([1.25, 0.75, 0.55])}


def film(env_id: str, player: Player, seed: int, horizon: int, path: Path) -> Path:
    """Plays one episode and draws it.

    MuJoCo renders without a screen through EGL, or what the environment variable MUJOCO_GL names. If that is missing,
    the log says so and the paths are plotted instead.

    Args:
        env_id: The environment.
        player: Who acts.
        seed: Of the episode.
        horizon: Steps in it.
        path: Where to write, without a suffix.

    Returns:
        What was written: `path` with .gif, or with .png for the plot.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    frames: list[Image.Image] = []
    seen: list[np.ndarray] = []

    def watch(env: gymnasium.Env, observation: np.ndarray) -> None:
        seen.append(observation.copy())
        if env.render_mode:
            frames.append(Image.fromarray(env.render()))

    try:
        view = {"render_mode": "rgb_array", "width": SIZE, "height": SIZE, "default_camera_config": CAMERA}
        Arena(env_id, horizon, **view).play(player, [seed], watch)
    except Exception as error:  # each way to render fails in a way of its own
        log.warning("MuJoCo cannot render here (%s: %s): plotting paths instead of a film", type(error).__name__, error)
        seen.clear()
        Arena(env_id, horizon).play(player, [seed], watch)
        return plot(seen, path.with_suffix(".png"))
    frames[0].save(path.with_suffix(".gif"), save_all=True, append_images=frames[1:], duration=80, loop=0)
    return path.with_suffix(".gif")


def strip(film: Path, path: Path, moments: int = 6) -> None:
    """Writes some of a film's frames, evenly spaced, side by side into one picture."""
    with Image.open(film) as frames:
        whole = Image.new("RGB", (moments * frames.width, frames.height))
        for place, number in enumerate(np.linspace(0, frames.n_frames - 1, moments).round()):
            frames.seek(int(number))
            whole.paste(frames.convert("RGB"), (place * frames.width, 0))
    whole.save(path, optimize=True)


def plot(seen: list[np.ndarray], path: Path) -> Path:
    """Draws the paths of gripper and block from above and from the side, with the goal."""
    from matplotlib.figure import Figure

    observations = np.stack(seen)
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
    figure.savefig(path)
    return path
