"""Give the ranks the gradients that one process would have, on all their samples.

`accumulate` adds up micro-batches, `global_mean` weighs uneven ranks, and `average_gradients` is
for tiny networks, several networks in one step, and methods other than `forward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..collectives.consistency import (
    check_fingerprint,
    communication_device,
    fingerprint_of,
    raise_everywhere,
)
from ..collectives.groups import control_device
from ..collectives.packing import normalise
from ..collectives.reduce import reduce_tree
from ..collectives.tensors import explain_not_dense, local_part, name_dtype
from ..errors import MismatchError
from ..process_group import lifecycle
from ..process_group.failures import describe_error
from ..process_group.lifecycle import get_data_parallel_world_size
from ..process_group.peers import Peers, group_of, ranks_of
from ..process_group.session import Session
from ..torch_internals import is_fully_sharded, is_sharded, untraced
from .models import (
    check_module,
    check_tensors,
    named_tensors,
    sharing_memory,
    unwrap_model,
    without_dtensors,
    writable,
)
from .step_times import follow_optimizers

Loss = TypeVar("Loss", Tensor, float)
Modules = tuple[nn.Module | Tensor, ...]
NamedTensors = Iterator[tuple[str, Tensor]]


@contextmanager
def accumulate(model: nn.Module, step: int, every: int, last: bool = False) -> Iterator[bool]:
    """Cover forward and backward of one micro-batch; gradients travel only with a step's last.

    Gradients of the micro-batches add up: divide each loss by `every`, or scale it with
    `global_mean`. A plain model needs nothing and gets nothing but the answer. With `static_graph`
    torch has to synchronise a first backward, so the first micro-batch of every step travels too.

    Args:
        model: The model that `wrap_model` returned, one that torch's `fully_shard` was applied to, or a
            module that contains such models (an `nn.ModuleList` of several).
        step: The micro-batch's number, from 0; optimiser steps complete at multiples of `every`.
        every: Micro-batches per optimiser step.
        last: True for the last micro-batch of an epoch, which completes a step that would stay
            incomplete. It must be the same on every rank.

    Yields:
        True if this micro-batch completes the step: then call `optimizer.step()`.

    Raises:
        TypeError: If the model is no module, or sharded in another way.
        ValueError: If `every` or `step` is out of range.

    Example:
        >>> net, done = nn.Linear(2, 1), []
        >>> for step in range(5):
        ...     with accumulate(net, step, every=2, last=step == 4) as complete:
        ...         (net(torch.ones(3, 2)).mean() / 2).backward()
        ...     done.append(complete)  # if complete: optimizer.step(); optimizer.zero_grad()
        >>> done
        [False, True, False, True, True]
    """
    check_module("accumulate()", model)
    if every < 1 or step < 0:
        raise ValueError(f"every counts from 1 and step from 0, got every={every}, step={step}.")
    if step % every == 0:
        check_tensors("accumulate()", without_dtensors(model.named_parameters()))
    complete = last or (step + 1) % every == 0
    with ExitStack() as stack:
        if not complete:
            for module in model.modules():
                if is_fully_sharded(module):
                    stack.enter_context(_no_gradient_sync(module))
                if not isinstance(module, DistributedDataParallel):
                    continue
                if module.static_graph and step % every == 0:
                    continue
                stack.enter_context(module.no_sync())
        yield complete


@contextmanager
def _no_gradient_sync(module: Any) -> Iterator[None]:
    """Do for a module of `fully_shard` what `no_sync` of DDP does."""
    module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True, recurse=False)


@overload
def global_mean(loss_sum: Loss, count: float) -> Loss: ...
@overload
def global_mean(loss_sum: nn.Module, count: float) -> None: ...
@untraced
def global_mean(loss_sum: Any, count: float) -> Any:
    """Scale a sum of losses, or its gradients, to a mean over all ranks' samples. Collective.

    DDP and `average_gradients` take the mean of the ranks' gradients, which is wrong as soon as
    ranks hold different numbers of samples (or tokens): here each sample counts the same. On one
    process it is a division by `count`.

    Args:
        loss_sum: The loss summed over this rank's samples; without samples, that of an empty batch:
            it is 0 and still has a graph for DDP to synchronise. Or the model, after `backward()`
            of such sums: then its gradients are scaled in place, which with accumulation needs no
            count in advance.
        count: Number of those samples, or their total weight; 0 is fine as long as some rank has
            samples. With accumulation: of all micro-batches of the step.

    Returns:
        `loss_sum * world size / total count`. Its mean over the ranks (`all_reduce_mean`) is the
        mean over all samples. None for a model.

    Raises:
        MismatchError: On the other ranks, if one raises an error below.
        TypeError: If the loss is sharded, or a model in another way than by DTensors.
        ValueError: If a count is negative or not finite; on every rank, if the total count is 0.

    Example:
        >>> global_mean(torch.tensor(6.0), 3)
        tensor(2.)

        On two::

            global_mean(torch.tensor(6.0), 3)    # rank 0, three samples: 6 * 2 / 4 = 3
            global_mean(torch.tensor(1.0), 1)    # rank 1, one: 1 * 2 / 4 = 0.5
                                                 # the mean of both is 7 / 4

        With accumulation, one exchange per step::

            for i, (x, y) in enumerate(batches):
                with accumulate(model, i, len(batches)):
                    F.mse_loss(model(x), y, reduction="sum").backward()
            global_mean(model, sum(len(x) for x, _ in batches))    # then optimizer.step()
    """
    peers = lifecycle.data_parallel()
    with raise_everywhere("global_mean()", peers):
        if isinstance(loss_sum, nn.Module):
            check_tensors("global_mean()", without_dtensors(loss_sum.named_parameters()))
        elif isinstance(loss_sum, Tensor):
            check_tensors("global_mean()", [("the loss", loss_sum)])
        if isinstance(count, Tensor | np.generic):
            count = count.item()  # a sum of float16 would overflow
        if not 0 <= count < math.inf:
            raise ValueError(f"global_mean() needs a count of at least 0, got {count}.")
    total = reduce_tree(count, "sum", None, check=True, peers=peers)
    if not 0 < total < math.inf:
        found = f"the counts add up to {total}"
        raise ValueError(f"global_mean() needs at least one sample on some rank, but {found}.")
    factor = get_data_parallel_world_size() / total
    if not isinstance(loss_sum, nn.Module):
        return loss_sum * factor
    with torch.inference_mode(False), torch.no_grad():
        _scale_gradients(loss_sum, factor)
    return None


def _scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply a model's gradients, in place where they can be written to by themselves."""
    parameters = []
    scaled: dict[int, Tensor] = {}  # by the identity of the gradient: parameters may share one
    for p in model.parameters():
        if p.grad is not None:
            parameters.append(p)
            scaled[id(p.grad)] = p.grad
    gradients = list(scaled.values())
    locals = [local_part(gradient) for gradient in gradients]
    shared = sharing_memory(locals)
    in_place = []
    for i, (gradient, local) in enumerate(zip(gradients, locals, strict=True)):
        if i in shared or not writable(local):
            # before those that it shares memory with are multiplied
            scaled[id(gradient)] = gradient * factor
        else:
            in_place.append(local)
    for gradient in in_place:
        gradient.mul_(factor)
    for p in parameters:
        p.grad = scaled[id(p.grad)]


