"""Warn once of what is rarely meant: GPUs that stay idle, a dataset that every rank goes through as a whole."""

from __future__ import annotations

import functools
import gc
import logging
import warnings

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
    """Name the dataset of a loader, wherever the script keeps it, that shuffles it as a whole on every rank."""
    if current_job.get_data_parallel_rank() != 0 or current_job.get_data_parallel_world_size() == 1:
        return
    for loader in gc.get_objects():  # the variables of a frame would stay alive once they were looked at
        if type(loader) is DataLoader:
            made = vars(loader)  # not all of it, if that raised
            sampler = getattr(made.get("batch_sampler"), "sampler", made.get("sampler"))
            if type(sampler) is RandomSampler:
                warnings.warn(
                    f"A DataLoader shuffles all of its {type(sampler.data_source).__name__} on every rank, so each "
                    "rank trains on all samples. Divide them with ddpkit.make_loader() or a DistributedSampler. If the "
                    "dataset is this rank's share already, ignore this: "
                    "warnings.filterwarnings('ignore', 'A DataLoader shuffles').",
                    stacklevel=2,
                )
                return
