"""The process group that exists in this process, and the only uses of torch's private interfaces.

A group is identified by the object itself: a library may destroy its group and create another with the same name, rank
and size. No strong reference to it is kept, because it would outlive its destruction.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, distributed

F = TypeVar("F", bound=Callable[..., Any])
_SHARDED_CLASSES = {  # by module; one that was never imported has made no tensor
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed._shard.sharded_tensor": "ShardedTensor",
    "torch.distributed.fsdp._flat_param": "FlatParameter",
}
_OF_BROKEN_LOADERS = ("DataLoader worker (pid", "DataLoader timed out", "Pin memory thread exited")
_ORDINARY_MODULES = ("torch", "torch.nn.parameter")  # of Tensor and Parameter


def torch_is_before(release: str, version: str = torch.__version__) -> bool:
    """Return whether torch is older than a release such as "2.6"; vendors' versions begin with two numbers, too."""
    numbers = [tuple(map(int, re.findall("[0-9]+", text)[:2])) for text in (version, release)]
    return numbers[0] < numbers[1]


def current_group() -> Any:
    """Return torch's default process group, None if there is none; takes a tenth of a microsecond."""
    return dist.group.WORLD


def reference(group: Any) -> Callable[[], Any]:
    """Return a function that returns the group as long as it exists, then None."""
    return no_group if group is None else weakref.ref(group)


def group_store() -> dist.Store:
    """Return the store in which the default group met (private, the same from torch 2.6 to 2.13)."""
    return dist.distributed_c10d._get_default_store()


def gloo_address(group: Any) -> bytes:
    """Return where gloo listens for the other ranks of a group, in the kernel's form, and more; b"" if nowhere.

    gloo publishes the length of the host's name, the name, the length of the address, the address. (Private, the same
    from torch 2.6 to 2.13.)
    """
    _, store = dist.distributed_c10d._world.pg_map[group]
    key = f"cpu//0/{group.rank()}"
    if not store.check([key]):
        return b""
    published = store.get(key)
    return published[16 + int.from_bytes(published[:8], sys.byteorder) :]


def other_groups_were_made() -> bool:
    """Return whether there is, or was, a group besides the default one (private, the same from torch 2.6 to 2.13)."""
    world = dist.distributed_c10d._world
    if world.group_count > 1:  # counts groups without this rank, too
        return True
    return len(groups()) > 1


def groups() -> list[Any]:
    """Return the groups in this process (private, the same from torch 2.6 to 2.13)."""
    return list(dist.distributed_c10d._world.pg_map)


def abort_group() -> None:
    """End the default group without waiting for its operations (private, the same from torch 2.6 to 2.13)."""
    dist.distributed_c10d._abort_process_group()


def no_group() -> None:
    """Stand in for the reference to a group if there is none."""


