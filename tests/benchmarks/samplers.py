"""Times ddpkit's DistributedSampler next to torch's: the first index of a huge dataset, and whole epochs in Python.

    python tests/benchmarks/samplers.py           # about a minute
    python tests/benchmarks/samplers.py --torch   # also torch's first index at 10**8: 20 s and 5 GB more

Expect milliseconds and a megabyte or two for the first index, and epoch ratios well below 1 from 10**6 samples on.
Each ratio is the median of alternated runs, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable

from torch.utils.data import DistributedSampler as TorchSampler

from ddpkit.data.samplers import DistributedSampler

FIRST_INDEX = """
import resource, time
from {module} import DistributedSampler
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
list(DistributedSampler(range(1000), 8, 3))  # imports and allocations that every process pays once
before, start = peak(), time.perf_counter()
next(iter(DistributedSampler(range({n}), 8, 3)))
print((time.perf_counter() - start) * 1e3, peak() - before)
"""


def first_index(module: str, n: int) -> tuple[float, float]:
    """Milliseconds to the first index and MB of peak memory above the process's own, in a process of its own."""
    code = FIRST_INDEX.format(module=module, n=n)
    ms, mb = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return float(ms), float(mb)


def epoch_ms(sampler: Iterable[int]) -> float:
    """Milliseconds to go once through the sampler, start included."""
    start = time.perf_counter()
    for _ in sampler:
        pass
    return (time.perf_counter() - start) * 1e3


def compare_epochs(n: int, world_size: int, runs: int) -> tuple[float, float, float]:
    """Median milliseconds of a rank's epoch, ours and torch's, and the median of their ratios."""
    ours, theirs = (cls(range(n), world_size, world_size - 1) for cls in (DistributedSampler, TorchSampler))
    pairs = [(epoch_ms(ours), epoch_ms(theirs)) for _ in range(runs)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="measure torch's first index at 10**8, too")
    parser.add_argument("--largest", type=int, default=10**7, help="largest dataset for whole epochs (samples)")
    options = parser.parse_args()

    print(f"{'first index':24}{'n':>12}{'ms':>10}{'MB':>10}")
    cases = [("ddpkit.data.samplers", 10**8), ("ddpkit.data.samplers", 10**9)]
    for module, n in [*cases, ("torch.utils.data", 10**8)] if options.torch else cases:
        ms, mb = first_index(module, n)
        print(f"{module:24}{n:>12}{ms:>10.2f}{mb:>10.2f}", flush=True)

    print(f"\n{'whole epoch of a rank':24}{'n':>12}{'ddpkit ms':>12}{'torch ms':>12}{'ratio':>8}")
    for n in (10**3, 10**4, 10**5, 10**6, 10**7):
        for world_size in (1, 2, 8) if n <= options.largest else ():
            runs = max(5, min(201, 3 * 10**6 // n))
            ours, theirs, ratio = compare_epochs(n, world_size, runs)
            print(f"world size {world_size:<13}{n:>12}{ours:>12.3f}{theirs:>12.3f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
