"""Files that are complete or absent: written under another name, then renamed, with a checksum.

They are zip archives of `torch.save`, which plain `torch.load` reads, plus one line with their checksum, which ddpkit
verifies when reading.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import GenericAlias
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError
from ..parsing import fits
from .states import ByName, has_names, without_tensors

Check = Callable[[], None]  # called before each write; raises if the writing must stop

FORMAT = 1  # version of a checkpoint's content
FORMAT_WITH_PIECES = 2  # the same with sharded tensors, whose pieces are in a folder beside it
_ADVICE = "Save numbers, strings, tensors, or dicts, lists and tuples of them."
_MARK = b"\nchecksum:"
_LAST_LINE = len(_MARK) + 8 + 1  # bytes: the mark, the checksum, a newline
_BLOCK = 1 << 20  # bytes read at a time
_FORM = {"step": int, "score": float | None, "state": dict, "described": dict, "rng": [dict]}  # of a content
_LAYOUT = {"dtype": torch.dtype, "shape": [int], "pieces": [tuple[tuple[int, ...], tuple[int, ...], int, int]]}
_SHARDED = {"folder": str, "tensors": GenericAlias(dict, (str, _LAYOUT))}  # in a content with sharded tensors


def open_file(path: Path, mode: str = "rb") -> Any:
    """Open a file in a folder into which others may have put anything else; it never waits.

    Raises:
        OSError: If it is no regular file, but for example a link, a pipe or a device; if it is opened for changes and
            has a second name, because it may be somebody's elsewhere.
    """
    return open(path, mode, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for its other end
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "It is a link"
        raise
    found = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(found.st_mode):
        problem = "It is not a regular file"
    elif flags & os.O_RDWR and found.st_nlink > 1:
        problem = "It has a second name (a hard link)"
    if problem:
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, path)
    return descriptor


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that a crash at any moment leaves either the old or the new one.

    Args:
        path: File name in an existing folder; `<path>.tmp` is used meanwhile.
        write: Receives the file, open for writing bytes.

    Raises:
        OSError: If writing fails, for example on a full disk; the old file is untouched.
    """
    # in the same folder: a rename is atomic within one file system only
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open_file(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # where supported: the name then survives a power failure
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def writing_into(path: Path) -> Iterator[None]:
    """Raise a CheckpointError if the block cannot write a file or folder."""
    try:
        yield
    except OSError as error:
        problem = f"Cannot write to {path}: {error}."
        raise CheckpointError(f"{problem} Earlier checkpoints are complete.") from error


def dump(content: Any, file: BinaryIO, check: Check | None = None) -> None:
    """Write a content and its checksum to a file on the disk.

    Args:
        content: What `torch.save` can write.
        file: The file.
        check: Called before each write, and may raise.

    Raises:
        OSError: If writing to the disk fails.
    """
    summed = SummedFile(file, check)
    try:
        torch.save(content, summed)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch turns what write() raises into a RuntimeError
        raise error.__context__ or error from None
    summed.end()


def check_saveable(content: ByName) -> None:
    """Raise CheckpointError if loading a content would need code; large tensors cost no time."""
    content = without_tensors(content)
    try:
        from_bytes(to_bytes(content))
    except Exception as error:
        name = _first_unsaveable(content)
        raise CheckpointError(f"Cannot save {name}: {_reason(error)} {_ADVICE}") from None


def read(path: Path, is_mapped: bool = False) -> tuple[dict[str, Any], str]:
    """Read what `dump()` wrote for a checkpoint, tensors to the CPU.

    Args:
        path: The file.
        is_mapped: Whether to leave the tensors' bytes in the file until they are used.

    Returns:
        The content and its checksum.

    Raises:
        CheckpointError: If the file was truncated or changed, holds pickled code, or has another format.
    """
    with reading(path) as file:
        checksum = verify(file)
        file.seek(0)
        source = f"/dev/fd/{file.fileno()}" if is_mapped else file  # not the path: it may name another file by now
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        _check_form(content)
    return content, checksum


def _check_form(content: Any) -> None:
    """Raise ValueError unless this is the content of a checkpoint."""
    found = content if isinstance(content, dict) else {}
    version = found.get("format")
    if version not in (FORMAT, FORMAT_WITH_PIECES):
        raise ValueError(f"its format is {version}, this ddpkit reads {FORMAT} and {FORMAT_WITH_PIECES}.")
    form = _FORM | {"sharded": _SHARDED} if "sharded" in found else _FORM
    for name, kind in form.items():
        if not fits(found.get(name), kind):
            raise ValueError(f"it has no valid {name!r}: a Checkpointer did not write it.")


@contextmanager
def reading(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file; raise a CheckpointError if that or the block cannot read it."""
    try:
        with open_file(path) as file:
            yield file
    except Exception as error:
        raise CheckpointError(f"Cannot read {path}: {_reason(error)}") from error


def to_bytes(content: Any) -> bytes:
    """Return `content` as `dump()` writes it, without the checksum."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the content passed to `to_bytes()`, tensors on the CPU; raise if that needs code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class SummedFile:
    """A file to write to, with the CRC-32 of everything written; `check` is called before each write."""

    def __init__(self, file: BinaryIO, check: Check | None = None) -> None:
        self.file = file
        self.check = check or (lambda: None)
        self.flush = file.flush
        self._crc = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, and sum many of them meanwhile: both take as long."""
        self.check()
        if len(data) >= _BLOCK:
            summing = threading.Thread(target=self._sum, args=[data])
            if starts(summing):
                try:
                    return self.file.write(data)
                finally:
                    summing.join()
        self._sum(data)
        return self.file.write(data)

    def _sum(self, data: bytes | memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def end(self) -> None:
        """Write the last line."""
        self.file.write(_last_line(self._crc))
        self.flush()


def starts(thread: threading.Thread) -> bool:
    """Start a thread; return whether it has started: while Python exits, none does."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def verify(file: BinaryIO) -> str:
    """Verify a file's checksum, and return it; raise ValueError if it does not match."""
    left = max(0, file.seek(0, os.SEEK_END) - _LAST_LINE)
    file.seek(left)
    last_line = file.read(_LAST_LINE)
    if not last_line.startswith(_MARK):  # before all else: the file may be large
        raise ValueError("its checksum is missing: it was truncated, or a Checkpointer did not write it.")
    file.seek(0)
    crc = 0
    while left and (block := file.read(min(_BLOCK, left))):
        crc = zlib.crc32(block, crc)
        left -= len(block)
    if last_line != _last_line(crc):
        raise ValueError("its checksum does not match: it was damaged.")
    return f"{crc:08x}"


def _last_line(crc: int) -> bytes:
    return _MARK + b"%08x\n" % crc


def _first_unsaveable(content: ByName) -> str:
    """Find the first value that does not load on its own.

    Returns:
        Its key, after a dot the key inside it, and so on as far as known; "" if all load.
    """
    for key, value in content.items():
        try:
            from_bytes(to_bytes(value))
        except Exception:
            inner = _first_unsaveable(value) if has_names(value) else ""
            return f"{key}.{inner}" if inner else key
    return ""


def _reason(error: Exception) -> str:
    """Shorten an error's text to one sentence: torch's, to the line on the unsupported type."""
    text = str(error) or repr(error)
    unsupported = re.search(r"\S.*nsupported.*?(?= Please use|$)", text, re.MULTILINE)
    reason = unsupported[0] if unsupported else text.splitlines()[0]
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."
