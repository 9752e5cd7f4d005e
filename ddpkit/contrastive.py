"""Join the rows of all ranks into one batch, with gradients, for losses that compare all samples.

The join is a linear map from each rank's rows to all ranks. Its backward is the adjoint: each rank receives all ranks'
gradients for its own rows and adds them up.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives.consistency import check_fingerprint, communication_device, fingerprint_of, raise_everywhere
from .collectives.groups import Group, peers_of
from .collectives.transfer import as_rows, fingerprint_of_rows, from_rows, gather_rows, tensor_leaves
from .collectives.tree import Tree
from .job import current_job, lifecycle
from .job.job import Peers, group_of, ranks_of, subset_of
from .launch import ranks
from .torch_internals import untraced

T = TypeVar("T")


@untraced
def gather_batch(value: T, *, check: bool = True, group: Group | None = None) -> T:
    """Join the rows of all ranks into the batch of one process, with gradients. Collective.

    Use it for losses that compare each sample with all others (CLIP, SimCLR, queues of negatives): compute the loss of
    the joined batch on every rank. If `wrap_model` or `average_gradients` averages the gradients, each step equals that
    of one process on the joined batch. Its backward is collective, too: every rank must run it. There is no second
    derivative.

    Args:
        value: This rank's tensor of shape (rows, ...), or dicts, lists, tuples and dataclasses of such tensors. The
            number of rows may differ between ranks, and be 0. Structure, dtypes, trailing shapes and which tensors
            require a gradient must be the same on every rank.
        check: False on every rank skips the checks of forward and backward, and the exchange of the numbers of rows:
            all shapes must then be equal. Mismatched ranks get wrong values, hang, or abort.
        group: As for `all_reduce_mean`; by default the data-parallel ranks.

    Returns:
        The same structure. Each tensor has the rows of all ranks, in the order in which a loader with the same global
        batch gives them to one process: row 0 of each rank, row 1 of each rank, and so on. Row i of rank r is row
        ``i * world_size + r`` if the numbers of rows are equal, or if `make_loader` split the batch.

    Raises:
        MismatchError: If structure, dtypes, trailing shapes or required gradients differ between ranks; on the other
            ranks, if one raises an error below.
        NotSetUpError: If several processes were launched but `setup()` was not called.
        TypeError: If it holds anything but dense tensors.
        ValueError: If a tensor has no dimensions.

    Note:
        In backward each rank gets, for its own rows, the sum over ranks s of dL_s/dz, where L_s is the loss on rank s
        and z the joined rows. DDP and `average_gradients` average the parameters' gradients over the W ranks, which
        gives the gradient of (L_0 + ... + L_{W-1}) / W: of the joined batch's loss L if every rank computes all of it,
        or of the mean of the ranks' losses if each computes a share.

    Example:
        >>> import torch
        >>> gather_batch(torch.tensor([[1.0], [2.0]]))
        tensor([[1.],
                [2.]])

        On two ranks::

            gather_batch(torch.tensor([1, 3]))    # rank 0
            gather_batch(torch.tensor([2]))       # rank 1; both get tensor([1, 2, 3])
    """
    peers = current_job.data_parallel() if group is None else peers_of(group)
    call = "gather_batch(value)"
    current_job.weighting["gather_batch"] = 1
    with raise_everywhere(call, peers):
        tree = Tree(value)
        tensors = tensor_leaves(call, tree)
        for path, tensor in tensors.items():
            if not tensor.dim():
                raise ValueError(f"{call} joins rows, but {path} has no dimensions. Pass value.unsqueeze(0).")
    if lifecycle.enter_collective() is None:
        joined = [tensor.clone() for tensor in tensors.values()]
    else:
        fingerprint = fingerprint_of_rows(call, tensors)
        joined = _Joined.apply(call, fingerprint, peers, check, *tensors.values())  # type: ignore[no-untyped-call]
    return tree.rebuild(joined)  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    """Join the rows of all ranks; in backward, add up all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, call: str, fingerprint: str, peers: Peers | None, check: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        by_rank = gather_rows(fingerprint, [as_rows(tensor) for tensor in tensors], peers, check)
        # counted here, where all ranks are in step; they may run the backwards of several calls in another order
        key = current_job.current_session().count(call, subset_of(peers))
        ctx.fingerprint = fingerprint_of(f"the backward of {call}, call number {key.rpartition('/')[2]}")
        ctx.peers = peers
        ctx.check = check
        ctx.counts = []
        joined = []
        for tensor, *parts in zip(tensors, *by_rank, strict=True):
            counts = [len(part) for part in parts]
            ctx.counts.append(counts)
            rows = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            torch.index_select(torch.cat(parts), 0, _turns(counts).to(tensor.device), out=as_rows(rows))
            joined.append(rows)
        needs_gradient = ctx.needs_input_grad[4:]  # after the other arguments
        ctx.mark_non_differentiable(*[rows for rows, needs in zip(joined, needs_gradient, strict=True) if not needs])
        return tuple(joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.check:
            check_fingerprint(ctx.fingerprint, ctx.peers)
        found: list[Tensor | None] = [None] * 4  # of the other arguments
        for gradient, counts, needs in zip(gradients, ctx.counts, ctx.needs_input_grad[4:], strict=True):
            found.append(_add_up_own(gradient, counts, ctx.peers) if needs else None)
        return tuple(found)


def _add_up_own(gradient: Tensor, counts: list[int], peers: Peers | None) -> Tensor:
    """Add up, over all ranks, their gradients of this rank's rows of a joined batch. Collective."""
    own = counts[ranks_of(peers).index(ranks.get_rank())]
    by_rank = torch.argsort(_turns(counts)).to(gradient.device)
    rows = as_rows(gradient)[by_rank].to(communication_device(gradient.device, peers))
    received = rows.new_empty((own * len(counts), rows.shape[1]))
    if rows.numel():
        with current_job.peer_errors():
            dist.all_to_all_single(received, rows, [own] * len(counts), counts, group_of(peers))
    terms = from_rows(received.to(gradient.device), gradient)
    terms = terms.reshape(len(counts), own, *gradient.shape[1:])
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return terms.sum(0, dtype=wide).to(gradient.dtype)


def _turns(counts: list[int]) -> Tensor:
    """Return the place by rank of each row in a batch that a loader dealt to the ranks in turn."""
    turns = np.concatenate([np.arange(count) for count in counts])
    return torch.from_numpy(np.argsort(turns, kind="stable"))
