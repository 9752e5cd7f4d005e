"""What `import ddpkit` adds to `import torch`, in milliseconds: medians over fresh processes.

Each process imports torch and then ddpkit and times both: the difference of two whole processes would drown in the
noise of importing torch. Run it twice, as the first may compile: python tests/benchmarks/import_time.py [processes]
"""

import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMED = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import ddpkit
print(middle - start, time.perf_counter() - middle)
"""


def main() -> None:
    """Prints one line."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    lines = [subprocess.check_output([sys.executable, "-c", TIMED], cwd=ROOT, text=True) for _ in range(runs)]
    torch, ddpkit = (
        1000 * statistics.median(map(float, column)) for column in zip(*map(str.split, lines), strict=True)
    )
    print(f"import torch {torch:.0f} ms; then import ddpkit {ddpkit:.1f} ms (medians of {runs} processes)")


if __name__ == "__main__":
    main()
