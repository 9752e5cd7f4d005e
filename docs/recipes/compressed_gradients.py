"""Compress DDP's gradients by PowerSGD, and resume with what the compression still owes."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import TensorDataset

import ddpkit

KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")  # of its state; tensors by bucket


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(480, 16)
    loader = ddpkit.make_loader(TensorDataset(x, x @ torch.randn(16, 16)), 12 // context.world_size)
    model = ddpkit.wrap_model(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compression = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    if context.world_size > 1:  # one process has no DDP
        model.register_comm_hook(compression, powerSGD_hook)
    checkpoints = ddpkit.Checkpointer("runs/compressed")
    saved = checkpoints.load_latest(model=model, optimizer=optimizer, loader=loader)
    if saved:
        for name, tensors in saved["compression"].items():
            getattr(compression, name).update({i: t.to(context.device) for i, t in tensors.items()})
    for epoch in loader.epochs(20):
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs.to(context.device)), targets.to(context.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {name: getattr(compression, name) for name in KEPT}  # each rank's errors are its own
        checkpoints.save(epoch + 1, model=model, optimizer=optimizer, loader=loader, per_rank={"compression": own})
    if ddpkit.is_main_process():
        print("weights:", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()
