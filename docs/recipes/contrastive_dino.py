"""Train a student on a teacher's outputs, like DINO, with a centre over all ranks."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(500, 16)
    views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
    dataset = TensorDataset(*views)
    loader = ddpkit.make_loader(dataset, global_batch_size=48)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    student = ddpkit.wrap_model(net)  # before copying: it broadcasts rank 0's weights
    teacher = copy.deepcopy(net).requires_grad_(False)
    center = torch.zeros(8, device=context.device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for first, second in loader:
        targets = teacher(first.to(context.device))
        outputs = student(second.to(context.device))
        weights = ((targets - center) / 0.04).softmax(1)
        loss = -(weights * (outputs / 0.1).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        (loss * loader.weight).backward()
        optimizer.step()
        average = ddpkit.all_reduce_mean(targets.mean(0), weight=loader.samples)
        center.lerp_(average, 0.1)
        with torch.no_grad():
            for mean, now in zip(teacher.parameters(), net.parameters(), strict=True):
                mean.lerp_(now, 0.01)
    if ddpkit.is_main_process():
        print("center:", center.abs().sum().item())


if __name__ == "__main__":
    main()
