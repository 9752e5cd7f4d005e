"""Draw what each call does on three ranks: `python docs/ranks.py` writes `docs/images/ranks_*.svg`, light and dark.

A test makes the calls on three ranks, and compares what they give with the pictures.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import ddpkit

IMAGES = Path(__file__).with_name("images")
RANKS = 3
COLOURS = {
    "light": {"text": "#1b1f24", "quiet": "#59636e", "line": "#8c959f", "box": "#eef3fa", "edge": "#456"},
    "dark": {"text": "#e6edf3", "quiet": "#9aa4af", "line": "#6e7681", "box": "#1c2633", "edge": "#89a"},
}
_WIDTH, _BOX, _GAP = 460, 140, 20  # of the picture, of a box, between boxes, in pixels
_ROW, _HEIGHT = 78, 32  # from one call to the next, of a box


def calls() -> list[tuple[str, str, list[str], bool]]:
    """List each call, what it does, what each rank has of it, and whether the ranks communicate."""
    samples = [list(ddpkit.DistributedSampler(range(9), RANKS, rank)) for rank in range(RANKS)]
    return [
        ("setup()", "joins the ranks", [f"rank {rank} of {RANKS}" for rank in range(RANKS)], True),
        ("make_loader(range(9), 3)", "deals the samples", [" ".join(map(str, share)) for share in samples], False),
        ("wrap_model(model)", "averages gradients", ["1 → 3", "2 → 3", "6 → 3"], True),
        ("all_reduce_mean(loss)", "averages numbers", ["0.3 → 0.5", "0.5 → 0.5", "0.7 → 0.5"], True),
        ("is_main_process()", "is true once", [str(rank == 0) for rank in range(RANKS)], False),
        ("Checkpointer.save(100)", "compares, writes once", ["step-…100.pt", "compares", "compares"], True),
        ("a rank fails", "all learn which, and why", ["PeerError: rank 1", "ValueError", "PeerError: rank 1"], True),
    ]


def draw(theme: str) -> str:
    """Return the picture as SVG, for a light or a dark page."""
    colours = COLOURS[theme]
    rows = calls()
    height = _ROW * len(rows) - 10
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {_WIDTH + 2} {height}" font-family="sans-serif">']
    for row, (call, does, cells, together) in enumerate(rows):
        top = row * _ROW + 34
        lines.append(_text(0, top - 12, call, colours["text"], 'font-family="monospace" font-weight="bold"'))
        lines.append(_text(_WIDTH, top - 12, does, colours["quiet"], 'text-anchor="end"'))
        middle = top + _HEIGHT / 2
        if together:
            lines.append(f'<path d="M{_BOX} {middle:g}H{_WIDTH - _BOX}" stroke="{colours["line"]}" stroke-width="3"/>')
        for rank, cell in enumerate(cells):
            left = rank * (_BOX + _GAP)
            lines.append(
                f'<rect x="{left}" y="{top}" width="{_BOX}" height="{_HEIGHT}" rx="5" '
                f'fill="{colours["box"]}" stroke="{colours["edge"]}"/>'
            )
            lines.append(_text(left + _BOX / 2, middle + 5, cell, colours["text"], 'text-anchor="middle"'))
    return "\n".join([*lines, "</svg>\n"])


def _text(x: float, y: float, words: str, colour: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="15" fill="{colour}" {style}>{escape(words)}</text>'


def main() -> None:
    """Write both pictures."""
    for theme in COLOURS:
        (IMAGES / f"ranks_{theme}.svg").write_text(draw(theme))


if __name__ == "__main__":
    main()
