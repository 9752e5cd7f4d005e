"""Fine-tune a small vision-language-action model: a backbone and an action head, each in DDP.

moojink/openvla-oft#160: the head's `predict_action` is called on `.module`. Calling a method other than DDP's
forward prepares no reduction, so the head's gradients stay those of the rank's own batch. The backbone's are
averaged.

Mended: The head's prediction is its `forward`, called through DDP.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class L1ActionHead(nn.Module):
    def __init__(self, hidden_dim=32, action_dim=7):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, 64), nn.ReLU(), nn.Linear(64, action_dim)
        )

    # mended: def forward(self, hidden_states):
    def predict_action(self, hidden_states):  # wrong
        return self.mlp(hidden_states)


def run_forward_pass(vla, action_head, batch):
    pixels, actions = batch
    hidden_states = vla(pixels)
    # mended: predicted_actions = action_head(hidden_states)
    predicted_actions = action_head.module.predict_action(hidden_states)  # wrong <- gradients-not-averaged
    return nn.functional.l1_loss(predicted_actions, actions)


def finetune():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    vla = DDP(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.Tanh()))
    action_head = DDP(L1ActionHead())
    trainable_params = [*vla.parameters(), *action_head.parameters()]
    optimizer = torch.optim.AdamW(trainable_params, lr=5e-4)

    pixels = torch.rand(48, 3, 8, 8)
    dataset = TensorDataset(pixels, pixels.flatten(1)[:, :7])
    sampler = DistributedSampler(dataset, shuffle=True)
    dataloader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in dataloader:
            loss = run_forward_pass(vla, action_head, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print(f"L1 {loss.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    finetune()
