"""The command line: `ddpkit doctor` and `ddpkit bench`, also as `python -m ddpkit`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__

_TOOLS = {
    "doctor": "checks this machine, or under a launcher the whole job, and says what to do about what is wrong",
    "bench": "measures collectives, metric reduction, barriers and training steps on this machine or job",
}


class _Parser(argparse.ArgumentParser):
    known: Sequence[str] = ()  # what a word may have been meant for

    def error(self, message: str) -> NoReturn:
        nearest = _nearest(message, self.known)
        guess = f"; did you mean {nearest}?" if nearest else ""
        self.exit(
            2, f"{self.prog}: error: {message}{guess} (--help lists what there is)\n"
        )  # one line, without the usage


def _nearest(message: str, known: Sequence[str]) -> str | None:
    """Return the known word that resembles most the one that argparse complains about; None if none does."""
    from difflib import get_close_matches

    wrong = re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '(\S+)'", message)
    matches = get_close_matches(wrong[1] or wrong[2], known, n=1) if wrong else []
    return matches[0] if matches else None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a tool and returns the exit code: 0 if all is well, 1 if something failed, 2 for flags it does not know."""
    words = sys.argv[1:] if argv is None else list(argv)
    called = os.path.basename(sys.argv[0])
    prog = "ddpkit" if called == "ddpkit" else "python -m ddpkit"
    parser = _Parser(prog=prog, description="Tools for jobs on many ranks.")
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    parser.known = [*_TOOLS, "--version"]
    tools = parser.add_subparsers(dest="tool", required=True, metavar="doctor|bench")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, text in _TOOLS.items():
        tool = tools.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:  # only this one is imported
            import_module(f".{name}.command", __package__).add_arguments(tool)
            parser.known = tool.known = re.findall(r"--[\w-]+", tool.format_help())
    if not words:
        parser.print_help(sys.stderr)
    args = parser.parse_args(words)
    try:
        code: int = import_module(f".{args.tool}.command", __package__).run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports it
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return 141  # as a shell reports it
    return code
