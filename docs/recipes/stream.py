"""Train from a stream of shards of unknown length, split over ranks and workers."""

import torch
from torch import nn

import ddpkit


class Shards:
    """Twelve shards of uneven length; `shard()` returns the samples of one reader."""

    def shard(self, index, num_shards):
        for number in range(index, 12, num_shards):
            generator = torch.Generator().manual_seed(number)
            yield from torch.randn(20 + number, 4, generator=generator)


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    model = ddpkit.wrap_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # without the short last batches, which ranks would average as if they were whole
    loader = ddpkit.make_loader(Shards(), batch_size=8, num_workers=1, drop_last=True)
    batches = iter(loader)
    steps = 0
    while True:
        x = next(batches, None)
        if ddpkit.stop_together(x is None):  # stop when any rank runs out of data
            break
        x = x.to(context.device)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    if ddpkit.is_main_process():
        print("steps:", steps)


if __name__ == "__main__":
    main()
