"""Run `python -m ddpkit parity train.py`: do N ranks train what one process trains?"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from ..check.facts import Facts, Watch, all_equal, joined
from ..check.loaders import LONGEST
from ..check.observed import Cuda, End
from ..cli import UnfitScriptError, annotate, announce, checked_by, count, paint, positive, several, show, table, wrap
from ..cuda import ON_THE_CPU
from ..ranks import FOLDER, Ranks, Script, add_script, prepare
from ..recorder import Record
from .compare import WORDS, Comparison, Difference, UncomparableError, batches_in, compare_lines, rows_of
from .inputs import Batch, Plan, count_by_source, pair_sources, read, read_ranks
from .rank import Tensors, be_rank, pair

SCHEMA = 1  # of the JSON object; raised when a field changes its meaning or goes away


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("-n", "--ranks", type=several, default=2, metavar="N", help="processes to start (2)")
    add("--steps", type=positive, default=5, metavar="N", help="optimizer steps that are compared (5)")
    add("--reference", metavar="FILE", help="the script of one process; without it, the same with its arguments")
    more = "all arguments of the reference; without one, more for the script on one process"
    add("--reference-args", type=checked_by(shlex.split), default="", metavar="ARGS", help=more)
    add("--keep-dropout", dest="keep", action="append_const", const="dropout", help="leave dropout on")
    kept = "let batch norm use the statistics of each batch"
    add("--keep-batch-norm", dest="keep", action="append_const", const="batch norm", help=kept)
    add("--github", action="store_true", help="print an annotation of the line for GitHub as well")
    add_script(parser, f", and {FOLDER} in it is each run's own folder")


class Runs:
    """Runs the scripts, each time in a folder of its own that has links to what is in the present one."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._plan: dict[str, Any] = {}  # of one process that gets the ranks' samples
        self._records: dict[str, list[Record]] = {}  # of the first rank, by the name of the run
        self._facts: dict[str, Facts] = {}

    def compare(self) -> tuple[Difference | None, Comparison]:
        """Run the scripts; return the first difference, None if there is none, and what was compared."""
        args = self._args
        folder = self._run("ranks", args.ranks)
        ranks = [folder / f"{rank}" for rank in range(args.ranks)]
        first = self._run("first", steps=2) / "0"
        batches = read_ranks(ranks, "batches")
        self._serve(ranks, first, batches)
        if found := self._compare_inputs(ranks, first, batches):
            return found, Comparison(ranks, [], self._run_alone)
        folders = [self._run(name, ranks=ranks, permuted=name == "again") / "0" for name in ("one", "again")]
        comparison = Comparison(ranks, folders, self._run_alone)
        comparison.uses_cuda = bool(self._facts["ranks"].all(Cuda))
        comparison.is_cut = any(end.reason for end in self._facts["ranks"].all(End))
        found = comparison.find()
        told = [self._records[name] for name in ("ranks", "one", "again")]
        printed, *counts = compare_lines(told, args.ranks, comparison.precision, args.steps)
        comparison.numbers, comparison.unpaired = counts
        if found and (reason := self._why_not(ranks, found)):
            raise UncomparableError(f"{reason} ({WORDS.get(found.thing, found.thing)}, {found.evidence})")
        if printed and (found is None or printed.step < found.step):
            found = printed
        return found, comparison

    def _run(self, name: str, processes: int = 1, **plan: Any) -> Path:
        """Run a script; return the folder of its files."""
        args = self._args
        folder = self._folder / name
        work = folder / "run" / "work"
        work.mkdir(parents=True)
        here = Path.cwd()
        for entry in [*here.iterdir(), *here.parent.iterdir()]:
            link = (work if entry.parent == here else work.parent) / entry.name
            if not link.exists():
                link.symlink_to(entry)
        path, arguments = args.script, args.arguments
        if name != "ranks":
            arguments = [*([] if args.reference else arguments), *shlex.split(args.reference_args)]
            path = args.reference or path
        arguments = [argument.replace(FOLDER, str(work)) for argument in arguments]
        is_module = args.module and path == args.script
        script = Script(path if is_module else os.path.abspath(path), arguments, is_module)
        ready = Plan(**{"steps": args.steps, "folder": folder, "keep": args.keep or ()} | self._plan | plan)
        announce(f"ddpkit parity: {path} on {count(processes, 'rank')}")
        with Ranks(lambda *control: be_rank(script, ready, *control), processes, args.device) as ranks:
            outcome = Watch(ranks, args.timeout, LONGEST * ready.steps).run()
            self._records[name] = ranks.all[0].records
            self._facts[name] = outcome.facts
        is_cut = outcome.steps >= ready.steps  # an epoch was cut, for which scripts may not be prepared
        if outcome.unobserved or (outcome.trouble and not is_cut):
            reasons = [outcome.trouble, *outcome.details, *outcome.unobserved.values()]
            raise UncomparableError(f"{path} on {count(processes, 'rank')}: " + "\n".join(filter(None, reasons)))
        return folder

    def _serve(self, ranks: list[Path], first: Path, batches: list[list[Batch]]) -> None:
        """Plan how one process gets what the ranks got, from what it takes itself for its first two steps."""
        own = count_by_source([*read(first / "batches"), *read(first / "draws")])
        got = zip(batches, read_ranks(ranks, "draws"), strict=True)
        theirs = [count_by_source([*taken, *drawn]) for taken, drawn in got]
        pairs = pair_sources(own, list(theirs[0]))
        one_by_one = []
        for mine, source in pairs.items():
            step = min(own[mine][1], 1)  # the second if it takes any, for the first may fetch ahead
            numbers = [each[source][step] for each in theirs if source in each]
            if numbers[0] < own[mine][step] == sum(numbers):
                one_by_one.append(source)
        merged = {}
        for mine, source in pairs.items():  # a batch that is drawn before the loop, at another line
            going_on = [other for other in one_by_one if other.partition(";")[0] == source.partition(";")[0]]
            if going_on and own[mine] == theirs[0][source] == Counter({0: 1}):
                pairs[mine] = merged[source] = going_on[0]
        for mine, source in pairs.items():  # what ranks go on with, after a look at a batch of another loader
            if own[mine][1] and not theirs[0][source][1]:
                free = (other for other in theirs[0] if other not in (*pairs.values(), *merged))
                going_on = [other for other in free if other.split()[0] == source.split()[0] and theirs[0][other][1]]
                merged |= dict.fromkeys(going_on[:1], source)
        is_per_rank = not self._args.reference and not one_by_one and rows_of(first) == rows_of(ranks[0])
        times = len(ranks) if is_per_rank else 1
        self._plan = {"pairs": pairs, "merged": merged, "one_by_one": tuple(one_by_one), "times": times}

    def _compare_inputs(self, ranks: list[Path], first: Path, batches: list[list[Batch]]) -> Difference | None:
        """Look if ranks train on the same samples, other parameters, or another number than the reference."""
        facts = self._facts["ranks"]
        calls = chain.from_iterable(step.calls for row in facts.steps for step in row[:1])
        where = next((call.where[0] for call in calls if call.where), None)
        loaded = [[batch.samples for batch in own] for own in batches]
        same = "samples" if all_equal(loaded) else "random numbers"
        for row in facts.steps:
            inputs = [[call.input for call in step.calls] for step in row]
            if any(inputs[0]) and all_equal(inputs):
                return Difference(row[0].number, "samples", f"{facts.who} train on the same {same}", "", where)
        for source in dict.fromkeys(batch.source for batch in batches[0] if batch.step):
            taken = [[batch.samples for batch in own if batch.source == source and batch.step] for own in batches]
            if len(taken[0]) > 1 and all_equal(taken):
                evidence = f"{facts.who} train on the same samples of one loader, {source.rpartition(', ')[2]}"
                return Difference(2, "samples", evidence, "", where)
        *starts, one = [start for folder in (*ranks, first) for start, _ in read(folder / "start")] or [{}]
        for rank, start in enumerate(starts):
            if not pair(start, one):
                evidence = f"rank {rank} trains {_size_of(start)}, one process {_size_of(one)}"
                return Difference(1, "parameters", evidence, "", None)
        mine = sum(rows_of(folder) for folder in ranks)
        one = rows_of(first)
        if not self._args.reference or mine == one or not one or not mine:
            return None
        return Difference(1, "samples", f"the ranks train {mine} samples in a step, one process {one}", "", where)

    def _why_not(self, ranks: list[Path], difference: Difference) -> str:
        """Return why a difference may come from the inputs, "" if it does not."""
        if difference.thing == "samples":
            return ""
        rows = list(zip(*(batches_in(folder) for folder in ranks), strict=False))
        draws = any((folder / "draws").exists() for folder in ranks)
        if not rows and not draws:
            return "the script trains from no DataLoader, so that one process may get other samples"
        for row in rows:
            if row[0].drew and any(batch.generators[:2] != row[0].generators[:2] for batch in row):
                return "the loop draws random numbers by Python or NumPy, other ones on each rank"
        return ""

    def _run_alone(self, rank: int) -> Path:
        """Let one process make a step from the samples of one rank."""
        name = f"alone-{rank}"
        return self._run(name, ranks=[self._folder / "ranks" / f"{rank}"], steps=1) / "0"


