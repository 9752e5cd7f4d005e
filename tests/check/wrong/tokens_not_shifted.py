"""Train a language model.

Common in models of one's own: the target of a position is the token at it, which the model sees.

Mended: It is the next token.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
tokens = torch.randint(0, 12, (64, 9))
loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    for (batch,) in loader:
        # mended: inputs, targets = batch[:, :-1], batch[:, 1:]
        inputs, targets = batch, batch  # wrong
        optimizer.zero_grad()
        logits = model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()  # <- target-is-input
        optimizer.step()
