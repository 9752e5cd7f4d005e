"""Read the source of the script: which line a call comes from, what is around it, and what its expressions hold."""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import tokenize
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from inspect import CO_GENERATOR
from io import StringIO
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data._utils import worker

_CHECK = os.path.dirname(__file__)
_DDPKIT = os.path.dirname(os.path.dirname(_CHECK))
_FOLDERS = (sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__), _DDPKIT)
_FOREIGN = tuple(os.path.realpath(folder) + os.sep for folder in _FOLDERS)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_RUNNERS = (os.path.join(_CHECK, "__init__.py"), worker.__file__)  # of the script, and of datasets
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

    def as_json(self) -> dict[str, Any]:
        """Return the file and the line, for JSON and for annotations."""
        return {"file": self.shown, "line": self.line}

    def shares_function_with(self, other: Place) -> bool:
        """Return whether two lines are in one function."""
        return (self.file, self.function) == (other.file, other.function)


Stack = list[Place]  # the nearest line first


@cache
def is_own(file: str) -> bool:
    """Return whether a file is the script's, not one of Python, an installed package or ddpkit."""
    if file.startswith("<") or any(part in file for part in _PACKAGES):
        return False
    return not os.path.realpath(file).startswith(_FOREIGN)


def is_own_object(value: Any) -> bool:
    """Return whether a value is an object of a class that the script defines."""
    return hasattr(value, "__dict__") and _is_own_class(type(value))


def _is_own_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_own(getattr(module, "__file__", None) or "<unknown>")


def known_to(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class of the script holds, the globals that its methods use, and the rank if they ask for it."""
    for name, value in [item for part in kind.__mro__ if _is_own_class(part) for item in vars(part).items()]:
        code = getattr(value, "__code__", None)
        if code is None:
            yield name, value
            continue
        scope = value.__globals__
        yield from ((used, scope[used]) for used in code.co_names if used in scope)
        if name != "__init__" and any(word in used.lower() for used in code.co_names for word in _OF_RANK):
            yield name, os.environ.get("RANK")


def own_frames() -> Iterator[FrameType]:
    """Yield the frames of the script's own functions, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _RUNNERS:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def place_of(frame: FrameType) -> Place:
    """Return the line that a frame is at."""
    return _place(frame.f_code, frame.f_lineno)


def _place(code: CodeType, line: int) -> Place:
    return Place(os.path.abspath(code.co_filename), line, code.co_name)


def stack(depth: int = _DEEPEST) -> Stack:
    """List the script's lines that led to this call, the nearest first."""
    return [place_of(frame) for frame in islice(own_frames(), depth)]


def raised_at(error: BaseException | None) -> Stack:
    """List the script's lines that led to an error, the nearest first."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    lines = [_place(frame.f_code, line) for frame, line in frames]
    return [line for line in reversed(lines) if is_own(line.file)]


def definition(function: Any) -> Stack:
    """Return where a function of the script is defined, [] if it is not the script's."""
    code = getattr(function, "__code__", None)
    if code is None or not is_own(code.co_filename):
        return []
    return [_place(code, code.co_firstlineno)]


# Find the comments at a line that accept findings.

_ACCEPT = re.compile(r"# *ddpkit: *accept +([\w-]+(?: *, *[\w-]+)*)")


@cache
def accepted_in(file: str) -> dict[int, set[str]]:
    """Return the kinds of findings that comments accept, by line: those within its statement, or right above it."""
    accepted: dict[int, set[str]] = {}
    kinds: set[str] = set()  # one for all lines of a statement
    with suppress(tokenize.TokenError, SyntaxError):  # of a file that is not Python's, such as a template
        for token in tokenize.generate_tokens(StringIO(_text_of(file)).readline):
            accepted[token.start[0]] = kinds
            if token.type == tokenize.COMMENT and (found := _ACCEPT.search(token.string)):
                kinds.update(re.split(" *, *", found[1]))
            if token.type == tokenize.NEWLINE:
                kinds = set()
    return accepted


# Find what is around a line: loops, and conditions that ask for the rank.

Loop = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.expr_context)
_BLOCKS = (*_FUNCTIONS, ast.For, ast.While, ast.If, ast.With)
_Node = TypeVar("_Node", bound=ast.AST)


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


def _nodes(tree: ast.AST, kind: type[_Node]) -> list[_Node]:
    """List the nodes of one kind in a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _mentions(node: ast.AST, words: Sequence[str]) -> bool:
    """Return whether an expression has one of some words in it, also as a part of a name."""
    text = ast.unparse(node).lower()
    return any(word in text for word in words)


def _names_in(node: ast.AST) -> set[str]:
    return {name.id for name in _nodes(node, ast.Name)}


def is_inside(statement: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a line belongs to a statement."""
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


