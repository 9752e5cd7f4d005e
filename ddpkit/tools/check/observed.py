"""What a rank tells of the script: each class is a kind of record, which travels as JSON to the process that checks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from ..recorder import Record, current
from .source import Place, Stack


def tell(seen: Any) -> None:
    """Send what was seen, an instance of one of the classes below."""
    current().tell(_name_of(type(seen)), **seen._asdict())


def read(record: Record) -> Any:
    """Return what a rank has seen, None for a record of another kind."""
    kind = _kinds().get(record["kind"])
    return None if kind is None else _convert(kind, record)


def _name_of(kind: type) -> str:
    return kind.__name__.lower()


@cache
def _kinds() -> dict[str, type]:
    return {_name_of(kind): kind for kind in globals().values() if hasattr(kind, "_fields")}


_types_of_fields = cache(get_type_hints)


def _convert(kind: Any, value: Any) -> Any:
    """Give a value of JSON the type of a field: named tuples have become lists, and records are dicts."""
    if hasattr(kind, "_fields"):
        types = _types_of_fields(kind)
        fields = value if isinstance(value, dict) else dict(zip(types, value, strict=True))
        return kind(**{name: _convert(types[name], fields[name]) for name in types if name in fields})
    inner = [each for each in get_args(kind) if each is not NoneType]
    if value is None or not inner or inner[-1] in (int, str, float):
        return value
    if isinstance(kind, UnionType):
        return _convert(inner[0], value)
    if isinstance(value, dict):
        return {key: _convert(inner[-1], child) for key, child in value.items()}
    return [_convert(inner[-1], child) for child in value]


# The process, its collectives, and its files.


class End(NamedTuple):
    """A rank that makes no more steps: the script has ended, unless there is a reason.

    Attributes:
        code: The exit code.
        error: The exception that the script has raised, "" if none.
        where: The lines that led to it.
        reason: "steps" if the rank has made enough, "spawns" or "forks" if it starts ranks itself.
        died: How the process was lost, "" if it was not.
    """

    code: int = 0
    error: str = ""
    where: Sequence[Place] = ()
    reason: str = ""
    died: str = ""

    @property
    def has_failed(self) -> bool:
        """Return whether this was no orderly end."""
        return bool(self.error or self.code or self.died)

    @property
    def starts_ranks(self) -> bool:
        """Return whether the script starts processes itself."""
        return self.reason in ("spawns", "forks")


class Failure(NamedTuple):
    """An observer that has failed, with the end of its traceback."""

    name: str
    error: str


class Join(NamedTuple):
    """The script has entered torch's `Join`."""


class Sent(NamedTuple):
    """A tensor goes from one rank to another; told once a step."""

    step: int


class Collective(NamedTuple):
    """A collective that a rank enters.

    Attributes:
        op: The name of the function.
        group: The name of its process group, "0" for that of all ranks.
        where: The lines that call it.
        reduction: "SUM" for example, "" if it reduces nothing.
        dtype: That of its tensor, "" if it has none.
        shape: That of its tensor.
        values: The elements of a small tensor.
        trained: The optimizer, -1 for buffers, and the name of the parameter that the tensor is.
        samples: How many samples networks were given without gradients since the last step.
        divides: Whether the function that calls it divides by the number of ranks.
        averages: Whether there was a backward pass since the last step.
        position: How many of the group came before, on this rank.
    """

    op: str
    group: str
    where: Stack
    reduction: str = ""
    dtype: str = ""
    shape: Sequence[int] = ()
    values: Sequence[float] = ()
    trained: tuple[int, str] | None = None
    samples: int = 0
    divides: bool = False
    averages: bool = False
    position: int = 0


class File(NamedTuple):
    """A file that `torch.save` writes, and hashes of the small tensors in it."""

    path: str
    where: Stack
    hashes: list[int]


class Value(NamedTuple):
    """A small tensor that a variable holds at the first step."""

    name: str
    hash: int


# Loaders and random numbers.


class Trains(NamedTuple):
    """A loader, by its key, feeds the training."""

    loader: str


