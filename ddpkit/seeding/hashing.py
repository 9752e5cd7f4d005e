"""Mixing seeds, once for the whole library: (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common."""

from __future__ import annotations

import operator
from hashlib import blake2b


def hash_seeds(use: str, *numbers: int) -> int:
    """Mix numbers into one seed, the same on every platform and Python version.

    Args:
        use: What the seed is for: different uses of the same numbers get unrelated seeds.
        numbers: Any integers; their order counts.

    Returns:
        A number in [0, 2**63).

    Example:
        >>> hash_seeds("order", 0, 1) == hash_seeds("order", 1, 0)
        False
    """
    words = [use]
    for number in numbers:
        words.append(str(operator.index(number)))
    text = "/".join(words)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
