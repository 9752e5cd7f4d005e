"""Find everything that there is to be found in the records of a run."""

from __future__ import annotations

from . import gradients, losses, metrics, order, random_numbers, samples, schedules, speed, writing
from .facts import SEVERITIES, Facts, Finding
from .parallelism import OF_REPLICAS, hold_parts

_SUBJECTS = (gradients, losses, samples, random_numbers, metrics, order, writing, schedules, speed)
_FOLLOW = {  # what another finding explains
    "batches-differ": ("wrong-divisor", "collective-order", "one-rank-decides", "replicas-drift"),
    "same-samples": ("same-random-numbers", "samples-repeated"),
    "gradients-not-averaged": (
        "replicas-differ-at-start",
        "replicas-drift",
        "clipped-before-averaging",
        "collective-order",
        "exchanges-too-often",
    ),
    "replicas-differ-at-start": ("replicas-drift",),
    "one-rank-decides": ("collective-order",),
    "shuffle-differs": ("samples-missing", "samples-repeated", "wrong-divisor"),
}


def find_all(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first, without those that follow from others."""
    found: list[Finding] = []
    if facts.world_size > 1:
        for subject in _SUBJECTS:
            found += subject.find(facts)
    kinds = {finding.kind for finding in found}
    explained = {kind for cause in kinds for kind in _FOLLOW.get(cause, ())}
    if kinds & OF_REPLICAS and hold_parts(facts):
        explained |= OF_REPLICAS
    return sorted((finding for finding in found if finding.kind not in explained), key=_badness)


def _badness(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)
