"""Shows the output and the log records of ranks in the process that launched them, where they would get lost."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO


def own_streams() -> dict[int, TextIO]:
    """Find the output streams that child processes do not write to, by descriptor: a notebook's, a test's."""
    streams = {1: sys.stdout, 2: sys.stderr}
    return {number: stream for number, stream in streams.items() if stream and not _writes_to(stream, number)}


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # a notebook's stream may have none
        return False


class Copier(threading.Thread):
    """Copies what other processes write to this process's own streams, as it comes."""

    def __init__(self, streams: dict[int, TextIO]) -> None:
        super().__init__(name="ddpkit output", daemon=True)
        self._streams = streams
        self._from: dict[Connection, TextIO] = {}
        self._ended, self._end = Pipe(duplex=False)

    def pipes(self) -> dict[int, Connection]:
        """Make the ends that one process writes to, by the descriptor which they replace there. Call before `start`."""
        writers = {}
        for number, stream in self._streams.items():
            reader, writers[number] = Pipe(duplex=False)
            self._from[reader] = stream
        return writers

    def run(self) -> None:
        """Copy until all writers have closed their ends, or `close` is called."""
        while self._from:
            ready = wait([*self._from, self._ended])
            for reader in ready:
                if reader in self._from:
                    self._copy(reader)
            if ready == [self._ended]:  # and nothing is left to read
                return

    def close(self) -> None:
        """Stop when what has been written is read; a process that lives on may hold an end open."""
        self._end.send_bytes(b"")
        if self.ident is not None:  # it was started
            self.join(5.0)
        for end in (*self._from, self._ended, self._end):
            end.close()

    def _copy(self, reader: Connection) -> None:
        data = os.read(reader.fileno(), 1 << 16)
        stream = self._from[reader]
        if data:
            stream.write(data.decode(errors="replace"))
            stream.flush()
        else:
            del self._from[reader]
            reader.close()


def redirect(writers: dict[int, Connection]) -> None:
    """Let this process write to the ends that `Copier.pipes` has made."""
    for number, writer in writers.items():
        os.dup2(writer.fileno(), number)
        writer.close()
    for stream in (sys.stdout, sys.stderr):
        if writers and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def logging_of_parent() -> dict[str, Any]:
    """Describe this process's logging for its ranks: levels by logger, and which loggers have handlers."""
    loggers = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    loggers[""] = logging.root
    return {
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "handled": [name for name, logger in loggers.items() if _speaks(logger)],
        "disable": logging.root.manager.disable,
    }


def _speaks(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class Forwarder(logging.Handler):
    """Sends records to the process that launched this rank, whose handlers and filters decide what becomes of them.

    They travel as text, with what was added to them if it is a number or text.
    """

    def __init__(self, rank: int, world_size: int, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._place, self._send, self._pid = (rank, world_size), send, os.getpid()
        self._last: logging.LogRecord | None = None

    def install(self, parent: dict[str, Any]) -> None:
        """Log as the parent does: with its levels, and this handler wherever it has handlers and this process none."""
        for name, level in parent["levels"].items():
            logging.getLogger(name).setLevel(level)
        logging.disable(parent["disable"])
        for name in parent["handled"]:
            logger = logging.getLogger(name)
            if not _speaks(logger):
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a copy of a record, once, as text."""
        if os.getpid() != self._pid:  # a loader's worker, for whom the pipe is not
            if logging.lastResort and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)
            return
        if record is self._last:  # it was sent from another logger on its way up
            return
        self._last = record
        try:
            self._send(self._pack(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Send no more: whatever comes now is for this process alone."""
        with self.lock or nullcontext():
            self._pid = 0
        super().close()

    def _pack(self, record: logging.LogRecord) -> dict[str, Any]:
        text = copy.copy(record)
        text.rank, text.world_size = self._place
        text.msg, text.args = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            text.exc_text = logging.Formatter().formatException(record.exc_info)
        return {name: value for name, value in text.__dict__.items() if isinstance(value, (str, int, float))}


def handle_record(fields: dict[str, Any]) -> None:
    """Log a rank's record here."""
    record = logging.makeLogRecord(fields)
    logging.getLogger(record.name).handle(record)
