"""Gradients as one process would have them: over micro-batches, over uneven ranks, and where DDP does not fit.

`average_gradients` is for tiny networks, several networks in one step, and methods other than `forward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..collectives import ops
from ..collectives.consistency import check_fingerprint, communication_device, fingerprint_of, raise_everywhere
from ..collectives.packing import safe_scale
from ..errors import MismatchError
from ..launch import ranks
from ..process_group import lifecycle
from ..process_group.session import Session
from ..torch_internals import is_sharded, untraced
from .models import check_module, check_tensors, named_tensors, sharing_memory, unwrap_model, writable

Loss = TypeVar("Loss", torch.Tensor, float)


@contextmanager
def accumulate(model: nn.Module, step: int, every: int, last: bool = False) -> Iterator[bool]:
    """Cover forward and backward of one micro-batch; gradients travel only with the one that completes a step.

    Gradients of the micro-batches add up: divide each loss by `every`, or scale it with `global_mean`. A plain model
    needs nothing and gets nothing but the answer. With `static_graph` torch has to synchronise a first backward, so the
    first micro-batch of every step travels too.

    Args:
        model: What `wrap_model` returned, or a module that contains such models (an `nn.ModuleList` of several).
        step: The micro-batch's number, from 0; optimiser steps complete at multiples of `every`.
        every: Micro-batches per optimiser step.
        last: True for the last micro-batch of an epoch, which completes a step that would stay incomplete. It must be
            the same on every rank.

    Yields:
        Whether this micro-batch completes the step: then call `optimizer.step()`.

    Raises:
        TypeError: If the model is no module, or has sharded tensors.
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
        check_tensors("accumulate()", model.named_parameters())
    complete = last or (step + 1) % every == 0
    with ExitStack() as quiet:
        for module in () if complete else model.modules():
            if isinstance(module, DistributedDataParallel) and (step % every or not module.static_graph):
                quiet.enter_context(module.no_sync())
        yield complete


@overload
def global_mean(loss_sum: Loss, count: float) -> Loss: ...
@overload
def global_mean(loss_sum: nn.Module, count: float) -> None: ...
@untraced
def global_mean(loss_sum: Any, count: float) -> Any:
    """Scale a sum of losses, or its gradients, so that the ranks' mean is that over all their samples. Collective.

    DDP and `average_gradients` take the mean of the ranks' gradients, which is wrong as soon as ranks hold different
    numbers of samples (or tokens): here each sample counts the same. On one process it is a division by `count`.

    Args:
        loss_sum: The loss summed over this rank's samples; without samples, that of an empty batch: it is 0 and still
            has a graph for DDP to synchronise. Or the model, after `backward()` of such sums: then its gradients are
            scaled in place, which with accumulation needs no count in advance.
        count: Number of those samples, or their total weight; 0 is fine as long as some rank has samples. With
            accumulation: of all micro-batches of the step.

    Returns:
        `loss_sum * world size / total count`. Its mean over the ranks (`all_reduce_mean`) is the mean over all samples.
        None for a model.

    Raises:
        MismatchError: On the ranks whose peers raise one of the errors below.
        TypeError: If the loss or a gradient is sharded.
        ValueError: If a count is negative or not finite; on every rank, if the total count is 0.

    Example:
        >>> global_mean(torch.tensor(6.0), 3)
        tensor(2.)

        On two::

            global_mean(torch.tensor(6.0), 3)    # rank 0, three samples: 6 * 2 / 4 = 3
            global_mean(torch.tensor(1.0), 1)    # rank 1, one: 1 * 2 / 4 = 0.5; the mean of both is 7 / 4

        With accumulation, one exchange per step::

            for i, (x, y) in enumerate(batches):
                with accumulate(model, i, len(batches)):
                    F.mse_loss(model(x), y, reduction="sum").backward()
            global_mean(model, sum(len(x) for x, _ in batches))    # then optimizer.step()
    """
    model = loss_sum if isinstance(loss_sum, nn.Module) else None
    with raise_everywhere("global_mean()"):
        if model is not None:
            check_tensors("global_mean()", model.named_parameters())
        elif isinstance(loss_sum, torch.Tensor):
            check_tensors("global_mean()", [("the loss", loss_sum)])
        count = count.item() if isinstance(count, torch.Tensor | np.generic) else count  # float16 sums overflow
        if not 0 <= count < math.inf:
            raise ValueError(f"global_mean() needs a count of at least 0, got {count}.")
    total = ops.all_reduce(count, op="sum")
    if not 0 < total < math.inf:
        raise ValueError(f"global_mean() needs at least one sample on some rank, but the counts add up to {total}.")
    share: float = ranks.get_world_size() / total
    if model is None:
        return loss_sum * share
    with torch.inference_mode(False), torch.no_grad():
        _scale_gradients(model, share)


