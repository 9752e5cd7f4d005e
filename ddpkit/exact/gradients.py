"""Add up the gradients of micro-batches to the same bits on any number of ranks."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..collectives.consistency import control_device, fingerprint_of, joined_world_size, raise_everywhere
from ..collectives.reduce import reduce_in_place
from ..collectives.tree import name_dtype
from ..data.seeds import generators_kept, seed_cpu
from ..errors import DdpkitError
from ..job import current_job, lifecycle
from ..parallel.gradient_exchange import Gradients, Modules, check_gradients, dtype_of_gradient, named_by_argument
from ..parallel.models import broadcast_into, describe_tensors
from ..torch_internals import ignored_by_ddp, is_fully_sharded, own_buffers, rebuild_buckets, untraced, version_of
from .sum import ExactExchange, Layout

# Run forwards and backwards that exchange nothing with other ranks, and that can be undone.

_Modules = Sequence[nn.Module | Tensor]


class LocalPass:
    """A block of forwards and backwards in which DDP exchanges nothing, nor may anything of ddpkit's.

    A rank that raises in the block keeps no other rank waiting. What DDP exchanges at the beginning
    of a forward travels when the block begins: buffers, and how gradients are cut into buckets.

    Args:
        call: Whose block it is, for errors.
        modules: The models that are used in the block, and single parameters.

    Raises:
        TypeError: If something is no module and no tensor, or a model exchanges values in its forward.
    """

    def __init__(self, call: str, modules: _Modules) -> None:
        self._call = call
        self._modules = modules
        self._before: _Before | None = None
        self._stack = ExitStack()
        for module in modules:
            _check_local(call, module)

    def __enter__(self) -> LocalPass:
        lifecycle.joined()  # refuses a block in another one, before anything is exchanged
        models = _wrapped(self._modules)
        self._exchange_first(models)
        self._before = _Before.of(self._modules)
        for model in models:
            self._stack.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # its buffers
            self._stack.callback(setattr, model, "require_forward_param_sync", True)
        self._stack.enter_context(lifecycle.apart(self._call))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def undo(self) -> None:
        """Give buffers and frozen parameters back what they had when the block began; drop all gradients."""
        if self._before is not None:
            self._before.restore()

    def changed_buffer(self) -> str:
        """Return the name of a buffer that the block has changed, with its module's class; "" if there is none."""
        if self._before is None:
            return ""
        return self._before.changed_buffer()

    def _exchange_first(self, models: list[DistributedDataParallel]) -> None:
        """Exchange what DDP does before a forward. Collective."""
        if not torch.is_grad_enabled() or not lifecycle.joined():
            return
        buffers = []
        for model in models:
            rebuild_buckets(model)
            if model.broadcast_buffers:
                buffers += list(model.module.buffers())
        if buffers:
            with torch.no_grad():
                broadcast_into(buffers)


@dataclass
class _Before:
    """What a block may change, from when it began.

    Attributes:
        buffers: Each with its module and name there, the object, its version, and a copy of its values.
        parameters: Each with whether it was trained.
    """

    buffers: list[tuple[nn.Module, str, Tensor | None, int, Tensor | None]]
    parameters: list[tuple[Tensor, bool]]

    @classmethod
    @torch.no_grad()
    def of(cls, modules: _Modules) -> _Before:
        before = cls([], [])
        for module in modules:
            if isinstance(module, Tensor):
                before.parameters.append((module, module.requires_grad))
                continue
            for parameter in module.parameters():
                before.parameters.append((parameter, parameter.requires_grad))
            for part in module.modules():
                for name, buffer in own_buffers(part).items():
                    copy = None if buffer is None else buffer.clone()
                    before.buffers.append((part, name, buffer, version_of(buffer), copy))
        return before

    @torch.no_grad()
    def restore(self) -> None:
        for part, name, buffer, _, copy in self.buffers:
            own_buffers(part)[name] = buffer  # the model may have put another in its place
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        for parameter, is_trained in self.parameters:
            parameter.requires_grad_(is_trained)
            parameter.grad = None

    def changed_buffer(self) -> str:
        for part, name, buffer, version, _ in self.buffers:
            now = own_buffers(part)[name]
            if now is not buffer or version_of(now) != version:
                return f"{type(part).__name__}.{name}"
        return ""