class Epoch(NamedTuple):
    """A loader begins an epoch.

    Attributes:
        loader: Its key.
        number: Of the epoch.
        made: The lines that made the loader.
        where: The lines that ask for batches.
        sampler: The class of the sampler that decides the order.
        sampler_made: The lines that made it.
        lines: Where the script defines which samples come, [] if it does not.
        split: The lines that made the subset that it reads.
        iterable: Whether it reads a stream.
        has_epoch: Whether the sampler has `set_epoch`.
        bounded: Whether the loop ends after a number of rounds of its own.
        rounds: How often the loops around it run, None if that is not known.
        replaces: Whether samples are drawn with replacement.
        batch_size: Samples of a batch.
        drop_last: Whether an incomplete last batch is left out.
        workers: The number of worker processes.
        batches: How many there will be, None if that is not known.
        plan: The indices of the samples, in the dataset that holds them; None if these are no integers.
        total: The number of samples of the loader's dataset.
        base: The identity of the dataset that holds the samples.
        expected: The indices that a subset has, None if it is none.
        dataset: A digest of what the dataset holds.
        contents: The same, without regard to the order.
    """

    loader: str
    number: int
    made: Stack
    where: Stack
    sampler: str
    sampler_made: Stack
    lines: Stack
    split: Stack
    iterable: bool
    has_epoch: bool
    bounded: bool
    rounds: int | None
    replaces: bool
    batch_size: int
    drop_last: bool
    workers: int
    batches: int | None = None
    plan: list[int] | None = None
    total: int = 0
    base: int = 0
    expected: list[int] | None = None
    dataset: str = ""
    contents: str = ""


class EpochSet(NamedTuple):
    """The script sets the epoch of a sampler."""

    sampler: str
    epoch: str
    where: Stack


class EpochEnd(NamedTuple):
    """A loader ends an epoch after some batches, or is cut; `shares` says how its shares are unequal."""

    loader: str
    number: int
    batches: int
    cut: bool
    shares: str


class Batch(NamedTuple):
    """A hash of a batch of an epoch."""

    loader: str
    number: int
    content: int


class Draw(NamedTuple):
    """Random numbers that were drawn: the generator, a hash of its state before, and how many words."""

    generator: str
    state: int
    words: int


class Draws(NamedTuple):
    """Random numbers that were drawn, and the lines that drew them."""

    drawn: list[Draw]
    lines: Stack


class Fetch(NamedTuple):
    """A batch that a process, perhaps a worker, fetches as its `number`th, and what is drawn for it."""

    worker: int | None
    number: int
    content: int
    loader: str
    epoch: int
    random: Draws
    step: int


class Seeded(NamedTuple):
    """A generator is seeded, or a list shuffled."""

    generator: str
    where: Stack
    step: int


# Training steps.


class Loaded(NamedTuple):
    """A module loads a state."""

    where: Stack


class Mode(NamedTuple):
    """A network is called with a batch of a loader, in a mode."""

    loader: str
    mode: str
    where: Stack


class Plateau(NamedTuple):
    """The number by which a schedule finds if the training has come to a plateau."""

    value: float
    where: Stack


class Clip(NamedTuple):
    """Gradients are clipped; mistakes are evidence by the rule."""

    where: Stack
    mistakes: dict[str, str]


class Mistake(NamedTuple):
    """A mistake that one call shows."""

    rule: str
    evidence: str
    where: Stack


class Parameter(NamedTuple):
    """A parameter of an optimizer.

    Attributes:
        shape: Its shape, None if it is spread over ranks.
        made: Where it was given to a module.
        ddp: Where the DDP was made that it is in, None if it is in none.
        managed: Whether that averages its gradient.
    """

    shape: list[int] | None
    made: Stack
    ddp: Stack | None
    managed: bool


class Optimized(NamedTuple):
    """An optimizer, by its number, and its parameters, by their names."""

    optimizer: int
    made: Stack
    parameters: dict[str, Parameter]


class Position(NamedTuple):
    """The batch that a loader has yielded last."""

    loader: str
    epoch: int
    batch: int


class Gradient(NamedTuple):
    """A gradient: a hash and some elements."""

    hash: int
    sample: list[float]


