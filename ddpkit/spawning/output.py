"""Show the output and the log records of ranks in the process that launched them."""

from __future__ import annotations

import codecs
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

from ..logging import FORWARDED

_CHUNK = 1 << 16  # bytes read at a time
_Decoder = codecs.getincrementaldecoder("utf-8")  # keeps half a character for the next time


def own_streams() -> dict[int, TextIO]:
    """Find the streams that a notebook or test put in the place of descriptors 1 and 2."""
    streams = {1: sys.stdout, 2: sys.stderr}
    own = {}
    for number, stream in streams.items():
        if stream and not _writes_to(stream, number):
            own[number] = stream
    return own


def _writes_to(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # a notebook's stream may have none
        return False


class Copier(threading.Thread):
    """Copy the output of other processes to this process's own streams, as it comes."""

    def __init__(self, streams: dict[int, TextIO]) -> None:
        super().__init__(name="ddpkit output", daemon=True)
        self._streams = streams
        self._outputs: dict[Connection, tuple[TextIO, codecs.IncrementalDecoder]] = {}
        self._ended, self._end = Pipe(duplex=False)

    def pipes(self) -> dict[int, Connection]:
        """Make the ends for one process to write to, by the descriptor which they replace there.

        Call it before `start`.
        """
        writers = {}
        for number, stream in self._streams.items():
            reader, writers[number] = Pipe(duplex=False)
            self._outputs[reader] = stream, _Decoder(errors="replace")
        return writers

    def run(self) -> None:
        """Copy until all writers have closed their ends, or `close` is called."""
        while self._outputs:
            ready = wait([*self._outputs, self._ended])
            for reader in ready:
                if reader in self._outputs:
                    self._copy(reader)
            if ready == [self._ended]:  # and nothing is left to read
                return

    def close(self) -> None:
        """Stop when all output is read; a process that lives on may hold an end open."""
        self._end.send_bytes(b"")
        was_started = self.ident is not None
        if was_started:
            self.join(5.0)
        for end in (*self._outputs, self._ended, self._end):
            end.close()

    def _copy(self, reader: Connection) -> None:
        stream, decoder = self._outputs[reader]
        data = os.read(reader.fileno(), _CHUNK)
        stream.write(decoder.decode(data, final=not data))
        stream.flush()
        if not data:
            del self._outputs[reader]
            reader.close()


def redirect(writers: dict[int, Connection]) -> None:
    """Let this process write to the ends that `Copier.pipes` has made."""
    if not writers:
        return
    for number, writer in writers.items():
        os.dup2(writer.fileno(), number)
        writer.close()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)  # by lines also under python -u


def describe_logging() -> dict[str, Any]:
    """Describe this process's logging for its ranks: levels, and which loggers have handlers."""
    loggers: dict[str, logging.Logger] = {"": logging.root}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            loggers[name] = logger
    return {
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "with_handlers": [name for name, logger in loggers.items() if _has_handler(logger)],
        "disable": logging.root.manager.disable,
    }


def _has_handler(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


class Forwarder(logging.Handler):
    """Send records to the process that launched this rank, and to its handlers and filters.

    They travel as text, with added attributes if these are numbers or text.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._send = send
        self._pid = os.getpid()
        self._last: logging.LogRecord | None = None

    def install(self, parent: dict[str, Any]) -> None:
        """Log as the parent does, by its `describe_logging`.

        Loggers get its levels; those that have handlers there and none here get this one.
        """
        for name, level in parent["levels"].items():
            logging.getLogger(name).setLevel(level)
        logging.disable(parent["disable"])
        for name in parent["with_handlers"]:
            logger = logging.getLogger(name)
            if not _has_handler(logger):
                logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a copy of a record, once, as text."""
        if os.getpid() != self._pid:  # a loader's worker, which must not write to the pipe
            _handle_without_handler(record)
            return
        if record is self._last:  # it was sent from another logger on its way up
            return
        self._last = record
        try:
            self._send(self._pack(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Send no more: later records are for this process alone."""
        with self.lock or nullcontext():
            self._pid = 0
        super().close()

    def _pack(self, record: logging.LogRecord) -> dict[str, Any]:
        packed = copy.copy(record)
        packed.rank = self._rank
        packed.world_size = self._world_size
        setattr(packed, FORWARDED, True)
        packed.msg = record.getMessage()
        packed.args = None
        if record.exc_info and not record.exc_text:
            packed.exc_text = logging.Formatter().formatException(record.exc_info)
        fields = vars(packed).items()
        return {name: value for name, value in fields if isinstance(value, (str, int, float))}


def _handle_without_handler(record: logging.LogRecord) -> None:
    """Treat a record as logging does where no handler is installed."""
    last_resort = logging.lastResort
    if last_resort and record.levelno >= last_resort.level:
        last_resort.handle(record)


def handle_record(fields: dict[str, Any]) -> None:
    """Log a rank's record here."""
    record = logging.makeLogRecord(fields)
    logging.getLogger(record.name).handle(record)
