"""A network in stages: each rank passes its outputs to the next, and gets their gradients back, in micro-batches."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 10


def exchange(*operations):
    for request in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        request.wait()


def main():
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    samples = torch.randn(96, WIDTH)
    loader = DataLoader(TensorDataset(samples), batch_size=12)
    torch.manual_seed(rank)
    stage = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    for (batch,) in loader:
        optimizer.zero_grad()
        for part in batch.chunk(3):
            inputs = part.clone()
            if rank > 0:
                exchange((dist.irecv, inputs, rank - 1))
            outputs = stage(inputs.requires_grad_())
            if rank == last:
                torch.nn.functional.mse_loss(outputs, part.sin()).backward()
            else:
                gradient = torch.empty_like(outputs)
                exchange((dist.isend, outputs.detach(), rank + 1))
                exchange((dist.irecv, gradient, rank + 1))
                outputs.backward(gradient)
            if rank > 0:
                exchange((dist.isend, inputs.grad, rank - 1))
        optimizer.step()


if __name__ == "__main__":
    main()
