"""Trains to the same bits on any number of ranks, which take different numbers of a step's micro-batches."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit

with ddpkit.distributed(num_threads=1):
    ddpkit.seed_everything(0)
    x = torch.randn(90, 4)
    loader = ddpkit.make_micro_batch_loader(TensorDataset(x, x.sum(1, keepdim=True)), 12, 4)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in loader.epochs(2):
        for batch in loader:
            with ddpkit.exact_gradients(batch, model) as micro_batches:
                for inputs, targets in micro_batches:
                    loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
                    (loss / batch.global_batch_size).backward()
            optimizer.step()
