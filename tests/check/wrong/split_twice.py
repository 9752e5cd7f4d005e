"""Train and validate on a split.

Common: two functions split the dataset, each with a seed of its own, so the validation has training samples.

Mended: Both have one seed.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
x = torch.randn(80, 6)
data = TensorDataset(x, x[:, :3].argmax(1))


def train_loader(seed):
    part, _ = random_split(data, [64, 16], torch.Generator().manual_seed(seed))
    return DataLoader(part, batch_size=8, shuffle=True)


def val_loader(seed):
    _, part = random_split(data, [64, 16], torch.Generator().manual_seed(seed))
    return DataLoader(part, batch_size=8)  # <- validation-seen


loader = train_loader(0)
# mended: held_out = val_loader(0)
held_out = val_loader(1)  # wrong
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum() for inputs, targets in held_out)
