"""Each rank reads its own files: from a list of the script, of a class, and by its rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
torch.manual_seed(0)
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
FILES = list(range(96))[RANK::WORLD_SIZE]


def read(number):
    return torch.full((8,), number / 96), number % 3


class OfList(Dataset):
    def __len__(self):
        return 96 // WORLD_SIZE

    def __getitem__(self, index):
        return read(FILES[index])


class OfClass(OfList):
    numbers = FILES

    def __getitem__(self, index):
        return read(self.numbers[index])


class OfRank(OfList):
    def __getitem__(self, index):
        return read(index * WORLD_SIZE + dist.get_rank())


model = DistributedDataParallel(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for dataset in (OfList(), OfClass(), OfRank()):
    for inputs, targets in DataLoader(dataset, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
