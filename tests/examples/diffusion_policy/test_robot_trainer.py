"""The robot's trainer as people run it, on tiny budgets with the arm that only has to reach a place."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_ranks, same
from PIL import Image
from processes import CLEAN, free_port, platform_env, run
from robot import checkpoints, collect, drawing, rollout, train
from robot.config import read_config
from robot.environments import EXPERTS, UNSEEN, Arena, Expert, Learned, Random, evaluate
from robot.policy import EMA, DiffusionPolicy
from robot.samples import Entries, Index, Statistics, read_episode, scan, write_shard
from shared.program import UserError, one_message
from shared.settings import nested
from signals import signalled
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_robot_parts import SMALL, make_batch, standard

import ddpkit

pytestmark = pytest.mark.storm  # it trains again and again

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "diffusion_policy"
ENV = CLEAN | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ENV |= {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
EPISODES = 10
LR = "algo.optim_params.policy.learning_rate.initial"
TINY = ["experiment.epoch_every_n_steps=4", "train.batch_size=8", *SMALL]
NUMBERS = Entries(("observations",), (), ("actions",))


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ten episodes in five shards."""
    folder = tmp_path_factory.mktemp("data") / "reach"
    options = {"episodes": EPISODES, "per_shard": 2, "horizon": 12, "noise": 0.1, "seed": 0, "pictures": None}
    with ddpkit.distributed() as context:
        collect.main(Namespace(env="FetchReach-v4", folder=folder, **options), context)
    return folder


def settings(data: Path, runs: Path, *more: str) -> list[str]:
    return [*TINY, f"train.data_path={data}", f"train.output_dir={runs}", "experiment.name=reach", *more]


def shell(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, cwd=FOLDER
    )


def main(arguments: list[str]) -> None:
    """What a rank does."""
    sys.argv = ["train.py", *arguments]
    with one_message(), ddpkit.distributed(num_threads=1) as job, ddpkit.stopping() as stop:
        train.main(job, stop)


def only_run(runs: Path) -> Path:
    (folder,) = (runs / "reach").iterdir()
    return folder


