"""Train a detector whose loss for boxes is divided by the number of boxes on all ranks, and has a weight.

Common in copies of DETR: DDP averages the gradients, so the division by the number of ranks is missing.

Mended: It is there.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

QUERIES = 6


def scenes(number):
    for image in torch.randn(number, 8, generator=torch.Generator().manual_seed(3)):
        boxes = image.softmax(0)[: torch.randint(1, QUERIES, (1,)).item()]
        yield image, torch.stack([boxes, boxes.flip(0)], dim=1)


def criterion(classes, boxes, targets):
    number = torch.tensor([float(sum(len(target) for target in targets))])
    dist.all_reduce(number)
    # mended: number = number / dist.get_world_size()
    found = torch.cat([own[: len(target)] for own, target in zip(boxes, targets, strict=True)])
    is_object = torch.stack([(torch.arange(QUERIES) < len(target)).long() for target in targets])
    loss_class = F.cross_entropy(classes.flatten(0, 1), is_object.flatten())
    return loss_class + 5 * F.l1_loss(found, torch.cat(targets), reduction="sum") / number.item()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.boxes = nn.Linear(8, 2 * QUERIES), nn.Linear(8, 2 * QUERIES)

    def forward(self, x):
        return self.classes(x).unflatten(1, (QUERIES, 2)), self.boxes(x).unflatten(1, (QUERIES, 2))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = list(scenes(96))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 8, sampler=sampler, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            loss = criterion(*model(torch.stack(images)), targets)
            optimizer.zero_grad()
            loss.backward()  # <- wrong-divisor
            optimizer.step()
    dist.destroy_process_group()
