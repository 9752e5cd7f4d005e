"""Observe collectives and saved files; find where ranks part, what several write, and means of means."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ...collectives import ops
from ...collectives.tree import Tree
from ...job.job import Peers, group_of
from ..recorder import Function, before, current, guarded, replace, small_hashes
from . import observed
from .facts import (
    SCRIPT_END,
    Facts,
    Finding,
    Findings,
    Parting,
    agree,
    all_equal,
    by_fields,
    first_of,
    in_function_of,
    joined,
    listed,
    say_ranks,
)
from .loaders import Ending
from .modules import Modules, variables
from .observed import Collective, Epoch, EpochEnd, File, Plateau, Value, tell
from .source import (
    Loop,
    Place,
    Stack,
    divides_by_ranks,
    is_inside,
    leaving_condition,
    loops_around,
    rank_condition,
    skipping_lines,
    stack,
)

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "new_group",
)  # fmt: skip
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_FIRST_STEPS = 3  # at which the graphs of what collectives get are followed
_MANY = 4096  # sums that are kept for a step
_SMALL = 8  # elements of a tensor that are told


@dataclass
class Collectives:
    """Observes `torch.distributed` from the moment of `install`.

    Attributes:
        trained: The optimiser and the name of parameters, by address; -1 for buffers.
        cut: Where a collective takes what parameters have computed, and not its graph, by their identity.
        sums: Sums of tensors since the last step; they may be of gradients.
    """

    modules: Modules
    ending: Ending
    trained: dict[int, tuple[int, str]] = field(default_factory=dict)
    cut: dict[int, Stack] = field(default_factory=dict)
    sums: list[observed.Sum] = field(default_factory=list)
    _depth: int = 0
    _sent_at: int = -1  # step for which that was told last

    def install(self) -> None:
        """Begin."""
        before(Join, "__enter__", lambda: tell(observed.Join()))
        before(ops, "reduce_tree", self._note_mean)
        before(torch, "save", self._note_save)
        for name in _POINT_TO_POINT:
            before(dist, name, self._note_sent)
        for name in _COLLECTIVES:
            replace(dist, name, self._observed)

    def _note_mean(self, value: Any, op: str, weight: Any, check: bool, peers: Peers | None) -> None:
        """Tell a mean of ddpkit without weight, which sends no tensor that shows it."""
        if op == "mean" and weight is None and current().is_main:
            leaves = [torch.as_tensor(leaf) for leaf in Tree(value).leaves().values()]
            values = [float(leaf) for leaf in leaves if leaf.numel() == 1]
            group = _name_of(group_of(peers))
            size = sum(leaf.numel() for leaf in leaves)
            seen = Collective("all_reduce", group, stack(4), "AVG", shape=[size], values=values[:_SMALL])
            self._tell(seen)

    def _note_sent(self) -> None:
        """Tell once a step that a tensor goes from one rank to another."""
        step = current().step
        if step > self._sent_at and current().is_main and not self._depth:
            self._sent_at = step
            tell(observed.Sent(step))

    def _note_save(self, obj: Any, f: Any) -> None:
        path = getattr(f, "name", f)
        if isinstance(path, str | os.PathLike):
            hashes = list(small_hashes(obj))
            tell(File(os.path.realpath(path), stack(), hashes))

    def _observed(self, original: Function) -> Function:
        name = original.__name__
        note = guarded(self._note)
        keep_sum = guarded(self._keep_sum)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not current().is_main:
                return original(*args, **kwargs)
            self._depth += 1
            try:
                note(name, args, kwargs)
                result = original(*args, **kwargs)
                if name == "all_reduce" and result is None:
                    keep_sum(args, kwargs)
                return result
            finally:
                self._depth -= 1

        return call

    def _keep_sum(self, args: Any, kwargs: Any) -> None:
        """Keep the size of a sum; it may be of gradients."""
        tensor: Tensor = args[0] if args else kwargs["tensor"]
        is_sum = tensor.is_floating_point() and _reduction(args, kwargs) == "SUM"
        if is_sum and len(self.sums) < _MANY:
            square = square_of(tensor.detach())
            summed = observed.Sum(stack(4), tensor.numel(), square, divides_by_ranks(4))
            self.sums.append(summed)

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = _given(Tensor, args, kwargs)
        groups = _given(dist.ProcessGroup, args, kwargs)
        seen = Collective(name, _name_of(groups[0] if groups else None), stack(4))
        if torch.is_grad_enabled() and current().step < _FIRST_STEPS:
            self.cut |= {id(p): seen.where for p in _parameters_behind(tensors)}
        if "reduce" in name:
            seen = seen._replace(reduction=_reduction(args, kwargs))
        for tensor in tensors[:1]:
            dtype = str(tensor.dtype).removeprefix("torch.")
            seen = seen._replace(dtype=dtype, shape=list(tensor.shape))
            if tensor.numel() <= _SMALL and not tensor.is_meta:
                values = tensor.detach().reshape(-1).to("cpu")
                seen = seen._replace(values=values.tolist())
            if tensor.numel():
                seen = seen._replace(trained=self.trained.get(tensor.data_ptr()))
        self._tell(seen)

    def _tell(self, seen: Collective) -> None:
        seen = seen._replace(samples=self.modules.samples, averages=self.ending.accumulates)
        tell(seen._replace(divides=divides_by_ranks()))


def _parameters_behind(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters from which tensors were computed."""
    seen = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        before_it = node.next_functions
        if node.name() == "_DDPSinkBackward":  # DDP's, which hands each output of a network on
            before_it = before_it[output : output + 1]
        waiting += before_it
        if hasattr(node, "variable"):
            yield node.variable


