"""The flags of the snakes trainer, its presets, and the schedules and totals that follow from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from shared.program import UserError
from snakes import runs
from snakes.settings import (
    BATCH_SIZE,
    EVASIVE,
    describe,
    epsilon_at,
    go_on,
    model_name,
    opponent_at,
    read_settings,
    resolve,
    suspect,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "snakes_ddpg"
GUIDES = {  # the columns of the three guides
    "guide-a": (6250, 128, 3e-4, 0.99, 0.01, 0.5, 0.9995, "linear", "curriculum"),
    "guide-b": (50_000, 128, 3e-4, 0.99, 0.01, 0.5, 0.9995, "none", "curriculum"),
    "guide-c": (6250, 64, 1e-4, 0.95, 0.001, 0.5, 0.99998, "none", "curriculum"),
}


def planned(*argv, world_size=1):
    return resolve(read_settings(argv), world_size)


def test_every_flag_of_the_public_trainers_is_read():
    given = {
        "max_episodes": 6250,
        "episode_length": 100,
        "batch_size": 64,
        "buffer_size": 1000,
        "epsilon": 0.7,
        "epsilon_speed": 0.999,
        "a_lr": 1e-4,
        "c_lr": 2e-4,
        "gamma": 0.9,
        "tau": 0.1,
        "seed": 7,
        "save_interval": 10,
        "opponent_difficulty_strategy": "exponential",
        "opponent_evasion_start_episode": 300,
        "load_model_run": 2,
        "load_model_run_episode": 4000,
        "output_activation": "softmax",
        "game_name": "snakes_3v3",
        "algo": "ddpg",
    }
    argv = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    read = vars(read_settings([*argv, "--enable_opponent_evasion", "--load_model"]))
    assert {name: read[name] for name in given} == given
    assert read["enable_opponent_evasion"] and read["load_model"]
    assert read["total_episodes"] is None and read["global_batch_size"] is None


@pytest.mark.parametrize("guide", GUIDES)
def test_a_preset_is_its_guides_column(guide):
    episodes, batch, lr, gamma, tau, epsilon, speed, scaling, strategy = GUIDES[guide]
    s = planned("--preset", guide, world_size=8)
    assert (s.max_episodes, s.episodes) == (episodes, 8 * episodes)
    assert (s.batch_per_rank, s.batch_global) == (batch, 8 * batch)
    assert (s.a_lr, s.c_lr, s.lr_scaling) == (lr, lr, scaling)
    assert s.actor_lr == s.critic_lr == pytest.approx(lr * (8 if guide == "guide-a" else 1))
    assert (s.gamma, s.tau, s.epsilon, s.epsilon_speed) == (gamma, tau, epsilon, speed)
    assert (s.opponent_difficulty_strategy, s.seed) == (strategy, 1)
    assert (s.episode_length, s.buffer_size, s.save_interval) == (200, 100_000, 1000)
    if guide == "guide-c":
        assert opponent_at(s, 1) == opponent_at(s, s.episodes) == "greedy"


@pytest.mark.parametrize("argv", [["--gamma", "0.5", "--preset", "guide-a"], ["--preset", "guide-a", "--gamma", "0.5"]])
def test_a_flag_is_stronger_than_a_preset(argv):
    settings = read_settings(argv)
    assert (settings.gamma, settings.tau) == (0.5, 0.01)


def test_of_two_ways_to_say_a_number_the_given_one_counts():
    linear = planned("--preset", "guide-c", "--opponent_difficulty_strategy", "linear")
    assert [opponent_at(linear, episode) for episode in (1, linear.episodes)] == [0, 4]
    assert planned("--max_episodes", "100", world_size=3).episodes == 300
    assert planned("--total_episodes", "100", world_size=3).episodes == 100
    assert planned("--preset", "guide-a", "--total_episodes", "100", world_size=3).episodes == 100
    assert planned("--batch_size", "10", world_size=3).batch_global == 30
    s = planned("--preset", "guide-a", "--global_batch_size", "30", world_size=3)
    assert (s.batch_per_rank, s.batch_global) == (10, 30)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
def test_the_defaults_work_on_any_number_of_ranks(world_size):
    s = planned(world_size=world_size)
    assert s.batch_global == s.batch_per_rank * world_size
    assert BATCH_SIZE <= s.batch_global < BATCH_SIZE + world_size
    assert s.boards_global == s.boards_per_rank * world_size
    assert 1024 <= s.boards_global < 1024 + world_size
    assert describe(s)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "flags", ["--batch_size 128", "--global_batch_size 1536", "--preset guide-c", "--batch_size 1"]
)
def test_the_boards_follow_the_batch_so_that_each_transition_is_drawn_about_twice(flags, world_size):
    s = planned(*flags.split(), world_size=world_size)
    assert s.boards_global % world_size == 0
    assert 0 <= s.boards_global - s.batch_global // 6 <= world_size
    assert planned(*flags.split(), "--boards", "40", world_size=world_size).boards_global in range(40, 48)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--preset", "guide_a"], "invalid choice: 'guide_a'.*guide-a"),
        (["--opponent_difficulty_strategy", "lineal"], "invalid choice: 'lineal'.*exponential"),
        (["--opponent", "5"], "invalid choice: '5'"),
        (["--output_activation", "tanh"], "invalid choice: 'tanh'.*softmax"),
        (["--max_episodes", "1", "--total_episodes", "2"], "not allowed with"),
        (["--batch_size", "1", "--global_batch_size", "2"], "not allowed with"),
        (["--opponent", "1", "--opponent_difficulty_strategy", "linear"], "not allowed with"),
        (["--boards", "0"], "--boards: must be at least 1, not 0"),
        (["--boards", "many"], "invalid int value: 'many'"),
        (["--gamma", "1.1"], "--gamma: must be from 0 to 1, not 1.1"),
        (["--tau", "nan"], "must be from 0 to 1"),
        (["--a_lr", "0"], "--a_lr: must be"),
        (["--opponent_evasion_start_episode", "1.5"], "must be from 0 to 1"),
        (["--opponent_evasion_start_episode", "0"], "must be at least 1"),
        (["--resume", "--load_model_run", "3"], "leave out --load_model"),
        (["--epsilon_sped", "0.9"], "unrecognized arguments: --epsilon_sped"),
        (["--epis", "9"], "unrecognized arguments"),
        (["--update_interval", "4"], "--update_interval.*one optimiser step follows each step of all boards.*--boards"),
    ],
)
def test_bad_input_is_named(argv, message):
    with pytest.raises(UserError, match=message) as caught:
        read_settings(argv)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("flag", ["--local_rank=1", "--local-rank=1"])
def test_what_a_launcher_passes_is_passed_over(flag):
    assert read_settings([flag]) == read_settings([])


def test_names_of_the_source_repository_mean_ours():
    settings = read_settings(["--model_episode", "4000", "--log_dir", "here"])
    assert (settings.load_model, settings.load_model_run_episode, settings.runs_folder) == (True, 4000, Path("here"))


def test_a_run_to_load_means_loading_and_resume_names_a_run_or_means_the_latest():
    assert [read_settings(argv).load_model for argv in ([], ["--load_model_run", "3"])] == [False, True]
    assert [read_settings(argv).resume for argv in ([], ["--resume"], ["--resume", "3"])] == [None, "latest", "3"]


def test_a_resumed_run_keeps_its_settings(tmp_path):
    first = planned("--max_episodes", "77", "--gamma", "0.5", "--load_model", "--runs_folder", "here", world_size=2)
    runs.save_json(tmp_path / "config.json", vars(first))
    saved = runs.read_config(tmp_path)

    s = resolve(read_settings(["--resume", "--tau", "0.5"], saved), 3)
    assert (s.gamma, s.tau, s.episodes, s.world_size, s.runs_folder) == (0.5, 0.5, 3 * 77, 3, Path("here"))
    assert s.resume == "latest" and not s.load_model
    assert resolve(read_settings(["--resume", "--total_episodes", "9"], saved), 3).episodes == 9
    s = read_settings(["--resume", "--preset", "guide-c"], saved)
    assert (s.gamma, s.max_episodes) == (0.95, 6250)


def reference_level(strategy, episode, last):
    p = Fraction(episode, last)
    if strategy == "linear":
        return max(k for k in range(5) if 4 * p >= k)
    if strategy == "exponential":  # 4 p^1.5 >= k, squared
        return max(k for k in range(5) if 16 * p**3 >= k**2)
    return sum(p >= Fraction(change, 100) for change in (10, 30, 60, 85))


@pytest.mark.parametrize("strategy", ["linear", "exponential", "curriculum"])
@pytest.mark.parametrize("last", [1, 7, 100, 6250])
def test_difficulty_follows_the_formulas(strategy, last):
    s = planned("--total_episodes", str(last), "--opponent_difficulty_strategy", strategy)
    levels = [opponent_at(s, episode) for episode in range(1, last + 1)]
    assert levels == [reference_level(strategy, episode, last) for episode in range(1, last + 1)]
    assert opponent_at(s, 2 * last) == 4


def test_the_ladder_follows_the_episodes_of_all_ranks():
    s = planned("--max_episodes", "100", "--opponent_difficulty_strategy", "linear", world_size=4)
    assert [opponent_at(s, episode) for episode in (1, 99, 100, 200, 399, 400)] == [0, 0, 1, 2, 3, 4]


def test_a_fixed_opponent_is_met_all_the_time():
    for text, opponent in (("random", "random"), ("3", "3")):
        s = planned("--opponent", text)
        assert [opponent_at(s, episode) for episode in (1, s.episodes)] == [opponent] * 2


@pytest.mark.parametrize("start, first", [("40", 40), ("0.8", 80), ("0.0", 1), ("1.0", 100)])
def test_evasion_begins_with_an_episode_or_a_part_of_the_run(start, first):
    flags = ["--enable_opponent_evasion", "--opponent_evasion_start_episode", start]
    s = planned("--total_episodes", "100", "--boards", "4", *flags, world_size=2)
    assert [episode for episode in range(1, 101) if opponent_at(s, episode) == EVASIVE] == list(range(first, 101))
    s.enable_opponent_evasion = False
    assert EVASIVE not in [opponent_at(s, episode) for episode in range(1, 101)]


@pytest.mark.parametrize(("start", "part"), [(40_000, 0.8), (20_000, 0.4)])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_where_episodes_are_told_per_rank_so_are_evasion_and_saves(start, part, world_size):
    flags = f"--enable_opponent_evasion --opponent_evasion_start_episode {start} --save_interval 1000".split()
    s = planned("--max_episodes", "50000", *flags, world_size=world_size)
    first = round(part * s.episodes)
    assert s.episodes == 50_000 * world_size and s.save_every == 1000 * world_size
    assert opponent_at(s, first - 1) != EVASIVE and opponent_at(s, first) == EVASIVE
    s = planned("--total_episodes", "50000", *flags, world_size=world_size)
    assert (s.evasion_start, s.save_every) == (start, 1000)


def test_a_run_that_was_told_per_rank_counts_on_like_that_on_other_numbers_of_ranks(tmp_path):
    flags = ["--opponent_evasion_start_episode", "60", "--save_interval", "10"]
    first = planned("--max_episodes", "77", *flags, world_size=2)
    runs.save_json(tmp_path / "config.json", vars(first))
    saved = runs.read_config(tmp_path)
    s = resolve(read_settings(["--resume"], go_on(saved, 3)), 3)
    assert (s.episodes, s.evasion_start, s.save_every) == (154, 120, 20)
    assert resolve(read_settings(["--resume", "--save_interval", "5"], go_on(saved, 3)), 3).save_every == 10
    assert resolve(read_settings(["--resume", "--max_episodes", "77"], go_on(saved, 3)), 3).save_every == 30


def test_models_are_named_by_the_multiples_that_were_asked_for():
    s = planned("--max_episodes", "6250", "--save_interval", "1000", world_size=8)
    assert [model_name(s, episodes) for episodes in (8_000, 8_300, 15_999, 16_000)] == [1000, 1000, 1000, 2000]
    assert [model_name(s, episodes) for episodes in (50_000, 50_007)] == [6250, 6250]
    assert model_name(s, 8_300, stopped=True) == 1037
    s = planned("--total_episodes", "12000")
    assert [model_name(s, episodes) for episodes in (1_024, 4_087, 12_232)] == [1000, 4000, 12_000]
    assert model_name(s, 4_087, stopped=True) == 4_087
    assert model_name(s, 12_232, stopped=True) == 12_000


def test_epsilon_falls_with_every_environment_step():
    s = planned("--epsilon", "0.5", "--epsilon_speed", "0.9995")
    epsilon = 0.5
    for step in range(100):
        assert epsilon_at(s, step) == pytest.approx(epsilon)
        epsilon *= 0.9995
    assert epsilon_at(planned("--epsilon", "0.1"), 10**9) == 0.1
    assert epsilon_at(planned(), 0) == 0
    assert epsilon_at(planned("--preset", "guide-b"), 10**9) == 0


@pytest.mark.parametrize("rule, factor", [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rates_are_scaled_for_a_batch_that_grows_with_the_ranks(rule, factor):
    flags = ["--a_lr", "0.001", "--c_lr", "0.002", "--lr_scaling", rule]
    s = planned(*flags, "--batch_size", "32", world_size=4)
    assert (s.actor_lr, s.critic_lr) == (pytest.approx(0.001 * factor), pytest.approx(0.002 * factor))
    s = planned(*flags, "--global_batch_size", "32", world_size=4)
    assert (s.actor_lr, s.critic_lr) == (0.001, 0.002)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("batch", "rate"), [(6144, 3e-3), (61440, 3e-3), (1536, 1.5e-3), (96, 3.75e-4)])
def test_a_small_batch_has_a_smaller_learning_rate_alike_on_any_number_of_ranks(batch, rate, world_size):
    whole = planned("--global_batch_size", str(batch), world_size=world_size)
    shares = planned("--batch_size", str(batch // world_size), world_size=world_size)
    assert (whole.actor_lr, whole.critic_lr) == (shares.actor_lr, shares.critic_lr) == (rate, pytest.approx(rate))
    assert planned("--batch_size", "96", "--lr_scaling", "linear", world_size=world_size).critic_lr == (
        pytest.approx(3.75e-4 * world_size)
    )


def test_a_global_batch_must_divide():
    with pytest.raises(ValueError, match=r"512 .* 3 ranks.* a multiple of 3"):
        planned("--global_batch_size", "512", world_size=3)


def test_the_plan_counts_environment_steps_samples_and_optimiser_steps_of_all_ranks():
    text = describe(planned("--preset", "guide-a", "--boards", "8", world_size=8))
    for figure in (
        "50,000 in all, 6,250 per rank",
        "some 10,001,592 in all",  # the first, part episode of each of 8 boards too
        "some 1,256,450, each",  # of 6,250 episodes with a step to start anew, and of that first one
        "some 1,286,604,800 rows",
        "0.0024 (actor), 0.0024 (critic), scaling linear",
    ):
        assert figure in text
    text = describe(planned("--preset", "guide-b", "--boards", "1"))  # as many episodes and samples, 8 x the steps
    for figure in ("50,000 in all, 50,000 per rank", "10,000,199 in all", "10,050,200, each", "1,286,425,600"):
        assert figure in text
    text = describe(planned("--total_episodes", "10", "--boards", "4", "--batch_size", "5"))
    for figure in ("2,985 in all", "750, each", "3,750 rows"):  # 703 steps of the boards, 750 when they are counted
        assert figure in text


def test_help_tells_of_every_flag(capsys):
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    text = capsys.readouterr().out
    assert "default: None" not in text and "default: False" not in text
    for name in vars(read_settings([])):
        assert re.search(rf"^  --{name}\b", text, re.MULTILINE)


def test_the_readme_s_table_tells_of_the_flags_that_there_are_and_of_those_that_there_are_not():
    text = (EXAMPLE / "README.md").read_text()
    table = text.partition("## From the guides to here")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| `--")]
    flags = {flag for row in rows for flag in re.findall(r"--([a-z_]+)", row[0])}
    absent = {"model_episode", "log_dir", "local_rank", "update_interval"}
    assert flags - absent <= {*vars(read_settings([]))} and absent < flags
    assert all(re.match(" (works|differs|goes on)", row[1]) for row in rows)
    public = {"max_episodes", "batch_size", "a_lr", "c_lr", "gamma", "tau", "seed", "epsilon", "epsilon_speed"}
    public |= {"episode_length", "buffer_size", "save_interval", "opponent_difficulty_strategy", "output_activation"}
    public |= {"enable_opponent_evasion", "opponent_evasion_start_episode", "load_model", "load_model_run"}
    assert public | {"load_model_run_episode", "algo", "game_name"} <= flags


@pytest.mark.parametrize("nproc", [None, "5"])
def test_train_ddp_starts_torchrun_from_anywhere_and_passes_flags_on(tmp_path, nproc):
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stub.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"PATH": path}
    env |= {"NPROC": nproc} if nproc else {}
    command = [EXAMPLE / "train_ddp.sh", "--preset", "guide-a", "--runs_folder", "two words"]
    words = subprocess.run(command, env=env, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    count = nproc or str(torch.cuda.device_count() or 2)
    program = str(EXAMPLE / "rl_trainer" / "main_ddp.py")
    assert words[:-1] == ["--standalone", f"--nproc_per_node={count}", program, *command[1:]]


def test_a_saved_preset_does_not_undo_the_flags_that_went_with_it(tmp_path):
    runs.save_json(tmp_path / "config.json", vars(read_settings(["--preset", "guide-a", "--gamma", "0.5"])))
    assert read_settings(["--resume"], runs.read_config(tmp_path)).gamma == 0.5


def test_a_preset_undoes_a_saved_global_batch(tmp_path):
    runs.save_json(tmp_path / "config.json", vars(read_settings(["--global_batch_size", "512"])))
    settings = read_settings(["--resume", "--preset", "guide-a"], runs.read_config(tmp_path))
    assert (settings.batch_size, settings.global_batch_size) == (128, None)


def test_resolving_twice_changes_nothing():
    s = planned("--preset", "guide-a", world_size=8)
    assert resolve(s, 8) == s


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--batch_size 128 --boards 1024", "--boards 1024 (default: 21)"),
        ("--batch_size 96 --a_lr 1e-6", "--a_lr 1e-06 (default: 0.000375)"),
        ("--c_lr 0.5", "--c_lr 0.5 (default: 0.003)"),
        ("", "no flag's, all being near their defaults: try another --seed"),
        ("--tau 1", "--tau 1 (default: 0.01)"),
        ("--tau 0", "--tau 0 (default: 0.01)"),
        ("--gamma 1", "--gamma 1 (default: 0.97)"),
        ("--hidden 2", "--hidden 2 (default: 128)"),
    ],
)
def test_the_likely_reason_why_nothing_is_learnt_is_the_flag_furthest_from_its_default(flags, named):
    assert suspect(planned(*flags.split())) == named
