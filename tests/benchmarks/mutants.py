"""Plant small faults in the core, one at a time, and count those that the near tests find.

    python tests/benchmarks/mutants.py [--mutants 60] [--seed 0] [--workers 2]

A fault is a comparison, an operator, a condition or a number changed, or a statement left out; never in a message.
Those not found are listed: some change nothing that anybody can see.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("launch", "job", "rendezvous", "collectives", "parallel", "data", "checkpoint")
NEAR = {
    "job": ["tests/job", "tests/rendezvous", "tests/start", "tests/faults"],
    "rendezvous": ["tests/rendezvous", "tests/job", "tests/simulation"],
}
SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}
LONGEST = 300  # seconds of the tests of one fault: then it hangs, and is found


def swap(node: ast.AST, name: str) -> Iterator[str]:
    """Change an operator of a node; yield the change in words while it is in place."""
    old = getattr(node, name)
    several = isinstance(old, list)
    first = old[0] if several else old
    if type(first) in SWAPPED:
        new = SWAPPED[type(first)]()
        setattr(node, name, [new, *old[1:]] if several else new)
        yield f"{type(first).__name__} -> {type(new).__name__}"
        setattr(node, name, old)


def changes(node: ast.AST) -> Iterator[str]:
    """Make each possible change of one node in turn; yield what it is while it is in place."""
    if isinstance(node, ast.Compare):
        yield from swap(node, "ops")
    elif isinstance(node, (ast.BoolOp, ast.BinOp)):
        yield from swap(node, "op")
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = node.test
        node.test = ast.UnaryOp(ast.Not(), test)
        yield "condition reversed"
        node.test = test
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
        node.value = not value if isinstance(value, bool) else value + 1
        yield f"{value!r} -> {node.value!r}"
        node.value = value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        node.value = ast.Constant(None)
        yield f"without {ast.unparse(call)[:60]}"
        node.value = call


def faults_in(path: Path) -> list[tuple[int, str, str]]:
    """List the faults of a file: line, change, and the whole source with it."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            continue
        for change in changes(node):
            found.append((node.lineno, change, ast.unparse(ast.fix_missing_locations(tree))))  # type: ignore[attr-defined]
    return found


def is_found(folder: Path, package: str, workers: int) -> bool:
    """Return whether a test near a package fails in a copy of the project."""
    near = [path for path in NEAR.get(package, [f"tests/{package}"]) if (folder / path).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", f"{workers}", "-p", "no:cacheprovider", *near]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{folder}"},
            capture_output=True,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    args = parser.parse_args()
    generator = random.Random(args.seed)
    paths = [path for package in PACKAGES for path in sorted((ROOT / "ddpkit" / package).glob("*.py"))]
    sizes = [path.stat().st_size for path in paths]
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "project")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.egg-info"))
        for path in generator.choices(paths, sizes, k=args.mutants):
            faults = faults_in(path)
            if not faults:
                continue
            line, change, source = generator.choice(faults)
            copy = folder / path.relative_to(ROOT)
            copy.write_text(source)
            found = is_found(folder, path.parent.name, args.workers)
            copy.write_text(path.read_text())
            count += found
            print("found" if found else "NOT FOUND", f"{path.relative_to(ROOT)}:{line} {change}", flush=True)
    print(f"{count} of {args.mutants} found")


if __name__ == "__main__":
    main()
