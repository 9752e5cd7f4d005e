"""Networks."""

import torch
from torch import nn

from .blocks import ConvBlock


class UNet1d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down = ConvBlock(1, channels)
        self.middle = ConvBlock(channels, channels)
        self.up = nn.Upsample(scale_factor=2)
        self.out = nn.Conv1d(2 * channels, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.middle(nn.functional.avg_pool1d(fine, 2))
        return self.out(torch.cat([fine, self.up(coarse)], dim=1))
