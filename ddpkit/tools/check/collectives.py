"""Observe what leaves a rank: collectives, before it enters them, and the files that it saves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join

from ...collectives import ops
from ...collectives.tree import Tree
from ...job.job import Peers, group_of
from ..recorder import Function, Recorder, before, guarded, replace, small_hashes
from .loaders import Ending
from .modules import Modules, variables
from .source import Stack, divides_by_ranks, stack

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "new_group",
)  # fmt: skip
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_FIRST_STEPS = 3  # at which the graphs of what collectives get are followed
_MANY = 4096  # sums that are kept for a step
_SMALL = 8  # elements of a tensor that are told


class Collectives:
    """Observes `torch.distributed` from the moment of `install`.

    Attributes:
        trained: The optimiser and the name of parameters, by address; -1 for buffers.
        cut: Where a collective takes what parameters have computed, and not its graph, by their identity.
    """

    def __init__(self, recorder: Recorder, modules: Modules, ending: Ending) -> None:
        self._recorder = recorder
        self._modules = modules
        self._ending = ending
        self._depth = 0
        self._sent_at = -1  # step for which that was told last
        self._sums: list[dict[str, Any]] = []
        self.trained: dict[int, tuple[int, str]] = {}
        self.cut: dict[int, Stack] = {}

    def install(self) -> None:
        """Begin."""
        before(Join, "__enter__", lambda *args: self._recorder.tell("join"))
        before(ops, "reduce_tree", self._note_mean)
        for name in _POINT_TO_POINT:
            before(dist, name, self._note_sent)
        for name in _COLLECTIVES:
            replace(dist, name, self._observed)
        for name in (*_POINT_TO_POINT, *_COLLECTIVES):
            if hasattr(dist, name):
                setattr(distributed_c10d, name, getattr(dist, name))  # which P2POp compares

    def _note_mean(self, value: Any, op: str, weight: Any, check: bool, peers: Peers | None) -> None:
        """Tell a mean of ddpkit without weight, which sends no tensor that shows it."""
        if op == "mean" and weight is None and self._recorder.is_main:
            leaves = [torch.as_tensor(leaf) for leaf in Tree(value).leaves().values()]
            values = [float(leaf) for leaf in leaves if leaf.numel() == 1][:_SMALL]
            fields = {"op": "all_reduce", "reduction": "AVG", "group": _name_of(group_of(peers)), "values": values}
            self._recorder.tell_collective(fields | {"where": stack()[:4]} | self._context())

    def _note_sent(self, *args: Any, **kwargs: Any) -> None:
        """Tell once a step that a tensor goes from one rank to another."""
        if self._recorder.is_main and self._recorder.step > self._sent_at and not self._depth:
            self._sent_at = self._recorder.step
            self._recorder.tell("point to point")

    def _observed(self, original: Function) -> Function:
        tell = guarded(self._tell)
        keep_sum = guarded(self._keep_sum)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._recorder.is_main:
                return original(*args, **kwargs)
            self._depth += 1
            try:
                tell(original.__name__, args, kwargs)
                result = original(*args, **kwargs)
                if original.__name__ == "all_reduce" and result is None:
                    keep_sum(args, kwargs)
                return result
            finally:
                self._depth -= 1

        return call

    def _keep_sum(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the size of a sum; it may be of gradients."""
        tensor: Tensor = args[0] if args else kwargs["tensor"]
        if tensor.is_floating_point() and _reduction(args, kwargs) == "SUM" and len(self._sums) < _MANY:
            norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
            where = {"where": stack()[:4], "divides": divides_by_ranks(4)}
            self._sums.append({"numel": tensor.numel(), "square": norm**2, **where})

    def take_sums(self) -> list[dict[str, Any]]:
        """Return the sums since the last call."""
        sums, self._sums = self._sums, []
        return sums

    def _tell(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        tensors = [value for value in given if isinstance(value, Tensor)]
        group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
        fields: dict[str, Any] = {"op": name, "group": _name_of(group), "where": stack()[:4]}
        if torch.is_grad_enabled() and self._recorder.step < _FIRST_STEPS:
            self.cut |= {id(p): fields["where"] for p in _parameters_behind(tensors)}
        if tensors:
            tensor = tensors[0]
            fields["dtype"] = str(tensor.dtype).removeprefix("torch.")
            fields["shape"] = list(tensor.shape)
            if tensor.numel() <= _SMALL and not tensor.is_meta:
                fields["values"] = tensor.detach().reshape(-1).to("cpu").tolist()
            if tensor.numel():
                fields["trained"] = self.trained.get(tensor.data_ptr())
        if "reduce" in name:
            fields["reduction"] = _reduction(args, kwargs)
        self._recorder.tell_collective(fields | self._context())

    def _context(self) -> dict[str, Any]:
        return {"samples": self._modules.samples, "divides": divides_by_ranks(), "averages": self._ending.accumulates}


def _parameters_behind(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters from which tensors were computed."""
    seen = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
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


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = kwargs.get("op") or next((a for a in args if isinstance(a, dist.ReduceOp.RedOpType)), "SUM")
    return str(given).rpartition(".")[2]


def _name_of(group: Any) -> str:
    if group is None or group is getattr(dist.group, "WORLD", None):
        return "0"
    return str(getattr(group, "group_name", id(group)))


def observe_saves(recorder: Recorder) -> None:
    """Tell the files that `torch.save` writes."""

    def save(obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)
        if isinstance(path, str | os.PathLike):
            recorder.tell("file", path=os.path.realpath(path), where=stack(), hashes=list(small_hashes(obj)))

    before(torch, "save", save)


def tell_values(recorder: Recorder) -> None:
    """Tell hashes of the small tensors that variables hold now."""
    for name, value in list(variables()):
        if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
            for hashed in small_hashes(value):
                recorder.tell("value", name=name, hash=hashed)