def _given(kind: Any, args: Any, kwargs: Any) -> list[Any]:
    """List the arguments of one type."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]


def _reduction(args: Any, kwargs: Any) -> str:
    given = [kwargs.get("op"), *_given(dist.ReduceOp.RedOpType, args, {}), "SUM"]
    return str(next(filter(None, given))).rpartition(".")[2]


def square_of(tensor: Tensor) -> float:
    """Add up the squares of a tensor's elements."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _name_of(group: Any) -> str:
    if group is None or group is getattr(dist.group, "WORLD", None):
        return "0"
    return str(getattr(group, "group_name", id(group)))


def tell_values() -> None:
    """Tell hashes of the small tensors that variables hold now."""
    for name, value in list(variables()):
        if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
            for hashed in small_hashes(value):
                tell(Value(name, hashed))


# Find different numbers of batches or rounds.


def _uneven_epochs(facts: Facts) -> Findings:
    """Find a loader from which the ranks train with different numbers of batches."""
    planned = [row for row in facts.epochs if not any(epoch.bounded for epoch in row)]
    ends = facts.rows(EpochEnd, "loader", "number")
    whole = [row for row in ends if not any(end.cut for end in row)]
    rows: list[Sequence[Epoch | EpochEnd]] = [*planned, *whole]
    for row in rows:
        loader = row[0].loader
        batches = [each.batches for each in row]
        if loader in facts.training and None not in batches and not all_equal(batches):
            epoch = next(epoch for epoch in facts.first(Epoch) if epoch.loader == loader)
            yield facts.finding(
                "batches-differ",
                f"{facts.who} have {joined(batches)} batches in an epoch",
                epoch.lines,
                epoch.sampler_made,
                epoch.made,
                epoch.where,
            )


def _skipping(facts: Facts) -> Findings:
    """Find ranks that are at different batches at one step, because some have left one out."""
    lines: Stack = []
    for steps in facts.steps:
        lines = lines or skipping_lines(steps[0].where)
        if lines and not agree(steps, "position"):
            positions = [step.position[-1] for step in steps if step.position]
            batches = joined([position.batch for position in positions])
            evidence = f"at optimizer step {steps[0].number}, {facts.who} are at batches {batches} of an epoch"
            yield facts.finding("batches-skipped", evidence, lines)


def _is_handled(facts: Facts) -> bool:
    """Return whether the script deals with ranks that end earlier: by Join, or by telling each other."""
    for seen in facts.all(Collective):
        if seen.reduction in ("MIN", "MAX") or seen.op == "all_gather_object":
            return True
    return bool(facts.all(observed.Join))


def _plateaus(facts: Facts) -> Findings:
    """Find learning rates that follow a number which each rank has measured on its own."""
    for row in zip(*facts.of(Plateau).values(), strict=False):
        if not agree(row, "value"):
            values = joined([seen.value for seen in row], ".4g")
            yield facts.finding("plateau-differs", f"{facts.who} pass {values} to the schedule", row[0].where)


def _parting(facts: Facts) -> Findings:
    """Find where ranks will part, else explain where they do."""
    found: list[Finding] = []
    if facts.are_replicas:
        found += first_of(_plateaus)(facts)
        if not facts.deals_micro_batches and not _is_handled(facts):
            found += first_of(_uneven_epochs, _skipping)(facts)
    if facts.parted and not found:
        found.append(_explain(facts, facts.parted))
    yield from found


# Explain the first collective that ranks did not enter alike.


def _explain(facts: Facts, parted: Parting) -> Finding:
    one, other = parted.entered
    evidence = f"{_say(parted.ranks[0], one)}; {_say(parted.ranks[1], other, parted.end)}"
    lines = listed(one.where, other and other.where)
    guarded = [line for line in lines if rank_condition(line)][:1]
    left = None if guarded else _find_loop(facts, parted)
    if left:
        rule, line = left
        return facts.finding(rule, evidence, line, lines)
    return facts.finding("collective-order", evidence, guarded, lines, ranks=sorted(parted.ranks))


def _say(rank: int, seen: Collective | None, end: str = "") -> str:
    if seen is None:
        return f"rank {rank} has ended ({end})"
    shape = f" of {seen.shape}" if seen.shape else ""
    return f"rank {rank} enters {seen.op}{shape} at {next(iter(seen.where), None)}"


