"""Observe which random numbers are drawn in training, and by which lines; find those that are the same or repeat."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from ..recorder import Function, before, current, guarded, replace
from .facts import Facts, Findings, agree, by_fields, first_of, listed
from .observed import Draw, Draws, Fetch, Seeded, Step, tell
from .source import Place, Stack, is_own, is_shared_out, own_frames, place_of, stack

GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
_MANY = 8  # draws that are kept for a step
_CHILDREN = 32  # of an object that are searched for generators
_LINES = 8  # of drawing that are kept
_GIVEN = "a generator"  # that the script hands to a function
_SEEDING = (
    (torch, "manual_seed", "torch"), (torch, "set_rng_state", "torch"),
    (np.random, "seed", "numpy"), (np.random, "set_state", "numpy"), (np.random, "shuffle", "shuffle"),
    (np.random, "permutation", "shuffle"),
    (random, "seed", "random"), (random, "setstate", "random"), (random, "shuffle", "shuffle"),
)  # fmt: skip


class _State(NamedTuple):
    """The state of a generator: a hash, and how many words of a block it has used, 0 if that is not known."""

    hash: int
    position: int = 0


def _states(others: Sequence[Any] = ()) -> dict[str, _State]:
    """Hash the states of the global generators, and of others."""
    found = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "random": random._inst}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch on the GPU"] = torch.cuda.default_generators[torch.cuda.current_device()]
    found |= {f"{type(other).__name__} {number}": other for number, other in enumerate(others)}
    return {name: _state_of(generator) for name, generator in found.items()}


def _state_of(generator: Any) -> _State:
    if isinstance(generator, random.Random):
        return _State(hash(generator.getstate()[1]))
    if isinstance(generator, np.random.Generator):
        return _State(zlib.crc32(repr(generator.bit_generator.state).encode()))
    if isinstance(generator, np.random.RandomState):
        _, keys, position, *_ = generator.get_state(legacy=True)
        position = int(position)
        return _State(zlib.crc32(np.asarray(keys).data, position), position)
    state = generator.get_state().numpy()
    hashed = zlib.crc32(state.data)
    if generator.device.type != "cpu":
        return _State(hashed)
    left = int(state[8:12].view(np.int32)[0])
    return _State(hashed, 624 - left)


def _generators_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the generators in the fields of an object."""
    if type(value) in GENERATORS:
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        value = list(vars(value).values())
    if depth and isinstance(value, list | tuple):
        for child in value[:_CHILDREN]:
            yield from _generators_in(child, depth - 1)


class Tracer:
    """Finds the generators that are used between `begin` and `end`, and the script's lines that draw from them.

    Args:
        value: Has generators in its fields, besides the global ones.

    Attributes:
        found: What was drawn.
        is_looking: Whether it has begun and not ended.
    """

    def __init__(self, value: Any = None) -> None:
        self.found = Draws([], [])
        self.is_looking = False
        self._others = list(_generators_in(value))
        self._begun: dict[str, _State] = {}
        self._state: dict[str, _State] = {}
        self._place: Place | None = None
        self._is_tracing = False

    def begin(self, traces: bool = True) -> None:
        """Look from here on; compare states line by line, unless somebody else traces."""
        self.is_looking = True
        self._begun = self._state = _states(self._others)
        if not traces or sys.gettrace() is not None:
            return
        self._is_tracing = True
        for frame in own_frames():
            frame.f_trace = self._look
            self._place = self._place or place_of(frame)
        sys.settrace(self._look)

    def end(self) -> None:
        """Look no more."""
        if self._is_tracing:
            sys.settrace(None)
            self._is_tracing = False
            self._compare()
            for frame in own_frames():
                frame.f_trace = None
        now = _states(self._others) if self.is_looking else {}
        for kind, state in now.items():
            begun = self._begun.get(kind, state)
            if begun.hash != state.hash:
                words = (state.position - begun.position) % 624
                self.add(Draw(kind, begun.hash, words))
        self.is_looking = False

    def add(self, draw: Draw) -> None:
        """Note what was drawn."""
        if len(self.found.drawn) < _MANY:
            self.found.drawn.append(draw)

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_own(frame.f_code.co_filename) or get_eval_frame_callback() is not None:  # torch compiles
            return None
        self._compare()
        self._place = place_of(frame)
        return self._look

    def _compare(self) -> None:
        """Blame the line before for a state that has changed."""
        now = _states(self._others)
        lines = self.found.lines
        is_new = self._place not in lines and len(lines) < _LINES
        if now != self._state and self._place and is_new:
            lines.append(self._place)
        self._state = now


