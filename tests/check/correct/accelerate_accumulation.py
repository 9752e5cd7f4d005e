"""Classify with accelerate: gradient accumulation, clipping, and metrics over the whole evaluation set."""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    x = torch.randn(144 + 45, 12)
    y = (x[:, :3].sum(1) > 0).long()
    train = DataLoader(TensorDataset(x[:144], y[:144]), batch_size=8, shuffle=True)
    evaluation = DataLoader(TensorDataset(x[144:], y[144:]), batch_size=8)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    set_seed(7, device_specific=True)

    for epoch in range(2):
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for inputs, targets in evaluation:
            with torch.no_grad():
                predicted = model(inputs).argmax(dim=1)
            predicted, targets = accelerator.gather_for_metrics((predicted, targets))
            correct += (predicted == targets).sum().item()
            total += len(targets)
        accelerator.print(f"epoch {epoch}: {correct} of {total}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder = os.environ.get("OUT", tempfile.gettempdir())
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(folder, "model.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
