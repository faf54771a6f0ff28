"""Messages over connected sockets that never block: a rank waits for all of them in one poll.

A socket may be any object with the methods used here, such as a wrapper that encrypts: `sendmsg`,
`recvmsg_into`, `fileno`, `setblocking`, `setsockopt` and `close`.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.headers import HEADER_BYTES, MessageCounter, check_header
from embroute.transport.interface import LostPeerError, Message, Receive

MAX_PARTS = 64  # pieces of memory that one system call moves
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
# A wait for fewer bytes ends at the first byte; a wait for more ends at every LARGEST_WAKE_BYTES.
SMALLEST_WAKE_BYTES, LARGEST_WAKE_BYTES = 4096, 1 << 20
LOW_WATER_MARK = getattr(socket, "SO_RCVLOWAT", None)
# A message that is shorter than expected may never reach the low-water mark. So a wait ends after
# this time, and the header is read.
SLICE_MS = 200


class BufferPool:
    """Memory for messages, kept from phase to phase: page faults cost more than the copies."""

    def __init__(self) -> None:
        self._free: list[U8] = []
        self._lent: dict[int, U8] = {}  # by identity

    def acquire(self, size: int) -> U8:
        """A view of the smallest free buffer of at least this size, or of a new one."""
        fits = [i for i, memory in enumerate(self._free) if len(memory) >= size]
        if fits:
            whole = self._free.pop(min(fits, key=lambda i: len(self._free[i])))
        else:
            if self._free:
                self._free.pop()  # a new buffer replaces one that is too small
            whole = np.empty(size + size // 4, np.uint8)
        self._lent[id(whole)] = whole
        return whole[:size]

    def release(self, views: Iterable[U8]) -> None:
        """Take views back; memory of others is left alone."""
        for view in views:
            whole = self._lent.pop(id(view.base), None)
            if whole is not None:
                self._free.append(whole)


@dataclass(slots=True)
class _Part:
    """Bytes that have not moved yet: of a header, or of the content behind it."""

    view: memoryview
    ended: Callable[[], object]
    following: int = 0  # bytes of the same message behind this part


class _Lane:
    """One direction of a connection: parts of messages, oldest first."""

    def __init__(self, move: Callable[[list[memoryview]], int]) -> None:
        self._move, self.parts, self.blocked = move, deque[_Part](), False

    def add(self, header: _Part, data: U8, ended: Callable[[], object]) -> None:
        """Put a message behind the others."""
        content = data.data.cast("B") if data.nbytes else memoryview(bytearray())
        header.following = data.nbytes
        self.parts += header, _Part(content, ended)

    def progress(self) -> None:
        """Move what can move without waiting."""
        while self.parts and not self.blocked:
            views = [part.view for part in islice(self.parts, MAX_PARTS)]
            try:
                moved = self._move(views)
            except BlockingIOError:
                self.blocked = True
                return
            if moved == 0:
                raise ConnectionError(None, "connection closed by the other end")
            # After a partial move the socket is empty or full: another call would not move more.
            self.blocked = moved < sum(map(len, views))
            self._end(moved)

    def _end(self, moved: int) -> None:
        """Remove parts that have moved, and empty ones behind them."""
        while self.parts and moved >= len(self.parts[0].view):
            part = self.parts.popleft()
            moved -= len(part.view)
            part.ended()
        if moved:
            self.parts[0].view = self.parts[0].view[moved:]


class _Link:
    """A connection to one peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file, self.waited_s, self._wake_bytes = sock, sock.fileno(), 0.0, 1
        sock.setblocking(False)
        self.leaving = _Lane(lambda views: sock.sendmsg(views, (), NO_SIGNAL))
        self.coming = _Lane(lambda views: sock.recvmsg_into(views)[0])

    def set_wake_bytes(self) -> None:
        """Let poll return when the next message is there whole, not with each of its packets."""
        part = self.coming.parts[0]
        left = len(part.view) + part.following
        wake_bytes = min(left, LARGEST_WAKE_BYTES) if left > SMALLEST_WAKE_BYTES else 1
        if wake_bytes != self._wake_bytes and LOW_WATER_MARK is not None:
            self._wake_bytes = wake_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, LOW_WATER_MARK, wake_bytes)


@dataclass(slots=True)
class SocketMessages:
    """Submitted messages."""

    channel: SocketChannel
    arrived: list[U8] = field(default_factory=list)
    sent: list[U8] = field(default_factory=list)
    sending: list[str] = field(default_factory=list)  # the peer of each message on its way
    awaited: list[str] = field(default_factory=list)

    def wait(self) -> list[U8]:
        """The expected messages, once they have arrived and the sent ones have left."""
        self.channel.progress(self)
        self.channel.pool.release(self.sent)
        return self.arrived

    def release(self) -> None:
        """Let the memory of arrived messages be used again."""
        self.channel.pool.release(self.arrived)


