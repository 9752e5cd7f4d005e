"""Files that are whole or not there: written under another name, then renamed, with a checksum.

They are `torch.save`'s zip archives, so plain `torch.load` reads them, and one more line with their
checksum, which reading verifies.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError, DdpkitError
from .states import has_names, without_tensors

# The checksum of a file: quick to compute, and so long that two files do not have the same by chance.

LENGTH = 64  # characters
_BLOCK = 1 << 20  # bytes


class Checksum:
    """The SHA-256 of the CRC-32 of each MiB, the last one being shorter.

    A damaged block is missed once in four billion times. That is several times as quick as the
    SHA-256 of all bytes, and nobody cheats here.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc = 0  # of the block that is not full yet
        self._filled = 0  # bytes of that block

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        rest = memoryview(data)
        while rest:
            piece = rest[: _BLOCK - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            if self._filled == _BLOCK:
                self._end_block()
            rest = rest[len(piece) :]

    def text(self) -> str:
        """Return the checksum, in hexadecimal; nothing may be added afterwards."""
        if self._filled:
            self._end_block()
        return self._sha256.hexdigest()

    def _end_block(self) -> None:
        self._sha256.update(self._crc.to_bytes(4, "little"))
        self._crc = 0
        self._filled = 0


FORMAT = 1  # of a checkpoint's content
FORMAT_WITH_PIECES = 2  # of one with sharded tensors, whose pieces are in a folder beside it
_ADVICE = "Save numbers, strings, tensors, or dicts, lists and tuples of them."
_MARK = b"\nchecksum:"
_LAST_LINE = len(_MARK) + LENGTH + 1  # bytes: the mark, the checksum, a newline


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that a crash at any moment leaves either the old one or the new one.

    Args:
        path: The file's name in an existing folder; `<path>.tmp` is used meanwhile.
        write: Gets the file, open for writing bytes.

    Raises:
        OSError: If it cannot be written, for example on a full disk; the old file is untouched.
    """
    # in the same folder: a rename is atomic within one file system
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # a new one: a link with this name would be followed
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # where the system can: the name then outlives a loss of power
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def dump(content: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a content and its checksum to a file on the disk; raise OSError if the disk does not take it."""
    summed = SummedFile(file)
    try:
        torch.save(content, summed)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch makes a RuntimeError of what write() raises, also of an interrupt
        raise error.__context__ or error from None
    summed.end()


def check_saveable(content: Mapping[str, Any]) -> None:
    """Raise CheckpointError if loading a content would need code; the size of its tensors costs no time."""
    content = without_tensors(content)
    try:
        from_bytes(to_bytes(content))
    except Exception as error:
        name = _first_unsaveable(content)
        raise CheckpointError(f"Cannot save {name}: {_reason(error)} {_ADVICE}") from error


def read(file: BinaryIO, is_mapped: bool = False) -> tuple[Any, str]:
    """Read what `dump()` wrote from a file open for reading, tensors to the CPU.

    Args:
        file: The file.
        is_mapped: Whether to leave the tensors' bytes in the file until they are used.

    Returns:
        The content, and its checksum.

    Raises:
        CheckpointError: If the file was truncated or changed, or holds pickled code.
    """
    try:
        checksum = verify(file)
        file.seek(0)
        source = file.name if is_mapped else file
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        return content, checksum
    except DdpkitError:
        raise
    except Exception as error:
        raise unreadable(file.name, error) from error


def unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """Make the error to raise where a file cannot be read."""
    return CheckpointError(f"Cannot read {path}: {_reason(error)}")


def explain_unusable(content: Any) -> str:
    """Say why a file's content, of any kind, cannot be used; "" if it is of a known format."""
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}, which no Checkpointer wrote"
    version = content.get("format")
    if version not in (FORMAT, FORMAT_WITH_PIECES):
        return f"its format is {version}, this ddpkit reads {FORMAT} and {FORMAT_WITH_PIECES}"
    return ""


def to_bytes(content: Any) -> bytes:
    """Return `content` as `dump()` writes it, without the checksum."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return what `to_bytes()` was given, tensors on the CPU; raise if that needs code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class SummedFile:
    """A file to write to, with the checksum of all that was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.checksum = Checksum()

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes."""
        self.checksum.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()

    def end(self) -> None:
        """Write the last line."""
        self.file.write(_MARK + self.checksum.text().encode() + b"\n")
        self.file.flush()


def verify(file: BinaryIO) -> str:
    """Compare a file with its checksum, and return that; raise ValueError if they differ."""
    length = file.seek(0, os.SEEK_END) - _LAST_LINE
    file.seek(0)
    checksum = Checksum()
    for start in range(0, length, _BLOCK):
        checksum.update(file.read(min(_BLOCK, length - start)))
    last_line = file.read()
    if not last_line.startswith(_MARK):
        raise ValueError("its checksum is missing: it was truncated, or a Checkpointer did not write it.")
    text = checksum.text()
    if last_line != _MARK + text.encode() + b"\n":
        raise ValueError("its checksum does not match: it was damaged.")
    return text


def _first_unsaveable(content: Mapping[str, Any]) -> str:
    """Find the first value that does not load on its own.

    Returns:
        Its key, after a dot the key inside it, and so on as far as keys are known; "" if all load.
    """
    for key, value in content.items():
        try:
            from_bytes(to_bytes(value))
        except Exception:
            inner = _first_unsaveable(value) if has_names(value) else ""
            return f"{key}.{inner}" if inner else key
    return ""


def _reason(error: Exception) -> str:
    """Shorten the text of an error to one sentence: torch's, to the line on what is unsupported."""
    text = str(error) or repr(error)
    unsupported = re.search(r"\S.*nsupported.*?(?= Please use|$)", text, re.MULTILINE)
    reason = unsupported[0] if unsupported else text.splitlines()[0]
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."