def _wrapped(modules: _Modules) -> list[DistributedDataParallel]:
    found = []
    for module in modules:
        if isinstance(module, nn.Module):
            found += [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
    return found


def _check_local(call: str, module: object) -> None:
    """Refuse a model whose forward waits for other ranks: they would wait for one that has raised."""
    if isinstance(module, Tensor):
        return
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call} takes modules and tensors, got {type(module).__name__}: unpack a list with *.")
    for part in module.modules():
        problem = _why_not_local(part)
        if problem:
            raise TypeError(f"{call} cannot take this model: {problem}.")


def _why_not_local(part: nn.Module) -> str:
    if isinstance(part, nn.SyncBatchNorm):
        return "SyncBatchNorm exchanges statistics in forward, where ranks would wait for one that has raised"
    if is_fully_sharded(part):
        return "fully_shard exchanges weights in forward, where ranks would wait for one that has raised"
    if not isinstance(part, DistributedDataParallel):
        return ""
    if part.static_graph:
        return "DDP with static_graph=True exchanges gradients in its first backward, whatever no_sync() says"
    if ignored_by_ddp(part.module):
        return "its DDP was told to leave some parameters or buffers alone"
    return ""


# Describe what the bits of a computation depend on, besides the program and its input.


def describe_kernels(device: torch.device) -> str:
    """Say in one line by which kernels a device computes: two processes with equal lines compute equal bits."""
    if device.type != "cpu":
        name = torch.get_device_module(device.type).get_device_name(device)
        return f"torch {torch.__version__}, {name}"
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {_cpu_name()}, {capability}, {threads} thread{plural}"


