"""Train a text diffusion model from an endless loader.

Shark-NLP/DiffuSeq#37: the loader shuffles by itself and every process has the same seed, so all ranks draw
the same batches: two GPUs do the work of one, twice.

Mended: A DistributedSampler shares the samples out, anew in each pass over the data.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

# mended: import itertools
# mended: from torch.utils.data import DistributedSampler


class TextDataset(Dataset):
    def __init__(self, n=96, length=12):
        self.ids = torch.randint(1, 50, (n, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, idx):
        return self.ids[idx]


def load_data_text(batch_size):
    dataset = TextDataset()
    # mended: sampler = DistributedSampler(dataset)
    # mended: data_loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    # mended: for epoch in itertools.count():
    # mended:     sampler.set_epoch(epoch)
    data_loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)  # wrong <- same-samples
    while True:  # wrong
        yield from data_loader


class TrainLoop:
    def __init__(self, steps):
        self.steps = steps
        self.emb = nn.Embedding(50, 16)
        self.net = nn.Linear(16, 50)
        self.model = DDP(nn.Sequential(self.emb, self.net))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = load_data_text(batch_size=8)

    def run_loop(self):
        for step in range(self.steps):
            ids = next(self.data)
            loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 6 == 5 and dist.get_rank() == 0:
                print("step", step + 1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(102)
    TrainLoop(steps=18).run_loop()
    dist.destroy_process_group()