def _scale_gradients(model: nn.Module, share: float) -> None:
    """Multiply a model's gradients in place; those that cannot be written to by themselves become new tensors."""
    held = [p for p in model.parameters() if p.grad is not None]
    found = {id(p.grad): p.grad for p in held if p.grad is not None}  # parameters may share a gradient
    gradients = list(found.values())
    shared = sharing_memory(gradients)
    apart = [place not in shared and writable(gradient) for place, gradient in enumerate(gradients)]
    for gradient, in_place in zip(gradients, apart, strict=True):
        if not in_place:  # before what it shares memory with is multiplied
            found[id(gradient)] = gradient * share
    for gradient, in_place in zip(gradients, apart, strict=True):
        if in_place:
            gradient.mul_(share)
    for p in held:
        p.grad = found[id(p.grad)]


@untraced
def average_gradients(*modules: nn.Module | torch.Tensor) -> None:
    """Replace every `.grad` by its mean over the ranks, in place, in one flat all-reduce. Collective.

    Call it between `backward()` and `optimizer.step()`, with plain models that start equal on all ranks (seeded alike
    or broadcast; `check_replicas` tells). One call takes all networks of a step, and whatever produced the gradients.
    Half-precision gradients are added in float32. On one process it does nothing.

    Ranks compare what they pass in the same all-reduce, if the call before was for parameters of the same size and
    dtype or both were small (up to 8,000 elements); otherwise, for more than 260,000 elements, and on accelerators,
    in a small one before it.

    Args:
        *modules: Modules, or single tensors such as a learned temperature. The same on every rank, in the same order:
            of two networks with equal names and shapes, such as twin critics, nothing tells which is which.

    Raises:
        MismatchError: If the parameters differ in number, name, shape, dtype or kind of device between ranks, on every
            rank; also on the ranks whose peers raise one of the errors below. No gradient has changed then.
        TypeError: If a parameter is sharded, or a gradient is sparse or on another device than its parameter.
        ValueError: If a parameter is lazy and not initialised yet, or on the meta device.

    Note:
        A parameter without gradient on some ranks counts there as zero and gets the mean; without any, it stays None.
        A gradient that cannot be written to, such as an expanded one, is replaced by a new tensor.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(net)

        On two::

            average_gradients(actor, critic)    # rank 0, a gradient of 1.0
            average_gradients(actor, critic)    # rank 1, a gradient of 3.0; both have 2.0
    """
    held, exchange = _begin("average_gradients()", modules)
    if exchange:
        exchange.finish()
        held.give_back()


@contextmanager
def averaging(*modules: nn.Module | torch.Tensor) -> Iterator[None]:
    """`average_gradients`, with the work of the block done while the gradients travel. Collective.

    The block may draw the next batch, or play on: whatever needs neither the gradients nor the weights after this
    step. Within it the parameters have no gradients, after it their means; after an exception they have none. On one
    process they come back as they were.

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
    held, exchange = _begin("averaging()", modules)
    for p in held.parameters:
        p.grad = None  # so that nothing can step with what is one rank's only
    yield
    _end(held, exchange)


@untraced
def _end(held: _Held, exchange: _Exchange | None) -> None:
    """Put the means in the place of the gradients."""
    if any(p.grad is not None for p in held.parameters):
        for p in held.parameters:
            p.grad = None
        raise RuntimeError(
            "Gradients were computed while those before them were still being averaged: "
            "leave the block of averaging() and step before the next backward()."
        )
    if exchange:
        exchange.finish()
    held.give_back()


class _Form(NamedTuple):
    """The size, in elements, and dtype of a message: what must be equal on all ranks before they send it."""

    size: int
    dtype: torch.dtype


_HEAD = 16  # elements of the check at the front of a first message
_CHECK = _Form(1 << 13, torch.float32)  # of a first message, if no other is known to suit
_LARGEST = 1 << 18  # elements of a first message
_first_messages: WeakKeyDictionary[Session, _Form] = WeakKeyDictionary()  # of the next call, by job


class _Held:
    """The gradients of some parameters, each of these once, while they are replaced by their means."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        names: dict[torch.Tensor, str] = {}
        for name, p in named:
            if p.requires_grad:
                names.setdefault(p, name)
        self.parameters, self.names = list(names), list(names.values())
        self.gradients = [p.grad for p in self.parameters]

    def separate(self) -> None:
        """Replace gradients that cannot be overwritten, each by itself, by new tensors without values."""
        shared = sharing_memory(self.gradients)
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                continue
            if place in shared or not writable(gradient):
                parameter = self.parameters[place]
                self.gradients[place] = torch.empty_like(parameter, dtype=gradient.dtype)

    def give_back(self) -> None:
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient


