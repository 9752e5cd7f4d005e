"""Start ranks from a notebook, or from any function; results come back as a list."""

import torch
from torch import nn

import ddpkit


def train(steps: int, lr: float) -> dict[str, float]:
    """Train on each rank; a notebook may define this function in a cell."""
    with ddpkit.distributed() as context:
        torch.manual_seed(0)
        data = torch.randn(240, 4)
        batches = data.split(12 // context.world_size)
        model = ddpkit.wrap_model(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(steps):
            x = batches[step * context.world_size + context.rank]
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": ddpkit.all_reduce_mean(loss.item()), "rank": context.rank}


if __name__ == "__main__":
    results = ddpkit.spawn(train, 2, 20, 0.05)  # two ranks call train(20, 0.05)
    print("loss:", results[0]["loss"])
