"""Find gradients that are not averaged, and replicas that are not equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ...script.recorder import Record
from ..places import rank_condition
from .facts import Facts, Finding, all_equal, in_function_of, place, places, say_ranks

_SOME_STEPS = 3  # after which a parameter without a gradient gets none
_ROUNDING = 1e-4  # relative difference of gradients that sums in another order may have


def find(facts: Facts) -> Iterator[Finding]:
    """Compare what the ranks' optimisers hold at each step."""
    steps = facts.rows("step", "optimizer", "number")
    unaveraged = list(_find_unaveraged(facts, steps))
    yield from unaveraged
    yield from _find_without(facts, steps)
    yield from _find_different(facts, steps, bool(unaveraged))


def _find_unaveraged(facts: Facts, steps: list[Any]) -> Iterator[Finding]:
    """Find the first step of each optimiser at which gradients differ."""
    done: set[int] = set()
    for (optimizer, number), records in steps:
        if optimizer in done:
            continue
        described = _described(facts, optimizer)
        if described is None:
            continue
        by_hand = _reduced(facts, optimizer)
        differing = {n: d for n, d in _differing_gradients(records, described).items() if n not in by_hand}
        if not differing or _are_averaged(steps, optimizer, number, described):
            continue
        done.add(optimizer)
        yield _unaveraged(facts, optimizer, number, records[0], described, differing)


def _differing_gradients(records: list[Record], described: list[Any]) -> dict[str, float]:
    """Name the parameters whose gradients differ at a step by more than rounding, and by how much."""
    found = {}
    for name, index in _comparable(described).items():
        gradients = [record["gradients"][i] for record, i in zip(records, index, strict=True)]
        difference = _difference(gradients)
        if difference > _ROUNDING:
            found[name] = difference
    return found


def _described(facts: Facts, optimizer: int) -> list[dict[str, Any]] | None:
    """Return for each rank how an optimiser and its parameters were described."""
    found = []
    for records in facts.of("optimizer").values():
        own = [record for record in records if record["optimizer"] == optimizer]
        if not own:
            return None
        found.append(own[-1])
    return found


