"""The pace of a rank: how long the phases of its last steps took; and which rank makes the others wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from .clock import STEPS, Phase, StepClock

BLOCKS = 8  # that are compared: of 40 steps
# as shares of the work of the others' steps
_SHARE = 0.08  # by which a slow rank works longer in one phase, or by which the others wait for it
_HELD = 0.03  # by which they wait for it in any case
_LEAST = 0.0005  # seconds per step by which they wait for it in any case
_OFTEN = 0.75  # share of the blocks in which it is so, at least by half


@dataclass(frozen=True)
class Pace:
    """How long the phases of a rank's last steps took.

    Attributes:
        rank: The rank.
        last: Number of the last block of steps.
        seconds: By block and phase.
    """

    rank: int
    last: int
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, rank: int, clock: StepClock, last: int) -> Pace | None:
        """Read the clock of a rank; None where it does not have the blocks up to this one."""
        seconds = clock.window(last, BLOCKS)
        if seconds is None:
            return None
        return cls(rank, last, tuple(tuple(round(each, 6) for each in block) for block in seconds))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Pace | None:
        """Make it of fields that have the form `PACE`; None if they are none of a pace."""
        seconds = tuple(map(tuple, fields["seconds"]))
        if len(seconds) != BLOCKS:
            return None
        for block in seconds:
            if len(block) != len(Phase) or not all(0 <= each < math.inf for each in block):
                return None
        return cls(fields["rank"], fields["last"], seconds)

    def per_step(self) -> dict[str, float]:
        """Return the seconds of each phase in a step, the median of the blocks."""
        medians = np.median(np.array(self.seconds), axis=0) / STEPS
        return {phase.label: float(medians[phase]) for phase in Phase}


PACE = get_type_hints(Pace)  # the form of its JSON


@dataclass(frozen=True)
class SlowRank:
    """A rank for which the others wait.

    Attributes:
        rank: The rank.
        share: By how much it makes a step longer, as a share of what the step would take without.
        phase: In which of its phases it takes longest, compared with the others.
        seconds: That it takes there, per step.
        others: Seconds that the others take there, per step, their median.

    Example:
        >>> print(SlowRank(3, share=0.25, phase="data", seconds=0.06, others=0.01))
        makes every step 25 % longer: its data take 60.0 ms, the others' 10.0 ms
    """

    rank: int
    share: float
    phase: str
    seconds: float
    others: float

    def __str__(self) -> str:
        phase = {"data": "its data take", "other": "what else it does takes"}.get(self.phase, f"its {self.phase} takes")
        mine, theirs = milliseconds(self.seconds), milliseconds(self.others)
        return f"makes every step {100 * self.share:.0f} % longer: {phase} {mine} ms, the others' {theirs} ms"


def milliseconds(seconds: float) -> str:
    """Write a time in milliseconds, without their unit."""
    text = f"{1000 * seconds:.1f}"
    return text if len(text) < 5 else f"{1000 * seconds:.0f}"


def find_slow_rank(paces: Sequence[Pace]) -> SlowRank | None:
    """Find the rank for which the others wait, in the same steps of all of them; None if there is none.

    Ranks that exchange gradients leave that exchange together. So the rank that waits least there is the last to come,
    and the others' wait, beyond its own, is what it costs them. No two clocks are compared.

    Args:
        paces: Of all ranks, for the same blocks.
    """
    if len(paces) < 2:
        return None
    seconds = np.array([pace.seconds for pace in paces])  # by rank, block and phase
    waiting = seconds[:, :, Phase.WAITING]
    own = np.delete(seconds, Phase.WAITING, axis=2)
    slow = int(np.median(waiting, axis=1).argmin())
    usual = _of_others(own, slow)
    work = max(float(np.median(usual.sum(axis=1))), 1e-9)
    held = _of_others(waiting, slow) - waiting[slow]
    longer = own[slow] - usual
    if np.median(held) < max(_HELD * work, _LEAST * STEPS) or not _is_clear(np.column_stack([held, longer]) / work):
        return None
    by_phase = np.median(longer, axis=0)
    worst = int(by_phase.argmax())
    if by_phase.clip(min=0).sum() < np.median(held) / 2:  # its own work does not explain it
        return None
    phases = [phase.label for phase in Phase if phase != Phase.WAITING]
    step = np.median(seconds.sum(axis=2), axis=0)
    return SlowRank(
        paces[slow].rank,
        share=float(np.median(held / np.maximum(step - held, 1e-9))),
        phase=phases[worst],
        seconds=float(np.median(own[slow, :, worst])) / STEPS,
        others=float(np.median(usual[:, worst])) / STEPS,
    )


def _is_clear(shares: np.ndarray[Any, Any]) -> bool:
    """Return whether one of the columns, of shares by block, is large, and so in most blocks."""
    large = np.median(shares, axis=0) >= _SHARE
    often = np.mean(shares > _SHARE / 2, axis=0) >= _OFTEN
    return bool(np.any(large & often))


def _of_others(values: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """Return the median over all ranks but one."""
    medians: np.ndarray[Any, Any] = np.median(np.delete(values, rank, axis=0), axis=0)
    return medians
