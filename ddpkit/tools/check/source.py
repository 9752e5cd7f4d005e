"""Read the source of the script: which line a call comes from, what is around it, and what its expressions hold."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from inspect import CO_GENERATOR
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker

_DDPKIT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_FOLDERS = (sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__), _DDPKIT)
_FOREIGN = tuple(os.path.realpath(folder) + os.sep for folder in _FOLDERS)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_RUNNERS = (os.path.join(os.path.dirname(__file__), "__init__.py"), worker.__file__)  # of the script, and of datasets
_DEEPEST = 8  # lines of a stack that are recorded
_OF_RANK = ("rank", "is_main", "master", "is_local_main", "process_index", "is_global_zero")
_OF_RANKS = ("world", "ranks", "num_processes", "nproc", "gpus", "replicas")  # in names of the number of ranks


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
    return not os.path.realpath(file).startswith(_FOREIGN)


def is_own_object(value: Any) -> bool:
    """Return whether a value is an object of a class that the script defines."""
    if not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    return is_own(getattr(module, "__file__", None) or "<unknown>")


def own_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the script's own functions, the innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _RUNNERS:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place_of(frame: FrameType) -> Place:
    """Return the line that a frame is at."""
    return Place(os.path.abspath(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def stack() -> Stack:
    """List the script's lines that led to this call, the nearest first."""
    return [place_of(frame) for frame in islice(own_frames(sys._getframe(1)), _DEEPEST)]


def raised_at(error: BaseException | None) -> Stack:
    """List the script's lines that led to an error, the nearest first."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    lines = [Place(os.path.abspath(f.f_code.co_filename), number, f.f_code.co_name) for f, number in frames]
    return [line for line in reversed(lines) if is_own(line.file)]


def definition(function: Any) -> list[Place]:
    """Return where a function of the script is defined, [] if it is not the script's."""
    code = getattr(function, "__code__", None)
    if code is None or not is_own(code.co_filename):
        return []
    return [Place(os.path.abspath(code.co_filename), code.co_firstlineno, code.co_name)]


# Find what is around a line: loops, and conditions that ask for the rank.

Loop = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.expr_context)
_BLOCKS = (*_FUNCTIONS, ast.For, ast.While, ast.If, ast.With)


@cache
def _text_of(file: str) -> str:
    try:
        with open(file, errors="replace") as source:
            return source.read()
    except OSError:
        return ""


@cache
def _syntax_of(file: str) -> ast.Module:
    """Parse a file, an empty one if it cannot be read."""
    try:
        return ast.parse(_text_of(file))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _enclosing(file: str, line: int) -> list[ast.stmt]:
    """List the statements that a line is in, the outermost first."""
    statements = [node for node in ast.walk(_syntax_of(file)) if isinstance(node, ast.stmt)]
    return sorted((node for node in statements if is_inside(node, line)), key=lambda node: node.lineno)


