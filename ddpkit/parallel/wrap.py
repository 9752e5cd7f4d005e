"""Wrap a model in torch's DDP if the job needs it.

`wrap_model` returns torch's DDP or the model itself; ddpkit has no wrapper of its own.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import warnings
import weakref
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from ..arguments import no_option
from ..collectives.consistency import check_fingerprint, fingerprint_of, raise_everywhere
from ..errors import DdpkitError
from ..job import current_job, lifecycle
from ..job.device import count_accelerators
from ..job.job import group_of, ranks_of
from ..launch import ranks
from ..torch_internals import accumulates, after_backward, forward_pre_hooks, tensors_in
from .models import broadcast_into, check_module, check_tensors, describe_tensors, named_parameters, named_tensors

_DECIDED = {  # DDP options that the caller may not set
    "self",
    "module",
    "device_ids",
    "output_device",
    "dim",
    "init_sync",
    "process_group",
    "device_mesh",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
}
Strategy = Literal["auto", "ddp", "dp"]
M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger(__name__)


def wrap_model(
    model: M,
    strategy: Strategy = "auto",
    *,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    sync_batchnorm: bool = False,
    broadcast_buffers: bool = True,
    **options: Any,
) -> M | DistributedDataParallel | DataParallel[M]:
    """Move a model to this rank's device and, on several ranks, wrap it in DDP. Collective.

    Every rank then holds rank 0's parameters and buffers. Call it before creating the optimizer and
    before `torch.compile`. The keyword options only matter for DDP.

    Args:
        model: A plain module, the same on every rank. It is moved in place to `get_device()`. A model
            that spans several devices needs torch's DDP directly; a sharded one needs nothing.
        strategy: "auto" uses DDP on several ranks, and returns the model itself on one process or if
            nothing in it is trainable. "ddp" requires a process group. "dp" is
            `torch.nn.DataParallel`: one process, several GPUs, slow.
        find_unused_parameters: Set it if a forward may skip parameters; it walks the graph at every
            step.
        static_graph: Set it if every step uses the same parameters in the same way; cheaper than
            `find_unused_parameters`. Not for models used with `torch.autograd.grad`, as in a gradient
            penalty: DDP would average nothing.
        sync_batchnorm: Compute batch statistics over all ranks' samples; accelerators only.
        broadcast_buffers: Broadcast rank 0's buffers (BatchNorm statistics) before every forward;
            if False, only when wrapping. `forward_sync_buffers`, the name in newer versions of
            torch, works as well.
        **options: Further options of torch's `DistributedDataParallel`, such as `bucket_cap_mb` or
            `gradient_as_bucket_view`; equal on every rank.

    Returns:
        The wrapped model, or `model` itself; `unwrap_model` returns `model`. On several ranks its
        forward raises `DdpkitError` if a parameter that was frozen in `wrap_model` requires a
        gradient, because DDP would not average it. A second backward after one forward raises it,
        too, except under `torch.compile`.

    Raises:
        MismatchError: On every rank, if names, shapes or dtypes of the model's tensors, or the
            options, differ between ranks; on the other ranks, if one raises an error below.
        DdpkitError: If the job cannot provide what `strategy` requires.
        TypeError: If the model is not a module, or is sharded (FSDP, `fully_shard`, tensor
            parallelism); if DDP has no such option, or `wrap_model` sets it; on one process, too.
        ValueError: If the model is already wrapped, or has lazy tensors that are not initialised yet
            or tensors on the meta device; if `strategy` is unknown, or `sync_batchnorm` is True on
            CPUs.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> wrap_model(net) is net  # on one process
        True
    """
    device, peers = current_job.get_device(), current_job.data_parallel()
    broadcast_buffers = options.pop("forward_sync_buffers", broadcast_buffers)
    options |= {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
    with raise_everywhere("wrap_model()", peers):
        tensors = _checked_tensors(model)
        _check_options(options)
        lifecycle.enter_collective()
        has_group = len(ranks_of(peers)) > 1 or (strategy == "ddp" and dist.is_initialized())
        _check_strategy(strategy, has_group)
        if has_group and sync_batchnorm and device.type == "cpu":
            raise ValueError("sync_batchnorm=True needs an accelerator: torch supports it with NCCL and XCCL only.")
    _forget_frozen(model)
    if strategy == "dp":
        return DataParallel(model.to(device))
    if not has_group:
        _warn_of_idle_gpus()
        return model.to(device)
    switches = {"sync_batchnorm": sync_batchnorm, "broadcast_buffers": broadcast_buffers} | options
    described = {name: str(value) for name, value in switches.items()}
    check_fingerprint(fingerprint_of("wrap_model", described | describe_tensors(tensors)), peers)
    model = model.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):  # DDP rejects it
        broadcast_into([tensor.detach() for tensor in named_tensors(model).values()])
        return _remember_frozen(model)
    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group_of(peers))  # type: ignore[no-untyped-call]
    device_ids = None if device.type == "cpu" or device.index is None else [device.index]
    with current_job.peer_errors():
        ddp = DistributedDataParallel(model, device_ids, process_group=group_of(peers), **options)
    # passed as an argument, False would skip the first broadcast, too
    ddp.broadcast_buffers = broadcast_buffers
    ddp.register_forward_hook(_Backwards().follow)
    ddp.register_forward_hook(_explain_one_sample, always_call=True)
    return _remember_frozen(ddp)


def _checked_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the tensors of a model that is not wrapped yet and is wholly on this rank."""
    check_module("wrap_model()", model)
    if any(isinstance(module, DataParallel | DistributedDataParallel) for module in model.modules()):
        raise ValueError("The model is already wrapped, completely or in part. Wrap the plain model, once.")
    tensors = named_tensors(model)
    check_tensors("wrap_model()", tensors.items())
    return tensors


