"""Train an encoder with SimCLR's loss (NT-Xent) over the views of all ranks."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddpkit


def nt_xent(
    first: torch.Tensor, second: torch.Tensor, temperature: float = 0.5
) -> torch.Tensor:
    views = F.normalize(torch.cat([first, second]))
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    logits = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(logits, partners)


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(500, 16)
    noisy = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
    dataset = TensorDataset(*noisy)
    loader = ddpkit.make_loader(dataset, global_batch_size=48, drop_last=True)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = ddpkit.wrap_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, second in loader:
        # both views in one forward
        views = model(torch.cat([first, second]).to(context.device))
        loss = nt_xent(*ddpkit.gather_batch(views.chunk(2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ddpkit.is_main_process():
        print("loss:", loss.item())


if __name__ == "__main__":
    main()