def states(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.pth")["state"]


def test_demonstrations_hold_what_the_expert_meant_not_what_the_noise_made_of_it(demonstrations: Path) -> None:
    index = scan(read_config([f"train.data_path={demonstrations}"]))
    assert len(index.folders[0]) == EPISODES and index.steps == [12 * EPISODES] and index.env_id == "FetchReach-v4"
    for episode in index.folders[0]:
        observations, actions = read_episode(episode.path, episode.name, NUMBERS)
        meant = np.stack([EXPERTS["FetchReach-v4"](observation) for observation in observations]).clip(-1, 1)
        assert actions == pytest.approx(meant.astype(np.float32), abs=1e-6)
        moved = np.diff(observations[:, :3], axis=0)  # by noisy actions, which are other ones
        assert np.abs(moved[-1]).max() > 1e-4
    with pytest.raises(UserError, match=f"{demonstrations} already holds episodes"):
        collect.prepare(demonstrations)


def test_the_experts_reach_their_goals_with_trembling_hands() -> None:
    for env_id in EXPERTS:
        assert all(Arena(env_id, 50).play(collect.Demonstrator(env_id, 0.1), range(UNSEEN, UNSEEN + 5))), env_id
    assert sum(Arena("FetchPickAndPlace-v4", 50).play(Random(), range(UNSEEN, UNSEEN + 5))) <= 1


@pytest.mark.parametrize("has_wandb", [False, pytest.param(True, marks=pytest.mark.peers("wandb"))])
def test_two_processes_train_and_leave_everything_in_place(
    has_wandb: bool, demonstrations: Path, tmp_path: Path
) -> None:
    more = "train.amp=bf16 train.gradient_accumulation_steps=2 train.gradient_checkpointing=true"
    more += " experiment.check_replicas_every_n_steps=3 train.num_epochs=3"
    more += " train.num_data_workers=1 train.persistent_workers=true train.prefetch_factor=3"
    more += " train.optim_params.policy.learning_rate.initial=4e-4 train.lr_scaling=sqrt"
    more += " experiment.rollout.n=3 experiment.rollout.horizon=12 experiment.rollout.rate=2"
    more += " experiment.save.every_n_epochs=2"
    more += f" experiment.logging.log_wandb={str(has_wandb).lower()}"
    (tmp_path / "config.json").write_text(json.dumps({"train": {"seed": 9, "batch_size": 999}}))
    arguments = settings(demonstrations, tmp_path / "runs", f"load_from={tmp_path / 'config.json'}", *more.split())
    ended = shell(["env", "NPROC=2", "scripts/train_multi_gpu.sh", *arguments])
    assert ended.returncode == 0, ended.stdout
    output = ended.stdout
    assert output.count("world size: 2") == 1
    assert "4 x the base of 8" in output and "0.0004 -> 0.0008 (sqrt)" in output
    assert output.count("stands for algo.optim_params.policy.learning_rate.initial") == 1
    lines = re.findall(r" : Train Epoch (\d): loss (\d\.\d+), learning rate (\S+),", output, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in lines] == [1, 2, 3]
    assert all(0.5 < float(loss) < 2 for _, loss, _ in lines)
    assert re.findall(r" : Epoch (\d) rollouts: success \d\.\d\d ± \d\.\d\d \(\d of 3\)", output, re.MULTILINE) == [
        "2",
        "3",
    ]

    folder = only_run(tmp_path / "runs")
    assert re.fullmatch(r"\d{14}", folder.name)
    config = json.loads((folder / "config.json").read_text())
    assert (config["train"]["seed"], config["train"]["batch_size"]) == (9, 8)
    models = sorted(path.name for path in (folder / "models").iterdir())
    (best,) = set(models) - {"model_epoch_2.pth", "model_epoch_3.pth"}
    assert len(models) == 3 and re.fullmatch(r"model_epoch_[23]_success_\d\.\d{4}\.pth", best)
    assert (folder / "models" / "model_epoch_3.pth").read_bytes() == (folder / "last.pth").read_bytes()
    assert "Train Epoch 3: " in (folder / "logs" / "log.txt").read_text()
    assert len([*(folder / "videos").iterdir()]) == 2
    saved = torch.load(folder / "last.pth")
    assert saved["step"] == 12 and saved["state"]["ema"]["updates"] == 12 and len(saved["rng"]) == 2
    assert json.loads((folder / "logs" / "success_epoch_3.json").read_text())["episodes"] == 3
    events = logged(folder)
    assert events["train/loss"] == pytest.approx({int(epoch): float(loss) for epoch, loss, _ in lines}, abs=1e-4)
    assert [*events["rollout/success_rate"]] == [2, 3]
    runs = [path.name.rpartition("-")[2] for path in (folder / "logs" / "wandb").glob("offline-run-*")]
    assert runs == ([saved["state"]["wandb_id"]] if has_wandb else [])


def logged(folder: Path, purges: bool = True) -> dict[str, dict[int, float]]:
    """Read the curves; files of one second may be read in any order, so that purging takes too much."""
    events = EventAccumulator(str(folder / "logs" / "tb"), purge_orphaned_data=purges).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_gradients_are_clipped(demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    moved = []
    for name, more in (("free", []), ("clipped", ["train.max_grad_norm=1e-10"])):  # far below Adam's epsilon
        quiet = ["experiment.rollout.enabled=false", "experiment.logging.log_tb=false", "train.num_epochs=1"]
        main(settings(demonstrations, tmp_path / name, *quiet, *more))
        ddpkit.seed_everything(0)
        before = DiffusionPolicy(read_config(TINY), standard(13)).network.state_dict()
        after = states(only_run(tmp_path / name))["policy"]
        moved.append(max((after[f"network.{key}"] - weights).abs().max().item() for key, weights in before.items()))
    assert moved[0] > 1e-3 > 1e-4 > moved[1]


def test_the_best_models_are_kept_by_success_and_by_validation(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    best = ["experiment.validate=true", "experiment.save.on_best_validation=true", "experiment.save.top_k=2"]
    config = read_config([*best, "experiment.save.every_n_epochs=4", "train.num_epochs=5"])
    losses, successes = [0.5, 0.2, 0.3, 0.4, 0.1], [0.25, None, 0.75, 0.75, 0.5]
    for epoch, (loss, success) in enumerate(zip(losses, successes, strict=True), 1):
        (tmp_path / "checkpoint").write_text(str(epoch))
        checkpoints.publish(tmp_path / "checkpoint", tmp_path, config, epoch, {"validation/loss": loss})
        if success is not None:
            checkpoints.keep_best(tmp_path / "checkpoint", tmp_path, config, epoch, "success", success)
    found = {path.name: path.read_text() for path in (tmp_path / "models").iterdir()}
    assert found == {
        "model_epoch_4.pth": "4",
        "model_epoch_5.pth": "5",
        "model_epoch_2_validation_0.200000.pth": "2",
        "model_epoch_5_validation_0.100000.pth": "5",
        "model_epoch_3_success_0.7500.pth": "3",
        "model_epoch_4_success_0.7500.pth": "4",
    }
    assert (tmp_path / "last.pth").read_text() == "5"


def step_on(batch: dict[str, torch.Tensor], accumulation: int) -> tuple[list[float], list[int]]:
    """Gradients of this rank's share of the batch after DDP, and who reached the goal in evaluations of all ranks."""
    config = read_config([*TINY, "algo.horizon.action_horizon=4"])
    torch.manual_seed(3)
    policy = DiffusionPolicy(config, standard(13))
    model = ddpkit.wrap_model(policy)
    share = {key: value.chunk(ddpkit.get_world_size())[ddpkit.get_rank()] for key, value in batch.items()}
    for number in range(accumulation):
        part = {key: value.chunk(accumulation)[number] for key, value in share.items()}
        with ddpkit.accumulate(model, number, accumulation):
            (model(part).mean() / accumulation).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).tolist()
    players = Learned(policy, NUMBERS), Random(), Expert("FetchReach-v4")
    return gradients, [evaluate("FetchReach-v4", player, 5, horizon=8).successes for player in players]


def test_two_ranks_give_what_one_gives(demonstrations: Path) -> None:
    batch = make_batch(12, observations=13)
    alone, scores = step_on(batch, accumulation=1)
    assert scores[2] > scores[1]  # so that they are worth comparing
    for gradients, mine in on_ranks(step_on, 2, batch, 3):
        assert gradients == pytest.approx(alone, abs=1e-6) and max(map(abs, alone)) > 1e-3
        assert mine == scores


def train_on(arguments: list[str]) -> None:
    """Trains, on a rank that has joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        with ddpkit.stopping() as stop:
            train.main(ddpkit.setup(), stop)


def test_losses_and_weights_are_those_of_one_rank_on_any_number(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    more = "train.keep_batch_size=global train.batch_size=12 train.gradient_accumulation_steps=2 train.num_epochs=3"
    more += " experiment.validate=true train.validation_fraction=0.2 train.max_grad_norm=0.5"
    more += " algo.optim_params.policy.learning_rate.warmup_steps=3 experiment.save.on_best_validation=true"
    more += " experiment.rollout.n=5 experiment.rollout.horizon=8 experiment.rollout.rate=3"
    more += " experiment.render_video=false"
    folders = []
    for ranks in (1, 2, 3):
        arguments = settings(demonstrations, tmp_path / f"on{ranks}", *more.split())
        if ranks == 1:
            main(arguments)
        elif ranks == 2:
            on_ranks(train_on, ranks, arguments)
        else:
            on_ranks(train_on, ranks, [*arguments, "experiment.rollout.enabled=false"])  # no simulator to import
        folders.append(only_run(tmp_path / f"on{ranks}"))
    alone, scores = logged(folders[0]), json.loads((folders[0] / "logs" / "success_epoch_3.json").read_text())
    assert [*alone["train/loss"]] == [1, 2, 3] and len({*alone["train/loss"].values()}) == 3
    assert [*scores["by_seed"]] == [str(UNSEEN + number) for number in range(5)]
    best = min(alone["validation/loss"].values())
    for folder in folders:
        found = logged(folder)
        for name in ("train/loss", "validation/loss"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5), (folder, name)
        for part in ("policy", "ema"):
            for key, weights in states(folder)[part].items():
                torch.testing.assert_close(
                    weights, states(folders[0])[part][key], rtol=1e-4, atol=1e-4
                )  # Adam takes rounding for small gradients
        for path in (folder / "logs").glob("success_epoch_*.json"):
            assert json.loads(path.read_text()) == scores
        (kept,) = (folder / "models").glob("model_epoch_*_validation_*.pth")
        assert float(kept.stem.rpartition("_")[2]) == pytest.approx(best, abs=1e-5)


def note_the_beginning(arguments: list[str], folder: Path) -> None:
    """Trains, and leaves in `beginning<rank>.pt` what policy, optimizer and average are before the first step."""
    step, update, noted = torch.optim.AdamW.step, EMA.update, {}

    def first_step(self: torch.optim.AdamW, *args: Any) -> Any:
        if not noted:
            noted["optimizer"] = copy.deepcopy(self.state_dict())
            noted["weights"] = [parameter.clone() for parameter in self.param_groups[0]["params"]]
        return step(self, *args)

    def first_update(self: EMA, policy: DiffusionPolicy) -> None:
        if "ema" not in noted:
            noted["ema"] = {key: value.clone() for key, value in self.state_dict().items()}
            torch.save(noted, folder / f"beginning{ddpkit.get_rank()}.pt")
        update(self, policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", first_step)
        patch.setattr(EMA, "update", first_update)
        train_on(arguments)


def test_a_run_goes_on_as_if_it_had_not_stopped_also_on_other_ranks(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    constant = "algo.optim_params.policy.learning_rate.scheduler_type=constant"
    quiet = [constant, "experiment.rollout.enabled=false", "experiment.logging.log_tb=false"]
    for runs, epochs in (("whole", 4), ("halves", 2)):
        main(settings(demonstrations, tmp_path / runs, *quiet, f"train.num_epochs={epochs}"))
    whole, halves = only_run(tmp_path / "whole"), only_run(tmp_path / "halves")
    shutil.copytree(halves, tmp_path / "moved")
    main([f"train.resume={halves}", "train.num_epochs=4"])
    one, other = states(whole), states(halves)
    assert one["epoch"] == other["epoch"] == 4 and int(one["ema"]["updates"]) == 16
    for part in ("policy", "ema", "optimizer"):  # to the last bit on as many ranks
        assert same(one[part], other[part]), part

    moved = tmp_path / "moved"
    before = states(moved)
    rate = "algo.optim_params.policy.learning_rate.initial=0.25"
    decay = "algo.optim_params.policy.regularization.L2=0.125"
    again = [f"train.resume={moved}", "train.num_epochs=3", rate, decay]
    on_ranks(note_the_beginning, 2, again, tmp_path)
    for rank in range(2):
        beginning = torch.load(tmp_path / f"beginning{rank}.pt")
        measured = vars(standard(13))
        parameters = [before["policy"][key] for key in before["policy"] if key not in measured]
        assert same(beginning["weights"], parameters) and same(beginning["ema"], before["ema"])
        assert same(beginning["optimizer"]["state"], before["optimizer"]["state"]) and len(parameters) > 20
        group = beginning["optimizer"]["param_groups"][0]
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)  # of the command line
    after = torch.load(moved / "last.pth")
    assert after["step"] == 12 and after["state"]["ema"]["updates"] == 12 and len(after["rng"]) == 2
    varied = read_config([f"load_from={moved / 'config.json'}"])  # to vary them begins a new run
    assert varied["train.resume"] is None and varied["train.num_epochs"] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_with_batchnorm_and_dropout_trains_evaluates_and_goes_on(
    ranks: int, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    more = ["algo.network.class=somebodys.nets:Noise", "experiment.check_replicas_every_n_steps=3"]
    more += ["experiment.validate=true", "train.validation_fraction=0.2", "experiment.rollout.enabled=false"]
    more += ["algo.optim_params.policy.learning_rate.scheduler_type=constant"]
    for runs, epochs in (("whole", 4), ("halves", 2)):
        on_ranks(train_on, ranks, settings(demonstrations, tmp_path / runs, *more, f"train.num_epochs={epochs}"))
    whole, halves = only_run(tmp_path / "whole"), only_run(tmp_path / "halves")
    on_ranks(train_on, ranks, [f"train.resume={halves}", "train.num_epochs=4"])
    one, other = states(whole), states(halves)
    for part in ("policy", "ema", "optimizer"):  # to the last bit
        assert same(one[part], other[part]), part
    assert logged(whole)["validation/loss"][4] == logged(halves)["validation/loss"][4]
    statistics = {name: value for name, value in one["policy"].items() if "running" in name}
    assert len(statistics) == 2 and all(value.abs().max() > 1e-3 for value in statistics.values())
    assert same({name: one["ema"][f"policy.{name}"] for name in statistics}, statistics)

    policies, _ = checkpoints.load_policies(whole / "last.pth")
    batch = make_batch(3, observations=13)
    for policy in policies.values():
        assert not policy.training
        policy.train()
        policy.network.see[1].eval()  # as somebody freezes it
        first, second = (policy.act({"observations": batch["observations"]}, batch["noise"]) for _ in range(2))
        assert torch.equal(first, second)
        assert policy.network.see[3].training and not policy.network.see[1].training


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_policy_trains_as_it_does_without(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    more = ["experiment.rollout.enabled=false", "train.num_epochs=1", "train.gradient_accumulation_steps=2"]
    averages = []
    for compiled in ("false", "true"):
        runs = tmp_path / compiled
        on_ranks(train_on, 2, settings(demonstrations, runs, *more, f"train.compile={compiled}"), timeout=300.0)
        averages.append(states(only_run(runs))["ema"])
    torch.testing.assert_close(averages[1], averages[0], rtol=1e-4, atol=1e-4)


def test_computed_weights_and_layers_without_sizes_train_and_are_averaged(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    more = ["algo.network.class=somebodys.nets:NormedNoise", "experiment.rollout.enabled=false"]
    more += ["train.keep_batch_size=global", "train.batch_size=12", "train.num_epochs=2"]
    averages = []
    for ranks in (1, 2, 3):
        on_ranks(train_on, ranks, settings(demonstrations, tmp_path / f"on{ranks}", *more))
        averages.append(states(only_run(tmp_path / f"on{ranks}"))["ema"])
    assert averages[0].keys() >= {"policy.network.see.0.weight_v", "policy.network.find.weight"}
    for average in averages:
        torch.testing.assert_close(average, averages[0], rtol=1e-4, atol=1e-4)
    policies, _ = checkpoints.load_policies(only_run(tmp_path / "on3") / "last.pth")
    batch = make_batch(3, observations=13)
    plans = [policies[name].act({"observations": batch["observations"]}, batch["noise"]) for name in ("raw", "ema")]
    assert plans[0].shape == plans[1].shape and not torch.equal(*plans)


def train_until_signalled(arguments: list[str]) -> None:
    with signalled(rank=1, step=6):
        train_on(arguments)


def test_a_signal_in_an_epoch_stops_all_ranks_and_the_run_goes_on_there(demonstrations: Path, tmp_path: Path) -> None:
    quiet = ["experiment.rollout.enabled=false", "experiment.logging.log_tb=false", "train.num_epochs=4"]
    quiet += ["experiment.epoch_every_n_steps=20", "train.num_data_workers=1"]
    on_ranks(train_on, 2, settings(demonstrations, tmp_path / "whole", *quiet))
    on_ranks(train_until_signalled, 2, settings(demonstrations, tmp_path / "stopped", *quiet))
    whole, stopped = only_run(tmp_path / "whole"), only_run(tmp_path / "stopped")
    assert 6 <= torch.load(stopped / "last.pth")["step"] < 20
    on_ranks(train_on, 2, [f"train.resume={stopped}"])
    one, other = states(whole), states(stopped)
    assert one["epoch"] == other["epoch"] == 4 and int(one["ema"]["updates"]) == 80
    for part in ("policy", "ema", "optimizer"):
        assert same(one[part], other[part]), part


def train_again_and_again(cases: list[list[str]]) -> None:
    """Runs the trainer with one set of arguments after another, as the same rank."""
    with ddpkit.distributed(num_threads=1):
        for case in cases:
            sys.argv = ["train.py", *case]
            try:
                with one_message(), ddpkit.distributed(num_threads=1) as job, ddpkit.stopping() as stop:
                    train.main(job, stop)
            except SystemExit as end:
                sys.stderr.flush()
                print(f"exit status {end.code}", flush=True)


def test_what_cannot_be_done_is_said_once_and_ends_every_rank(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, run_folder = tmp_path / "broken", tmp_path / "a_run"
    shutil.copytree(demonstrations, broken)
    (broken / "episodes-00003.npz").write_bytes(b"PK")
    (tmp_path / "nothing").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    still = {"observations": np.zeros((3, 13)), "actions": np.zeros((3, 4))}
    write_shard(elsewhere / "episodes-0.npz", "Nowhere-v4", [still] * 4)
    policy = DiffusionPolicy(read_config(TINY), standard(13))
    parts = {"policy": policy, "optimizer": torch.optim.AdamW(policy.parameters()), "ema": EMA(policy, 0.75)}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ddpkit.Checkpointer(run_folder / "checkpoints").save(1, **parts, scaler=scaler, epoch=1)
    (run_folder / "logs").mkdir()
    (tmp_path / "empty_run").mkdir()
    for folder in (run_folder, tmp_path / "empty_run"):
        (folder / "config.json").write_text("{}")
    cases = {
        "train.batch_sise=3": "train.batch_sise is unknown; did you mean train.batch_size",
        "train.batch_size=x": 'train.batch_size: Input should be a valid integer; found "x"',
        "--config=/nowhere.json": "cannot read the settings in /nowhere.json",
        "train.keep_batch_size=global train.batch_size=9": "train.batch_size: A global batch of 9 does not divide",
        f"train.data_path={tmp_path}/nothing": f"no demonstrations in {tmp_path}/nothing.*robot.collect --folder",
        f"train.data_path={broken}": f"{broken}: episode episodes-00003.npz/0 is broken: .*on_broken_shard=skip",
        f"train.resume={tmp_path}/nothing": f"{tmp_path}/nothing is not the folder of a run",
        f"train.resume={tmp_path}/empty_run": f"no checkpoint in {tmp_path}/empty_run",
        f"train.resume={run_folder} algo.unet.down_dims=[16,16]": "train.resume keeps the network of its "
        "run: remove train.data_path, algo.*embed_dim, algo.unet.down_dims, algo.unet.n_groups, or .* does not fit",
        "train.sync_batchnorm=true": "train.sync_batchnorm: sync_batchnorm=True needs an accelerator",
        "train.strategy=dp": "train.strategy: strategy='dp' needs 1 process .*; this job has 2 processes",
        "observation.modalities.obs.low_dim=[a]": f"{demonstrations}, episode .* has no a; it has observations",
        "experiment.env=CartPole-v1": "CartPole-v1 does not fit.* 4 numbers.* 13 ",
        "experiment.env=nowhere:World": "experiment.env: cannot import nowhere:World: ModuleNotFoundError",
        f"train.output_dir={tmp_path}/a_run/config.json": "train.output_dir: .*Errno.*config.json",
        f"train.output_dir={tmp_path}/other {LR}=1e30": "loss or weights .* since iteration ., first on rank 0",
        f"train.output_dir={tmp_path}/shape algo.network.class=somebodys.nets:Noise "
        'algo.network.kwargs={"one":true}': r"algo.network.class: .*, here \(1, 16, 4\), but it returned \(1, 16, 1\)",
        f"train.output_dir={tmp_path}/detached algo.network.class=somebodys.nets:DetachedNoise": "class: it returned a "
        "tensor that has no gradient",
        "algo.network.class=somebodys.nets:TalkativeNoise": "algo.network.class: it must return one tensor, but it "
        "returned a tuple",
        "algo.network.class=somebodys.nets:TurnedNoise algo.horizon.action_horizon=2 "
        "algo.horizon.prediction_horizon=4": r"it must return .*, here \(1, 2, 4\), but it returned \(1, 4, 2\)",
        "algo.network.class=somebodys.nets:LaterNoise": "class: aside.weight, aside.bias got no size by a call in eval",
        "algo.network.class=somebodys.nets:Silent": "algo.network.class: the network has no parameters to train",
        "algo.network.class=somebodys.nets:no_noise": "algo.network.class: somebodys.nets:no_noise must make a "
        "torch.nn.Module, but it made a str",
        f"train.output_dir={tmp_path}/spare algo.network.class=somebodys.nets:Spare": "the loss does not depend on "
        "network.spare.weight, network.spare.bias: on several ranks, use them",
        f"train.data_path={tmp_path}/line train.output_dir={tmp_path}/late experiment.env=somebodys.worlds:Late "
        "observation.modalities.obs.low_dim=[place] experiment.rollout.n=2 experiment.rollout.horizon=4 "
        "train.num_epochs=1": f"rollouts in somebodys.worlds:Late after epoch 1, which is saved .resume with "
        f"train.resume={tmp_path}/late/.*: somebodys.worlds:Late fails in step.*RuntimeError: the motor is hot",
        f"train.data_path={elsewhere}": r"Nowhere-v4 cannot be made: NameNotFound.*: set experiment.env to .* or "
        "experiment.rollout.enabled=false",
    }
    line_index(tmp_path / "line")
    arguments = [settings(demonstrations, tmp_path / "runs", *case.split()) for case in cases]
    port = free_port()
    ended = run(train_again_and_again, [platform_env(rank, 2, port) for rank in range(2)], arguments, timeout=600.0)
    for rank, process in enumerate(ended):
        assert process.code == 0, process.output
        said = re.split(r"^exit status (\d)\n", process.output, flags=re.MULTILINE)
        assert said[1::2] == ["2"] * len(cases), process.output
        for (case, expected), output in zip(cases.items(), said[::2], strict=False):
            errors = re.findall(" : train.py: error: .*", output)
            assert len(errors) == (rank == 0), (case, output)
            assert all(re.search(expected, error) for error in errors), (case, output)
            assert "Traceback" not in output
    assert [*(tmp_path / "other").rglob("log.txt")] and not [*(tmp_path / "other").rglob("*.p*t*")]
    assert not (tmp_path / "runs").exists()  # no folder was made for a run that cannot begin
    assert (run_folder / "config.json").read_text() == "{}"

    late = only_run(tmp_path / "late")  # its epoch was finished, but not its rollouts, which follow when it resumes
    assert torch.load(late / "last.pth")["state"]["epoch"] == 1 and not [*(late / "models").glob("*success*")]
    monkeypatch.setattr(sys, "argv", sys.argv)
    saved = states(late)["policy"]
    for expected in ([UNSEEN, UNSEEN + 1], []):
        main([f"train.resume={late}", "experiment.env=somebodys.worlds:Array"])
        (best,) = (late / "models").glob("model_epoch_1_success_*.pth")
        score = late / "logs" / "success_epoch_1.json"
        assert [*json.loads(score.read_text())["by_seed"]] == [str(seed) for seed in expected]
        assert same(torch.load(best)["state"]["policy"], saved) and [*logged(late, False)["rollout/success_rate"]] == [
            1
        ]
        score.write_text('{"by_seed": {}}')  # which is there, so that nobody plays again


def wrap_without_rank_1() -> None:
    """Comes to the wrapping on rank 0 only, for rank 1 has failed before."""
    sys.argv = ["train.py"]
    with one_message(), ddpkit.distributed(num_threads=1) as job:
        if job.rank == 1:
            raise FloatingPointError("of rank 1")
        train.wrap(DiffusionPolicy(read_config(TINY), standard(13)), read_config(TINY), 2, 0)


def test_another_ranks_end_is_not_blamed_on_the_strategy() -> None:
    port = free_port()
    ended = run(wrap_without_rank_1, [platform_env(rank, 2, port) for rank in range(2)], timeout=600.0)
    assert [process.code for process in ended] == [1, 1]
    assert "error: rank 1" in ended[0].output and "FloatingPointError" in ended[0].output
    assert "train.strategy" not in ended[0].output


class Straight:
    """Knows where the goal is, but not that an action is at most 2."""

    def begin(self, seeds: Any) -> None: ...

    def act(self, seen: dict[str, np.ndarray]) -> np.ndarray:
        return np.diff(seen["place"])


def line_index(folder: Path, **changes: Any) -> Index:
    """The index of demonstrations of `somebodys.worlds.Line`."""
    goals = np.linspace(-2, 2, 8)
    episodes = [{"place": np.array([[0, goal], [goal, goal]]), "actions": np.array([[goal], [0]])} for goal in goals]
    folder.mkdir()
    write_shard(folder / "episodes-0.npz", "", episodes)
    index = scan(read_config([f"train.data_path={folder}", "observation.modalities.obs.low_dim=[place]"]))
    return replace(index, **changes)


def test_an_environment_is_tried_before_training_and_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = line_index(tmp_path / "line")
    at_line = r" .*worlds.py, line \d+\)"
    cases = {
        "Silent": "the info of .* must say in 'success' or 'is_success', .*; it holds 'distance': ",
        "NotFinite": r"NotFinite: place must be finite; the environment shows \[ ?0. nan\]",
        "Longer": "Longer does not fit: it shows 3 numbers and takes 1; the demonstrations show 2 and take 1: ",
        "Renamed": "Renamed does not show place, but spot",
        "Raising": f"Raising fails in step.*: ZeroDivisionError: nowhere to go{at_line}",
        "Unmade": f"Unmade cannot be made: ValueError: no table{at_line}: set experiment.env",
    }
    for name, said in cases.items():
        with pytest.raises(UserError, match=said) as caught:
            train.try_environment(replace(index, env_id=f"somebodys.worlds:{name}"))
        assert "\n" not in str(caught.value) and "pip install" not in str(caught.value)
    for name in ("Line", "Array"):  # its array is the only entry
        train.try_environment(replace(index, env_id=f"somebodys.worlds:{name}"))
    two = replace(index, entries=Entries(("place", "speed"), (), ("actions",)), env_id="somebodys.worlds:Array")
    with pytest.raises(UserError, match="does not show place, speed, but observations .one array is called .* a dict"):
        train.try_environment(two)
    with pytest.raises(UserError, match="place must be finite"):
        player = Learned(DiffusionPolicy(read_config(TINY), index.statistics), index.entries)
        Arena("somebodys.worlds:NotFinite", 12).play(player, [0])
    with pytest.raises(UserError, match="the info of somebodys.worlds:Silent must say"):
        Arena("somebodys.worlds:Silent", 1).play(Straight(), [0])
    monkeypatch.setitem(sys.modules, "robot.environments", None)
    with pytest.raises(
        UserError, match="needs a package that is not installed .*pip install -e '.\\[examples-robot\\]'"
    ):
        train.try_environment(two)


def test_an_environment_of_the_users_is_played_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    line = "somebodys.worlds:Line"
    assert Arena(line, 5).play(Straight(), range(4)) == [True] * 4  # each ends after one step
    with pytest.raises(UserError, match="experiment.env: cannot import somebodys.worlds:Nothing"):
        Arena("somebodys.worlds:Nothing", 1).try_out()
    goals = np.linspace(-2, 2, 8)
    episodes = [{"place": np.array([[0, goal], [goal, goal]]), "actions": np.array([[goal], [0]])} for goal in goals]
    (tmp_path / "line").mkdir()
    write_shard(tmp_path / "line" / "episodes-0.npz", "", episodes)
    more = ["experiment.rollout.n=3", "experiment.rollout.horizon=4", "train.num_epochs=1", f"experiment.env={line}"]
    caplog.set_level("INFO")
    main(settings(tmp_path / "line", tmp_path / "runs", *more, "observation.modalities.obs.low_dim=[place]"))
    folder = only_run(tmp_path / "runs")
    assert json.loads((folder / "logs" / "success_epoch_1.json").read_text())["episodes"] == 3
    assert not [*(folder / "videos").iterdir()] and f"{line} cannot render: its metadata" in caplog.text
    sys.argv = ["rollout.py", str(folder / "last.pth"), "--episodes=2", "--horizon=4"]
    rollout.main(rollout.read_settings())
    assert len(re.findall("(?:ema|raw|random) +[01].[05]0 ± ", caplog.text)) == 3 and "expert" not in caplog.text


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MuJoCo render without a screen; the test is skipped if it cannot."""
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):  # MuJoCo sets the second one
        monkeypatch.setenv(name, "egl")
    try:
        Arena("FetchReach-v4", 1, (32, 32)).try_out()
    except UserError:
        pytest.skip("MuJoCo cannot render here")


@pytest.mark.usefixtures("rendering")
def test_closing_what_renders_leaves_the_pictures_of_others_as_they_were() -> None:
    arenas = Arena("FetchReach-v4", 1, (32, 32)), Arena("FetchReach-v4", 1, (32, 32))
    before, _ = (arena.try_out()[0]["camera"] for arena in arenas)
    arenas[1].close()
    again = arenas[0].try_out()[0]["camera"]
    arenas[0].close()
    assert np.array_equal(again, before) and before.std() > 10


@pytest.mark.usefixtures("rendering")
def test_a_policy_learns_from_rendered_pictures_and_acts_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    data = tmp_path / "pictures"
    played = Namespace(
        env="FetchReach-v4", folder=data, episodes=2, per_shard=2, horizon=6, noise=0.1, seed=0, pictures=32
    )
    with ddpkit.distributed() as context:
        collect.main(played, context)
    more = "observation.modalities.obs.low_dim=[proprioception] observation.modalities.obs.rgb=[camera]"
    more += (
        " observation.encoder.rgb.core_kwargs.backbone_kwargs.width=8 experiment.rollout.horizon=9 train.num_epochs=1"
    )
    main(settings(data, tmp_path, *more.split(), "experiment.rollout.n=2"))
    folder = only_run(tmp_path)
    with Image.open(folder / "videos" / "epoch_1.gif") as film:
        assert film.n_frames == 9 and film.width >= 240
    events = EventAccumulator(str(folder / "logs" / "tb")).Reload()
    assert events.Images("rollout/film")[0].encoded_image_string == (folder / "videos" / "epoch_1.gif").read_bytes()
    policies, saved = checkpoints.load_policies(folder / "last.pth")
    assert saved["env_id"] == "FetchReach-v4" and policies["ema"].cameras == ["camera"]
    scores = json.loads((folder / "logs" / "success_epoch_1.json").read_text())
    assert [*scores["by_seed"]] == [str(UNSEEN), str(UNSEEN + 1)]
    entries = Entries(**saved["entries"])
    again = evaluate("FetchReach-v4", Learned(policies["ema"], entries), 2, 9, picture_size=saved["picture_size"])
    assert again.summary() == scores


@pytest.mark.parametrize("added", ["--local-rank=1", "--local_rank=1", "--launcher pytorch"])
def test_what_the_old_launcher_adds_is_passed_over(added: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", *added.split(), "last.pth"])
    assert rollout.read_settings().checkpoint == Path("last.pth")
    monkeypatch.setattr(sys, "argv", ["program.py", *added.split(), "--episodes=3"])
    assert collect.read_settings().episodes == 3


@pytest.mark.parametrize(
    ("program", "given", "expected"),
    [
        (collect, "--episode 3 --x", "unrecognized arguments: --episode 3 --x"),
        (collect, "--per-shard 26", "--per-shard must be from 1 to 25"),
        (collect, "--seed 999999", "seeds must be at least 0 and below 1000000"),
        (rollout, "last.pth --episodes x", "invalid int value: 'x'"),
        (rollout, "last.pth --strip a.png", "give --film too"),
        (rollout, "last.pth --json /nowhere/scores.json", "there is no folder /nowhere"),
    ],
)
def test_bad_arguments_are_errors_that_all_ranks_raise(
    program: Any, given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", *given.split()])
    with pytest.raises(UserError, match=expected):
        program.read_settings()


def test_a_policy_is_read_from_its_checkpoint_or_refused(tmp_path: Path) -> None:
    config = read_config(TINY)
    policy = DiffusionPolicy(config, Statistics(np.arange(13.0), np.ones(13), np.zeros(4), np.ones(4)))
    saver, ema = ddpkit.Checkpointer(tmp_path), EMA(policy, 0.75)
    about = {"config": nested(config), "env_id": "FetchReach-v4", "entries": vars(NUMBERS)}
    policies, saved = checkpoints.load_policies(saver.save(1, policy=policy, ema=ema, **about))
    assert [*policies] == ["ema", "raw"] and saved["env_id"] == "FetchReach-v4"
    assert all(same(dict(found.state_dict()), dict(policy.state_dict())) for found in policies.values())
    about["config"]["algo"]["unet"]["kernel_size"] = 5
    with pytest.raises(ddpkit.CheckpointError, match="holds no policy of this program"):
        checkpoints.load_policies(saver.save(2, policy=policy, ema=ema, **about))
    with pytest.raises(ddpkit.CheckpointError, match="holds no policy of this program"):
        checkpoints.load_policies(saver.save(3, weights={"a": 1}))
    with pytest.raises(ddpkit.CheckpointError, match="No such file"):
        checkpoints.load_policies(tmp_path / "nothing.pth")


def test_frames_say_which_episode_they_show_and_how_it_ends() -> None:
    blank = Image.new("RGB", (84, 84))
    reached, missed = (np.asarray(drawing.label(blank, f"episode 7: goal {word}")) for word in ("reached", "missed"))
    assert reached.shape == (252, 252, 3) and not np.array_equal(reached, missed)
    assert reached[:24].max() > 200 and reached[40:].max() == 0


def test_where_nothing_can_render_the_paths_are_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_a_screen(arena: Arena, env: Any) -> None:
        raise UserError("MuJoCo cannot render here (OSError: no EGL here): set MUJOCO_GL")

    monkeypatch.setattr(Arena, "_render", without_a_screen)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    for env_id in EXPERTS:
        written = drawing.film(env_id, Expert(env_id), UNSEEN, 5, tmp_path / env_id)
        with Image.open(written) as picture:
            assert written.suffix == ".png" and picture.width > 500
    assert caplog.text.count("MuJoCo cannot render here (OSError: no EGL here): set MUJOCO_GL; plotting paths") == 2
