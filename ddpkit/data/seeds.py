"""Seed random numbers: one seed for `random`, NumPy and torch, per job, rank or sample."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from ..job.current_job import get_data_parallel_rank, get_device
from ..launch.ranks import get_rank, get_world_size, is_main_process

# One way to mix seeds for the whole library: (seed 0, epoch 1) and (seed 1, epoch 0) are unrelated.


def hash_seeds(use: str, *numbers: int) -> int:
    """Mix numbers into one seed, equal on every platform and Python version.

    Args:
        use: Purpose of the seed; different purposes get unrelated seeds.
        numbers: Any integers; order matters.

    Returns:
        A number in [0, 2**63).

    Example:
        >>> hash_seeds("order", 0, 1) == hash_seeds("order", 1, 0)
        False
    """
    text = "/".join([use, *(str(operator.index(number)) for number in numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int, per_rank: bool = False) -> int:
    """Seed `random`, NumPy and torch, including accelerators.

    Call it with the same seed on every rank before building the model, so that ranks start with equal weights; then
    with `per_rank=True`, so that dropout and exploration noise differ between ranks.

    Args:
        seed: Integer of any type in [0, 2**63).
        per_rank: Whether to mix in the data-parallel rank. It is hashed, not added: (seed 0, rank 1) and (seed 1,
            rank 0) differ.

    Returns:
        The seed used on this rank, either `seed` or its mixture with the rank.

    Raises:
        ValueError: If the seed is out of range.
        TypeError: If the seed is not an integer.

    Example:
        >>> seed_everything(7)
        7
    """
    try:
        seed = operator.index(seed)  # NumPy's integers, too: random.seed() rejects them
    except TypeError:
        raise TypeError(f"A seed must be an integer, got {seed!r}.") from None
    if not 0 <= seed < 2**63:
        raise ValueError(f"A seed must be in [0, 2**63), got {seed}.")
    if per_rank:
        seed = hash_seeds("rank", seed, get_data_parallel_rank())
    seed_cpu(seed)
    torch.manual_seed(seed)  # includes accelerators: too slow for workers, which seed before every batch
    return seed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a seed for one sample's augmentation, independent of rank, worker and batch size.

    Seed a generator with it in `__getitem__`: augmentations are then equal on any number of ranks.

    Args:
        seed: The run's seed.
        epoch: The epoch. `make_loader` passes it to the dataset's `set_epoch(epoch)`, if it has one.
        index: The sample's index in the dataset.

    Returns:
        A number in [0, 2**63), equal on every platform.

    Example:
        >>> generator = torch.Generator().manual_seed(sample_seed(0, epoch=3, index=41))
        >>> noise = torch.randn(2, generator=generator)
    """
    return hash_seeds("sample", seed, epoch, index)


def seed_cpu(seed: int) -> None:
    """Seed the global CPU generators of `random`, NumPy and torch with a number in [0, 2**63)."""
    random.seed(seed)
    if seed < 2**32:
        np.random.seed(seed)
    else:  # NumPy's seeds have 32 bits
        np.random.seed([seed % 2**32, seed >> 32])
    torch.default_generator.manual_seed(seed)


# States of this rank's random number generators, as data that a checkpoint can hold without pickled code.

_log = logging.getLogger(__name__)


def get_rng_state() -> dict[str, Any]:
    """Return the state of this rank's generators: `random`, NumPy's global one, torch on CPU and accelerator.

    Raises:
        TypeError: If NumPy's global generator does not use NumPy's default bit generator.
    """
    kind = get_device().type
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise TypeError(
            f"NumPy's global generator uses {numpy['bit_generator']}, and its state cannot be saved: "
            "remove np.random.set_bit_generator(), and use your own generator."
        )
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy,
        "torch": torch.default_generator.get_state(),
        "device": kind,
        "accelerator": None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set this rank's generators to a state from `get_rng_state()`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])
    if state["accelerator"] is not None:
        torch.get_device_module(state["device"]).set_rng_state(state["accelerator"])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore this rank's generators when the block ends."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def set_rng_states(saved: list[dict[str, Any]]) -> None:
    """Restore this rank's generators; derive new ones if the job has another size or device type now.

    Args:
        saved: States from `get_rng_state()` on every rank of the saving job, by rank.
    """
    there = (len(saved), saved[0]["device"])
    here = (get_world_size(), get_device().type)
    if there == here:
        set_rng_state(saved[get_rank()])
        return
    text = f"{saved[0]['python']}{saved[0]['numpy']}{saved[0]['torch'].tolist()}"
    seed_everything(hash_seeds(text), per_rank=True)
    if is_main_process():
        _log.warning(
            "Saved on %d ranks (%s), loaded on %d (%s): each rank's random numbers are seeded again.", *there, *here
        )
