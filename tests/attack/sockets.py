"""The sockets on which the processes of a job listen, as the kernel lists them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

TCP_LISTENS, UNIX_LISTENS = "0A", 0x10000


class Place(NamedTuple):
    """An endpoint: a path, or an address and a port."""

    address: str
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether the address leads only to this machine."""
        if not self.port:
            return False
        address = IPv6Address(self.address) if ":" in self.address else IPv4Address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def connect(self) -> socket.socket:
        """Connect to the endpoint."""
        if self.port:
            return socket.create_connection((self.address, self.port), 2)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(2)
        try:
            sock.connect(self.address)
        except OSError:
            sock.close()
            raise
        return sock


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    pids, new = set[int](), {pid}
    while new:
        pids |= new
        new = {child for parent in new for child in _children(parent)} - pids
    return pids


def _children(pid: int) -> set[int]:
    children = set[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children |= {int(child) for child in (task / "children").read_text().split()}
    return children


def _inodes(pids: Iterable[int]) -> set[str]:
    paths = list[str]()
    for pid in pids:
        with suppress(OSError):
            paths += [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    inodes = set()
    for path in paths:
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(path).removeprefix("socket:[").rstrip("]"))
    return inodes


def _address(text: str) -> Place:
    """Parse an address of /proc/net/tcp: words in the byte order of this machine."""
    host, _, port = text.partition(":")
    words = struct.pack(f"={len(host) // 8}I", *(_word(host, at) for at in range(0, len(host), 8)))
    kind = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    return Place(socket.inet_ntop(kind, words), int(port, 16))


def _word(host: str, at: int) -> int:
    return int(host[at : at + 8], 16)


def listening(pid: int) -> Iterator[Place]:
    """Every endpoint on which a process or a descendant listens now."""
    inodes = _inodes(family(pid))
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == TCP_LISTENS and words[9] in inodes:
                yield _address(words[1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & UNIX_LISTENS and words[6] in inodes:
            yield Place(words[7] if len(words) > 7 else "")
