"""accelerate's loop, whose loader fetches one batch ahead; with an argument it accumulates."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(sys.argv))
torch.manual_seed(0)
inputs = torch.randn(367, 8)
targets = inputs.sum(1).gt(0).long()
train, test = TensorDataset(inputs[:336], targets[:336]), TensorDataset(inputs[336:], targets[336:])
net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
loaders = DataLoader(train, batch_size=12, shuffle=True), DataLoader(test, batch_size=7)
net, optimizer, train_loader, test_loader = accelerator.prepare(net, optimizer, *loaders)
for epoch in range(3):
    net.train()
    for x, y in train_loader:
        with accelerator.accumulate(net):
            loss = cross_entropy(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    right = 0
    for x, y in test_loader:
        with torch.no_grad():
            found, wanted = accelerator.gather_for_metrics((net(x).argmax(1), y))
        right += (found == wanted).sum().item()
    loss = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"epoch {epoch}: loss {loss:.4f}, right {right / len(test):.4f}")
