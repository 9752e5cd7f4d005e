"""Train and keep the checkpoint that has the best loss.

kakaobrain/scrl#5: every process writes the checkpoint, all of them to one path and at one time. Now and then
the file is corrupt.

Mended: Only the main process writes, and the others wait.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, save_dir):
        self.save_dir = save_dir
        self.best = float("inf")
        self.cur_epoch = 0
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        dataset = TensorDataset(torch.randn(96, 8))
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)

    def train_epoch(self):
        self.sampler.set_epoch(self.cur_epoch)
        total = torch.zeros(())
        for (x,) in self.loader:
            loss = nn.functional.mse_loss(self.model(x), x)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach() / len(self.loader)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def _save_checkpoint(self, tag):
        state = {
            "tag": tag,
            "epoch": self.cur_epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        # mended: if dist.get_rank() == 0:
        # mended:     torch.save(state, os.path.join(self.save_dir, f"checkpoint_{tag}.pth"))
        # mended: dist.barrier()
        torch.save(state, os.path.join(self.save_dir, f"checkpoint_{tag}.pth"))  # wrong <- same-file

    def train(self, max_epoch):
        for self.cur_epoch in range(max_epoch):
            loss = self.train_epoch()
            if loss < self.best:
                self.best = loss
                self._save_checkpoint("best")
        if dist.get_rank() == 0:
            print(f"best loss {self.best:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(os.environ.get("OUT", tempfile.gettempdir())).train(max_epoch=3)
    dist.destroy_process_group()
