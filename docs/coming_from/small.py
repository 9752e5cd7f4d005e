import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ddpkit

context = ddpkit.setup()
ddpkit.seed_everything(0)
x = torch.linspace(-1, 1, 240).unsqueeze(1)
loader = ddpkit.make_loader(TensorDataset(x, 3 * x), global_batch_size=24)
model = ddpkit.wrap_model(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for inputs, targets in loader:
        outputs = model(inputs.to(context.device))
        loss = mse_loss(outputs, targets.to(context.device))
        optimizer.zero_grad()
        (loss * loader.weight).backward()
        optimizer.step()
    mean = ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)
    if ddpkit.is_main_process():
        print(f"epoch {epoch}: {mean:.4f}")
