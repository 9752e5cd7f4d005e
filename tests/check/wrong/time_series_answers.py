"""Train a model that answers questions about time series, with DDP and a trainer class.

OpenTSLM/OpenTSLM#49: each step computes the loss on the unwrapped module, so DDP never averages a gradient,
and every rank trains a model of its own on its share of the data.

Mended: The loss is computed by `forward`, which the trainer calls through DDP.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SeriesModel(nn.Module):
    def __init__(self, length=24, answers=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(length, 32), nn.GELU())
        self.head = nn.Linear(32, answers)

    # mended: def forward(self, batch):
    def compute_loss(self, batch):  # wrong
        series, answer = batch
        return nn.functional.cross_entropy(self.head(self.encoder(series)), answer)


class CurriculumTrainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = DDP(SeriesModel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        series = torch.randn(96, 24).cumsum(1)
        dataset = TensorDataset(series, (series[:, -1] > 0).long())
        self.sampler = DistributedSampler(dataset, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)

    def _get_model(self):
        return self.model.module

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.optimizer.zero_grad()
                # mended: loss = self.model(batch)
                loss = self._get_model().compute_loss(batch)  # wrong <- gradients-not-averaged
                loss.backward()
                self.optimizer.step()
            self.save(epoch)

    def save(self, epoch):
        if self.rank == 0:
            torch.save(
                self._get_model().state_dict(),
                os.path.join(os.environ.get("OUT", tempfile.gettempdir()), f"stage_{epoch}.pt"),
            )
            print("saved stage", epoch)
        dist.barrier()


if __name__ == "__main__":
    CurriculumTrainer().train(epochs=2)
    dist.destroy_process_group()
