"""Log the mean over all ranks to TensorBoard, on the main process alone."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    inputs = torch.randn(480, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    model = ddpkit.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    writer = SummaryWriter("runs/tensorboard") if ddpkit.is_main_process() else None
    for step, (x, y) in enumerate(loader):
        x, y = x.to(context.device), y.to(context.device)
        loss = nn.functional.mse_loss(model(x), y)
        (loss * loader.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            values = {"loss": loss.item(), "largest input": x.max().item()}
            # on all ranks: it is collective
            means = ddpkit.all_reduce_mean(values, weight=loader.samples)
            # with Weights & Biases: wandb.log(means, step=step) here
            if writer is not None:
                for name, value in means.items():
                    writer.add_scalar(name, value, step)
    if writer is not None:
        writer.close()
        print("loss:", means["loss"])


if __name__ == "__main__":
    main()
