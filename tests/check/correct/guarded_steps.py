"""Skips a step on all ranks where a batch is bad on one: ddpkit's StepGuard, around DDP."""

import torch
from torch import nn
from torch.utils.data import Dataset

import ddpkit


class Records(Dataset):
    """Measurements, one of which is damaged."""

    def __init__(self):
        self.inputs = torch.randn(96, 6)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index == 13:
            raise OSError(f"record {index} is damaged")
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)


def main():
    with ddpkit.distributed() as job:
        torch.manual_seed(0)
        model = ddpkit.wrap_model(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = ddpkit.make_loader(Records(), batch_size=4)
        guard = ddpkit.StepGuard(model, max_skips=3)
        for _ in range(2):
            batches = iter(loader)
            for _batch in range(len(loader)):
                optimizer.zero_grad()
                with guard:
                    inputs, targets = next(batches)
                    loss = nn.functional.mse_loss(model(inputs.to(job.device)), targets.to(job.device))
                    loss.backward()
                if not guard.skipped:
                    optimizer.step()
        ddpkit.sync_buffers(model)
        if ddpkit.is_main_process():
            print("steps skipped:", guard.skips)


if __name__ == "__main__":
    main()
