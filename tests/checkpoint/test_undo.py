"""Loads that fail halfway are undone on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_ranks, same
from runs import (
    Halves,
    run_with,
)
from torch import nn

import ddpkit
from ddpkit.checkpoint.checkpointer import Checkpointer
from ddpkit.errors import CheckpointError


class Strict(nn.Linear):
    """Raises when its extra state comes, after its tensors and those before it have been changed."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        raise ValueError("no extra state today")


class Overridden(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(*args, **kwargs)
        raise ValueError("overridden")


class Fussy(torch.optim.Adam):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        raise ValueError("fussy")


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)

    def hook(*_: Any) -> None:
        raise ValueError("hooked")

    model.register_load_state_dict_post_hook(hook)
    return model


def look(run: dict[str, Any]) -> dict[str, Any]:
    keep = {name: value.state_dict() for name, value in run.items()}
    keep["lr"] = [group["lr"] for group in run["optimizer"].param_groups]
    keep["tensors"] = [tensor.detach().clone() for tensor in run["model"].parameters()]
    return torch.load(_through_a_file(keep), weights_only=False)


def _through_a_file(value: Any) -> Any:
    import io

    torch.save(value, buffer := io.BytesIO())
    buffer.seek(0)
    return buffer


def fails_halfway(folder: str) -> list[str]:
    rank, last = ddpkit.get_rank(), ddpkit.get_world_size() - 1
    breaking = {
        "no extra state today": ("last", lambda: nn.Sequential(nn.Linear(2, 2), Strict(2, 2)), nn.Module),
        "overridden": ("last", lambda: Overridden(2, 2), nn.Module),
        "hooked": ("last", hooked, nn.Module),
        "fussy": ("last", lambda: Fussy(nn.Linear(2, 2).parameters()), object),
        "halves": ("halves", lambda: Halves(1, fails=True), object),
    }
    said = []
    for number, (message, (name, make, _)) in enumerate(breaking.items()):
        torch.manual_seed(0)
        path = Checkpointer(folder).save(number, **run_with(7, **{name: Halves(7) if name == "halves" else make()}))
        torch.manual_seed(1)
        objects = run_with(1, **{name: make()})
        if rank != last:  # only on the last rank does it fail
            objects[name] = Halves(1) if name == "halves" else objects[name]
        before, drawn = look(objects), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=f"nothing was changed: (Rank {last}: )?.*{message}"):
            Checkpointer(folder).load(path, **objects)
        after = look(objects)
        assert same(before, after), [key for key in before if not same(before[key], after[key])]
        assert torch.equal(drawn, torch.get_rng_state())
        optimizer = objects["optimizer"]
        assert [*optimizer.state] == [*objects["model"].parameters()]
        optimizer.step()
        said.append(message)
    return said


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_what_fails_halfway_is_undone_on_every_rank(tmp_path: Path, nprocs: int) -> None:
    for said in on_ranks(fails_halfway, nprocs, str(tmp_path), timeout=60.0):
        assert len(said) == 5


def test_an_error_without_a_text_is_named_where_an_object_is_not_put_back(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Gone(Halves):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values[0] += 1
            raise Mute

    path = Checkpointer(tmp_path).save(1, halves=Gone(7))
    with pytest.raises(CheckpointError, match=r"halves could not be put back \(Mute: \(no message: its __str__ raises"):
        Checkpointer(tmp_path).load(path, halves=Gone(8))


def test_what_does_not_take_its_own_state_back_is_said(tmp_path: Path) -> None:
    class Gone(Halves):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values[0] += 1
            raise ValueError("gone")

    path = Checkpointer(tmp_path).save(1, halves=Gone(7))
    model = nn.Linear(1, 1)
    with pytest.raises(
        CheckpointError, match=r"halves could not be put back \(ValueError: gone\): it is partly loaded"
    ):
        Checkpointer(tmp_path).load(path, halves=Gone(1))
    with pytest.raises(TypeError, match=r"has no load_state_dict\(\)"):
        Checkpointer(tmp_path).load(path, halves=model.weight)
