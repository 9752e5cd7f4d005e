"""The messages between the test process and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunOptions:
    """How to start the ranks of a run; the same for all.

    Attributes:
        arguments: pytest's command line in the ranks.
        options: The values of pytest's options that the ranks take over.
        basetemp: Below it the ranks keep their own temporary folders.
        streams: Copies of this process's standard streams.
        coverage: Arguments for `coverage.Coverage` in a rank, None if coverage is not measured.
    """

    arguments: list[str]
    options: dict[str, Any]
    basetemp: str
    streams: list[int | None]
    coverage: dict[str, Any] | None


@dataclass(frozen=True)
class RunTest:
    """The work of a task that runs a collected test.

    Attributes:
        path: The file that holds the test.
        nodeid: pytest's name of the test.
        folder: Its `tmp_path`, on all ranks.
        debug: Open the debugger where it fails.
        keep: pytest's name of the class or module whose fixtures the next test on these ranks
            shares, "" if only those of the session, None if no test follows.
    """

    path: Path
    nodeid: str
    folder: Path
    debug: bool
    keep: str | None


@dataclass(frozen=True)
class CallFunction:
    """The work of a task that calls a function.

    Attributes:
        pickled: The function and its arguments.
    """

    pickled: bytes


@dataclass
class Task:
    """Work for all ranks of a pool.

    Attributes:
        work: A test to run or a function to call.
        join: The ranks call `setup()` first.
        timeout: Of the process group that is made for it, in seconds.
        environment: The environment variables to run under.
        folder: The working directory.
        path: `sys.path`.
    """

    work: RunTest | CallFunction
    join: bool
    timeout: float
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "."
    path: list[str] = field(default_factory=list)


@dataclass
class Started:
    """The rank begins with the test's own code; from now on its time counts."""


@dataclass
class Reported:
    """A report that the rank's pytest has made; sent at once, for the rank may not come to the end.

    Attributes:
        report: The report, in pytest's own form for sending.
    """

    report: Any


@dataclass(frozen=True)
class Warned:
    """A warning that the rank's pytest has recorded in a test.

    Attributes:
        pickled: The warning, None if it cannot be pickled.
        category: The name of its class.
        text: The warning as a text.
        filename: The file that has caused it.
        lineno: The line in that file.
    """

    pickled: bytes | None = field(compare=False)  # ranks may write the same warning differently
    category: str
    text: str
    filename: str
    lineno: int


@dataclass
class EndedBadly:
    """Fixtures have failed at their end when the last test that had them was already reported.

    Attributes:
        report: The report for that test, in pytest's own form for sending.
    """

    report: Any


@dataclass
class Debugging:
    """The rank wants the terminal and waits for it, or gives it back."""

    begins: bool


@dataclass
class Done:
    """The task has ended.

    Attributes:
        failed: True if this rank's part of it failed.
        value: The reply of a call, None of a test; a text if it did not begin.
        output: The text that a call has printed; a test's reports hold it themselves.
        heard_of: The other rank that failed and so ended this one's part; `value` is then a text.
        ended_run: The message and exit code of `pytest.exit()`, if the test has called it.
    """

    failed: bool
    value: Any
    output: str = ""
    heard_of: int | None = None
    ended_run: tuple[str, int | None] | None = None


@dataclass
class CleanUp:
    """All ranks have done the task: clean up, and tell what is left."""


@dataclass
class Leftovers:
    """The state of a rank after a task, when all has been reset that can be.

    Attributes:
        joined: True if the rank is still in the group that it was given.
        traces: Reasons not to use this process again, as phrases.
    """

    joined: bool
    traces: list[str]


@dataclass
class Answer:
    """The outcome of a task on one rank.

    Attributes:
        rank: The rank's number.
        done: The rank's own message; None if it did not come to an end.
        problem: Why it did not, "" if it did.
        stack: Its stack when its time was up.
        reports: The reports of the test that it has made, in pytest's own form for sending.
        warnings: The warnings of the test.
    """

    rank: int
    done: Done | None = None
    problem: str = ""
    stack: str = ""
    reports: list[Any] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Return whether this rank failed, hung or died."""
        return self.done is None or self.done.failed
