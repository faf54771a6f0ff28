"""Messages through memory that ranks of one host share: written once and read in place.

A token through the connection says where a message begins. So a waiting rank wakes up, and learns
of a lost peer, as with any message. The token also counts the messages that its sender has read,
whose memory is free again. A message that finds no room follows its token through the connection.
"""

from __future__ import annotations

import mmap
import os
import socket
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.headers import HEADER_BYTES, NO_STEP, check_header, header
from embroute.transport.interface import LostPeerError, Message, MessageError, Receive
from embroute.transport.sockets import SocketChannel, SocketMessages

COMMON_MEMORY_S = 7200.0  # to wait for a peer to hand memory on: the heartbeat notices dead peers
RING_BYTES = 1 << 24  # for messages on their way in one direction between two ranks
NOWHERE = -1  # the start of a message that does not lie in shared memory
TOKEN_BYTES = 32
_ALIGN = 64  # bytes of a cache line: two messages never share one


def _local_socket(channel: SocketChannel, peer: str) -> socket.socket:
    """The Unix socket to a peer, which can carry files."""
    sock = channel.socket_of(peer)
    if sock.family != socket.AF_UNIX:
        raise ValueError(
            f"{peer} cannot share memory with this rank: it is on another host or in another "
            f"container; use transport=sockets"
        )
    return sock


def send_memory(channel: SocketChannel, peer: str, file: int) -> None:
    """Send a memory file to a peer of the same host."""
    head = header("memory", NO_STEP, 0, os.fstat(file).st_size)
    try:
        socket.send_fds(_local_socket(channel, peer), [head], [file])
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None


def receive_memory(channel: SocketChannel, peer: str, size: int, timeout_s: float) -> int:
    """The memory file of this size that a peer of the same host sends."""
    sock = _local_socket(channel, peer)
    sock.settimeout(timeout_s)
    try:
        head, files, _, _ = socket.recv_fds(sock, HEADER_BYTES, 1)
    except OSError as error:
        raise LostPeerError(f"lost {peer}: {error}") from None
    sock.setblocking(False)  # SocketChannel waits by itself
    if not head:
        raise LostPeerError(f"lost {peer}: connection closed by the other end")
    check_header(peer, head, header("memory", NO_STEP, 0, size))
    if len(files) != 1 or os.fstat(files[0]).st_size != size:
        raise MessageError(f"message of {peer}: expected {size} bytes of memory, got others")
    return files[0]


def share_memory(
    channel: SocketChannel, size: int, source: str, targets: Sequence[str], timeout_s: float
) -> U8:
    """Map a memory file that a peer sends, or a new one of zeros, and send it on to other peers.

    A file has no path, so nothing outlives its last process.
    """
    if source:
        file = receive_memory(channel, source, size, timeout_s)
    else:
        file = os.memfd_create("embroute")
        os.ftruncate(file, size)
    for peer in targets:
        send_memory(channel, peer, file)
    memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
    os.close(file)
    return memory


