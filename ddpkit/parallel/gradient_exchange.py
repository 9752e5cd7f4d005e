"""Carry gradients to the other ranks and their means back, in messages of which all ranks know the size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..collectives.consistency import check_fingerprint, communication_device, control_device, fingerprint_of
from ..collectives.reduce import normalise
from ..collectives.tree import explain_not_dense, name_dtype
from ..errors import MismatchError, describe_error
from ..job import current_job, lifecycle
from ..job.current_job import get_data_parallel_world_size
from ..job.job import Peers, group_of, ranks_of
from ..torch_internals import is_sharded, untraced
from .models import check_tensors, named_tensors, sharing_memory, unwrap_model, writable

if TYPE_CHECKING:
    from ..join.session import Session

Modules = tuple[nn.Module | Tensor, ...]
NamedTensors = Iterator[tuple[str, Tensor]]
Settings = tuple[tuple[str, str], ...]


@untraced
def begin_exchange(
    call: str,
    modules: Modules,
    *,
    exchange: str = "average_gradients",
    settings: Settings = (),
    spoiled: bool = False,
) -> tuple[Gradients, GradientExchange | None]:
    """Send the gradients, if there are several ranks; refuse those that cannot travel.

    Args:
        call: The name of what is called, for errors on this rank.
        modules: The modules and tensors whose gradients they are.
        exchange: The name of the exchange, which must be the same on every rank.
        settings: What else must be the same on every rank, by name.
        spoiled: Whether this rank has none to give, and no rank may use the means.
    """
    joined = lifecycle.joined()
    try:
        gradients = Gradients(parameters_of(call, modules))
        if spoiled:
            gradients.spoil()
        check_gradients(call, modules, gradients)
    except (TypeError, ValueError) as error:
        if joined:
            _tell_peers(call, error)
        raise
    if not joined:
        return gradients, None
    fingerprint, layouts = _plan_for(exchange, settings, gradients)
    return gradients, GradientExchange(gradients, fingerprint, layouts)


def _tell_peers(call: str, error: Exception) -> None:
    """Let the other ranks raise from the check in which they would wait for this one."""
    refusal = fingerprint_of(call, error=describe_error(error))
    exchange = GradientExchange(Gradients([]), refusal, [])
    with suppress(MismatchError):
        exchange.first.check()


def parameters_of(call: str, modules: Modules) -> NamedTensors:
    """Yield the parameters of modules, named as without wrappers, and tensors without a name."""
    for module in modules:
        if isinstance(module, nn.Module):
            yield from unwrap_model(module).named_parameters()
        elif isinstance(module, Tensor):
            yield "", module
        else:
            kind = type(module).__name__
            raise TypeError(f"{call} takes modules and tensors, got {kind}: unpack a list with *.")


def check_gradients(call: str, modules: Modules, gradients: Gradients) -> None:
    """Refuse the gradients of modules if one cannot travel, or its parameter has no values: see `_refuse`."""
    if not all(map(_can_travel, gradients.parameters, gradients.values)):
        _refuse(call, modules)


def _can_travel(parameter: Tensor, gradient: Tensor | None) -> bool:
    if parameter.is_meta:
        return False
    # most parameters have no attributes of their own, and need no closer look, which takes longer
    is_ordinary = type(parameter) is nn.Parameter and not parameter.__dict__
    if not is_ordinary and (is_sharded(parameter) or is_lazy(parameter)):
        return False
    if gradient is None:
        return True
    if gradient.layout is not torch.strided or gradient.is_nested:
        return False
    return gradient.device == parameter.device


def _refuse(call: str, modules: Modules) -> None:
    """Raise for the first parameter or gradient that cannot travel, and name it.

    Raises:
        TypeError: If a parameter is sharded, or a gradient is not dense, or on another device.
        ValueError: If a parameter has no values.
    """
    named = list(named_by_argument(modules))
    check_tensors(call, named)
    for name, p in named:
        gradient = p.grad
        if gradient is None or _can_travel(p, gradient):
            continue
        if gradient.device != p.device:
            problem = f"is on {gradient.device}, the parameter on {p.device}"
        else:
            problem = f"is {explain_not_dense(gradient)}"
        raise TypeError(
            f"{call} takes dense gradients beside their parameters, but that of {name} {problem}. "
            "Make an embedding with sparse=False, or move and densify the gradient before."
        )


def named_by_argument(modules: Modules) -> NamedTensors:
    """Name the parameters that are trained, and of several arguments the one that they are of."""
    for i, module in enumerate(modules):
        suffix = f" of argument {i}" if len(modules) > 1 else ""
        if isinstance(module, nn.Module):
            named = named_tensors(module)
        else:
            named = [("the tensor", module)]
        for name, p in named:
            if p.requires_grad:
                yield name + suffix, p


@torch.no_grad()
def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which autograd keeps a parameter's gradient."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # older torch has only the second
    return dtype


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no element is infinite or NaN. It waits for an accelerator once for each device."""
    finite: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if real.numel():
            found = [extreme.isfinite() for extreme in torch.aminmax(real)]
            finite.setdefault(real.device, []).extend(found)
    return all(bool(torch.stack(found).all()) for found in finite.values())


