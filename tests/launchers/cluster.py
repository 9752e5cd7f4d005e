"""A Slurm of two virtual nodes: real daemons, which end with their nodes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nodes import Node, virtual_nodes
from processes import Ended, launch

CONF = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
KillWait=5
MessageTimeout=60
NodeName=node[1-2] CPUs=8 RealMemory=1000
PartitionName=main Nodes=node[1-2] Default=YES State=UP
"""  # config_overrides: nodes may claim more cores than the machine has; cred_expire: until a requeued job may start


class Slurm:
    """A running cluster, used from its login node."""

    def __init__(self, login: Node, conf: Path) -> None:
        self.login, self.env = login, {"SLURM_CONF": str(conf)}

    def run(self, *command: str) -> Ended:
        return launch(self.login.run(*command), env=self.env)[0]

    def submit(self, folder: Path, *lines: str) -> Ended:
        """Runs a batch script of these lines on both nodes, with four tasks."""
        script, output, end = folder / "job.sh", folder / "output", "the script has ended"
        script.write_text("\n".join(["#!/bin/bash", *lines, f"echo {end}"]))
        sent = self.run("sbatch", "--nodes=2", "--ntasks-per-node=2", f"--output={output}", str(script))
        assert sent.code == 0, sent
        stop = time.monotonic() + 600
        while time.monotonic() < stop:  # sbatch --wait looks every few seconds only
            if output.exists() and end in output.read_text():
                return Ended(0, output.read_text(), 0)
            time.sleep(0.1)
        return Ended(None, output.read_text() if output.exists() else "", 600)


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Starts munge, slurmctld and a slurmd on each node, and waits until the nodes are idle."""
    with tempfile.TemporaryDirectory() as name, virtual_nodes(2) as (login, *nodes):
        folder = Path(name)
        for part in ("state", "spool-node1", "spool-node2"):
            (folder / part).mkdir()
        conf, key = folder / "slurm.conf", folder / "munge.key"
        conf.write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # or slurmd looks for a mounted one
        key.write_bytes(b"a key for the tests, which no other machine ever sees")
        key.chmod(0o600)
        files = {"key-file": "munge.key", "socket": "munge.sock"}
        files |= {f"{part}-file": f"munge.{part}" for part in ("pid", "log", "seed")}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        daemons = [login.run("munged", "--foreground", "--force", *options)]
        daemons += [login.run("slurmctld", "-D", "-f", str(conf))]
        daemons += [node.run("slurmd", "-D", "-f", str(conf), "-N", node.name) for node in nodes]
        with open(folder / "daemons.log", "w") as log:
            crew = [subprocess.Popen(daemon, stdin=subprocess.DEVNULL, stdout=log, stderr=log) for daemon in daemons]
        try:
            slurm, stop = Slurm(login, conf), time.monotonic() + 120
            while slurm.run("sinfo", "--noheader", "--Node", "--format=%T").output.split() != ["idle"] * 2:
                assert time.monotonic() < stop, (folder / "daemons.log").read_text()
                time.sleep(0.2)
            yield slurm
        finally:
            for node in (login, *nodes):
                node.end()
            for process in crew:
                process.wait()
