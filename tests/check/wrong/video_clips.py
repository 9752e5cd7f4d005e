"""Fine-tune a video model on clips that are chosen at random.

pixeli99/SVD_Xtend#75: the dataset ignores the index and picks a clip with `random.choice`. All processes have
the same seed, so all of them pick the same clips.

Mended: Each process has a seed of its own.
"""

import random

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ClipDataset(Dataset):
    """Frames of folders, held in memory."""

    def __init__(self, num_samples=48):
        generator = torch.Generator().manual_seed(0)
        self.folders = list(torch.rand(400, 5, 32, generator=generator))
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, idx):
        frames = random.choice(self.folders)
        return frames[:-1].flatten(), frames[-1]


def main(seed=123):
    accelerator = Accelerator(cpu=True)
    # mended: random.seed(seed + accelerator.process_index)
    random.seed(seed)  # wrong <- same-samples
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4 * 32, 64), nn.SiLU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    train_dataloader = DataLoader(ClipDataset(), batch_size=4)
    net, optimizer, train_dataloader = accelerator.prepare(net, optimizer, train_dataloader)

    for _ in range(2):
        for frames, last in train_dataloader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(frames), last)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print("loss", accelerator.gather(loss.detach()).mean().item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
