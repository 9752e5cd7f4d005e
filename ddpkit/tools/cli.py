"""The command line: `ddpkit check`, `where`, `rehearse`, `doctor` and `bench`, also as `python -m ddpkit`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from .. import __version__


class _Tool(NamedTuple):
    text: str
    example: str
    page: str  # of the guide


_TOOLS = {
    "check": _Tool(
        "runs a training script for a few steps, and finds its silent distributed bugs",
        "python -m ddpkit check -n 2 train.py",
        "check",
    ),
    "where": _Tool(
        "asks a running job what each rank is doing, and for how long",
        "python -m ddpkit where",
        "where",
    ),
    "rehearse": _Tool(
        "kills, stops and resumes a training script at random, and compares it with a whole run",
        "python -m ddpkit rehearse -n 2,3 train.py --folder {folder} --resume",
        "rehearse",
    ),
    "doctor": _Tool(
        "checks this machine or, under a launcher, the whole job; says how to fix it",
        "torchrun --nproc-per-node=4 -m ddpkit doctor",
        "troubleshooting",
    ),
    "bench": _Tool(
        "measures collectives and training steps, here or in a job",
        "python -m ddpkit bench --only collectives",
        "bench",
    ),
}
_DOCS = "TOOL --help lists its flags and its page of the docs; in Python, help(ddpkit) is about the library."
_INTERRUPTED = 130  # exit codes as a shell reports them
_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tool; without a word, show what there is.

    Returns:
        The exit code: 0 if all is well, 1 if something failed, 2 for no tool or flags it does not know.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    try:
        code: int = _command(args.tool).run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        _discard_stdout()
        return _BROKEN_PIPE
    return code


def _parser(words: Sequence[str]) -> _Parser:
    """Make the parser; only the tool that the words name is imported."""
    called = os.path.basename(sys.argv[0])
    prog = "ddpkit" if called == "ddpkit" else "python -m ddpkit"
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, description="Tools for jobs on many ranks.", epilog=_DOCS, formatter_class=shape)
    parser.add_argument("--version", action="version", version=f"ddpkit {__version__}")
    tools = parser.add_subparsers(title="tools", dest="tool", required=True, metavar="TOOL")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, (text, example, page) in _TOOLS.items():
        description = f"{text[0].upper()}{text[1:]}."
        tool = tools.add_parser(name, help=text, description=description, formatter_class=shape)
        if name == chosen:
            _command(name).add_arguments(tool)
        tool.epilog = f"Example: {example}\nDocs: guide/{page}"
    return parser


def _command(tool: str) -> Any:
    module = tool if tool in ("bench", "where") else f"{tool}.command"
    return import_module(f".{module}", __package__)


def _discard_stdout() -> None:
    """Let the interpreter flush at its end without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
