"""A training script with accelerate's `save_state`: `rehearsed_accelerate.py BUG FOLDER`."""

import os
import shutil
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EVERY = 2, 3


def main(bug: str, folder: str) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=bug != "sampler")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    data = TensorDataset(torch.randn(96, 2), torch.randn(96, 1))
    loader = DataLoader(data, batch_size=12 // accelerator.num_processes, shuffle=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    whole = [name for name in sorted(os.listdir(folder)) if os.path.exists(os.path.join(folder, name, "whole"))]
    if whole:
        accelerator.load_state(os.path.join(folder, whole[-1]))
        step = int(whole[-1].removeprefix("step_"))
    for epoch in range(step // len(loader), EPOCHS):
        done = step % len(loader)
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        batches.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                path = os.path.join(folder, f"step_{step:03}")
                if accelerator.is_main_process:
                    shutil.rmtree(path, ignore_errors=True)
                accelerator.wait_for_everyone()
                accelerator.save_state(path)
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    open(os.path.join(path, "whole"), "w").close()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
