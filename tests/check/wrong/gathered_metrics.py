"""Classify sentences with accelerate and compute the accuracy over all processes.

huggingface/accelerate#287: accelerate repeats samples to give all processes as many batches. `gather`
collects them with the rest, and they are counted.

Mended: `gather_for_metrics` leaves out what was repeated.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (96 + 37, 12), generator=generator)
    labels = (ids.float().mean(1) > 50).long()
    train = DataLoader(TensorDataset(ids[:96], labels[:96]), shuffle=True, batch_size=batch_size)
    validation = DataLoader(TensorDataset(ids[96:], labels[96:]), shuffle=False, batch_size=batch_size)
    return train, validation


def training_function():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size=8)
    model = nn.Sequential(nn.EmbeddingBag(100, 16), nn.Linear(16, 2))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(2):
        model.train()
        for ids, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        hits = []
        for ids, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(ids).argmax(dim=-1)
            # mended: predictions, references = accelerator.gather_for_metrics((predictions, labels))
            predictions, references = accelerator.gather((predictions, labels))  # wrong <- padding-counted
            hits.append(predictions == references)
        hits = torch.cat(hits)
        accelerator.print(f"epoch {epoch}: accuracy {hits.float().mean().item():.4f} of {len(hits)}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
