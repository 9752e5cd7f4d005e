"""Runs `python -m ddpkit bench` and puts what it prints into docs/guide/troubleshooting.md, as the example there.

    python tests/benchmarks/bench_example.py

The page's other sentences quote no figure of it, so that nothing else has to change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ddpkit.tools import bench

GUIDE = Path(__file__).parents[2] / "docs/guide/troubleshooting.md"
MARK, END = "<!-- made by python tests/benchmarks/bench_example.py -->", "<!-- until here -->"
FLAGS = ["--ranks", "2", "--seconds", "2"]
LEFT_OUT = ("all_gather", "reduce_scatter", "broadcast")


def as_printed(report: dict[str, Any]) -> str:
    """The tables as they come out of a pipe."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as page, redirect_stdout(page):
        return bench.text(report)


def main() -> None:
    """Measures, prints and writes."""
    start = time.monotonic()
    command = [sys.executable, "-m", "ddpkit", "bench", *FLAGS, "--json"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    lines = [line for line in as_printed(report).splitlines() if not line.startswith(LEFT_OUT)]
    seconds, cores, output = time.monotonic() - start, report["cores"], "\n".join(lines)
    text = f"""`python -m ddpkit bench {" ".join(FLAGS)}` took {seconds:.0f} s on a machine of {cores} cores; only
all_reduce is shown:

```text
{output}
```
"""
    print(text)
    before, mark, rest = GUIDE.read_text().partition(MARK)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{GUIDE} has no {MARK} ... {END}")
    GUIDE.write_text(f"{before}{mark}\n\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()
