"""Draw the packages of ddpkit and their imports: `python docs/packages.py` writes `docs/images/packages.svg`.

The picture is made from the source, and a test compares the two. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path, PurePath

PICTURE = Path(__file__).with_name("images") / "packages.svg"
PACKAGE = Path(__file__).parents[1] / "ddpkit"
MODULES = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
_WIDTH, _HEIGHT = 165, 36  # of a box, in pixels
_COLUMN, _ROW = 200, 90  # from one box to the next


@cache
def tree_of(module: PurePath) -> ast.Module:
    """Return the syntax of a module."""
    return ast.parse(PACKAGE.joinpath(module).with_suffix(".py").read_text())


def package_of(module: PurePath) -> str:
    """Name the package that a module is in: its folder, or the file itself."""
    return module.parts[0] if len(module.parts) > 1 else f"{module}.py"


def imports(module: PurePath) -> tuple[set[PurePath], set[str]]:
    """Find the modules of ddpkit, and the packages from elsewhere, that a module imports, also inside its functions.

    What only type checkers see is left out.
    """
    inside: set[PurePath] = set()
    outside: set[str] = set()
    for node in _walk(tree_of(module)):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            place = module.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found = {place} if place in MODULES else {place / alias.name for alias in node.names}
            inside |= found & set(MODULES)
    return inside, outside


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, but for blocks that only type checkers see."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def arrows() -> dict[str, set[str]]:
    """Tell for each package from which others it imports."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        if len(module.parts) == 1 and module.name.startswith("__"):
            continue
        package = package_of(module)
        others = {package_of(other) for other in imports(module)[0]}
        found.setdefault(package, set()).update(others - {package})
    return found


def draw() -> str:
    """Return the picture as SVG."""
    below = _needed(arrows())
    floors = _floors(below)
    chains = [_chain(package, other, floors) for package in sorted(below) for other in sorted(below[package])]
    places = _places(floors, chains)
    width = max(x for x, _ in places.values()) + _WIDTH + 20
    height = max(y for _, y in places.values()) + _HEIGHT + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="monospace">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for chain in chains:
        points = [(places[stop][0] + _WIDTH / 2, places[stop][1] + _HEIGHT / 2) for stop in chain]
        points[0] = (points[0][0], points[0][1] + _HEIGHT / 2)
        points[-1] = (points[-1][0], points[-1][1] - _HEIGHT / 2)
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="#555" marker-end="url(#tip)"/>')
    for package in sorted(below):
        x, y = places[package]
        name = package if package.endswith(".py") else f"{package}/"
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="#eef3fa" stroke="#456"/>'
            f'<text x="{x + _WIDTH / 2:g}" y="{y + 23:g}" font-size="14" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>\n"])


def _needed(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the arrows that follow from others."""
    reached: dict[str, set[str]] = {}
    for package in TopologicalSorter(below).static_order():
        reached[package] = below[package].union(*(reached[other] for other in below[package]))
    return {package: others - set().union(*(reached[other] for other in others)) for package, others in below.items()}


def _floors(below: dict[str, set[str]]) -> dict[str, int]:
    """Give each package the lowest floor that is above all that it imports."""
    floors: dict[str, int] = {}
    for package in TopologicalSorter(below).static_order():
        floors[package] = max((floors[other] + 1 for other in below[package]), default=0)
    return floors


def _chain(package: str, other: str, floors: dict[str, int]) -> list[str]:
    """Name the stops of an arrow: the packages at its ends, and a gap between boxes on each floor between them."""
    gaps = [f"{package} to {other} on {floor}" for floor in range(floors[package] - 1, floors[other], -1)]
    return [package, *gaps, other]


def _places(floors: dict[str, int], chains: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Give each stop the left upper corner of its box; it stands near those that it points to, one floor below."""
    rows: dict[int, set[str]] = {floor: set() for floor in range(max(floors.values()) + 1)}
    below: dict[str, list[str]] = {}
    for package, floor in floors.items():
        rows[floor].add(package)
    for chain in chains:
        for step, stop in enumerate(chain[:-1]):
            rows[floors[chain[0]] - step].add(stop)
            below.setdefault(stop, []).append(chain[step + 1])
    longest = max(len(row) for row in rows.values())
    places: dict[str, tuple[float, float]] = {}
    for floor, row in rows.items():
        aims = {stop: [places[other][0] for other in below.get(stop, [])] for stop in row}
        order = sorted(row, key=lambda stop: (sum(aims[stop]) / max(1, len(aims[stop])), stop))
        margin = 20 + (longest - len(row)) * _COLUMN / 2
        for number, stop in enumerate(order):
            places[stop] = (margin + number * _COLUMN, 20.0 + (max(rows) - floor) * _ROW)
    return places


if __name__ == "__main__":
    PICTURE.write_text(draw())
