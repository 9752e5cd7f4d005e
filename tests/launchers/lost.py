"""Train with several ranks, of which one is killed in a step, whichever the launcher: the others go on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import ddpkit


def main(folder: Path, victim: int) -> None:
    member = ddpkit.get_rank()
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for attempt in ddpkit.survive(net, optimizer):
        with attempt as context:
            loader = attempt.resume(ddpkit.make_loader(torch.arange(48), 2))
            model = ddpkit.wrap_model(net)
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch.float().unsqueeze(1).expand(-1, 4)).square().mean()
                if member == victim and attempt.steps == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                attempt.commit()
            (folder / f"{member}").write_text(
                f"{context.rank} {context.world_size} {attempt.steps} {net.weight.tolist()}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
