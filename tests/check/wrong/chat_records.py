"""Fine-tune on a list of chat records.

QwenLM/Qwen3-VL#1971: each process shuffles its list of records, unseeded, before the sampler shares out
positions in it. So position 5 is another record on each rank: some come twice, others not at all.

Mended: The list stays as it was read; the sampler shuffles.
"""

import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = "abcdefghijklmnopqrstuvwxyz ?!"


class LazySupervisedDataset(Dataset):
    def __init__(self, list_data_dict):
        super().__init__()
        random.shuffle(list_data_dict)  # wrong <- shuffle-differs
        self.list_data_dict = list_data_dict

    def __len__(self):
        return len(self.list_data_dict)

    def __getitem__(self, i):
        text = self.list_data_dict[i]["text"]
        return torch.tensor([VOCABULARY.index(c) for c in text])


def read_records():
    rng = random.Random(3)
    return [{"text": "".join(rng.choices(VOCABULARY, k=20))} for _ in range(72)]


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = LazySupervisedDataset(read_records())
    sampler = DistributedSampler(dataset, seed=42)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 29)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in loader:
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, 29), ids[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(len(dataset), "records")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