@untraced
def average_gradients(*modules: nn.Module | Tensor) -> None:
    """Replace every `.grad` by its mean over the ranks, in one flat all-reduce. Collective.

    Call it between `backward()` and `optimizer.step()`, with plain models that start equal on all
    ranks (seeded alike or broadcast; `check_replicas` tells). One call takes all networks of a
    step, and whatever produced the gradients. They are replaced in place, and half-precision ones
    are added in float32. On one process it does nothing.

    Ranks compare what they pass in the same all-reduce, if the call before was for parameters of
    the same size and dtype or both were small (up to 8,000 elements); otherwise, for more than
    260,000 elements, and on accelerators, in a small one before it.

    Args:
        *modules: Modules, or single tensors such as a learned temperature. The same on every rank,
            in the same order: of two networks with equal names and shapes, such as twin critics,
            nothing tells which is which.

    Raises:
        MismatchError: If the parameters differ in number, name, shape, dtype or kind of device
            between ranks, on every rank; on the other ranks, if one raises an error below. No
            gradient has changed then.
        TypeError: If a parameter is sharded, or a gradient is sparse or on another device than its
            parameter.
        ValueError: If a parameter is lazy and not initialised yet, or on the meta device.

    Note:
        A parameter without gradient on some ranks counts there as zero and gets the mean; without
        any, it stays None. A gradient that cannot be written to, such as an expanded one, is
        replaced by a new tensor.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(net)

        On two::

            average_gradients(actor, critic)    # rank 0, a gradient of 1.0
            average_gradients(actor, critic)    # rank 1, a gradient of 3.0; both have 2.0
    """
    gradients, exchange = _begin("average_gradients()", modules)
    if exchange:
        exchange.finish()
        gradients.give_back()


