"""Mail through memory that ranks of one host share: a message is written once and read in place.

A token through the connection says where a message begins, so whoever waits is woken, and learns of
a lost peer, as by any message. It also says how many messages its sender has read, whose memory is
free again. A message for which there is no room follows its token through the connection.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque
from collections.abc import Sequence

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.bootstrap import MEMORY_SHARED, receive_memory
from embroute.transport.buffers import NOWHERE, RecvHandle, SendBuffer
from embroute.transport.interface import LostPeerError, Message
from embroute.transport.sockets import SocketChannel, SocketWork

HANDED_ON_S = 7200.0  # at most, until a peer hands memory on: liveness is the heartbeat's business
RING_BYTES = 1 << 24  # for what is on its way in one direction between two ranks
_ALIGN = 64


class RingBuffer:
    """One direction's memory as its sender keeps book of it."""

    def __init__(self, memory: U8) -> None:
        self.memory = memory
        self._held: deque[tuple[int, int]] = deque()  # where messages begin and end, oldest first
        self._freed = 0  # messages ever read by the other end

    def free(self, read: int) -> None:
        """The other end has read so many messages in all."""
        while self._freed < read:
            self._held.popleft()
            self._freed += 1

    def find(self, size: int) -> int:
        """Where a message begins that is held from now on; NOWHERE if there is no room for it."""
        size = -(-size // _ALIGN) * _ALIGN
        start = self._gap(size)
        if start != NOWHERE:
            self._held.append((start, start + size))
        return start

    def _gap(self, size: int) -> int:
        if not self._held:
            return 0 if size <= len(self.memory) else NOWHERE  # memory just used is near
        tail, head = self._held[0][0], self._held[-1][1]
        around = self._held[-1][0] < tail  # messages go on at the beginning
        if head + size <= (tail if around else len(self.memory)):
            return head
        return 0 if not around and size <= tail else NOWHERE


class SharedMemoryTransport:
    """Mail to ranks that all share memory with this one.

    `out` and `into`: memory for what goes to each peer, and for what comes from it.
    """

    def __init__(
        self, name: str, near: SocketChannel, out: dict[str, U8], into: dict[str, U8]
    ) -> None:
        self._name, self._near, self._into = name, near, into
        self._slabs = {peer: RingBuffer(memory) for peer, memory in out.items()}
        self._read = dict.fromkeys(into, 0)  # messages of each peer's slab that were read here

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """Memory that the peer reads too, if there is room."""
        ring = self._slabs[peer]
        start = ring.find(size)
        if start == NOWHERE:
            return SendBuffer(peer, np.empty(size, np.uint8))
        return SendBuffer(peer, ring.memory[start : start + size], start)

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Send tokens, and what found no room; receives begin with the wait for them."""
        sends: list[Message] = []
        for peer, data, start in buffers:
            sends.append((peer, np.array([start, self._read[peer]], np.int64).view(np.uint8)))
            if start == NOWHERE:
                sends.append((peer, data))
        return SharedReceives(self, self._near.submit(sends, []), expected)

    @property
    def waited_s(self) -> dict[str, float]:
        """For their tokens."""
        return self._near.waited_s

    def common_memory(self, size: int) -> U8 | None:
        """The first shard makes it, and the first worker hands it on to the other shards."""
        if self._name == "shard0":
            file, lacking = os.memfd_create("embroute-tables"), self._near.names
            os.ftruncate(file, size)
        else:
            maker = "worker0" if self._name.startswith("shard") else "shard0"
            file, lacking = _taken(self._near, maker, HANDED_ON_S), []
        if self._name == "worker0":
            lacking = [name for name in self._near.names if name != "shard0"]
        try:
            for name in lacking:
                _hand(self._near, name, file)
            return np.frombuffer(mmap.mmap(file, 0), np.uint8)
        finally:
            os.close(file)

    def receive(self, expected: Sequence[tuple[str, int]]) -> tuple[list[U8], list[str]]:
        """Messages where they lie, and whose memory they lie in."""
        token_E2 = np.empty((len(expected), 2), np.int64)
        peers = [peer for peer, _ in expected]
        self._near.exchange([], list(zip(peers, token_E2.view(np.uint8), strict=True)))
        arrived, holders, rest = [], [], list[Message]()
        for (peer, size), (start, read) in zip(expected, token_E2.tolist(), strict=True):
            self._slabs[peer].free(read)
            if start == NOWHERE:
                rest.append((peer, np.empty(size, np.uint8)))
                arrived.append(rest[-1][1])
            else:
                arrived.append(self._into[peer][start : start + size])
                holders.append(peer)
        if rest:
            self._near.exchange([], rest)
        return arrived, holders

    def release(self, holders: Sequence[str]) -> None:
        """One more message of each was read."""
        for peer in holders:
            self._read[peer] += 1


class SharedReceives:
    """Messages on their way in shared memory, at most one from each peer."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        posted: SocketWork,
        expected: Sequence[tuple[str, int]],
    ) -> None:
        self._mail, self._posted, self._expected = transport, posted, expected
        self._holders: list[str] = []

    def wait(self) -> list[U8]:
        """What was expected."""
        arrived: list[U8] = []
        if self._expected:
            arrived, self._holders = self._mail.receive(self._expected)
        self._posted.wait()
        return arrived

    def release(self) -> None:
        """Its memory may be used again."""
        self._mail.release(self._holders)


def offer_memory(name: str, near: SocketChannel) -> SharedMemoryTransport:
    """Memory for the messages of each connection, told to the other end."""
    out, into = {}, {}
    for peer in near.names:
        file = os.memfd_create("embroute-rows")
        os.ftruncate(file, 2 * RING_BYTES)
        _hand(near, peer, file)
        out[peer], into[peer] = _mapped(file)
    return SharedMemoryTransport(name, near, out, into)


def accept_memory(name: str, near: SocketChannel, timeout_s: float) -> SharedMemoryTransport:
    """The same memory at the other end of each connection."""
    out, into = {}, {}
    for peer in near.names:
        into[peer], out[peer] = _mapped(_taken(near, peer, timeout_s))
    return SharedMemoryTransport(name, near, out, into)


def _hand(near: SocketChannel, peer: str, file: int) -> None:
    """Let a peer have a file of memory."""
    try:
        socket.send_fds(near.sockets[near.names.index(peer)], [MEMORY_SHARED], [file])
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None


def _taken(near: SocketChannel, peer: str, timeout_s: float) -> int:
    """The file of memory that a peer shares."""
    file = receive_memory(near, peer, timeout_s)
    if file is None:
        raise LostPeerError(f"lost {peer}: it shares no memory")
    return file


def _mapped(file: int) -> tuple[U8, U8]:
    """Both directions' memory, for as long as somebody has it."""
    memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
    os.close(file)
    return memory[:RING_BYTES], memory[RING_BYTES:]