def _check_options(options: dict[str, Any]) -> None:
    """Raise for options that torch's DDP does not have or `wrap_model` sets, on one process, too."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters.keys() - _DECIDED
    for name in options.keys() - known:
        raise TypeError(
            f"{no_option('wrap_model()', name, known)} With torch {torch.__version__} it takes these options of DDP: "
            f"{', '.join(sorted(known))}. set_data_parallel() chooses the ranks that hold equal models."
        )


def _check_strategy(strategy: str, has_group: bool) -> None:
    if strategy not in ("auto", "ddp", "dp"):
        raise ValueError(
            f"strategy must be auto, ddp or dp, got {strategy!r}. Pass one model alone, and create its optimizer "
            "after it."
        )
    if strategy == "ddp" and not has_group:
        raise DdpkitError("strategy='ddp' needs a process group. Start the script with torchrun --nproc_per_node=N.")
    if strategy != "dp":
        return
    world_size, gpus = ranks.get_world_size(), count_accelerators()
    if world_size > 1 or gpus < 2:
        raise DdpkitError(
            f"strategy='dp' needs 1 process and several GPUs; this job has {world_size} processes and sees {gpus} GPUs."
        )


def _remember_frozen(model: M) -> M:
    """Make a model's forward raise once a parameter that is frozen now needs a gradient."""
    frozen = [(name, each) for name, each in named_parameters(model).items() if not each.requires_grad]
    if frozen and not isinstance(model, torch.jit.ScriptModule):  # it takes no such hook
        model.register_forward_pre_hook(functools.partial(_check_frozen, frozen))
    return model


def _forget_frozen(model: nn.Module) -> None:
    """Undo `_remember_frozen` in a model that is wrapped again."""
    for module in model.modules():
        hooks = forward_pre_hooks(module)
        for number, hook in list(hooks.items()):
            if getattr(hook, "func", None) is _check_frozen:
                del hooks[number]


