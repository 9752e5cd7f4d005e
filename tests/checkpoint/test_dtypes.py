"""Saved tensors, the dtypes that hold them, and those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError

# saved values, the dtypes that hold them, and those that do not
DTYPES: list[tuple[torch.Tensor, list[torch.dtype], list[torch.dtype]]] = [
    (torch.tensor([1.7]), [torch.float64, torch.bfloat16, torch.complex64], [torch.int64, torch.bool]),
    (torch.tensor([2.0]), [torch.int8, torch.uint8], [torch.bool]),
    (torch.tensor([float("nan")]), [torch.float16], [torch.int64]),
    (torch.tensor([2**40]), [torch.float64, torch.float32], [torch.int8, torch.int32]),
    (torch.tensor([2**53 + 1]), [torch.uint64], [torch.float64, torch.complex128]),
    (torch.tensor([2**24 + 1]), [torch.float64, torch.complex128], [torch.float32, torch.complex64, torch.bfloat16]),
    (torch.tensor([-1.0e6]), [torch.bfloat16, torch.complex64], [torch.float16, torch.float8_e4m3fn]),
    (torch.tensor([float("inf"), -0.1]), [torch.float16, torch.bfloat16, torch.float8_e5m2], [torch.int64]),
    (torch.tensor([1e300], dtype=torch.float64), [torch.complex128], [torch.float32, torch.complex64]),
    (torch.tensor([1e300j], dtype=torch.complex128), [], [torch.complex64, torch.float64]),
    (torch.tensor([5e4], dtype=torch.float16).to(torch.float8_e5m2), [torch.float16], [torch.float8_e4m3fn]),
    (torch.tensor([1e-30]), [torch.float16], [torch.int8]),
    (torch.tensor([70000]), [torch.float32], [torch.float16, torch.uint16]),
    (torch.tensor([-1], dtype=torch.int8), [torch.int64], [torch.uint8, torch.uint64]),
    (torch.tensor([True]), [torch.float16, torch.uint8, torch.complex64], []),
    (torch.tensor([1 + 2j]), [torch.complex128], [torch.float32, torch.int64]),
]


@pytest.mark.parametrize("saved, fit, unfit", DTYPES, ids=[str(saved.tolist()) for saved, *_ in DTYPES])
def test_a_buffer_of_a_dtype_that_does_not_hold_the_saved_values_is_refused(
    tmp_path: Path, saved: torch.Tensor, fit: list[torch.dtype], unfit: list[torch.dtype]
) -> None:
    def holder(value: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("seen", value.clone())
        return module

    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, model=holder(saved))
    for dtype in fit:
        model = holder(torch.zeros(len(saved), dtype=dtype))
        checkpoints.load(path, model=model)
        assert torch.equal(model.seen, saved.to(dtype)) or saved.isnan().all()
    for dtype in unfit:
        model = holder(torch.zeros(len(saved), dtype=dtype))
        with pytest.raises(
            CheckpointError, match=f"model has seen as {saved.dtype} in the checkpoint, ".replace("torch.", "")
        ):
            checkpoints.load(path, model=model)
        assert torch.equal(model.seen, torch.zeros(len(saved), dtype=dtype))
