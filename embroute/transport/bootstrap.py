"""Connections between ranks: each listener publishes its addresses in the job's store.

A listener accepts callers that know the job's secret (handshake.py). Ranks of one host meet at a
socket in a private folder, which takes half of the time a network's protocol does; the others try
each address of the listener, since what a machine calls itself is not always what others reach it
by.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from embroute.transport.handshake import (
    REPLY_BYTES,
    CallerHandshake,
    HandshakeError,
    ListenerHandshake,
)
from embroute.transport.interface import LostPeerError
from embroute.transport.job_store import JobStore, job_secret, on_one_machine, scratch_folder
from embroute.transport.sockets import SocketChannel

INTERFACE = "GLOO_SOCKET_IFNAME"  # as for torch's own connections
ACCEPTED = b"\x01"
TRY_S = 5.0  # for one address, and for a caller to prove itself
VISITORS = 256  # callers that have not proved themselves; the oldest makes room
LOCAL_BYTES = 1 << 20  # on their way within a host; more than the system's habit
_SIOCGIFADDR = 0x8915
Address = str | tuple[str, int]  # a path, or a place in a network


def _interface_address(name: str) -> str:
    """The address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            packed = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            raise ValueError(
                f"{INTERFACE}={name}: no such interface with an IPv4 address ({error.strerror})"
            ) from None
    return socket.inet_ntoa(packed[20:24])


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    family, kind, _, _, goal = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(goal)
        return str(asked.getsockname()[0])


def local_addresses() -> list[str]:
    """Addresses by which other machines may reach this rank, the likeliest first."""
    if on_one_machine():
        return []
    chosen = os.environ.get(INTERFACE, "").split(",")[0]
    if chosen:
        return [_interface_address(chosen)]
    candidates = []
    with suppress(OSError):
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        candidates.append(_address_towards(*master))
    with suppress(OSError):
        candidates.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError):
        candidates.append(_address_towards("192.0.2.1", 9))  # what leads out of this network
    outside = [address for address in candidates if not ip_address(address).is_loopback]
    return list(dict.fromkeys([*outside, "127.0.0.1"]))


def host_id() -> str:
    """The same text in two processes that can meet at a path: one kernel, one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


@dataclass
class _Visitor:
    """A caller that has not proved itself yet."""

    sock: socket.socket
    welcome: ListenerHandshake
    deadline: float

    def hear(self) -> tuple[str, str] | None:
        """Take in what has arrived, answer it; the caller's claim once it is proved."""
        data = self.sock.recv(self.welcome.wanted)
        if not data:
            raise HandshakeError(None, "the caller has gone")
        answer = self.welcome.receive(data)
        if answer:
            self.sock.sendall(answer)
        return self.welcome.claim


class Listener:
    """A rank that others connect to. Every address gets a socket of its own, never all of them."""

    def __init__(self, store: JobStore, name: str) -> None:
        self._secret, self._identity = job_secret(), f"{name}-{secrets.token_hex(8)}"
        self._stack = ExitStack()
        path = str(self._stack.enter_context(scratch_folder("rank")) / "socket")
        local = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(path)
        local.listen(VISITORS)
        self._servers, sharding = [local], []
        for address in local_addresses():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family, backlog=VISITORS)
            self._servers.append(self._stack.enter_context(server))
            sharding.append(f"{address}|{server.getsockname()[1]}")
        for server in self._servers:
            server.setblocking(False)
        store.set(f"listens/{name}", " ".join([self._identity, host_id(), path, *sharding]))

    def accept(
        self, expected: Iterable[tuple[str, str]], deadline: float
    ) -> dict[tuple[str, str], socket.socket]:
        """The sockets of every kind and name that is expected."""
        missing, accepted = set(expected), dict[tuple[str, str], socket.socket]()
        with _Visitors(self._secret, self._identity, self._servers) as visitors:
            while missing:
                if time.monotonic() > deadline:
                    kind, name = min(missing)
                    raise LostPeerError(f"lost {name}: it did not connect for {kind}")
                for claim, sock in visitors.proved(min(deadline, time.monotonic() + TRY_S)):
                    accepted |= {claim: sock} if _answered(sock, claim in missing) else {}
                missing -= accepted.keys()
        return accepted

    def close(self) -> None:
        """Accept nobody else."""
        self._stack.close()


def _answered(sock: socket.socket, expected: bool) -> bool:
    """Tell a caller that it is expected, or close its connection; whether it is in."""
    with suppress(OSError):
        if expected and sock.send(ACCEPTED) == len(ACCEPTED):
            return True
    sock.close()
    return False


