"""Observe files that are opened for writing."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import torch

from ...script.recorder import Recorder
from ..places import is_own, stack
from .patching import before

_WRITES = os.O_WRONLY | os.O_RDWR
_LOCKS = ("fcntl.flock", "fcntl.lockf")
_ELSEWHERE = ("/dev/", "/proc/", "/sys/")


class Files:
    """Observes the opening of files from the moment of `install`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._busy = False

    def install(self) -> None:
        """Begin."""
        sys.addaudithook(self._audit)
        before(torch, "save", self._save)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or not self._recorder.is_main:
            return
        if event in _LOCKS:
            self._tell_lock(args[0])
        elif event == "open":
            self._note_open(*args)

    def _tell_lock(self, descriptor: int) -> None:
        """Tell of a file that ranks write one after the other, or use as a lock alone."""
        with suppress(OSError):
            self._recorder.tell("locked", path=os.readlink(f"/proc/self/fd/{descriptor}"))

    def _note_open(self, path: Any, mode: str | None, flags: int | None) -> None:
        if (flags or 0) & os.O_EXCL:  # one rank alone can
            return
        writes = any(letter in (mode or "") for letter in "wa+") or bool((flags or 0) & _WRITES)
        if writes and isinstance(path, str | bytes | os.PathLike):
            appends = "a" in (mode or "") or bool((flags or 0) & os.O_APPEND)
            self._tell(os.fsdecode(path), appends)

    def _tell(self, path: str, appends: bool) -> None:
        self._busy = True
        try:
            full = os.path.realpath(path)
            places = stack()
            if places and not full.startswith(_ELSEWHERE) and "__pycache__" not in full and _is_direct():
                self._recorder.tell("file", path=full, appends=appends, where=places)
        finally:
            self._busy = False

    def _save(self, obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            self._tell(os.fspath(f), False)


def _is_direct() -> bool:
    """Return whether the script asks for the file, not a module that is being imported or compiled."""
    frame = sys._getframe(2)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if "importlib" in frame.f_code.co_filename or "_inductor" in frame.f_code.co_filename:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True
