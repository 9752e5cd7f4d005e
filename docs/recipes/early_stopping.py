"""Stop when the loss over all ranks stops falling, and keep the best checkpoint."""

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(610, 8)
    dataset = TensorDataset(x, x[:, :1] + 0.5 * torch.randn(610, 1))
    data, rest = random_split(dataset, [480, 130])
    train = ddpkit.make_loader(data, global_batch_size=24)
    held_out = ddpkit.make_loader(rest, batch_size=16, train=False)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = ddpkit.wrap_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    checkpoints = ddpkit.Checkpointer("runs/early-stopping", keep=1, keep_best=1)
    losses = [float("inf")]
    for epoch in train.epochs(50):
        for x, y in train:
            x, y = x.to(context.device), y.to(context.device)
            loss = nn.functional.mse_loss(model(x), y)
            (loss * train.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        total = 0.0
        with torch.no_grad():
            # net, not model: DDP waits, and ranks may have different numbers of batches
            for x, y in held_out:
                error = net(x.to(context.device)) - y.to(context.device)
                total += error.square().sum().item()
        # equal on all ranks, so all of them stop together
        loss = ddpkit.all_reduce(total) / 130
        checkpoints.save(epoch, score=-loss, model=model)
        losses.append(loss)
        if min(losses[-2:]) > min(losses):
            break
    checkpoints.load_best(model=model)
    if ddpkit.is_main_process():
        print("best loss:", min(losses))


if __name__ == "__main__":
    main()