def _check_frozen(frozen: list[tuple[str, Tensor]], *_: Any) -> None:
    """Raise before a forward if a formerly frozen parameter needs a gradient, which would differ between ranks."""
    if not torch.is_grad_enabled():
        return
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise DdpkitError(
                f"{name} was frozen in wrap_model() and needs a gradient now, which DDP does not average over "
                "ranks. Unfreeze it before wrap_model(), or call wrap_model(unwrap_model(model)) again; add it to "
                "the optimizer, too."
            )


def _explain_one_sample(_model: object, _inputs: object, output: object) -> None:
    """Add the remedy to BatchNorm's error about a batch of one sample, if the forward has raised it."""
    error = sys.exc_info()[1] if output is None else None
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        error.args = (
            f"{error}. This rank's share of the batch is one sample: pass drop_last=True to make_loader(), or a larger "
            "global batch.",
        )


class _Backwards:
    """Raise for a second backward after a forward of a DDP model: DDP averages gradients only in the first.

    A backward is detected at the tensors that the forward returned, and not under `torch.compile`.
    """

    def __init__(self) -> None:
        self._forwards = 0  # forwards with a backward that averages
        self._is_expected = False  # whether that backward is expected
        self._is_running = False

    def follow(self, model: DistributedDataParallel, _: Any, output: Any) -> None:
        """Hook the backwards that start at a forward's outputs."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        _warn_of_unshared_loader()
        self._is_running = False  # the last one may have raised
        averages = model.require_backward_grad_sync
        self._forwards += averages
        self._is_expected |= averages
        # after an unsynchronised forward every backward counts, until DDP has averaged
        latest = None if averages else self._forwards
        # no strong reference, or a model that keeps its output would never be freed
        hook = functools.partial(self._begin, weakref.ref(model), latest)
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a leaf would keep the hook
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _begin(self, reference: weakref.ref[DistributedDataParallel], latest: int | None, _: Tensor) -> None:
        model = reference()
        if model is None or self._is_running:
            return
        if not any(accumulates(parameter) for parameter in model.parameters() if parameter.requires_grad):
            return  # it is torch.autograd.grad()
        if not self._is_expected and latest != self._forwards:
            raise DdpkitError(
                "This is a second backward after one forward of the model. DDP averages gradients only in the first, "
                "so weights would differ between ranks. Add up the losses and call backward() once, or call it "
                "after each forward, before the next one."
            )
        self._is_running = True
        current_job.weighting["backward"] = 1
        after_backward(self._end)

    def _end(self) -> None:
        self._is_running = self._is_expected = False


# Warnings, once, of what is rarely meant.


@functools.cache
def _warn_of_idle_gpus() -> None:
    """Name torchrun where one process sees several GPUs and has named none."""
    gpus = count_accelerators()
    if gpus > 1 and not (current_job.has_job() and current_job.asked_options().device):
        hint = "One process uses one of %d GPUs; torchrun --nproc_per_node=%d uses them all. To use one, name it: %s."
        _log.warning(hint, gpus, gpus, "setup(device='cuda:0')")


@functools.cache
def _warn_of_unshared_loader() -> None:
    """Name the dataset of a loader, wherever the script keeps it, that shuffles it as a whole on every rank."""
    if current_job.get_data_parallel_rank() != 0 or current_job.get_data_parallel_world_size() == 1:
        return
    for loader in gc.get_objects():  # the variables of a frame would stay alive once they were looked at
        if type(loader) is DataLoader:
            made = vars(loader)  # not all of it, if that raised
            sampler = getattr(made.get("batch_sampler"), "sampler", made.get("sampler"))
            if type(sampler) is RandomSampler:
                warnings.warn(
                    f"A DataLoader shuffles all of its {type(sampler.data_source).__name__} on every rank, so each "
                    "rank trains on all samples. Divide them with ddpkit.make_loader() or a DistributedSampler. If the "
                    "dataset is this rank's share already, ignore this: "
                    "warnings.filterwarnings('ignore', 'A DataLoader shuffles').",
                    stacklevel=2,
                )
                return
