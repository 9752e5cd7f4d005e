"""Warn once of what is rarely meant: GPUs that stay idle, a dataset that every rank goes through as a whole."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from ..job import current_job
from ..job.device import count_accelerators

_log = logging.getLogger(__name__)


@functools.cache
def warn_of_idle_gpus() -> None:
    """Name torchrun where one process sees several GPUs and has named none."""
    gpus = count_accelerators()
    if gpus > 1 and not (current_job.has_job() and current_job.asked_options().device):
        hint = "One process uses one of %d GPUs; torchrun --nproc_per_node=%d uses them all. To use one, name it: %s."
        _log.warning(hint, gpus, gpus, "setup(device='cuda:0')")


@functools.cache
def warn_of_unshared_loader() -> None:
    """Name a loader that shuffles its whole dataset on every rank, if a function that is running uses one."""
    frame = inspect.currentframe()
    while frame is not None and current_job.get_data_parallel_rank() == 0:
        for name, loader in _loaders_in(frame).items():
            if type(getattr(loader.batch_sampler, "sampler", loader.sampler)) is RandomSampler:
                dataset: Any = loader.dataset
                text = (
                    f"{name} shuffles all {len(dataset)} samples on every rank, so each rank trains on all of "
                    "them. Divide them with ddpkit.make_loader() or a DistributedSampler. If the dataset is this "
                    f"rank's share already: warnings.filterwarnings('ignore', '{name} shuffles')."
                )
                warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
                return
        frame = frame.f_back


def _loaders_in(frame: FrameType) -> dict[str, DataLoader[Any]]:
    """Return torch's loaders that a running function has in its variables or names, by their names in it."""
    named = {**{name: frame.f_globals.get(name) for name in frame.f_code.co_names}, **frame.f_locals}
    return {name: value for name, value in named.items() if type(value) is DataLoader}
