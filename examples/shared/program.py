"""Start and end a trainer: log with timestamps, and report the end of a run once for all ranks."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

import ddpkit

log = logging.getLogger("trainer")
FORMAT = logging.Formatter("%(asctime)s.%(msecs)03d : %(message)s", "%y-%m-%d %H:%M:%S")
NO_STEP = 2**62


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
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without the line above
        own = [frame for frame in frames[1:] if "site-packages" not in frame.filename]
        place = (own or frames)[-1]
        raise UserError(
            f"{about}: {type(error).__name__}: {error} (in {place.name}, {place.filename}, line {place.lineno}){remedy}"
        ) from error


EXPECTED = (UserError, ddpkit.CheckpointError)


def by_number(name: str) -> list[str | int]:
    """Sort names by the numbers in them: 2 before 10."""
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)]


def find_class(setting: str, name: str) -> Callable[..., Any]:
    """Import a class of the user's, "package.module:Class", also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except Exception as error:  # also of the user's own code, such as a CUDA extension that cannot be loaded
        raise UserError(
            f"{setting}: cannot import {name}: {type(error).__name__}: {error}; if it is not found, start in the "
            f"folder that holds {module.partition('.')[0]}, put that folder on PYTHONPATH, or install the package"
        ) from error


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a block, then restore the mode of each module."""
    former = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in former.items():
            module.training = training


def check_tensor(setting: str, found: object) -> None:
    """Raise if a module of the user's returns no tensor or, in training, one without a gradient."""
    if not isinstance(found, torch.Tensor):
        raise UserError(
            f"{setting}: it must return one tensor, but it returned a {type(found).__name__}: wrap it in a module "
            "that returns the tensor alone"
        )
    if torch.is_grad_enabled() and not found.requires_grad:
        raise UserError(
            f"{setting}: it returned a tensor that has no gradient, so it cannot be trained: look for detach(), "
            "no_grad() and operations without a derivative"
        )


def without_gradient(model: torch.nn.Module) -> list[str]:
    """List the trainable parameters without a gradient after a backward pass: DDP would wait for them."""
    return [name for name, weights in model.named_parameters() if weights.requires_grad and weights.grad is None]


def check_shape(setting: str, found: object, expected: Sequence[int], names: str) -> None:
    """Raise if a network of the user's returns no tensor or another shape, which a loss would broadcast silently."""
    returned = tuple(found.shape) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
    if returned != tuple(expected):
        raise UserError(
            f"{setting}: the network must return {names}, here {tuple(expected)}, but it returned {returned}"
        )


class Parser(argparse.ArgumentParser):
    """Parse a command line, ignoring arguments that launchers add: the environment has the same values."""

    def __init__(self, description: str, formatter: Any = argparse.RawDescriptionHelpFormatter) -> None:
        super().__init__(description=description, formatter_class=formatter)
        self.add_argument("--local-rank", "--local_rank", "--launcher", "--dist", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that the error is reported once for all ranks."""
        raise UserError(f"{message}\n{self.format_usage().rstrip()}")

    def print_help(self, file: Any = None) -> None:
        """Print the help on rank 0 only."""
        if ddpkit.is_main_process():
            super().print_help(file)


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


@torch.no_grad()
def update_average(average: torch.nn.Module, model: torch.nn.Module, keep: float) -> None:
    """Update parameters as E = keep · E + (1 − keep) · G, and copy buffers, which a model may replace by new ones."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
    for buffer, other in zip(average.buffers(), model.buffers(), strict=True):
        buffer.copy_(other)


def stop_if_not_finite(first_bad: torch.Tensor, step: int, model: torch.nn.Module, advice: str) -> None:
    """Raise on every rank if a loss or weights are not finite after a step. Collective.

    `first_bad` is the first step, counted from 1, with such a loss on this rank, or `NO_STEP`.
    """
    first = int(first_bad)
    if not all(weights.isfinite().all() for weights in model.parameters()):
        first = min(first, step)
    firsts = ddpkit.all_gather_object(first)
    first = min(firsts)
    if first < NO_STEP:
        raise UserError(
            f"loss or weights are not finite since iteration {first}, first on rank {firsts.index(first)}; "
            f"nothing was saved after it: {advice}"
        )
