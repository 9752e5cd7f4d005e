"""Whose samples are dealt: one place of those among which a dataset is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import get_worker_info

from ..arguments import as_integer
from ..errors import DdpkitError
from ..process_group.current_job import get_data_parallel_rank, get_data_parallel_world_size


@dataclass(frozen=True)
class Place:
    """Be one of `num_replicas` readers that share a dataset, by default this process among the data-parallel ranks.

    Attributes:
        rank: Its number, from 0.
        num_replicas: How many there are.
        made_for: This process's data-parallel rank and their number when it was made; None if the caller chose both.
    """

    rank: int
    num_replicas: int
    made_for: tuple[int, int] | None

    @classmethod
    def choose(cls, num_replicas: int | None, rank: int | None) -> Place:
        """Take what the caller has chosen, and the rest from the job.

        Raises:
            ValueError: If a number is no integer, or the rank out of range.
        """
        made_for = None
        if num_replicas is None or rank is None:
            made_for = _own_place()
            rank = made_for[0] if rank is None else rank
            num_replicas = made_for[1] if num_replicas is None else num_replicas
        num_replicas = as_integer(num_replicas, "num_replicas")
        rank = as_integer(rank, "rank", least=0)
        if rank >= num_replicas:
            found = f"rank is {rank} and num_replicas is {num_replicas}"
            raise ValueError(f"rank must be in [0, num_replicas), but {found}.")
        return cls(rank, num_replicas, made_for)

    def check(self, name: str) -> None:
        """Refuse to go on with the samples of another rank, or of another number of ranks.

        Args:
            name: What deals them.

        Raises:
            DdpkitError: If this process has another rank now, or the job another number of ranks.
        """
        if self.made_for is None or get_worker_info() is not None:  # a loader's worker may not know its rank
            return
        now = _own_place()
        if now != self.made_for:
            raise DdpkitError(
                f"{name} was made for rank {self.made_for[0]} of {self.made_for[1]}, "
                f"but this is rank {now[0]} of {now[1]} now: the process group was made, replaced or "
                "left since. Create it again; it can load the old state_dict()."
            )


def _own_place() -> tuple[int, int]:
    """Return this process's data-parallel rank and their number, now."""
    return get_data_parallel_rank(), get_data_parallel_world_size()
