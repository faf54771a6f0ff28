"""Connections between ranks: each listener publishes its addresses in the job's store.

A listener accepts callers that know the job's secret (handshake.py). Ranks of one host connect by a
Unix socket in a private folder, which takes half of TCP's time. Other ranks try every address of
the listener: the address by which a machine knows itself may not be the one that others can reach.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from embroute.config.scratch import scratch_folder
from embroute.transport import handshake
from embroute.transport.handshake import CallerHandshake, HandshakeError, ListenerHandshake
from embroute.transport.interface import LostPeerError
from embroute.transport.job_store import JobStore, job_secret, on_one_machine
from embroute.transport.sockets import SocketChannel

INTERFACE = "GLOO_SOCKET_IFNAME"  # as for torch's own connections
ACCEPTED = b"\x01"
ATTEMPT_S = 5.0  # to try one address, and for a caller to prove itself
MAX_UNPROVEN = 256  # callers that have not proved themselves; a newer one replaces the oldest
LOCAL_BUFFER_BYTES = 1 << 20  # of a Unix socket: larger than Linux's default
_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface
Address = str | tuple[str, int]  # a path, or an IP address and a port


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            packed = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            raise ValueError(
                f"{INTERFACE}={name}: no such interface with an IPv4 address ({error.strerror})"
            ) from None
    return socket.inet_ntoa(packed[20:24])  # sin_addr of the struct ifreq


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the route to another; connecting a UDP socket sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


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
        candidates.append(_address_towards("192.0.2.1", 9))  # by the route to the internet
    outside = [address for address in candidates if not ip_address(address).is_loopback]
    return list(dict.fromkeys([*outside, "127.0.0.1"]))


def host_id() -> str:
    """Equal in two processes that can connect by a path: same kernel, network and user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        kernel = f"{uuid.getnode():x}"
    return f"{kernel}/{os.getuid()}"


def _signature(secret: bytes, listener: str, text: str) -> str:
    """Proves that a rank of the job wrote a listener's addresses.

    Without it, a stranger who can write to the store could publish an address of its own under
    the listener's identity, and relay the handshake between the two ranks.
    """
    return hmac.digest(secret, f"listens {listener} {text}".encode(), "sha256").hex()


@dataclass
class _UnprovenCaller:
    """A caller that has not proved itself yet."""

    sock: socket.socket
    handshake: ListenerHandshake
    deadline: float

    def receive(self) -> tuple[str, str] | None:
        """Read and answer what has arrived; returns the caller's claim once it is proved."""
        data = self.sock.recv(self.handshake.missing_bytes)
        if not data:
            raise HandshakeError(None, "the caller has gone")
        answer = self.handshake.receive(data)
        if answer:
            self.sock.sendall(answer)
        return self.handshake.claim


class Listener:
    """A rank that others connect to. It listens on chosen addresses, never on all interfaces."""

    def __init__(self, store: JobStore, name: str) -> None:
        self._secret, self._identity = job_secret(), f"{name}-{secrets.token_hex(8)}"
        self._stack = ExitStack()
        path = str(self._stack.enter_context(scratch_folder("rank")) / "socket")
        local = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(path)
        local.listen(MAX_UNPROVEN)
        self._servers, endpoints = [local], list[str]()
        for address in local_addresses():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family, backlog=MAX_UNPROVEN)
            self._servers.append(self._stack.enter_context(server))
            endpoints.append(f"{address}|{server.getsockname()[1]}")
        for server in self._servers:
            server.setblocking(False)
        text = " ".join([self._identity, host_id(), path, *endpoints])
        store.set(f"listens/{name}", f"{_signature(self._secret, name, text)} {text}")

    def accept(
        self, expected: Iterable[tuple[str, str]], deadline: float
    ) -> dict[tuple[str, str], socket.socket]:
        """The sockets of all expected callers, by kind of channel and name."""
        missing, accepted = set(expected), dict[tuple[str, str], socket.socket]()
        with _UnprovenCallers(self._secret, self._identity, self._servers) as callers:
            while missing:
                if time.monotonic() > deadline:
                    kind, name = min(missing)
                    raise LostPeerError(f"lost {name}: it did not connect for {kind}")
                for claim, sock in callers.proved(min(deadline, time.monotonic() + ATTEMPT_S)):
                    accepted |= {claim: sock} if _confirm(sock, claim in missing) else {}
                missing -= accepted.keys()
        return accepted

    def close(self) -> None:
        """Stop listening."""
        self._stack.close()


def _confirm(sock: socket.socket, expected: bool) -> bool:
    """Tell an expected caller that it is accepted, close any other; returns if it is accepted."""
    with suppress(OSError):
        if expected and sock.send(ACCEPTED) == len(ACCEPTED):
            return True
    sock.close()
    return False


