"""Plays all cases and makes the tables of docs/guide/faults.md."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from pathlib import Path

from .cases import CONFLICTS, FAULTS, PLACES, PLAIN, TORCHRUN, Fault
from .playing import Case, Outcome, Pair, play_all, why_not

GUIDE = Path(__file__).parents[2] / "docs/guide/faults.md"
MARK, END = "<!-- {}: made by python -m tests.faults -->", "<!-- until here -->"
Outcomes = dict[Pair, list[Outcome]]


def pairs_of(case: Case) -> list[Pair]:
    """A case with each launcher that it is played under."""
    if isinstance(case, Fault):
        return [(case, launcher) for launcher in case.launchers]
    return [(case, TORCHRUN if case.torchrun is not None else PLAIN)]


PAIRS = [pair for case in (*FAULTS, *CONFLICTS) for pair in pairs_of(case)]


def name_of(pair: Pair) -> str:
    case, launcher = pair
    place = f", the others {PLACES[case.place]}" if isinstance(case, Fault) else ""
    return f"{case.what}{place} ({launcher})"


def tables(outcomes: Outcomes) -> dict[str, str]:
    """The tables of faults and of conflicts, as Markdown; a cell that was not measured is "–"."""
    faults = ["| one rank | the others are | they know after (s) |", "|---|---|---|"]
    for fault in FAULTS:
        many = [one for key, some in outcomes.items() if key[0] is fault for one in some]
        place = PLACES[fault.place] + (", on another node" if fault.nodes else "")
        faults.append(f"| {fault.what} | {place} | {_seconds(many)} |")
    conflicts = ["| what does not fit | every process ends after (s) |", "|---|---|"]
    for conflict in CONFLICTS:
        many = [one for key, many in outcomes.items() if key[0] is conflict for one in many]
        cell = "runs: this is allowed" if conflict.passes else _seconds(many)
        conflicts.append(f"| {conflict.what} | {cell} |")
    return {"faults": "\n".join(faults), "conflicts": "\n".join(conflicts)}


def shown(name: str) -> tuple[str, str, str]:
    """The guide before, in and after one of its tables."""
    before, mark, rest = GUIDE.read_text().partition(MARK.format(name))
    table, end, after = rest.partition(END)
    return before + mark, table, end + after


def _seconds(outcomes: list[Outcome]) -> str:
    return f"{max(outcome.seconds for outcome in outcomes):.1f}" if outcomes else "–"


def main() -> None:
    """Plays the cases, prints the tables, and says what was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; more than 1 makes the times worse")
    parser.add_argument("--rounds", type=int, default=1, help="times that each is played; the slowest counts")
    parser.add_argument("--only", default="", help="only the cases whose name this regular expression finds")
    parser.add_argument("--write", action="store_true", help="put the tables into the guide")
    args = parser.parse_args()
    outcomes: Outcomes = {}
    pairs = [pair for pair in PAIRS if re.search(args.only, name_of(pair))]
    bad = 0

    def done(pair: Pair, outcome: Outcome) -> None:
        nonlocal bad
        late = outcome.seconds > pair[0].limit or math.isnan(outcome.seconds)
        problems = outcome.problems + [f"this took longer than {pair[0].limit:.0f} s"] * late
        outcomes.setdefault(pair, []).append(outcome)
        bad += bool(problems)
        print(f"{outcome.seconds:6.1f} s  {name_of(pair)}", *problems, sep="\n          ! ", flush=True)

    for pair in pairs:
        if reason := why_not(pair[0]):
            print(f"  skipped  {name_of(pair)}: {reason}")
    with tempfile.TemporaryDirectory(prefix="ddpkit-faults-") as folder:
        for number in range(args.rounds):
            place = Path(folder, str(number))
            place.mkdir()
            play_all([pair for pair in pairs if not why_not(pair[0])], place, args.jobs, done)
    for name, table in tables(outcomes).items():
        print(f"\n{table}")
        if args.write:
            before, _, after = shown(name)
            GUIDE.write_text(f"{before}\n\n{table}\n\n{after}")
    print(f"\n{bad} of {sum(map(len, outcomes.values()))} not as they should be")
    raise SystemExit(bool(bad))
