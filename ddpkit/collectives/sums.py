"""Add up tensors over all ranks, by the messages that suit the number of ranks and the size of the tensor.

On the CPU few ranks send what is small to each other, each the whole to each, in a third to a half of the time that an
all-reduce of gloo's takes. That is a ring, of many messages. More ranks send blocks to the first, which sends
out the sum, two messages per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..launch import ranks
from ..process_group import current_job, lifecycle
from ..process_group.peers import Peers, group_of, ranks_of
from .groups import control_device

Block = NDArray[np.float64]
_FEW = 4  # ranks that send to each other, as measured
_SMALL = 1 << 16  # elements that they send


class Sum:
    """A tensor that is being added up over all ranks, in place. Collective, and begun as it is made.

    The ranks' values are added in the order of the ranks, or by an all-reduce of torch's.
    """

    def __init__(self, tensor: Tensor, peers: Peers | None = None) -> None:
        self._tensor = tensor
        self._received: NDArray[Any] | None = None  # from each rank
        with current_job.exchanging():
            if _is_sent_to_each(tensor, peers):
                self._received, self._work = _send_to_each(tensor.numpy(), peers, waits=False)
            else:
                self._work = dist.all_reduce(tensor, group=group_of(peers), async_op=True)

    def wait(self) -> None:
        """Wait for the sum."""
        with current_job.exchanging():
            self._work.wait()
        if self._received is not None:
            _add_up(self._received, self._tensor.numpy())


def reduce_in_place(buffer: Tensor, greatest: bool = False, peers: Peers | None = None) -> Tensor:
    """Add up a tensor in place, on every rank, or take the greatest; return it. Collective.

    Never AVG: on gloo it is missing, wrong or raises, by torch's version and the dtype.
    """
    if not lifecycle.joined() or not buffer.numel():
        return buffer
    if not greatest and _is_sent_to_each(buffer, peers):
        _sum_of_few(buffer.numpy(), peers)
        return buffer
    with current_job.exchanging():
        dist.all_reduce(buffer, dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM, group=group_of(peers))
    return buffer


def sum_over_ranks(block: Block, peers: Peers | None) -> None:
    """Add up a block over all ranks, in place and in the order of the ranks. Collective."""
    everyone = ranks_of(peers)
    device = control_device(peers)
    if device.type != "cpu":
        on_device = torch.from_numpy(block).to(device)
        reduce_in_place(on_device, peers=peers)
        block[:] = on_device.cpu().numpy()
    elif len(everyone) <= _FEW:
        _sum_of_few(block, peers)
    elif ranks.get_rank() == everyone[0]:
        _sum_for_all(block, everyone, group_of(peers))
    else:
        _let_first_rank_sum(block, everyone[0], group_of(peers))


def _is_sent_to_each(tensor: Tensor, peers: Peers | None) -> bool:
    """Return whether ranks send the whole tensor to each other: few of them, on the CPU, and a small one."""
    if tensor.device.type != "cpu" or tensor.numel() > _SMALL or tensor.is_complex():
        return False
    return len(ranks_of(peers)) <= _FEW


def _sum_of_few(values: NDArray[Any], peers: Peers | None) -> None:
    """Send values to each rank, and replace them by the sum of all."""
    with current_job.exchanging():
        received, _ = _send_to_each(values, peers)
    _add_up(received, values)


def _send_to_each(values: NDArray[Any], peers: Peers | None, waits: bool = True) -> tuple[NDArray[Any], Any]:
    """Send values to each rank; return what comes from each, and torch's work if this does not wait for it."""
    sent = np.empty((len(ranks_of(peers)), *values.shape), values.dtype)
    sent[:] = values
    received = np.empty_like(sent)
    buffers = torch.from_numpy(received), torch.from_numpy(sent)
    return received, dist.all_to_all_single(*buffers, group=group_of(peers), async_op=not waits)


def _add_up(rows: NDArray[Any], total: NDArray[Any]) -> None:
    """Add up rows one by one, for the sum of all at once has an order of NumPy's."""
    total[...] = rows[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows[1:]:
            total += row


def _sum_for_all(block: Block, everyone: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Add up the blocks of all ranks, as the first of them, and send out the sum."""
    received = np.empty((len(everyone), len(block)))
    buffer = torch.from_numpy(block)
    with current_job.exchanging():
        dist.gather(buffer, list(torch.from_numpy(received)), everyone[0], group)
        _add_up(received, block)
        dist.broadcast(buffer, everyone[0], group)


def _let_first_rank_sum(block: Block, first: int, group: dist.ProcessGroup | None) -> None:
    """Send a block to the first rank, and overwrite it with the sum."""
    total = torch.empty(len(block), dtype=torch.float64, device="cpu")
    with current_job.exchanging():
        sending = dist.gather(torch.from_numpy(block), None, first, group, async_op=True)
        dist.broadcast(total, first, group)
        sending.wait()
    block[:] = total.numpy()
