"""How near restored frames are to the sharp ones: PSNR and SSIM, of all colours and of the luminance (Y)."""

from __future__ import annotations

import math

from torch import Tensor

NAMES = ("psnr", "ssim", "psnr_y", "ssim_y")


def measure(frame: Tensor, sharp: Tensor) -> dict[str, float]:
    """Score a frame, as image files are scored: values are rounded to bytes first.

    Args:
        frame: Shape (3, height, width), in [0, 1].
        sharp: The same.

    Returns:
        The values of `NAMES`, PSNR in dB.
    """
    one, other = as_image(frame), as_image(sharp)
    y, other_y = luminance(one), luminance(other)
    return dict(zip(NAMES, [psnr(one, other), ssim(one, other), psnr(y, other_y), ssim(y, other_y)], strict=True))


def as_image(frames: Tensor) -> Tensor:
    """Frames in [0, 1] as an image file holds them: whole numbers in [0, 255], still as floats."""
    return (frames.clamp(0, 1) * 255).round().double()


def luminance(frame: Tensor) -> Tensor:
    """Y of ITU-R BT.601 in [16, 235], of a frame of shape (3, height, width) in [0, 255], with one channel."""
    red, green, blue = frame
    return ((65.481 * red + 128.553 * green + 24.966 * blue) / 255 + 16)[None]


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio of two images in dB, of values in [0, 255]; infinite for equal ones."""
    error = (one - other).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(one: Tensor, other: Tensor) -> float:
    """Structural similarity of two images of values in [0, 255], with a Gaussian window of 11 pixels and sigma 1.5.

    References:
        Wang, Bovik, Sheikh and Simoncelli 2004, Image quality assessment: from error visibility to structural
        similarity.
    """
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mean1, mean2 = _window(one), _window(other)
    variances = _window(one * one) + _window(other * other) - mean1**2 - mean2**2
    covariance = _window(one * other) - mean1 * mean2
    similarity = (2 * mean1 * mean2 + c1) * (2 * covariance + c2)
    return (similarity / ((mean1**2 + mean2**2 + c1) * (variances + c2))).mean().item()


def _window(image: Tensor) -> Tensor:
    """Weighted means over the window, where it lies inside the image; sums of shifted images, as a convolution of one
    channel takes 20 times as long.
    """
    weights = [math.exp(-(at**2) / (2 * 1.5**2)) for at in range(-5, 6)]
    for dim in (-2, -1):
        length = image.shape[dim] - 10
        image = sum(weight / sum(weights) * image.narrow(dim, i, length) for i, weight in enumerate(weights))
    return image
