"""Train an encoder and a head, and average the gradients by hand.

Common after experiments with a frozen encoder: its features are still detached, though the optimizer has it again. Only
the head learns.

Mended: The encoder learns with the head.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(120, 8)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())  # <- no-gradients
    head = nn.Linear(16, 2)
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            # mended: features = encoder(inputs)
            features = encoder(inputs).detach()  # wrong
            loss = cross_entropy(head(features), labels)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(parameters)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
