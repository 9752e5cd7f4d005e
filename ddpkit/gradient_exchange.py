"""Average gradients over ranks without DDP, for any number of networks in one step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .collectives.consistency import (
    check_fingerprint,
    communication_device,
    control_device,
    fingerprint_of,
    reduce_in_place,
)
from .collectives.tree import explain_not_dense, name_dtype
from .errors import MismatchError, describe_error
from .job import current_job, lifecycle
from .job.current_job import get_data_parallel_world_size
from .job.job import Peers, group_of
from .parallel.models import broadcast_into, can_be_overwritten, check_tensors, unwrap_model
from .torch_internals import is_fully_sharded, own_buffers, rebuild_buckets, untraced, version_of

if TYPE_CHECKING:
    from .rendezvous.session import Session

Modules = tuple[nn.Module | Tensor, ...]
Settings = tuple[tuple[str, str], ...]


@untraced
def average_gradients(*modules: nn.Module | Tensor) -> None:
    """Replace every gradient by its mean over ranks, in one flat all-reduce. Collective.

    Call it between `backward()` and `optimizer.step()`, with plain models that start equal on all
    ranks (seeded alike or broadcast; `check_replicas` checks). One call takes all networks of a step,
    however their gradients were computed. Gradients are replaced in place; half-precision ones are
    added in float32. On one process it does nothing.

    That all-reduce also checks that all ranks pass the same parameters. A small one before it does so instead if the
    last call passed others, for more than 260,000 elements, and on accelerators.

    Args:
        *modules: Modules, or single tensors such as a learned temperature. The same on every rank, in
            the same order: networks with equal names and shapes, such as twin critics, cannot be told
            apart.

    Raises:
        MismatchError: On every rank, if the parameters' number, names, shapes, dtypes or device types
            differ between ranks; on the other ranks, if one raises an error below. No gradient has
            changed then.
        TypeError: If a parameter is sharded, or a gradient is sparse or on another device than its
            parameter.
        ValueError: If a parameter is lazy and not initialised yet, or on the meta device.

    Note:
        A parameter without gradient counts as zero and gets the mean; if no rank has a gradient, it
        stays None. Gradients that share memory are replaced by new ones.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(net)

        On two ranks::

            average_gradients(actor, critic)    # rank 0, a gradient of 1.0
            average_gradients(actor, critic)    # rank 1, a gradient of 3.0; both have 2.0
    """
    begin_exchange("average_gradients()", modules).finish()


@contextmanager
def averaging(*modules: nn.Module | Tensor) -> Iterator[None]:
    """Average gradients like `average_gradients`, while a block does other work. Collective.

    The block may do anything that needs neither the gradients nor the updated weights, such as
    loading the next batch or collecting experience. In the block the parameters have no gradients;
    after it they have the means, after an exception none. On one process the gradients are restored
    unchanged.

    Args:
        *modules: As for `average_gradients`, with the same errors.

    Raises:
        RuntimeError: At the end, if the block has computed new gradients.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> with averaging(net):
        ...     batch = torch.ones(1, 2)  # whatever comes next
    """
    exchange = begin_exchange("averaging()", modules)
    gradients = exchange.gradients
    gradients.clear()
    yield
    if any(p.grad is not None for p in gradients.parameters):
        gradients.clear()
        raise RuntimeError(
            "Gradients were computed while the previous ones were still being averaged: call backward() before the "
            "block of averaging(), and the next one after the step."
        )
    exchange.finish()


@untraced
def begin_exchange(
    call: str,
    modules: Modules,
    *,
    exchange: str = "average_gradients",
    settings: Settings = (),
    spoiled: bool = False,
) -> GradientExchange:
    """Start sending the gradients if there are several ranks; raise for those that cannot be sent. Collective.

    Args:
        call: Name of the caller, for errors on this rank.
        modules: The modules and tensors with the gradients.
        exchange: Name of the exchange, the same on every rank.
        settings: What else must be the same on every rank, by name.
        spoiled: Whether this rank has no gradients, so that no rank may use the means.
    """
    current_job.weighting["backward"] = 1
    try:
        gradients = Gradients(call, modules)
    except (TypeError, ValueError) as error:
        refusal = GradientExchange(Gradients(call, ()), fingerprint_of(call, error=describe_error(error)), False)
        with suppress(MismatchError):
            refusal.check()  # the other ranks would wait for this one
        raise
    return GradientExchange(gradients, gradients.fingerprint(exchange, settings), spoiled)


class Gradients:
    """The gradients of some modules' trained parameters, each once.

    Attributes:
        parameters: The parameters.
        names: Their names without wrappers; "" for a single tensor.
        values: Their gradients, or None.

    Raises:
        TypeError: If a parameter is sharded, or a gradient is not dense, or on another device.
        ValueError: If a parameter has no values.
    """

    def __init__(self, call: str, modules: Modules) -> None:
        self._call = call
        names: dict[Tensor, str] = {}
        for name, p in _named_parameters(call, modules):
            if p.requires_grad:
                names.setdefault(p, name)
        self.parameters = list(names)
        self.names = list(names.values())
        self.read()

    def read(self) -> None:
        """Take the current gradients of the parameters."""
        self.values = [p.grad for p in self.parameters]
        names = [name or "the tensor" for name in self.names]
        check_tensors(self._call, zip(names, self.parameters, strict=True))
        for name, p, gradient in zip(names, self.parameters, self.values, strict=True):
            if gradient is None:
                continue
            problem = explain_not_dense(gradient)
            if gradient.device != p.device:
                problem = f"on {gradient.device}, the parameter on {p.device}"
            if problem:
                raise TypeError(
                    f"{self._call} takes dense gradients on their parameters' devices, but the gradient of {name} "
                    f"is {problem}. Create the embedding with sparse=False, or move or densify the gradient first."
                )

    def fingerprint(self, exchange: str, settings: Settings) -> str:
        """Describe the parameters for the other ranks."""
        parameters = []
        for p, name in zip(self.parameters, self.names, strict=True):
            parameters.append((name, p.dtype, p.shape, p.device.type))
        return _fingerprint(exchange, settings, tuple(parameters))

    def clear(self) -> None:
        """Remove the parameters' gradients, so that no step uses this rank's own."""
        for p in self.parameters:
            p.grad = None

    def restore(self) -> None:
        """Give the parameters their gradients."""
        for p, gradient in zip(self.parameters, self.values, strict=True):
            p.grad = gradient


def _named_parameters(call: str, modules: Modules) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        if isinstance(module, nn.Module):
            yield from unwrap_model(module).named_parameters()
        elif isinstance(module, Tensor):
            yield "", module
        else:
            kind = type(module).__name__
            raise TypeError(f"{call} takes modules and tensors, got {kind}: unpack a list with *.")


@functools.lru_cache(maxsize=256)
def _fingerprint(
    exchange: str,
    settings: Settings,
    parameters: tuple[tuple[str, torch.dtype, torch.Size, str], ...],
) -> str:
    described = dict(settings)
    for i, (name, dtype, shape, device) in enumerate(parameters):
        text = f"{name_dtype(dtype)}{list(shape)}"
        if name:
            text = f"{name}, {text}"
        if device != "cpu":
            text += f" on {device}"
        described[f"parameter {i}"] = text
    return fingerprint_of(exchange, described)


_HASH = 16  # bytes
_HEADER = _HASH + 2  # plus the numbers of ranks with spoiled and with missing gradients


class _Bucket(NamedTuple):
    """The gradients of one device and dtype during the exchange, in one flat tensor."""

    indices: list[int]  # in the order of the call
    message: Tensor  # the header, zeros unless it is the first message, then the gradients


class _Format(NamedTuple):
    """Size of a call's first message: agreed by all ranks before they send it."""

    fingerprint: str = ""
    size: int = _HEADER  # elements
    dtype: torch.dtype = torch.float32