class SocketChannel:
    """Sockets to some other ranks. One thread only."""

    def __init__(self, sockets: Mapping[str, socket.socket], kind: str = "rows") -> None:
        self.names, self.pool = list(sockets), BufferPool()
        self._links = {name: _Link(sock) for name, sock in sockets.items()}
        self.counter = MessageCounter(kind)
        self.begin = self.counter.begin
        self._fault = ""  # why the channel was aborted

    def socket_of(self, peer: str) -> socket.socket:
        """The socket to a peer."""
        return self._links[peer].sock

    def acquire(self, peer: str, size: int) -> U8:
        """A buffer of this rank."""
        return self.pool.acquire(size)

    def submit(self, sends: Sequence[Message], receives: Sequence[Receive]) -> SocketMessages:
        """Begin to send and receive; what fits the sockets' buffers leaves at once."""
        messages = SocketMessages(self)
        for peer, data in sends:
            header = _Part(memoryview(self.counter.sent(peer, data.nbytes)), int)
            self._add(self._links[peer].leaving, header, (peer, data), messages.sending)
            messages.sent.append(data)
        for peer, room in receives:
            data = room if isinstance(room, np.ndarray) else self.pool.acquire(room)
            expected, arrived = self.counter.expected(peer, data.nbytes), bytearray(HEADER_BYTES)
            header = _Part(memoryview(arrived), partial(check_header, peer, arrived, expected))
            self._add(self._links[peer].coming, header, (peer, data), messages.awaited)
            messages.arrived.append(data)
        for peer in dict.fromkeys(messages.sending):
            self._progress(peer, self._links[peer].leaving)
        return messages

    def exchange(self, sends: Sequence[Message], receives: Sequence[Receive]) -> list[U8]:
        """Send and receive all messages."""
        return self.submit(sends, receives).wait()

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        return {name: link.waited_s for name, link in self._links.items()}

    def common_memory(self, size: int) -> U8 | None:
        """None: the other ranks may be on other hosts."""
        return None

    def close(self) -> None:
        """Close every socket."""
        for link in self._links.values():
            link.sock.close()

    def abort(self, reason: str) -> None:
        """From any thread: let the owner, which may wait for ever, meet a LostPeerError."""
        self._fault = reason
        for link in self._links.values():
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)

    def progress(self, messages: SocketMessages) -> None:
        """Move these messages, and others that can move, until all of these have moved."""
        while messages.sending or messages.awaited:
            for peer, link in self._links.items():
                self._progress(peer, link.leaving)
                self._progress(peer, link.coming)
            if messages.sending or messages.awaited:
                self._wait(messages.awaited)

    def _add(self, lane: _Lane, header: _Part, message: Message, unfinished: list[str]) -> None:
        peer, data = message
        unfinished.append(peer)
        try:
            lane.add(header, data, partial(unfinished.remove, peer))
        except TypeError as error:
            raise ValueError(f"a message for {peer}: {error}") from None

    def _progress(self, peer: str, lane: _Lane) -> None:
        try:
            lane.progress()
        except OSError as error:
            if self._fault:
                raise LostPeerError(self._fault) from None
            kind, step = self.counter.label
            where = kind if step < 0 else f"{kind}, step {step}"
            raise LostPeerError(f"lost {peer}: {error.strerror} ({where})") from None

    def _wait(self, awaited: Sequence[str]) -> None:
        """Wait until a blocked connection can go on.

        While some message cannot leave, every message that comes is taken in, awaited or not:
        otherwise two ranks that both send first would wait for each other for ever.
        """
        poller = select.poll()
        stuck = any(link.leaving.parts for link in self._links.values())
        for peer, link in self._links.items():
            events = select.POLLOUT if link.leaving.parts else 0
            if link.coming.parts and (stuck or peer in awaited):
                events |= select.POLLIN
                link.set_wake_bytes()
            if events:
                poller.register(link.file, events)
        began = time.perf_counter()
        happened = dict(poller.poll(SLICE_MS))
        spent = time.perf_counter() - began
        for peer, link in self._links.items():
            link.waited_s += spent if peer in awaited or link.leaving.parts else 0.0
            events = happened.get(link.file, 0)
            # POLLERR and POLLHUP unblock both directions: the next call then meets the error.
            if events & ~select.POLLOUT or not happened:
                link.coming.blocked = False
            if events & ~select.POLLIN:
                link.leaving.blocked = False
