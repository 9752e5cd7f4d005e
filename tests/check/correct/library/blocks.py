"""Parts of networks."""

from torch import nn


class ConvBlock(nn.Sequential):
    def __init__(self, n_in, n_out):
        super().__init__(nn.Conv1d(n_in, n_out, 3, padding=1), nn.GroupNorm(2, n_out), nn.ReLU())