@functools.cache
def _cpu_name() -> str:
    """Return the name of this machine's kind of CPU, as Linux tells it; else that of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


_CALL = "exact_gradients()"


class MicroBatches(list[Any]):
    """This rank's micro-batches of one optimiser step, as a loader of `make_micro_batch_loader` yields them.

    Attributes:
        step: Which step it is, in words: the same on every rank.
        global_batch_size: Samples of the step, on all ranks together.
        seeds: Of the random numbers of each micro-batch here.
        most: Micro-batches that a rank can have: the same number on every rank.

    Example:
        >>> from ddpkit import make_micro_batch_loader
        >>> batch = next(iter(make_micro_batch_loader(range(6), global_batch_size=4, micro_batch_size=2)))
        >>> len(batch), batch.global_batch_size, batch.step
        (2, 4, 'epoch 0, from sample 0 on')
    """

    def __init__(self, batches: Iterable[Any], step: str, global_batch_size: int, seeds: list[int], most: int) -> None:
        super().__init__(batches)
        self.step = step
        self.global_batch_size = global_batch_size
        self.seeds = seeds
        self.most = most


@contextmanager
def exact_gradients(
    batch: MicroBatches,
    *modules: nn.Module | Tensor,
    threads: int = 1,
) -> Iterator[Iterator[Any]]:
    """Add up the gradients of a step to the same bits on any number of ranks. Collective.

    The block goes through this rank's micro-batches. Each has random numbers of its own (of `random`, NumPy and torch),
    so that dropout is the same wherever it is computed. After the block each parameter's `.grad` is the sum of what
    the backwards on all ranks have given; a gradient from before the block is dropped. The sum is exact, so it has no
    order that could vary: elements are rounded before, by at most 2^-40 of the largest one of the step, and the sum
    at the end, to float64 and then to the gradient's dtype.

    Divide each loss, summed over its samples, by `batch.global_batch_size`. Within the block nothing is exchanged:
    DDP's exchange is off, and ddpkit's own calls are refused. At the end each rank adds up a part of the elements.

    A micro-batch's gradient has the same bits only where the same kernels compute it: the same torch, kind of CPU and
    number of threads, or the same kind of accelerator with `torch.use_deterministic_algorithms(True)`. Ranks that
    differ are refused, and so are states of the loader from elsewhere.

    Args:
        batch: What a loader of `make_micro_batch_loader` has yielded.
        *modules: All models that are trained in the step, wrapped or not, and single parameters, equal on all ranks.
        threads: That torch uses on the CPU: the same in all runs that are to have the same bits.

    Raises:
        MismatchError: If the ranks are at different steps, or have other parameters or kernels; on the other ranks,
            if one raises an error below.
        DdpkitError: If a forward changes a buffer, such as BatchNorm's statistics: its value would depend on which
            rank saw what.
        RuntimeError: If the block ends before its loop has taken all micro-batches.
        TypeError: If the batch is of another loader, a model exchanges values in its forward (`fully_shard`,
            SyncBatchNorm, DDP with `static_graph=True`), or a parameter or gradient is sharded, sparse or complex.
        ValueError: If torch uses another number of threads, or may use algorithms that are not deterministic; if
            nothing is trained.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.

    Example:
        >>> from ddpkit import make_micro_batch_loader
        >>> torch.set_num_threads(1)  # as `ddpkit.setup(num_threads=1)` does
        >>> loader = make_micro_batch_loader(torch.ones(6, 2), global_batch_size=4, micro_batch_size=2)
        >>> net = nn.Linear(2, 1)
        >>> for batch in loader:
        ...     with exact_gradients(batch, net) as micro_batches:
        ...         for x in micro_batches:
        ...             (net(x).sum() / batch.global_batch_size).backward()
        ...     print(net.weight.grad)  # then optimizer.step()
        tensor([[1., 1.]])
        tensor([[1., 1.]])
    """
    peers = current_job.data_parallel()
    with raise_everywhere(_CALL, peers):
        local_pass = LocalPass(_CALL, modules)
        step = _Step(batch, modules)
        check_kernels(step.device, threads)
    with local_pass:
        try:
            with generators_kept():
                yield step.micro_batches()
        finally:
            step.gradients.hide()
    _end(step, local_pass)


_exchanges: WeakKeyDictionary[nn.Module, ExactExchange] = WeakKeyDictionary()


def _exchange_for(modules: Modules, layout: Layout) -> ExactExchange:
    """Return what adds up the gradients of some modules: it is kept with the first of them from step to step."""
    first = modules[0]
    if not isinstance(first, nn.Module):
        return ExactExchange(layout)
    exchange = _exchanges.get(first)
    if exchange is None or exchange.layout != layout:
        exchange = _exchanges[first] = ExactExchange(layout)
    exchange.clear()
    return exchange


class _Step:
    """The gradients of one step, and their sums.

    Attributes:
        gradients: Of the parameters that are trained.
        sizes: Their elements.
        dtypes: Of their gradients.
        device: Of the sums.
        counts: Of how many micro-batches here each parameter has gradients.
    """

    def __init__(self, batch: MicroBatches, modules: Modules) -> None:
        if not isinstance(batch, MicroBatches):
            kind = type(batch).__name__
            raise TypeError(f"{_CALL} takes what a loader of make_micro_batch_loader() yields, got {kind}.")
        self.batch = batch
        self.modules = modules
        self.gradients = Gradients(named_by_argument(modules))
        check_gradients(_CALL, modules, self.gradients)
        parameters = self.gradients.parameters
        if not parameters:
            raise ValueError(f"{_CALL} needs modules with parameters that are trained.")
        if any(p.is_complex() for p in parameters):
            raise TypeError(f"{_CALL} takes real parameters: keep a complex one as torch.view_as_real() of it.")
        self.device = parameters[0].device
        self.sizes = [p.numel() for p in parameters]
        self.counts = [0] * len(parameters)
        self.dtypes = [dtype_of_gradient(p) for p in parameters]
        dtype = functools.reduce(torch.promote_types, self.dtypes, torch.float32)
        result = self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.float64  # then to that of each gradient
        ranks = joined_world_size(current_job.data_parallel())
        layout = Layout(tuple(self.sizes), batch.most, ranks, dtype, result, self.device)
        self.exchange = _exchange_for(modules, layout)
        self.is_complete = False

    def micro_batches(self) -> Iterator[Any]:
        """Yield each micro-batch, with its random numbers, and add the gradients that follow."""
        for micro_batch, seed in zip(self.batch, self.batch.seeds, strict=True):
            self.gradients.hide()
            self._seed(seed)
            yield micro_batch
            self._add()
        self.is_complete = True

    def _seed(self, seed: int) -> None:
        seed_cpu(seed)
        # torch.manual_seed() would do it, too, but serves accelerators that are not there, which takes longer
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).manual_seed_all(seed)

    @untraced
    @torch.inference_mode(False)
    @torch.no_grad()
    def _add(self) -> None:
        """Add the gradients that the parameters have, those of a micro-batch, to the sums."""
        gradients = self.gradients
        gradients.values = [p.grad for p in gradients.parameters]
        check_gradients(_CALL, self.modules, gradients)
        pieces = []
        for i, gradient in enumerate(gradients.values):
            if gradient is None:
                pieces.append(torch.zeros(self.sizes[i], device=self.device))
                continue
            self.counts[i] += 1
            if gradient.device != self.device:  # of a model on several devices
                gradient = gradient.to(self.device)
            pieces.append(gradient.reshape(-1))
        self.exchange.add(pieces)

    @torch.inference_mode(False)
    @torch.no_grad()
    def distribute(self) -> None:
        """Give the sums over all ranks to the parameters as gradients. Collective."""
        peers = current_job.data_parallel()
        total, is_complete = self.exchange.total(self._fingerprint(), all(self.counts), peers)
        counts = self.counts
        if not is_complete:  # otherwise all have gradients
            counts = reduce_in_place(torch.tensor(counts, device=control_device(peers)), peers=peers).tolist()
        sums = torch.split(total, self.sizes)
        for p, dtype, count, value in zip(self.gradients.parameters, self.dtypes, counts, sums, strict=True):
            if count:
                p.grad = torch.empty_like(p, dtype=dtype).copy_(value.view(p.shape))

    def _fingerprint(self) -> str:
        names = self.gradients.names
        parameters = describe_tensors(dict(zip(names, self.gradients.parameters, strict=True)))
        step = f"{self.batch.step}, at most {self.batch.most} micro-batches on a rank"
        parts = {"step": step, "kernels": describe_kernels(self.device)}
        others = []
        for name, p, dtype in zip(names, self.gradients.parameters, self.dtypes, strict=True):
            if dtype != p.dtype:
                others.append(f"{name} {name_dtype(dtype)}")
        parts["dtypes of gradients"] = ", ".join(others) or "those of the parameters"
        return fingerprint_of(_CALL, parts | parameters)


def check_kernels(device: torch.device, threads: int) -> None:
    """Refuse kernels of which the user has not said that all runs have the same.

    Raises:
        ValueError: If torch uses another number of threads on the CPU, or may be indeterministic elsewhere.
    """
    if device.type != "cpu":
        if not torch.are_deterministic_algorithms_enabled():
            raise ValueError(f"{_CALL} on {device.type} needs torch.use_deterministic_algorithms(True).")
        return
    found = torch.get_num_threads()
    if found != threads:
        raise ValueError(
            f"{_CALL} expects threads={threads}, but torch uses {found}, and gradients would have other bits: "
            f"call ddpkit.setup(num_threads={threads}), or pass threads={found} in every run."
        )


@untraced
def _end(step: _Step, local_pass: LocalPass) -> None:
    """Exchange the sums, if the block did what it should. Collective."""
    with raise_everywhere(_CALL, current_job.data_parallel()):
        if not step.is_complete:
            raise RuntimeError(f"The block of {_CALL} ended before its loop had taken all micro-batches.")
        changed = local_pass.changed_buffer()
        if changed:
            raise DdpkitError(
                f"A forward in the block of {_CALL} has changed {changed}: its value would depend on which rank saw "
                "which micro-batch. Use a layer without running statistics, such as GroupNorm, or this one in eval()."
            )
    step.distribute()
