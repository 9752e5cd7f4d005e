"""The cases of torchtnt's own suite, with our names.

They come from `tests/utils` (`test_distributed`, `test_env`, `test_device`, `test_rank_zero_log`,
`test_prepare_module`, `test_checkpoint`) and from `tests/framework/callbacks` (`test_base_checkpointer`,
`test_time_limit_interrupter`, `test_slow_rank_detector`).

Differs on purpose; a test below pins what we do:

| theirs | here | why |
|---|---|---|
| `sync_bool` in several modes | `stop_together` is "any" | the others are one `all_reduce` or `broadcast` |
| tensors uneven in several dimensions are gathered | objects are | one exchange, checked before it moves |
| other ranks' warnings and errors are swallowed | they speak | what goes wrong on one rank is seen nowhere else |
| `spawn_multi_process` takes keywords | positional arguments, as `torch.multiprocessing` | use `functools.partial` |
| a file name holds epoch and step | the step | what counts for a resumed run |

No counterpart:

| case | why |
|---|---|
| `get_file_init_method`, `get_tcp_init_method`, `get_or_create_gloo_pg` | `setup()` makes the group |
| `revert_sync_batchnorm`, `PGWrapper.scatter_object_list` | torch |
| deterministic modes | `torch.use_deterministic_algorithms` |
| FSDP, TP, DCP, torchsnapshot, precision policies | not our business |
| `CheckpointPath` names, metadata files, remote file systems | one folder of one format |
| timers, flops, memory, NaN and out-of-memory tools, the framework | not our business |
"""

from __future__ import annotations

import functools
import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpkit
from ddpkit import (
    Checkpointer,
    LaunchError,
    all_gather,
    all_gather_object,
    all_reduce,
    broadcast,
    detect_launch,
    get_rank,
    get_world_size,
    stop_together,
    wrap_model,
)

pytestmark = pytest.mark.storm  # what is tested elsewhere once more

# --- who am I ---------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_on_one_node_local_rank_and_size_are_rank_and_size() -> None:
    assert ddpkit.get_local_rank() == get_rank()
    assert ddpkit.get_local_world_size() == get_world_size()
    assert (get_rank(), get_world_size()) == (
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    )


