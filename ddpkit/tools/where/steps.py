"""How long the ranks' last steps took, as a table."""

from __future__ import annotations

from statistics import median

from ...timing import BLOCKS, STEPS, Pace, Phase, find_slow_rank, milliseconds

_MOST_ROWS = 8  # ranks that are shown one by one


def describe_steps(paces: list[Pace]) -> list[str]:
    """Write the phases of a step, of each rank or of the usual one and the one that waits least; and who is slow."""
    if not paces:
        return []
    times = {f"rank {pace.rank}": pace.per_step() for pace in sorted(paces, key=lambda pace: pace.rank)}
    seconds = median(sum(phases.values()) for phases in times.values())
    lines = [f"each of the last {BLOCKS * STEPS} steps took {milliseconds(seconds)} ms"]
    slow = find_slow_rank(paces)
    if slow is not None:
        lines[0] += f"; rank {slow.rank} {slow}"
    if len(times) > _MOST_ROWS:
        times = _shortened(times)
    names = [phase.label for phase in Phase]
    width = max(map(len, times))
    lines.append(f"    {'ms':<{width}}  {'  '.join(f'{name:>9}' for name in names)}")
    for rank, phases in times.items():
        lines.append(f"    {rank:<{width}}  {'  '.join(f'{milliseconds(phases[name]):>9}' for name in names)}")
    return lines


def _shortened(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median of all ranks, and the rank for which the others wait, if they do."""
    names = next(iter(times.values()))
    medians = {name: median(phases[name] for phases in times.values()) for name in names}
    last = min(times, key=lambda rank: times[rank]["waiting"])
    return {"median of the ranks": medians, f"{last}, which waits least": times[last]}
