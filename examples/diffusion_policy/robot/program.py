"""What all programs here begin and end with: the main process logs, and what users can put right is one message."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import NoReturn

from tqdm.contrib.logging import logging_redirect_tqdm

import ddpkit

from .config import ConfigError
from .shards import DataError

EXPECTED = (ConfigError, DataError, ddpkit.CheckpointError)  # what the user can put right; raised by all ranks


def arguments() -> list[str]:
    """The command line without what the old `torch.distributed.launch` adds; the environment says it too."""
    return [argument for argument in sys.argv[1:] if not argument.startswith(("--local-rank=", "--local_rank="))]


class Parser(argparse.ArgumentParser):
    """Says what is wrong as the trainer does."""

    def __init__(self, program: str) -> None:
        super().__init__(description=program.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help says what there is)")


def run(name: str, main: Callable[[ddpkit.Context], None]) -> int:
    """Runs `main` as this rank, in the job that the launcher started.

    Returns:
        The exit status: 0; or 2 on every rank, rank 0 having said why, if there is something for the user to put right.
    """
    handler = logging.StreamHandler()
    handler.addFilter(ddpkit.RankFilter())  # the main process speaks for all; warnings come from every rank
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[handler])
    logging.getLogger("OpenGL").setLevel(logging.WARNING)
    with ddpkit.distributed(num_threads=1) as job, logging_redirect_tqdm():
        try:
            main(job)
            return 0
        except EXPECTED as error:
            reason = str(error)
        except ddpkit.PeerError as error:  # rank 0 found it, for all
            if error.error_type not in [kind.__name__ for kind in EXPECTED]:
                raise
            reason = error.message
        if job.rank == 0:
            print(f"{name}: error: {reason}", file=sys.stderr, flush=True)
        return 2
