"""The doctor's checks of the network: the interface that a backend would use, the ports, and the master's name."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .report import Check, variables

_DEFAULT_PORT = 29500  # torch's
_SIOCGIFADDR = 0x8915


def interface() -> Check:
    """The interface that gloo would use between nodes, and whether another node can reach it."""
    here, host = interfaces(), socket.gethostname()
    start = time.monotonic()
    addresses = resolve(host)
    seconds = time.monotonic() - start
    if wrong := _misnamed(here):
        names = ", ".join(here)
        remedy = f"Name one that every node has, for example {_suggestion(here)}, or unset the variable."
        return Check("interface", "failed", f"{wrong}; the interfaces of {host} are {names}", remedy)
    carriers = {address: name for name, those in here.items() for address in those}
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    mine = [address for address in addresses if address in carriers or is_local(address)]
    chosen = chosen or (carriers.get(mine[0], "an address of this host") if mine else "")
    how = "" if os.environ.get("GLOO_SOCKET_IFNAME") else " between nodes, loopback within one"
    found = f"{host} resolves to {', '.join(addresses) or 'nothing'}; gloo uses {chosen or 'loopback'}{how}"
    named = variables("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    found += f" ({named})" if named else ""
    if not chosen or chosen in ("lo", "lo0") or _is_down(chosen):
        why = "is down" if chosen and _is_down(chosen) else "other nodes cannot reach it"
        remedy = f"For jobs on several nodes, on each: export GLOO_SOCKET_IFNAME={_suggestion(here)}"
        remedy += f" (or give {host} its own address in /etc/hosts)."
        return Check("interface", "warning", f"{found}, but {why}", remedy)
    if seconds > 2:
        remedy = "Each rank waits for that: add the host to /etc/hosts, or repair the name server."
        return Check("interface", "warning", f"{found}; the look-up took {seconds:.0f} s", remedy)
    return Check("interface", "ok", found)


def interfaces() -> dict[str, list[str]]:
    """The addresses of this host by interface, loopback last."""
    names = [name for _, name in socket.if_nameindex()]
    found: dict[str, list[str]] = {name: [] for name in sorted(names, key=lambda name: name in ("lo", "lo0"))}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def resolve(name: str) -> list[str]:
    """The addresses of a host, none if it is unknown."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):
        return []


def is_local(address: str) -> bool:
    """Whether this is an address of this host, found by binding a socket to it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as door:
        try:
            door.bind((address, 0))
        except OSError:
            return False
    return True


def master() -> Check:
    """Whether MASTER_ADDR, where it is set without a launcher, leads anywhere."""
    name = os.environ.get("MASTER_ADDR", "").strip()
    if not name:
        return Check("master", "skipped", "MASTER_ADDR is not set; torchrun, srun and hydra bring their own")
    if not (addresses := resolve(name)):
        remedy = "Set MASTER_ADDR to a name or address of rank 0's host that every node resolves, or unset it."
        return Check("master", "failed", f"MASTER_ADDR={name} does not resolve", remedy)
    found = f"MASTER_ADDR={name} resolves to {', '.join(addresses)}"
    if any(map(is_local, addresses)):
        return Check("master", "ok", f"{found}, this host")
    text = os.environ.get("MASTER_PORT", "").strip()
    port = int(text) if _is_port(text) else _DEFAULT_PORT
    if silence := _silence(name, port):
        remedy = f"Set MASTER_ADDR to rank 0's host, open port {port} in the firewalls between, or unset MASTER_ADDR."
        return Check("master", "failed", f"{found}, another host, which does not answer: {silence}", remedy)
    return Check("master", "ok", f"{found}, another host, which answers")


def ports(port: int | None, free_wanted: bool) -> Check:
    """Whether the master's port is free, where that is this process's concern, and safe from outgoing connections."""
    text = os.environ.get("MASTER_PORT", "").strip()
    if port is None and text and not _is_port(text):
        return Check("ports", "failed", f"MASTER_PORT={text} is no port", "Set it to a number from 1024 to 65535.")
    number = port or int(text or _DEFAULT_PORT)
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    whose = "MASTER_PORT" if text else "the port of this launch" if port else "torch's default port"
    found = f"{whose} {number}"
    if free_wanted and (reason := why_not_free(number)):
        remedy = (
            "End it, or give this job another port: export MASTER_PORT=... (torchrun: --master-port, --standalone)."
        )
        status = "failed" if text or port else "warning"
        return Check("ports", status, f"{found} is not free: {reason}", remedy)
    if not free_wanted:
        return Check("ports", "ok", f"{found}; whether it is free is the concern of rank 0")
    found += f" is free; outgoing connections take ports from {low} to {high}"
    details = ["under Slurm and MPI the port follows from the job and lies from 10000 to 29499"]
    for first, last, what in ((number, number, found), (10_000, 29_499, f"{found}, also those that follow from a job")):
        if first <= high and last >= low:
            remedy = f"Choose a port outside {low} to {high}: one of them may be taken at any moment."
            return Check("ports", "warning", what, remedy, details)
    return Check("ports", "ok", found, "", details)


def why_not_free(port: int) -> str:
    """Why nobody can listen at this port, "" if one can."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:  # without listening: other ranks may already be knocking
                door.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return f"{holder(port)} listens there"
                if error.errno == errno.EACCES:
                    return "ports below 1024 are for root"
    return ""


def holder(port: int) -> str:
    """The process that listens at a port, as far as `/proc` tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as file:
            rows = [line.split() for line in file][1:]
            inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes:
                command = (
                    Path("/proc", link.parts[2], "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                return f"process {link.parts[2]} ({command.strip()[:60]})"
    return "a process of another user"


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def _silence(host: str, port: int) -> str:
    """Why nothing comes back from a host, "" if something does: a refusal will do, for rank 0 may not run yet."""
    try:
        socket.create_connection((host, port), timeout=3).close()
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return error.strerror or "no answer within 3 s"
    return ""


def _misnamed(here: Iterable[str]) -> str:
    gloo, nccl = (os.environ.get(f"{backend}_SOCKET_IFNAME", "") for backend in ("GLOO", "NCCL"))
    if missing := [name for name in gloo.split(",") if name and name not in here]:
        return f"GLOO_SOCKET_IFNAME={gloo}, but there is no {', '.join(missing)}"
    exact, excluded, words = "=" in nccl[:2], nccl.startswith("^"), nccl.lstrip("^=").split(",")
    fits = [name for name in here if any(name == w if exact else name.startswith(w) for w in words) != excluded]
    return f"NCCL_SOCKET_IFNAME={nccl} fits no interface" if nccl and not fits else ""


def _suggestion(here: dict[str, list[str]]) -> str:
    good = [name for name, those in here.items() if those and name not in ("lo", "lo0") and not _is_down(name)]
    return good[0] if good else "<interface>"


def _is_down(name: str) -> bool:
    state = Path("/sys/class/net", name, "operstate")
    return state.is_file() and state.read_text().strip() in ("down", "lowerlayerdown", "notpresent")
