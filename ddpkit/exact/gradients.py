"""Add up the gradients of micro-batches to the same bits on any number of ranks."""

from __future__ import annotations

import functools
import math
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..collectives.consistency import add_up, communication_device, raise_everywhere, reduce_in_place
from ..collectives.tree import name_dtype
from ..data.seeds import generators_kept, seed_cpu
from ..errors import DdpkitError
from ..gradient_exchange import Gradients, LocalPass, Modules, dtype_of_gradient
from ..job import current_job
from ..job.job import Peers
from ..torch_internals import untraced

_CALL = "exact_gradients()"


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
    with suppress(OSError):
        found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


class MicroBatches(list[Any]):
    """This rank's micro-batches of one optimiser step, as a loader from `make_micro_batch_loader` yields them.

    Attributes:
        step: Description of the step, the same on every rank.
        global_batch_size: Samples of the step, on all ranks together.
        seeds: Seed of each micro-batch's random numbers.
        most: Largest possible number of micro-batches on a rank.

    Example:
        >>> from ddpkit import make_micro_batch_loader
        >>> loader = make_micro_batch_loader(range(6), global_batch_size=4, micro_batch_size=2)
        >>> batch = next(iter(loader))
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
    """Sum a step's gradients over all ranks, with the same bits on any number of ranks. Collective.

    Loop over this rank's micro-batches in the block. The block seeds `random`, NumPy and torch for each, so that
    dropout does not depend on the rank. After the block each parameter's `.grad` is the sum of all ranks' gradients;
    gradients from before the block are dropped. The sum is exact, so its order has no effect: elements are first
    rounded, by at most 2^-40 of the step's largest element, and the sum is rounded at the end, to float64 and then to
    the gradient's dtype.

    Divide each loss, summed over its samples, by `batch.global_batch_size`. Ranks do not communicate in the block: DDP
    does not synchronise, and ddpkit's collectives raise `DdpkitError`. At its end they all-reduce the sums.

    A micro-batch's gradient has the same bits only if the same kernels compute it: the same version of torch, CPU model
    and number of threads, or the same accelerator model with `torch.use_deterministic_algorithms(True)`. Ranks with
    different kernels raise; so does a loader that loads a state saved with others.

    Args:
        batch: A batch of a loader from `make_micro_batch_loader`.
        *modules: All models trained in the step, wrapped or not, and single parameters, equal on all ranks.
        threads: Number of torch's CPU threads, the same in all runs that must give the same bits.

    Raises:
        MismatchError: If steps, parameters or kernels differ between ranks; on the other ranks, if one raises an error
            below.
        DdpkitError: If a forward changes a buffer, such as BatchNorm's statistics, whose value would depend on the
            rank's micro-batches.
        RuntimeError: If the block ends before it has looped over all micro-batches.
        TypeError: If `batch` comes from another loader, a model communicates in its forward (`fully_shard`,
            SyncBatchNorm, DDP with `static_graph=True`), or a parameter or gradient is sharded, sparse or complex.
        ValueError: If torch uses another number of threads, or may use nondeterministic algorithms; if no parameter
            requires a gradient.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.

    Example:
        >>> from ddpkit import make_micro_batch_loader
        >>> torch.set_num_threads(1)  # as `ddpkit.setup(num_threads=1)` does
        >>> sizes = {"global_batch_size": 4, "micro_batch_size": 2}
        >>> loader = make_micro_batch_loader(torch.ones(6, 2), **sizes)
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
    with local_pass, generators_kept():
        try:
            yield step.micro_batches()
        finally:
            step.gradients.clear()
    step.distribute(local_pass)


