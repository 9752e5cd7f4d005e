"""Another file steps the schedule, by another name and after ten epochs; a list hides a frozen teacher."""

import torch
from library.training import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Student(nn.Module):
    def __init__(self, teacher):
        super().__init__()
        self.hidden = [teacher]
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) + self.hidden[0](x).detach()


torch.manual_seed(0)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
model = Student(nn.Linear(6, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
Trainer(model, optimizer, cosine).train(loader, epochs=100)
