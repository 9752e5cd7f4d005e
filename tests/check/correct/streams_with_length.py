"""Train on streams with lengths that are not the number of samples which all ranks read."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Spectra(IterableDataset):
    """Its length is that of a rank's part."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values) // dist.get_world_size()

    def positions(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        first = dist.get_rank() * workers + worker
        return range(first, len(self.values), dist.get_world_size() * workers)

    def __iter__(self):
        for i in self.positions():
            yield self.values[i]


class WholeSpectra(Spectra):
    """Its length is that of the whole, the broken ones included, which are left out."""

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        for i in self.positions():
            if i % 16:
                yield self.values[i]


class Batches(WholeSpectra):
    """It makes the batches itself."""

    def __iter__(self):
        yield from self.values[list(self.positions())].split(8)


class UnknownLength(Spectra):
    def __len__(self):
        raise NotImplementedError("nobody has counted them")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    values = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(Spectra(values), batch_size=20, num_workers=2, drop_last=True)
    evaluations = [
        DataLoader(Spectra(values), batch_size=5),
        DataLoader(WholeSpectra(values), batch_size=3, num_workers=2),
        DataLoader(Batches(values), batch_size=None),
        DataLoader(UnknownLength(values), batch_size=5),
    ]
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
        with torch.no_grad():
            for evaluation in evaluations:
                sums = torch.zeros(2)
                for x in evaluation:
                    errors = (model.module(x) - x).square().mean(1)
                    sums += torch.tensor([errors.sum(), len(errors)])
                dist.all_reduce(sums)
                if dist.get_rank() == 0:
                    print("error", (sums[0] / sums[1]).item())
    dist.destroy_process_group()
