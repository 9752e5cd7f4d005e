"""Segment a line of pixels with a network from a package beside this script."""

import torch
import torch.distributed as dist
from library.networks import UNet1d
from library.running import AverageMeter
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    signal = torch.randn(96, 1, 16)
    dataset = TensorDataset(signal, (signal > 0.3).float())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(UNet1d(channels=8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        meter = AverageMeter()
        for inputs, mask in loader:
            loss = binary_cross_entropy_with_logits(model(inputs), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(inputs))
        mean = meter.mean_of_all_ranks()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
