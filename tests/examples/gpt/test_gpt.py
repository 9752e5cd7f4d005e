"""A tiny GPT takes the same steps on any number of ranks, whole or in parts, and also when it is interrupted."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks
from processes import ROOT, TORCHRUN, launch
from signals import signalled

import ddpkit

GPT = str(ROOT / "examples" / "gpt.py")
TINY = "--layers 2 --width 32 --context 16 --epochs 3 --warm-up 2 --log-every 1 --generate 20"  # 12 steps on TEXT
TEXT = ("The quick brown fox jumps over the lazy dog.\n" * 16)[:690]  # 38 windows are for training, 5 for validation

needs_fsdp = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch cannot train on CPUs"
)
EITHER_WAY = ["ddp", pytest.param("fsdp", marks=needs_fsdp)]
FSDP_IN_STORM = ["ddp", pytest.param("fsdp", marks=[needs_fsdp, pytest.mark.storm])]


class Said(logging.Handler):
    """Keeps the numbers and the text that the example logs, by what they are of: "step 3"."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith(("step %d", "epoch %d")):
            number, loss = record.args
            self.by_name[record.msg.split()[0] + f" {number}"] = loss
        else:
            self.by_name["last"] = record.getMessage()


def train_here(folder: Path, flags: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("gpt", GPT)
    gpt: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    gpt.topics = {"fox": TEXT}
    sys.argv = ["gpt.py", "--folder", str(folder), *TINY.split(), *flags.split()]
    said = Said()
    gpt.log.addHandler(said)
    gpt.log.setLevel(logging.INFO)
    try:
        with ddpkit.stopping() as stop:
            gpt.main(gpt.read_settings(), ddpkit.setup(), stop)
    finally:
        gpt.log.removeHandler(said)
    return said.by_name


def train(folder: Path, ranks: int, flags: str) -> tuple[dict[str, float], str]:
    """The losses, which all ranks know alike, and the last that was said: the generated text, on a run to the end."""
    said, *others = on_ranks(train_here, ranks, folder, flags)
    for other in others:
        assert other == said
    last = said.pop("last")
    return said, last


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    losses, text = train(tmp_path_factory.mktemp("alone"), 1, "")
    assert [*losses][3:6] == ["step 4", "epoch 0", "step 5"]
    assert [*losses][-2:] == ["step 12", "epoch 2"]
    assert losses["epoch 2"] < losses["epoch 0"] < losses["step 1"]
    assert text.startswith("The ") and len(text) >= 20
    return losses


@pytest.mark.parametrize("parallel", EITHER_WAY)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.storm)])
def test_several_ranks_have_the_losses_of_one(
    parallel: str, ranks: int, alone: dict[str, float], tmp_path: Path
) -> None:
    losses, text = train(tmp_path, ranks, f"--parallel {parallel} --accumulate 2")
    assert losses == pytest.approx(alone, abs=1e-4)
    assert text.startswith("The ")


def digest(folder: Path) -> str:
    """SHA-256 of the weights and moments in the last checkpoint."""
    saved = ddpkit.Checkpointer(folder).load_latest()
    tensors = list(saved["model"].values())
    for moments in saved["optimizer"]["state"].values():
        tensors += moments.values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory, alone: dict[str, float]) -> str:
    folder = tmp_path_factory.mktemp("deterministic")
    losses, _ = train(folder, 1, "--deterministic")
    assert losses == pytest.approx(alone, abs=1e-4)
    return digest(folder)


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.storm) for n in (4, 8))])
def test_a_deterministic_run_has_the_same_bits_on_any_number_of_ranks(
    ranks: int, deterministic: str, tmp_path: Path
) -> None:
    train(tmp_path, ranks, "--deterministic")
    assert digest(tmp_path) == deterministic


def test_a_deterministic_run_that_is_stopped_has_the_same_bits_on_other_ranks(
    deterministic: str, tmp_path: Path
) -> None:
    for ranks, stop in [(3, "--stop-after 3"), (1, "--stop-after 6"), (2, "")]:
        train(tmp_path, ranks, f"--deterministic --resume {stop}")
    assert digest(tmp_path) == deterministic


MOVES = [
    pytest.param([("ddp", 2), ("ddp", 3), ("ddp", 1)], marks=pytest.mark.storm),
    pytest.param([("ddp", 2), ("fsdp", 3), ("ddp", 1)], marks=needs_fsdp),
    pytest.param([("fsdp", 3), ("ddp", 1), ("fsdp", 2)], marks=[needs_fsdp, pytest.mark.storm]),
    pytest.param([("fsdp", 2), ("fsdp", 3), ("fsdp", 2)], marks=[needs_fsdp, pytest.mark.storm]),
]


@pytest.mark.parametrize("moves", MOVES, ids=lambda moves: "-".join(f"{kind}{ranks}" for kind, ranks in moves))
def test_a_run_moves_between_ddp_and_fsdp_and_to_other_numbers_of_ranks(
    moves: list[tuple[str, int]], alone: dict[str, float], tmp_path: Path
) -> None:
    losses: dict[str, float] = {}
    until = ["--stop-after 3", "--stop-after 6", ""]  # four steps are an epoch
    for (parallel, ranks), stop in zip(moves, until, strict=True):
        found, _ = train(tmp_path, ranks, f"--resume --parallel {parallel} {stop}")
        assert not found.keys() & losses.keys()
        losses |= found
    assert losses == pytest.approx(alone, abs=1e-4)
    assert ddpkit.Checkpointer(tmp_path).steps() == [3, 6, 12]


@pytest.mark.storm
@needs_fsdp
def test_the_program_reads_the_manual_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    settings = ["--layers", "1", "--width", "32", "--batch-size", "96", "--epochs", "1", "--folder", str(tmp_path)]
    (first,) = launch([sys.executable, GPT, *settings, "--stop-after", "20"])
    assert first.code == 0, first.output
    sharded = [*settings, "--parallel", "fsdp", "--bf16", "--resume", "--log-every", "20"]
    (rest,) = launch([*TORCHRUN, "--nproc_per_node=2", GPT, *sharded])
    assert rest.code == 0, rest.output
    assert "training from step 20 to " in rest.output
    assert rest.output.count("step 40: loss") == 1
    assert rest.output.count("epoch 0: validation loss") == 1
    assert rest.output.count("\nThe ") == 1


def train_until_signalled(folder: Path, flags: str) -> dict[str, Any]:
    with signalled(rank=1, step=3):
        return train_here(folder, flags)


@pytest.mark.parametrize("parallel", FSDP_IN_STORM)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(
    parallel: str, alone: dict[str, float], tmp_path: Path
) -> None:
    before, other = on_ranks(train_until_signalled, 2, tmp_path, f"--parallel {parallel}")
    assert before == other
    (stopped,) = ddpkit.Checkpointer(tmp_path).steps()
    assert before.pop("last") == f"stopped after step {stopped}; resume with --resume"
    after, _ = train(tmp_path, 1, "--resume")
    assert before | after == pytest.approx(alone, abs=1e-4)
