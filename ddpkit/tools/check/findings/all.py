"""Find everything that there is to be found in the records of a run."""

from __future__ import annotations

from . import gradients, losses, metrics, order, random_numbers, samples, writing
from .facts import SEVERITIES, Facts, Finding

_SUBJECTS = (gradients, losses, samples, random_numbers, metrics, order, writing)


def find_all(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first."""
    found: list[Finding] = []
    if facts.world_size > 1:
        for subject in _SUBJECTS:
            found += subject.find(facts)
    return sorted(found, key=_badness)


def _badness(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)
