"""Rank-aware logging, told by records that a handler of our own collects."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator

import pytest
from conftest import on_ranks

import ddpkit
from ddpkit.logging import RankFilter, get_logger


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def said(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def collector() -> Iterator[Collector]:
    handler, root = Collector(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def _said_on_each_rank() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for case, ranks in {"main": (0,), "last": (2,), "all": None}.items():
        handler = Collector()
        handler.addFilter(RankFilter(ranks))
        log = logging.getLogger(f"test.{case}")
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        log.debug("below the level")
        log.info("info")
        log.warning("warning")
        out[case] = [f"{r.rank}/{r.world_size} {r.getMessage()}" for r in handler.records]  # type: ignore[attr-defined]
    handler = Collector()
    log = get_logger("test.ours")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    log.info("info")
    log.error("error")
    return out | {"ours": handler.said()}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_chosen_ranks_inform_and_every_rank_warns(nprocs: int) -> None:
    for rank, said in enumerate(on_ranks(_said_on_each_rank, nprocs)):
        who = f"{rank}/{nprocs}"
        info, warning = f"{who} info", f"{who} warning"
        assert said["main"] == ([info, warning] if rank == 0 else [warning])
        assert said["last"] == ([info, warning] if rank == 2 else [warning])
        assert said["all"] == [info, warning]
        assert said["ours"] == (["info", "error"] if rank == 0 else ["error"])


def test_get_logger_adds_no_handler_sets_no_level_and_filters_once() -> None:
    log = get_logger("test.plain")
    assert get_logger("test.plain") is log is logging.getLogger("test.plain")
    assert (log.handlers, log.level, log.propagate, len(log.filters)) == ([], logging.NOTSET, True, 1)


def test_the_rank_is_asked_for_when_the_record_is_made(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    log = get_logger("test.late")
    log.info("single")
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    log.info("as rank 1")
    log.warning("warning of rank 1")
    assert collector.said() == ["single", "warning of rank 1"]


def test_a_record_with_a_rank_of_its_own_is_still_of_this_process(collector: Collector) -> None:
    log = get_logger("test.beams")
    log.info("best beam", extra={"rank": 1})
    log.warning("no beam", extra={"rank": 2})
    said = [(r.getMessage(), r.rank, r.world_size) for r in collector.records]  # type: ignore[attr-defined]
    assert said == [("best beam", 0, 1), ("no beam", 0, 1)]


def test_logging_survives_an_environment_that_setup_would_refuse(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("RANK", "3")
    get_logger("test.broken").info("still here")
    assert [(r.getMessage(), r.rank, r.world_size) for r in collector.records] == [("still here", "?", "?")]  # type: ignore[attr-defined]


def test_the_filter_works_from_a_configuration_dictionary() -> None:
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"ranks": {"()": "ddpkit.logging.RankFilter", "ranks": [1]}},
        "handlers": {"null": {"class": "logging.NullHandler", "filters": ["ranks"]}},
        "loggers": {"test.configured": {"handlers": ["null"]}},
    }
    logging.config.dictConfig(config)
    (found,) = logging.getLogger("test.configured").handlers[0].filters
    assert isinstance(found, RankFilter) and found.ranks == [1]


def _log_on_a_rank() -> None:
    with ddpkit.distributed():
        rank = ddpkit.get_rank()
        logging.basicConfig(level=logging.DEBUG)  # as a script's main() may; the parent's configuration stands
        logging.getLogger("test.sent").debug("below the level")
        logging.getLogger("test.sent").info("rank %d", rank, extra={"step": rank, "odd": object()})
        get_logger("test.main").info("once")
        if rank == 1:
            try:
                raise KeyError("a")
            except KeyError:
                logging.getLogger("test.apart").exception("caught")


def test_the_records_of_spawned_ranks_come_to_the_handlers_here(collector: Collector) -> None:
    apart, log = Collector(), logging.getLogger("test.apart")
    log.addHandler(apart)
    logging.getLogger("test.sent").setLevel(logging.INFO)
    try:
        ddpkit.spawn(_log_on_a_rank, 2)
    finally:
        log.removeHandler(apart)
    sent = sorted(f"{r.rank}/{r.world_size} {r.getMessage()}" for r in collector.records if r.name == "test.sent")  # type: ignore[attr-defined]
    assert sent == ["0/2 rank 0", "1/2 rank 1"]
    assert collector.said().count("once") == 1 and collector.said().count("caught") == 1
    (record,) = apart.records
    assert record.rank == 1 and "KeyError: 'a'" in str(record.exc_text) and record.levelno == logging.ERROR  # type: ignore[attr-defined]


def test_a_filter_here_lets_the_chosen_ranks_of_a_launch_speak(collector: Collector) -> None:
    logging.getLogger("test.sent").setLevel(logging.INFO)
    collector.addFilter(RankFilter([1]))
    ddpkit.spawn(_log_on_a_rank, 2)
    assert [r.getMessage() for r in collector.records if r.name == "test.sent"] == ["rank 1"]
