"""Train a network to deblur video, on one process or on any number of ranks.

    python prepare.py                                                  once: makes the data
    python main_train_vrt.py --opt options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
    torchrun --nproc_per_node=2 main_train_vrt.py --opt options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
    ./launch_train.sh 2

The same command resumes from the newest checkpoint of the task, also on another number of ranks. README.md beside this
program has the measured results.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from deblurring.checkpoints import Found, find_newest, load_weights, restore_set, save_set
from deblurring.data import Crops, find_clips, make_loader
from deblurring.networks import as_float, inputs, make_network, try_out
from deblurring.options import Options, redacted
from deblurring.running import News, open_boards, open_folder, run
from deblurring.testing import find_test_clips, tell, test, try_clips
from deblurring.training import (
    check_gradients,
    freeze,
    make_loss,
    make_optimizer,
    set_learning_rates,
    take_settings,
    warn_of_a_cut_period,
)
from shared.networks import average_of, make_equal, stop_if_not_finite, update_average
from shared.program import hides_bar, user_error
from tqdm import tqdm

import ddpkit

log = logging.getLogger("train")
BAD_LOSS = "a smaller train.G_optimizer_lr, train.G_optimizer_clipgrad, or train.amp false may help"


def main(opt: Options, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    data, train = opt["datasets"]["train"], opt["train"]
    plan = plan_batches(opt, job.world_size)
    clips = find_clips(data, (data["num_frame"] - 1) * max(data["interval_list"]) + 1, opt["scale"])
    test_clips = find_test_clips(opt)
    folder = open_folder(opt)
    log.info("%s\nwriting to %s\n%s", json.dumps(redacted(opt), indent=2), folder, plan)
    warn_of_a_cut_period(train)

    found = find_newest(folder / "models")
    seed = choose_seed(train, found)
    ddpkit.seed_everything(seed)
    crops = Crops(clips, data, seed, opt["scale"])
    loader = make_loader(crops, data, plan.per_rank_batch_size)
    nets = make_nets(opt, crops, job.device, is_new=found is None)
    net, average = nets["G"], nets["E"]
    try_clips(net, test_clips, opt, job.device)
    loss_of = make_loss(train, job.device)
    ddpkit.seed_everything(seed, per_rank=True)  # the ranks' dropout differs; their weights do not
    optimizer = make_optimizer(net, train)
    mixed = {False: None, "bf16": torch.bfloat16, "fp16": torch.float16}[train["amp"]]
    scaler = torch.amp.GradScaler(job.device.type, enabled=mixed == torch.float16)
    state = {"optimizer": optimizer, "loader": loader, "scaler": scaler}
    step = resume(found, nets, state, train) if found else 0
    if step >= train["total_iter"]:
        log.info("nothing to do: raise total_iter to train on, or name another task to start over")
        return

    model, news = wrap(net, opt, job, step), News(step, job.device)
    boards = open_boards(opt, folder, step, found.saved.get("wandb_id") if found else None)
    bar = tqdm(total=train["total_iter"], initial=step, unit="iter", disable=hides_bar())
    last = leaves = False
    must_all_learn = job.world_size > 1 and not (opt["find_unused_parameters"] or opt["use_static_graph"])
    while not (last or leaves):
        for batch in news.waiting(loader):
            part = as_float(batch, job.device)
            with ddpkit.accumulate(model, news.batches, train["accumulation"]) as complete:
                with torch.autocast(job.device.type, mixed, enabled=mixed is not None):
                    restored = model(*inputs(part))
                loss = loss_of(restored, part["H"]) / train["accumulation"]
                scaler.scale(loss).backward()
            news.add(loss, batch["H"], step)
            if not complete:
                continue
            if must_all_learn:
                check_gradients(net)
            lr = set_learning_rates(optimizer, train, step)
            if train["G_optimizer_clipgrad"]:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), train["G_optimizer_clipgrad"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if average:
                update_average(average, net, train["E_decay"])
            step += 1
            bar.update()
            if step == train["fix_iter"]:
                del model  # and its hooks
                model = wrap(net, opt, job, step)

            last, leaves = step == train["total_iter"], stop.now()
            here = f"<epoch:{loader.epoch:3d}, iter:{step:8,d}"
            due = [what for what in ("print", "save", "test") if last or step % train[f"checkpoint_{what}"] == 0]
            if leaves and not due:
                due = ["save"]
            if due:
                stop_if_not_finite(news.first_bad, step, net, BAD_LOSS)
            if "print" in due:
                told = news.tell(step)
                log.info(here + ", lr:{:.3e}> G_loss: {:.3e} images/s: {:.1f} waits: {:.1%}".format(lr, *told.values()))
                boards.add({"lr": lr} | told, step)
            if "save" in due:
                with news.paused():
                    make_equal([net, average] if average else [net], optimizer)
                    save_set(folder / "models", step, nets, **state, seed=seed, wandb_id=boards.run_id)
                log.info("%s> saved in %s", here, folder / "models")
            if "test" in due:
                with news.paused():
                    report = test(average or net, test_clips, opt, job.device, folder / "images", f"{step}")
                    boards.add(tell(report, folder, step, loader.epoch), step)
                    boards.show({f"test/{clip}": picture for clip, picture in report.pictures.items()}, step)
            if last or leaves:
                break
    bar.close()
    boards.close()
    if step < train["total_iter"]:
        log.info("stopped after iteration %d of %d: the same command resumes", step, train["total_iter"])
    else:
        log.info("done: %d iterations; raise total_iter to train on", step)


@user_error("datasets.train.dataloader_batch_size", ValueError)
def plan_batches(opt: Options, world_size: int) -> ddpkit.ScalePlan:
    data, train = opt["datasets"]["train"], opt["train"]
    size, keep = data["dataloader_batch_size"], data["dataloader_batch_size_is"]
    lr, accumulation = train["G_optimizer_lr"], train["accumulation"]
    return ddpkit.ScalePlan(size, lr, world_size, keep=keep, rule="none", accumulation=accumulation)


def choose_seed(train: Options, found: Found | None) -> int:
    """Return the seed of the options or, without one, what rank 0 draws: ranks with seeds of their own would not share
    an order. A run that resumes keeps what was drawn. Collective."""
    if train["manual_seed"] is not None:
        return train["manual_seed"]
    return found.saved["seed"] if found else ddpkit.broadcast(secrets.randbits(31))


def make_nets(opt: Options, crops: Crops, device: torch.device, is_new: bool) -> dict[str, torch.nn.Module | None]:
    """Make the network, "G", and its moving average, "E", if the options ask for one. Collective."""
    train, released = opt["train"], opt["path"]
    net = make_network(opt).to(device)
    try_out(net, crops[0], device)
    if is_new and released["pretrained_netG"]:
        load_weights(net, released["pretrained_netG"], strict=train["G_param_strict"])
    average = average_of(net, "train.E_decay=0") if train["E_decay"] else None
    if is_new and average and released["pretrained_netE"]:
        load_weights(average, released["pretrained_netE"], strict=train["E_param_strict"], average=True)
    return {"G": net, "E": average}


def resume(found: Found, nets: Mapping[str, torch.nn.Module | None], state: Mapping[str, Any], train: Options) -> int:
    """Restore a checkpoint and return its iteration; rates and decay are those of the options. Collective."""
    reused = {name: part for name, part in state.items() if name != "optimizer" or train["G_optimizer_reuse"]}
    restore_set(found, nets, **reused)
    take_settings(state["optimizer"], make_optimizer(nets["G"], train))
    log.info("resuming from iteration %d of %d: %s", found.saved["step"], train["total_iter"], found.path)
    return found.saved["step"]


def wrap(net: torch.nn.Module, opt: Options, job: ddpkit.Context, step: int) -> torch.nn.Module:
    """Freeze parameters and then wrap: DDP waits for the gradients of all others. Collective."""
    if freeze(net, opt["train"], step):
        log.info("%s frozen until iteration %d", opt["train"]["fix_keys"], opt["train"]["fix_iter"])
    is_parallel = job.world_size == 1 and torch.cuda.device_count() > 1 and len(opt["gpu_ids"] or []) > 1
    with user_error("sync_batchnorm", ValueError) if opt["sync_batchnorm"] else nullcontext():
        model = ddpkit.wrap_model(
            net,
            "dp" if is_parallel else "auto",
            find_unused_parameters=opt["find_unused_parameters"],
            static_graph=opt["use_static_graph"],
            sync_batchnorm=opt["sync_batchnorm"],
        )
    return torch.compile(model) if opt["compile"] else model


def train_until_stopped(opt: Options, job: ddpkit.Context) -> int:
    """Train and return the exit code; after a signal to any rank, all ranks save and stop after the same iteration."""
    with ddpkit.stopping() as stop:
        main(opt, job, stop)
    return stop.exit_code


if __name__ == "__main__":
    run(train_until_stopped, __doc__)