@contextmanager
def averaging(*modules: nn.Module | Tensor) -> Iterator[None]:
    """Average gradients as `average_gradients` does, while a block does other work. Collective.

    The block may draw the next batch, or play on: whatever needs neither the gradients nor the
    weights after this step. Within it the parameters have no gradients, after it their means; after
    an exception they have none. On one process they come back as they were.

    Args:
        *modules: As for `average_gradients`, and with the same errors.

    Raises:
        RuntimeError: At the end, if the block has put gradients where the means belong.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> with averaging(net):
        ...     batch = torch.ones(1, 2)  # whatever comes next
    """
    gradients, exchange = _begin("averaging()", modules)
    gradients.hide()
    yield
    _end(gradients, exchange)


@untraced
def _begin(call: str, modules: Modules) -> tuple[_Gradients, _Exchange | None]:
    """Send the gradients, if there are several ranks; refuse those that cannot travel."""
    joined = lifecycle.joined()
    try:
        gradients = _Gradients(_parameters_of(call, modules))
        if not all(map(_can_travel, gradients.parameters, gradients.values)):
            _refuse(call, modules)
    except (TypeError, ValueError) as error:
        if joined:
            _tell_peers(call, error)
        raise
    if not joined:
        return gradients, None
    follow_optimizers()
    return gradients, _Exchange(gradients)


def _tell_peers(call: str, error: Exception) -> None:
    """Let the other ranks raise from the check in which they would wait for this one."""
    refusal = fingerprint_of(call, error=describe_error(error))
    exchange = _Exchange(_Gradients([]), refusal)
    with suppress(MismatchError):
        exchange.first.check()


@untraced
def _end(gradients: _Gradients, exchange: _Exchange | None) -> None:
    """Put the means in the place of the gradients."""
    if any(p.grad is not None for p in gradients.parameters):
        gradients.hide()
        raise RuntimeError(
            "Gradients were computed while those before them were still being averaged: "
            "leave the block of averaging() and step before the next backward()."
        )
    if exchange:
        exchange.finish()
    gradients.give_back()


def _parameters_of(call: str, modules: Modules) -> NamedTensors:
    for module in modules:
        if isinstance(module, nn.Module):
            yield from unwrap_model(module).named_parameters()
        elif isinstance(module, Tensor):
            yield "", module
        else:
            kind = type(module).__name__
            raise TypeError(f"{call} takes modules and tensors, got {kind}: unpack a list with *.")


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
    named = list(_named_by_argument(modules))
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


def _named_by_argument(modules: Modules) -> NamedTensors:
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


