"""Train a model under `fully_shard`, and resume on any number of ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    inputs = torch.randn(480, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    model = model.to(context.device)
    if ddpkit.is_distributed():
        fully_shard(model)  # instead of wrap_model
    # after fully_shard: it updates the shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = ddpkit.Checkpointer("runs/sharded")
    saved = checkpoints.load_latest(model=model, optimizer=optimizer, loader=loader)
    step = saved["step"] if saved else 0
    for _ in loader.epochs(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(
                model(x.to(context.device)), y.to(context.device)
            )
            (loss * loader.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 40 == 0:
                mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
                if ddpkit.is_main_process():
                    print(f"step {step}, loss: {mean}")
        checkpoints.save(step, model=model, optimizer=optimizer, loader=loader)


if __name__ == "__main__":
    main()
