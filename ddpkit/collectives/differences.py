"""Describe how the ranks' values differ. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..torch_internals import is_sharded

_LINES = 10  # of a message
_RANKS = 8  # that a message names


def explain_mismatch(everyone: Mapping[int, dict[str, Any]]) -> str:
    """Explain why ranks failed the check, from the fields of their fingerprints, by rank."""
    call = next(iter(everyone.values()))["call"]
    failed = [f"rank {rank}: {each['error']}" for rank, each in everyone.items() if each["error"]]
    if failed:
        return list_lines(f"{call} got a bad argument:", failed)
    calls = {rank: each["call"] for rank, each in everyone.items()}
    if len(set(calls.values())) > 1:
        return (
            f"The ranks are in different collectives: {_list_by_text(calls)}. "
            "Every rank must make the same calls in the same order."
        )
    difference = explain_difference(call, {rank: each["parts"] for rank, each in everyone.items()})
    if difference:
        return difference
    disorder = explain_disorder({rank: list(each["parts"]) for rank, each in everyone.items()})
    if disorder:
        return f"{call} needs the same order on every rank, but {disorder}"
    return (
        f"{call} was called alike on every rank, but the ranks' checks differ: a message was corrupted, or matched "
        "with one of another collective."
    )


def explain_difference(call: str, parts: dict[int, dict[str, str]]) -> str:
    """Describe the parts, given by rank and path, in which these ranks differ; "" if none."""
    differing = differing_parts(parts)
    if not differing:
        return ""
    lines = [f"{path}: {values}" for path, values in differing.items()]
    headline = f"{call} needs the same structure, dtypes and shapes on every rank, but found:"
    return list_lines(headline, lines)


def differing_parts(parts: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Describe the parts, given by rank and path, in which these ranks differ: by path, each value with its ranks.

    A missing part counts as "missing".
    """
    paths = dict.fromkeys(path for each in parts.values() for path in each)
    found = {}
    for path in paths:
        texts = {rank: each.get(path, "missing") for rank, each in parts.items()}
        if len(set(texts.values())) > 1:
            found[path] = _list_by_text(texts)
    return found


def explain_disorder(names: Mapping[int, Sequence[str]]) -> str:
    """Describe where the order of the ranks' names, by rank, first differs, and the remedy; "" if nowhere."""
    for position, row in enumerate(zip(*names.values(), strict=False)):
        if len(set(row)) > 1:
            return (
                f"entry {position} is {_list_by_text(dict(zip(names, row, strict=True)))}. "
                "Sets and directory listings have another order in each process: sort them before you use their order."
            )
    return ""


def name_ranks(ranks: list[int]) -> str:
    """Name ranks as in a sentence, at most the first eight."""
    names = ", ".join(map(str, ranks[:_RANKS]))
    if len(ranks) == 1:
        return f"rank {names}"
    if len(ranks) > _RANKS:
        names += ", …"
    return f"ranks {names}"


def _list_by_text(texts: dict[int, str]) -> str:
    """List each text with the ranks that have it."""
    holders: dict[str, list[int]] = {}
    for rank, text in texts.items():
        holders.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in holders.items())


def list_lines(headline: str, lines: Sequence[str], most: int = _LINES) -> str:
    """Write lines below a headline, the first of many."""
    return "\n  ".join([headline, *first_of(lines, most)])


def first_of(texts: Sequence[str], most: int) -> list[str]:
    """Keep the first texts, and append how many more there are.

    >>> first_of(["a", "b", "c"], most=2)
    ['a', 'b', 'and 1 more']
    """
    if len(texts) <= most:
        return list(texts)
    return [*texts[:most], f"and {len(texts) - most} more"]


# Sharded tensors: each rank holds only a part.

_TENSORS_NAMED = 3  # tensors that a message names


def explain_sharded(call: str, tensors: Iterable[tuple[str, Any]]) -> str:
    """Explain why `call` rejects these named tensors; "" if none is sharded."""
    sharded = [name for name, tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return ""
    names = ", ".join(first_of(sharded, _TENSORS_NAMED))
    return (
        f"{call} does not handle sharded tensors (fully_shard, FSDP, tensor parallelism), but these are: "
        f"{names}. Each rank holds only its own part. Use torch.distributed.checkpoint and torch's own functions for "
        "them, or pass tensor.full_tensor()."
    )