class Windows(Tracer):
    """Watches the random numbers that a training step draws outside of its loader."""

    def install(self) -> None:
        """Note where generators are seeded, and where lists are shuffled."""
        for module, name, kind in _SEEDING:
            before(module, name, self._note(kind))
        for name in ("randn", "rand", "normal", "bernoulli"):
            replace(torch, name, self._own)

    def _own(self, original: Function) -> Function:
        note = guarded(self._note_draw)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is None:
                return original(*args, **kwargs)
            state = _state_of(kwargs["generator"]).hash
            result = original(*args, **kwargs)
            note(state, result)
            return result

        return call

    def _note_draw(self, state: int, result: torch.Tensor) -> None:
        """Note what is drawn from a generator that was given, in a step."""
        if self.is_looking and len(self.found.drawn) < _MANY:
            self.found.lines.extend(stack(1))
            self.add(Draw(_GIVEN, state, result.numel()))

    def _note(self, kind: str) -> Function:
        def look() -> None:
            if where := stack():
                tell(Seeded(kind, where, current().step))

        return look

    def open(self) -> None:
        """Begin to watch, after a batch was fetched or a step has ended."""
        self.end()
        self.begin(traces=current().step == 1)  # the lines are the same ones in other steps

    def begin_step(self) -> None:
        """Forget what belongs to the step that has ended."""
        self.end()
        self.found.drawn.clear()
        self.open()


# Find random numbers that are the same on every rank, or come again.

_COMPARED = 3  # steps that must be equal on all ranks, if there are as many
_FEW = 8  # words: a choice that all ranks are to make alike takes as many


def seeding(facts: Facts, *kinds: str) -> Stack:
    """List where the script has last seeded each of some generators, before it trains if it does."""
    seeded = facts.first(Seeded)
    early = [seen for seen in seeded if not seen.step]
    lines = {seen.generator: seen.where for seen in early or seeded}
    return listed(*(lines.get(kind) for kind in kinds))


def _used(draws: Draws, least: int = 0) -> set[tuple[str, int]]:
    """Return the generators from which so many words were drawn, and their states."""
    return {(draw.generator, draw.state) for draw in draws.drawn if draw.words >= least}


def _equal_states(by_rank: Sequence[Draws], least: int = 0) -> list[str]:
    """Name the generators from whose equal states all ranks draw so many words."""
    common = set.intersection(*(_used(draws, least) for draws in by_rank))
    return sorted(kind for kind, _ in common)


def _same_draws(facts: Facts) -> Findings:
    """Find datasets that draw the same numbers on all ranks for other samples."""
    for row in sorted(facts.rows(Fetch, "worker", "number", "step"), key=_order_of_fetch):
        first = row[0]
        kinds = _equal_states([fetch.random for fetch in row])
        if kinds and not agree(row, "content"):
            who = "the loaders" if first.worker is None else f"workers {first.worker}"
            evidence = f"{who} of {facts.who} draw from equal states of {', '.join(kinds)}"
            yield facts.finding("same-random-numbers", evidence, seeding(facts, *kinds), first.random.lines)


def _order_of_fetch(row: Sequence[Fetch]) -> str:
    first = row[0]
    return str((first.worker, first.number, first.step))


def _same_noise(facts: Facts) -> Findings:
    """Find noise and dropout that are the same on all ranks at each step."""
    rows = [[step.random for step in steps] for steps in facts.steps]
    rows = [row for row in rows if all(draws.drawn for draws in row)]
    if len(rows) < 2:
        return
    compared = rows[:_COMPARED]
    equal = [set(_equal_states(row, _FEW)) for row in compared]
    kinds = sorted(set.intersection(*equal))
    lines = max((row[0].lines for row in rows), key=len)
    own_lines = [line for line in lines if not is_shared_out(line)]
    if kinds and (own_lines or not lines):
        evidence = f"at each of {len(compared)} steps {facts.who} draw from equal states of {', '.join(kinds)}"
        yield facts.finding("same-random-numbers", evidence, seeding(facts, *kinds), own_lines)


def _repeated_draws(facts: Facts) -> Findings:
    """Find workers that draw in each epoch what they have drawn in the one before."""
    fetches = [fetch for fetch in facts.first(Fetch) if fetch.loader in facts.training]
    for same in by_fields(fetches, "loader", "worker", "number").values():
        first = same[0]
        if first.worker is None or len(same) < 2:
            continue
        kinds = _equal_states([fetch.random for fetch in same])
        if kinds:
            evidence = f"in {len(same)} epochs workers {first.worker} draw from equal states of {', '.join(kinds)}"
            yield facts.finding("random-numbers-repeat", evidence, seeding(facts, *kinds), first.random.lines)


def _repeated_noise(facts: Facts) -> Findings:
    """Find steps that draw what an earlier one has drawn; each does, if it is from a generator of the script."""
    draws = [step.random for step in facts.first(Step) if step.optimizer == 0]
    used = [_used(each, _FEW) for each in draws]
    always = set.intersection(*used) if used else set()
    seen: set[tuple[str, int]] = set()
    for number, states in enumerate(used):
        repeated = states & seen
        again = {kind for kind, state in repeated if kind != _GIVEN or (kind, state) in always}
        if again and (number > 1 or _GIVEN not in again):
            evidence = f"step {number + 1} draws from the same states of {', '.join(sorted(again))} as an earlier one"
            seeded = [each for each in facts.first(Seeded) if each.step and each.generator in again]
            late = seeded[0].where if seeded else []
            yield facts.finding("random-numbers-repeat", evidence, late, draws[number].lines)
        seen |= states


ALONE = (first_of(_repeated_draws, _repeated_noise),)
RULES = (first_of(_same_draws, _same_noise),)
