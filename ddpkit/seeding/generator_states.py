"""The states of this rank's random number generators, as data that a checkpoint can hold without pickled code."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..launch.ranks import get_rank, get_world_size, is_main_process
from ..process_group.lifecycle import get_device
from .seeds import seed_everything

_log = logging.getLogger(__name__)


def get_rng_state() -> dict[str, Any]:
    """Return the states of this rank's generators: `random`, NumPy's global one, torch's on the CPU and accelerator."""
    kind = get_device().type
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, list(words), gauss),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.default_generator.get_state(),
        "device": kind,
        "accelerator": None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(),
    }


def check_rng_state(state: Any) -> None:
    """Try a saved state on generators of its own, so that setting it later cannot fail halfway.

    Raises:
        ValueError: If this version of Python, NumPy or torch cannot take it.
    """
    try:
        random.Random().setstate(_python_state(state))
        np.random.RandomState().set_state(_numpy_state(state))
        torch.Generator("cpu").set_state(state["torch"])
        kind = get_device().type
        if not isinstance(state["device"], str):
            raise TypeError("the device is no name")
        if kind != "cpu" and state["device"] == kind:
            torch.Generator(get_device()).set_state(state["accelerator"])
    except Exception as error:
        raise ValueError(
            "its random states are none that this Python, NumPy and torch can take "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'})"
        ) from error


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set this rank's generators to a state that `get_rng_state()` returned."""
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    torch.default_generator.set_state(state["torch"])
    if state["accelerator"] is not None:
        torch.get_device_module(state["device"]).set_rng_state(state["accelerator"])


def set_rng_states(saved: list[dict[str, Any]]) -> None:
    """Give this rank its generators back, or new ones derived from them if the job had another size or kind of device.

    Args:
        saved: What `get_rng_state()` returned on every rank of the job that saved, by rank.
    """
    there, here = (len(saved), saved[0]["device"]), (get_world_size(), get_device().type)
    if there == here:
        return set_rng_state(saved[get_rank()])
    text = f"{saved[0]['python']}{saved[0]['numpy']}{saved[0]['torch'].tolist()}"
    seed_everything(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1, per_rank=True)
    if is_main_process():
        _log.warning(
            "Saved on %d ranks (%s), loaded on %d (%s): random numbers start anew on each rank.", *there, *here
        )


def _python_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    if not (gauss is None or isinstance(gauss, float)):
        raise TypeError("the pending gauss() of random is no number")
    return version, tuple(words), gauss


def _numpy_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    name, keys, *rest = state["numpy"]
    return name, np.array(keys, np.uint32), *rest
