"""Train in the workers of a Dask cluster, one rank in each."""

import socket

import torch
from distributed import Client, LocalCluster
from torch import nn

import ddpkit


def train(rank: int, world_size: int, host: str, port: int) -> float:
    place = ddpkit.Launch(
        "platform", rank, world_size, master_addr=host, master_port=port
    )
    with ddpkit.distributed(launch=place) as context:
        torch.manual_seed(0)
        data = torch.randn(240, 4)
        loader = ddpkit.make_loader(data, global_batch_size=24)
        model = ddpkit.wrap_model(nn.Linear(4, 1).to(context.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in loader.epochs(3):
            for x in loader:
                x = x.to(context.device)
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                optimizer.zero_grad()
                (loss * loader.weight).backward()
                optimizer.step()
        return ddpkit.all_reduce_mean(loss.item(), weight=loader.samples)


if __name__ == "__main__":
    with (
        LocalCluster(n_workers=2, threads_per_worker=1) as cluster,
        Client(cluster) as client,
    ):
        workers = list(client.scheduler_info()["workers"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = (len(workers), *free.getsockname())  # rank 0 will listen there
        for _ in range(2):  # one job after the other in the same workers
            ranks = [
                client.submit(train, r, *place, workers=[w], pure=False)
                for r, w in enumerate(workers)
            ]
            print("losses:", client.gather(ranks))