class Averaging(NamedTuple):
    """A DDP: what could keep it from averaging the gradients of a step; `skips` if some may have none."""

    made: Stack
    bypassed: Stack
    taken_out: Stack
    unsynced: Stack
    skips: bool


class Fixed(NamedTuple):
    """A network that is used and not trained: hashes of its tensors."""

    hashes: list[int]
    made: Stack


class Buffers(NamedTuple):
    """Running statistics of a network, and whether DDP sends them out."""

    hashes: dict[str, int]
    sent: bool
    ddp: Stack
    trained: bool


class Call(NamedTuple):
    """A call of a network with gradients, and a hash of its input."""

    where: Stack
    input: int


class Loss(NamedTuple):
    """A loss.

    Attributes:
        where: The lines that compute it.
        samples: How many samples or tokens it is a mean of.
        total: The weight with which it enters the gradients.
        summed: Whether it is no mean.
        masked: Whether it may leave out some samples or tokens.
        mistakes: Evidence, by the rule.
        backward: The number of the backward pass since the last step, -1 before one.
    """

    where: Stack
    samples: int
    total: float
    summed: bool
    masked: bool
    mistakes: dict[str, str]
    backward: int


class Sum(NamedTuple):
    """A sum of tensors over ranks; `ratio` is that of its size to the gradients' at the next step."""

    where: Stack
    numel: int
    square: float
    divides: bool
    ratio: float = 0.0


class Schedule(NamedTuple):
    """A schedule of learning rates: its steps so far, the length of a cosine, and the steps that it is made for."""

    made: Stack
    steps: int
    length: int | None
    total: int


class Event(NamedTuple):
    """A "backward" pass, or gradients that were "zeroed", and whether there were gradients before."""

    kind: str
    where: Stack
    had_gradients: bool


class Evaluated(NamedTuple):
    """A network that only evaluations use, and that looks like one that is trained."""

    network: int
    hashes: list[int]
    loader: str
    where: Stack


class Step(NamedTuple):
    """A step of an optimizer, as it begins.

    Attributes:
        optimizer: The number of the optimizer.
        number: Of the step.
        where: The lines that call it.
        made: The lines that made the optimizer.
        class_name: That of the optimizer.
        joined: Whether there is a process group.
        position: Of each loader that feeds the training.
        parameters: Hashes of those that are not spread over ranks.
        gradients: Theirs, of those that have one.
        without: The parameters without a gradient, and where a collective got what they compute.
        outside: Parameters with a gradient that are in no optimizer, and where they were made.
        state: Hashes of the optimizer's state.
        loaded: Where an optimizer's state was loaded last.
        rates: The learning rates.
        schedules: Those of the script.
        wrappers: The instances of DDP.
        others: Networks that are used and not trained, at the first step.
        buffers: Running statistics, by network.
        evaluated: Networks that were evaluated since the last step, and resemble one that is trained.
        calls: Of networks since the last step.
        modes: In which the optimizer's networks were called.
        switched: Where `train` and `eval` were called last.
        losses: Those that were differentiated.
        backward: The lines that called `backward` last.
        divides: Whether the script divides by the number of ranks, there or here.
        summed: The gradients as they were added up over ranks, None if they were not.
        events: What happened to the gradients since the last step.
        scale: By which the loss was multiplied.
        mistakes: Evidence, by the rule.
        random: What was drawn since the last step.
    """

    optimizer: int
    number: int
    where: Stack
    made: Stack
    class_name: str
    joined: bool
    position: list[Position]
    parameters: dict[str, int]
    gradients: dict[str, Gradient]
    without: dict[str, Stack]
    outside: dict[str, Stack]
    state: dict[str, int]
    loaded: Stack
    rates: list[float]
    schedules: list[Schedule]
    wrappers: list[Averaging]
    others: dict[str, Fixed]
    buffers: dict[str, Buffers]
    evaluated: list[Evaluated]
    calls: list[Call]
    modes: list[str]
    switched: dict[str, Stack]
    losses: list[Loss]
    backward: Stack
    divides: bool
    summed: Sum | None
    events: list[Event]
    scale: float
    mistakes: dict[str, str]
    random: Draws
