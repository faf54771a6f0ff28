"""Messages through memory that ranks of one host share: written once and read in place.

A token through the connection says where a message begins. So a waiting rank wakes up, and learns
of a lost peer, as with any message. The token also counts the messages that its sender has read,
whose memory is free again. A message that finds no room follows its token through the connection.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque
from collections.abc import Sequence

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.buffers import NOWHERE, RecvHandle, SendBuffer
from embroute.transport.interface import LostPeerError, Message
from embroute.transport.sockets import SocketChannel, SocketWork

COMMON_MEMORY_S = 7200.0  # to wait for a peer to hand memory on: the heartbeat notices dead peers
RING_BYTES = 1 << 24  # for messages on their way in one direction between two ranks
MEMORY_SHARED, MEMORY_APART = b"\x01", b"\x00"  # whether a memory file comes with the byte
_ALIGN = 64  # bytes of a cache line: two messages never share one


def create_memory(name: str, size: int) -> int:
    """A memory file of zeros; it has no path, so nothing outlives its last process."""
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    return file


def map_memory(file: int) -> U8:
    """The bytes of a memory file, which stay while the array lives; the file is closed."""
    memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
    os.close(file)
    return memory


def send_memory(channel: SocketChannel, peer: str, file: int) -> None:
    """Send a memory file to a peer of the same host."""
    try:
        socket.send_fds(channel.socket_of(peer), [MEMORY_SHARED], [file])
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None


def receive_memory(channel: SocketChannel, peer: str, timeout_s: float) -> int | None:
    """The memory file that a peer of the same host sends; None if the peer shares none."""
    sock = channel.socket_of(peer)
    sock.settimeout(timeout_s)
    try:
        flag, files, _, _ = socket.recv_fds(sock, len(MEMORY_SHARED), 1)
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None
    sock.setblocking(False)  # SocketChannel waits by itself
    if not flag:
        raise LostPeerError(f"lost {peer}: connection closed by the other end")
    return files[0] if files else None


def _require_memory(channel: SocketChannel, peer: str, timeout_s: float) -> int:
    file = receive_memory(channel, peer, timeout_s)
    if file is None:
        raise LostPeerError(f"lost {peer}: it shares no memory")
    return file


class RingBuffer:
    """The sender's account of one direction's memory: which parts hold unread messages."""

    def __init__(self, memory: U8) -> None:
        self.memory = memory
        self._unread: deque[tuple[int, int]] = deque()  # begin and end of messages, oldest first
        self._freed = 0  # messages that the receiver has ever read

    def free(self, read: int) -> None:
        """Free the oldest messages: the receiver has read so many in all."""
        while self._freed < read:
            self._unread.popleft()
            self._freed += 1

    def find(self, size: int) -> int:
        """Reserve room for a message; returns where it begins, or NOWHERE if there is no room."""
        size = -(-size // _ALIGN) * _ALIGN
        start = self._gap(size)
        if start != NOWHERE:
            self._unread.append((start, start + size))
        return start

    def _gap(self, size: int) -> int:
        if not self._unread:
            # Always the same memory if possible: it is still in the processor's cache.
            return 0 if size <= len(self.memory) else NOWHERE
        tail, head = self._unread[0][0], self._unread[-1][1]
        # Wrapped: the newest message begins before the oldest, and free memory ends at the tail.
        wrapped = self._unread[-1][0] < tail
        if head + size <= (tail if wrapped else len(self.memory)):
            return head
        return 0 if not wrapped and size <= tail else NOWHERE


class SharedMemoryTransport:
    """Messages to ranks that all share memory with this one.

    `outgoing`, `incoming`: memory for messages to each peer, and for messages from each peer.
    """

    def __init__(
        self, name: str, channel: SocketChannel, outgoing: dict[str, U8], incoming: dict[str, U8]
    ) -> None:
        self._name, self._channel, self._incoming = name, channel, incoming
        self._rings = {peer: RingBuffer(memory) for peer, memory in outgoing.items()}
        self._num_read = dict.fromkeys(incoming, 0)  # messages of each peer that were read here

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """Memory that the peer reads too, if there is room."""
        ring = self._rings[peer]
        start = ring.find(size)
        if start == NOWHERE:
            return SendBuffer(peer, np.empty(size, np.uint8))
        return SendBuffer(peer, ring.memory[start : start + size], start)

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Send tokens, and messages that found no room; `wait` begins to receive."""
        sends: list[Message] = []
        for peer, data, start in buffers:
            sends.append((peer, np.array([start, self._num_read[peer]], np.int64).view(np.uint8)))
            if start == NOWHERE:
                sends.append((peer, data))
        return SharedReceives(self, self._channel.submit(sends, []), expected)

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds spent waiting for each peer's tokens."""
        return self._channel.waited_s

    def common_memory(self, size: int) -> U8 | None:
        """The first shard makes the memory, and the first worker hands it on to other shards.

        Shards have no connections to each other, so a worker must be between them.
        """
        if self._name == "shard0":
            file, receivers = create_memory("embroute-tables", size), self._channel.names
        else:
            sender = "worker0" if self._name.startswith("shard") else "shard0"
            file, receivers = _require_memory(self._channel, sender, COMMON_MEMORY_S), []
        if self._name == "worker0":
            receivers = [name for name in self._channel.names if name != "shard0"]
        for name in receivers:
            send_memory(self._channel, name, file)
        return map_memory(file)

    def receive(self, expected: Sequence[tuple[str, int]]) -> tuple[list[U8], list[str]]:
        """Messages where they lie, and the peers in whose memory they lie."""
        token_E2 = np.empty((len(expected), 2), np.int64)
        peers = [peer for peer, _ in expected]
        self._channel.exchange([], list(zip(peers, token_E2.view(np.uint8), strict=True)))
        arrived, owners, by_socket = [], [], list[Message]()
        for (peer, size), (start, num_read) in zip(expected, token_E2.tolist(), strict=True):
            self._rings[peer].free(num_read)
            if start == NOWHERE:
                by_socket.append((peer, np.empty(size, np.uint8)))
                arrived.append(by_socket[-1][1])
            else:
                arrived.append(self._incoming[peer][start : start + size])
                owners.append(peer)
        if by_socket:
            self._channel.exchange([], by_socket)
        return arrived, owners

    def release(self, owners: Sequence[str]) -> None:
        """Count one more message of each of these peers as read."""
        for peer in owners:
            self._num_read[peer] += 1


