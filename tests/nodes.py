"""Virtual nodes on one machine: each has its own network, host name, /etc/hosts and process numbers.

A node is a set of Linux namespaces that lasts as long as its first process, and that ends when its standard input does:
however the tests end, the kernel then ends the node's other processes and removes its interfaces and mounts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_NAMES = 'for file in hosts nsswitch.conf resolv.conf; do mount --bind "$1/$file" "/etc/$file"; done'
_BEGIN = f"""
set -e
{_NAMES}
hostname "$2"
ip link set lo up
echo ready
exec cat
"""
_PACKAGES = {
    "ip": "iproute2",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}


def needs(*programs: str, nodes: bool = False) -> pytest.MarkDecorator:
    """Skips a test where these programs, or the rights that virtual nodes take, are missing."""
    reason = lacks(*programs, nodes=nodes)
    return pytest.mark.skipif(bool(reason), reason=reason)


def lacks(*programs: str, nodes: bool = False) -> str:
    """Which of these are missing, and what to do; "" if none is."""
    missing = [program for program in (*programs, *["ip"] * nodes) if not shutil.which(program)]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install {' '.join(_PACKAGES[program] for program in missing)}"
    if nodes and not may_make_nodes():
        return "needs virtual nodes: run as root, where namespaces may be made"
    return ""


def may_make_nodes() -> bool:
    try:
        return os.geteuid() == 0 and subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


class Node:
    """One virtual node; a context in which it exists."""

    def __init__(self, name: str, address: str, etc: str) -> None:
        self.name, self.address, self._etc = name, address, etc
        command = [*_UNSHARE, "sh", "-c", _BEGIN, "sh", etc, name]
        self._first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._first.stdout and self._first.stdout.readline() == b"ready\n", f"{name} does not come up"
        self.pid = self._first.pid

    def run(self, *command: str) -> list[str]:
        """The command that runs this one on the node, in the root folder."""
        return self._enter({"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}, *command)

    def lead(self, *command: str) -> list[str]:
        """The same for a command that starts others on other nodes: to enter them it must see the whole machine."""
        names = ["unshare", "--mount", "sh", "-c", f'{_NAMES}; shift; exec "$@"', "sh", self._etc]
        return self._enter({"net": "net", "uts": "uts"}, *names, *command)

    def _enter(self, namespaces: dict[str, str], *command: str) -> list[str]:
        return ["nsenter", *(f"--{option}=/proc/{self.pid}/ns/{name}" for option, name in namespaces.items()), *command]

    def end(self) -> None:
        """Ends the node as a power failure would: its processes die and its network says no more."""
        self._first.kill()
        self._first.communicate()


def remote_shell(nodes: list[Node], folder: Path) -> str:
    """A program that runs a command on one of these nodes as ssh does: options, a node's name, words for a shell."""
    script = folder / "remote-shell"
    cases = [f'{node.name}) exec {shlex.join(node.run("sh", "-c"))} "$*";;' for node in nodes]
    skip = 'while [ "${1#-}" != "$1" ]; do shift; done; name=$1; shift'
    script.write_text("\n".join(["#!/bin/sh", skip, "case $name in", *cases, "esac", ""]))
    script.chmod(0o700)
    return str(script)


@contextlib.contextmanager
def virtual_nodes(count: int, name: str = "node{}") -> Iterator[list[Node]]:
    """A host named "login" and `count` nodes, "node1", "node2" or as `name` says, in a network of their own."""
    names = ["login", *(name.format(i + 1) for i in range(count))]
    with tempfile.TemporaryDirectory() as etc, contextlib.ExitStack() as stack:
        addresses = [f"10.77.0.{i + 1}" for i in range(len(names))]
        hosts = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
        Path(etc, "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        # without a name server: with one, the look-up of each connection's other end would wait for 10 s
        Path(etc, "nsswitch.conf").write_text(
            re.sub("(?m)^hosts:.*$", "hosts: files", Path("/etc/nsswitch.conf").read_text())
        )
        Path(etc, "resolv.conf").touch()
        nodes = []
        for name, address in zip(names, addresses, strict=True):
            nodes.append(Node(name, address, etc))
            stack.callback(nodes[-1].end)
        login = nodes[0]
        _ip(login, "link add bridge type bridge")
        for i, node in enumerate(nodes):
            _ip(login, f"link add port{i} type veth peer name eth0 netns {node.pid}")
            _ip(login, f"link set port{i} master bridge up")
            _ip(node, f"address add {node.address}/24 dev eth0")
            _ip(node, "link set eth0 up")
        _ip(login, "link set bridge up")
        yield nodes


def cut(nodes: list[Node], number: int) -> None:
    """Pulls the cable of node `number` out of the bridge: no packet passes, and nobody is told."""
    _ip(nodes[0], f"link set port{number} down")


@contextlib.contextmanager
def lossy_link(one: Node, other: Node, loss: float, delay: float) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """A link of its own between two nodes that loses this share of the packets and takes so many seconds each way.

    Its two addresses, and a function that cuts it.
    """
    addresses = "10.78.0.1", "10.78.0.2"
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ends: list[subprocess.Popen[bytes]] = []

    def cut_it() -> None:
        for end in ends:
            end.send_signal(signal.SIGSTOP)

    try:
        for node, sock, (mine, peer) in zip((one, other), sockets, (addresses, addresses[::-1]), strict=True):
            script = str(Path(__file__).with_name("lossy_link.py"))
            enter = ["nsenter", f"--net=/proc/{node.pid}/ns/net", sys.executable, script]
            words = [mine, peer, f"{sock.fileno()}", f"{loss}", f"{delay}"]
            end = subprocess.Popen([*enter, *words], stdout=subprocess.PIPE, pass_fds=[sock.fileno()])
            ends.append(end)
            assert end.stdout and end.stdout.readline() == b"ready\n"
        yield *addresses, cut_it
    finally:
        for end in ends:
            end.kill()
            end.communicate()
        for sock in sockets:
            sock.close()


def _ip(node: Node, command: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{node.pid}/ns/net", "ip", *command.split()], check=True)
