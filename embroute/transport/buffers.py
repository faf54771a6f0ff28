"""Large messages without copies: a sender asks for a buffer first, and writes into it.

Between ranks of one host that buffer lies in shared memory (shm.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.interface import Channel, Work

NOWHERE = -1


class SendBuffer(NamedTuple):
    """Memory for a message to a peer, and where it begins in memory that both ends share."""

    peer: str
    data: U8
    start: int = NOWHERE


class RecvHandle(Protocol):
    """Submitted messages, in both directions."""

    def wait(self) -> list[U8]:
        """The expected messages, in order, once they have arrived and the sent ones have left."""
        ...

    def release(self) -> None:
        """Let the memory of the arrived messages be used again."""
        ...


class MessageTransport(Protocol):
    """Messages whose sizes both ends know. One thread only.

    Messages between two ranks arrive in the order of their submission, and are read in that order.
    """

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """Memory for the next message to a peer, which must then be submitted."""
        ...

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Begin to send buffers, and to receive a message of some size from each expected peer."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer; seconds of waiting for several count for each."""
        ...

    def common_memory(self, size: int) -> U8 | None:
        """Zeros that all shards and workers can read and write; None between several hosts.

        All of them must call this before their first message.
        """
        ...


class BufferPool:
    """Memory for messages, kept from phase to phase: page faults cost more than the copies."""

    def __init__(self) -> None:
        self._free: list[U8] = []

    def acquire(self, size: int) -> U8:
        """The smallest free buffer of at least this size, or a new one."""
        fits = [i for i, memory in enumerate(self._free) if len(memory) >= size]
        if fits:
            return self._free.pop(min(fits, key=lambda i: len(self._free[i])))
        if self._free:
            self._free.pop()  # a new buffer replaces one that is too small
        return np.empty(size + size // 4, np.uint8)

    def release(self, memory: Sequence[U8]) -> None:
        """Give buffers back."""
        self._free.extend(memory)


class CopyingTransport:
    """Messages over any channel, copied from and to this rank's own memory."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.pool = channel, BufferPool()

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """A buffer of this rank."""
        return SendBuffer(peer, self.pool.acquire(size)[:size])

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Begin to send and to receive at once: the pool has memory for both."""
        memory = [self.pool.acquire(size) for _, size in expected]
        receives = [
            (peer, whole[:size]) for whole, (peer, size) in zip(memory, expected, strict=True)
        ]
        work = self.channel.submit([(peer, data) for peer, data, _ in buffers], receives)
        return CopiedReceives(self.pool, work, buffers, memory, [data for _, data in receives])

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds the channel spent waiting for each peer."""
        return self.channel.waited_s

    def common_memory(self, size: int) -> U8 | None:
        """None: the other ranks may be on other hosts."""
        return None


class CopiedReceives(NamedTuple):
    """Submitted messages whose bytes lie in this rank's own memory."""

    pool: BufferPool
    work: Work
    buffers: Sequence[SendBuffer]
    memory: list[U8]
    arrived: list[U8]

    def wait(self) -> list[U8]:
        """The expected messages; afterwards the sent buffers are free again."""
        self.work.wait()
        # A buffer is a slice: the pool wants the whole array back.
        wholes = (data if data.base is None else data.base for _, data, _ in self.buffers)
        self.pool.release([np.asarray(whole) for whole in wholes])
        return self.arrived

    def release(self) -> None:
        """Give the memory of the arrived messages back."""
        self.pool.release(self.memory)
