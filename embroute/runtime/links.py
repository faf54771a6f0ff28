"""Connections between ranks: who listens where is written down in the job's store.

A rank that listens accepts whoever knows its token. Ranks of one host meet at a name within it,
which takes half of the time a network's protocol does; the others try each address the listener may
have, since what a machine calls itself is not always what others reach it by.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from ipaddress import ip_address

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from embroute.runtime.exchange import LostPeerError
from embroute.runtime.streams import StreamChannel

INTERFACE = "GLOO_SOCKET_IFNAME"  # as for torch's own connections
ACCEPTED = b"\x01"
TOKEN_BYTES = 16
TRY_S = 5.0  # for one address
GREETING_BYTES = 256  # at most
LOCAL_BYTES = 1 << 20  # on their way within a host; more than the system's habit
_SIOCGIFADDR = 0x8915
Address = str | tuple[str, int]  # within a host, or in a network


def _interface_address(name: str) -> str:
    """The address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            raise ValueError(
                f"{INTERFACE}={name}: no such interface with an IPv4 address ({error.strerror})"
            ) from None
    return socket.inet_ntoa(found[20:24])


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    family, kind, _, _, goal = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asked:
        asked.connect(goal)
        return str(asked.getsockname()[0])


def own_addresses() -> list[str]:
    """Addresses by which others may reach this rank, the likeliest first."""
    chosen = os.environ.get(INTERFACE, "").split(",")[0]
    if chosen:
        return [_interface_address(chosen)]
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ["WORLD_SIZE"]:
        return ["127.0.0.1"]
    found = []
    with suppress(OSError):
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        found.append(_address_towards(*master))
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError):
        found.append(_address_towards("192.0.2.1", 9))  # what leads out of this network
    outside = [address for address in found if not ip_address(address).is_loopback]
    return list(dict.fromkeys([*outside, "127.0.0.1"]))


class Listener:
    """A rank that others connect to."""

    def __init__(self, store: PrefixStore, name: str) -> None:
        addresses = own_addresses()
        bound = addresses[0] if len(addresses) == 1 else ""
        six = any(":" in address for address in addresses)
        network = socket.create_server(
            (bound, 0),
            family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and not bound and socket.has_dualstack_ipv6(),
        )
        self._token, place = secrets.token_hex(TOKEN_BYTES), secrets.token_hex(TOKEN_BYTES)
        local = socket.socket(socket.AF_UNIX)
        local.bind(_local(place))
        local.listen()
        self._servers = [network, local]
        for server in self._servers:
            server.setblocking(False)
        port = str(network.getsockname()[1])
        store.set(f"listens/{name}", " ".join([self._token, place, port, *addresses]))

    def accept(
        self, expected: Iterable[tuple[str, str]], deadline: float
    ) -> dict[tuple[str, str], socket.socket]:
        """The sockets of every kind and name that is expected."""
        missing, found = set(expected), dict[tuple[str, str], socket.socket]()
        while missing:
            left = max(0.01, deadline - time.monotonic())
            ready, _, _ = select.select(self._servers, [], [], left)
            if not ready:
                kind, name = min(missing)
                raise LostPeerError(f"lost {name}: it did not connect for {kind}")
            try:
                sock, _ = ready[0].accept()
            except OSError:
                continue  # the caller has gone
            caller = self._greeted(sock)
            if caller in missing:
                missing.remove(caller)
                found[caller] = sock
            else:
                sock.close()
        return found

    def close(self) -> None:
        """Accept nobody else."""
        for server in self._servers:
            server.close()

    def _greeted(self, sock: socket.socket) -> tuple[str, str]:
        """What a caller connects for and who it is; nobody if it does not know the token."""
        sock.settimeout(TRY_S)
        with suppress(OSError, ValueError):
            text = sock.recv(GREETING_BYTES, socket.MSG_WAITALL).decode()
            token, kind, name = text.split()
            if secrets.compare_digest(token, self._token):
                sock.sendall(ACCEPTED)
                return kind, name
        return "", ""


def call(
    store: PrefixStore, listener: str, kinds: Sequence[str], name: str, timeout_s: float
) -> dict[str, socket.socket]:
    """Connect to a rank that listens, once for each kind of message."""
    try:
        token, place, port, *addresses = store.get(f"listens/{listener}").decode().split()
    except RuntimeError:  # the store's time-out
        raise LostPeerError(
            f"lost {listener}: it does not listen; all ranks must exchange by the same means"
        ) from None
    failed, found = [], dict[str, socket.socket]()
    network: list[Address] = [(address, int(port)) for address in addresses]
    for goal in [_local(place), *network]:
        try:
            for kind in kinds[len(found) :]:
                found[kind] = _call(goal, f"{token} {kind} {name}", timeout_s)
            return found
        except OSError as error:
            if not isinstance(goal, str):
                failed.append(f"{goal[0]} ({error.strerror or error})")
    for sock in found.values():
        sock.close()
    raise LostPeerError(
        f"lost {listener}: cannot connect to {', '.join(failed)}; {INTERFACE} names the network "
        f"interface to use, on every host"
    )


def _local(place: str) -> str:
    """The address of a place within this host, or what its processes take for one."""
    return f"\0embroute-{place}"


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


def _call(goal: Address, greeting: str, timeout_s: float) -> socket.socket:
    sock = _connected(goal)
    sock.settimeout(timeout_s)  # the other end may be busy with its own calls
    try:
        sock.sendall(greeting.ljust(GREETING_BYTES).encode())
        if sock.recv(len(ACCEPTED)) != ACCEPTED:
            raise ConnectionRefusedError(None, "another program answered")
    except OSError:
        sock.close()
        raise
    return sock


Links = dict[str, list[tuple[str, str]]]  # by kind of message, who listens to whom


def open_channels(
    store: PrefixStore, name: str, links: Links, timeout_s: float
) -> dict[str, StreamChannel]:
    """This rank's channel of every kind. Nobody may listen to someone who waits for it."""
    accepts = [(kind, b) for kind, pairs in links.items() for a, b in pairs if a == name]
    calls = [(a, kind) for kind, pairs in links.items() for a, b in pairs if b == name]
    sockets: dict[str, dict[str, socket.socket]] = {kind: {} for kind in links}
    with ExitStack() as stack:
        listener = stack.enter_context(closing(Listener(store, name))) if accepts else None
        for other in dict.fromkeys(a for a, _ in calls):
            kinds = [kind for a, kind in calls if a == other]
            for kind, sock in call(store, other, kinds, name, timeout_s).items():
                sockets[kind][other] = sock
        if listener is not None:
            deadline = time.monotonic() + timeout_s
            for (kind, other), sock in listener.accept(accepts, deadline).items():
                sockets[kind][other] = sock
    for sock in (sock for own in sockets.values() for sock in own.values()):
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)  # waiting is the channel's business
    return {kind: StreamChannel(own) for kind, own in sockets.items()}


SHARED, APART = b"\x01", b"\x00"  # whether a file of memory comes with it


def taken_memory(near: StreamChannel, peer: str, timeout_s: float) -> int | None:
    """The file of memory that a peer of the same host shares; None if it has none to share."""
    sock = near.sockets[near.names.index(peer)]
    sock.settimeout(timeout_s)
    try:
        said, files, _, _ = socket.recv_fds(sock, len(SHARED), 1)
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None
    sock.setblocking(False)  # waiting is the channel's business
    if not said:
        raise LostPeerError(f"lost {peer}: connection closed by the other end")
    return files[0] if files else None
