"""The command line: `python -m ddpkit doctor` and `python -m ddpkit bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

_TOOLS = {
    "doctor": "checks this machine, or under a launcher the whole job, and says what to do about what is wrong",
    "bench": "measures collectives, metric reduction, barriers and training steps on this machine or job",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists what there is)\n")  # one line, without the usage


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a tool and returns the exit code: 0 if all is well, 1 if something failed, 2 for flags it does not know."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(prog="python -m ddpkit", description="Tools for jobs on many ranks.")
    tools = parser.add_subparsers(dest="tool", required=True, metavar="doctor|bench")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, text in _TOOLS.items():
        tool = tools.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:  # only this one is imported
            import_module(f".{name}", __package__).add_arguments(tool)
    args = parser.parse_args(words)
    try:
        code: int = import_module(f".{args.tool}", __package__).run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports it
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return 141  # as a shell reports it
    return code