_LARGEST = 1 << 18  # elements of a bucket in a first message
_formats: WeakKeyDictionary[Session | Peers, _Format] = WeakKeyDictionary()  # format of the ranks' next first message


class GradientExchange:
    """The exchange of one call's gradients, after a check that all ranks pass the same.

    The first message of a call is as large as what the call before sent, which is the same on all ranks whatever they
    pass now: messages of different sizes abort a gloo process. It begins with a hash. A loop that averages the same
    networks in every step sends no other message, because the first one carries the gradients.

    Attributes:
        gradients: This rank's gradients.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, gradients: Gradients, fingerprint: str, spoiled: bool) -> None:
        self.gradients = gradients
        self._fingerprint = fingerprint
        self._peers = current_job.data_parallel()
        self._spoiled = float(spoiled)
        self._missing = float(any(value is None for value in gradients.values))
        self._works: list[dist.Work] = []
        self._buckets: list[_Bucket] = []
        self._is_checked = lifecycle.enter_collective() is None
        if self._is_checked:
            return
        self._ranks = get_data_parallel_world_size()
        self._scale = 0.5 ** (self._ranks - 1).bit_length()  # exact, unlike 1 / ranks
        self._fill_buckets()
        before, mine = _formats.get(self._who(), _Format()), self._format()
        _formats[self._who()] = mine
        is_carried = before == mine != _Format()
        if is_carried:
            self._first = self._buckets[0].message
        else:
            self._first = torch.zeros(before.size, dtype=before.dtype, device=control_device(self._peers))
        header = [*_hash(fingerprint), self._spoiled, self._missing]
        self._first[:_HEADER] = torch.tensor(header, device="cpu")
        self._send(self._first)
        for bucket in self._buckets[is_carried:]:
            self.check()
            self._send(bucket.message)

    def _who(self) -> Session | Peers:
        """Return the key of the averaging ranks."""
        return self._peers or current_job.current_session()

    def _fill_buckets(self) -> None:
        """Flatten the gradients, zeros for missing ones, scaled so that no sum overflows."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(self.gradients.parameters):
            key = p.device, torch.promote_types(p.dtype, torch.float32)
            groups.setdefault(key, []).append(i)
        for (device, dtype), indices in groups.items():
            # the header is there in each message, because the place of a number affects the rounding of its sum
            pieces = [torch.zeros(_HEADER, device=device)]
            for i in indices:
                gradient = self.gradients.values[i]
                if gradient is None:
                    gradient = torch.zeros_like(self.gradients.parameters[i])
                pieces.append(gradient.reshape(-1))
            message = torch.cat(pieces).to(communication_device(device, self._peers), dtype)
            self._buckets.append(_Bucket(indices, message.mul_(self._scale)))

    def _format(self) -> _Format:
        """Return the format of a first message with the first bucket; without room if that is sent alone."""
        if not self._buckets:
            return _Format()
        message = self._buckets[0].message
        if message.numel() > _LARGEST or message.is_complex() or message.device != control_device(self._peers):
            return _Format()
        return _Format(self._fingerprint, message.numel(), message.dtype)

    def _send(self, message: Tensor) -> None:
        with current_job.peer_errors():
            self._works.append(dist.all_reduce(message, group=group_of(self._peers), async_op=True))

    def check(self) -> None:
        """Wait for the first message, and check that the ranks average the same.

        Raises:
            MismatchError: If they do not.
        """
        if self._is_checked:
            return
        with current_job.peer_errors():
            self._works[0].wait()
        self._is_checked = True
        *sums, self._spoiled, self._missing = self._first[:_HEADER].tolist()
        if sums != [self._ranks * byte for byte in _hash(self._fingerprint)]:
            _formats.pop(self._who(), None)
            check_fingerprint(self._fingerprint, self._peers)  # raises with what differs

    def _wait(self) -> None:
        self.check()
        for work in self._works:
            with current_job.peer_errors():
                work.wait()

    def is_usable(self, finite: bool) -> bool:
        """Wait for the means; return, equal on every rank, whether no rank has spoiled them.

        Args:
            finite: Whether means that are not finite count as spoiled, too.
        """
        self._wait()
        if self._spoiled or not finite:
            return not self._spoiled
        if current_job.has_peers():
            return all_finite(bucket.message for bucket in self._buckets)
        return all_finite(value for value in self.gradients.values if value is not None)

    @untraced
    def finish(self) -> None:
        """Wait for the means and copy them into the gradients."""
        self._wait()
        with torch.inference_mode(False), torch.no_grad():
            counts = [int(value is not None) for value in self.gradients.values]
            if self._buckets and self._missing:
                on_device = torch.tensor(counts, device=control_device(self._peers))
                counts = reduce_in_place(on_device, peers=self._peers).tolist()
            for bucket in self._buckets:
                self._distribute(bucket, counts)
            self.gradients.restore()

    def _distribute(self, bucket: _Bucket, counts: list[int]) -> None:
        """Copy means into gradients, if a rank has one; those that cannot be overwritten are replaced by new ones."""
        values = self.gradients.values
        fit = can_be_overwritten(values)
        parameters = [self.gradients.parameters[i] for i in bucket.indices]
        sizes = [_HEADER, *(p.numel() for p in parameters)]
        _, *means = torch.split(bucket.message.div_(self._ranks * self._scale), sizes)
        for i, p, mean in zip(bucket.indices, parameters, means, strict=True):
            gradient = values[i]
            if gradient is None or not fit[i]:
                gradient = torch.empty_like(p, dtype=dtype_of_gradient(p))
            if counts[i]:
                values[i] = gradient.copy_(mean.view(p.shape))


