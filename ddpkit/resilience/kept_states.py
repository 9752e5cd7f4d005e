"""The states of a run's last whole step, which those who go on without a lost rank give each other."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.ops import broadcast
from ..parallel.models import unwrap_model
from ..parallel.wrap import release_models
from ..process_group import current_job
from ..process_group.regrouping import Decision
from ..seeding.generator_states import get_rng_state, set_rng_state


class Resumable(Protocol):
    """A loader that can tell where it is, and go on from there."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: Any) -> None: ...  # noqa: D102


class KeptStates:
    """The states of the last step that was whole: those that steps change are as they are, the others are copies."""

    def __init__(self, states: tuple[Any, ...]) -> None:
        self.steps = 0
        self.is_whole = True
        self._states = [unwrap_model(state) if isinstance(state, nn.Module) else state for state in states]
        self._modules = [state for state in self._states if isinstance(state, nn.Module)]
        self._small = [state for state in self._states if not isinstance(state, nn.Module | Optimizer)]
        self._loaders: list[Resumable] = []
        self._positions: list[dict[str, Any]] = []
        optimizers = _optimizers_in(states)
        if not optimizers and any(p.requires_grad for module in self._modules for p in module.parameters()):
            raise TypeError("survive() needs the optimizer, one of torch.optim's, to know when a step begins.")
        self._handles = [optimizer.register_step_pre_hook(self._begin_step) for optimizer in optimizers]
        self._copy()

    def _begin_step(self, *_: Any) -> None:
        current_job.hold_failures(True)
        self.is_whole = False

    def commit(self) -> None:
        """Take the present states for those of a whole step."""
        current_job.hold_failures(True)
        self._positions = [loader.state_dict() for loader in self._loaders]
        self._copy()
        self.steps += 1
        self.is_whole = True
        current_job.hold_failures(False)

    def _copy(self) -> None:
        """Copy what may change before a step begins: in a forward, or with a scaler that skips the step."""
        self._buffers = [buffer.clone() for buffer in self._live_buffers()]
        self._copies = [copy.deepcopy(state.state_dict()) for state in self._small]
        self._random = get_rng_state()

    def _live_buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers()]

    def begin(self) -> None:
        """Begin an attempt, which makes loaders anew."""
        self._loaders = []

    def add_loader(self, loader: Resumable) -> None:
        """Keep a loader's position; put it where the one before it was that came as the same in order."""
        number = len(self._loaders)
        position = loader.state_dict()
        if "batches" in position:  # it counts those of so many ranks
            raise TypeError(
                "After a failure the loader must go on with fewer ranks, which it cannot inside an "
                "epoch: survive() needs one in training, over a dataset with a length, with one of "
                "ddpkit's samplers."
            )
        if number < len(self._positions):
            position = self._positions[number]
            loader.load_state_dict(position)
        self._loaders.append(loader)

    @torch.no_grad()
    def put_back(self, decision: Decision, member: int) -> None:
        """Give all who go on the states of the step from which they do. Collective."""
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        release_models(self._modules)
        if member not in decision.behind:
            for buffer, kept in zip(self._live_buffers(), self._buffers, strict=True):
                buffer.copy_(kept)
            for state, saved in zip(self._small, self._copies, strict=True):
                state.load_state_dict(copy.deepcopy(saved))
        set_rng_state(self._random)
        mine = ([state.state_dict() for state in self._states], self._positions)
        states, positions = broadcast(mine, src=decision.members.index(decision.source))
        if member == decision.source:
            return
        self.is_whole = False
        for state, saved in zip(self._states, states, strict=True):
            state.load_state_dict(saved)
        self._positions = positions
        self._copy()
        self.steps = decision.steps
        self.is_whole = True

    def close(self) -> None:
        """Watch optimizers no more."""
        for handle in self._handles:
            handle.remove()


def _optimizers_in(states: tuple[Any, ...]) -> list[Optimizer]:
    """List torch's optimizers among some states, and those that others of them hold as `.optimizer`."""
    found = [state for state in states if isinstance(state, Optimizer)]
    found += [held for state in states if isinstance(held := getattr(state, "optimizer", None), Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())
