"""Start the video trainer from a benchmark, with options of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "video_deblurring"
sys.path.insert(0, str(EXAMPLE))
import deblurring  # noqa: E402, F401, which makes `shared` known
from shared.settings import read_json  # noqa: E402


def read_options(name: str) -> dict[str, Any]:
    """Read one of the example's option files."""
    return read_json(EXAMPLE / "options/vrt" / name)


def start(opt: dict[str, Any], folder: str | Path, ranks: int) -> subprocess.Popen[str]:
    """Train with these options, saved in a folder, in which the run is, too; what it prints can be read."""
    opt["path"]["root"] = str(folder)
    path = Path(folder, f"{opt['task']}.json")
    path.write_text(json.dumps(opt))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(EXAMPLE / "main_train_vrt.py"), "--opt", str(path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(opt: dict[str, Any], folder: str | Path, ranks: int) -> str:
    """Do what `start` does, wait, and return what was printed."""
    running = start(opt, folder, ranks)
    said, _ = running.communicate()
    if running.returncode != 0:
        refuse(running, said)
    return said


def refuse(running: subprocess.Popen[str], said: str) -> None:
    """End the benchmark, for this run of the trainer has not done what it should."""
    sys.exit(f"{' '.join(running.args)} ended with status {running.returncode}:\n{said}")
