"""The states of this rank's random number generators, as data that a checkpoint can hold without pickled code."""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

from .ranks import get_rank, get_world_size, is_main_process
from .runtime import get_device
from .seeding import seed_everything

_log = logging.getLogger(__name__)


def get_rng_state() -> dict[str, Any]:
    """This rank's generators: `random`, NumPy's global one, torch's on the CPU and on the rank's accelerator."""
    kind = get_device().type
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, list(words), gauss),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": kind,
        "accelerator": None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(),
    }


def set_rng_states(saved: list[dict[str, Any]]) -> None:
    """Gives this rank its generators back, or new ones derived from them if the job had another size or kind of device.

    Args:
        saved: What `get_rng_state()` returned on every rank of the job that saved, by rank.
    """
    there, here = (len(saved), saved[0]["device"]), (get_world_size(), get_device().type)
    if there == here:
        return _set(saved[get_rank()])
    text = f"{saved[0]['python']}{saved[0]['numpy']}{saved[0]['torch'].tolist()}"
    seed_everything(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1, per_rank=True)
    if is_main_process():
        _log.warning(
            "Saved on %d ranks (%s), loaded on %d (%s): random numbers start anew on each rank.", *there, *here
        )


def _set(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None:
        torch.get_device_module(state["device"]).set_rng_state(state["accelerator"])