class RingBuffer:
    """The sender's account of one direction's memory: which parts hold unread messages."""

    def __init__(self, memory: U8) -> None:
        self.memory, self._address = memory, memory.ctypes.data
        self._unread: deque[tuple[int, int]] = deque()  # begin and end of messages, oldest first
        self._freed = 0  # messages that the receiver has ever read

    def free(self, read: int) -> bool:
        """Free the oldest messages: the receiver has read so many in all; False if it cannot."""
        if not 0 <= read - self._freed <= len(self._unread):
            return False
        while self._freed < read:
            self._unread.popleft()
            self._freed += 1
        return True

    def find(self, size: int) -> int:
        """Reserve room for a message; returns where it begins, or NOWHERE if there is no room."""
        size = -(-size // _ALIGN) * _ALIGN
        start = self._gap(size)
        if start != NOWHERE:
            self._unread.append((start, start + size))
        return start

    def start_of(self, data: U8) -> int:
        """Where a message begins in this memory; NOWHERE if it lies elsewhere."""
        start = data.ctypes.data - self._address
        return start if 0 <= start <= len(self.memory) - data.nbytes and data.nbytes else NOWHERE

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


def _token(start: int, size: int, num_read: int) -> U8:
    """What a message in shared memory sends: its place, its size, messages read; a checksum."""
    words = np.array([start, size, num_read, 0], np.int64)
    words[3] = zlib.crc32(words.data.cast("B"))
    return words.view(np.uint8)


class SharedMemoryChannel:
    """Messages to ranks that all share memory with this one. One thread only.

    `outgoing`, `incoming`: memory for messages to each peer, and for messages from each peer.
    """

    def __init__(
        self,
        name: str,
        channel: SocketChannel,
        outgoing: Mapping[str, U8],
        incoming: Mapping[str, U8],
    ) -> None:
        self._name, self.channel, self._incoming = name, channel, incoming
        self._rings = {peer: RingBuffer(memory) for peer, memory in outgoing.items()}
        self._num_read = dict.fromkeys(incoming, 0)  # messages of each peer that were read here
        self.begin, self.close = channel.begin, channel.close

    def acquire(self, peer: str, size: int) -> U8:
        """Memory that the peer reads too, if there is room."""
        ring = self._rings[peer]
        start = ring.find(size) if size else NOWHERE
        return np.empty(size, np.uint8) if start == NOWHERE else ring.memory[start : start + size]

    def submit(self, sends: Sequence[Message], receives: Sequence[Receive]) -> SharedMemoryMessages:
        """Send tokens, and messages that found no room; `wait` begins to receive."""
        by_socket: list[Message] = []
        for peer, data in sends:
            start = self._rings[peer].start_of(data)
            by_socket.append((peer, _token(start, data.nbytes, self._num_read[peer])))
            if start == NOWHERE:
                by_socket.append((peer, data))
        return SharedMemoryMessages(self, self.channel.submit(by_socket, []), receives)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Receive]) -> list[U8]:
        """Send and receive all messages."""
        return self.submit(sends, receives).wait()

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer's tokens."""
        return self.channel.waited_s

    def common_memory(self, size: int) -> U8 | None:
        """The first shard makes the memory, and the first worker hands it on to other shards.

        Shards have no connections to each other, so a worker must be between them.
        """
        names, source = self.channel.names, "shard0"
        if self._name.startswith("shard"):
            source = "" if self._name == source else "worker0"
        others = [name for name in names if name != source]
        targets = others if self._name in ("shard0", "worker0") else []
        return share_memory(self.channel, size, source, targets, COMMON_MEMORY_S)

    def receive(self, receives: Sequence[Receive]) -> tuple[list[U8], list[str]]:
        """Messages where they lie, and the peers in whose memory they lie."""
        peers = [peer for peer, _ in receives]
        tokens = self.channel.exchange(
            [], [(peer, np.empty(TOKEN_BYTES, np.uint8)) for peer in peers]
        )
        arrived, owners, by_socket = list[U8](), list[str](), list[Message]()
        for (peer, room), token in zip(receives, tokens, strict=True):
            size = room.nbytes if isinstance(room, np.ndarray) else room
            start = self._start(peer, size, token)
            if start == NOWHERE:
                data = np.empty(size, np.uint8)
                by_socket.append((peer, data))
            else:
                data = self._incoming[peer][start : start + size]
                owners.append(peer)
            arrived.append(data)
        if by_socket:
            self.channel.exchange([], by_socket)
        for (_, room), data in zip(receives, arrived, strict=True):
            if isinstance(room, np.ndarray):
                room[:] = data
        return arrived, owners

    def _start(self, peer: str, size: int, token: U8) -> int:
        """Check a token; returns where its message begins."""
        start, length, num_read, _ = token.view(np.int64).tolist()
        whole = bytes(token) == bytes(_token(start, length, num_read))
        fits = start == NOWHERE or 0 <= start <= len(self._incoming[peer]) - size
        if not whole or length != size or not fits or not self._rings[peer].free(num_read):
            kind, step = self.channel.counter.label
            raise MessageError(
                f"message of {peer}: expected kind {kind}, step {step}, {size} bytes; got {length} "
                f"bytes at {start}, after {num_read} messages read"
            )
        return int(start)

    def release(self, owners: Sequence[str]) -> None:
        """Count one more message of each of these peers as read."""
        for peer in owners:
            self._num_read[peer] += 1


class SharedMemoryMessages:
    """Messages on their way in shared memory, at most one from each peer."""

    def __init__(
        self, channel: SharedMemoryChannel, sending: SocketMessages, receives: Sequence[Receive]
    ) -> None:
        self._channel, self._sending, self._receives = channel, sending, receives
        self._label = channel.channel.counter.label
        self._owners: list[str] = []

    def wait(self) -> list[U8]:
        """The expected messages, once the sends have left too."""
        arrived: list[U8] = []
        if self._receives:
            counter = self._channel.channel.counter
            label, counter.label = counter.label, self._label
            arrived, self._owners = self._channel.receive(self._receives)
            counter.label = label
        self._sending.wait()
        return arrived

    def release(self) -> None:
        """Let the senders use the messages' memory again."""
        self._channel.release(self._owners)


def share_rows(name: str, channel: SocketChannel, timeout_s: float) -> SharedMemoryChannel:
    """Share memory with the other end of each connection; shards make it, workers map it."""
    outgoing, incoming, is_shard = {}, {}, name.startswith("shard")
    for peer in channel.names:
        source, targets = ("", [peer]) if is_shard else (peer, [])
        memory = share_memory(channel, 2 * RING_BYTES, source, targets, timeout_s)
        halves = memory[:RING_BYTES], memory[RING_BYTES:]
        outgoing[peer], incoming[peer] = halves if is_shard else halves[::-1]
    return SharedMemoryChannel(name, channel, outgoing, incoming)
