"""Train two towers contrastively: the features of all ranks are gathered, with gradients, for one global loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(20, 8)
        self.text = nn.Linear(12, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1), self.logit_scale.exp()


def clip_loss(images, texts, scale):
    images = torch.cat(all_gather(images))
    texts = torch.cat(all_gather(texts))
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    latent = torch.randn(96, 6)
    dataset = TensorDataset(latent @ torch.randn(6, 20), latent @ torch.randn(6, 12))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            loss = clip_loss(*model(images, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss over the global batch {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
