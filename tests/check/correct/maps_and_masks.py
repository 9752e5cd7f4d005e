"""Distil maps of classes, whose probabilities are not along the last dimension, and sequences with masked positions."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(48, 3, 5, 5), torch.rand(48, 5) < 0.7), batch_size=8, shuffle=True)
teacher = nn.Conv2d(3, 4, 1).requires_grad_(False)
student = nn.Conv2d(3, 4, 1)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(2):
    for images, kept in loader:
        optimizer.zero_grad()
        logits, target = student(images), teacher(images)
        loss = F.kl_div(F.log_softmax(logits, 1), F.softmax(target, 1), reduction="batchmean")
        mask = kept[:, :, None]
        rows, target_rows = logits[:, :, 0].transpose(1, 2), target[:, :, 0].transpose(1, 2)
        loss = loss + F.kl_div(rows.log_softmax(-1) * mask, target_rows.softmax(-1) * mask, reduction="sum") / 40
        loss.backward()
        optimizer.step()
