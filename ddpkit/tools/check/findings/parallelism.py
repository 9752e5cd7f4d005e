"""Tell ranks that hold parts of one network from ranks that hold replicas of it."""

from __future__ import annotations

from .facts import Facts, all_equal

OF_REPLICAS = frozenset(
    [
        "gradients-not-averaged",
        "replicas-differ-at-start",
        "replicas-drift",
        "same-samples",
        "same-random-numbers",
    ]
)
_COMPARED = 3  # steps at which all ranks must get the same inputs, if there are as many


def hold_parts(facts: Facts) -> bool:
    """Return whether the network is spread over the ranks by hand: in stages, or in parts of layers."""
    steps = [record for records in facts.of("step").values() for record in records]
    if any(record["causes"] for record in steps):  # a DDP, whose ranks are replicas
        return False
    return _are_stages(facts) or (_combine_in_forward(facts) and _begin_apart(facts) and _have_equal_inputs(facts))


def _are_stages(facts: Facts) -> bool:
    """Return whether tensors go from rank to rank in training, not only before."""
    sending = [records for records in facts.of("point to point").values() if any(r["step"] for r in records)]
    return len(sending) > 1


def _combine_in_forward(facts: Facts) -> bool:
    collectives = facts.of("collective").values()
    return all(any(record.get("inside") for record in records) for records in collectives)


def _begin_apart(facts: Facts) -> bool:
    for (_, number), records in facts.rows("step", "optimizer", "number"):
        if number == 1 and not all_equal([record["parameters"] for record in records]):
            return True
    return False


def _have_equal_inputs(facts: Facts) -> bool:
    rows = [records for _, records in facts.rows("step", "optimizer", "number")]
    inputs = [[[call["input"] for call in record["calls"]] for record in records] for records in rows[:_COMPARED]]
    return all(any(row[0]) and all_equal(row) for row in inputs)
