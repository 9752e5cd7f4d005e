"""Write the diffs of the pages anew: `python docs/diffs.py`.

A diff stands in a page between the comments `<!-- diff OLD NEW -->`, which names two files of `docs/coming_from/`, and
`<!-- end -->`. A test compares the pages with what this writes.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", DOCS / "index.md", DOCS / "guide" / "coming-from.md"]
_BLOCK = re.compile(r"(<!-- diff (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: Path) -> str:
    """Return the page's text with its diffs made anew."""
    return _BLOCK.sub(lambda found: found[1] + _diff(found[2], found[3]) + found[4], page.read_text())


def _diff(old: str, new: str) -> str:
    """Compare two programs: how many lines differ, and the whole of both. Empty lines do not count."""
    before, after = ((DOCS / "coming_from" / name).read_text().splitlines() for name in (old, new))
    lines: list[str] = []
    matcher = difflib.SequenceMatcher(lambda line: not line, before, after, autojunk=False)
    for what, start, end, new_start, new_end in matcher.get_opcodes():
        if what == "equal":
            lines += [f" {line}".rstrip() for line in before[start:end]]
        else:
            lines += [f"-{line}" for line in before[start:end]]
            lines += [f"+{line}" for line in after[new_start:new_end]]
    removed = sum(line.startswith("-") and line != "-" for line in lines)
    added = sum(line.startswith("+") and line != "+" for line in lines)
    count = f"{_length(before)} lines become {_length(after)}: {removed} removed, {added} added."
    return "\n".join([count, "", "```diff", *lines, "```", ""])


def _length(program: list[str]) -> int:
    return sum(bool(line) for line in program)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page))
