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
    """A rank that makes no more steps: the script has ended, unless there is a reason."""

    code: int = 0  # the exit code
    error: str = ""  # the exception that the script has raised, "" if none
    where: Sequence[Place] = ()  # the lines that led to it
    reason: str = ""  # "steps" if the rank has made enough, "forks" if a process that it has forked is a rank
    died: str = ""  # how the process was lost, "" if it was not

    @property
    def has_failed(self) -> bool:
        """Return whether this was no orderly end."""
        return bool(self.error or self.code or self.died)


class Cuda(NamedTuple):
    """The script uses CUDA, for which the CPU stands; told once."""


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
    """A collective that a rank enters."""

    op: str  # the name of the function
    group: str  # the name of its process group, "0" for that of all ranks
    where: Stack  # the lines that call it
    reduction: str = ""  # "SUM" for example, "" if it reduces nothing
    dtype: str = ""  # that of its tensor, "" if it has none
    shape: Sequence[int] = ()  # that of its tensor
    values: Sequence[float] = ()  # the elements of a small tensor
    trained: tuple[int, str] | None = None  # the optimizer, -1 for buffers, and the parameter that its tensor is
    samples: int = 0  # how many samples networks were given without gradients since the last step
    divides: bool = False  # whether the function that calls it divides by the number of ranks
    averages: bool = False  # whether there was a backward pass since the last step
    position: int = 0  # how many of the group came before, on this rank


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
    """A loader begins an epoch."""

    loader: str  # its key
    number: int  # of the epoch
    made: Stack  # the lines that made the loader
    where: Stack  # the lines that ask for batches
    sampler: str  # the class of the sampler that decides the order
    sampler_made: Stack  # the lines that made it
    lines: Stack  # where the script defines which samples come, [] if it does not
    split: Stack  # the lines that made the subset that it reads
    iterable: bool  # whether it reads a stream
    has_epoch: bool  # whether the sampler has `set_epoch`
    bounded: bool  # whether the loop ends after a number of rounds of its own
    rounds: int | None  # how often the loops around it run, None if that is not known
    replaces: bool  # whether samples are drawn with replacement
    batch_size: int  # samples of a batch
    drop_last: bool  # whether an incomplete last batch is left out
    workers: int  # the number of worker processes
    batches: int | None = None  # how many there will be, None if that is not known
    plan: list[int] | None = None  # the indices in the base dataset, None if these are no integers
    total: int = 0  # the number of samples of the loader's dataset
    base: int = 0  # the identity of the dataset that holds the samples
    expected: list[int] | None = None  # the indices that a subset has, None if it is none
    dataset: str = ""  # a digest of what the dataset holds
    contents: str = ""  # the same, without regard to the order


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
    step: int  # how many optimizer steps came before


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
    """A parameter of an optimizer."""

    shape: list[int] | None  # its shape, None if it is spread over ranks
    made: Stack  # where it was given to a module
    ddp: Stack | None  # where the DDP was made that it is in, None if it is in none
    managed: bool  # whether that averages its gradient


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
    """A loss."""

    where: Stack  # the lines that compute it
    samples: int  # how many samples or tokens it is a mean of
    total: float  # the weight with which it enters the gradients
    summed: bool  # whether it is no mean
    masked: bool  # whether it may leave out some samples or tokens
    mistakes: dict[str, str]  # evidence, by the rule
    backward: int  # the number of the backward pass since the last step, -1 before one


class Sum(NamedTuple):
    """A sum of tensors over ranks; `ratio` is that of its size to the gradients' at the next step."""

    where: Stack
    numel: int
    square: float
    divides: bool
    ratio: float = 0.0


class Schedule(NamedTuple):
    """A schedule of learning rates: its steps so far, a cosine's length, for how many it is made, if any is called."""

    made: Stack
    steps: int
    length: int | None
    total: int
    stepped: bool


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
    """A step of an optimizer, as it begins."""

    optimizer: int  # the number of the optimizer
    number: int  # of the step
    where: Stack  # the lines that call it
    made: Stack  # the lines that made the optimizer
    class_name: str  # that of the optimizer
    joined: bool  # whether there is a process group
    position: list[Position]  # of each loader that feeds the training
    parameters: dict[str, int]  # hashes of those that are not spread over ranks
    gradients: dict[str, Gradient]  # theirs, of those that have one
    without: dict[str, Stack]  # the parameters without a gradient, and where a collective got what they compute
    outside: dict[str, Stack]  # parameters with a gradient that are in no optimizer, and where they were made
    state: dict[str, int]  # hashes of the optimizer's state
    loaded: Stack  # where an optimizer's state was loaded last
    rates: list[float]  # the learning rates
    schedules: list[Schedule]  # those of the script
    wrappers: list[Averaging]  # the instances of DDP
    others: dict[str, Fixed]  # networks that are used and not trained, at the first step
    buffers: dict[str, Buffers]  # running statistics, by network
    evaluated: list[Evaluated]  # networks that were evaluated since the last step, and resemble one that is trained
    calls: list[Call]  # of networks since the last step
    modes: list[str]  # in which the optimizer's networks were called
    switched: dict[str, Stack]  # where `train` and `eval` were called last
    losses: list[Loss]  # those that were differentiated
    backward: Stack  # the lines that called `backward` last
    divides: bool  # whether the script divides by the number of ranks, there or here
    summed: Sum | None  # the gradients as they were added up over ranks, None if they were not
    events: list[Event]  # what happened to the gradients since the last step
    scale: float  # by which the loss was multiplied
    mistakes: dict[str, str]  # evidence, by the rule
    random: Draws  # what was drawn since the last step