class Gradients:
    """The gradients of some parameters, while they are replaced by their means.

    Attributes:
        parameters: Those that are trained, each once.
        names: Theirs.
        values: Their gradients; None for a parameter that has none.
        spoiled: Whether this rank has none to give, and no rank may use the means.
    """

    spoiled = False

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        names: dict[Tensor, str] = {}
        for name, p in named:
            if p.requires_grad:
                names.setdefault(p, name)
        self.parameters = list(names)
        self.names = list(names.values())
        self.values = [p.grad for p in self.parameters]

    def hide(self) -> None:
        """Leave the parameters without gradients: nothing can step with this rank's own."""
        for p in self.parameters:
            p.grad = None

    def spoil(self) -> None:
        """Give up this rank's gradients, and the means of all ranks with them."""
        self.hide()
        self.values = [None] * len(self.parameters)
        self.spoiled = True

    def separate(self) -> None:
        """Replace gradients that cannot be overwritten, each by itself, by new tensors.

        The new ones have no values yet.
        """
        shared = sharing_memory(self.values)
        for i, gradient in enumerate(self.values):
            if gradient is None:
                continue
            if i in shared or not writable(gradient):
                parameter = self.parameters[i]
                self.values[i] = torch.empty_like(parameter, dtype=gradient.dtype)

    def give_back(self) -> None:
        """Give the parameters their gradients."""
        for p, gradient in zip(self.parameters, self.values, strict=True):
            p.grad = gradient


class _BucketLayout(NamedTuple):
    """The parameters of one device and dtype; their gradients travel as one flat tensor."""

    device: torch.device
    dtype: torch.dtype  # of that tensor
    indices: list[int]  # among all parameters
    sizes: list[int]  # elements

    @property
    def length(self) -> int:
        """Return the elements of the tensor: the gradients, and a mark for each."""
        return sum(self.sizes) + len(self.indices)


class _Bucket:
    """The gradients of one layout on their way."""

    flat: Tensor
    divisor: float  # of the sums

    def __init__(self, layout: _BucketLayout, gradients: Gradients) -> None:
        self.layout = layout
        self.gradients = gradients
        self.missing = []  # gradients, by their position in the layout
        for position, index in enumerate(layout.indices):
            if gradients.values[index] is None:
                self.missing.append(position)

    def fill(self, flat: Tensor) -> None:
        """Write the gradients, zeros for those that are missing, and a mark for each.

        The mark is 1, or 0 where a gradient is missing; NaN on a rank that has spoiled them. All are
        divided by a power of two at least as large as the number of ranks: no sum overflows.
        """
        device, dtype, indices, sizes = self.layout
        marks = torch.ones(len(indices), device=device, dtype=dtype)
        if self.missing:
            marks[self.missing] = 0
        if self.gradients.spoiled:
            marks[:] = math.nan
        pieces = []
        for index, size in zip(indices, sizes, strict=True):
            gradient = self.gradients.values[index]
            if gradient is None:
                pieces.append(marks.new_zeros(size))
            else:
                pieces.append(gradient.reshape(-1))
        pieces.append(marks)
        if flat.device == device:
            torch.cat(pieces, out=flat)
        else:
            flat.copy_(torch.cat(pieces))
        factor, self.divisor = normalise(get_data_parallel_world_size())
        if factor != 1:
            flat.mul_(factor)
        self.flat = flat

    def is_finite(self, marks_only: bool) -> bool:
        """Return whether all sums, or those of the marks, are finite: the same on every rank."""
        sums = self.flat
        if marks_only:
            sums = sums[-len(self.layout.indices) :]
        return all_finite([sums])

    def distribute(self) -> None:
        """Write the means over the gradients, and make those that other ranks have."""
        if self.divisor != 1:
            self.flat.div_(self.divisor)
        _, _, indices, sizes = self.layout
        *means, marks = torch.split(self.flat, [*sizes, len(indices)])
        if self.missing:  # otherwise there is no reason to wait for the accelerator
            self._make_missing(marks.tolist())
        for index, mean in zip(indices, means, strict=True):
            gradient = self.gradients.values[index]
            if gradient is not None:
                gradient.copy_(mean.view(gradient.shape))

    def _make_missing(self, marks: list[float]) -> None:
        """Make the gradients that this rank has not, where the sum of the marks says others do."""
        for position in self.missing:
            if not marks[position]:
                continue
            index = self.layout.indices[position]
            parameter = self.gradients.parameters[index]
            self.gradients.values[index] = torch.empty_like(parameter, dtype=dtype_of_gradient(parameter))


