"""Mixed precision with accumulation and clipping; some layers are frozen."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(480, 8)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = ddpkit.make_loader(dataset, global_batch_size=48, accumulation=4)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model[0].bias.requires_grad_(False)  # before wrapping
    model = ddpkit.wrap_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in loader.epochs(5):
        for step, (x, y) in enumerate(loader):
            last = step == len(loader) - 1
            with ddpkit.accumulate(model, step, every=4, last=last) as complete:
                x, y = x.to(context.device), y.to(context.device)
                with torch.autocast(context.device.type, torch.bfloat16):
                    outputs = model(x).float()
                loss = nn.functional.mse_loss(outputs, y)
                # the weight contains the division by the micro-batches
                (loss * loader.weight).backward()
            if complete:
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if ddpkit.is_main_process():
        print("weights:", sum(parameter.abs().sum().item() for parameter in trained))


if __name__ == "__main__":
    main()