@functools.lru_cache(maxsize=256)
def _hash(fingerprint: str) -> list[float]:
    """Return the bytes of a fingerprint's hash, which float32 sums exactly."""
    return list(map(float, blake2b(fingerprint.encode(), digest_size=_HASH).digest()))


@torch.no_grad()
def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Return the dtype that autograd uses for a parameter's gradient."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # older torch has no grad_dtype
    return dtype


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element is infinite or NaN. On an accelerator it synchronises once."""
    extremes: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.numel():
            extremes += torch.aminmax(tensor)
    finite = [extreme.isfinite().to(extremes[0].device) for extreme in extremes]
    return not finite or bool(torch.stack(finite).all())


class LocalPass:
    """A block of forwards and backwards in which neither DDP nor ddpkit may communicate.

    A rank that raises in the block keeps no other rank waiting. What DDP exchanges at the start of a
    forward (buffers and the gradient buckets) is exchanged at the start of the block.

    Args:
        call: The caller, for errors.
        modules: The models used in the block, and single parameters.

    Raises:
        TypeError: If something is neither module nor tensor, or a model communicates in its forward.
    """

    def __init__(self, call: str, modules: Modules) -> None:
        self._call = call
        self._parameters = [p for _, p in _named_parameters(call, modules)]
        self._parts = [part for each in modules if isinstance(each, nn.Module) for part in each.modules()]
        for part in self._parts:
            problem = _why_not_local(part)
            if problem:
                waiting = "where ranks would wait for one that has raised"
                raise TypeError(f"{call} cannot take this model: {problem}, {waiting}.")
        # each with its module and name, the object, its version, and a copy
        self._buffers: list[tuple[nn.Module, str, Tensor | None, int, Tensor | None]] = []
        self._were_trained: list[tuple[Tensor, bool]] = []
        self._stack = ExitStack()

    def __enter__(self) -> LocalPass:
        lifecycle.enter_collective()  # rejects nested blocks before anything is exchanged
        models = [part for part in self._parts if isinstance(part, DistributedDataParallel)]
        self._exchange_first(models)
        self._remember()
        for model in models:
            self._stack.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # its buffers
            self._stack.callback(setattr, model, "require_forward_param_sync", True)
        self._stack.enter_context(lifecycle.no_collectives(self._call))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _exchange_first(self, models: list[DistributedDataParallel]) -> None:
        """Exchange what DDP exchanges before a forward. Collective."""
        if not torch.is_grad_enabled() or not current_job.has_peers():
            return
        buffers = []
        for model in models:
            rebuild_buckets(model)
            if model.broadcast_buffers:
                buffers += list(model.module.buffers())
        if buffers:
            with torch.no_grad():
                broadcast_into(buffers)

    @torch.no_grad()
    def _remember(self) -> None:
        self._were_trained = [(p, p.requires_grad) for p in self._parameters]
        self._buffers = []
        for part in self._parts:
            for name, buffer in own_buffers(part).items():
                copy = None if buffer is None else buffer.clone()
                self._buffers.append((part, name, buffer, version_of(buffer), copy))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore buffers and frozen parameters from the start of the block; drop all gradients."""
        for part, name, buffer, _, copy in self._buffers:
            own_buffers(part)[name] = buffer  # the model may have replaced it
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        for parameter, was_trained in self._were_trained:
            parameter.requires_grad_(was_trained)
            parameter.grad = None

    def changed_buffer(self) -> str:
        """Return the name of a buffer that the block changed, with its module's class; "" if none."""
        for part, name, buffer, version, _ in self._buffers:
            now = own_buffers(part)[name]
            if now is not buffer or version_of(now) != version:
                return f"{type(part).__name__}.{name}"
        return ""


def _why_not_local(part: nn.Module) -> str:
    if isinstance(part, nn.SyncBatchNorm):
        return "SyncBatchNorm exchanges statistics in forward"
    if is_fully_sharded(part):
        return "fully_shard exchanges weights in forward"
    if isinstance(part, DistributedDataParallel) and part.static_graph:
        return "DDP with static_graph=True exchanges gradients in its first backward"
    return ""
