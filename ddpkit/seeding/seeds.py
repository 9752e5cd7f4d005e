"""Starting random numbers: one seed for `random`, NumPy and torch, or one per rank or per sample."""

from __future__ import annotations

import operator
import random

import numpy as np
import torch

from ..process_group.current_job import get_data_parallel_rank
from .hashing import hash_seeds


def seed_everything(seed: int, per_rank: bool = False) -> int:
    """Seed `random`, NumPy and torch, with its accelerators.

    Call it with the same seed on every rank before the model is built, so that ranks start from equal weights; with
    `per_rank=True` after that, so that dropout and exploration noise differ between ranks.

    Args:
        seed: An integer of any kind in [0, 2**63).
        per_rank: Whether to mix in the rank, among the data-parallel ones. It is hashed, not added: (seed 0, rank 1)
            and (seed 1, rank 0) differ.

    Returns:
        The seed used on this rank, which is `seed` itself or its mixture with the rank.

    Raises:
        ValueError: If the seed is out of range.
        TypeError: If it is no integer.

    Example:
        >>> seed_everything(7)
        7
    """
    seed = operator.index(seed)  # of NumPy's kinds, too, which random.seed() refuses
    if not 0 <= seed < 2**63:
        raise ValueError(f"A seed is a number in [0, 2**63), not {seed}.")
    if per_rank:
        seed = hash_seeds("rank", seed, get_data_parallel_rank())
    seed_cpu(seed)
    torch.manual_seed(seed)  # and the accelerators: too slow for what workers do before every batch
    return seed


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Make the seed for one sample's augmentation: it depends on no rank, worker or batch size.

    Seed a generator of the sample's own with it, in `__getitem__`: then any number of ranks augments alike.

    Args:
        seed: The run's seed.
        epoch: The epoch. `make_loader` passes it to a dataset that has `set_epoch(epoch)`.
        index: The sample's index in the dataset.

    Returns:
        A number in [0, 2**63), the same on every platform.

    Example:
        >>> generator = torch.Generator().manual_seed(sample_seed(0, epoch=3, index=41))
        >>> noise = torch.randn(2, generator=generator)
    """
    return hash_seeds("sample", seed, epoch, index)


def seed_cpu(seed: int) -> None:
    """Seed the global CPU generators of `random`, NumPy and torch; `seed` is a number in [0, 2**63)."""
    random.seed(seed)
    if seed < 2**32:
        np.random.seed(seed)
    else:  # NumPy takes no number beyond 32 bits
        np.random.seed([seed % 2**32, seed >> 32])
    torch.default_generator.manual_seed(seed)