def _comparable(described: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Give the positions, on each rank, of the parameters that all ranks hold whole."""
    tables = []
    for description in described:
        table = {}
        for index, parameter in enumerate(description["parameters"]):
            if parameter["whole"]:
                table[parameter["name"], tuple(parameter["shape"])] = index
        tables.append(table)
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return {key[0]: [table[key] for table in tables] for key in common}


def _difference(gradients: Sequence[Any]) -> float:
    """Return the relative difference of gradients, 0 if they are equal."""
    if all_equal(gradients):
        return 0.0
    if any(gradient is None for gradient in gradients):
        zeros = all(gradient is None or not any(gradient[1]) for gradient in gradients)
        return 0.0 if zeros else 1.0
    first = gradients[0][1]
    largest = 0.0
    for _, other in gradients[1:]:
        norm = max(_norm(first), _norm(other))
        difference = _norm([a - b for a, b in zip(first, other, strict=True)])
        if math.isfinite(difference) and norm:
            largest = max(largest, difference / norm)
    return largest


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def _become_equal(steps: list[Any], optimizer: int, number: int, described: list[Any]) -> bool:
    """Return whether the parameters are equal at a later step: then they are averaged themselves."""
    for (other, later), records in steps:
        if other == optimizer and later > number:
            hashes = [[record["parameters"][i] for i in index] for record, index in _by_rank(records, described)]
            if all_equal(hashes):
                return True
    return False


def _reduced(facts: Facts, optimizer: int) -> set[str]:
    """Name the parameters of an optimiser that a collective was given after they were trained; -1 is for buffers."""
    trained = [record.get("trained") for record in facts.of("collective")[facts.ranks[0]]]
    return {name for number, name in filter(None, trained) if number == optimizer}


def _are_averaged(steps: list[Any], optimizer: int, number: int, described: list[Any]) -> bool:
    """Return whether the ranks make parameters equal again, now and then, after gradients that differ."""
    if _become_equal(steps, optimizer, number, described):
        return True
    for (other, earlier), records in steps:
        # the first step of Adam is as long for any gradient
        if other != optimizer or not 1 < earlier < number or not any(records[0]["rates"]):
            continue
        if _differing_gradients(records, described) and _become_equal(steps, optimizer, earlier, described):
            return True
    return False


def _by_rank(records: list[Record], described: list[Any]) -> list[tuple[Record, list[int]]]:
    table = list(_comparable(described).values())
    return [(record, [index[rank] for index in table]) for rank, record in enumerate(records)]


def _unaveraged(
    facts: Facts,
    optimizer: int,
    number: int,
    step: Record,
    described: list[Any],
    differing: dict[str, float],
) -> Finding:
    table = {p["name"]: p for p in described[0]["parameters"]}
    parameters = [table[name] for name in differing]
    lines, why, fix = _cause(facts, step, described[0], parameters)
    largest = max(differing.values())
    names = _name_some(list(differing))
    evidence = f"{names}: at optimizer step {number} the gradients of {say_ranks(facts.ranks)} differ by {largest:.0%}"
    return facts.finding("gradients-not-averaged", evidence, why, fix, *lines)


def _name_some(names: list[str]) -> str:
    if len(names) == 1:
        return f"`{names[0]}`"
    return f"`{names[0]}` and {len(names) - 1} more"


def _cause(
    facts: Facts, step: Record, description: Record, parameters: list[Record]
) -> tuple[list[Sequence[Any] | None], str, str]:
    """Find the line and more lines, the reason and the remedy."""
    share = f"1/{facts.world_size} of the samples"
    why = f"each rank trains a model of its own; the one that is saved has seen {share}"
    part = "each rank trains these parameters on its own samples alone, and they drift apart"
    first = parameters[0]
    at_step = step["where"]
    wrapped = next((cause for cause in step["causes"] if cause["made"] == first["ddp"]), None)
    if wrapped is None:
        lines = [at_step, description["made"], first["made"]]
        if len(parameters) < len(description["parameters"]):
            return lines, part, "make them parameters of the module that DDP wraps, and use them in its `forward`"
        if step["causes"]:
            return lines, part, "wrap this network, too: `net = DistributedDataParallel(net)`"
        fix = "wrap the model, `model = DistributedDataParallel(model)`, or average its gradients before the step"
        return lines, why, fix
    made, unsynced = wrapped["made"], wrapped["unsynced"]
    if wrapped["thawed"] and not first["managed"]:
        fix = "wrap the model anew after it is unfrozen: `model = DistributedDataParallel(model.module)`"
        return [wrapped["thawed"], made], part, fix
    if not first["managed"]:
        fix = "add all parameters before the model is wrapped: `model = DistributedDataParallel(net)` comes last"
        return [in_function_of(first["made"], made), first["made"], made], part, fix
    if called := place(wrapped["bypassed"]):
        if called not in places(wrapped["taken_out"]):
            called = in_function_of(wrapped["taken_out"], wrapped["bypassed"])
        fix = "call the wrapped model, `model(x)`, not `model.module(x)` nor a method of it"
        return [called, wrapped["bypassed"], wrapped["taken_out"]], why, fix
    if unsynced and not all(wrapped["forwards"][-1:]):
        fix = "run forward and backward of the last micro-batch before `optimizer.step()` outside of `no_sync()`"
        return [unsynced, at_step], why, fix
    if unsynced:
        return [unsynced, at_step], why, "set the flag, or enter `no_sync()`, before forward: DDP looks at it there"
    fix = "call `model(x)` of the wrapped model once for each `backward()`, and leave its gradients alone"
    return [at_step, made, wrapped["taken_out"]], why, fix


def _find_without(facts: Facts, steps: list[Any]) -> Iterator[Finding]:
    """Find trainable parameters that never get a gradient."""
    by_optimizer: dict[int, list[list[Record]]] = {}
    for (optimizer, _), records in steps:
        by_optimizer.setdefault(optimizer, []).append(records)
    for optimizer, rows in by_optimizer.items():
        described = _described(facts, optimizer)
        if described is None or len(rows) < _SOME_STEPS:
            continue
        last = rows[-1][0]
        names = list(last["without"])
        for record in chain.from_iterable(rows):
            names = [name for name in names if name in record["without"]]
        lost = [name for name in names if last["without"][name]]
        unused = [p["name"] for p in described[0]["parameters"] if p["name"] in names and not _may_be_unused(p, last)]
        if lost:
            yield _without(facts, rows, described[0], lost, last["without"][lost[0]])
        elif unused:
            yield _without(facts, rows, described[0], unused, [])


def _may_be_unused(parameter: dict[str, Any], step: Record) -> bool:
    """Return whether a parameter is in a DDP that was told that steps leave some out."""
    wrapped = next((cause for cause in step["causes"] if cause["made"] == parameter["ddp"]), None)
    return wrapped is not None and not wrapped["uses_all"]


def _without(
    facts: Facts,
    rows: list[list[Record]],
    description: dict[str, Any],
    names: list[str],
    gathered: list[Any],
) -> Finding:
    made = next(p["made"] for p in description["parameters"] if p["name"] == names[0])
    evidence = f"{_name_some(names)}: no gradient at any of {len(rows)} optimizer steps, on {say_ranks(facts.ranks)}"
    lines = [in_function_of(made, description["made"]), made, description["made"]]
    if gathered:
        why = "what they compute goes into a collective, whose results carry no gradient: they never change"
        fix = "gather with gradients: `features = ddpkit.gather_batch(features)`"
        return facts.finding("no-gradients", evidence, why, fix, gathered, *lines)
    why = "the optimizer has them, and no loss depends on them: they never change"
    fix = "use what they compute in the loss; if they are not to be trained, `requires_grad_(False)`"
    return facts.finding("no-gradients", evidence, why, fix, *lines, severity="suspicious")


def _find_different(facts: Facts, steps: list[Any], is_explained: bool) -> Iterator[Finding]:
    """Find replicas that differ at the first step, or later although gradients were equal."""
    started = _find_different_start(facts, steps)
    if started is not None:
        yield started
    elif not is_explained:
        drifted = _find_states(facts, steps) or _find_drift(facts, steps)
        if drifted is not None:
            yield drifted
    buffers = _find_buffers(facts, steps)
    if buffers is not None:
        yield buffers


def _find_different_start(facts: Facts, steps: list[Any]) -> Finding | None:
    """Find parameters that differ before the first step, and fixed networks that differ."""
    for (optimizer, number), records in steps:
        described = _described(facts, optimizer)
        if number > 1 or described is None:
            continue
        differing = _different(records, described)
        if differing and not _become_equal(steps, optimizer, number, described):
            made = next(p["made"] for p in described[0]["parameters"] if p["name"] == differing[0])
            return _started_different(facts, differing, made, described[0]["made"])
        for name, (hashes, made) in records[0]["others"].items():
            others = [record["others"].get(name, [None])[0] for record in records]
            if hashes and not all_equal(others) and all(other and len(other) == len(hashes) for other in others):
                return _started_different(facts, [name], made, described[0]["made"])
    return None


def _different(records: list[Record], described: list[Any]) -> list[str]:
    """Name the parameters that differ at a step."""
    found = []
    for name, index in _comparable(described).items():
        if not all_equal([record["parameters"][i] for record, i in zip(records, index, strict=True)]):
            found.append(name)
    return found


def _started_different(facts: Facts, names: list[str], made: list[Any], optimizer: list[Any]) -> Finding:
    evidence = f"{_name_some(names)}: at the first optimizer step {say_ranks(facts.ranks)} hold different values"
    why = "equal gradients keep replicas apart that begin apart: there is no one model, and rank 0's is saved"
    fix = "send out rank 0's: `for t in model.state_dict().values(): dist.broadcast(t, src=0)`"
    return facts.finding(
        "replicas-differ-at-start", evidence, why, fix, in_function_of(made, optimizer), made, optimizer
    )


def _find_states(facts: Facts, steps: list[Any]) -> Finding | None:
    """Find optimisers whose states differ before a step."""
    for (_, number), records in steps:
        states = [record["state"] for record in records]
        rates = [record["rates"] for record in records]
        if not all_equal(rates):
            found = " and ".join(str(rate[0]) for rate in rates)
            evidence = f"at optimizer step {number} the learning rates of {say_ranks(facts.ranks)} are {found}"
        elif number == 1 and not all_equal(states):
            evidence = f"at the first step the optimizer states of {say_ranks(facts.ranks)} differ"
        else:
            continue
        loaded: list[Any] = next((record["loaded"] for record in records if record["loaded"]), [])
        if not loaded and not all_equal(rates):
            loaded = _rates_set(facts)
        condition = next(filter(None, map(rank_condition, places(loaded))), None)
        why = "equal gradients become different updates, and the replicas drift apart"
        fix = "load the optimizer's state, or set its learning rate, on every rank"
        return facts.finding("replicas-drift", evidence, why, fix, condition, loaded, records[0]["where"])
    return None


def _rates_set(facts: Facts) -> list[Any]:
    """Return where one rank alone steps a schedule."""
    stepped = facts.of("schedule step")
    calls = [Counter(tuple(record["where"][0]) for record in records) for records in stepped.values()]
    for line in dict.fromkeys(line for ranks in calls for line in ranks):
        if 0 in [ranks[line] for ranks in calls]:
            return [line]
    return []


def _find_drift(facts: Facts, steps: list[Any]) -> Finding | None:
    """Find parameters that are equal at one step and differ at a later one."""
    for (optimizer, number), records in steps:
        described = _described(facts, optimizer)
        if number == 1 or described is None:
            continue
        by_hand = _reduced(facts, optimizer)
        differing = [name for name in _different(records, described) if name not in by_hand]
        if not differing or _are_averaged(steps, optimizer, number, described):
            continue
        first = next(r for (o, n), r in steps if (o, n) == (optimizer, 1))[0]
        evidence = (
            f"{_name_some(differing)}: equal at first, different on {say_ranks(facts.ranks)} before step {number}"
        )
        why = "something changes the weights by a number that each rank has for itself; gradients were equal"
        fix = "reduce that number over ranks first: `dist.all_reduce(x, op=dist.ReduceOp.MAX)`"
        return facts.finding("replicas-drift", evidence, why, fix, first["where"])
    return None


def _find_buffers(facts: Facts, steps: list[Any]) -> Finding | None:
    """Find running statistics that differ and that nobody sends out."""
    for (_, number), records in steps:
        for name, entry in records[0]["buffers"].items():
            hashes = [record["buffers"].get(name, {}).get("hashes") for record in records]
            if number == 1 or entry["sent"] or None in hashes or all_equal(hashes):
                continue
            if _become_equal_buffers(steps, name):
                continue
            by_hand = _reduced(facts, -1)
            differing = [n for n in hashes[0] if not all_equal([h.get(n) for h in hashes])]
            differing = [n for n in differing if f"{name}.{n}" not in by_hand]
            if not differing:
                continue
            evidence = f"buffer {_name_some(differing)}: different on {say_ranks(facts.ranks)} at step {number}"
            why = "the ranks evaluate different networks, and the one that is saved is rank 0's"
            fix = "leave `broadcast_buffers=True`, use SyncBatchNorm, or call `ddpkit.sync_buffers(model)`"
            return facts.finding("replicas-drift", evidence, why, fix, entry["ddp"] or records[0]["where"])
    return None


def _become_equal_buffers(steps: list[Any], name: str) -> bool:
    """Return whether the running statistics of a network differ at a step and are equal at a later one."""
    has_differed = False
    for _, records in steps:
        hashes = [record["buffers"].get(name, {}).get("hashes") for record in records]
        if has_differed and hashes[0] and all_equal(hashes):
            return True
        has_differed = has_differed or not all_equal(hashes)
    return False
