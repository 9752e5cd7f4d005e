"""Two machines made of network namespaces: each its own address, host name and hosts file, and a cable to cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ADDRESS = "10.88.0.{}"


class Nodes:
    """Nodes `one` and `two`, joined by a switch in a third namespace; nothing of it touches the machine's network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder, f"ddpkit-{os.getpid()}-{folder.name}"
        self.names = [f"{self.hub}-{i}" for i in (1, 2)]
        hosts = "".join(f"{ADDRESS.format(i)} node{i}\n" for i in (1, 2))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (folder / "nsswitch.conf").write_text("hosts: files\n")  # torch looks addresses up; nobody would answer
        _ip(f"netns add {self.hub}")
        _ip(f"-n {self.hub} link add switch type bridge")
        _ip(f"-n {self.hub} link set switch up")
        for i, name in enumerate(self.names, 1):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {self.hub} link add port{i} type veth peer name eth0 netns {name}")
            _ip(f"-n {self.hub} link set port{i} master switch up")
            _ip(f"-n {name} addr add {ADDRESS.format(i)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")

    def prefix(self, node: int) -> list[str]:
        """What runs a command on a node, 1 or 2."""
        mounts = "".join(f"mount --bind {self.folder}/{name} /etc/{name}; " for name in ("hosts", "nsswitch.conf"))
        script = f'hostname node{node}; {mounts}exec "$@"'
        enter = f"nsenter --net=/run/netns/{self.names[node - 1]} unshare --mount --uts sh -ec"
        return [*enter.split(), script, "sh"]

    def cut(self) -> None:
        """Pulls the cable of node 2 out of the switch: no packet passes, and nobody is told."""
        _ip(f"-n {self.hub} link set port2 down")

    def close(self) -> None:
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def why_no_nodes() -> str:
    """Why there can be no such nodes here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool} command"
    probe = ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "name", "a", "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"the system forbids it: {done.stderr.strip()}" if done.returncode else ""


def why_no_small_disk() -> str:
    """Why no file system can be mounted here; "" if it can."""
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no tmpfs can be mounted: {done.stderr.strip()}" if done.returncode else ""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
