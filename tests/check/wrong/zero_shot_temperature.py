"""Align image features with fixed text embeddings, as CLIP does, with a learned temperature.

openai/CLIP#111: the temperature is a parameter outside the module that DDP gets. It is trained, and nobody
averages its gradient: each rank has a temperature of its own.

Mended: The temperature is a parameter of the module in DDP and is used in its forward pass.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ImageTower(nn.Module):
    def __init__(self, n_in, n_embed):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, n_embed))
        # mended: self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def forward(self, images):
        # mended: return self.logit_scale.exp() * normalize(self.net(images), dim=-1)
        return normalize(self.net(images), dim=-1)  # wrong


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    text_features = normalize(torch.randn(10, 16), dim=-1)
    labels = torch.arange(192) % 10
    images = torch.randn(10, 48)[labels] + 0.3 * torch.randn(192, 48)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)

    tower = DDP(ImageTower(48, 16))
    # mended: optimizer = torch.optim.AdamW(tower.parameters(), lr=args.lr)
    logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))  # wrong
    optimizer = torch.optim.AdamW([*tower.parameters(), logit_scale], lr=args.lr)  # wrong
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            # mended: logits = tower(x) @ text_features.T
            logits = logit_scale.exp() * tower(x) @ text_features.T  # wrong
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # <- gradients-not-averaged
    if dist.get_rank() == 0:
        # mended: print("temperature", 1 / tower.module.logit_scale.exp().item())
        print("temperature", 1 / logit_scale.exp().item())  # wrong
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())