def _find_loop(facts: Facts, parted: Parting) -> tuple[str, Place] | None:
    """Find the loop that one rank has left and another goes on with: the rule, and the line."""
    entered = facts.of(Collective)
    one, other = parted.entered
    one_rank, other_rank = parted.ranks
    for running, left, rank in ((one, other, other_rank), (other, one, one_rank)):
        before_it = listed(*(seen.where for seen in entered[rank]))
        for line in running.where if running else []:
            for loop in reversed(loops_around(line)):
                if not _has_line(loop, line, before_it) or not _is_left(loop, line, left, parted):
                    continue
                condition = leaving_condition(loop)
                if condition is not None:
                    return "loop-left", line._replace(line=condition)
                if left is not None and isinstance(loop, ast.For):
                    return "rounds-differ", line._replace(line=loop.lineno)
    return None


def _has_line(loop: Loop, line: Place, lines: Stack) -> bool:
    """Return whether one of some lines is in the loop of a function, that of `line`."""
    return any(is_inside(loop, each.line) for each in lines if each.shares_function_with(line))


def _is_left(loop: Loop, line: Place, left: Collective | None, parted: Parting) -> bool:
    """Return whether a rank is behind a loop: elsewhere in its function, or at the end of the script."""
    if left is None:
        return parted.end == SCRIPT_END
    in_function = [each for each in left.where if each.shares_function_with(line)]
    return bool(in_function) and not _has_line(loop, line, in_function)


# Find metrics that are means of the ranks' means.

_NEAR = 3  # collectives, within which counts may travel with means


def _mean_of_means(facts: Facts) -> Findings:
    """Find metrics that are means of the ranks' means over uneven shares."""
    for row in facts.collectives:
        if not _is_mean_of_means(facts, row):
            continue
        told = facts.told[facts.ranks[0]]
        before = told[: told.index(row[0])]
        epochs = [seen for seen in before if isinstance(seen, Epoch)]
        where = None
        if epochs and epochs[-1].loader not in facts.training:  # an evaluation
            where = in_function_of(row[0].where, epochs[-1].where)
        severity = "wrong" if where else "suspicious"
        shares = joined([seen.samples for seen in row])
        evidence = f"means over {shares} samples, of {facts.who}, are averaged with equal weights"
        yield facts.finding("mean-of-means", evidence, where, row[0].where, severity=severity)


def _is_mean_of_means(facts: Facts, row: list[Collective]) -> bool:
    first = row[0]
    is_mean = first.reduction == "AVG" or first.divides
    if first.op not in ("all_reduce", "reduce") or not is_mean:
        return False
    for seen in row:
        if not any(not float(value).is_integer() for value in seen.values):  # counts
            return False
    if any(seen.averages for seen in row):  # gradients, between backward and the step
        return False
    is_uneven = not agree(row, "samples") and all(seen.samples for seen in row)
    return is_uneven and not _carries_counts(facts, row)


def _carries_counts(facts: Facts, row: list[Collective]) -> bool:
    """Return whether the ranks' numbers of samples are reduced as well, about then."""
    shares = [seen.samples for seen in row]
    for others in facts.collectives:
        if abs(others[0].position - row[0].position) > _NEAR:
            continue
        for column in zip(*(seen.values for seen in others), strict=False):
            are_counts = all(float(value).is_integer() and value > 0 for value in column)
            if list(column) == shares or (are_counts and not all_equal(column)):
                return True
    return False


# Find files that several ranks write, and values of which one rank alone saves its own.


def _same_files(facts: Facts) -> Findings:
    """Find files that several ranks save."""
    saved = {rank: by_fields(files, "path") for rank, files in facts.of(File).items()}
    for path in by_fields(facts.all(File), "path"):
        ranks = [rank for rank, files in saved.items() if path in files]
        if len(ranks) > 1:
            first = saved[ranks[0]][path][0]
            evidence = f"{say_ranks(ranks)} write {os.path.basename(first.path)}"
            yield facts.finding("same-file", evidence, first.where, ranks=ranks)


def _own_values(facts: Facts) -> Findings:
    """Find values that one rank alone saves, and that differed between ranks from the first step on."""
    writers = [rank for rank, files in facts.of(File).items() if files]
    if len(writers) != 1:
        return
    saved = {hashed: file.where for file in facts.all(File) for hashed in file.hashes}
    position = facts.ranks.index(writers[0])
    for row in facts.rows(Value, "name"):
        where = saved.get(row[position].hash)
        if where and not agree(row, "hash"):
            evidence = f"`{row[0].name}` differs between {facts.who}, and rank {writers[0]} saves its own"
            yield facts.finding("own-values-saved", evidence, where)


RULES = (_parting, _same_files)
OF_REPLICAS = (first_of(_mean_of_means), first_of(_own_values))
