"""The snakes trainer as people run it, on tiny budgets: by `train_ddp.sh`, torchrun, `python`, and rank by rank."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from player.search import load_player
from processes import CLEAN, Ended, free_port, platform_env, run
from snakes.ddpg import Actor, Policy
from snakes.evaluation import play_games
from snakes.opponents import OPPONENTS
from snakes.runs import critic_of, list_models, list_runs

import ddpkit

pytestmark = pytest.mark.storm  # it trains again and again
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "snakes_ddpg"
# as for somebody who has installed ddpkit, on a machine without a GPU
ENV = CLEAN | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
ENV["CUDA_VISIBLE_DEVICES"] = ""
EPISODES, LENGTH, BOARDS, BATCH = 40, 20, 8, 32
PATIENCE = 900.0  # seconds for a launch, which takes 10 on an idle machine
SIZES = f"--boards {BOARDS} --hidden 16 --batch_size {BATCH} --episode_length {LENGTH}"
TINY = f"{SIZES} --total_episodes {EPISODES} --eval_games 4 --log_interval 30 --save_interval 30 --eval_interval 30"
TINY += " --opponent_difficulty_strategy curriculum"
ENDLESS = f"{SIZES} --total_episodes 1000000 --log_interval 1 --save_interval 1000000"
BLOCK = re.compile(
    r"^\[Episode (\d{5,})\] total_reward: (-?\d+\.?\d*) epsilon: (\d\.\d\d) \[v3\.0\] difficulty: (\d)\n"
    r"\tsnake_1: (-?\d+\.?\d*) snake_2: (-?\d+\.?\d*) snake_3: (-?\d+\.?\d*)\n"
    r"\ta_loss (-?\d+\.\d+) c_loss (\d+\.\d+)\n",
    re.MULTILINE,
)


def train(name: str, flags: str) -> None:
    """What a rank does."""
    sys.path.insert(0, str(FOLDER))
    sys.argv = [name, *flags.split()]
    runpy.run_path(str(FOLDER / "rl_trainer" / name), run_name="__main__")


def train_noting_the_beginning(name: str, flags: str, folder: Path) -> None:
    """Leaves in `beginning<rank>.pt` what the agent is before its first step."""
    sys.path.insert(0, str(FOLDER))
    from snakes.ddpg import DDPG

    start = DDPG.start_update

    def note(self: DDPG, *args: Any) -> Any:
        parts = {"networks": self.networks, "targets": self.targets, "optimizer": self.optimizer}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, folder / f"beginning{os.environ.get('RANK', 0)}.pt")
        DDPG.start_update = start
        return start(self, *args)

    DDPG.start_update = note
    train(name, flags)


def train_with_a_signal(name: str, flags: str, number: int, folder: Path) -> None:
    """The last rank gets the signal before its 50th step, and notes when."""
    sys.path.insert(0, str(FOLDER))
    from snakes.ddpg import DDPG

    start = DDPG.start_update
    steps = iter(range(1_000_000))

    def interrupted(self: DDPG, *args: Any) -> Any:
        if next(steps) == 49 and ddpkit.get_rank() == ddpkit.get_world_size() - 1:
            (folder / "sent").write_text(f"{time.time()}")
            os.kill(os.getpid(), number)
        return start(self, *args)

    DDPG.start_update = interrupted
    train(name, flags)


def train_again_and_again(cases: list[str]) -> None:
    """Runs the trainer with one set of flags after another, as the same rank."""
    with ddpkit.distributed(num_threads=1):
        for flags in cases:
            code = 0
            try:
                train("main.py", flags)
            except SystemExit as end:
                code = end.code
            sys.stderr.flush()
            print(f"exit status {code}", flush=True)


def launch(ranks: int, fn: Any, *args: Any, timeout: float = PATIENCE) -> list[Ended]:
    """Runs a function as every rank, started by hand; without a launcher's variables if there is one rank."""
    port = free_port()
    envs = [platform_env(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{"OMP_NUM_THREADS": "1"}]
    return run(fn, [env | {"CUDA_VISIBLE_DEVICES": ""} for env in envs], *args, timeout=timeout)


def finished(ended: list[Ended], code: int = 0) -> str:
    """What the main process has said, and that all ended well and the others kept silent."""
    for process in ended:
        assert process.code == code, process.output
    assert "".join(process.output for process in ended[1:]) == ""
    return ended[0].output


def checkpoint(folder: Path) -> dict[str, Any]:
    name = (folder / "checkpoints" / "latest").read_text().split()[0]
    return torch.load(folder / "checkpoints" / name)["state"]


def scalars(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return {event.step: event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)}


def shell(command: list[str], timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, cwd=FOLDER
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the runs after `train_ddp.sh` on two processes, and what it printed."""
    runs = tmp_path_factory.mktemp("runs")
    flags = f"{TINY} --runs_folder {runs} --enable_opponent_evasion".split()
    ended = shell(["./train_ddp.sh", *flags])
    assert ended.returncode == 0, ended.stdout
    return runs, ended.stdout


Trained = tuple[Path, str]


def test_train_ddp_sh_prints_the_console_block_once_for_all_processes(trained: Trained) -> None:
    output = trained[1]
    assert "world size: 2" in output and "Traceback" not in output
    blocks = [[float(number) for number in block] for block in BLOCK.findall(output)]
    episodes = [block[0] for block in blocks]
    assert len(blocks) == output.count("[Episode") == 2
    assert episodes == sorted({*episodes}) and episodes[-1] >= EPISODES
    for _, total, epsilon, difficulty, *snakes, _, critic in blocks:
        assert total == pytest.approx(sum(snakes), abs=0.21)  # rounded to tenths
        assert epsilon == 0 and difficulty in range(5) and critic > 0


def test_an_evasion_that_is_never_reached_is_a_warning_once_and_the_run_goes_on(trained: Trained) -> None:
    lines = [line for line in trained[1].splitlines() if line.startswith("warning:")]
    assert len(lines) == 1 and "40000" in lines[0].replace(",", "") and "evasi" in lines[0]


def test_a_run_leaves_config_events_models_checkpoints_and_a_summary(trained: Trained) -> None:
    runs, output = trained
    (folder,) = list_runs(runs).values()
    assert re.fullmatch(r"run1_\d{8}_\d{6}", folder.name)
    config = json.loads((folder / "config.json").read_text())
    assert config["batch_size"] == BATCH and config["world_size"] == 2 and config["enable_opponent_evasion"]
    blocks = {int(block[0]): block for block in BLOCK.findall(output)}
    assert len([*folder.glob("events.out.tfevents.*")]) == 1
    tags = ("reward/total", "reward/snake_1", "reward/snake_2", "reward/snake_3", "loss/actor", "loss/critic")
    for tag, column in zip(tags, (1, 4, 5, 6, 7, 8), strict=True):
        written = scalars(folder, tag)
        assert written.keys() == blocks.keys()
        for episode, block in blocks.items():
            assert written[episode] == pytest.approx(float(block[column]), abs=0.051)

    summary, state = json.loads((folder / "summary.json").read_text()), checkpoint(folder)
    last = summary["total"]["episodes"]
    actors = list_models(folder)
    critics = {name: critic_of(path) for name, path in actors.items()}
    assert [*actors] == [30, EPISODES, "best"]  # the end is saved too
    ends = [0] + [total["episodes"] for total in looks(EPISODES)]
    due = [end for before, end in itertools.pairwise(ends) if end // 30 > before // 30 or end == last]
    assert [*blocks] == [*scalars(folder, "evaluation/win_rate")] == due
    assert state["total"] == summary["total"] and state["ranks"] == summary["ranks"] == 2
    actor, critic = (torch.load(models[EPISODES]) for models in (actors, critics))
    both = {f"0.{name}": value for name, value in actor.items()} | {f"1.{name}": v for name, v in critic.items()}
    assert same(both, state["networks"])
    assert len(summary["memory_mib_by_rank"]) == 2 and all(summary["per_second"].values())
    for path in actors.values():
        load_player(path)


def test_counters_are_global_and_count_what_they_say(trained: Trained) -> None:
    (folder,) = list_runs(trained[0]).values()
    total = json.loads((folder / "summary.json").read_text())["total"]
    assert total == looks(EPISODES)[-1]


def looks(until: int) -> list[dict[str, int]]:
    """What two ranks have done, board by board, whenever they look at the counters: after every 50 calls."""
    times = [b * LENGTH // BOARDS for b in range(BOARDS)]
    whole = [time == 0 for time in times]
    calls, updates, total = 0, 0, []
    steps = episodes = 0
    while calls % 50 or episodes < until:
        calls += 1
        for b in range(BOARDS):
            if times[b] == LENGTH:  # the call in which a board shows its end, and starts anew
                times[b], whole[b] = 0, True
            else:
                times[b], steps = times[b] + 1, steps + 1
                episodes += whole[b] and times[b] == LENGTH
        updates += calls > 1 and calls * 3 * BOARDS // 2 >= BATCH  # a transition is seen, and a batch on each rank
        if calls % 50 == 0:
            counts = {"episodes": episodes, "environment_steps": steps, "optimiser_steps": updates}
            total.append(counts | {"samples": updates * 2 * BATCH})
    return total


def test_a_run_goes_on_where_it_stopped_on_other_numbers_of_ranks(trained: Trained, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(trained[0], runs)
    (folder,) = list_runs(runs).values()
    for before, ranks, episodes, batch in ((2, 1, EPISODES + 40, 2 * BATCH), (1, 3, EPISODES + 80, 2 * BATCH + 2)):
        state = checkpoint(folder)  # the batch stays what it was globally, but for rounding up
        flags = f"--runs_folder {runs} --resume --total_episodes {episodes} --a_lr 0.00{ranks}"
        output = finished(launch(ranks, train_noting_the_beginning, "main.py", flags, tmp_path))
        (line,) = re.findall("resumed after episode .*", output)
        assert (
            f"resumed after episode {state['total']['episodes']}, saved by {before} rank(s) and now on {ranks}" in line
        )
        for rank in range(ranks):
            beginning = torch.load(tmp_path / f"beginning{rank}.pt")
            for part in ("networks", "targets", "optimizer"):
                found, kept = (whole.get("state", whole) for whole in (beginning[part], state[part]))
                assert same(found, kept), (rank, part)
            rates = [group["lr"] for group in beginning["optimizer"]["param_groups"]]
            assert rates == [ranks / 1000, 0.003 * math.sqrt(2 * BATCH / 6144)]
            assert beginning["optimizer"]["state"][0]["step"] == state["total"]["optimiser_steps"]
        after = checkpoint(folder)
        assert after["total"]["episodes"] >= episodes and after["ranks"] == ranks
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["total"] == after["total"]
        steps, samples = (after["total"][name] - state["total"][name] for name in ("optimiser_steps", "samples"))
        assert samples == steps * batch > 0
        shown = [int(block[0]) for block in BLOCK.findall(output)]
        assert shown[0] > state["total"]["episodes"] and shown[-1] == after["total"]["episodes"]
        assert [*scalars(folder, "reward/total")][-len(shown) :] == shown
    assert [*list_runs(runs)] == [1]


def test_a_new_run_begins_with_the_weights_of_an_old_one(trained: Trained, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(trained[0], runs)
    (folder,) = list_runs(runs).values()
    episode = next(iter(list_models(folder)))
    flags = f"{TINY} --runs_folder {runs} --load_model --load_model_run 1 --load_model_run_episode {episode + 7}"
    output = finished(launch(1, train_noting_the_beginning, "main_ddp.py", flags, tmp_path))
    model = f"{folder}/trained_model/actor_{episode}.pth"
    assert f"begins with {model} and its critic" in output
    assert f"warning: there is no model of episode {episode + 7}, the last one before it is {episode}\n" in output
    beginning = torch.load(tmp_path / "beginning0.pt")
    for number, what in enumerate(("actor", "critic")):
        weights = torch.load(folder / "trained_model" / f"{what}_{episode}.pth")
        for name, value in weights.items():
            assert torch.equal(beginning["networks"][f"{number}.{name}"], value)
            assert torch.equal(beginning["targets"][f"{number}.{name}"], value)
    assert beginning["optimizer"]["state"] == {}
    assert [*list_runs(runs)] == [1, 2] and checkpoint(list_runs(runs)[2])["total"]["episodes"] >= EPISODES


def test_what_cannot_be_done_is_said_on_one_line_once_and_all_ranks_end(trained: Trained) -> None:
    runs, _ = trained
    (folder,) = list_runs(runs).values()
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    episodes = ", ".join(map(str, list_models(folder)))
    cases = {
        "--opponent_difficulty_strategy expo": "'expo'.*linear.*exponential.*curriculum",
        "--preset guide-d": "'guide-d'.*guide-a.*guide-b.*guide-c",
        "--opponent 7": "'7'.*greedy.*4",
        "--load_model --load_model_run 9": "run9_.*the runs in .* are: 1$",
        "--load_model --load_model_run 1 --load_model_run_episode 7": f"actor_7.pth.* are: {episodes}$",
        "--load_model --load_model_run 1 --hidden 8": "actor_best.pth does not hold an actor.*--hidden",
        "--resume 9": "run9_.*the runs in .* are: 1$",
        "--resume --hidden 8": "--hidden 16, not 8",
        "--batch_size 64 --buffer_size 50": "three moments of .* boards.*--buffer_size",
        "--batch_size 64 --boards 64 --buffer_size 100": "--buffer_size",
        "--batch_size 98 --boards 8 --buffer_size 100": "98 rows does not fit 8 moments of 4 boards.*--buffer_size",
        "--global_batch_size 33": "33.*2",
        "--bords 3": "--bords",
    }
    ended = launch(2, train_again_and_again, [f"--runs_folder {runs} {flags}" for flags in cases])
    assert [process.code for process in ended] == [0, 0], ended[0].output
    said, silence = ([*re.split(r"(?<=exit status \d)\n", process.output)] for process in ended)
    assert silence == ["exit status 2"] * len(cases) + [""]
    for (flags, expected), output in zip(cases.items(), [text for text in said if text], strict=True):
        *joining, line, status = output.splitlines()
        assert status == "exit status 2"
        assert re.search(f"^main.py: error: .*{expected}", line), (flags, output)
        assert not joining or joining[0] == "joined"
    assert before == {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    assert [*list_runs(runs)] == [1]


def test_with_bad_input_every_process_exits_with_status_2() -> None:
    for process in launch(2, train, "main.py", "--preset guide-d"):
        assert process.code == 2 and "Traceback" not in process.output
        assert process.seconds < PATIENCE / 3


def test_a_finished_run_has_nothing_to_go_on_with(trained: Trained, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(trained[0], runs)
    (folder,) = list_runs(runs).values()
    before = checkpoint(folder)
    output = finished(launch(1, train, "main.py", f"--runs_folder {runs} --resume"))
    assert "[Episode" not in output and f"done after {before['total']['episodes']} episodes" in output
    assert same(checkpoint(folder), before)


def test_ctrl_c_saves_and_ends_all_ranks_of_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["rl_trainer/main_ddp.py", *ENDLESS.split(), "--runs_folder", str(tmp_path / "runs")]
    env = ENV | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "w") as file:
        terminal = subprocess.Popen(
            command, env=env, cwd=FOLDER, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until = time.monotonic() + PATIENCE
        while "[Episode" not in (tmp_path / "output").read_text() and time.monotonic() < until:
            assert terminal.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        os.killpg(terminal.pid, signal.SIGINT)
        terminal.wait(PATIENCE)
    finally:
        if terminal.poll() is None:
            os.killpg(terminal.pid, signal.SIGKILL)
            terminal.wait()
    output = (tmp_path / "output").read_text()
    was_saved(tmp_path / "runs", output)
    ours, _, torchruns = output.partition("stopped (go on with --resume)")
    assert "Traceback" not in ours and "main.py" not in torchruns


def was_saved(runs: Path, output: str, at_once: bool = False) -> None:
    """Look that a run stopped and saved its state; `at_once`: within a few steps of the signal at the 50th."""
    (folder,) = list_runs(runs).values()
    summary = json.loads((folder / "summary.json").read_text())
    assert f"stopped (go on with --resume) after {summary['total']['episodes']} episodes" in output
    assert checkpoint(folder)["total"] == summary["total"]
    assert [*list_models(folder)] == [summary["total"]["episodes"]]
    assert not at_once or 50 <= summary["total"]["optimiser_steps"] < 60


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    flags = f"{ENDLESS} --runs_folder {tmp_path / 'runs'}"
    ended = launch(2, train_with_a_signal, "main.py", flags, signal.SIGTERM, tmp_path)
    was_saved(tmp_path / "runs", finished(ended, code=128 + signal.SIGTERM), at_once=True)


def test_ctrl_c_saves_on_one_process(tmp_path: Path) -> None:
    flags = f"{ENDLESS} --runs_folder {tmp_path / 'runs'}"
    ended = launch(1, train_with_a_signal, "main.py", flags, signal.SIGINT, tmp_path)
    was_saved(tmp_path / "runs", finished(ended, code=128 + signal.SIGINT), at_once=True)


def test_when_a_rank_is_killed_the_others_end_at_once_and_say_which(tmp_path: Path) -> None:
    flags = f"{ENDLESS} --runs_folder {tmp_path / 'runs'}"
    left, killed = launch(2, train_with_a_signal, "main.py", flags, signal.SIGKILL, tmp_path)
    seconds = time.time() - float((tmp_path / "sent").read_text())
    assert killed.code == -signal.SIGKILL and left.code not in (0, None)
    assert re.search(r"^main.py: error: rank 1 \(.*\) was lost", left.output, re.MULTILINE), left.output
    assert seconds < 200  # the time-out of `setup()` is 600 s at least


def test_it_learns_to_beat_the_greedy_player_in_seconds(tmp_path: Path) -> None:
    flags = "--boards 64 --hidden 64 --batch_size 512 --gamma 0.9 --total_episodes 400 --eval_games 40"
    flags += f" --opponent greedy --runs_folder {tmp_path}"
    finished(launch(1, train, "main.py", flags))
    (folder,) = list_runs(tmp_path).values()
    torch.manual_seed(0)
    players = {"untrained": Policy(Actor(64)), "trained": load_player(list_models(folder)["best"], depth=0)}
    results = {name: play_games(player, OPPONENTS["greedy"], 100, seed=3) for name, player in players.items()}
    assert results["untrained"].win_rate < 0.1 and results["trained"].win_rate > 0.4, results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_that_learns_nothing_says_so_once_with_the_likely_flag(ranks: int, tmp_path: Path) -> None:
    flags = f"{SIZES} --total_episodes 1000 --eval_games 12 --a_lr 1e-9 --runs_folder {tmp_path}"
    output = finished(launch(ranks, train, "main.py", flags))
    lines = [line for line in output.splitlines() if line.startswith("warning:")]
    assert len(lines) == 1 and re.search(r"\d of 12 games won against greedy; .* --a_lr 1e-09", lines[0])
