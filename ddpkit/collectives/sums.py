"""Add up tensors over all ranks, by the messages that suit the number of ranks and the size of the tensor.

On the CPU few ranks give what is small to each other, each the whole to each, in about half of the time that an
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
_DTYPES = (torch.float32, torch.float64, torch.int64)


class Sum:
    """A tensor that is being added up over all ranks, in place. Collective, and begun as it is made.

    The ranks' values are added in the order of the ranks, or by an all-reduce of torch's.
    """

    _work: Any

    def __init__(self, tensor: Tensor, peers: Peers | None = None) -> None:
        self._tensor = tensor
        self._received: NDArray[Any] | None = None  # from each rank
        with current_job.exchanging():
            if _is_given_to_each(tensor, peers):
                values = tensor.numpy()
                self._received = np.empty((len(ranks_of(peers)), *values.shape), values.dtype)
                rows = list(torch.from_numpy(self._received))
                self._work = dist.all_gather(rows, tensor, group=group_of(peers), async_op=True)
            else:
                self._work = dist.all_reduce(tensor, group=group_of(peers), async_op=True)

    def wait(self) -> None:
        """Wait for the sum; once more does nothing."""
        if self._work is None:
            return
        with current_job.exchanging():
            self._work.wait()
        if self._received is not None:
            _add_up(self._received, self._tensor.numpy())
        self._work = self._received = None


def reduce_in_place(buffer: Tensor, greatest: bool = False, peers: Peers | None = None) -> Tensor:
    """Add up a tensor in place, on every rank, or take the greatest; return it. Collective.

    Never AVG: on gloo it is missing, wrong or raises, by torch's version and the dtype.
    """
    if not lifecycle.joined() or not buffer.numel():
        return buffer
    if greatest:
        with current_job.exchanging():
            dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group_of(peers))
    else:
        Sum(buffer, peers).wait()
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
        _exchange_blocks(block, len(everyone), group_of(peers))
    elif ranks.get_rank() == everyone[0]:
        _sum_for_all(block, everyone, group_of(peers))
    else:
        _let_first_rank_sum(block, everyone[0], group_of(peers))


def _is_given_to_each(tensor: Tensor, peers: Peers | None) -> bool:
    """Return whether the whole tensor goes to all ranks: to few of them, on the CPU, if it is small."""
    is_plain = tensor.device.type == "cpu" and tensor.dtype in _DTYPES
    return is_plain and tensor.numel() <= _SMALL and len(ranks_of(peers)) <= _FEW


def _exchange_blocks(block: Block, count: int, group: dist.ProcessGroup | None) -> None:
    """Send a block to all other ranks, and add up theirs.

    Nothing else may travel like this: where ranks are in different calls, messages of different sizes would meet, which
    aborts a gloo process.
    """
    sent = np.empty((count, len(block)))
    sent[:] = block
    received = np.empty_like(sent)
    with current_job.exchanging():
        dist.all_to_all_single(torch.from_numpy(received), torch.from_numpy(sent), group=group)
    _add_up(received, block)


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
