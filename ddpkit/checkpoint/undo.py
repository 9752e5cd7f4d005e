"""Undoing of a load that failed: objects and generators are put back as they were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..process_group.failures import describe_error
from ..seeding.generator_states import get_rng_state, set_rng_state
from ..torch_internals import is_dtensor
from .leaves import digest_leaves
from .states import is_consolidated


class Undo:
    """All that a load changes on this rank, as it was before."""

    def __init__(self) -> None:
        self._objects: list[_Former] = []
        self._rng_state: dict[str, Any] | None = None

    def remember_generators(self) -> None:
        """Keep the states of the random number generators."""
        self._rng_state = get_rng_state()

    def remember(self, name: str, target: Any) -> None:
        """Keep a copy of an object's state."""
        self._objects.append(_Former(name, target))

    def put_back(self) -> None:
        """Make everything what it was.

        Raises:
            CheckpointError: If some objects take their own former states no more.
        """
        if self._rng_state is not None:
            set_rng_state(self._rng_state)
        problems = []
        for former in reversed(self._objects):
            try:
                former.put_back()
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("\n".join(problems))


class _Former:
    """An object, and its state from before a load."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target
        self.holder = target  # of the state
        if is_consolidated(target):
            # spread over the ranks, it has a state dict only when all of it was collected
            self.holder = target.optim
        self.attributes: dict[str, Any] = {}
        if not isinstance(target, nn.Module):
            self.attributes = dict(getattr(target, "__dict__", {}))
        self.state = _copy(self.holder.state_dict())

    def put_back(self) -> None:
        """Make the object what it was.

        Raises:
            CheckpointError: If it takes its own former state no more.
        """
        self._put_back_in_place()
        if self._is_as_before():
            return
        problem = self._load()
        if not self._is_as_before():
            text = f"{self.name} could not be put back{problem}: it is partly loaded."
            raise CheckpointError(f"{text} Create it again before going on.")

    def _put_back_in_place(self) -> None:
        """Write the former values where they were, without code of the object's class."""
        if isinstance(self.target, nn.Module):
            _copy_tensors(self.target.state_dict(), self.state)
        elif self.attributes:
            vars(self.target).clear()
            vars(self.target).update(self.attributes)

    def _load(self) -> str:
        """Load the former state; return what went wrong, in brackets, "" if nothing did."""
        try:
            self.holder.load_state_dict(_copy(self.state))
        except Exception as error:
            return f" ({describe_error(error)})"
        return ""

    def _is_as_before(self) -> bool:
        now = self.holder.state_dict()
        return digest_leaves("", now) == digest_leaves("", self.state)


def _copy(state: Any) -> Any:
    """Copy a state, its tensors to the CPU, so that no accelerator must hold them twice."""
    if is_dtensor(state):
        return state.detach().clone()  # on its own device, on which this rank holds a part only
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, OrderedDict):
        copy = OrderedDict((key, _copy(value)) for key, value in state.items())
        copy.__dict__.update(state.__dict__)  # the versions that torch keeps beside a model's
        return copy
    if type(state) is dict:
        return {key: _copy(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copy(value) for value in state)
    return deepcopy(state)


@torch.no_grad()
def _copy_tensors(here: Mapping[str, Any], former: Mapping[str, Any]) -> None:
    """Overwrite tensors with those of the same name and shape."""
    for key, old in former.items():
        now = here.get(key)
        if not isinstance(old, Tensor) or not isinstance(now, Tensor):
            continue
        if now.shape == old.shape:
            now.copy_(old)