class _Visitors:
    """All callers that have not proved themselves, heard side by side: none keeps others out."""

    def __init__(self, secret: bytes, identity: str, servers: Sequence[socket.socket]) -> None:
        self._secret, self._identity = secret, identity
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, _Visitor] = {}  # the oldest first
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Visitors:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._waiting):
            self._drop(sock)
        self._selector.close()

    def proved(self, until: float) -> list[tuple[tuple[str, str], socket.socket]]:
        """Callers that have proved themselves since; waits for something to happen."""
        accepted = []
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock not in self._waiting:
                self._admit(sock)
                continue
            try:
                claim = self._waiting[sock].hear()
            except BlockingIOError:
                continue
            except OSError:
                self._drop(sock)
                continue
            if claim is not None:
                self._forget(sock)
                accepted.append((claim, sock))
        self._drop_slow()
        return accepted

    def _admit(self, server: socket.socket) -> None:
        try:
            sock, _ = server.accept()
        except OSError:
            return  # the caller has gone, or no file is left for it
        sock.setblocking(False)
        welcome = ListenerHandshake(self._secret, self._identity)
        self._waiting[sock] = _Visitor(sock, welcome, time.monotonic() + TRY_S)
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._waiting) > VISITORS:
            self._drop(next(iter(self._waiting)))

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for sock in [sock for sock, one in self._waiting.items() if one.deadline < now]:
            self._drop(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._waiting[sock]

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._waiting:
            self._forget(sock)
            sock.close()


def dial(
    store: JobStore, listener: str, kinds: Sequence[str], name: str, timeout_s: float
) -> dict[str, socket.socket]:
    """Connect to a rank that listens, once for each kind of message."""
    identity, goals = _published(store, listener)
    secret, failed, sockets = job_secret(), [], dict[str, socket.socket]()
    for goal in goals:
        try:
            for kind in kinds[len(sockets) :]:
                sockets[kind] = _call(
                    goal, CallerHandshake(secret, identity, kind, name), timeout_s
                )
            return sockets
        except OSError as error:
            place = goal if isinstance(goal, str) else goal[0]
            failed.append(f"{place} ({error.strerror or error})")
    for sock in sockets.values():
        sock.close()
    raise LostPeerError(
        f"lost {listener}: cannot connect to {', '.join(failed) or 'any address'}; {INTERFACE} "
        f"names the network interface to use, on every host"
    )


def _published(store: JobStore, listener: str) -> tuple[str, list[Address]]:
    """A listener's identity and addresses; its path only where this process can see it."""
    try:
        text = store.get(f"listens/{listener}").decode()
    except RuntimeError:  # the store's time-out
        raise LostPeerError(
            f"lost {listener}: it does not listen; all ranks must exchange by the same means"
        ) from None
    except UnicodeDecodeError:
        raise LostPeerError(f"lost {listener}: the job's store was written to by others") from None
    try:
        identity, host, path, *sharding = text.split()
        pairs = [place.split("|") for place in sharding]
        network: list[Address] = [(address, int(port)) for address, port in pairs]
    except ValueError:
        raise LostPeerError(f"lost {listener}: the job's store was written to by others") from None
    return identity, [path, *network] if host == host_id() else network


def _connected(goal: Address) -> socket.socket:
    if not isinstance(goal, str):
        return socket.create_connection(goal, TRY_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(goal)
    except OSError:
        sock.close()
        raise
    return sock


def _call(goal: Address, caller: CallerHandshake, timeout_s: float) -> socket.socket:
    sock = _connected(goal)
    sock.settimeout(timeout_s)  # the other end may be busy with its own calls
    try:
        sock.sendall(caller.hello)
        sock.sendall(caller.answer(sock.recv(REPLY_BYTES, socket.MSG_WAITALL)))
        if sock.recv(len(ACCEPTED)) != ACCEPTED:
            raise HandshakeError(None, "it does not expect this rank")
    except OSError:
        sock.close()
        raise
    return sock


Links = dict[str, list[tuple[str, str]]]  # by kind of message, who listens to whom


def open_channels(
    store: JobStore, name: str, links: Links, timeout_s: float
) -> dict[str, SocketChannel]:
    """This rank's channel of every kind. Nobody may listen to someone who waits for it."""
    accepts = [(kind, b) for kind, pairs in links.items() for a, b in pairs if a == name]
    calls = [(a, kind) for kind, pairs in links.items() for a, b in pairs if b == name]
    sockets: dict[str, dict[str, socket.socket]] = {kind: {} for kind in links}
    with ExitStack() as stack:
        listener = stack.enter_context(closing(Listener(store, name))) if accepts else None
        for other in dict.fromkeys(a for a, _ in calls):
            kinds = [kind for a, kind in calls if a == other]
            for kind, sock in dial(store, other, kinds, name, timeout_s).items():
                sockets[kind][other] = sock
        if listener is not None:
            deadline = time.monotonic() + timeout_s
            for (kind, other), sock in listener.accept(accepts, deadline).items():
                sockets[kind][other] = sock
    for sock in (sock for by_name in sockets.values() for sock in by_name.values()):
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)  # waiting is the channel's business
    return {kind: SocketChannel(by_name) for kind, by_name in sockets.items()}


MEMORY_SHARED, MEMORY_APART = b"\x01", b"\x00"  # whether a file of memory comes with it


def receive_memory(near: SocketChannel, peer: str, timeout_s: float) -> int | None:
    """The file of memory that a peer of the same host shares; None if it has none to share."""
    sock = near.sockets[near.names.index(peer)]
    sock.settimeout(timeout_s)
    try:
        said, files, _, _ = socket.recv_fds(sock, len(MEMORY_SHARED), 1)
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None
    sock.setblocking(False)  # waiting is the channel's business
    if not said:
        raise LostPeerError(f"lost {peer}: connection closed by the other end")
    return files[0] if files else None
