"""Run the program of `main.py`, under the name that the guides start with torchrun."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("main.py")), run_name="__main__")
