"""Profile a few steps on each rank, after a warm-up, and see where the time goes."""

import torch
from torch import nn
from torch.profiler import profile, schedule
from torch.utils.data import TensorDataset

import ddpkit


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    inputs = torch.randn(480, 256)
    dataset = TensorDataset(inputs, inputs[:, :1])
    loader = ddpkit.make_loader(dataset, global_batch_size=12)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    model = ddpkit.wrap_model(net)
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(schedule=schedule(wait=5, warmup=2, active=3, repeat=1)) as profiler:
        for x, y in loader:
            x, y = x.to(context.device), y.to(context.device)
            loss = nn.functional.mse_loss(model(x), y)
            (loss * loader.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    # one trace per rank; open them in Perfetto
    profiler.export_chrome_trace(f"trace-{context.rank}.json")
    if ddpkit.is_main_process():
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))


if __name__ == "__main__":
    main()
