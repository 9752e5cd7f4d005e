"""Start and end a trainer: log with timestamps, and report the end of a run once for all ranks."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm.contrib.logging import logging_redirect_tqdm

import ddpkit

log = logging.getLogger("trainer")
FORMAT = logging.Formatter("%(asctime)s.%(msecs)03d : %(message)s", "%y-%m-%d %H:%M:%S")


class UserError(Exception):
    """An error that the user can fix: it says what was expected, what was found and what to do."""


@contextmanager
def user_error(about: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of some kinds, in a block or a decorated function, into a `UserError`."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{about}: {error}") from error


@contextmanager
def users_code(about: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of the user's code in a block into a `UserError` that names the failing line of that code."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[2:]  # without the line above and the call
        own = [frame for frame in frames if "site-packages" not in frame.filename]
        places = [f" (in {place.name}, {place.filename}, line {place.lineno})" for place in (own or frames)[-1:]]
        raise UserError(f"{about}: {type(error).__name__}: {error}{''.join(places)}{remedy}") from error


EXPECTED = (UserError, ddpkit.CheckpointError)


def hides_bar() -> bool | None:
    """Return tqdm's `disable`: the main process alone shows a bar, if there is a terminal."""
    return None if ddpkit.is_main_process() else True


def by_number(name: str) -> list[str | int]:
    """Sort names by the numbers in them: 2 before 10."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)]


class Parser(argparse.ArgumentParser):
    """Parse a command line, ignoring arguments that launchers add: the environment has the same values."""

    def __init__(self, description: str, formatter: Any = argparse.RawDescriptionHelpFormatter) -> None:
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)
        self.add_argument("--local-rank", "--local_rank", "--launcher", "--dist", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that the error is reported once for all ranks."""
        raise UserError(f"{message}\n{self.format_usage().rstrip()}")

    def print_help(self, file: Any = None) -> None:
        """Print the help on rank 0 only."""
        if ddpkit.is_main_process():
            super().print_help(file)


class OneLineParser(Parser):
    """Say in one line what is wrong; the usage may be twenty."""

    def error(self, message: str) -> NoReturn:
        """Raise without the usage."""
        raise UserError(message)


@contextmanager
def one_message(formatter: logging.Formatter = FORMAT) -> Iterator[None]:
    """Run a trainer on this rank; report its end once for all ranks, which exit with the same status.

    Enter `ddpkit.distributed()` inside, so that all ranks learn of an error. The exit status is 2 after an error that
    the user can fix, 130 after Ctrl-C, and 1 after any other error, whose traceback the failing rank shows.
    """
    console = logging.StreamHandler()
    console.setFormatter(formatter)
    console.addFilter(ddpkit.RankFilter())  # rank 0 speaks for all; warnings come from every rank
    console.addFilter(_is_no_news_of_peers)
    logging.basicConfig(level=logging.INFO, handlers=[console])
    with logging_redirect_tqdm():
        try:
            yield
            return
        except KeyboardInterrupt:
            status = _say("interrupted", status=130)
        except ddpkit.PeerError as error:
            status = _say_for(error)
        except ddpkit.LaunchError as error:  # perhaps there is no rank 0 to say it
            status = _say(f"error: {error}", status=2, everywhere=True)
        except EXPECTED as error:
            status = _say(f"error: {_plain(error)}", status=2)
        finally:
            _close_log_files()
    _leave_no_traceback()
    sys.exit(status)


def _is_no_news_of_peers(record: logging.LogRecord) -> bool:
    """Drop ddpkit's report of another rank's failure, which every rank logs: the end reports it once."""
    return record.levelno != logging.ERROR or not record.name.startswith("ddpkit.")


def _say_for(error: ddpkit.PeerError) -> int:
    """Report another rank's failure, unless that rank has reported it; return the exit status."""
    if error.error_type == KeyboardInterrupt.__name__:
        return _say("interrupted", status=130)
    if error.error_type in [kind.__name__ for kind in EXPECTED]:
        return _say(f"error: {_plain(error.message)}", status=2)
    words = str(error).partition("\n\n")[0]  # without that rank's traceback
    return _say(f"error: {words}", status=1, speaker=1 if error.rank == 0 else 0)


def _say(text: str, *, status: int, speaker: int = 0, everywhere: bool = False) -> int:
    if everywhere or ddpkit.get_rank() == speaker:
        log.error("%s: %s", Path(sys.argv[0]).name, text)
    return status


def _plain(error: object) -> str:
    """Extract an error's message from the traceback of a loading process."""
    return str(error).rpartition(f"{UserError.__name__}: ")[2].strip()


def _leave_no_traceback() -> None:
    """Keep torchrun's report short: the error has been reported."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        Path(report).unlink(missing_ok=True)


def log_to(path: Path) -> None:
    """Also write rank 0's log to a file, until the program ends."""
    if ddpkit.is_main_process():
        handler = logging.FileHandler(path)
        handler.setFormatter(FORMAT)
        logging.getLogger().addHandler(handler)


def _close_log_files() -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            handler.close()
