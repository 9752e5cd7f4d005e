"""What the test process and its ranks send each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plan:
    """How the ranks of a run are started; the same for all.

    Attributes:
        arguments: pytest's command line in the ranks.
        options: The values of pytest's options that the ranks take over.
        basetemp: Below it the ranks keep their own temporary folders.
        streams: Copies of this process's standard streams.
        coverage: What `coverage.Coverage` is made with in a rank, None if coverage is not measured.
    """

    arguments: list[str]
    options: dict[str, Any]
    basetemp: str
    streams: list[int | None]
    coverage: dict[str, Any] | None


@dataclass
class Task:
    """Work for all ranks of a crew.

    Attributes:
        kind: "item" to run a collected test, "call" to call a function.
        body: For an item its path, name (nodeid) and folder; for a call the pickled function and arguments.
        join: Whether the ranks call `setup()` before, so that the body finds them joined.
        timeout: Of the process group that is made for it, in seconds.
        environment: The environment variables to run under.
        folder: The working directory.
        path: `sys.path`.
    """

    kind: str
    body: tuple[Any, ...]
    join: bool
    timeout: float
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "."
    path: list[str] = field(default_factory=list)


@dataclass
class Started:
    """The rank begins with the test's own code; from now on its time counts."""


@dataclass
class Debugging:
    """The rank wants the terminal, and then waits for it; or gives it back."""

    begins: bool


@dataclass
class Done:
    """The task has ended.

    Attributes:
        failed: Whether this rank's part of it failed.
        value: The test's reports, or the pickled outcome of the call.
        output: What a call has printed; a test's reports hold it themselves.
        heard_of: The rank whose failure kept this one from coming to an end; `value` is then a text.
    """

    failed: bool
    value: Any
    output: str = ""
    heard_of: int | None = None


@dataclass
class Left:
    """What the task left behind, after resetting what can be reset.

    Attributes:
        joined: Whether the rank is still in the group that it was given.
        traces: Why this process should not be used again, as phrases.
    """

    joined: bool
    traces: list[str]


@dataclass
class Answer:
    """What became of a task on one rank.

    Attributes:
        rank: Which.
        done: What the rank itself said; None if it did not come to an end.
        problem: Why it did not, "" if it did.
        stack: Where it was when its time was up.
    """

    rank: int
    done: Done | None = None
    problem: str = ""
    stack: str = ""
