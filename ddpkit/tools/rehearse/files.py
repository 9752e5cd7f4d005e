"""Compare the tensors in the files of two folders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...collectives.tree import flat_bytes


@dataclass
class Difference:
    """How the files of two runs differ.

    Attributes:
        compared: Files with floating-point tensors that are in both folders.
        greatest: Of all differences, relative to the greatest element of the tensor.
        where: The file and tensor in which it is.
        bits: Whether all floating-point tensors of like shape are equal bit for bit.
        unlike: A tensor that the second run lacks, or has in another shape or type; "" if there is none.
        newest: The last file with tensors that the first run wrote, "" if it wrote none.
        is_missing: Whether the second run lacks that file.
    """

    compared: list[str] = field(default_factory=list)
    greatest: float = 0.0
    where: str = ""
    bits: bool = True
    unlike: str = ""
    newest: str = ""
    is_missing: bool = False


def compare(first: Path, second: Path) -> Difference:
    """Compare the files of two runs that have the same name and hold tensors, as far as torch reads them safely."""
    difference = Difference()
    files = sorted((file for file in first.rglob("*") if file.is_file()), key=lambda file: file.stat().st_mtime)
    for file in files:
        expected = _read(file)
        if not expected:
            continue
        name = str(file.relative_to(first))
        difference.newest = name
        difference.is_missing = not (second / name).is_file()
        if not difference.is_missing:
            difference.compared.append(name)
            _compare_tensors(difference, name, expected, _read(second / name))
    return difference


def _compare_tensors(difference: Difference, name: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for path, tensor in first.items():
        other = second.get(path)
        where = f"{path} in {name}"
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            difference.unlike = difference.unlike or where
            continue
        if torch.equal(flat_bytes(tensor), flat_bytes(other)):
            continue
        difference.bits = False
        apart = _relative(tensor, other)
        if apart > difference.greatest:
            difference.greatest = apart
            difference.where = where


def _relative(tensor: Tensor, other: Tensor) -> float:
    """Return the greatest difference, relative to the greatest element; infinite if one of the two is NaN somewhere."""
    first, second = tensor.double(), other.double()
    apart = (first - second).abs()
    apart[(first == second) | (first.isnan() & second.isnan())] = 0
    greatest = float(apart.max())
    scale = float(first.nan_to_num().abs().max())
    relative = greatest / max(scale, torch.finfo(torch.float64).tiny)
    return float("inf") if math.isnan(relative) else relative


def _read(file: Path) -> dict[str, Tensor]:
    """Read the floating-point tensors of a file, by their place in it; {} if it is none that torch reads safely."""
    try:
        with file.open("rb") as start:
            if start.read(2) != b"PK":  # the archive that `torch.save` writes
                return {}
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return {}
    return dict(_tensors(content, ""))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided and not value.is_meta:
            yield path.removeprefix("."), value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _tensors(child, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for position, child in enumerate(value):
            yield from _tensors(child, f"{path}.{position}")
