"""A training whose learning rate begins to fall after some epochs."""

from torch.nn.functional import cross_entropy

_WARM = 10  # epochs with a constant rate


class Trainer:
    def __init__(self, model, optimizer, lr_scheduler):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def train(self, loader, epochs):
        for epoch in range(epochs):
            for inputs, targets in loader:
                self.optimizer.zero_grad()
                cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
            if epoch >= _WARM:
                self.lr_scheduler.step()
