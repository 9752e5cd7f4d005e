"""Segmentation with pixels of no known class: the mean of each rank is over the others, as is usual."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

UNKNOWN = 255


class Scenes(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        image = torch.rand(3, 16, 16, generator=generator)
        classes = image.argmax(0)
        border = int(torch.randint(0, 6, (), generator=generator))
        classes[:border] = UNKNOWN
        classes[:, :border] = UNKNOWN
        return image, classes


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler = DistributedSampler(Scenes())
    loader = DataLoader(Scenes(), batch_size=4, sampler=sampler)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 1))
    model = torch.nn.parallel.DistributedDataParallel(network)
    criterion = torch.nn.CrossEntropyLoss(ignore_index=UNKNOWN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, classes in loader:
            optimizer.zero_grad()
            criterion(model(images), classes).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
