"""Train and validate on two tensors, which are datasets of their own."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = torch.randn(80, 6)
train, valid = data[:64], data[64:]
loader = DataLoader(train, batch_size=8, shuffle=True)
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(batch), batch) for batch in DataLoader(valid, batch_size=8))
