"""What the landing page, the pages with diffs and the cheat sheet show is what the code does."""

from __future__ import annotations

import inspect
import re

import diffs
import pytest
import ranks
import torch

import ddpkit

SHEET = (diffs.DOCS / "cheat-sheet.md").read_text()


@pytest.mark.parametrize("page", [page.name for page in diffs.PAGES])
def test_the_diffs_of_a_page_are_those_of_the_programs(page: str) -> None:
    (path,) = [path for path in diffs.PAGES if path.name == page]
    assert "```diff" in path.read_text()
    assert path.read_text() == diffs.updated(path), "run python docs/diffs.py"


@pytest.mark.parametrize("theme", ranks.COLOURS)
def test_the_picture_of_the_ranks_is_the_one_that_is_drawn(theme: str) -> None:
    assert (ranks.IMAGES / f"ranks_{theme}.svg").read_text() == ranks.draw(theme), "run python docs/ranks.py"


@pytest.mark.ranks(3)
def test_the_calls_in_the_picture_give_what_it_shows() -> None:
    shown = {call: cells[ddpkit.get_rank()] for call, _, cells, _ in ranks.calls()}
    assert shown["setup()"] == f"rank {ddpkit.get_rank()} of {ddpkit.get_world_size()}"
    (batch,) = ddpkit.make_loader(range(9), 3)
    assert shown["make_loader(range(9), 3)"] == " ".join(map(str, batch.tolist()))
    own, mean = map(float, shown["wrap_model(model)"].split(" → "))
    model = ddpkit.wrap_model(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), own)).sum().backward()
    assert ddpkit.unwrap_model(model).weight.grad.item() == mean
    own, mean = map(float, shown["all_reduce_mean(loss)"].split(" → "))
    assert ddpkit.all_reduce_mean(own) == pytest.approx(mean)
    assert shown["is_main_process()"] == str(ddpkit.is_main_process())


@pytest.mark.parametrize("name", ddpkit.__all__)
def test_the_cheat_sheet_has_every_name_and_says_who_calls_it(name: str) -> None:
    found = re.search(rf"(\*\*)?`{name}\b", SHEET.split("## Joining")[1])
    assert found, f"{name} is not on the cheat sheet"
    collective = "Collective" in inspect.getdoc(getattr(ddpkit, name))
    assert bool(found[1]) == collective
