"""Where errors lead those who read them."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path

import pytest

import ddpkit

GUIDE = Path(__file__).parents[1] / "docs/guide"
KINDS = [name for name in ddpkit.__all__ if name.endswith("Error") and name != "DdpkitError"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
@pytest.mark.parametrize("name", KINDS)
def test_a_traceback_ends_with_the_page_that_explains_the_error(name: str) -> None:
    kind = getattr(ddpkit, name)
    error = kind.__new__(kind, "A message.")
    sent = pickle.loads(pickle.dumps(error))
    *_, message, docs = traceback.format_exception(sent)
    page = docs.removeprefix("Docs: https://ddpkit.readthedocs.io/en/latest/guide/").rstrip().removesuffix(".html")
    assert message == f"ddpkit.errors.{name}: A message.\n"
    assert name in (GUIDE / f"{page}.md").read_text()
