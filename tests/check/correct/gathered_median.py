"""Train with ddpkit, evaluate a median over all ranks, stop together and keep checkpoints."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def evaluate(model, loader, n):
    ddpkit.sync_buffers(model)
    model.eval()
    errors = [torch.empty(0)]
    with torch.no_grad():
        for x, y in loader:
            errors.append((ddpkit.unwrap_model(model)(x) - y).abs().flatten())
    model.train()
    indices = torch.tensor(list(loader.sampler), dtype=torch.int64)
    return ddpkit.gather_exact(torch.cat(errors), indices, n).median().item()


def main():
    ddpkit.setup()
    ddpkit.seed_everything(0)
    folder = ddpkit.run_on_main(lambda: os.environ.get("OUT") or tempfile.mkdtemp())
    x = torch.randn(96 + 29, 4)
    y = x.prod(1, keepdim=True)
    train = ddpkit.make_loader(TensorDataset(x[:96], y[:96]), batch_size=8, seed=1)
    evaluation = ddpkit.make_loader(TensorDataset(x[96:], y[96:]), batch_size=8, train=False)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpointer = ddpkit.Checkpointer(os.path.join(folder, "checkpoints"))
    for epoch in train.epochs(3):
        for inputs, targets in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        median = evaluate(model, evaluation, 29)
        checkpointer.save(epoch, model=model, optimizer=optimizer, loader=train)
        if ddpkit.is_main_process():
            print(f"epoch {epoch}: median error {median:.4f}")
        if ddpkit.stop_together(median < 0.01):
            break
    ddpkit.teardown()


if __name__ == "__main__":
    main()
