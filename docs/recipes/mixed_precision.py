"""Mixed precision with accumulation and clipping; some layers are frozen."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(480, 8)
    loader = ddpkit.make_loader(
        TensorDataset(x, x.sin().sum(1, keepdim=True)), 12 // context.world_size
    )
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model[0].bias.requires_grad_(False)  # before wrapping
    model = ddpkit.wrap_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in loader.epochs(5):
        samples = 0
        for step, (x, y) in enumerate(loader):
            last = step == len(loader) - 1
            with ddpkit.accumulate(model, step, every=4, last=last) as complete:
                x, y = x.to(context.device), y.to(context.device)
                with torch.autocast(context.device.type, torch.bfloat16):
                    outputs = model(x).float()
                nn.functional.mse_loss(outputs, y, reduction="sum").backward()
            samples += len(x)
            if complete:
                # turns sums into the mean over all ranks' samples
                ddpkit.global_mean(model, samples)
                # afterwards, so that the norm is equal on every rank
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                samples = 0
    if ddpkit.is_main_process():
        print("weights:", sum(parameter.abs().sum().item() for parameter in trained))


if __name__ == "__main__":
    main()
