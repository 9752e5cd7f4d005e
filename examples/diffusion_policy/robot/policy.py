"""The diffusion policy, its loss, and the moving average of its weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from .diffusion import ddim, squaredcos_cap_v2
from .unet import UNet1D

AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DiffusionPolicy(nn.Module):
    """Actions for what was observed. Calling it gives the loss, so it is what gets wrapped in DDP or DataParallel.

    Args:
        config: The settings.
        action_size: Numbers in an action.
        mean: Of the observations, by number.
        std: Their standard deviation.
    """

    def __init__(self, config: dict[str, Any], action_size: int, mean: np.ndarray, std: np.ndarray) -> None:
        super().__init__()
        horizons = [config[f"algo.horizon.{name}_horizon"] for name in ("observation", "action", "prediction")]
        self.observation_horizon, self.action_horizon, self.prediction_horizon = horizons
        self.action_size, self.inference_steps = action_size, config["algo.ddim.num_inference_timesteps"]
        self.dtype = AMP[config["train.amp"]]
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))
        shares = squaredcos_cap_v2(config["algo.ddpm.num_train_timesteps"])
        self.register_buffer("shares", shares.float(), persistent=False)
        self.unet = UNet1D(
            action_size,
            self.observation_horizon * len(mean),
            down_dims=config["algo.unet.down_dims"],
            kernel_size=config["algo.unet.kernel_size"],
            n_groups=config["algo.unet.n_groups"],
            step_size=config["algo.unet.diffusion_step_embed_dim"],
            checkpointing=config["train.gradient_checkpointing"],
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each sample: mean squared error of the noise that is found in the noisy actions.

        Args:
            batch: "observations" (batch, observation horizon, numbers), "actions" (batch, prediction horizon, numbers),
                and what `draw` adds.

        Returns:
            Losses, (batch,). Their mean is the loss; a mean of each GPU's means would be another one where DataParallel
            cuts the batch unevenly.
        """
        noise, step = batch["noise"], batch["step"]
        noisy = add_noise(batch["actions"], noise, self.shares[step])
        return (self._find_noise(noisy, step, self._seen(batch["observations"])) - noise).square().mean((1, 2))

    def draw(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds "noise" like the actions and a diffusion "step" for each sample, (batch,).

        Ranks that are seeded differently draw differently. Drawn in the forward it would be the same on all of
        DataParallel's GPUs, as torch seeds them alike.
        """
        actions = batch["actions"]
        noise = torch.randn_like(actions)
        return batch | {"noise": noise, "step": torch.randint(len(self.shares), noise.shape[:1], device=noise.device)}

    @torch.no_grad()
    def act(self, observations: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The next actions.

        Args:
            observations: The last ones, (batch, observation horizon, numbers).
            noise: What to begin with, (batch, prediction horizon, numbers of an action).

        Returns:
            (batch, action horizon, numbers), within [-1, 1].
        """
        seen, first = self._seen(observations), self.observation_horizon - 1
        plan = ddim(lambda x, step: self._find_noise(x, step, seen), noise, self.shares, self.inference_steps)
        return plan[:, first : first + self.action_horizon]

    def _seen(self, observations: torch.Tensor) -> torch.Tensor:
        return ((observations - self.mean) / self.std).clamp(-5, 5).flatten(1)

    def _find_noise(self, noisy: torch.Tensor, step: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        # here, not around the call: DataParallel's threads do not see a context of their caller
        with torch.autocast(noisy.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.unet(noisy, step, seen).float()


def add_noise(clean: torch.Tensor, noise: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mix `clean` (batch, ...) with noise, so that the signal keeps that share (batch,) of the variance."""
    share = share.view(-1, *[1] * (clean.dim() - 1))
    return share.sqrt() * clean + (1 - share).sqrt() * noise


class EMA(nn.Module):
    """Moving average of a policy's weights, which acts more steadily than the policy itself.

    Its number of updates is part of its state: a resumed run that began again from 0 would overwrite it with the raw
    weights.

    Args:
        policy: Not wrapped; it is copied.
        power: The n-th update keeps 1 - n^-power of the average, at most .9999.
    """

    def __init__(self, policy: DiffusionPolicy, power: float) -> None:
        super().__init__()
        self.power, self.policy = power, deepcopy(policy).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, policy: DiffusionPolicy) -> None:
        """Call it after each optimiser step."""
        self.updates += 1
        keep = min(1 - int(self.updates) ** -self.power, 0.9999)
        for average, parameter in zip(self.policy.parameters(), policy.parameters(), strict=True):
            average.lerp_(parameter, 1 - keep)
