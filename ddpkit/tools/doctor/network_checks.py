"""Check the network: the interface that a backend would use, the ports, and the master's name."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...join.sockets import LOOPBACKS
from .machine_checks import set_variables
from .report import Check

_DEFAULT_PORT = 29500  # torch's
_SIOCGIFADDR = 0x8915
_LISTENS = "0A"  # in /proc/net/tcp


def interface() -> Check:
    """Check the interface that gloo would use between nodes: can another node reach it?"""
    here = interfaces()
    host = socket.gethostname()
    addresses = resolve(host)
    wrong = _explain_misnamed(here)
    if wrong:
        found = f"{wrong}; the interfaces of {host} are {', '.join(here)}"
        example = f"Name one that every node has, for example {_suggestion(here)}"
        return Check("interface", "failed", found, f"{example}, or unset the variable.")
    chosen = _chosen_interface(here, addresses)
    found = _describe_choice(host, addresses, chosen)
    problem = ""
    if not chosen or chosen in LOOPBACKS:
        problem = "other nodes cannot reach it"
    if chosen and _is_down(chosen):
        problem = "is down"
    if problem:
        variable = f"GLOO_SOCKET_IFNAME={_suggestion(here)}"
        advice = f"For jobs on several nodes, on each: export {variable}"
        advice += f" (or give {host} its own address in /etc/hosts)."
        advice += f" {_torchrun_advice(host)}"
        return Check("interface", "warning", f"{found}, but {problem}", advice)
    return Check("interface", "ok", found)


def _chosen_interface(here: dict[str, list[str]], addresses: list[str]) -> str:
    """Name the interface that gloo uses between nodes, "" for loopback."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return named
    for address in addresses:
        for name, own in here.items():
            if address in own:
                return name
        if is_local(address):
            return "an address of this host"
    return ""


