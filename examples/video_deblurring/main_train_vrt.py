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

import torch
from deblurring.checkpoints import find_newest, load_weights, restore_set, save_set
from deblurring.data import Crops, find_clips, make_loader
from deblurring.networks import as_float, inputs, make_network, try_out
from deblurring.options import Options, redacted
from deblurring.running import News, open_boards, open_folder, run
from deblurring.testing import find_test_clips, tell, test
from deblurring.training import (
    check_gradients,
    cut_short,
    freeze,
    make_loss,
    make_optimizer,
    set_learning_rates,
    take_settings,
)
from shared.networks import average_of, stop_if_not_finite, update_average
from shared.program import user_error
from tqdm import tqdm

import ddpkit

log = logging.getLogger("train")
BAD_LOSS = "a smaller train.G_optimizer_lr, train.G_optimizer_clipgrad, or train.amp false may help"


def main(opt: Options, job: ddpkit.Context, stop: ddpkit.Stop) -> None:
    data, train = opt["datasets"]["train"], opt["train"]
    size, lr, keep = data["dataloader_batch_size"], train["G_optimizer_lr"], data["dataloader_batch_size_is"]
    with user_error("datasets.train.dataloader_batch_size", ValueError):
        plan = ddpkit.ScalePlan(size, lr, job.world_size, keep=keep, rule="none", accumulation=train["accumulation"])
    clips = find_clips(data, (data["num_frame"] - 1) * max(data["interval_list"]) + 1, opt["scale"])
    test_clips = find_test_clips(opt)
    folder = open_folder(opt)
    log.info("%s\nwriting to %s\n%s", json.dumps(redacted(opt), indent=2), folder, plan)
    if (last := cut_short(train)) is not None and ddpkit.is_main_process():
        then = f"so the lr stays low from iteration {last}" if last else "the first one, so training ends at a high lr"
        log.warning("total_iter ends inside a period of the schedule, %s", then)

    found = find_newest(folder / "models")
    seed = train["manual_seed"]
    if seed is None:  # rank 0 draws it: ranks with seeds of their own would not share an order
        seed = found.saved["seed"] if found else ddpkit.broadcast(secrets.randbits(31))
    ddpkit.seed_everything(seed)
    crops = Crops(clips, data, seed, opt["scale"])
    loader = make_loader(crops, data, plan.per_rank_batch_size)
    net = make_network(opt).to(job.device)
    try_out(net, crops[0], job.device)
    if opt["path"]["pretrained_netG"] and not found:
        load_weights(net, opt["path"]["pretrained_netG"], strict=train["G_param_strict"])
    average = average_of(net, "train.E_decay=0") if train["E_decay"] else None
    if average and opt["path"]["pretrained_netE"] and not found:
        load_weights(average, opt["path"]["pretrained_netE"], strict=train["E_param_strict"], average=True)
    loss_of = make_loss(train, job.device)
    ddpkit.seed_everything(seed, per_rank=True)  # the ranks' dropout differs; their weights do not
    optimizer = make_optimizer(net, train)
    mixed = {False: None, "bf16": torch.bfloat16, "fp16": torch.float16}[train["amp"]]
    scaler = torch.amp.GradScaler(job.device.type, enabled=mixed == torch.float16)
    nets, state = {"G": net, "E": average}, {"optimizer": optimizer, "loader": loader, "scaler": scaler}
    step = 0
    if found:
        reused = {name: part for name, part in state.items() if name != "optimizer" or train["G_optimizer_reuse"]}
        restore_set(found, nets, **reused)
        take_settings(optimizer, make_optimizer(net, train))  # of the options, not of the checkpoint
        step = found.saved["step"]
        if step >= train["total_iter"]:
            log.info("nothing to do: %s is at iteration %d of %d", found.path, step, train["total_iter"])
            log.info("raise total_iter to train on, or name another task to start over")
            return
        log.info("resuming from iteration %d of %d: %s", step, train["total_iter"], found.path)

    def wrap() -> torch.nn.Module:
        """Freeze parameters before wrapping: DDP waits for the gradients of all others."""
        if freeze(net, train, step):
            log.info("%s frozen until iteration %d", train["fix_keys"], train["fix_iter"])
        return ddpkit.wrap_model(
            net,
            "dp" if job.world_size == 1 and torch.cuda.device_count() > 1 and len(opt["gpu_ids"] or []) > 1 else "auto",
            find_unused_parameters=opt["find_unused_parameters"],
            static_graph=opt["use_static_graph"],
        )

    model, news = wrap(), News(step, job.device)
    boards = open_boards(opt, folder, step, found.saved.get("wandb_id") if found else None)
    no_bar = None if ddpkit.is_main_process() else True  # None: a bar if there is a terminal
    bar = tqdm(total=train["total_iter"], initial=step, unit="iter", disable=no_bar)
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
                model = wrap()

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
                    for each in (net, average) if average else (net,):
                        ddpkit.sync_buffers(each)
                    ddpkit.check_replicas(model, optimizer)
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


def train_until_stopped(opt: Options, job: ddpkit.Context) -> int:
    """Train and return the exit code; after a signal to any rank, all ranks save and stop after the same iteration."""
    with ddpkit.stopping() as stop:
        main(opt, job, stop)
    return stop.exit_code


if __name__ == "__main__":
    run(train_until_stopped, __doc__)
