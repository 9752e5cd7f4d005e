"""Train with accelerate and a learning rate that falls to nothing at the last step.

huggingface/accelerate#2926: a prepared scheduler steps once for each process. The number of steps given to it
is right already, so with two processes the learning rate is down half-way, and goes up again.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    x = torch.randn(144, 10)
    loader = DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total_steps = EPOCHS * len(loader)

    def cosine(step):
        return 0.5 * (1 + math.cos(math.pi * step / total_steps))

    scheduler = LambdaLR(optimizer.optimizer, cosine)
    scheduler = accelerator.prepare(scheduler)  # <- depends-on-world-size
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: learning rate {scheduler.get_last_lr()[0]:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
