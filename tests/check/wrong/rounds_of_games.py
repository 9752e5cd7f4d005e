"""Learn from recorded games, in rounds over the rank's own list of them.

Common where no loader is used: the list is cut into parts of different lengths, and the loop over the rank's part
has more rounds on one rank than on another.

Mended: Every rank has as many games.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def my_games(games):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # mended: return games[rank::world_size][: len(games) // world_size]
    return games[rank::world_size]  # wrong


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    games = [torch.randn(12, 9) for _ in range(5)]
    mine = my_games(games)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for round in range(4):
        for game in mine:  # <- batches-differ
            result = torch.sign(game.sum(1, keepdim=True))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(game), result).backward()
            optimizer.step()
        played = torch.tensor(float(len(mine)))
        dist.all_reduce(played)
        if dist.get_rank() == 0:
            print(f"round {round}: {played.item():.0f} games")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