class _Gradients:
    """The gradients of some parameters, while they are replaced by their means.

    Attributes:
        parameters: Those that are trained, each once.
        names: Theirs.
        values: Their gradients; None for a parameter that has none.
    """

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

    def __init__(self, layout: _BucketLayout, gradients: _Gradients) -> None:
        self.layout = layout
        self.gradients = gradients
        self.missing = []  # gradients, by their position in the layout
        for position, index in enumerate(layout.indices):
            if gradients.values[index] is None:
                self.missing.append(position)

    def fill(self, flat: Tensor) -> None:
        """Write the gradients, zeros for those that are missing, and a mark for each: 1 or 0.

        They are divided by a power of two at least as large as the number of ranks: no sum
        overflows.
        """
        device, dtype, indices, sizes = self.layout
        marks = torch.ones(len(indices), device=device, dtype=dtype)
        if self.missing:
            marks[self.missing] = 0
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
        factor, self.divisor = normalise(None, get_data_parallel_world_size())
        if factor != 1:
            flat.mul_(factor)
        self.flat = flat

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
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            self.gradients.values[index] = torch.empty_like(parameter, dtype=dtype)


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
    peers = lifecycle.data_parallel()
    control = control_device(peers)
    if device != control and communication_device(device, peers) != control:
        return None
    return _Format(size, dtype)


def _who_averages() -> Session | Peers:
    """Return what stands for the ranks that average: they remember the format of their next message."""
    return lifecycle.data_parallel() or lifecycle.current_session()


class _FirstMessage:
    """A hash of what this rank averages, and behind it a bucket, summed over the ranks."""

    def __init__(self, fingerprint: str, format: _Format, bucket: _Bucket | None) -> None:
        self.peers = lifecycle.data_parallel()
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
        with lifecycle.exchanging():
            self.work.wait()
        self.checked = True
        expected = _hash(self.fingerprint, len(ranks_of(self.peers)), self.flat.dtype)
        if not torch.equal(self.flat[:_HASH_SIZE].cpu(), expected):
            _next_formats.pop(_who_averages(), None)
            check_fingerprint(self.fingerprint, self.peers)  # says what differs


class _Exchange:
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
    def __init__(self, gradients: _Gradients, refusal: str = "") -> None:
        self.gradients = gradients
        fingerprint, layouts = _plan_for(gradients)
        fingerprint = refusal or fingerprint
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

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means and write them over the gradients, which ends a step."""
        self.first.check()
        for work in self.works:
            with lifecycle.exchanging():
                work.wait()
        self.gradients.separate()
        for bucket in self.buckets:
            bucket.distribute()
        lifecycle.step_clock().end_step()


def _write_message(fingerprint: str, format: _Format, bucket: _Bucket | None) -> Tensor:
    """Write the hash of a fingerprint, and behind it a bucket."""
    flat = torch.empty(format.size, dtype=format.dtype, device=control_device(lifecycle.data_parallel()))
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
    device = communication_device(layout.device, lifecycle.data_parallel())
    flat = torch.empty(layout.length, dtype=layout.dtype, device=device)
    bucket.fill(flat)
    return flat


def _start(flat: Tensor) -> dist.Work:
    with lifecycle.exchanging():
        work: dist.Work = dist.all_reduce(flat, group=group_of(lifecycle.data_parallel()), async_op=True)
    return work


_Parameter = tuple[torch.device, torch.dtype, torch.Size, str]  # with its name


def _plan_for(gradients: _Gradients) -> tuple[str, list[_BucketLayout]]:
    parameters = []
    for p, name in zip(gradients.parameters, gradients.names, strict=True):
        parameters.append((p.device, p.dtype, p.shape, name))
    return _plan(tuple(parameters))


@functools.lru_cache(maxsize=256)
def _plan(parameters: tuple[_Parameter, ...]) -> tuple[str, list[_BucketLayout]]:
    """Describe parameters to the other ranks, and sort them by what can travel in one tensor."""
    described = {}
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
    return fingerprint_of("average_gradients", described), list(buckets.values())


@functools.lru_cache(maxsize=256)
def _hash(fingerprint: str, world_size: int, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a fingerprint's hash, exact in float32 also when summed over so many ranks."""
    digest = blake2b(fingerprint.encode(), digest_size=_HASH_SIZE).digest()
    return torch.tensor([world_size * byte for byte in digest], dtype=dtype, device="cpu")
