"""The diffusion policy, its loss, and the moving average of its weights.

Noise is added by the schedule of Nichol and Dhariwal 2021 (arXiv:2102.09672; DDPM: Ho et al. 2020, arXiv:2006.11239)
and removed in a few steps by DDIM (Song et al. 2021, arXiv:2010.02502).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shared.networks import average_of, check_order, check_output, check_sizes, evaluating, trying, update_average
from shared.program import UserError, users_code
from torch import nn

from .networks import ResNet, make_network
from .samples import CONSTANT, Framing, Statistics

NETWORK, SHAPE = "algo.network.class", "(batch, time, numbers of an action)"
AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DiffusionPolicy(nn.Module):
    """Predict actions from observations. Its forward returns the losses, so wrap this module in DDP or DataParallel.

    The statistics of observations and actions are part of its state. It also observes the pictures of `cameras`.
    """

    def __init__(self, config: dict[str, Any], statistics: Statistics, cameras: Sequence[str] = ()) -> None:
        super().__init__()
        horizons = [config[f"algo.horizon.{name}_horizon"] for name in ("observation", "action", "prediction")]
        self.observation_horizon, self.action_horizon, self.prediction_horizon = horizons
        self.inference_steps = config["algo.ddim.num_inference_timesteps"]
        self.finds_noise = config["algo.ddpm.prediction_type"] == "epsilon"
        self.dtype = AMP[config["train.amp"]]
        for name, values in vars(statistics).items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32))
        shares = squaredcos_cap_v2(config["algo.ddpm.num_train_timesteps"])
        self.register_buffer("shares", shares.float(), persistent=False)
        self.cameras, self.framing = list(cameras), Framing.of(config)
        rgb = "observation.encoder.rgb.core_kwargs."
        features = config[f"{rgb}feature_dimension"]
        how = {
            "backbone": config[f"{rgb}backbone_class"],
            "pool": config[f"{rgb}pool_class"],
            "keypoints": config[f"{rgb}pool_kwargs.num_kp"],
            "width": config[f"{rgb}backbone_kwargs.width"],
        }
        self.encoders = nn.ModuleList(ResNet(features, **how) for _ in cameras)
        self.action_size = len(statistics.low)
        observed = self.observation_horizon * (len(statistics.mean) + len(self.cameras) * features)
        self.network = make_network(config, self.action_size, observed)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each sample, (batch,): the mean squared error of the predicted noise or actions.

        The batch holds "observations" (batch, observation horizon, numbers), "actions" and "noise" (batch, prediction
        horizon, numbers), the noising "step" (batch,), and by name the cameras' framed pictures (batch, observation
        horizon, height, width, 3). The caller averages: a mean of each GPU's mean would differ where DataParallel
        splits the batch unevenly.
        """
        center, reach = self._action_range()
        noise, step = batch["noise"], batch["step"]
        actions = (batch["actions"] - center) / reach
        noisy = add_noise(actions, noise, self.shares[step])
        found = self._run_network(noisy, step, self._see(batch))
        return (found - (noise if self.finds_noise else actions)).square().mean((1, 2))

    def try_out(self, batch: dict[str, torch.Tensor]) -> None:
        """Call the policy once in evaluation: it may return something else, and lazy modules get their sizes."""
        with trying(self), users_code(f"{NETWORK}: the network fails"):
            self(batch)
            if self.prediction_horizon == self.action_size:
                fewer, seen = batch["actions"][:, ::2], self._see(batch)
                check_order(NETWORK, lambda: self.network(fewer, batch["step"], seen), fewer.shape, SHAPE)
        check_sizes(NETWORK, self.network)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise UserError(f"{NETWORK}: the network has no parameters to train")

    @torch.no_grad()
    def act(self, seen: dict[str, torch.Tensor], noise: torch.Tensor) -> torch.Tensor:
        """Return the next actions, (batch, action horizon, numbers), within the range of the demonstrations' actions.

        `seen` holds the last "observations" and whole pictures, otherwise as in `forward`; their middle is used.
        `noise` is (batch, prediction horizon, numbers of an action).
        """
        middle = {camera: self.framing(seen[camera], (0.5, 0.5)) for camera in self.cameras}
        with evaluating(self):
            features, first = self._see(seen | middle), self.observation_horizon - 1

            def find_noise(noisy: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
                found = self._run_network(noisy, step, features)
                return found if self.finds_noise else remove_clean(noisy, found, self.shares[step])

            plan = ddim(find_noise, noise, self.shares, self.inference_steps)
        return (self.high + self.low) / 2 + (self.high - self.low) / 2 * plan[:, first : first + self.action_horizon]

    def _action_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the middle and half the range of each number of an action, 1 for those that do not change."""
        reach = (self.high - self.low) / 2
        least = CONSTANT * torch.maximum(self.high.abs(), self.low.abs())
        return (self.high + self.low) / 2, torch.where(reach > least, reach, 1.0)

    def _see(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Join the observations into one vector, (batch, numbers)."""
        numbers = ((batch["observations"] - self.mean) / self.std).clamp(-5, 5)
        parts = [numbers.flatten(1)]
        for camera, encoder in zip(self.cameras, self.encoders, strict=True):
            with self._autocast(numbers.device):
                features = encoder(batch[camera].flatten(0, 1)).float()
            parts.append(features.view(len(numbers), -1))
        return torch.cat(parts, dim=1)

    def _run_network(self, noisy: torch.Tensor, step: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        with self._autocast(noisy.device):
            found = self.network(noisy, step, seen)
        check_output(NETWORK, found, noisy.shape, SHAPE)
        return found.float()

    def _autocast(self, device: torch.device) -> torch.autocast:
        # here, not around the call: DataParallel's threads do not inherit it
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


def add_noise(clean: torch.Tensor, noise: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mix `clean` (batch, ...) with noise; the signal keeps `share` (batch,) of the variance."""
    share = share.view(-1, *[1] * (clean.dim() - 1))
    return share.sqrt() * clean + (1 - share).sqrt() * noise


def remove_clean(noisy: torch.Tensor, clean: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the noise in a result of `add_noise`."""
    share = share.view(-1, *[1] * (clean.dim() - 1))
    return (noisy - share.sqrt() * clean) / (1 - share).sqrt()


def squaredcos_cap_v2(steps: int) -> torch.Tensor:
    """Return the signal's share of the variance after each noising step, (steps,) in float64, from ~1 to ~0.

    It falls as a squared cosine; no single step may add more than .999.
    """
    times = torch.arange(steps + 1, dtype=torch.float64) / steps
    share = ((times + 0.008) / 1.008 * math.pi / 2).cos() ** 2
    return (share[1:] / share[:-1]).clamp(min=0.001).cumprod(0)


def ddim(
    find_noise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    shares: torch.Tensor,
    steps: int,
) -> torch.Tensor:
    """Denoise `start`, (batch, ...), to a sample within [-1, 1], deterministically.

    It takes `steps` evenly spaced noising steps, down to 0. `find_noise` predicts the noise in a sample at a noising
    step, (batch,).
    """
    stride = len(shares) // steps
    sample = start
    for step in range((steps - 1) * stride, -1, -stride):
        share, next_share = shares[step], shares[step - stride] if step else shares.new_ones(())
        noise = find_noise(sample, torch.full(sample.shape[:1], step, device=sample.device))
        clean = ((sample - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)
        sample = next_share.sqrt() * clean + (1 - next_share).sqrt() * noise
    return sample


class EMA(nn.Module):
    """Moving average of a policy's weights, which acts more steadily than the policy itself. Buffers are copied.

    The n-th update keeps 1 - n^-power of it, at most .9999. The number of updates is part of its state: if a resumed
    run counted from 0, it would overwrite the average with the raw weights.
    """

    def __init__(self, policy: DiffusionPolicy, power: float) -> None:
        super().__init__()
        self.power, self.policy = power, average_of(policy, "algo.ema.enabled=false")
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def update(self, policy: DiffusionPolicy) -> None:
        """Update the average after an optimiser step."""
        self.updates += 1
        update_average(self.policy, policy, keep=min(1 - int(self.updates) ** -self.power, 0.9999))
