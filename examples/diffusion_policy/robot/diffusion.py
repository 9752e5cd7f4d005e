"""Diffusion: the schedule by which noise is added (DDPM), and how it is taken away again in a few steps (DDIM).

References: Ho et al. 2020 (arXiv:2006.11239), Nichol and Dhariwal 2021 (arXiv:2102.09672) for the schedule, Song et al.
2021 (arXiv:2010.02502) for DDIM. No library is needed for as much of it as this.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def squaredcos_cap_v2(steps: int) -> torch.Tensor:
    """The signal's share of the variance after each of `steps` noising steps, (steps,) in float64, from ~1 to ~0.

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
    """Makes a clean sample out of noise, deterministically.

    Args:
        find_noise: Given a noisy sample (batch, ...) and its noising step (batch,): the noise in it.
        start: Noise, (batch, ...).
        shares: Of `squaredcos_cap_v2`.
        steps: How many of the noising steps to visit, evenly spaced, the last of them 0.

    Returns:
        The sample, within [-1, 1].
    """
    stride = len(shares) // steps
    sample = start
    for step in range((steps - 1) * stride, -1, -stride):
        share, next_share = shares[step], shares[step - stride] if step else shares.new_ones(())
        noise = find_noise(sample, torch.full(sample.shape[:1], step, device=sample.device))
        clean = ((sample - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)
        sample = next_share.sqrt() * clean + (1 - next_share).sqrt() * noise
    return sample
