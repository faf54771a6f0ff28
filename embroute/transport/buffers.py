"""Large messages: written where they leave from, and read where they have come to.

Whoever sends asks for room first, so that ranks of one host can write into each other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.interface import Channel, Work

NOWHERE = -1


class SendBuffer(NamedTuple):
    """Room for a message to a peer, and where it begins in memory that both ends know."""

    peer: str
    data: U8
    start: int = NOWHERE


class RecvHandle(Protocol):
    """Messages on their way, both ways."""

    def wait(self) -> list[U8]:
        """The messages that were expected, in that order, once all are there and own ones left."""
        ...

    def release(self) -> None:
        """What arrived has been read: its memory may be used again."""
        ...


class MessageTransport(Protocol):
    """Messages whose sizes both ends know. One thread only.

    Those between two ranks arrive in the order posted and are read in it.
    """

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """Memory for the next message to a peer; it must be posted."""
        ...

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Begin to send letters, and to receive messages of some sizes."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        ...

    def common_memory(self, size: int) -> U8 | None:
        """Zeros that every shard and every worker reads and writes; None if they have none.

        All of them have to ask, before their first message.
        """
        ...


class BufferPool:
    """Memory for messages, kept from phase to phase: new pages cost more than the copy to them."""

    def __init__(self) -> None:
        self._kept: list[U8] = []

    def acquire(self, size: int) -> U8:
        """At least so many bytes; the least that are kept, or new ones."""
        fits = [i for i, kept in enumerate(self._kept) if len(kept) >= size]
        if fits:
            return self._kept.pop(min(fits, key=lambda i: len(self._kept[i])))
        if self._kept:
            self._kept.pop()  # one that is too small makes way for it
        return np.empty(size + size // 4, np.uint8)

    def release(self, memory: Sequence[U8]) -> None:
        """Let memory be taken again."""
        self._kept.extend(memory)


class CopyingTransport:
    """Mail over any channel, by way of memory of one's own."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.pool = channel, BufferPool()

    def acquire(self, peer: str, size: int) -> SendBuffer:
        """Some of this rank's memory."""
        return SendBuffer(peer, self.pool.acquire(size)[:size])

    def submit(
        self, buffers: Sequence[SendBuffer], expected: Sequence[tuple[str, int]]
    ) -> RecvHandle:
        """Receives are posted at once: there is memory for them."""
        memory = [self.pool.acquire(size) for _, size in expected]
        arrived = [kept[:size] for kept, (_, size) in zip(memory, expected, strict=True)]
        receives = [(peer, data) for (peer, _), data in zip(expected, arrived, strict=True)]
        posted = self.channel.submit([(one.peer, one.data) for one in buffers], receives)
        return CopiedReceives(self.pool, posted, buffers, memory, arrived)

    @property
    def waited_s(self) -> Mapping[str, float]:
        """The channel's."""
        return self.channel.waited_s

    def common_memory(self, size: int) -> U8 | None:
        """Nothing is known of where the others are."""
        return None


class CopiedReceives(NamedTuple):
    """Messages on their way between two ranks' own memory."""

    pool: BufferPool
    posted: Work
    buffers: Sequence[SendBuffer]
    memory: list[U8]
    arrived: list[U8]

    def wait(self) -> list[U8]:
        """What was expected."""
        self.posted.wait()
        self.pool.release([_whole(buffer.data) for buffer in self.buffers])
        return self.arrived

    def release(self) -> None:
        """Its memory may be used again."""
        self.pool.release(self.memory)


def _whole(data: U8) -> U8:
    """The array that a part was cut from."""
    return data if data.base is None else np.asarray(data.base)
