"""Find the loops of the script, and what ends them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .places import asks_for_rank, enclosing

Loop = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def loops_around(file: str, line: int) -> list[Loop]:
    """List the loops around a line in its function, the outermost first."""
    loops: list[Loop] = []
    for statement in enclosing(file, line):
        if isinstance(statement, _FUNCTIONS):
            loops = []
        elif isinstance(statement, Loop):
            loops.append(statement)
    return loops


def is_inside(loop: Loop, line: int) -> bool:
    """Return whether a line belongs to a loop."""
    return loop.lineno <= line <= (loop.end_lineno or loop.lineno)


def leaving_condition(loop: Loop) -> int | None:
    """Return the line of the condition on which a loop is left early, None if there is none.

    An `if` that one rank alone comes to goes before others, and these before the condition of a `while`.
    """
    conditions = sorted(_conditions(loop.body, []), key=_is_for_all)
    if conditions:
        return conditions[0][-1].lineno
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        return loop.lineno
    return None


def _is_for_all(around: list[ast.If]) -> bool:
    return not any(asks_for_rank(statement.test) for statement in around)


def _conditions(statements: list[ast.stmt], around: list[ast.If], breaks: bool = True) -> Iterator[list[ast.If]]:
    """Yield for each way out of a loop the `if`s around it; in a loop inside of that, `break` is none."""
    for statement in statements:
        if isinstance(statement, _FUNCTIONS):
            continue
        leaves = isinstance(statement, ast.Return) or (breaks and isinstance(statement, ast.Break))
        if leaves and around:
            yield around
        inner = [*around, statement] if isinstance(statement, ast.If) else around
        for name in ("body", "orelse", "finalbody"):
            is_whole = breaks and not isinstance(statement, Loop)
            yield from _conditions(getattr(statement, name, []), inner, is_whole)