class _Step:
    """The gradients of one step, and their sums.

    Attributes:
        gradients: Of the parameters that are trained.
        device: Of the sums.
    """

    def __init__(self, batch: MicroBatches, modules: Modules) -> None:
        if not isinstance(batch, MicroBatches):
            kind = type(batch).__name__
            raise TypeError(f"{_CALL} takes a batch of a loader from make_micro_batch_loader(), got {kind}.")
        self._batch = batch
        self.gradients = Gradients(_CALL, modules)
        parameters = self.gradients.parameters
        if not parameters:
            raise ValueError(f"{_CALL} needs modules with trainable parameters.")
        if any(p.is_complex() for p in parameters):
            raise TypeError(f"{_CALL} takes real parameters: store torch.view_as_real(it) instead of a complex one.")
        self.device = parameters[0].device
        self._sizes = [p.numel() for p in parameters]
        self._counts = [0] * len(parameters)  # micro-batches here of which each has a gradient
        self._sum = ExactSum(sum(self._sizes), self.device)
        self._is_complete = False

    def micro_batches(self) -> Iterator[Any]:
        """Yield each micro-batch, with its random numbers, and add the gradients that follow."""
        for micro_batch, seed in zip(self._batch, self._batch.seeds, strict=True):
            self.gradients.clear()
            seed_cpu(seed)
            # torch.manual_seed() would do it, too, but serves accelerators that are not there, which takes longer
            if self.device.type != "cpu":
                torch.get_device_module(self.device.type).manual_seed_all(seed)
            yield micro_batch
            self._add()
        self._is_complete = True

    @untraced
    def _add(self) -> None:
        """Add the gradients that the parameters have, those of a micro-batch, to the sums."""
        self.gradients.read()
        pieces = []
        with torch.inference_mode(False), torch.no_grad():
            for i, gradient in enumerate(self.gradients.values):
                if gradient is None:
                    pieces.append(torch.zeros(self._sizes[i], device=self.device))
                    continue
                self._counts[i] += 1
                pieces.append(gradient.reshape(-1).to(self.device))  # of a model on several devices
            self._sum.add(torch.cat(pieces))

    @untraced
    def distribute(self, local_pass: LocalPass) -> None:
        """Give the sums over all ranks to the parameters as gradients, if the block did what it should. Collective."""
        peers = current_job.data_parallel()
        with raise_everywhere(_CALL, peers):
            if not self._is_complete:
                raise RuntimeError(f"The block of {_CALL} ended before it had looped over all micro-batches.")
            changed = local_pass.changed_buffer()
            if changed:
                raise DdpkitError(
                    f"A forward in the block of {_CALL} has changed {changed}, whose value would depend on the rank's "
                    "micro-batches. Use a layer without running statistics, such as GroupNorm, or call eval() on this "
                    "one."
                )
        with torch.inference_mode(False), torch.no_grad():
            counts = self._sum.over_ranks(self._fingerprint(), self._counts, peers)
            sums = torch.split(self._sum.rounded(), self._sizes)
            for p, count, value in zip(self.gradients.parameters, counts, sums, strict=True):
                if count:
                    p.grad = torch.empty_like(p, dtype=dtype_of_gradient(p)).copy_(value.view(p.shape))

    def _fingerprint(self) -> str:
        others = []
        for name, p in zip(self.gradients.names, self.gradients.parameters, strict=True):
            dtype = dtype_of_gradient(p)
            if dtype != p.dtype:
                others.append(f"{name} {name_dtype(dtype)}")
        dtypes = ", ".join(others) or "those of the parameters"
        step = f"{self._batch.step}, at most {self._batch.most} micro-batches on a rank"
        settings = ("step", step), ("kernels", describe_kernels(self.device)), ("dtypes of gradients", dtypes)
        return self.gradients.fingerprint(_CALL, settings)


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
            f"{_CALL} expects threads={threads}, but torch uses {found}, which gives gradients other bits: "
            f"call ddpkit.setup(num_threads={threads}), or pass threads={found} in every run."
        )


# Add vectors exactly: the sum is the same to the last bit in any order, and in any division among the ranks.

_WIDTH = 40  # bits of a digit
_OFFSET = -28  # usual gradients, of which the largest is below 2**11, keep far more than 40 bits
MOST = 1 << 14  # vectors: each digit is at most 2**39 units, and float64 counts to 2**53
PLACES = range(-4, 23)  # from below the least number of float32 to 2**891
_LOWEST = -2  # place whose unit has a reciprocal in float32
_CHUNK = 1 << 18  # elements that are split at a time, and stay in the cache meanwhile


