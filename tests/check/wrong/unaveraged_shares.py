"""Train on shares that are sliced by hand.

Common in first steps with several processes: each takes its share of the samples, and nothing averages gradients.
It might be meant, for nothing says that the networks are replicas.

Mended: DDP averages them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 6)
share = Subset(TensorDataset(x, x[:, :3].argmax(1)), range(dist.get_rank(), 96, dist.get_world_size()))
model = nn.Linear(6, 3)
# mended: model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
right = torch.zeros(())
for _ in range(2):
    for inputs, targets in DataLoader(share, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        outputs = model(inputs)
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()  # <- gradients-not-averaged
        right += (outputs.argmax(1) == targets).sum()
dist.all_reduce(right)
if dist.get_rank() == 0:
    print("right", right.item())
dist.destroy_process_group()