@pytest.mark.parametrize(("rank", "world_size"), [("0", "-1"), ("-1", "2"), ("8", "8")])
def test_a_rank_or_a_size_that_cannot_be_is_refused(rank: str, world_size: str) -> None:
    with pytest.raises(LaunchError, match="RANK|WORLD_SIZE"):
        detect_launch({"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "a", "MASTER_PORT": "1"})


@on(1, 2)
def test_the_device_and_the_backend_follow_from_the_machine() -> None:
    context = ddpkit.setup()
    assert context.device == ddpkit.get_device()
    if not torch.cuda.is_available():
        assert context.device.type == "cpu"
        assert context.backend == (None if get_world_size() == 1 else "gloo")


def adopt(store: str) -> tuple[int, str, bool]:
    options = {} if not store else {"init_method": store, "rank": get_rank(), "world_size": get_world_size()}
    dist.init_process_group("gloo", **options)
    context = ddpkit.setup()
    total = ddpkit.all_reduce(context.rank + 1)
    ddpkit.barrier("added")
    ddpkit.teardown()
    there = dist.is_initialized()
    dist.destroy_process_group()
    return total, context.device.type, there


def test_a_group_that_exists_is_adopted_and_left_in_place(tmp_path: Path) -> None:
    found = ddpkit.spawn(adopt, 2, f"file://{tmp_path}/store")
    assert found == [(3, ddpkit.get_device().type, True)] * 2


def test_a_launched_function_may_make_torchs_own_group_from_the_environment() -> None:
    assert ddpkit.spawn(adopt, 2, "") == [(3, ddpkit.get_device().type, True)] * 2


def leave() -> bool:
    ddpkit.teardown()  # there is nothing to leave yet
    ddpkit.setup()
    ddpkit.teardown()
    return dist.is_initialized()


def test_after_teardown_there_is_no_group() -> None:
    assert ddpkit.spawn(leave, 2) == [False, False]


# --- collectives ------------------------------------------------------------------------------------------------------


@on(1, 2, 3)
def test_uneven_tensors_are_gathered_as_they_are() -> None:
    gathered = all_gather(torch.ones(get_rank(), 3))
    assert [tuple(tensor.shape) for tensor in gathered] == [(rank, 3) for rank in range(get_world_size())]


@on(2, 3)
def test_tensors_uneven_in_two_dimensions_are_gathered_as_objects() -> None:
    mine = torch.ones(get_rank() + 1, 4 - get_rank())
    gathered = all_gather_object(mine)
    assert [tuple(tensor.shape) for tensor in gathered] == [(rank + 1, 4 - rank) for rank in range(get_world_size())]


@on(1, 2, 3)
def test_strings_are_broadcast_and_gathered_at_any_length() -> None:
    assert broadcast("foo" if get_rank() == 0 else None) == "foo"
    assert broadcast("foo" * 10_000 if get_rank() == 0 else "") == "foo" * 10_000
    texts = ["foo", "barzoo", ""]
    assert all_gather_object(texts[get_rank()]) == texts[: get_world_size()]


@on(1, 2, 3)
def test_what_rank_0_reads_everybody_has() -> None:
    calls = []

    def read(text: str, *, times: int) -> str:
        calls.append(get_rank())
        return text * times

    assert ddpkit.run_on_main(read, "foo", times=2) == "foofoo"
    assert calls == ([0] if get_rank() == 0 else [])


@on(1, 2, 3)
def test_a_function_for_rank_0_returns_none_elsewhere() -> None:
    assert ddpkit.main_process_only(lambda: 1)() == (1 if get_rank() == 0 else None)


@on(1, 2, 3)
def test_any_rank_may_stop_all() -> None:
    assert stop_together(get_rank() == 0) is True
    assert stop_together(False) is False
    assert stop_together(get_rank() == get_world_size() - 1) is True


@on(1, 2, 3)
def test_all_or_a_share_of_the_ranks_is_a_sum_away() -> None:
    votes = all_reduce(get_rank() == 0)
    assert votes == 1
    assert (votes == get_world_size()) == (get_world_size() == 1)  # all
    assert votes / get_world_size() >= 0.3  # a share
    assert broadcast(get_rank() == 0) is True  # rank 0 decides


@on(1, 2, 3)
def test_the_slowest_rank_is_found_by_gathering_times() -> None:
    times = all_gather_object(1.0 + get_rank())
    assert int(np.argmax(times)) == get_world_size() - 1


# --- launching --------------------------------------------------------------------------------------------------------


def offset(first: int, second: int) -> int:
    with ddpkit.distributed() as context:
        return context.rank + first - second


def test_launched_ranks_take_arguments_and_return_in_order() -> None:
    assert ddpkit.spawn(offset, 2, 3, 2) == [1, 2]
    assert ddpkit.spawn(functools.partial(offset, second=2), 2, 3) == [1, 2]


# --- seeds and logs ---------------------------------------------------------------------------------------------------


def test_a_seed_is_checked() -> None:
    for wrong in (-1, np.iinfo(np.uint64).max):
        with pytest.raises(ValueError, match="seed"):
            ddpkit.seed_everything(int(wrong))
    assert ddpkit.seed_everything(42) == 42


def test_a_seed_may_be_a_numpy_integer() -> None:
    assert ddpkit.seed_everything(np.int64(42)) == 42  # type: ignore[arg-type]


def test_a_seed_leaves_deterministic_settings_alone() -> None:
    def settings() -> tuple[bool, bool, int]:
        cudnn = torch.backends.cudnn
        return cudnn.deterministic, cudnn.benchmark, torch.get_deterministic_debug_mode()

    before = settings()
    ddpkit.seed_everything(42)
    assert settings() == before


@on(1, 2, 3)
def test_debug_and_information_come_from_rank_0_and_the_rest_from_all() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = ddpkit.get_logger("peers.torchtnt")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    for say in (log.debug, log.info, log.warning, log.error, log.critical):
        say(say.__name__)
    log.removeHandler(handler)
    everything = ["debug", "info", "warning", "error", "critical"]
    assert stream.getvalue().split() == (everything if get_rank() == 0 else everything[2:])


# --- models -----------------------------------------------------------------------------------------------------------


@on(1, 2)
def test_the_strategy_ddp_needs_a_group_and_an_unknown_one_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy must be auto, ddp or dp"):
        wrap_model(nn.Linear(1, 1), strategy="foo")  # type: ignore[arg-type]
    if get_world_size() == 1:
        with pytest.raises(ddpkit.DdpkitError, match="needs a process group"):
            wrap_model(nn.Linear(1, 1), strategy="ddp")
        return
    assert isinstance(wrap_model(nn.Linear(1, 1), strategy="ddp"), DistributedDataParallel)


@on(1, 2)
def test_a_compiled_models_keys_are_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    cleaned = ddpkit.clean_state_dict(wrap_model(compiled).state_dict())
    assert list(cleaned) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in cleaned.items())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@on(1, 2)
def test_surplus_checkpoints_go_and_the_newest_stays(folder: Path) -> None:
    for step in (0, 1, 2):
        Checkpointer(folder, keep=5).save(step)
    Checkpointer(folder, keep=1).save(3)
    assert [path.name for path in folder.glob("*.pt")] == ["step-000000003.pt"]


@on(1, 2)
def test_a_folder_that_is_empty_or_missing_holds_no_checkpoint(folder: Path) -> None:
    assert Checkpointer(folder).load_latest() is None
    assert Checkpointer(folder / "missing").load_latest() is None


@on(1, 2)
def test_the_latest_is_the_last_written_and_damage_falls_back(folder: Path) -> None:
    checkpoints = Checkpointer(folder)
    for step in (1, 2):
        path = checkpoints.save(step, note=f"{step}")
    assert checkpoints.load_latest() == {"step": 2, "note": "2"}
    ddpkit.barrier("read")
    if get_rank() == 0:
        path.write_bytes(path.read_bytes()[:-100])
    ddpkit.barrier("damaged")
    assert checkpoints.load_latest() == {"step": 1, "note": "1"}


@on(1, 2)
def test_what_stands_beside_the_checkpoints_stays(folder: Path) -> None:
    strangers = [folder / "step-best.pt", folder / "epoch_0_step_1", folder / "notes.txt"]
    if get_rank() == 0:
        strangers[0].write_text("the user's own")
        strangers[1].mkdir()
        strangers[2].write_text("notes")
    ddpkit.barrier("made")
    for step in range(3):
        Checkpointer(folder, keep=1).save(step)
    assert all(path.exists() for path in strangers)


@on(1, 2)
def test_all_ranks_know_the_same_path(folder: Path) -> None:
    path = Checkpointer(folder).save(7)
    assert all_gather_object(str(path)) == [str(folder / "step-000000007.pt")] * get_world_size()


@on(1, 2)
def test_a_step_may_be_a_numpy_integer(folder: Path) -> None:
    path = Checkpointer(folder).save(np.int64(7))  # type: ignore[arg-type]
    assert path.name == "step-000000007.pt"