class ExactSum:
    """The sum of vectors whose elements are rounded to multiples of one unit.

    Each element is split into two digits of 40 bits, at places that are fixed: the upper digit counts units of
    2**(40 * place - 28), the lower one units of 2**(40 * place - 68). Sums of digits are exact. The place follows the
    largest element of all vectors, which is 2**39 to 2**79 lower units. When the place rises, the upper digits become
    the lower ones, and the sum is what it would be if it had been at that place before.

    Args:
        size: Elements of a vector.
        device: Where they are.

    Attributes:
        digits: The sums of the upper and of the lower digits, shape (2, elements).
        place: Of the upper digits.

    References:
        James Demmel and Hong Diep Nguyen, Parallel reproducible summation, IEEE Transactions on Computers 64 (7), 2015.
        The digits are its bins, of which it keeps two.

    Example:
        >>> total = ExactSum(1, torch.device("cpu"))
        >>> for number in [1000.0, 2.0**-60, -1000.0]:
        ...     total.add(torch.tensor([number]))
        >>> total.rounded().item() == 2.0**-60
        True
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.digits = torch.zeros(2, size, dtype=torch.float64, device=device)
        self.place = PLACES[0]

    @torch.no_grad()
    def add(self, vector: Tensor) -> None:
        """Add a vector of any real floating dtype.

        An element that is not finite, or beyond 2**891, makes its sum NaN.
        """
        if not len(vector):
            return
        vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
        largest = _largest(vector)
        usable = None
        if not largest < _LIMIT:
            usable = vector.abs() < _LIMIT
            vector = torch.where(usable, vector, 0)
            largest = _largest(vector)
        if largest:
            _, exponent = math.frexp(largest)
            self.raise_to((exponent - _OFFSET) // _WIDTH)
        upper, lower = self.digits
        for start in range(0, len(vector), _CHUNK):
            piece = slice(start, start + _CHUNK)
            self._add_digits(vector[piece], upper[piece], lower[piece])
        if usable is not None:
            upper.masked_fill_(~usable, math.nan)

    def _add_digits(self, vector: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Round to a multiple of the upper unit, and the rest to one of the lower unit; halves to even ones.

        Nothing else is rounded: units are powers of two, and what is left of an element has no more bits than it.
        """
        rest = vector * (1 / _unit(max(self.place, _LOWEST)))
        if self.place < _LOWEST:
            rest.mul_(_unit(_LOWEST) / _unit(self.place))
        digit = rest.round()
        upper.add_(digit)
        lower.add_(rest.sub_(digit).mul_(2.0**_WIDTH).round_())

    def raise_to(self, place: int) -> None:
        """Let the digits be those at a place, if it is higher: round the sum as if it had been there from the start."""
        if place <= self.place:
            return
        upper, lower = self.digits
        if place > self.place + 1:
            upper.sub_(upper)  # NaN stays
        lower.copy_(upper)
        upper.sub_(upper)
        self.place = place

    def over_ranks(self, fingerprint: str, counts: list[int], peers: Peers | None) -> NDArray[np.float64]:
        """Add up the sums of all ranks, on each, and some small numbers, which are returned. Collective.

        Raises:
            MismatchError: If the ranks have other fingerprints.
        """
        marks = [float(place == self.place) for place in PLACES]
        sums = add_up(fingerprint, [*marks, *counts], peers)
        self.raise_to(PLACES[np.flatnonzero(sums[: len(PLACES)])[-1]])
        digits = self.digits.to(communication_device(self.digits.device, peers))
        self.digits = reduce_in_place(digits, peers=peers).to(self.digits.device)
        return sums[len(PLACES) :]

    def rounded(self) -> Tensor:
        """Return the sum, rounded once to float64; it takes the place of the upper digits."""
        upper, lower = self.digits
        total: Tensor = upper.mul_(2.0**_WIDTH).add_(lower).mul_(_unit(self.place - 1))
        return total.masked_fill_(total.isnan(), math.nan)  # of which there are several forms


def _largest(vector: Tensor) -> float:
    """Return the largest absolute value; NaN if an element is NaN."""
    least, greatest = torch.aminmax(vector)
    return max(-least.item(), greatest.item())


def _unit(place: int) -> float:
    """Return the unit of the upper digits at a place."""
    return math.ldexp(1.0, _WIDTH * place + _OFFSET)


_LIMIT = _unit(PLACES[-1] + 1) / 2  # what is half a unit of the place above is too large for one
