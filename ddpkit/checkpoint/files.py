"""Files that are whole or not there: written under another name and renamed, with a checksum that reading verifies.

What is in them is `torch.save`'s zip archive, so plain `torch.load` reads them, and one more line with its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError, DdpkitError

_SAVEABLE = "Save numbers, strings, tensors, or dicts, lists and tuples of them."
_MARK = b"\nsha256:"
_TAIL = len(_MARK) + 64 + 1  # the mark, the digest in hexadecimal, a newline


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file so that a crash at any moment leaves either the old one or the new one.

    Args:
        path: The file's name in an existing folder; `<path>.tmp` is used meanwhile.
        write: Gets the file, open for writing bytes.

    Raises:
        OSError: If it cannot be written, for example on a full disk. The old file is untouched then.
    """
    temporary = path.with_name(f"{path.name}.tmp")  # in the same folder: a rename is atomic within one file system
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def dump(content: Mapping[str, Any], file: BinaryIO) -> None:
    """Writes `content` and its checksum to a file on the disk.

    Raises:
        OSError: If the disk does not take it.
        CheckpointError: If loading `content` would need code from the file; the message names the key.
    """
    hashed = _Hashed(file)
    try:
        torch.save(content, hashed)  # type: ignore[arg-type]
    except (OSError, DdpkitError):
        raise
    except Exception as error:
        if isinstance(error.__context__, OSError):  # torch makes a RuntimeError of what write() raises
            raise error.__context__ from None
        raise CheckpointError(f"Cannot save {_culprit(content)}: {_reason(error)} {_SAVEABLE}") from error
    file.write(_MARK + hashed.sha256.hexdigest().encode() + b"\n")
    file.flush()
    try:
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)  # mapped: reads no tensor's bytes
    except Exception as error:
        raise CheckpointError(f"Cannot save {_culprit(content)}: {_reason(error)} {_SAVEABLE}") from error


def read(file: BinaryIO) -> tuple[Any, str]:
    """Read what `dump()` wrote from a file open for reading, tensors to the CPU.

    Returns:
        The content, and its SHA-256 in hexadecimal.

    Raises:
        CheckpointError: If the file was truncated or changed, or holds pickled code.
    """
    try:
        digest = _verify(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True), digest
    except DdpkitError:
        raise
    except Exception as error:
        raise unreadable(file.name, error) from error


def unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """Return the error to raise where a file cannot be read."""
    return CheckpointError(f"Cannot read {path}: {_reason(error)}")


def to_bytes(content: Any) -> bytes:
    """Return `content` as `torch.save` writes it."""
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return what `to_bytes()` was given, tensors on the CPU; raise if that needs code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _Hashed:
    """A file to write to that knows the SHA-256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _verify(file: BinaryIO) -> str:
    left, sha256 = max(0, file.seek(0, os.SEEK_END) - _TAIL), hashlib.sha256()
    file.seek(0)
    while left and (block := file.read(min(left, 1 << 20))):
        sha256.update(block)
        left -= len(block)
    tail, digest = file.read(), sha256.hexdigest()
    if not tail.startswith(_MARK):
        raise ValueError("its checksum is missing: it was truncated, or a Checkpointer did not write it.")
    if tail != _MARK + digest.encode() + b"\n":
        raise ValueError("its checksum does not match: it was damaged.")
    return digest


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder, so that a rename outlives a loss of power; where the system can."""
    with suppress(OSError):
        entry = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


def _culprit(content: Mapping[str, Any]) -> str:
    """The key of the first value that does not load on its own, with the inner keys as far as they are known."""
    for key, value in content.items():
        try:
            from_bytes(to_bytes(value))
        except Exception:
            inner = isinstance(value, Mapping) and all(isinstance(name, str) for name in value) and _culprit(value)
            return f"{key}.{inner}" if inner else key
    return ""


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()] or [repr(error)]
    found = next((line.split(" Please use")[0] for line in lines if "nsupported" in line), lines[0])
    return found if found.endswith((".", "!", "?")) else f"{found}."
