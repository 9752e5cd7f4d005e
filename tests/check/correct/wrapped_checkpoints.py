"""Saves the states of wrapped networks, and loads them into wrapped networks: one now, one in a run that goes on."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = os.environ.get("OUT", tempfile.gettempdir())


def main(resume=""):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    student = DistributedDataParallel(torch.nn.Linear(6, 2))
    teacher = DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    if resume:
        saved = torch.load(resume)
        student.load_state_dict(saved["student"])
        optimizer.load_state_dict(saved["optimizer"])
    path = os.path.join(FOLDER, "teacher.pt")
    if dist.get_rank() == 0:
        torch.save(teacher.state_dict(), path)
    dist.barrier()
    teacher.load_state_dict(torch.load(path))
    for _ in range(4):
        inputs = torch.randn(8, 6)
        with torch.no_grad():
            wanted = teacher(inputs)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(student(inputs), wanted).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        state = {"student": student.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join(FOLDER, "student.pt"))
    dist.barrier()


if __name__ == "__main__":
    main()
