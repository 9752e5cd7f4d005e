"""Train an audio codec with a codebook that follows a moving average of the latents.

ZhikangNiu/encodec-pytorch#15: buffers are not broadcast and each rank updates its codebook with its own
latents, so the codebooks drift apart.

Mended: The codebook is updated with the statistics of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EuclideanCodebook(nn.Module):
    def __init__(self, dim, codes, decay=0.9):
        super().__init__()
        self.decay = decay
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(codes))

    def forward(self, x):
        codes = torch.cdist(x.detach(), self.embed).argmin(dim=1)
        if self.training:
            self.update(x.detach(), one_hot(codes, len(self.embed)).float())
        quantized = self.embed[codes]
        return x + (quantized - x).detach(), (quantized - x).square().mean()

    def update(self, x, onehot):
        counts = onehot.sum(0)
        sums = onehot.T @ x
        # mended: dist.all_reduce(counts)
        # mended: dist.all_reduce(sums)
        self.cluster_size.lerp_(counts, 1 - self.decay)
        self.embed_avg.lerp_(sums, 1 - self.decay)
        self.embed = self.embed_avg / self.cluster_size.clamp(min=1e-3).unsqueeze(1)


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 6), nn.Linear(6, 16)
        self.quantizer = EuclideanCodebook(6, 12)

    def forward(self, wav):
        quantized, commitment = self.quantizer(self.encoder(wav))
        return nn.functional.mse_loss(self.decoder(quantized), wav) + 0.25 * commitment


dist.init_process_group("gloo")
torch.manual_seed(3)
dataset = TensorDataset(torch.randn(192, 16))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=24, sampler=sampler)
model = DDP(Codec(), broadcast_buffers=False)  # <- replicas-drift
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (wav,) in loader:
        loss = model(wav)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("codes", (model.module.quantizer.cluster_size > 0.5).sum().item())
dist.destroy_process_group()
