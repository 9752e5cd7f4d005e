"""Train on an uneven number of samples with ddpkit: sums of losses, accumulated over micro-batches, become means."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit

EVERY = 3


def main():
    context = ddpkit.setup()
    ddpkit.seed_everything(0)
    x = torch.randn(101, 5)
    loader = ddpkit.make_loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, seed=3)
    model = ddpkit.wrap_model(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in loader.epochs(2):
        count = 0
        for i, (inputs, targets) in enumerate(loader):
            with ddpkit.accumulate(model, i, EVERY, last=i == len(loader) - 1) as complete:
                loss = nn.functional.mse_loss(
                    model(inputs.to(context.device)), targets.to(context.device), reduction="sum"
                )
                loss.backward()
            count += len(inputs)
            if complete:
                ddpkit.global_mean(model, count)
                optimizer.step()
                optimizer.zero_grad()
                count = 0
        mean = ddpkit.all_reduce_mean(loss.item() / len(inputs), weight=len(inputs))
        if ddpkit.is_main_process():
            print(f"epoch {epoch}: {mean:.4f}")
    ddpkit.teardown()


if __name__ == "__main__":
    main()
