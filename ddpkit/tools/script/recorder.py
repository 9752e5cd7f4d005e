"""Send facts from a checked process to the one that started it."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

Record = dict[str, Any]


class Recorder:
    """Writes records to a pipe, one a line.

    Args:
        descriptor: Of the pipe.

    Attributes:
        step: The number of optimiser steps that have begun, of the optimiser that is ahead.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.step = 0
        self._positions: dict[str, int] = {}

    @property
    def is_main(self) -> bool:
        """Tell the rank's process from a loader's worker that was forked from it."""
        return os.getpid() == self._owner

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a record: its kind, the present step, and its fields, of JSON's types."""
        record = {"kind": kind, "step": self.step, **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if not self.is_main:  # short lines are written whole, and the lock may be held for ever
            os.write(self._descriptor, line)
            return
        with self._lock:
            view = memoryview(line)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def tell_collective(self, fields: Record) -> None:
        """Tell that this rank enters a collective, and how many of its group came before."""
        position = self._positions.get(fields["group"], 0)
        self._positions[fields["group"]] = position + 1
        self.tell("collective", position=position, **fields)
