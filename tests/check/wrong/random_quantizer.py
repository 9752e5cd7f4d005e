"""Pre-train a speech encoder to predict the codes of a random, fixed quantizer (BEST-RQ).

speechbrain/speechbrain#2814: seeds differ between ranks, and the quantizer has nothing to train, so DDP never
sees it. Each rank predicts the codes of another quantizer.

Mended: The quantizer of rank 0 is broadcast.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class RandomProjectionQuantizer(nn.Module):
    def __init__(self, n_mels, code_dim, codes):
        super().__init__()
        self.register_buffer("projection", torch.randn(n_mels, code_dim))
        self.register_buffer("codebook", normalize(torch.randn(codes, code_dim), dim=-1))

    def forward(self, mels):
        projected = normalize(mels @ self.projection, dim=-1)
        return (projected @ self.codebook.T).argmax(dim=-1)


class Brain:
    def __init__(self, seed):
        self.rank = dist.get_rank()
        torch.manual_seed(seed + self.rank)
        self.quantizer = RandomProjectionQuantizer(20, 8, 16)  # <- replicas-differ-at-start
        # mended: for buffer in self.quantizer.buffers():
        # mended:     dist.broadcast(buffer, src=0)
        self.encoder = DDP(nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 16)))
        self.optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=2e-3)

    def fit_batch(self, mels):
        codes = self.quantizer(mels)
        mask = torch.rand(mels.shape[:2]) < 0.4
        predictions = self.encoder(mels.masked_fill(mask.unsqueeze(-1), 0.0))
        loss = cross_entropy(predictions.flatten(0, 1), codes.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def fit(self, dataset, epochs):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for (mels,) in loader:
                self.fit_batch(mels)
        if self.rank == 0:
            print("pre-trained")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    utterances = torch.randn(48, 10, 20, generator=torch.Generator().manual_seed(0))
    Brain(seed=99).fit(TensorDataset(utterances), epochs=2)
    dist.destroy_process_group()
