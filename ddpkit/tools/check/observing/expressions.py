"""Evaluate simple expressions of the script's running functions, without calling anything of its own."""

from __future__ import annotations

import argparse
import ast
import math
import os
import sys
from collections.abc import Iterator
from functools import cache
from inspect import CO_GENERATOR
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..places import Place, loops_around, own_files, own_frames, place_of, syntax_of
from .modules import is_own_object

_dividing: dict[tuple[Any, ...], bool] = {}
_RANKS = ("world", "ranks", "num_processes", "nproc", "gpus", "replicas")  # in names of the number of ranks


@cache
def _nodes_of(file: str, name: str, first_line: int) -> list[ast.AST]:
    """List the nodes of a function, or those of a file outside of any."""
    tree = syntax_of(file)
    if name == "<module>":
        body = [s for s in tree.body if not isinstance(s, ast.FunctionDef | ast.ClassDef)]
        return [node for statement in body for node in ast.walk(statement)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != name:
            continue
        if node.lineno <= first_line + len(node.decorator_list) and first_line <= node.body[0].lineno:
            return list(ast.walk(node))
    return []


def running(depth: int = 6) -> Iterator[tuple[FrameType, list[ast.AST]]]:
    """Yield the script's running functions with their nodes, the innermost first."""
    for number, frame in enumerate(own_frames(sys._getframe(1))):
        if number == depth:
            return
        code = frame.f_code
        yield frame, _nodes_of(code.co_filename, code.co_name, code.co_firstlineno)


def divides_by_ranks(depth: int = 2) -> bool:
    """Return whether a running function divides by the number of ranks; looked up once for each line."""
    frames = list(islice(own_frames(sys._getframe(1)), depth))
    lines = tuple((frame.f_code, frame.f_lineno) for frame in frames)
    if lines not in _dividing:
        _dividing[lines] = any(_divides(frame, nodes) for frame, nodes in running(depth))
    return _dividing[lines]


def _divides(frame: FrameType, nodes: list[ast.AST]) -> bool:
    for node in nodes:
        divisor = None
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            divisor = node.right if isinstance(node, ast.BinOp) else node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("div", "div_") and node.args:
            divisor = node.args[0]
        if divisor is not None and is_number_of_ranks(divisor, frame):
            return True
    return False


def dividing_lines() -> list[Place]:
    """List the lines of the function that calls backward which divide a loss."""
    frame = next(own_frames(sys._getframe(1)), None)
    return [] if frame is None else _dividing_lines(frame.f_code)


@cache
def _dividing_lines(code: CodeType) -> list[Place]:
    found = []
    for node in _nodes_of(code.co_filename, code.co_name, code.co_firstlineno):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            value = node.left if isinstance(node, ast.BinOp) else node.target
            names = [str(getattr(part, "id", getattr(part, "attr", ""))) for part in ast.walk(value)]
            if any("loss" in name.lower() for name in names):
                found.append(Place(os.path.abspath(code.co_filename), node.lineno, code.co_name))
    return found


def lines_divided_by_ranks() -> list[Place]:
    """List the lines of the function that calls backward which divide a loss by the number of ranks before."""
    frame = next(own_frames(sys._getframe(1)), None)
    if frame is None:
        return []
    found = []
    for line, node in _dividing_nodes(frame.f_code):
        if line <= frame.f_lineno and _divides(frame, [node]):
            found.append(place_of(frame)._replace(line=line))
    return found


@cache
def _dividing_nodes(code: CodeType) -> list[tuple[int, ast.AST]]:
    """List what stands on the lines that divide a loss, with the numbers of these."""
    lines = {place.line for place in _dividing_lines(code)}
    nodes = _nodes_of(code.co_filename, code.co_name, code.co_firstlineno)
    return [(line, node) for node in nodes if (line := getattr(node, "lineno", 0)) in lines]


def is_number_of_ranks(node: ast.expr, frame: FrameType) -> bool:
    """Return whether an expression is the number of ranks, by its name and its value."""
    for part in ast.walk(node):
        name = str(getattr(part, "attr", getattr(part, "id", ""))).lower()
        if not isinstance(part, ast.Name | ast.Attribute) or not any(word in name for word in _RANKS):
            continue
        if "get_world_size" in name or evaluate(part, frame) in (_world_size(), None):
            return True
    return False


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def evaluate(node: ast.AST | None, frame: FrameType) -> Any:
    """Return the value of a name, a field of an object or a length; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = evaluate(node.value, frame)
        if is_own_object(owner) or isinstance(owner, argparse.Namespace):
            return vars(owner).get(node.attr)
        if node.attr == "dataset":
            return getattr(owner, "dataset", None)
        return None
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len" and len(node.args) == 1:
        value = evaluate(node.args[0], frame)
        try:
            return None if value is None else len(value)
        except TypeError:
            return None
    return None


@cache
def decisions_around(file: str, line: int) -> dict[int, ast.If]:
    """Find the `if`s in the loops around a line that end one, by their lines."""
    found: dict[int, ast.If] = {}
    for loop in loops_around(file, line):
        for statement in ast.walk(loop):
            if isinstance(statement, ast.If) and _ends_loop(statement):
                found[statement.lineno] = statement
    return found


def skips() -> list[Place]:
    """List the `if`s by which the innermost running loop leaves out a batch."""
    for frame in own_frames(sys._getframe(1)):
        for loop in reversed(loops_around(frame.f_code.co_filename, frame.f_lineno)):
            lines = []
            for statement in ast.walk(loop):
                body = statement.body if isinstance(statement, ast.If) else []
                if any(isinstance(part, ast.Continue) for part in body):
                    lines.append(place_of(frame)._replace(line=getattr(statement, "lineno", 0)))
            return lines
    return []


def bound_of_loop() -> int | None:
    """Return after how many rounds the loop ends that asks for a loader's batches, None if the loader decides."""
    for frame in own_frames(sys._getframe(1)):
        for loop in loops_around(frame.f_code.co_filename, frame.f_lineno):
            if isinstance(loop, ast.For) and loop.iter.lineno <= frame.f_lineno <= (loop.iter.end_lineno or 0):
                bounds = [evaluate(node, frame) for node in _bounds(loop)]
                return min((bound for bound in bounds if type(bound) is int), default=None)
        if not frame.f_code.co_flags & CO_GENERATOR:
            return None
    return None


def _bounds(loop: ast.For) -> Iterator[ast.expr]:
    """Find n in `zip(range(n), loader)`, `islice(loader, n)`, and in `if i == n: break` within the loop."""
    for node in ast.walk(loop.iter):
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and (name, len(node.args)) in (("range", 1), ("islice", 2)):
            yield node.args[-1]
    counters = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    for statement in ast.walk(loop):
        if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
            continue
        is_break = any(isinstance(part, ast.Break) for part in statement.body)
        if is_break and any(getattr(part, "id", "") in counters for part in ast.walk(statement.test.left)):
            yield statement.test.comparators[0]


def _ends_loop(statement: ast.If) -> bool:
    """Return whether an `if` ends a loop, and does not only look for broken numbers."""
    test = ast.unparse(statement.test)
    if any(word in test for word in ("isfinite", "isnan", "isinf")):
        return False
    return any(isinstance(node, ast.Break | ast.Return) for part in statement.body for node in ast.walk(part))


def fractions(test: ast.expr, frame: FrameType) -> list[float]:
    """Evaluate what a test compares, as far as these are fractions."""
    found = []
    for node in ast.walk(test):
        if isinstance(node, ast.Name | ast.Attribute):
            value = evaluate(node, frame)
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
                value = value.item()
            if isinstance(value, float) and math.isfinite(value):
                found.append(value)
    return found


def loop_keys() -> list[str]:
    """List the names and numbers through which the innermost function's loops go, of the present round."""
    frame = next(own_frames(sys._getframe(1)), None)
    if frame is None:
        return []
    found = []
    for loop in loops_around(frame.f_code.co_filename, frame.f_lineno):
        for node in ast.walk(loop.target) if isinstance(loop, ast.For) else ():
            value = evaluate(node, frame) if isinstance(node, ast.Name) else None
            if isinstance(value, str | int):
                found.append(repr(value))
    return found


def awaits_stop_iteration() -> bool:
    """Return whether the script is prepared for the end of what it reads now: by a loop, or because it names it."""
    frame = next(own_frames(sys._getframe(1)), None)
    if frame is None or mentions("StopIteration"):
        return True
    return not _calls_next(frame.f_code.co_filename, frame.f_lineno)


@cache
def _calls_next(file: str, line: int) -> bool:
    """Return whether there is a `next(iterator)` on a line, without a default."""
    for node in ast.walk(syntax_of(file)):
        if not isinstance(node, ast.Call) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "next" and len(node.args) == 1:
            return True
    return False


def mentions(word: str) -> bool:
    """Return whether a file of the script has a word in it."""
    return any(word in _text_of(file) for file in own_files())


@cache
def _text_of(file: str) -> str:
    try:
        with open(file, errors="replace") as source:
            return source.read()
    except OSError:
        return ""
