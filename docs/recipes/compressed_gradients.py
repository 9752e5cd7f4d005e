"""Compress DDP's gradients with PowerSGD, and save its error in the checkpoint."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.utils.data import TensorDataset

import ddpkit

# the parts of PowerSGDState to save; each maps a bucket to a tensor
KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    x = torch.randn(480, 16)
    dataset = TensorDataset(x, x @ torch.randn(16, 16))
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    model = ddpkit.wrap_model(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    compression = power_sgd.PowerSGDState(None, **options)
    if context.world_size > 1:  # one process has no DDP
        model.register_comm_hook(compression, power_sgd.powerSGD_hook)
    checkpoints = ddpkit.Checkpointer("runs/compressed")
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    saved = checkpoints.load_latest(**run)
    if saved:
        for name, tensors in saved["compression"].items():
            for bucket, tensor in tensors.items():
                getattr(compression, name)[bucket] = tensor.to(context.device)
    for epoch in loader.epochs(20):
        for x, y in loader:
            x, y = x.to(context.device), y.to(context.device)
            loss = nn.functional.mse_loss(model(x), y)
            (loss * loader.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        # each rank has its own errors
        own = {name: getattr(compression, name) for name in KEPT}
        checkpoints.save(epoch + 1, **run, per_rank={"compression": own})
    if ddpkit.is_main_process():
        print("weights:", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()
