"""Show a run's numbers and pictures in TensorBoard and in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ddpkit
from shared.program import user_error


class Boards:
    """Log a run's numbers and pictures from the main process. Collective.

    They go to TensorBoard's folder, which hides its events after `step`, and to Weights & Biases, which resumes the run
    `run_id`. `wandb` holds the arguments of `wandb.init`; the key comes from `WANDB_API_KEY`.
    """

    def __init__(
        self, step: int, tensorboard: Path | None, wandb: Mapping[str, Any] | None, run_id: str | None = None
    ) -> None:
        self.writer: Any = None
        self.run: Any = None
        if ddpkit.is_main_process():
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(tensorboard, purge_step=step + 1)
            if wandb is not None:
                self.run = _begin_run(wandb, run_id)
                run_id = self.run.id
        self.run_id: str | None = ddpkit.broadcast(run_id)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by their tags."""
        if self.writer:
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()
        if self.run:
            self.run.log(dict(values), step=step)

    def show(self, pictures: Mapping[str, NDArray[np.uint8]], step: int) -> None:
        """Log pictures, (height, width, 3), by their tags."""
        if self.writer:
            for tag, picture in pictures.items():
                self.writer.add_image(tag, picture, step, dataformats="HWC")
        if self.run:
            import wandb

            self.run.log({tag: wandb.Image(picture) for tag, picture in pictures.items()}, step=step)

    def play(self, films: Mapping[str, Path], step: int) -> None:
        """Log films, GIF files, by their tags."""
        if self.writer:
            from tensorboard.compat.proto.summary_pb2 import Summary

            for tag, path in films.items():  # an image whose frames TensorBoard's page shows; MoviePy is not needed
                image = Summary.Image(encoded_image_string=path.read_bytes())
                summary = Summary(value=[Summary.Value(tag=tag, image=image)])
                self.writer.file_writer.add_summary(summary, step)
        if self.run:
            import wandb

            self.run.log({tag: wandb.Video(str(path)) for tag, path in films.items()}, step=step)

    def close(self) -> None:
        """Flush and close both."""
        if self.writer:
            self.writer.close()
        if self.run:
            self.run.finish()


def _begin_run(settings: Mapping[str, Any], run_id: str | None) -> Any:
    import wandb

    with user_error("cannot start a run of Weights & Biases", wandb.Error):
        return wandb.init(**settings, id=run_id, resume="allow")
