"""Keep an exponential moving average of the weights, and evaluate with it."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    inputs = torch.randn(480, 4, device=context.device)
    targets = inputs.sum(1, keepdim=True)
    dataset = TensorDataset(inputs, targets)
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    net = nn.Linear(4, 1)
    model = ddpkit.wrap_model(net)  # before copying: it broadcasts rank 0's weights
    # average the net, not DDP
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        (loss * loader.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)  # on every rank, from equal weights
    ddpkit.check_replicas(average)
    checkpoints = ddpkit.Checkpointer("runs/moving-average")
    checkpoints.save(len(loader), model=model, average=average, optimizer=optimizer)
    if ddpkit.is_main_process():
        with torch.no_grad():
            print("loss:", nn.functional.mse_loss(average(inputs), targets).item())


if __name__ == "__main__":
    main()