def _size_of(start: Tensors) -> str:
    return f"{count(len(start), 'parameter')} of {sum(p.numel() for p in start.values())} numbers"


# Print what was found, for people, for programs, or for GitHub.


def render(args: argparse.Namespace, found: Difference | None, comparison: Comparison) -> str:
    """Write the report for a terminal."""
    title = f"ddpkit parity: {args.script} on {count(args.ranks, 'rank')} and {args.reference or 'itself'} on one"
    steps = max(comparison.steps, found.step if found else 0)
    parts = [title, *([ON_THE_CPU] if comparison.uses_cuda else []), count(steps, "optimizer step")]
    lines = [paint(", ".join(parts), "bold"), ""]
    if found:
        where = f"  {found.where}" if found.where else ""
        lines.append(paint(f"different at step {found.step}: {WORDS.get(found.thing, found.thing)}{where}", "red"))
        lines += [f"    {text}" for text in wrap([found.evidence, *filter(None, [found.cause])], 4)]
        return "\n".join(lines)
    rows = []
    for thing, distances in comparison.distances.items():
        rows.append([WORDS[thing], *(f"{distance:.0e}" for distance in distances)])
    lines += table(["in parts of their size", "largest difference", "rounding"], rows)
    off = [name for name in ("dropout", "batch norm") if name not in (args.keep or ())]
    lines.append(f"printed: {count(comparison.numbers, 'number')} equal" if comparison.numbers else "printed: nothing")
    rest = [f"{joined(off)}, switched off"] if off else []
    rest += ["what follows the last of these steps and its evaluation"] if comparison.is_cut else []
    unsteady = list(dict.fromkeys(comparison.unsteady))
    rest += [f"{joined(unsteady)}, which rounding or the order of rows changes"] if unsteady else []
    if comparison.unpaired:
        rest.append(f"{count(comparison.unpaired, 'printed line')}, which one process prints after another step")
    if rest:
        lines.append("\n    ".join(wrap([f"not compared: {'; '.join(rest)}"], 4)))
    return "\n".join([*lines, "", paint("equal", "green")])


def as_json(args: argparse.Namespace, found: Difference | None, comparison: Comparison) -> str:
    """Write the report as one JSON object."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "script": args.script,
        "ranks": args.ranks,
        "steps": comparison.steps,
        "distances": comparison.distances,
        "numbers": comparison.numbers,
        "unpaired": comparison.unpaired,
        "difference": None,
    }
    if found:
        where = found.where and found.where.as_json()
        report["difference"] = found._asdict() | {"where": where}
    return json.dumps(report, indent=2)


def run(args: argparse.Namespace) -> int:
    """Compare a script on ranks with one process, and print what was found.

    Returns:
        The exit code: 0 if they are equal, 1 if they differ, 2 if they could not be compared.
    """
    prepare(args)
    if args.reference and not os.path.isfile(args.reference):
        raise UnfitScriptError(f"{args.reference}: there is no such file.")
    with tempfile.TemporaryDirectory(prefix="ddpkit-parity-") as folder:
        found, comparison = Runs(args, Path(folder)).compare()
    if args.json:
        print(as_json(args, found, comparison))
    else:
        show(render(args, found, comparison))
    if args.github and found and found.where:
        annotate("error", f"{found.evidence}. {found.cause}", **found.where.as_json())
    return int(found is not None)