class SharedReceives:
    """Messages on their way in shared memory, at most one from each peer."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        sending: SocketWork,
        expected: Sequence[tuple[str, int]],
    ) -> None:
        self._transport, self._sending, self._expected = transport, sending, expected
        self._owners: list[str] = []

    def wait(self) -> list[U8]:
        """The expected messages, once the sends have left too."""
        arrived: list[U8] = []
        if self._expected:
            arrived, self._owners = self._transport.receive(self._expected)
        self._sending.wait()
        return arrived

    def release(self) -> None:
        """Let the senders use the messages' memory again."""
        self._transport.release(self._owners)


def offer_memory(name: str, channel: SocketChannel) -> SharedMemoryTransport:
    """Make memory for each connection, and send it to the other end."""
    outgoing, incoming = {}, {}
    for peer in channel.names:
        file = create_memory("embroute-rows", 2 * RING_BYTES)
        send_memory(channel, peer, file)
        memory = map_memory(file)
        outgoing[peer], incoming[peer] = memory[:RING_BYTES], memory[RING_BYTES:]
    return SharedMemoryTransport(name, channel, outgoing, incoming)


def accept_memory(name: str, channel: SocketChannel, timeout_s: float) -> SharedMemoryTransport:
    """Take the memory that the other end of each connection has made."""
    outgoing, incoming = {}, {}
    for peer in channel.names:
        memory = map_memory(_require_memory(channel, peer, timeout_s))
        incoming[peer], outgoing[peer] = memory[:RING_BYTES], memory[RING_BYTES:]
    return SharedMemoryTransport(name, channel, outgoing, incoming)
