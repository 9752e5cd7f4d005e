"""The sentences of the library, frozen: a change of code changes no message by accident.

python tests/test_sentences.py  # write sentences.txt anew, after a message was changed on purpose
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ddpkit

FROZEN = Path(__file__).with_name("sentences.txt")
A_FEW_WORDS = re.compile(r"[A-Za-z'{}]+,? [a-z'{}]+,? [a-z'{}]+")


def _template(node: ast.AST) -> str:
    """Return a string of the source, with {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    return "{}" if isinstance(node, ast.FormattedValue) else ""


def _strings(node: ast.AST) -> Iterator[str]:
    """Iterate over the strings within a node that are no docstrings, also within what fills in others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield _template(child)
        inner = [child]
        if isinstance(child, ast.JoinedStr):
            inner = [value for value in child.values if isinstance(value, ast.FormattedValue)]
        for each in inner:
            yield from _strings(each)


def texts_of_the_library() -> set[str]:
    """Return the strings in the source, with {} for what is filled in."""
    found: set[str] = set()
    for path in Path(ddpkit.__file__).parent.rglob("*.py"):
        found.update(_strings(ast.parse(path.read_text())))
    return found


def sentences() -> str:
    """Return what the library can say, a line each, in alphabetical order."""
    return "".join(f"{text!r}\n" for text in sorted(texts_of_the_library()) if A_FEW_WORDS.search(text))


def test_the_library_says_what_it_said() -> None:
    assert sentences().splitlines() == FROZEN.read_text().splitlines()


if __name__ == "__main__":
    FROZEN.write_text(sentences())