def _describe_choice(host: str, addresses: list[str], chosen: str) -> str:
    text = f"{host} resolves to {', '.join(addresses) or 'nothing'}; gloo uses "
    text += chosen or "loopback"
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        text += " between nodes, loopback within one"
    named = set_variables("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if named:
        text += f" ({named})"
    return text


def interfaces() -> dict[str, list[str]]:
    """List the addresses of this host by interface, loopback last."""
    names = [name for _, name in socket.if_nameindex()]
    found: dict[str, list[str]] = {name: [] for name in sorted(names, key=_is_loopback)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            found.setdefault(name, []).append(str(address))
    return found


def _is_loopback(name: str) -> bool:
    return name in LOOPBACKS


def resolve(name: str) -> list[str]:
    """Look up the addresses of a host, none if it is unknown."""
    try:
        infos = socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def is_local(address: str) -> bool:
    """Return whether a socket can be bound to this address, which is then one of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def master() -> Check:
    """Check that MASTER_ADDR leads somewhere, where it is set without a launcher."""
    name = os.environ.get("MASTER_ADDR", "").strip()
    if not name:
        found = "MASTER_ADDR is not set; torchrun, srun and hydra bring their own"
        return Check("master", "skipped", found)
    addresses = resolve(name)
    if not addresses:
        remedy = "Set MASTER_ADDR to a name or address of rank 0's host that every node resolves, "
        found = f"MASTER_ADDR={name} does not resolve"
        return Check("master", "failed", found, f"{remedy}or unset it. {_torchrun_advice(name)}")
    found = f"MASTER_ADDR={name} resolves to {', '.join(addresses)}"
    if any(map(is_local, addresses)):
        return Check("master", "ok", f"{found}, this host")
    text = os.environ.get("MASTER_PORT", "").strip()
    port = int(text) if _is_port(text) else _DEFAULT_PORT
    silence = _explain_silence(name, port)
    if silence:
        remedy = f"Set MASTER_ADDR to rank 0's host, open port {port} in the firewalls between, "
        found += f", another host, which does not answer: {silence}"
        return Check("master", "failed", found, f"{remedy}or unset MASTER_ADDR.")
    return Check("master", "ok", f"{found}, another host, which answers")


def _torchrun_advice(host: str) -> str:
    return f"Where other nodes cannot resolve {host}, torchrun hangs: give it --local-addr=<address of its node>."


def ports(port: int | None, checks_if_free: bool) -> Check:
    """Check that the master's port is free, and safe from outgoing connections.

    Args:
        port: The port of the launch, if there is one.
        checks_if_free: True if it must be free, because rank 0 is about to listen here.
    """
    text = os.environ.get("MASTER_PORT", "").strip()
    if port is None and text and not _is_port(text):
        remedy = "Set it to a number from 1 to 65535."
        return Check("ports", "failed", f"MASTER_PORT={text} is no port", remedy)
    number = port or int(text or _DEFAULT_PORT)
    found = f"torch's default port {number}"
    if text:
        found = f"MASTER_PORT {number}"
    elif port:
        found = f"the port of this launch {number}"
    if not checks_if_free:
        return Check("ports", "ok", f"{found}; only rank 0 needs it to be free")
    reason = _explain_not_free(number)
    if reason:
        remedy = "End it, or give this job another port: export MASTER_PORT=... "
        remedy += "(torchrun: --master-port, --standalone)."
        is_meant = bool(text or port)
        status = "failed" if is_meant else "warning"
        return Check("ports", status, f"{found} is not free: {reason}", remedy)
    return Check("ports", "ok", f"{found} is free")


def _explain_not_free(port: int) -> str:
    """Say why nobody can listen at this port, "" if one can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:  # without listening: other ranks may already try to connect
                trial.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return f"{_name_holder(port)} listens there"
                if error.errno == errno.EACCES:
                    return "ports below 1024 are for root"
    return ""


def _name_holder(port: int) -> str:
    """Name the process that listens at a port, as far as `/proc` tells."""
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file) in links:
                pid = file.parts[2]
                return f"process {pid} ({_command_of(pid)})"
    return "a process of another user"


def _listening_inodes(port: int) -> set[str]:
    """Find the sockets that listen at a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                _, address, _, state, *rest = line.split()
                if state == _LISTENS and int(address.rpartition(":")[2], 16) == port:
                    inodes.add(rest[5])
    return inodes


def _command_of(pid: str) -> str:
    command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
    return command.decode(errors="replace").strip()[:60]


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def _explain_silence(host: str, port: int) -> str:
    """Say why nothing comes back from a host, "" if something does.

    A refusal will do, for rank 0 may not run yet.
    """
    try:
        socket.create_connection((host, port), timeout=3).close()
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return error.strerror or "no answer within 3 s"
    return ""


def _explain_misnamed(here: Iterable[str]) -> str:
    """Say which variable names no interface of this host, "" if none does."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in gloo.split(",") if name and name not in here]
    if missing:
        return f"GLOO_SOCKET_IFNAME={gloo}, but there is no {', '.join(missing)}"
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not any(_fits_nccl(name, nccl) for name in here):
        return f"NCCL_SOCKET_IFNAME={nccl} fits no interface"
    return ""


def _fits_nccl(name: str, pattern: str) -> bool:
    """Return whether NCCL would use an interface: "=a" is exact, "^a" excludes, "a" begins with."""
    is_exact = "=" in pattern[:2]
    words = pattern.lstrip("^=").split(",")
    if is_exact:
        is_named = name in words
    else:
        is_named = name.startswith(tuple(words))
    is_excluded = pattern.startswith("^")
    return is_named != is_excluded


def _suggestion(here: dict[str, list[str]]) -> str:
    """Name an interface that other nodes may reach."""
    for name, addresses in here.items():
        if addresses and not _is_loopback(name) and not _is_down(name):
            return name
    return "<interface>"


def _is_down(name: str) -> bool:
    state = Path("/sys/class/net", name, "operstate")
    if not state.is_file():
        return False
    return state.read_text().strip() in ("down", "lowerlayerdown", "notpresent")