class _Format(NamedTuple):
    """The size, in elements, and dtype of a message: equal on all ranks before they send it."""

    size: int
    dtype: torch.dtype


_HASH_SIZE = 16  # elements at the front of a first message
_USUAL_FORMAT = _Format(1 << 13, torch.float32)  # of a first message, if no other is known to suit
_LARGEST = 1 << 18  # elements of a first message
_next_formats: WeakKeyDictionary[Session | Peers, _Format] = WeakKeyDictionary()  # of those ranks' first messages


def _format_of(layouts: list[_BucketLayout]) -> _Format | None:
    """Return the format in which the first bucket travels behind a hash.

    It is None if the bucket travels without.
    """
    if not layouts:
        return None
    device, dtype, *_ = layouts[0]
    size = max(_HASH_SIZE + layouts[0].length, _USUAL_FORMAT.size)
    if size > _LARGEST or dtype.is_complex:
        return None
    peers = current_job.data_parallel()
    control = control_device(peers)
    if device != control and communication_device(device, peers) != control:
        return None
    return _Format(size, dtype)


def _who_averages() -> Session | Peers:
    """Return what stands for the ranks that average: they remember the format of their next message."""
    return current_job.data_parallel() or current_job.current_session()


class _FirstMessage:
    """A hash of what this rank averages, and behind it a bucket, summed over the ranks."""

    def __init__(self, fingerprint: str, format: _Format, bucket: _Bucket | None) -> None:
        self.peers = current_job.data_parallel()
        self.fingerprint = fingerprint
        self.flat = _write_message(fingerprint, format, bucket)
        self.work = _start(self.flat)
        self.checked = False

    def check(self) -> None:
        """Wait for the message, and make sure that the ranks average the same.

        Raises:
            MismatchError: If they do not.
        """
        if self.checked:
            return
        with current_job.peer_errors():
            self.work.wait()
        self.checked = True
        expected = _hash(self.fingerprint, len(ranks_of(self.peers)), self.flat.dtype)
        if not torch.equal(self.flat[:_HASH_SIZE].cpu(), expected):
            _next_formats.pop(_who_averages(), None)
            check_fingerprint(self.fingerprint, self.peers)  # says what differs