def is_dtensor(value: Any) -> bool:
    """Return whether this is a DTensor, into which `fully_shard` and tensor parallelism turn parameters."""
    if type(value).__module__ in _ORDINARY_MODULES:
        return False
    return _is_of(value, "torch.distributed.tensor", "DTensor")


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this module itself."""
    return _is_of(module, "torch.distributed.fsdp", "FSDPModule")


def is_mesh(value: Any) -> bool:
    """Return whether this is a mesh of devices."""
    return _is_of(value, "torch.distributed.device_mesh", "DeviceMesh")


def _is_of(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of a class; its module, slow to import, is not imported: without it no value is."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_sharded(value: Any) -> bool:
    """Return whether torch spreads this tensor over ranks (`fully_shard`, FSDP, tensor parallelism).

    (Modules of some of its classes are private, and so is FSDP's mark on the parameters that it replaces by views. The
    same from torch 2.6 to 2.13.)
    """
    if getattr(value, "_fsdp_flattened", False) is True:
        return True
    if type(value).__module__ in _ORDINARY_MODULES:
        return False
    return any(_is_of(value, module, name) for module, name in _SHARDED_CLASSES.items())


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is torch's zero that has no memory (private, the same from torch 2.6 to 2.13)."""
    return tensor._is_zerotensor()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` made this module (private, the same from torch 2.6 to 2.13).

    The class, which takes seconds to import, is not imported here: without it no module is of it.
    """
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return compiled is not None and isinstance(module, compiled)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Run the start of the first forward after DDP's first backward, if it is still due. Collective then.

    The ranks agree on the gradient buckets in it (private, the same from torch 2.6 to 2.13).
    """
    model.reducer._rebuild_buckets()


def tensors_in(output: Any) -> Iterable[Tensor]:
    """Return the tensors in the output of a model, as DDP finds them (private, the same from torch 2.6 to 2.13)."""
    found: Iterable[Tensor] = distributed._find_tensors(output)  # type: ignore[no-untyped-call]
    return found


def remove_hooks(model: DistributedDataParallel) -> None:
    """Remove the hooks with which a DDP model averages gradients."""
    model._remove_autograd_hooks()  # type: ignore[no-untyped-call]


def is_of_broken_loader(error: BaseException) -> bool:
    """Return whether a loader lost a worker, or waited for one too long (private, the same from torch 2.6 to 2.13).

    Such an error is not about a batch.
    """
    text = error.args[0] if error.args else ""
    return type(error) is RuntimeError and isinstance(text, str) and text.startswith(_OF_BROKEN_LOADERS)


def is_from_worker(error: BaseException) -> bool:
    """Return whether a loader's worker raised an exception while making a batch (as in torch 2.6 to 2.13)."""
    return any("Original Traceback (most recent call last)" in str(each) for each in error.args)


class WithoutWorkerInfo:
    """Make `get_worker_info()` return None in a block, as outside a loader's workers.

    (Private, the same from torch 2.6 to 2.13. A class, because a block is entered for each sample.)
    """

    def __enter__(self) -> None:
        module: Any = torch.utils.data._utils.worker
        self._info = module._worker_info
        module._worker_info = None

    def __exit__(self, *_: object) -> None:
        module: Any = torch.utils.data._utils.worker
        module._worker_info = self._info


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, after those registered before (private).

    The same from torch 2.6 to 2.13.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def accumulates(parameter: Tensor) -> bool:
    """Return whether the running backward accumulates into a parameter's gradient (private, as in torch 2.6 to 2.13).

    `torch.autograd.grad` does not, and transforms of `torch.func` do not.
    """
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):  # in a transform, or a gradient that grad() computes
        return False


def in_autograd_thread() -> bool:
    """Return whether a backward runs this in one of the engine's threads (private, the same from torch 2.6 to 2.13).

    Python has no name for such a thread; a script's thread may run a backward, too.
    """
    is_of_python = not threading.current_thread().name.startswith("Dummy-")
    return not is_of_python and torch._C._current_graph_task_id() != -1


def forward_pre_hooks(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """Return a module's own hooks before forward, to remove some (private, the same from torch 2.6 to 2.13)."""
    return module._forward_pre_hooks


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers by name, those that are None too, to replace some (private, as in 2.6 to 2.13)."""
    return module._buffers


def version_of(tensor: Tensor | None) -> int:
    """Return how often a tensor was changed in place, as far as torch counts (private, as in 2.6 to 2.13)."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def module_versions(state_dict: Any) -> dict[str, Any]:
    """Return the versions of a state dict's modules, by path (private, the same from torch 2.6 to 2.13).

    `load_state_dict()` uses them to migrate an older state, as it does with one that has no version.
    """
    versions: dict[str, Any] = getattr(state_dict, "_metadata", {})
    return versions


def set_module_versions(state_dict: Any, versions: dict[str, Any]) -> None:
    """Give a state dict the versions of its modules (private, the same from torch 2.6 to 2.13)."""
    state_dict._metadata = versions


def untraced(fn: F) -> F:
    """Make `torch.compile` call a function as it is, instead of tracing it and its calls: a graph break.

    It does what `torch.compiler.disable` does, which takes seconds to import and slows down each call. (The marks are
    private, the same from torch 2.6 to 2.13. The frames' strategy came with 2.7; without it, compiled code that calls
    the function may fail as if it were not marked.)
    """
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = "it exchanges values with other ranks"  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
    return fn
