"""Shared by both programs: read options, report ranks, open the run's folder and its logs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from shared.boards import Boards
from shared.networks import NO_STEP
from shared.program import Parser, UserError, log_to, one_message, user_error
from torch import Tensor

import ddpkit
from deblurring.options import Options, read_options, redacted

log = logging.getLogger(__name__)


def run(main: Callable[[Options, ddpkit.Context], int | None], description: str) -> None:
    """Run a program on this rank with the options of its command line; `main` may return an exit code."""
    with one_message():
        logging.getLogger("ddpkit").setLevel(logging.WARNING)  # the banner is our report of the launch
        parser = Parser(description)
        parser.add_argument("--opt", required=True, help="option file, JSON with // comments")
        parser.add_argument("changes", nargs="*", metavar="key=value", help="options that differ from the file's")
        given = parser.parse_intermixed_args()
        _choose_gpus(given.opt, given.changes)
        with ddpkit.distributed() as job:
            line = "=" * 60
            about = f"Distributed training: process {job.rank} of {job.world_size}\n{job}"
            sys.stderr.write(f"{line}\n{about}\n{line}\n")  # in one piece, so that several do not mix
            opt = ddpkit.run_on_main(read_options, given.opt, given.changes)
            if opt["gpu_ids"] and job.world_size > 1 and job.rank == 0:
                log.warning("gpu_ids is ignored: with several processes each rank has the device of its local rank")
            code = main(opt, job)
        if code:
            sys.exit(code)


def _choose_gpus(path: str, changes: Sequence[str]) -> None:
    """Show one process only the GPUs in `gpu_ids`, before anything initialises CUDA."""
    with suppress(UserError, ddpkit.LaunchError):  # both are reported later
        if ddpkit.detect_launch().world_size > 1:
            return
        ids = read_options(path, changes)["gpu_ids"]
        if ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(ids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(ids: list[int], visible: str | None) -> str:
    """Select GPUs by number, counted among the visible ones."""
    if visible is None:
        return ",".join(map(str, ids))
    names = visible.split(",")
    return ",".join(names[i] for i in ids if i < len(names))


def open_folder(opt: Options) -> Path:
    """Make the run's folder, start its log and save the options in it. Collective."""
    folder = ddpkit.run_on_main(_open_folder, opt)
    log_to(folder / "train.log")
    return folder


@user_error("path.root", OSError)
def _open_folder(opt: Options) -> Path:
    folder = Path(opt["path"]["root"]) / opt["task"]
    for name in ("models", "options", "images"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    saved = folder / "options" / f"{opt['task']}_{time.strftime('%y%m%d_%H%M%S')}.json"
    saved.write_text(json.dumps(redacted(opt), indent=2) + "\n")
    return folder


def open_boards(opt: Options, folder: Path, step: int, run_id: str | None) -> Boards:
    """Open what the options ask for: TensorBoard under `tb_logger/`, and Weights & Biases. Collective."""
    asked = opt["logging"]
    if asked["wandb_api_key"] and ddpkit.is_main_process():
        log.warning("logging.wandb_api_key is ignored: set the environment variable WANDB_API_KEY")
    wandb = None
    if asked["use_wandb"]:
        wandb = {"project": asked["wandb_project"], "entity": asked["wandb_entity"]}
        wandb |= {"name": asked["wandb_name"] or opt["task"], "dir": folder, "config": redacted(opt)}
    return Boards(step, folder / "tb_logger" if asked["use_tensorboard"] else None, wandb, run_id)


class News:
    """Measure losses, images (crops of one frame) and time since the last log line."""

    def __init__(self, step: int, device: torch.device) -> None:
        self.batches = 0
        self.first_bad = torch.full((), NO_STEP, device=device)  # the first iteration whose loss here is not finite
        self._begin_again(step)

    def _begin_again(self, step: int) -> None:
        self._loss, self._images, self._waited, self._step = 0.0, 0, 0.0, step
        self._begun = time.perf_counter()

    def waiting(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches and measure the time spent waiting for them."""
        begun = time.perf_counter()
        for batch in loader:
            self._waited += time.perf_counter() - begun
            yield batch
            begun = time.perf_counter()

    def add(self, loss: Tensor, sharp: Tensor, step: int) -> None:
        """Count a batch of sharp frames and its loss, which belongs to iteration `step` + 1."""
        self.first_bad = torch.where(loss.isfinite(), self.first_bad, self.first_bad.clamp(max=step + 1))
        self._loss = self._loss + loss.detach()
        self._images += sharp.shape[0] * sharp.shape[1]
        self.batches += 1

    def tell(self, step: int) -> dict[str, float]:
        """Return mean loss, all ranks' images per second and share of waiting since the last call. Collective."""
        loss = float(self._loss) / (step - self._step)
        seconds = time.perf_counter() - self._begun
        loss, images, waited = ddpkit.all_reduce_mean((loss, self._images / seconds, self._waited / seconds))
        self._begin_again(step)
        return {"G_loss": loss, "images/s": images * ddpkit.get_world_size(), "waits": waited}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block out."""
        start = time.perf_counter()
        yield
        self._begun += time.perf_counter() - start
