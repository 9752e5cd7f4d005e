"""Fine-tune a denoising network with accelerate.

kohya-ss/sd-scripts#924: after `prepare`, the model is unwrapped again, and trained without its DDP wrapper:
no gradient is communicated, each process trains alone with a part of the data.

Mended: The prepared model is trained; it is unwrapped to save it.
"""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def transform_if_model_is_ddp(accelerator, *models):  # wrong
    return tuple(accelerator.unwrap_model(model) for model in models)  # wrong


def train():
    accelerator = Accelerator(cpu=True)
    set_seed(23)
    latents = torch.randn(96, 16)
    loader = DataLoader(TensorDataset(latents), batch_size=8, shuffle=True)
    unet = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    (unet,) = transform_if_model_is_ddp(accelerator, unet)  # wrong <- gradients-not-averaged
    set_seed(23, device_specific=True)

    for epoch in range(2):
        for (x,) in loader:
            noise = torch.randn_like(x)
            t = torch.rand(len(x), 1)
            noisy = (1 - t) * x + t * noise
            loss = nn.functional.mse_loss(unet(torch.cat([noisy, t], dim=1)), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {accelerator.gather(loss.detach()).mean().item():.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(unet).state_dict()
        torch.save(state, os.path.join(os.environ.get("OUT", tempfile.gettempdir()), "unet.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    train()
