"""Distil a teacher into a student.

Common: the softmax is over the batch instead of over the classes.

Mended: It is over the classes.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
teacher = nn.Linear(6, 3).requires_grad_(False)
student = nn.Linear(6, 3)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for _ in range(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        # mended: log_student = F.log_softmax(student(inputs), dim=1)
        log_student = F.log_softmax(student(inputs), dim=0)  # wrong
        target = F.softmax(teacher(inputs), dim=1)
        F.kl_div(log_student, target, reduction="batchmean").backward()  # <- not-log-probabilities
        optimizer.step()
