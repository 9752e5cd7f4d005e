"""Train two encoders with CLIP's loss over the images and texts of all ranks."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddpkit


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(16, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(
        self, images: torch.Tensor, texts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        image, text = self.image(images), self.text(texts)
        return F.normalize(image), F.normalize(text), self.scale.exp()


def main() -> None:
    context = ddpkit.setup()
    torch.manual_seed(0)
    meaning = torch.randn(500, 4)
    dataset = TensorDataset(meaning @ torch.randn(4, 16), meaning @ torch.randn(4, 12))
    loader = ddpkit.make_loader(dataset, global_batch_size=48, drop_last=True)
    model = ddpkit.wrap_model(Clip())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, texts in loader:
        image, text, scale = model(images.to(context.device), texts.to(context.device))
        # the rows of all ranks, with gradients
        image, text = ddpkit.gather_batch((image, text))
        logits = scale * image @ text.T
        pairs = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ddpkit.is_main_process():
        print("loss:", loss.item())  # of the whole batch, on every rank


if __name__ == "__main__":
    main()
