"""Use ddpkit in a script of accelerate. Start it with `torchrun`."""

import torch
from accelerate import Accelerator
from torch import nn

import ddpkit


def main() -> None:
    accelerator = Accelerator(cpu=True)
    context = ddpkit.setup()  # after accelerate has made the group
    torch.manual_seed(0)
    data = torch.randn(240, 4)
    loader = ddpkit.make_loader(data, global_batch_size=24)
    net = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    for _ in loader.epochs(3):
        for x in loader:
            x = x.to(context.device)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            accelerator.backward(loss * loader.weight)
            optimizer.step()
    mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print(f"loss of {context.world_size} ranks:", mean)
    ddpkit.teardown()  # leaves accelerate's group alone


if __name__ == "__main__":
    main()
