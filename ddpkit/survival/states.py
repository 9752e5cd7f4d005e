"""The states of the last complete step, which the remaining ranks synchronise after a loss."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..checkpoint.files import check_saveable, from_bytes, to_bytes
from ..checkpoint.states import take_out, tensors_of
from ..collectives.consistency import raise_everywhere
from ..collectives.differences import explain_sharded
from ..collectives.transfer import broadcast_bytes, broadcast_tensor
from ..collectives.tree import flat_bytes, is_dense
from ..data.loader import Loader
from ..data.seeds import get_rng_state, set_rng_state
from ..errors import LaunchError
from ..job import current_job, lifecycle
from ..launch.ranks import get_rank
from ..parallel.models import unwrap_model
from ..torch_internals import remove_hooks
from .regrouping import Quorum

_CALL = "survive()"
_MOST_TIMES = 16  # largest ratio of another rank's bytes to this one's: its optimizer may be new
_MOST_BESIDES = 64 << 20  # bytes in addition


class KeptStates:
    """The states of the last complete step: those that steps change by reference, the others as copies."""

    def __init__(self, states: tuple[Any, ...]) -> None:
        self.steps = 0
        self.is_consistent = True
        self._states = [unwrap_model(state) if isinstance(state, nn.Module) else state for state in states]
        self._model = nn.ModuleList([state for state in self._states if isinstance(state, nn.Module)])
        self._small = [state for state in self._states if not isinstance(state, nn.Module | Optimizer)]
        self._loaders: list[Loader] = []
        self._positions: list[dict[str, Any]] = []
        optimizers = _optimizers_in(states)
        if not optimizers and any(p.requires_grad for p in self._model.parameters()):
            raise TypeError("survive() needs an optimizer of torch.optim, to know when a step begins.")
        check_saveable({type(state).__name__: state.state_dict() for state in self._states})
        self._handles = [optimizer.register_step_pre_hook(self._begin_step) for optimizer in optimizers]
        self._copy()

    def _begin_step(self, *_: Any) -> None:
        current_job.hold_failures(True)
        self.is_consistent = False

    def commit(self) -> None:
        """Take the current states for those of a complete step."""
        current_job.hold_failures(True)
        self._positions = [loader.state_dict() for loader in self._loaders]
        self._copy()
        self.steps += 1
        self.is_consistent = True
        current_job.hold_failures(False)

    def _copy(self) -> None:
        """Copy what may change before a step begins: in a forward, or by a scaler that skips the step."""
        self._buffers = [buffer.clone() for buffer in self._model.buffers()]
        self._copies = [copy.deepcopy(state.state_dict()) for state in self._small]
        self._random = get_rng_state()

    def add_loader(self, loader: Loader) -> None:
        """Record a loader's position; restore that of the loader with the same index before it."""
        number = len(self._loaders)
        if "batches" in loader.state_dict():  # it counts batches of a number of ranks
            raise TypeError(
                "After a failure the loader must resume on fewer ranks, but it cannot do so inside an "
                "epoch: survive() needs a training loader, over a dataset with a length, with one of "
                "ddpkit's samplers."
            )
        if number < len(self._positions):
            loader.load_state_dict(self._positions[number])
        self._loaders.append(loader)

    @torch.no_grad()
    def restore(self, quorum: Quorum, member: int) -> None:
        """Give the quorum the states of the step that it resumes from. Collective."""
        self._loaders = []  # the next attempt makes new ones
        self._model.zero_grad(set_to_none=True)
        release_models(list(self._model))
        if self.is_consistent and self.steps == quorum.steps:
            for buffer, kept in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(kept)
            for state, saved in zip(self._small, self._copies, strict=True):
                state.load_state_dict(copy.deepcopy(saved))
        set_rng_state(self._random)
        mine = [[state.state_dict() for state in self._states], self._positions]
        states, positions = share_data(mine, quorum.members.index(quorum.source))
        if member == quorum.source:
            return
        self.is_consistent = False
        for state, saved in zip(self._states, states, strict=True):
            state.load_state_dict(saved)
        self._positions = positions
        self._copy()
        self.steps = quorum.steps
        self.is_consistent = True

    def close(self) -> None:
        """Remove the optimizer hooks."""
        for handle in self._handles:
            handle.remove()


def release_models(models: list[nn.Module]) -> None:
    """Stop DDP models of a former group, if the script still holds them, from averaging these models' gradients."""
    wanted = set(map(id, models))
    for wrapper in gc.get_objects():
        if issubclass(type(wrapper), DistributedDataParallel) and id(wrapper.module) in wanted:
            remove_hooks(wrapper)


def share_data(mine: Any, src: int) -> Any:
    """Give every rank the numbers, texts and tensors of rank `src`: there themselves, elsewhere copies. Collective.

    Unlike `broadcast()` it unpickles nothing: data are read by the rules of `torch.load(weights_only=True)`.

    Args:
        mine: This rank's value, which bounds the size of `src`'s.
        src: The source rank.
    """
    if lifecycle.enter_collective() is None:
        return mine
    tensors: dict[str, Tensor] = {}
    data = b""
    own = dict(tensors_of("states", mine))
    most = _MOST_TIMES * sum(tensor.nbytes for tensor in own.values()) + _MOST_BESIDES
    is_source = get_rank() == src
    with raise_everywhere(_CALL):
        if is_source:
            problem = explain_sharded(_CALL, list(own.items()))
            if problem:
                raise TypeError(problem)
            described = take_out("states", mine, tensors, _is_dense_tensor)
            on_cpu = [tensor.device.type == "cpu" for tensor in tensors.values()]
            data = to_bytes([described, on_cpu])
            from_bytes(data)  # as the others will
    data = broadcast_bytes(_CALL, data, src, most=most)
    if is_source:
        for tensor in tensors.values():
            broadcast_tensor(flat_bytes(tensor), src)
        return mine
    given, on_cpu = from_bytes(data)
    placeholders = [tensor for _, tensor in tensors_of("states", given) if tensor.is_meta]
    size = sum(tensor.nbytes for tensor in placeholders)
    if size > most:
        raise LaunchError(f"Rank {src} sends states of {size} bytes, but this job's have at most {most}.")
    for tensor, is_on_cpu in zip(placeholders, on_cpu, strict=True):
        device = torch.device("cpu") if is_on_cpu else current_job.get_device()  # by which all choose the backend
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        received = broadcast_tensor(flat_bytes(empty), src).view(tensor.dtype).reshape(tensor.shape)
        torch.utils.swap_tensors(tensor, received)  # type: ignore[no-untyped-call]
    return given


def _is_dense_tensor(value: Any) -> bool:
    return type(value) is Tensor and is_dense(value)


def _optimizers_in(states: tuple[Any, ...]) -> list[Optimizer]:
    """List torch's optimizers among some states, and those held by other states as `.optimizer`."""
    held = [getattr(state, "optimizer", None) for state in states]
    return list(dict.fromkeys(each for each in (*states, *held) if isinstance(each, Optimizer)))
