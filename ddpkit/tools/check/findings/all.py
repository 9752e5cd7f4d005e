"""Find everything that there is to be found in the records of a run."""

from __future__ import annotations

from . import gradients
from .facts import SEVERITIES, Facts, Finding

_SUBJECTS = (gradients,)


def find_all(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first."""
    found: list[Finding] = []
    if facts.world_size > 1:
        for subject in _SUBJECTS:
            found += subject.find(facts)
    return sorted(found, key=_badness)


def _badness(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)
