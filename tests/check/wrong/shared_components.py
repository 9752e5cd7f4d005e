"""Train a model with gradients that are averaged by hand after each backward pass.

Helsinki-NLP/FoTraNMT#45 broadcasts the initial weights, as nothing else does without DDP. Here it is missing:
each rank begins with weights of its own, and equal gradients keep them apart for ever.

Mended: Rank 0's weights are broadcast before training.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_model():
    encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
    decoder = nn.Linear(32, 12)
    return nn.Sequential(encoder, decoder)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(1234 + dist.get_rank())
    model = build_model()  # <- replicas-differ-at-start
    # mended: for param in model.parameters():
    # mended:     dist.broadcast(param.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    data = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(data)
    train_set = DataLoader(TensorDataset(data), batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        for (x,) in train_set:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)
            epoch_loss += loss.detach()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        dist.all_reduce(epoch_loss)
        if dist.get_rank() == 0:
            print("epoch", epoch, epoch_loss.item() / len(train_set) / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
