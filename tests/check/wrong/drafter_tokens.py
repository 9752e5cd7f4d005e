"""Train a drafter for speculative decoding, with a loss normalised by the tokens of all ranks.

verl-project/verl-SpeCo#29: the sum of a rank's losses is divided by the tokens of all ranks, and the mean
over ranks divides by their number once more. The gradient is too small by the world size.

Mended: The loss is multiplied by the number of ranks, over which the gradient will be averaged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Drafter(nn.Module):
    def __init__(self, hidden=24, vocab=40):
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden)
        self.embed = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, hidden_states, tokens):
        return self.head(torch.tanh(self.fc(torch.cat([hidden_states, self.embed(tokens)], dim=-1))))


def make_batch(generator, size=4, length=12):
    tokens = torch.randint(0, 40, (size, length + 1), generator=generator)
    hidden_states = torch.randn(size, length, 24, generator=generator)
    lengths = torch.randint(4, length + 1, (size, 1), generator=generator)
    return hidden_states, tokens, (torch.arange(length) < lengths).float()


def train_step(model, optimizer, batch):
    hidden_states, tokens, mask = batch
    logits = model(hidden_states, tokens[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    local_loss_sum = (losses * mask).sum()
    total = torch.stack([local_loss_sum.detach(), mask.sum()])
    dist.all_reduce(total)
    # mended: loss = local_loss_sum / total[1] * dist.get_world_size()
    loss = local_loss_sum / total[1]  # wrong
    optimizer.zero_grad()
    loss.backward()  # <- wrong-divisor
    optimizer.step()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Drafter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(8):
        loss = train_step(model, optimizer, make_batch(generator))
        if dist.get_rank() == 0:
            print(f"step {step}: {loss:.3f} per token")
    dist.destroy_process_group()
