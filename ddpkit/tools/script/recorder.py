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
        self._lock = threading.RLock()  # a handler of signals may tell something, too
        self._pending: list[bytes] = []
        self._is_writing = False
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
            self._pending.append(line)
            if not self._is_writing:  # else the write that was interrupted goes on with it
                self._write()

    def tell_collective(self, fields: Record) -> None:
        """Tell that this rank enters a collective, and how many of its group came before."""
        position = self._positions.get(fields["group"], 0)
        self._positions[fields["group"]] = position + 1
        self.tell("collective", position=position, **fields)

    def _write(self) -> None:
        """Write all lines that are pending; the reader skips one of which an exception left a part."""
        self._is_writing = True
        try:
            while self._pending:
                view = memoryview(self._pending.pop(0))
                while view:
                    view = view[os.write(self._descriptor, view) :]
        except BaseException:
            self._pending.insert(0, b"\n")
            raise
        finally:
            self._is_writing = False