def is_inside(statement: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a line belongs to a statement."""
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def loops_around(file: str, line: int) -> list[Loop]:
    """List the loops around a line in its function, the outermost first."""
    loops: list[Loop] = []
    for statement in _enclosing(file, line):
        if isinstance(statement, _FUNCTIONS):
            loops = []
        elif isinstance(statement, Loop):
            loops.append(statement)
    return loops


def rank_condition(place: Place) -> Place | None:
    """Return the `if` around a line, in its function, that asks for the rank."""
    for statement in reversed(_enclosing(place.file, place.line)):
        if isinstance(statement, _FUNCTIONS):
            return None
        if isinstance(statement, ast.If) and _asks_for_rank(statement.test):
            return place._replace(line=statement.lineno)
    return None


def _asks_for_rank(test: ast.expr) -> bool:
    text = ast.unparse(test).lower()
    return any(word in text for word in _OF_RANK)


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def is_shared_out(place: Place) -> bool:
    """Return whether what a line assigns is sliced by rank, on that line or later in its function."""
    around = _enclosing(place.file, place.line)
    if not around or isinstance(around[-1], _BLOCKS):
        return False
    functions = [statement for statement in around if isinstance(statement, ast.FunctionDef)]
    nodes = list(ast.walk(functions[-1] if functions else _syntax_of(place.file)))
    of_rank: set[str] = set()
    drawn: set[str] = set()
    slices = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            names = {name for target in node.targets for name in _names_in(target)}
            if _asks_for_rank(node.value) or _names_in(node.value) & of_rank:
                of_rank |= names
            if node is around[-1]:
                drawn = names
    for node in nodes:
        if isinstance(node, ast.Subscript) and (_asks_for_rank(node.slice) or _names_in(node.slice) & of_rank):
            slices.append(node)
    return any(is_inside(around[-1], node.lineno) or _names_in(node.value) & drawn for node in slices)


def leaving_condition(loop: Loop) -> int | None:
    """Return the line of the condition on which a loop is left early, None if there is none.

    An `if` that one rank alone comes to goes before others, and these before the condition of a `while`.
    """
    ways = list(_ways_out(loop.body, []))
    for ifs in ways:
        if any(_asks_for_rank(statement.test) for statement in ifs):
            return ifs[-1].lineno
    if ways:
        return ways[0][-1].lineno
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        return loop.lineno
    return None


def _ways_out(statements: list[ast.stmt], around: list[ast.If], breaks: bool = True) -> Iterator[list[ast.If]]:
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
            yield from _ways_out(getattr(statement, name, []), inner, is_whole)


def skipping_lines(stack: Stack) -> list[Place]:
    """List the `if`s by which the innermost running loop leaves out a batch."""
    for place in stack:
        for loop in reversed(loops_around(place.file, place.line)):
            ifs = [node for node in ast.walk(loop) if isinstance(node, ast.If)]
            skipping = [node for node in ifs if any(isinstance(part, ast.Continue) for part in node.body)]
            return [place._replace(line=node.lineno) for node in skipping]
    return []


def setting_lines(stack: Stack, key: str) -> Stack:
    """List the lines of the files of a stack that assign to a key of a dict."""
    found = []
    for file in dict.fromkeys(place.file for place in stack):
        for node in ast.walk(_syntax_of(file)):
            keys = [t.slice for t in getattr(node, "targets", []) if isinstance(t, ast.Subscript)]
            if any(isinstance(k, ast.Constant) and k.value == key for k in keys):
                found.append(Place(file, node.lineno, ""))  # type: ignore[attr-defined]
    return found


def calls_method(place: Place, method: str) -> bool:
    """Return whether the file of a line calls a method of what that line assigns."""
    assigned = [node for node in _enclosing(place.file, place.line) if isinstance(node, ast.Assign)]
    names = {ast.unparse(target).rpartition(".")[2] for node in assigned for target in node.targets}
    calls = [ast.unparse(node.func) for node in ast.walk(_syntax_of(place.file)) if isinstance(node, ast.Call)]
    return any(f".{call}".endswith(f".{name}.{method}") for name in names for call in calls)


# Look for divisions by the number of ranks.


def _called(node: ast.AST) -> str:
    """Return the name of the function or method that a call is of, "" for anything else."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


@cache
def _nodes_of(code: CodeType) -> list[ast.AST]:
    """List the nodes of a function, or those of a file outside of any."""
    tree = _syntax_of(code.co_filename)
    if code.co_name == "<module>":
        body = [s for s in tree.body if not isinstance(s, ast.FunctionDef | ast.ClassDef)]
        return [node for statement in body for node in ast.walk(statement)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if code.co_firstlineno in range(node.lineno - len(node.decorator_list), node.body[0].lineno + 1):
            return list(ast.walk(node))
    return []


@cache
def _divides_by_ranks(code: CodeType) -> bool:
    for node in _nodes_of(code):
        divisor: ast.AST | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.value
        elif isinstance(node, ast.Call) and _called(node) in ("div", "div_") and node.args:
            divisor = node.args[0]
        if divisor is not None and _holds_ranks(divisor, code.co_filename):
            return True
    return False


@cache
def scales_by_ranks(file: str) -> bool:
    """Return whether a file multiplies or divides by the number of ranks, or takes a mean over them."""
    for node in ast.walk(_syntax_of(file)):
        text = ast.unparse(node) if isinstance(node, ast.Call) else ""
        if "mean" in text and ("reduce" in text or "gather" in text):
            return True
        if isinstance(getattr(node, "op", None), ast.Mult | ast.Div) and _holds_ranks(node, file):
            return True
    return False


def _holds_ranks(node: ast.AST, file: str) -> bool:
    """Return whether an expression has the number of ranks in it, also by a variable of its file."""
    names = {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}
    return _names_ranks(node) or bool(names & _numbers_of_ranks(file))


@cache
def _numbers_of_ranks(file: str) -> set[str]:
    """Name what a file assigns the result of a call for the number of ranks, such as `get_world_size()`."""
    found = set()
    for node in ast.walk(_syntax_of(file)):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            found |= {ast.unparse(name) for name, value in pairs if isinstance(value, ast.Call) and _names_ranks(value)}
    return found


def _names_ranks(divisor: ast.AST) -> bool:
    """Return whether an expression has the number of ranks in it, by the names of variables, fields and functions."""
    text = ast.unparse(divisor).lower()
    return any(word in text for word in _OF_RANKS)


def divides_by_ranks(depth: int = 2) -> bool:
    """Return whether one of the innermost functions divides by the number of ranks."""
    return any(_divides_by_ranks(frame.f_code) for frame in islice(own_frames(sys._getframe(1)), depth))


def is_bounded() -> bool:
    """Return whether the loop that asks for a loader's batches ends after a number of rounds of its own."""
    for frame in own_frames(sys._getframe(1)):
        for loop in loops_around(frame.f_code.co_filename, frame.f_lineno):
            if isinstance(loop, ast.For) and is_inside(loop.iter, frame.f_lineno):
                return _counts_rounds(loop)
        if not frame.f_code.co_flags & CO_GENERATOR:
            return False
    return False


def rounds_around() -> int | None:
    """Return how often the loops run in which a loader's batches are asked for; None if that is not known."""
    rounds = None
    for frame in own_frames(sys._getframe(1)):
        for loop in loops_around(frame.f_code.co_filename, frame.f_lineno):
            if isinstance(loop, ast.While):
                return None
            if is_inside(loop.iter, frame.f_lineno):  # the loop over the loader
                continue
            ranges = [node for node in ast.walk(loop.iter) if _called(node) == "range"]
            parts = [part for part in ast.walk(ranges[0]) if part is not ranges[0]] if ranges else []
            if not parts or not all(isinstance(part, _PLAIN) for part in parts):
                return None
            try:
                rounds = (rounds or 1) * len(eval(ast.unparse(ranges[0]), frame.f_globals, dict(frame.f_locals)))
            except Exception:  # outside of its class a private name has another one
                return None
    return rounds


def _counts_rounds(loop: ast.For) -> bool:
    """Find `zip(range(n), loader)`, `islice(loader, n)`, and `if i == n: break` within the loop."""
    if any(_called(node) in ("range", "islice") for node in ast.walk(loop.iter)):
        return True
    counters = _names_in(loop.target)
    for statement in ast.walk(loop):
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare):
            is_break = any(isinstance(part, ast.Break) for part in statement.body)
            if is_break and _names_in(statement.test.left) & counters:
                return True
    return False


def awaits_stop_iteration() -> bool:
    """Return whether the script is prepared for the end of what it reads now: by a loop, or because it names it."""
    frames = list(own_frames(sys._getframe(1)))
    if not frames or any("StopIteration" in _text_of(frame.f_code.co_filename) for frame in frames):
        return True
    nodes = ast.walk(_syntax_of(frames[0].f_code.co_filename))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == "next"]
    return not any(len(call.args) == 1 and is_inside(call, frames[0].f_lineno) for call in calls)  # no default
