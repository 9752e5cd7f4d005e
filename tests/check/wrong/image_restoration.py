"""Train an image restoration network for a number of epochs.

cszn/KAIR#106: `set_epoch` is not called, so the sampler shuffles in the same order in each epoch: the same
samples meet in the same batches, on the same rank, for ever.

Mended: `set_epoch` is called at the head of each epoch.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class DatasetDenoising(Dataset):
    def __init__(self, n_images, sigma):
        g = torch.Generator().manual_seed(0)
        self.clean = torch.rand(n_images, 1, 8, 8, generator=g)
        self.noisy = self.clean + sigma * torch.randn(self.clean.shape, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, index):
        return {"L": self.noisy[index], "H": self.clean[index]}


def main(opt):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(opt.seed)
    train_set = DatasetDenoising(96, opt.sigma)
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True, seed=opt.seed)
    train_loader = DataLoader(train_set, batch_size=8, shuffle=False, drop_last=True, sampler=train_sampler)

    netG = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    )
    G_optimizer = torch.optim.Adam(netG.parameters(), lr=opt.lr)
    current_step = 0
    for epoch in range(opt.epochs):
        # mended: train_sampler.set_epoch(epoch)
        for train_data in train_loader:  # <- epoch-not-set
            current_step += 1
            G_optimizer.zero_grad()
            G_loss = nn.functional.l1_loss(netG(train_data["L"]), train_data["H"])
            G_loss.backward()
            G_optimizer.step()
        if rank == 0:
            print(f"<epoch:{epoch:3d}, iter:{current_step:4d}>")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=17)
    main(parser.parse_args())
