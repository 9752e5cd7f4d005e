"""Start ranks from a notebook, or from any function; results come back as a list."""

import torch
from torch import nn

import ddpkit


def train(epochs: int, lr: float) -> dict[str, float]:
    """Train on each rank; a notebook may define this function in a cell."""
    with ddpkit.distributed() as context:
        torch.manual_seed(0)
        data = torch.randn(240, 4)
        loader = ddpkit.make_loader(data, global_batch_size=12)
        model = ddpkit.wrap_model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in loader.epochs(epochs):
            for x in loader:
                x = x.to(context.device)
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                (loss * loader.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
        mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
        return {"loss": mean, "rank": context.rank}


if __name__ == "__main__":
    results = ddpkit.spawn(train, 2, 1, 0.05)  # two ranks call train(1, 0.05)
    print("loss:", results[0]["loss"])
