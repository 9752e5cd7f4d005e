"""Tell which line of the script a call comes from."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch

_DDPKIT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_FOLDERS = (sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__), _DDPKIT)
_FOREIGN = tuple(os.path.realpath(folder) + os.sep for folder in _FOLDERS)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_RUNNER = os.path.join(os.path.dirname(__file__), "rank.py")  # runs the script; what is beyond it is the command line's
_DEEPEST = 8  # lines of a stack that are recorded


class Place(NamedTuple):
    """A line of the script.

    Attributes:
        file: Its absolute path.
        line: The number of the line.
        function: The name of the function that it is in, "<module>" outside of any.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.shown}:{self.line}"

    @property
    def shown(self) -> str:
        """Shorten the path where it is below the working directory."""
        near = os.path.relpath(self.file)
        return self.file if near.startswith(os.pardir) else near


Stack = list[Place]  # the nearest line first


@cache
def is_own(file: str) -> bool:
    """Return whether a file is the script's, not one of Python, an installed package or ddpkit."""
    if file.startswith("<") or any(part in file for part in _PACKAGES):
        return False
    path = os.path.realpath(file)
    return not path.startswith(_FOREIGN) and not path.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    """List the folders of the module path into which packages were installed."""
    found = []
    for folder in filter(os.path.isdir, sys.path):
        if any(name.endswith(".dist-info") for name in os.listdir(folder)):
            found.append(os.path.realpath(folder) + os.sep)
    return tuple(found)


def own_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the script's own functions, the innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _RUNNER:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place_of(frame: FrameType) -> Place:
    """Return the line that a frame is at."""
    return Place(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def stack() -> Stack:
    """List the script's lines that led to this call, the nearest first."""
    places = []
    for frame in own_frames(sys._getframe(1)):
        places.append(place_of(frame))
        if len(places) == _DEEPEST:
            break
    return places


@cache
def syntax_of(file: str) -> ast.Module:
    """Parse a file, an empty one if it cannot be read."""
    try:
        with open(file, "rb") as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def enclosing(file: str, line: int) -> list[ast.AST]:
    """List the statements that a line is in, the outermost first."""
    found = []
    for node in ast.walk(syntax_of(file)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found.append(node)
    return sorted(found, key=_first_line)


def own_files() -> list[str]:
    """List the script's files that are loaded."""
    return _own_files(len(sys.modules))


@lru_cache(maxsize=1)
def _own_files(modules: int) -> list[str]:
    """List them anew when there are more modules than before: it takes a millisecond."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [file for file in files if isinstance(file, str) and is_own(file) and os.path.isfile(file)]


def rank_condition(place: Place) -> Place | None:
    """Return the `if` around a line, in its function, that asks for the rank."""
    for statement in reversed(enclosing(place.file, place.line)):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        if isinstance(statement, ast.If) and asks_for_rank(statement.test):
            return place._replace(line=statement.lineno)
    return None


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def asks_for_rank(test: ast.expr) -> bool:
    """Return whether an expression asks which rank this is."""
    text = ast.unparse(test).lower()
    return any(
        word in text for word in ("rank", "is_main", "master", "is_local_main", "process_index", "is_global_zero")
    )


def is_shared_out(place: Place) -> bool:
    """Return whether what a line assigns is sliced by rank, on that line or later in its function."""
    line = [s for s in enclosing(place.file, place.line) if not isinstance(s, ast.FunctionDef | ast.ClassDef)][-1:]
    function = [s for s in enclosing(place.file, place.line) if isinstance(s, ast.FunctionDef)][-1:]
    body = function[0] if function else syntax_of(place.file)
    if not line or isinstance(line[0], ast.For | ast.While | ast.If | ast.With):
        return False
    of_rank = _names_made_of_rank(body)
    slices = [node for node in ast.walk(body) if isinstance(node, ast.Subscript)]
    drawn = _assigned(line[0])
    for node in slices:
        is_here = node in list(ast.walk(line[0])) or bool(_names_in(node.value) & drawn)
        if is_here and (asks_for_rank(node.slice) or _names_in(node.slice) & of_rank):
            return True
    return False


def _names_made_of_rank(body: ast.AST) -> set[str]:
    """Name the variables of a function that are computed from the rank."""
    found: set[str] = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and (asks_for_rank(node.value) or _names_in(node.value) & found):
            found |= _assigned(node)
    return found


def _assigned(statement: ast.AST) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {name for target in targets for name in _names_in(target)}


def definition(function: Any) -> list[Place]:
    """Return where a function of the script is defined, [] if it is not the script's."""
    code = getattr(function, "__code__", None)
    if code is None or not is_own(code.co_filename):
        return []
    return [Place(os.path.abspath(code.co_filename), code.co_firstlineno, code.co_name)]


def _first_line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


# Find the loops of the script, and what ends them.

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