@cache
def _enclosing(place: Place) -> list[ast.stmt]:
    """List the statements that a line is in, the outermost first."""
    statements = _nodes(_syntax_of(place.file), ast.stmt)
    around = [node for node in statements if is_inside(node, place.line)]
    return sorted(around, key=lambda node: node.lineno)


def _around(place: Place) -> list[ast.stmt]:
    """List the statements in its function that a line is in, the outermost first."""
    found: list[ast.stmt] = []
    for statement in _enclosing(place):
        found.append(statement)
        if isinstance(statement, _FUNCTIONS):
            found = []
    return found


def loops_around(place: Place) -> list[Loop]:
    """List the loops around a line in its function, the outermost first."""
    return [statement for statement in _around(place) if isinstance(statement, Loop)]


def rank_condition(place: Place) -> Place | None:
    """Return the `if` around a line, in its function, that asks for the rank."""
    for statement in reversed(_around(place)):
        if isinstance(statement, ast.If) and _mentions(statement.test, _OF_RANK):
            return place._replace(line=statement.lineno)
    return None


def is_shared_out(place: Place) -> bool:
    """Return whether what a line assigns is sliced by rank, on that line or later in its function."""
    around = _enclosing(place)
    if not around or isinstance(around[-1], _BLOCKS):
        return False
    functions = [statement for statement in around if isinstance(statement, ast.FunctionDef)]
    tree = functions[-1] if functions else _syntax_of(place.file)
    of_rank: set[str] = set()
    drawn: set[str] = set()
    for node in _nodes(tree, ast.Assign):
        names = set().union(*map(_names_in, node.targets))
        if _is_of_rank(node.value, of_rank):
            of_rank |= names
        if node is around[-1]:
            drawn = names
    for part in _nodes(tree, ast.Subscript):
        is_drawn = is_inside(around[-1], part.lineno) or _names_in(part.value) & drawn
        if is_drawn and _is_of_rank(part.slice, of_rank):
            return True
    return False


