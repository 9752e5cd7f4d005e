"""Observe collectives: each rank tells which one it enters, before it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join

from ...script.recorder import Recorder
from ..places import Stack, stack
from .expressions import divides_by_ranks, loop_keys
from .modules import Modules
from .patching import Function, before, guarded, replace

_WITH_TENSORS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
)
_OTHERS = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "new_group",
)
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_FIRST_STEPS = 3
_MANY = 4096  # sums that are kept for a step
_SMALL = 8  # elements of a tensor that are told


class Collectives:
    """Observes `torch.distributed` from the moment of `install`."""

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        self._recorder = recorder
        self._modules = modules
        self._depth = 0
        self._sent_at = -1  # step for which that was told last
        self.sums: list[dict[str, Any]] = []
        self.trained: dict[int, tuple[int, str]] = {}  # optimiser and name, by address; -1 for buffers
        self.cut: dict[int, Stack] = {}  # where a collective takes values, and no graph, by identity of parameters

    def install(self) -> None:
        """Begin."""
        before(Join, "__enter__", self._note_join)
        for name in _POINT_TO_POINT:
            before(dist, name, self._note_sent)
            setattr(distributed_c10d, name, getattr(dist, name))  # which P2POp compares
        for name in (*_WITH_TENSORS, *_OTHERS):
            original = getattr(dist, name, None)
            if original is None:
                continue
            replace(dist, name, self._observed)
            setattr(distributed_c10d, name, getattr(dist, name))

    def _note_join(self, *args: Any) -> None:
        self._recorder.tell("join", where=stack()[:1])

    def _note_sent(self, *args: Any, **kwargs: Any) -> None:
        """Tell once a step that a tensor goes from one rank to another."""
        if self._recorder.is_main and self._recorder.step > self._sent_at and not self._depth:
            self._sent_at = self._recorder.step
            self._recorder.tell("point to point", where=stack()[:1])

    def _observed(self, original: Function) -> Function:
        tell = guarded(self._tell)
        reduced = guarded(self._note_reduced)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._recorder.is_main:
                return original(*args, **kwargs)
            self._depth += 1
            try:
                tell(original.__name__, args, kwargs)
                result = original(*args, **kwargs)
                if original.__name__ == "all_reduce" and result is None:
                    reduced(args, kwargs)
                return result
            finally:
                self._depth -= 1

        return call

    def _note_reduced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the size of a sum; it may be of gradients."""
        square = _square_of_sum(args, kwargs)
        if square is not None and len(self.sums) < _MANY:
            self.sums.append(
                {
                    "numel": _tensor_of(args, kwargs).numel(),
                    "square": square,
                    "where": stack()[:4],
                    "divides": divides_by_ranks(4),
                }
            )

    def take_sums(self) -> list[dict[str, Any]]:
        """Return the sums since the last call."""
        sums, self.sums = self.sums, []
        return sums

    def _note_cut(self, given: tuple[Any, ...], where: Stack) -> None:
        """Note, in the first steps, from which parameters tensors come that a collective gets with their graph."""
        if self._recorder.step >= _FIRST_STEPS:
            return
        for value in given:
            if isinstance(value, Tensor):
                for parameter in _parameters_behind(value):
                    self.cut.setdefault(id(parameter), where)

    def _tell(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
        fields: dict[str, Any] = {"op": name, "group": _name_of(group), "where": stack()[:4]}
        if torch.is_grad_enabled():
            self._note_cut((*args, *kwargs.values()), fields["where"])
        if tensor is not None and name in _WITH_TENSORS:
            fields["dtype"] = str(tensor.dtype).removeprefix("torch.")
            fields["shape"] = list(tensor.shape)
            if tensor.numel() <= _SMALL and not tensor.is_meta:
                fields["values"] = tensor.detach().reshape(-1).to("cpu").tolist()
            if tensor.numel():
                fields["trained"] = self.trained.get(tensor.data_ptr())
        if "reduce" in name:
            fields["reduction"] = _reduction(args, kwargs)
        fields["samples"] = self._modules.samples
        fields["keys"] = loop_keys()
        fields["divides"] = divides_by_ranks()
        self._recorder.tell_collective(fields)


def _parameters_behind(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the parameters from which a tensor was computed."""
    seen = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        before_it = node.next_functions
        if node.name() == "_DDPSinkBackward":  # DDP's, which hands each output of a network on
            before_it = before_it[output : output + 1]
        waiting += before_it
        if hasattr(node, "variable"):
            yield node.variable


def _tensor_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0] if args else kwargs["tensor"]
    return tensor


def _square_of_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the square of a tensor's norm if it is to be added up over ranks, else None."""
    tensor = _tensor_of(args, kwargs)
    if not tensor.is_floating_point() or _reduction(args, kwargs) != "SUM":
        return None
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = kwargs.get("op") or next((a for a in args if isinstance(a, dist.ReduceOp.RedOpType)), None)
    if given is None:
        return "SUM"
    return str(given).rpartition(".")[2]


def _name_of(group: Any) -> str:
    if group is None or group is getattr(dist.group, "WORLD", None):
        return "0"
    return str(getattr(group, "group_name", id(group)))
