"""Train two towers contrastively, as CLIP does, over the pairs of all ranks.

Common in contrastive losses: torch's all_gather carries no gradients. Only the temperature learns, and as DDP was told
to expect unused parameters, nothing complains.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1), self.scale.exp()


def gather(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)  # <- no-gradients
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    latent = torch.randn(96, 6)
    dataset = TensorDataset(latent @ torch.randn(6, 20), latent @ torch.randn(6, 12))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Towers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            images, texts, scale = model(images, texts)
            logits = scale * gather(images) @ gather(texts).T
            labels = torch.arange(len(logits))
            loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss over the global batch {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
