"""Log the mean over all ranks to Weights & Biases, in one run of the main process."""

import torch
import wandb
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    inputs = torch.randn(480, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    model = ddpkit.wrap_model(nn.Linear(4, 1).to(context.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = (
        wandb.init(project="recipes", mode="offline")
        if ddpkit.is_main_process()
        else None
    )
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x.to(context.device)), y.to(context.device))
        (loss * loader.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            # on every rank: it is collective
            mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
            if run is not None:
                run.log({"loss": mean}, step=step)
    if run is not None:
        run.finish()
        print("loss:", mean)
    ddpkit.teardown()


if __name__ == "__main__":
    main()