@untraced
def _begin(call: str, modules: tuple[nn.Module | torch.Tensor, ...]) -> tuple[_Held, _Exchange | None]:
    joined = lifecycle.joined()
    try:
        held = _Held(_parameters_of(call, modules))
        if not all(map(_can_travel, held.parameters, held.gradients)):
            _refuse(call, modules)
    except (TypeError, ValueError) as error:
        if joined:  # the others learn it from the check, in which they would wait for this rank
            with suppress(MismatchError):
                _Exchange(_Held([]), refusal=fingerprint_of(call, error=f"{type(error).__name__}: {error}")).check()
        raise
    return held, _Exchange(held) if joined else None


def _parameters_of(call: str, modules: tuple[nn.Module | torch.Tensor, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    for module in modules:
        if isinstance(module, nn.Module):
            yield from unwrap_model(module).named_parameters()
        elif isinstance(module, torch.Tensor):
            yield "", module
        else:
            raise TypeError(f"{call} takes modules and tensors, got {type(module).__name__}: unpack a list with *.")


def _can_travel(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    ordinary = type(parameter) is nn.Parameter and not parameter.__dict__  # most are, and this is quick
    if parameter.is_meta or (not ordinary and (is_sharded(parameter) or is_lazy(parameter))):
        return False
    if gradient is None:
        return True
    return gradient.layout is torch.strided and gradient.device == parameter.device and not gradient.is_nested


def _refuse(call: str, modules: tuple[nn.Module | torch.Tensor, ...]) -> NoReturn:
    named: list[tuple[str, torch.Tensor]] = []
    for i, module in enumerate(modules):
        place = f" of argument {i}" if len(modules) > 1 else ""
        parameters = named_tensors(module) if isinstance(module, nn.Module) else [("the tensor", module)]
        named += [(name + place, p) for name, p in parameters if p.requires_grad]
    check_tensors(call, named)
    name, p = next((name, p) for name, p in named if not _can_travel(p, p.grad))
    assert p.grad is not None
    if p.grad.device != p.device:
        found = f"is on {p.grad.device}, the parameter on {p.device}"
    else:
        found = f"is a {p.grad.layout} tensor".replace("torch.", "")
    raise TypeError(
        f"{call} takes dense gradients beside their parameters, but that of {name} {found}. "
        "Make an embedding with sparse=False, or move and densify the gradient before."
    )


class _Group(NamedTuple):
    """Parameters of one device and dtype, whose gradients travel as one flat tensor."""

    device: torch.device
    dtype: torch.dtype  # of that tensor
    places: list[int]  # among all parameters
    sizes: list[int]  # elements

    @property
    def length(self) -> int:
        return sum(self.sizes) + len(self.places)


def _form_of(groups: list[_Group]) -> _Form | None:
    """Say in which form the first group's gradients travel behind a check; None if they travel without."""
    if not groups:
        return None
    device, dtype, *_ = groups[0]
    size = max(_HEAD + groups[0].length, _CHECK.size)
    if size > _LARGEST or dtype.is_complex:
        return None
    control = lifecycle.control_device()
    if device != control and communication_device(device) != control:
        return None
    return _Form(size, dtype)


class _Bucket:
    """The gradients of a group on their way."""

    flat: torch.Tensor
    divisor: float  # of the sums

    def __init__(self, group: _Group, held: _Held) -> None:
        self.group, self.held = group, held

    def fill(self, flat: torch.Tensor) -> None:
        """Write the gradients, zeros for those that are missing, and which of them there are.

        They are divided by a power of two at least as large as the number of ranks: no sum overflows.
        """
        device, dtype, places, sizes = self.group
        self.missing = [i for i, place in enumerate(places) if self.held.gradients[place] is None]
        present = torch.ones(len(places), device=device, dtype=dtype)
        if self.missing:
            present[self.missing] = 0
        pieces = []
        for place, size in zip(places, sizes, strict=True):
            gradient = self.held.gradients[place]
            pieces.append(present.new_zeros(size) if gradient is None else gradient.reshape(-1))
        if flat.device == device:
            torch.cat([*pieces, present], out=flat)
        else:
            flat.copy_(torch.cat([*pieces, present]))
        factor, self.divisor = safe_scale(None, ranks.get_world_size())
        if factor != 1:
            flat.mul_(factor)
        self.flat = flat

    def distribute(self) -> None:
        """Put the means in the place of the gradients, and make those that this rank alone has not."""
        if self.divisor != 1:
            self.flat.div_(self.divisor)
        *means, present = torch.split(self.flat, [*self.group.sizes, len(self.group.places)])
        somewhere = present.tolist() if self.missing else ()  # else there is no reason to wait for the accelerator
        parameters, gradients = self.held.parameters, self.held.gradients
        for i in self.missing:
            place = self.group.places[i]
            p = parameters[place]
            dtype = getattr(p, "grad_dtype", None) or p.dtype
            gradients[place] = torch.empty_like(p, dtype=dtype) if somewhere[i] else None
        for place, mean in zip(self.group.places, means, strict=True):
            gradient = gradients[place]
            if gradient is not None:
                gradient.copy_(mean.view(gradient.shape))


class _Exchange:
    """The gradients of one call on their way, after a check that all ranks have the same.

    Of every call the first message has the same size and dtype on all ranks, whatever they pass: those that suit the
    call before. At its front is a hash of the layout. So ranks that differ learn it there, before messages of different
    sizes meet, which aborts a gloo process; and a loop that averages the same networks in every step needs no other
    message, for where the first one suits this call too, it carries the gradients. Otherwise they follow in one of the
    same form, because a sum is rounded by its place in a message, and must not depend on the call before.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, held: _Held, refusal: str = "") -> None:
        self.held = held
        self.session, self.checked = lifecycle.current_session(), False
        layout = [(p.device, p.dtype, p.shape, name) for p, name in zip(held.parameters, held.names, strict=True)]
        described, groups = _plan(tuple(layout))
        self.terms = refusal or described
        self.buckets = [_Bucket(group, held) for group in groups]
        form, first = _form_of(groups), _first_messages.get(self.session, _CHECK)
        _first_messages[self.session] = form or _CHECK
        self.front = self._message(first, self.buckets[0] if form == first else None)
        self.works = [_start(self.front)]
        for i, bucket in enumerate(self.buckets):
            if i == 0 and form == first:
                continue
            self.check()
            if i == 0 and form:
                message = self._message(form, bucket)
            else:
                device, dtype = communication_device(bucket.group.device), bucket.group.dtype
                message = torch.empty(bucket.group.length, dtype=dtype, device=device)
                bucket.fill(message)
            self.works.append(_start(message))

    def _message(self, form: _Form, bucket: _Bucket | None) -> torch.Tensor:
        """Write the hash, and behind it the gradients of a bucket."""
        flat = torch.empty(form.size, dtype=form.dtype, device=lifecycle.control_device())
        flat[:_HEAD] = _head(self.terms, 1, form.dtype)
        end = _HEAD
        if bucket:
            end += bucket.group.length
            bucket.fill(flat[_HEAD:end])
        flat[end:] = 0
        return flat

    def check(self) -> None:
        """Wait for the first message and make sure that it is that of equal ranks."""
        if self.checked:
            return
        with lifecycle.peer_errors():
            self.works.pop(0).wait()
        self.checked = True
        expected = _head(self.terms, ranks.get_world_size(), self.front.dtype)
        if not torch.equal(self.front[:_HEAD].cpu(), expected):
            _first_messages.pop(self.session, None)
            check_fingerprint(self.terms)  # says what differs

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means and put them into the gradients that were held."""
        self.check()
        for work in self.works:
            with lifecycle.peer_errors():
                work.wait()
        self.held.separate()
        for bucket in self.buckets:
            bucket.distribute()


def _start(flat: torch.Tensor) -> dist.Work:
    with lifecycle.peer_errors():
        work: dist.Work = dist.all_reduce(flat, async_op=True)
    return work


@functools.lru_cache(maxsize=256)
def _plan(layout: tuple[tuple[torch.device, torch.dtype, torch.Size, str], ...]) -> tuple[str, list[_Group]]:
    """Describe parameters to the other ranks, and sort them by what can travel in one tensor."""
    kinds: dict[str, str] = {}
    members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (device, dtype, shape, name) in enumerate(layout):
        called = f"{name}, " if name else ""
        place = "" if device.type == "cpu" else f" on {device.type}"
        kinds[f"parameter {i}"] = f"{called}{dtype}{list(shape)}{place}"
        members.setdefault((device, torch.promote_types(dtype, torch.float32)), []).append(i)
    groups = []
    for (device, dtype), places in members.items():
        groups.append(_Group(device, dtype, places, [math.prod(layout[i][2]) for i in places]))
    return fingerprint_of("average_gradients", kinds), groups


@functools.lru_cache(maxsize=256)
def _head(mine: str, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """The hash of terms as numbers, summed over so many ranks that have these."""
    digest = blake2b(mine.encode(), digest_size=_HEAD).digest()
    return torch.tensor([world_size * byte for byte in digest], dtype=dtype, device="cpu")
