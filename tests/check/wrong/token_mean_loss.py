"""Train a language model on sentences of different lengths.

huggingface/transformers#34242: each rank divides its loss by its own number of tokens and DDP averages the
ranks as equals. A token on the rank with few of them counts more than one on another.

Mended: The loss is divided by the number of tokens of all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

IGNORE = -100


def sentences(n):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (n,), generator=g)
    return [torch.randint(0, 50, (length,), generator=g) for length in lengths.tolist()]


def collate(batch):
    inputs = pad_sequence([ids[:-1] for ids in batch], batch_first=True)
    labels = pad_sequence([ids[1:] for ids in batch], batch_first=True, padding_value=IGNORE)
    return inputs, labels


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.lm_head = nn.Linear(32, 50)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = sentences(72)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    model = DDP(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            num_items = (labels != IGNORE).sum()
            # mended: dist.all_reduce(num_items)
            # mended: (loss * dist.get_world_size() / num_items).backward()
            (loss / num_items).backward()  # wrong <- wrong-divisor
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
