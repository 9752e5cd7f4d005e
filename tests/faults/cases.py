"""The cases as data."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGINT, SIGKILL

TORCHRUN, PLAIN = "torchrun", "no agent"
LONG = 180.0  # seconds, the time-out of `setup()` where nothing may end by it
SHORT = 10.0  # where something does
NAMED = "rank {faulty} ({host}) failed: "
LOST = "rank {faulty} ({host}) was lost: "
LEFT = "rank {faulty} ({host}) left the job while rank "
SILENT = "rank {faulty} ({host}) does not answer: "
ORPHANED = "has lost its launcher: torchrun (pid"


@dataclass(frozen=True, eq=False)
class Fault:
    """One rank of three fails while the others are somewhere. They must know within `bound` seconds, and say `said`."""

    what: str
    fault: str  # what the rank does, a name in programs.py
    place: str  # what the others do
    said: str  # by every other rank, or by torchrun of it
    faulty: int = 1
    timeout: float = LONG
    bound: float = 10.0  # beyond the time-out where `timeout` is short
    passes: bool = False  # whether all is well
    launchers: tuple[str, ...] = (TORCHRUN, PLAIN)
    strike: int = 0  # a signal that torchrun gets then, or each rank that has no agent
    nodes: bool = False  # two ranks on two nodes instead
    quick: bool = True  # whether the tests run it; else only the script that makes the table

    @property
    def limit(self) -> float:
        """Seconds after the fault in which all others must know."""
        return self.bound + (self.timeout if self.timeout == SHORT else 0)


PLACES = {
    "all_reduce": "in torch's `all_reduce`",
    "compute": "computing",
    "hold_the_lock": "in a C call that holds the interpreter lock for 4 s",
    "barrier": "in `barrier`",
    "mean": "in `all_reduce_mean`",
    "backward": "in `backward`",
    "gather": "in the backward of `gather_batch`",
    "train": "training",
    "run_on_main": "waiting for rank 0",
    "first": "waiting for rank 0",
    "slowly_first": "waiting for rank 0",
    "save_too_much": "in `save`, too",
    "save_forever": "in `save`, too",
}

FAULTS = [
    Fault("raises before a collective", "fail", "all_reduce", NAMED + "ValueError: boom"),
    Fault("raises in a collective", "mean_of_a_word", "mean", "rank 1: TypeError: all_reduce_mean(value) takes"),
    Fault("raises after a collective", "fail", "compute", NAMED + "ValueError: boom"),
    Fault("raises", "fail", "hold_the_lock", NAMED + "ValueError: boom"),
    Fault("raises in `run_on_main`", "run_on_main", "run_on_main", NAMED + "ValueError: boom", 0),
    Fault("raises in `main_process_first`", "first", "first", NAMED + "ValueError: boom", 0),
    Fault("raises in a loader's worker", "read_with_a_worker", "all_reduce", NAMED + "ValueError"),
    Fault("raises in `backward`", "broken_backward", "backward", NAMED + "ValueError: boom"),
    Fault("raises", "fail_after_gathering", "gather", NAMED + "ValueError: boom"),
    Fault("is killed (SIGKILL)", "kill", "all_reduce", LOST),
    Fault("is killed", "kill_after_gathering", "gather", LOST),
    Fault("crashes (segmentation fault)", "crash", "all_reduce", LOST),
    Fault("is killed", "kill", "compute", LOST),
    Fault("is killed", "kill", "hold_the_lock", LOST),
    Fault("is rank 0 and killed", "kill", "all_reduce", LOST, 0),
    Fault("is rank 0 and killed", "kill", "barrier", LOST, 0),
    Fault("is rank 0 and killed while it saves", "die_while_saving", "save_forever", LOST, 0),
    Fault("is stopped (SIGSTOP)", "stop", "barrier", "1 of 3 ranks did not arrive within 10 s: rank 1", timeout=SHORT),
    Fault("is stopped", "stop", "all_reduce", SILENT, timeout=SHORT),
    Fault("is rank 0 and stopped", "stop", "barrier", "rank 0 ({host})", 0, timeout=SHORT, bound=20),
    Fault("is rank 0 and stopped", "stop", "mean", SILENT, 0, timeout=SHORT, bound=20),
    Fault(
        "does not arrive in time", "stay", "barrier", "1 of 3 ranks did not arrive within 10 s: rank 1", timeout=SHORT
    ),
    Fault("does not arrive in time", "stay", "all_reduce", SILENT, timeout=SHORT),
    Fault("does not arrive in time", "stay", "mean", SILENT, timeout=SHORT),
    Fault("ends early with exit code 0", "exit_early", "barrier", LEFT),
    Fault("ends early with exit code 0", "exit_early", "all_reduce", LEFT),
    Fault("ends early with exit code 3", "exit_3", "compute", NAMED + "SystemExit: 3"),
    Fault("ends by `os._exit(0)`", "exit_at_once", "all_reduce", LOST),
    Fault(
        "calls torch's `broadcast`", "broadcast", "all_reduce", "The ranks were in different collectives", timeout=SHORT
    ),
    Fault("calls `ddpkit.broadcast`", "our_broadcast", "mean", "broadcast(src=0) on rank 1"),
    Fault("passes another size", "all_reduce_more", "all_reduce", "was lost"),  # gloo aborts one of the ranks
    Fault("passes another shape", "mean_of_another_shape", "mean", "MismatchError"),
    Fault(
        "takes longer than the time-out in `main_process_first`",
        *("slowly_first", "slowly_first", "", 0),
        timeout=SHORT,
        passes=True,
    ),
    Fault("finds the disk full", "save_too_much", "save_too_much", "No space left on device", 0),
    Fault("gets SIGINT alone", "interrupt", "all_reduce", NAMED + "KeyboardInterrupt"),
    Fault("gets Ctrl-C, like all others", "stay", "all_reduce", "KeyboardInterrupt", strike=SIGINT),
    Fault(
        "loses torchrun, like all others (SIGKILL)", "stay", "compute", ORPHANED, strike=SIGKILL, launchers=(TORCHRUN,)
    ),
    Fault("loses torchrun, like all others", "stay", "all_reduce", ORPHANED, strike=SIGKILL, launchers=(TORCHRUN,)),
    Fault("loses torchrun, like all others", "stay", "barrier", ORPHANED, strike=SIGKILL, launchers=(TORCHRUN,)),
    Fault("loses torchrun, like all others", "stay", "mean", ORPHANED, strike=SIGKILL, launchers=(TORCHRUN,)),
    Fault("is cut off the network", "stay", "compute", LOST, launchers=(PLAIN,), nodes=True, bound=15),
    Fault("is cut off the network", "train_on", "train", LOST, launchers=(PLAIN,), nodes=True, bound=15),
    Fault("is cut off the network", "stay", "all_reduce", LOST, nodes=True, bound=20, quick=False),
]


@dataclass(frozen=True, eq=False)
class Conflict:
    """Processes that do not fit together. Each must end within `bound` seconds of the last one's start, and say `said`.

    Their environments are given as rank, world size and more variables.
    """

    what: str
    said: str
    early: tuple[tuple, ...] = ()  # started at once
    late: tuple[tuple, ...] = ()  # started when those have joined, or half a second later if they cannot
    torchrun: dict[str, str] | None = None  # instead: torchrun in this environment
    nested: bool = False  # ... inside of torchrun
    stranger: bool = False  # whether something listens at the port
    timeout: float = LONG
    bound: float = 5.0
    passes: bool = False
    quick: bool = False  # most are tested in test_joining.py and test_runtime.py

    @property
    def limit(self) -> float:
        return self.bound + (self.timeout if self.timeout == SHORT else 0)


TWICE, RUN_A, RUN_B = "Two processes claim rank 1", {"DDPKIT_RUN_ID": "a"}, {"DDPKIT_RUN_ID": "b"}
NOT_ALONE = "torchrun was started by rank"
CONFLICTS = [
    Conflict("torchrun inside torchrun", NOT_ALONE, torchrun={}, nested=True),
    Conflict("torchrun where a platform started ranks", NOT_ALONE, torchrun={"RANK": "0", "WORLD_SIZE": "2"}),
    Conflict("one torchrun for each rank of a platform", "", torchrun={"RANK": "0", "WORLD_SIZE": "1"}, passes=True),
    Conflict("two processes are rank 1", TWICE, ((0, 3), (1, 3), (1, 3))),
    Conflict("a second rank 1 when all have joined", TWICE, ((0, 2), (1, 2)), ((1, 2),)),
    Conflict("a second rank 0 when all have joined", "is taken. Do two processes have", ((0, 2), (1, 2)), ((0, 2),)),
    Conflict("world sizes 2 and 3", "has WORLD_SIZE=3", ((0, 2), (1, 3))),
    Conflict("`RANK` is not below `WORLD_SIZE`", "RANK=2", ((0, 2), (2, 2))),
    Conflict("processes of two jobs at one port", "two jobs meet", ((0, 2, RUN_A), (1, 2, RUN_B))),
    Conflict("something else listens at the port", "{port}", ((0, 2), (1, 2)), stranger=True, timeout=SHORT),
    Conflict("nothing listens at the master's port", "Nobody answers at MASTER_ADDR", ((1, 2),), timeout=SHORT),
    Conflict(
        "the master's address belongs to no host",
        "Nobody answers at MASTER_ADDR",
        ((1, 2, {"MASTER_ADDR": "192.0.2.1"}),),
        timeout=SHORT,
        quick=True,
    ),
    Conflict(
        "the master's name does not resolve",
        "MASTER_ADDR='no.such.host.invalid' did not resolve",
        ((0, 2, {"MASTER_ADDR": "no.such.host.invalid"}), (1, 2, {"MASTER_ADDR": "no.such.host.invalid"})),
        timeout=SHORT,
        bound=10,
        quick=True,
    ),
]
