"""Loggers, and a filter, that know the rank. No handler is added and no level set."""

from __future__ import annotations

import logging
from collections.abc import Collection

from .errors import LaunchError, NotSetUpError
from .launch import ranks

FORWARDED = "ddpkit_forwarded"  # attribute of a record that a rank of spawn() has sent, with its rank


class RankFilter(logging.Filter):
    """Let only some ranks speak, and tell every record which rank it comes from.

    Put it on a handler, and the whole program speaks once: records below `WARNING` pass on the chosen ranks only,
    warnings and errors on every rank, since what goes wrong on one rank is seen nowhere else. Records gain the
    attributes `rank` and `world_size` for the format: integers, or "?" while the environment contradicts itself.

    Args:
        ranks: The ranks that speak below `WARNING`; None for all.

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
        """Stamp the record and say whether it passes. The rank is asked for now: modules log before `setup()`, too."""
        if not hasattr(record, FORWARDED):
            try:
                record.rank = ranks.get_rank()
                record.world_size = ranks.get_world_size()
            except (LaunchError, NotSetUpError):  # which setup() will raise; a PeerError must not be lost here
                record.rank = record.world_size = "?"
                return True
        return self.ranks is None or record.rank in self.ranks or record.levelno >= logging.WARNING  # type: ignore[attr-defined]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the standard logger of that name, on which only the main process speaks below `WARNING`.

    It is `logging.getLogger(name)` with a `RankFilter`: handlers, levels and formats remain the program's business.
    The filter sees what is logged on this logger, not on its children; put a `RankFilter` on a handler for those.

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
