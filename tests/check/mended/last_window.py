"""Train with gradient accumulation over an epoch that is not a multiple of the window.

The loss is divided by the number of batches in the window at hand.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, dataset, gradient_accumulation_steps, batch_size):
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.sampler = DistributedSampler(dataset)
        self.dataloader = DataLoader(dataset, batch_size, sampler=self.sampler)
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def training_step(self, batch, num_batches, last):
        inputs, labels = batch
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss = loss / num_batches
            loss.backward()

    def train(self, epochs):
        n = len(self.dataloader)
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for step, batch in enumerate(self.dataloader):
                start = step - step % self.gradient_accumulation_steps
                num_batches = min(self.gradient_accumulation_steps, n - start)
                last = step - start + 1 == num_batches
                self.training_step(batch, num_batches, last)
                if last:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if dist.get_rank() == 0:
                print("epoch", epoch, "of", n, "batches")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(120, 15)
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(1))
    Trainer(nn.Linear(15, 3), dataset, gradient_accumulation_steps=4, batch_size=10).train(epochs=2)
    dist.destroy_process_group()
