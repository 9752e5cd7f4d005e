"""Settings of the robot's trainer: what outranks what, and what is said about those that are wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from robot.config import SETTINGS, read_config
from shared.program import UserError
from shared.settings import flatten, nested

FOLDER = Path(__file__).parents[3] / "examples" / "diffusion_policy"
LR = "algo.optim_params.policy.learning_rate.initial"


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return f"load_from={path}"


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        read_config(arguments)
    return str(caught.value)


def test_the_command_line_outranks_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"train": {"batch_size": 32, "seed": 5}})
    config = read_config(["train.batch_size=64", file])  # wherever load_from stands
    assert (config["train.batch_size"], config["train.seed"], config["train.num_epochs"]) == (64, 5, 20)


def test_the_example_file_holds_every_setting_and_its_default() -> None:
    assert read_config([f"load_from={FOLDER / 'config.json'}"]) == read_config([])
    assert dict(flatten(json.loads((FOLDER / "config.json").read_text()), SETTINGS)).keys() == SETTINGS.keys()


def test_sections_and_dotted_names_are_the_same() -> None:
    config = read_config([])
    assert dict(flatten(nested(config), SETTINGS)) == config
    assert nested(config)["algo"]["ema"] == {"enabled": True, "power": 0.75}


def test_the_guides_spelling_of_the_optimizers_settings_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(["train.optim_params.policy.learning_rate.initial=4e-4"])
    assert config[LR] == 4e-4 and type(config[LR]) is float
    assert f"stands for {LR}" in caplog.text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (f"{LR}=1.0", 1.0),
        ("train.gradient_checkpointing=True", True),
        ("train.prefetch_factor=null", None),
        ("algo.unet.down_dims=[16, 32]", [16, 32]),
        ("train.data_path=here", ["here"]),
        ('train.data_path=["a", "b"]', ["a", "b"]),
        ("train.data_path=[a, b]", ["a", "b"]),  # as a shell leaves it that takes quotes away
        ("algo.ema.power=.5", 0.5),
        ("experiment.name=3", "3"),
    ],
)
def test_values_get_the_type_of_their_setting(argument: str, value: object) -> None:
    found = read_config([argument])[argument.partition("=")[0]]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("train.batchsize=3", "train.batchsize is unknown; did you mean train.batch_size?"),
        ("algo.horizon.action=3", "did you mean algo.horizon.action_horizon?"),
        ("learning_rate=3", f"did you mean {LR}?"),
        ("algo.lr=3", f"did you mean {LR}?"),
        ("epochs=3", "did you mean train.num_epochs?"),
        ("loadfrom=x", "did you mean load_from?"),
        ("algo.unett=3", "did you mean the section algo.unet?"),
        ("train=3", "train must be a section"),
        ("train.batch_size=many", 'train.batch_size: Input should be a valid integer; found "many" (the command line)'),
        ("train.batch_size=1e3", 'train.batch_size: Input should be a valid integer; found "1e3"'),
        ("train.batch_size=true", 'train.batch_size: Input should be a valid integer; found "true"'),
        ("train.num_epochs=0", 'train.num_epochs: Input should be greater than 0; found "0"'),
        (f"{LR}=nan", f'{LR}: Input should be a valid number; found "nan"'),
        (f"{LR}=Infinity", f'{LR}: Input should be a finite number; found "Infinity"'),
        (f"{LR}=-1e-3", f'{LR}: Input should be greater than 0; found "-1e-3"'),
        ("experiment.rollout.enabled=yes", 'experiment.rollout.enabled: Input should be a valid boolean; found "yes"'),
        ("train.strategy=fsdp", "train.strategy: Input should be 'auto', 'ddp' or 'dp'; found"),
        ("algo.unet.down_dims=[]", "algo.unet.down_dims: List should have at least 1 item"),
        ("algo.unet.kernel_size=4", "algo.unet.kernel_size: Input should be a positive odd number"),
        ("algo.unet.diffusion_step_embed_dim=0", "algo.unet.diffusion_step_embed_dim: Input should be greater than 0"),
        ("algo.unet.diffusion_step_embed_dim=3", "algo.unet.diffusion_step_embed_dim: Input should be a multiple of 2"),
        ("algo.horizon.prediction_horizon=8", "at least observation_horizon - 1 + action_horizon = 9"),
        ("algo.horizon.prediction_horizon=17", "2 must divide 17"),
        ("algo.ddim.num_inference_timesteps=101", "must not exceed"),
        ("algo.optim_params.policy.betas=[0.9]", "policy.betas: List should have at least 2 items"),
        (
            "algo.optim_params.policy.betas=[0.9, 1]",
            'policy.betas: entry 2: Input should be less than 1; found "[0.9, 1]"',
        ),
        ("train.max_grad_norm=0", 'train.max_grad_norm: Input should be greater than 0; found "0"'),
        ("experiment.save.on_best_validation=true", "needs experiment.validate=true"),
        ("train.hdf5_validation_filter_key=valid", "for experiment.validate=true"),
        ("observation.encoder.rgb.obs_randomizer_class=CropRandomizer", "crop_height and"),
        (
            "observation.encoder.rgb.obs_randomizer_kwargs.crop_height=50",
            "need observation.encoder.rgb.obs_randomizer_class",
        ),
        ("train.data_path=[]", "train.data_path: List should have at least 1 item"),
        ('train.data_path=[{"path": "a", "weight": 2}]', "set weights in train.sample_weights"),
        ("observation.image_dim=[84]", "image_dim: Input should be a height and a width, such as [128, 128]; found"),
        ("observation.image_dim=84", "image_dim: Input should be a height and a width, such as [128, 128]; found"),
        ("observation.image_dim=[84, 0]", "image_dim: Input should be a height and a width, such as [128, 128]; found"),
        ("train.sample_weights=[1, 2]", "a number for each of 1"),
        ("algo.optim_params.policy.learning_rate.epoch_schedule=[3]", "multistep, not cosine"),
        (
            "experiment.name=../runs",
            'experiment.name: Input should be a name without / and \\, since it names a folder; found "../runs"',
        ),
        ("experiment.name=a/b", "without / and \\"),
        ("experiment.name=..", "without / and \\"),
        ("algo.network.class=mine.Net", 'algo.network.class: Input should be package.module:Class; found "mine.Net"'),
        ("--batch_size", "key=value"),
        ("load_from=/nowhere/x.json", "in /nowhere/x.json: [Errno 2] No such file"),
        ("load_from=", "load_from= must name a file"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(argument: str, expected: str) -> None:
    assert expected in refusal(argument)


def test_a_run_that_needs_wandb_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "log_wandb: Input should be false, or true if wandb is installed (pip install wandb)" in refusal(
        "experiment.logging.log_wandb=true"
    )


def test_everything_wrong_is_said_at_once_with_where_it_stands(tmp_path: Path) -> None:
    said = refusal(write(tmp_path / "a.json", {"train": {"sed": 1, "batch_size": "64"}}), "algo.emma.power=1")
    assert re.findall(r"train\.seed|train\.batch_size: Input|algo\.ema\.power", said) == [
        "train.seed",
        "train.batch_size: Input",  # text in a file is no number
        "algo.ema.power",
    ]
    assert said.count(f"({tmp_path}/a.json)") == 2 and said.count("(the command line)") == 1


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{'train': 1}")
    assert f"{tmp_path}/a.json is not JSON with // comments" in refusal(f"load_from={tmp_path}/a.json")


@pytest.mark.parametrize("data", ["a.hdf5", [{"path": "a.hdf5", "weight": 1}]])
def test_robomimics_way_to_name_its_files_is_read(data: object, tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"train": {"data": data, "seed": 5}})
    config = read_config([file])
    assert config["train.data_path"] == ["a.hdf5"] and config["train.seed"] == 5
    assert read_config([file, "train.data_path=b.hdf5"])["train.data_path"] == ["b.hdf5"]


def test_a_resumed_run_begins_with_its_own_settings(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"train": {"batch_size": 32}})
    config = read_config([f"train.resume={tmp_path}", "train.num_epochs=7"])
    assert (config["train.batch_size"], config["train.num_epochs"]) == (32, 7)
    assert "/nowhere is not the folder of a run" in refusal("train.resume=/nowhere")
    example = f"load_from={FOLDER / 'config.json'}"  # whose batch size would take the place of the run's
    assert "remove load_from" in refusal(example, f"train.resume={tmp_path}")


ORIGINAL = """
    algo_name="diffusion_policy" experiment.name="test" experiment.validate=false experiment.save.every_n_seconds=null
    experiment.logging.terminal_output_to_txt=true experiment.logging.log_tb=true experiment.logging.log_wandb=false
    experiment.logging.wandb_proj_name="debug" experiment.save.enabled=true experiment.save.every_n_epochs=50
    experiment.save.epochs=[] experiment.save.on_best_validation=false experiment.save.on_best_rollout_return=false
    experiment.save.on_best_rollout_success_rate=true experiment.epoch_every_n_steps=100 experiment.video_skip=5
    experiment.validation_epoch_every_n_steps=10 experiment.env=null experiment.additional_envs=null
    experiment.render=false experiment.render_video=true experiment.keep_all_videos=false experiment.rollout.n=50
    experiment.rollout.enabled=true experiment.rollout.horizon=400 experiment.rollout.rate=50
    experiment.rollout.warmstart=0 experiment.rollout.terminate_on_success=true experiment.env_meta_update_dict={}
    experiment.ckpt_path=null train.data=null train.output_dir="../models" train.normalize_weights_by_ds_size=false
    train.num_data_workers=0 train.hdf5_cache_mode="all" train.hdf5_use_swmr=true train.hdf5_load_next_obs=true
    train.hdf5_normalize_obs=false train.hdf5_filter_key=null train.hdf5_validation_filter_key=null train.seq_length=1
    train.pad_seq_length=true train.frame_stack=1 train.pad_frame_stack=true train.action_keys=["actions"]
    train.dataset_keys=["actions","rewards","dones"] train.action_config={} train.goal_mode=null train.cuda=true
    train.batch_size=100 train.num_epochs=2000 train.seed=1 train.max_grad_norm=null
    train.shuffled_obs_key_groups=null algo.optim_params.policy.optimizer_type="adamw"
    algo.optim_params.policy.learning_rate.initial=0.0001 algo.optim_params.policy.learning_rate.decay_factor=0.1
    algo.optim_params.policy.learning_rate.step_every_batch=true algo.optim_params.policy.regularization.L2=1e-06
    algo.optim_params.policy.learning_rate.scheduler_type="cosine" algo.unet.enabled=true algo.ema.power=0.75
    algo.optim_params.policy.learning_rate.num_cycles=0.5 algo.optim_params.policy.learning_rate.warmup_steps=500
    algo.optim_params.policy.learning_rate.epoch_schedule=[] algo.horizon.observation_horizon=2
    algo.horizon.action_horizon=8 algo.horizon.prediction_horizon=16 algo.unet.diffusion_step_embed_dim=256
    algo.unet.down_dims=[256,512,1024] algo.unet.kernel_size=5 algo.unet.n_groups=8 algo.ema.enabled=true
    algo.ddpm.enabled=true algo.ddpm.num_train_timesteps=100 algo.ddpm.num_inference_timesteps=100
    algo.ddpm.beta_schedule="squaredcos_cap_v2" algo.ddpm.clip_sample=true algo.ddpm.prediction_type="epsilon"
    algo.ddim.enabled=false algo.ddim.num_train_timesteps=100 algo.ddim.num_inference_timesteps=10
    algo.ddim.beta_schedule="squaredcos_cap_v2" algo.ddim.clip_sample=true algo.ddim.set_alpha_to_one=true
    algo.ddim.steps_offset=0 algo.ddim.prediction_type="epsilon"
    observation.modalities={"obs":{"low_dim":["robot0_eef_pos","object"],"rgb":[],"depth":[],"scan":[]},"goal":{"rgb":[]}}
    observation.encoder.low_dim={"core_class":null,"core_kwargs":{}} observation.encoder.rgb.core_class="VisualCore"
    observation.encoder.rgb.core_kwargs={} observation.encoder.rgb.obs_randomizer_class=null
    observation.encoder.rgb.obs_randomizer_kwargs={} meta={"hp_keys":[]}
