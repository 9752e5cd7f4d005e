"""Loggers, and a filter, that know the rank. They add no handler and set no level."""

from __future__ import annotations

import logging
from collections.abc import Collection

from .errors import LaunchError, NotSetUpError
from .launch import ranks

FORWARDED = "ddpkit_forwarded"  # attribute of a record forwarded from a rank of spawn(): its rank


class RankFilter(logging.Filter):
    """Log only on some ranks, and add the rank to every record.

    Put it on a handler to filter the whole program: records below `WARNING` pass on the chosen ranks only, warnings and
    errors on every rank, because a problem on one rank shows nowhere else. Records get the attributes `rank` and
    `world_size` for the format: integers, or "?" if the environment is contradictory.

    Args:
        ranks: Ranks that log below `WARNING`; None for all.

    Example:
        >>> import logging, sys
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> handler.addFilter(RankFilter())
        >>> handler.setFormatter(logging.Formatter("[%(rank)s/%(world_size)s] %(message)s"))
        >>> log = logging.getLogger("ddpkit-example")
        >>> log.addHandler(handler)
        >>> log.warning("loss is NaN")  # one process
        [0/1] loss is NaN
        >>> log.removeHandler(handler)
    """

    def __init__(self, ranks: Collection[int] | None = (0,)) -> None:
        super().__init__()
        self.ranks = ranks

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the record's attributes; return whether it passes. Modules may log before `setup()`."""
        if not hasattr(record, FORWARDED):
            try:
                record.rank = ranks.get_rank()
                record.world_size = ranks.get_world_size()
            except (LaunchError, NotSetUpError):  # setup() will raise it; a PeerError must not be lost here
                record.rank = record.world_size = "?"
                return True
        return self.ranks is None or record.rank in self.ranks or record.levelno >= logging.WARNING  # type: ignore[attr-defined]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the standard logger of that name; below `WARNING` only the main process logs.

    It is `logging.getLogger(name)` with a `RankFilter`; handlers, levels and formats are up to the program. The filter
    applies to this logger, not to its children; for those put a `RankFilter` on a handler.

    Args:
        name: As in `logging.getLogger`, usually `__name__`.

    Example:
        >>> import logging
        >>> log = get_logger("train")
        >>> log is logging.getLogger("train")
        True
    """
    logger = logging.getLogger(name)
    if not any(isinstance(known, RankFilter) for known in logger.filters):
        logger.addFilter(RankFilter())
    return logger
