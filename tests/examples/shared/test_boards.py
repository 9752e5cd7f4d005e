"""Log the numbers and pictures of a run on two ranks, and when it resumes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import free_port, platform_env, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ddpkit

pytestmark = pytest.mark.peers("wandb")


def log_in_two_parts(folder: Path) -> None:
    from shared.boards import Boards

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with ddpkit.distributed():
        boards = Boards(0, folder / "tb", {"project": "tests", "dir": folder})
        boards.add({"loss": 2.0}, 1)
        boards.close()
        later = Boards(1, folder / "tb", {"project": "tests", "dir": folder}, boards.run_id)
        later.add({"loss": 1.0}, 2)
        later.show({"picture": np.zeros((4, 5, 3), np.uint8)}, 2)
        frames = [Image.new("RGB", (5, 4), color) for color in ("red", "blue")]
        film = folder / f"film_{ddpkit.get_rank()}.gif"
        frames[0].save(film, save_all=True, append_images=frames[1:])
        later.play({"film": film}, 2)
        later.close()
        assert later.run_id == boards.run_id and boards.run_id
        assert (boards.run is None) == (ddpkit.get_rank() == 1) == (boards.writer is None)
        assert set(ddpkit.all_gather_object(boards.run_id)) == {boards.run_id}
        nowhere = Boards(0, None, None)
        nowhere.add({"loss": 1.0}, 1)
        nowhere.close()
        assert nowhere.run_id is None


def test_a_run_that_goes_on_is_one_run_and_only_the_main_process_logs(tmp_path: Path) -> None:
    port = free_port()
    ended = run(log_in_two_parts, [platform_env(rank, 2, port) for rank in range(2)], tmp_path, timeout=600.0)
    assert [process.code for process in ended] == [0, 0], ended
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and len({folder.name.split("-")[3] for folder in folders}) == 1
    assert len(list((tmp_path / "wandb").rglob("media/images/picture_*.png"))) == 1
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert len(list((tmp_path / "wandb").rglob("media/videos/film_*.gif"))) == 1
    (film,) = events.Images("film")
    assert film.step == 2 and film.encoded_image_string == (tmp_path / "film_0.gif").read_bytes()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