class GradientExchange:
    """The gradients of one call on their way, after a check that all ranks have the same.

    Of every call the first message has the same size and dtype on all ranks, whatever they pass:
    the format that suits the call before. At its front is a hash of the layout. So ranks that
    differ learn it there, before messages of different sizes meet, which aborts a gloo process; and
    a loop that averages the same networks in every step needs no other message, for where the first
    one suits this call too, it carries the gradients. Otherwise they follow in one of the same
    format, because a sum is rounded by its position in a message, and must not depend on the call
    before.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, gradients: Gradients, fingerprint: str, layouts: list[_BucketLayout]) -> None:
        self.gradients = gradients
        self.buckets = [_Bucket(layout, gradients) for layout in layouts]
        expected = _next_formats.get(_who_averages(), _USUAL_FORMAT)
        suitable = _format_of(layouts)
        _next_formats[_who_averages()] = suitable or _USUAL_FORMAT
        carried = self.buckets[0] if suitable == expected else None
        self.first = _FirstMessage(fingerprint, expected, carried)
        self.works: list[dist.Work] = []
        for i, bucket in enumerate(self.buckets):
            if bucket is carried:
                continue
            self.first.check()
            if i == 0 and suitable:
                message = _write_message(fingerprint, suitable, bucket)
            else:
                message = _write_bucket(bucket)
            self.works.append(_start(message))

    def wait(self) -> None:
        """Wait for the sums."""
        self.first.check()
        for work in self.works:
            with current_job.peer_errors():
                work.wait()

    def is_usable(self, finite: bool) -> bool:
        """Return whether no rank has spoiled the sums: the same on every rank, after `wait()`.

        Args:
            finite: Whether sums that are not finite count as spoiled, too.
        """
        return all(bucket.is_finite(marks_only=not finite) for bucket in self.buckets)

    @torch.inference_mode(False)
    @torch.no_grad()
    def distribute(self) -> None:
        """Write the means over the gradients, after `wait()`."""
        self.gradients.separate()
        for bucket in self.buckets:
            bucket.distribute()

    def finish(self) -> None:
        """Wait for the means and write them over the gradients."""
        self.wait()
        self.distribute()


def _write_message(fingerprint: str, format: _Format, bucket: _Bucket | None) -> Tensor:
    """Write the hash of a fingerprint, and behind it a bucket."""
    flat = torch.empty(format.size, dtype=format.dtype, device=control_device(current_job.data_parallel()))
    flat[:_HASH_SIZE] = _hash(fingerprint, 1, format.dtype)
    end = _HASH_SIZE
    if bucket:
        end += bucket.layout.length
        bucket.fill(flat[_HASH_SIZE:end])
    flat[end:] = 0
    return flat


def _write_bucket(bucket: _Bucket) -> Tensor:
    """Write a bucket alone."""
    layout = bucket.layout
    device = communication_device(layout.device, current_job.data_parallel())
    flat = torch.empty(layout.length, dtype=layout.dtype, device=device)
    bucket.fill(flat)
    return flat


def _start(flat: Tensor) -> dist.Work:
    with current_job.peer_errors():
        work: dist.Work = dist.all_reduce(flat, group=group_of(current_job.data_parallel()), async_op=True)
    return work


_Parameter = tuple[torch.device, torch.dtype, torch.Size, str]  # with its name


def _plan_for(exchange: str, settings: Settings, gradients: Gradients) -> tuple[str, list[_BucketLayout]]:
    parameters = []
    for p, name in zip(gradients.parameters, gradients.names, strict=True):
        parameters.append((p.device, p.dtype, p.shape, name))
    return _plan(exchange, settings, tuple(parameters))


@functools.lru_cache(maxsize=256)
def _plan(
    exchange: str,
    settings: Settings,
    parameters: tuple[_Parameter, ...],
) -> tuple[str, list[_BucketLayout]]:
    """Describe parameters to the other ranks, and sort them by what can travel in one tensor."""
    described = dict(settings)
    buckets: dict[tuple[torch.device, torch.dtype], _BucketLayout] = {}
    for i, (device, dtype, shape, name) in enumerate(parameters):
        text = f"{name_dtype(dtype)}{list(shape)}"
        if name:
            text = f"{name}, {text}"
        if device.type != "cpu":
            text += f" on {device.type}"
        described[f"parameter {i}"] = text
        sum_dtype = torch.promote_types(dtype, torch.float32)
        empty = _BucketLayout(device, sum_dtype, [], [])
        layout = buckets.setdefault((device, sum_dtype), empty)
        layout.indices.append(i)
        layout.sizes.append(math.prod(shape))
    return fingerprint_of(exchange, described), list(buckets.values())


@functools.lru_cache(maxsize=256)
def _hash(fingerprint: str, world_size: int, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a fingerprint's hash, exact in float32 also when summed over so many ranks."""
    digest = blake2b(fingerprint.encode(), digest_size=_HASH_SIZE).digest()
    return torch.tensor([world_size * byte for byte in digest], dtype=dtype, device="cpu")
