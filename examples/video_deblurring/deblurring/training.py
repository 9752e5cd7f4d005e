"""The parts of a training step: loss, learning rate, optimizer, frozen parameters and moving average."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from shared.networks import check_output, make_module, without_gradient
from shared.program import UserError
from torch import Tensor, nn

import ddpkit
from deblurring.networks import check_restored

log = logging.getLogger(__name__)


def make_loss(train: Mapping[str, Any], device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the loss that `train` names: l1, l2, Charbonnier (l1 smoothed at 0) or the user's own. Collective."""
    kind = train["G_lossfn_type"]
    if ":" in kind:
        measure = make_module("train.G_lossfn_type", kind, (), {}).to(device).eval().requires_grad_(False)
    elif kind == "l1":
        measure = nn.functional.l1_loss
    elif kind == "l2":
        measure = nn.functional.mse_loss
    else:

        def measure(restored: Tensor, sharp: Tensor) -> Tensor:
            return ((restored - sharp).square() + train["G_charbonnier_eps"]).sqrt()

    def loss_of(restored: Tensor, sharp: Tensor) -> Tensor:
        check_restored(restored, sharp.shape)
        loss = measure(restored.float(), sharp)
        check_output("train.G_lossfn_type", loss)
        return train["G_lossfn_weight"] * loss.mean()

    return loss_of


def learning_rate(train: Mapping[str, Any], step: int, base: float) -> float:
    """Return the learning rate of a step, which depends on its number alone: there is no state to save.

    A cosine period that `total_iter` would cut short is not started: a run does not end at the full learning rate.
    """
    if train["G_scheduler_type"] == "MultiStepLR":
        return base * train["G_scheduler_gamma"] ** bisect_right(train["G_scheduler_milestones"], step)
    period, low, start, end = train["G_scheduler_periods"], train["G_scheduler_eta_min"], 0, cut_short(train)
    if end and step >= end:
        return low
    while step >= start + period:
        start, period = start + period, period * train["G_scheduler_restart_weights"]
    return low + (base - low) * (1 + math.cos(math.pi * (step - start) / period)) / 2


def cut_short(train: Mapping[str, Any]) -> int | None:
    """Return the first step of the cosine period that `total_iter` cuts short, if there is one; 0 for the first."""
    if train["G_scheduler_type"] != "CosineAnnealingWarmRestarts":
        return None
    period, start = train["G_scheduler_periods"], 0
    while start + period <= train["total_iter"]:
        start, period = start + period, period * train["G_scheduler_restart_weights"]
    return start if start < train["total_iter"] else None


def warn_of_a_cut_period(train: Mapping[str, Any]) -> None:
    """Warn that a run ends inside a period of its schedule."""
    if (last := cut_short(train)) is not None and ddpkit.is_main_process():
        then = f"so the lr stays low from iteration {last}" if last else "the first one, so training ends at a high lr"
        log.warning("total_iter ends inside a period of the schedule, %s", then)


def is_fixed(name: str, train: Mapping[str, Any]) -> bool:
    return any(key in name for key in train["fix_keys"])


def make_optimizer(net: nn.Module, train: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer, with a separate group for the parameters that `fix_keys` names."""
    names = [name for name, _ in net.named_parameters()]
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise UserError("netG.net_type: the network has no parameters to train")
    for key in train["fix_keys"]:
        if not any(key in name for name in names):
            some = ", ".join(names[:20])  # of perhaps thousands
            raise UserError(f"train.fix_keys: no parameter has {key!r} in its name; the first ones are {some}")
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in net.named_parameters():
        groups[is_fixed(name, train)].append(parameter)
    if train["fix_iter"] > 0 and not groups[False]:
        raise UserError(
            f"train.fix_keys: every parameter has one of {train['fix_keys']} in its name, so nothing would train"
        )
    lr = train["G_optimizer_lr"]
    settings = [{"params": groups[False], "base_lr": lr}, {"params": groups[True], "base_lr": lr * train["fix_lr_mul"]}]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train["G_optimizer_type"]]
    betas, decay = tuple(train["G_optimizer_betas"]), train["G_optimizer_wd"]
    return kind([group for group in settings if group["params"]], lr, betas=betas, weight_decay=decay)


def take_settings(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Copy learning rates, decay and other settings from an optimizer with the same groups, but not its moments."""
    for group, now in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update({name: value for name, value in now.items() if name != "params"})


def set_learning_rates(optimizer: torch.optim.Optimizer, train: Mapping[str, Any], step: int) -> float:
    """Set the learning rate of every group for a step; return that of the first."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(train, step, group["base_lr"])
    return optimizer.param_groups[0]["lr"]


def freeze(net: nn.Module, train: Mapping[str, Any], step: int) -> bool:
    """Freeze or unfreeze what `fix_keys` names, for a step, before DDP wraps; return whether it is frozen.

    Parameters that the network itself has frozen stay frozen, unless `fix_keys` names them.
    """
    frozen = step < train["fix_iter"]
    for name, parameter in net.named_parameters():
        if train["fix_iter"] > 0 and is_fixed(name, train):
            parameter.requires_grad_(not frozen)
    return frozen


def check_gradients(net: nn.Module) -> None:
    """Raise if a parameter has no gradient after a step's backward."""
    if idle := without_gradient(net):
        some = ", ".join(idle[:5]) + (", …" if len(idle) > 5 else "")
        raise UserError(
            f"the loss does not depend on {len(idle)} parameters of the network, {some}: set "
            "find_unused_parameters=true, use_static_graph=true if it never does, or remove them"
        )
