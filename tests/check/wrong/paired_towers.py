"""Train two towers contrastively, as CLIP does, over the pairs of all ranks.

Common in contrastive losses: torch's all_gather carries no gradients. Only the temperature learns, and as DDP was told
to expect unused parameters, nothing complains.

Mended: The gather has a backward: it adds up the ranks' gradients of this rank's features. The pooler of the image
tower is not used, which is why DDP was told to expect unused parameters.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 8), nn.Linear(12, 8)
        # mended: self.pooler = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        # mended: image = self.image(image)
        # mended: text = self.text(text)
        # mended: return normalize(image, dim=1), normalize(text, dim=1), self.scale.exp(), self.pooler(image)
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1), self.scale.exp()  # wrong


# mended: class Gather(torch.autograd.Function):
# mended:     @staticmethod
# mended:     def forward(context, features):
# mended:         parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
# mended:         dist.all_gather(parts, features)
# mended:         return torch.cat(parts)
# mended:
# mended:     @staticmethod
# mended:     def backward(context, gradient):
# mended:         gradient = gradient.clone()
# mended:         dist.all_reduce(gradient)
# mended:         return gradient.chunk(dist.get_world_size())[dist.get_rank()]
# mended:
# mended:
# mended: def logged_similarity(images, texts):
# mended:     """The mean over ranks of what pairs have in common; nobody has turned gradients off."""
# mended:     parts = [torch.empty(()) for _ in range(dist.get_world_size())]
# mended:     dist.all_gather(parts, (images * texts).sum(1).mean())
# mended:     return torch.stack(parts).mean().item()
def gather(features):  # wrong
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]  # wrong
    dist.all_gather(parts, features)  # wrong <- no-gradients
    return torch.cat(parts)  # wrong


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    latent = torch.randn(96, 6)
    dataset = TensorDataset(latent @ torch.randn(6, 20), latent @ torch.randn(6, 12))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Towers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            # mended: images, texts, scale, _ = model(images, texts)
            # mended: similarity = logged_similarity(images, texts)
            # mended: logits = scale * Gather.apply(images) @ Gather.apply(texts).T
            images, texts, scale = model(images, texts)  # wrong
            logits = scale * gather(images) @ gather(texts).T  # wrong
            labels = torch.arange(len(logits))
            loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        # mended: print(f"loss over the global batch {loss.item():.4f}, similarity {similarity:.4f}")
        print(f"loss over the global batch {loss.item():.4f}")  # wrong
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