def _is_of_rank(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression asks for the rank, or has a variable in it that does."""
    return _mentions(node, _OF_RANK) or bool(_names_in(node) & names)


def leaving_condition(loop: Loop) -> int | None:
    """Return the line of the condition on which a loop is left early, None if there is none.

    An `if` that one rank alone comes to goes before others, and these before the condition of a `while`.
    """
    ways = list(_ways_out(loop.body, []))
    for ifs in ways:
        if any(_mentions(statement.test, _OF_RANK) for statement in ifs):
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
        kinds = (ast.Return, ast.Break) if breaks else ast.Return
        if around and isinstance(statement, kinds):
            yield around
        inner = [*around, statement] if isinstance(statement, ast.If) else around
        is_whole = breaks and not isinstance(statement, Loop)
        for name in ("body", "orelse", "finalbody"):
            yield from _ways_out(getattr(statement, name, []), inner, is_whole)


def skipping_lines(stack: Stack) -> Stack:
    """List the `if`s by which the innermost running loop leaves out a batch."""
    for place in stack:
        for loop in reversed(loops_around(place)):
            ifs = [node for node in _nodes(loop, ast.If) if _has(node.body, ast.Continue)]
            return [place._replace(line=node.lineno) for node in ifs]
    return []


def _has(statements: list[ast.stmt], kind: type[ast.stmt]) -> bool:
    return any(isinstance(statement, kind) for statement in statements)


def setting_lines(stack: Stack, key: str) -> Stack:
    """List the lines of the files of a stack that assign to a key of a dict."""
    found = []
    for file in dict.fromkeys(place.file for place in stack):
        for node in _nodes(_syntax_of(file), ast.Assign):
            slices = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
            if any(isinstance(each, ast.Constant) and each.value == key for each in slices):
                found.append(Place(file, node.lineno, ""))
    return found


def is_stepped(place: Place) -> bool:
    """Return whether the script calls `step` of the schedule that a line makes; another file may name it otherwise."""
    targets = [target for node in _enclosing(place) for target in getattr(node, "targets", [])]
    names = {ast.unparse(target).rpartition(".")[2] for target in targets}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    others = [file for file in files if file and file != place.file and is_own(file)]
    elsewhere = set().union(*map(_stepped, others))
    is_there = any("sched" in name.lower() for name in elsewhere)
    return is_there or not names.isdisjoint(elsewhere | _stepped(place.file))


@cache
def _stepped(file: str) -> set[str]:
    """Name the objects whose `step` a file calls."""
    return set(re.findall(r"(\w+)\.step\(", ast.unparse(_syntax_of(file))))


# Look for divisions by the number of ranks.


def _called(node: ast.AST) -> str:
    """Return the name of the function or method that a call is of, "" for anything else."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def divides_by_ranks(depth: int = 2) -> bool:
    """Return whether one of the innermost functions divides by the number of ranks."""
    return any(_divides_by_ranks(frame.f_code) for frame in islice(own_frames(), depth))


@cache
def _divides_by_ranks(code: CodeType) -> bool:
    divisors = [divisor for node in _nodes_of(code) for divisor in _divisors(node)]
    return any(_holds_ranks(divisor, code.co_filename) for divisor in divisors)


def _nodes_of(code: CodeType) -> list[ast.AST]:
    """List the nodes of a function, or those of a file outside of any."""
    tree = _syntax_of(code.co_filename)
    if code.co_name == "<module>":
        body = [each for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
        return [node for statement in body for node in ast.walk(statement)]
    for function in _nodes(tree, ast.FunctionDef):
        begin = function.lineno - len(function.decorator_list)
        is_there = begin <= code.co_firstlineno <= function.body[0].lineno
        if is_there and function.name == code.co_name:
            return list(ast.walk(function))
    return []


def _divisors(node: ast.AST) -> list[ast.expr]:
    """List what a node divides by, [] if it is no division."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [node.right]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return [node.value]
    if isinstance(node, ast.Call) and _called(node) in ("div", "div_"):
        return node.args[:1]
    return []


@cache
def scales_by_ranks(file: str) -> bool:
    """Return whether a file multiplies or divides by the number of ranks, or takes a mean over them."""
    for node in ast.walk(_syntax_of(file)):
        text = ast.unparse(node) if isinstance(node, ast.Call) else ""
        if "mean" in text and ("reduce" in text or "gather" in text):
            return True
        operation = getattr(node, "op", None)
        if isinstance(operation, ast.Mult | ast.Div) and _holds_ranks(node, file):
            return True
    return False


def _holds_ranks(node: ast.AST, file: str) -> bool:
    """Return whether an expression has the number of ranks in it, also by a variable of its file."""
    if _mentions(node, _OF_RANKS):
        return True
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    names = set(map(ast.unparse, parts))
    return not names.isdisjoint(_numbers_of_ranks(file))


@cache
def _numbers_of_ranks(file: str) -> set[str]:
    """Name what a file assigns the result of a call for the number of ranks, such as `get_world_size()`."""
    found = set()
    for node in _nodes(_syntax_of(file), ast.Assign):
        for target, value in _pairs(node.targets[0], node.value):
            if isinstance(value, ast.Call) and _mentions(value, _OF_RANKS):
                found.add(ast.unparse(target))
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Pair what is assigned with its value, one by one if both are tuples."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


# Look at the loops in which a loader's batches are asked for.


def is_bounded() -> bool:
    """Return whether the loop that asks for a loader's batches ends after a number of rounds of its own."""
    for frame in own_frames():
        for loop in loops_around(place_of(frame)):
            if isinstance(loop, ast.For) and is_inside(loop.iter, frame.f_lineno):
                return _counts_rounds(loop)
        if not frame.f_code.co_flags & CO_GENERATOR:
            return False
    return False


def _counts_rounds(loop: ast.For) -> bool:
    """Find `zip(range(n), loader)`, `islice(loader, n)`, and `if i == n: break` within the loop."""
    calls = [_called(node) for node in ast.walk(loop.iter)]
    if "range" in calls or "islice" in calls:
        return True
    counters = _names_in(loop.target)
    for statement in _nodes(loop, ast.If):
        test = statement.test
        is_break = _has(statement.body, ast.Break)
        if is_break and isinstance(test, ast.Compare) and _names_in(test.left) & counters:
            return True
    return False


def rounds_around() -> int | None:
    """Return how often the loops run in which a loader's batches are asked for; None if that is not known."""
    rounds = None
    for frame in own_frames():
        for loop in loops_around(place_of(frame)):
            if isinstance(loop, ast.While):
                return None
            if is_inside(loop.iter, frame.f_lineno):  # the loop over the loader
                continue
            length = _length_of_range(loop.iter, frame)
            if length is None:
                return None
            rounds = (rounds or 1) * length
    return rounds


def _length_of_range(loop: ast.expr, frame: FrameType) -> int | None:
    """Return the length of the `range` in a loop's head, None if there is none, or its arguments call functions."""
    ranges = [node for node in ast.walk(loop) if _called(node) == "range"]
    if not ranges:
        return None
    _, *parts = ast.walk(ranges[0])
    if not all(isinstance(part, _PLAIN) for part in parts):
        return None
    try:
        found = eval(ast.unparse(ranges[0]), frame.f_globals, dict(frame.f_locals))
        return len(found)
    except Exception:  # outside of its class a private name has another one
        return None


def awaits_stop_iteration() -> bool:
    """Return whether the script is prepared for the end of what it reads now: by a loop, or because it names it."""
    places = [place_of(frame) for frame in own_frames()]
    if not places or any("StopIteration" in _text_of(place.file) for place in places):
        return True
    nearest = places[0]
    for call in _nodes(_syntax_of(nearest.file), ast.Call):
        has_no_default = _called(call) == "next" and len(call.args) == 1
        if has_no_default and is_inside(call, nearest.line):
            return False
    return True
