"""Train on sequences; batches in which all of them are too short are skipped.

NVIDIA-NeMo/Automodel#2468: each rank skips by looking at its own batch. The rank that skips is a backward
pass ahead of the others: gradients of different batches are averaged, and where one rank skips more than
another, the other one waits for it at the end.

Mended: All ranks skip a batch if one of them has to.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BLOCK = 6


def masked_loss(model, ids, lengths):
    logits = model(ids[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses.mean(dim=1) * (lengths >= BLOCK)).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    ids = torch.randint(0, 30, (96, 13))
    lengths = torch.randint(1, 9, (96,))
    dataset = TensorDataset(ids, lengths)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    skipped = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, length in loader:
            has_valid = (length >= BLOCK).any().int()
            # mended: dist.all_reduce(has_valid, op=dist.ReduceOp.MIN)
            if not has_valid:  # <- one-rank-decides
                skipped += 1
                continue
            loss = masked_loss(model, batch, length)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {dist.get_rank()} skipped {skipped} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