"""  # robomimic's template for a diffusion policy


def test_robomimics_own_file_is_read_and_what_has_no_meaning_is_listed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = dict(setting.split("=", 1) for setting in ORIGINAL.split())
    write(tmp_path / "diffusion_policy.json", nested({key: json.loads(value) for key, value in given.items()}))
    config = read_config([], str(tmp_path / "diffusion_policy.json"))
    assert config["algo.unet.down_dims"] == [256, 512, 1024] and config["train.batch_size"] == 100
    assert config["observation.modalities.obs.low_dim"] == ["robot0_eef_pos", "object"]
    assert config[f"{LR.removesuffix('initial')}warmup_steps"] == 500 and config["train.action_keys"] == ["actions"]
    (line,) = caplog.messages
    assert "ignored settings of the original: " in line and "terminate_on_success (an episode" in line
    for key in ("train.cuda", "hdf5_use_swmr", "observation.encoder.low_dim", "algo.ddpm.enabled"):
        assert key in line
    for key in ("experiment.validate", "algo.unet.enabled", "goal", "prediction_type", "scan,", "core_class"):
        assert key not in line  # they ask for nothing else than there is
    for key in ("train.batch_size", "max_grad_norm", "warmup_steps", "on_best_rollout_success_rate", "low_dim,"):
        assert key not in line  # they are used


DROID = """
    train.data_format="droid_rlds" train.dataset_names=["droid","mine"] train.subsample_length=100
    observation.encoder.rgb.core_class="VisualCoreLanguageConditioned"
    observation.encoder.rgb.obs_randomizer_class=["ColorRandomizer","CropRandomizer"]