class _UnprovenCallers:
    """All callers that have not proved themselves, served side by side: none can block others."""

    def __init__(self, secret: bytes, identity: str, servers: Sequence[socket.socket]) -> None:
        self._secret, self._identity = secret, identity
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, _UnprovenCaller] = {}  # oldest first
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._waiting):
            self._drop(sock)
        self._selector.close()

    def proved(self, until: float) -> list[tuple[tuple[str, str], socket.socket]]:
        """Wait for something to arrive; returns callers that have now proved themselves."""
        accepted = []
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock not in self._waiting:
                self._admit(sock)
                continue
            try:
                claim = self._waiting[sock].receive()
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
            return  # the caller has gone, or this process has no file descriptor left
        sock.setblocking(False)
        listener = ListenerHandshake(self._secret, self._identity)
        self._waiting[sock] = _UnprovenCaller(sock, listener, time.monotonic() + ATTEMPT_S)
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._waiting) > MAX_UNPROVEN:
            self._drop(next(iter(self._waiting)))

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for sock in [sock for sock, caller in self._waiting.items() if caller.deadline < now]:
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
    """Connect to a listening rank, once for each kind of channel.

    Strangers may fill the listener's queue of connections before it begins to accept them. So
    addresses that give no answer are tried in turn until the deadline.
    """
    secret, sockets = job_secret(), dict[str, socket.socket]()
    identity, addresses = _published(store, listener, secret)
    deadline = time.monotonic() + timeout_s
    while True:
        failed, unanswered = [], False
        for address in addresses:
            try:
                callers = [CallerHandshake(secret, identity, kind, name) for kind in kinds]
                _call_all(address, callers, sockets, timeout_s)
                return sockets
            except OSError as error:
                host = address if isinstance(address, str) else address[0]
                failed.append(f"{host} ({error.strerror or error})")
                unanswered = unanswered or isinstance(error, TimeoutError)
        if not unanswered or time.monotonic() > deadline:
            break
    for sock in sockets.values():
        sock.close()
    raise LostPeerError(
        f"lost {listener}: cannot connect to {', '.join(failed) or 'any address'}; {INTERFACE} "
        f"names the network interface to use, on every host"
    )


def _call_all(
    address: Address,
    callers: Sequence[CallerHandshake],
    sockets: dict[str, socket.socket],
    timeout_s: float,
) -> None:
    """Add a socket for each kind of channel that has none yet."""
    for caller in callers[len(sockets) :]:
        sockets[caller.kind] = _call(_connected(address), caller, timeout_s)


def _published(store: JobStore, listener: str, secret: bytes) -> tuple[str, list[Address]]:
    """A listener's identity and addresses; its path only where this process can see it."""
    try:
        published = store.get(f"listens/{listener}").decode(errors="replace")
    except RuntimeError:  # the store's time-out
        raise LostPeerError(
            f"lost {listener}: it does not listen; all ranks must exchange by the same means"
        ) from None
    signature, _, text = published.partition(" ")
    expected = _signature(secret, listener, text)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise LostPeerError(
            f"lost {listener}: its address in the job's store is not signed with the job's secret; "
            f"a stranger wrote it, or the ranks have different secrets"
        )
    identity, host, path, *endpoints = text.split()
    pairs = [endpoint.split("|") for endpoint in endpoints]
    network: list[Address] = [(address, int(port)) for address, port in pairs]
    return identity, [path, *network] if host == host_id() else network


def _connected(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, ATTEMPT_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _call(sock: socket.socket, caller: CallerHandshake, timeout_s: float) -> socket.socket:
    sock.settimeout(timeout_s)  # the other end may be busy with its own calls
    try:
        sock.sendall(caller.hello)
        sock.sendall(caller.answer(sock.recv(handshake.REPLY_BYTES, socket.MSG_WAITALL)))
        if sock.recv(len(ACCEPTED)) != ACCEPTED:
            raise HandshakeError(None, "it does not expect this rank")
    except OSError:
        sock.close()
        raise
    return sock


Links = dict[str, list[tuple[str, str]]]  # by kind of channel: pairs of listener and caller


def open_channels(
    store: JobStore, name: str, links: Links, timeout_s: float
) -> dict[str, SocketChannel]:
    """This rank's channel of every kind.

    A rank calls its listeners before it accepts callers. So listeners must come before their
    callers in one order of all ranks; otherwise two ranks would wait for each other.
    """
    accepts = [(kind, b) for kind, pairs in links.items() for a, b in pairs if a == name]
    calls = [(a, kind) for kind, pairs in links.items() for a, b in pairs if b == name]
    sockets: dict[str, dict[str, socket.socket]] = {kind: {} for kind in links}
    with ExitStack() as stack:
        listener = stack.enter_context(closing(Listener(store, name))) if accepts else None
        for peer in dict.fromkeys(peer for peer, _ in calls):
            kinds = [kind for other, kind in calls if other == peer]
            for kind, sock in dial(store, peer, kinds, name, timeout_s).items():
                sockets[kind][peer] = sock
        if listener is not None:
            deadline = time.monotonic() + timeout_s
            for (kind, peer), sock in listener.accept(accepts, deadline).items():
                sockets[kind][peer] = sock
    for sock in (sock for by_name in sockets.values() for sock in by_name.values()):
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return {kind: SocketChannel(by_name, kind) for kind, by_name in sockets.items()}
