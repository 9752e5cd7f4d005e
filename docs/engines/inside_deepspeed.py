"""Use ddpkit in a script of DeepSpeed. Start it with `torchrun`."""

import deepspeed
import torch
from torch import nn

import ddpkit


def main() -> None:
    # before DeepSpeed, which takes over the group that there is
    context = ddpkit.setup()
    torch.manual_seed(0)
    data = torch.randn(240, 4)
    loader = ddpkit.make_loader(data, global_batch_size=24)
    net = nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": loader.batch_size,
        "gradient_clipping": 0.0,  # else DeepSpeed clips to 1
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,  # SGD is one
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config
    )
    for _ in loader.epochs(3):
        for x in loader:
            x = x.to(engine.device)
            loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss * loader.weight)
            engine.step()
    mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print(f"loss of {context.world_size} ranks:", mean)
    ddpkit.teardown()


if __name__ == "__main__":
    main()
