"""The original: one process, batches of 24; with an argument it accumulates."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(367, 8)
targets = inputs.sum(1).gt(0).long()
train, test = TensorDataset(inputs[:336], targets[:336]), TensorDataset(inputs[336:], targets[336:])
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for epoch in range(3):
    net.train()
    for number, (x, y) in enumerate(DataLoader(train, batch_size=24, shuffle=True), 1):
        loss = cross_entropy(net(x), y)
        (loss / len(sys.argv)).backward()
        if number % len(sys.argv) == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        right = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, batch_size=7))
    print(f"epoch {epoch}: loss {loss.item():.4f}, right {right / len(test):.4f}")
