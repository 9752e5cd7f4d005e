"""One end of a link between two virtual nodes that is slow and loses packets; nodes.py starts both.

A TUN interface gives the packets of its node to this process, which hands them to the other end, or does not.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of <linux/if_tun.h>


def open_tun(address: str, peer: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"lossy", _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", address, "peer", peer, "dev", "lossy"], check=True)
    subprocess.run(["ip", "link", "set", "lossy", "up"], check=True)
    return tun


def give(tun: int, other_end: socket.socket, loss: float) -> None:
    while True:
        packet = os.read(tun, 65536)
        if random.random() >= loss:
            other_end.send(struct.pack("d", time.monotonic()) + packet)


def take(tun: int, other_end: socket.socket, delay: float) -> None:
    while True:
        data = other_end.recv(65536)
        (sent,) = struct.unpack_from("d", data)
        time.sleep(max(0.0, sent + delay - time.monotonic()))
        os.write(tun, data[8:])


if __name__ == "__main__":
    address, peer, descriptor, loss, delay = sys.argv[1:]
    other_end = socket.socket(fileno=int(descriptor))
    tun = open_tun(address, peer)
    print("ready", flush=True)
    threading.Thread(target=give, args=(tun, other_end, float(loss)), daemon=True).start()
    take(tun, other_end, float(delay))
