"""Train under Ray Train, which starts the ranks and makes their process group."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import ddpkit


def train() -> None:
    context = ddpkit.setup()  # after Ray has made the group
    torch.manual_seed(0)
    data = torch.randn(240, 4)
    loader = ddpkit.make_loader(data, global_batch_size=24)
    model = ddpkit.wrap_model(nn.Linear(4, 1).to(context.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in loader.epochs(3):
        for x in loader:
            x = x.to(context.device)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            (loss * loader.weight).backward()
            optimizer.step()
    mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print(f"loss of {context.world_size} ranks:", mean)
    ddpkit.teardown()  # leaves Ray's group alone


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
