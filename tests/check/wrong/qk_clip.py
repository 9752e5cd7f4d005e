"""Train an attention layer with an optimizer that shrinks the queries and keys where logits grow too large.

modelscope/ms-swift#9901: the largest logit is that of the rank's own batch. Ranks scale their weights by
different factors, and differ from then on, though their gradients were the same.

Mended: The largest logit of all ranks decides.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Attention(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, 1)
        self.max_logit = torch.zeros(())

    def forward(self, x):
        logits = self.q(x) @ self.k(x).transpose(1, 2)
        self.max_logit = logits.detach().amax()
        return self.out((logits.softmax(-1) @ self.v(x)).mean(1)).squeeze(1)


class ClippedSGD(torch.optim.SGD):
    def __init__(self, attention, lr, threshold):
        super().__init__(attention.parameters(), lr=lr, momentum=0.9)
        self.attention, self.threshold = attention, threshold

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        # mended: max_logit = self.attention.max_logit.clone()
        # mended: dist.all_reduce(max_logit, op=dist.ReduceOp.MAX)
        max_logit = self.attention.max_logit  # wrong
        scale = (self.threshold / max_logit).clamp(max=1.0).sqrt()
        self.attention.q.weight.mul_(scale)
        self.attention.k.weight.mul_(scale)
        return result


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(96, 5, 16)
    dataset = TensorDataset(x, x.amax((1, 2)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    attention = Attention()
    model = DDP(attention)
    optimizer = ClippedSGD(attention, lr=0.02, threshold=3.0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for sequence, target in loader:
            loss = nn.functional.mse_loss(model(sequence), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # <- replicas-drift
    if dist.get_rank() == 0:
        print("norm of the queries", attention.q.weight.norm().item())
    dist.destroy_process_group()