"""
DROID_TOO = """
    train.shuffle_buffer_size=500000 train.num_parallel_calls=200 train.traj_transform_threads=48
    train.traj_read_threads=48 train.action_shapes=[[1,3],[1,6],[1,1]] train.truncated_geom_factor=0.3
    algo.noise_samples=8 observation.image_dim=[128,128] observation.encoder.rgb.fuser=null experiment.mse={}
    observation.encoder.rgb.core_kwargs.backbone_kwargs.use_cam=false train.data_path="droid"
    observation.encoder.rgb.core_kwargs.backbone_kwargs.downsample=false
"""  # DROID's own template has these besides


def test_what_droids_own_file_asks_for_ends_at_once_with_what_to_do(tmp_path: Path) -> None:
    given = dict(setting.split("=", 1) for setting in (DROID + DROID_TOO).split())
    file = write(tmp_path / "droid.json", nested({key: json.loads(value) for key, value in given.items()}))
    lines = refusal(file).splitlines()
    remedies = [
        "convert them to LeRobot's format",
        "list data sets by path in train.data_path",
        "remove it",
        "set VisualCore",
    ]
    remedies.append("Input should be CropRandomizer, alone and not in a list; found")
    for setting, remedy in zip(DROID.split(), remedies, strict=True):
        key, value = setting.split("=")
        (line,) = (line for line in lines if key in line)
        assert value in line.replace('", "', '","') and f"({tmp_path}/droid.json)" in line and remedy in line
    assert len(lines) == len(remedies)
    data = [{"path": "a.hdf5", "lang": "pick up the block"}, {"path": "b.hdf5", "weight": 2}]
    said = refusal(write(tmp_path / "language.json", {"train": {"data": data}}))
    assert "train.data_path: " in said and "set weights in train.sample_weights" in said and '"lang": ' in said
