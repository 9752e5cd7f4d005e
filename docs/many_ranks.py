"""Draw how joining and barriers grow with the ranks: `python docs/many_ranks.py` writes `docs/images/many_ranks.svg`.

The numbers are those of the table in `docs/guide/many-ranks.md`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

_HERE = Path(__file__).parent
_PAGE, _PICTURE = _HERE / "guide" / "many-ranks.md", _HERE / "images" / "many_ranks.svg"
_COLUMNS = {"join (s)": 2, "barrier (ms)": 4}


def read(page: str) -> dict[str, list[list[str]]]:
    """Return the table's rows by the library that they are of."""
    rows: dict[str, list[list[str]]] = {"torch": [], "ddpkit": []}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1] in rows:
            rows[cells[1]].append(cells)
    return rows


def main() -> None:
    """Draw a line for each library, in one picture for each column."""
    plt.rcParams["svg.hashsalt"] = "ddpkit"  # the same file each time
    figure, pictures = plt.subplots(1, len(_COLUMNS), figsize=(9, 3.2), layout="constrained")
    for picture, (name, column) in zip(pictures, _COLUMNS.items(), strict=True):
        for library, rows in read(_PAGE.read_text()).items():
            ranks = [int(row[0]) for row in rows]
            picture.loglog(ranks, [float(row[column]) for row in rows], marker="o", label=library)
        picture.set_xticks(ranks, labels=map(str, ranks))
        picture.minorticks_off()
        picture.set(xlabel="ranks", ylabel=name)
        picture.legend()
    figure.savefig(_PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
