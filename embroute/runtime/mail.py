"""Large messages: written where they leave from, and read where they have come to.

Whoever sends asks for room first, so that ranks of one host can write into each other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from embroute.runtime.exchange import Bytes, Channel, Posted

NOWHERE = -1


class Letter(NamedTuple):
    """Room for a message to a peer, and where it begins in memory that both ends know."""

    peer: str
    data: Bytes
    start: int = NOWHERE


class Arriving(Protocol):
    """Messages on their way, both ways."""

    def wait(self) -> list[Bytes]:
        """The messages that were expected, in that order, once all are there and own ones left."""
        ...

    def release(self) -> None:
        """What arrived has been read: its memory may be used again."""
        ...


class Mail(Protocol):
    """Messages whose sizes both ends know. One thread only.

    Those between two ranks arrive in the order posted and are read in it.
    """

    def room(self, peer: str, size: int) -> Letter:
        """Memory for the next message to a peer; it must be posted."""
        ...

    def post(self, letters: Sequence[Letter], expected: Sequence[tuple[str, int]]) -> Arriving:
        """Begin to send letters, and to receive messages of some sizes."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        ...

    def common_memory(self, size: int) -> Bytes | None:
        """Zeros that every shard and every worker reads and writes; None if they have none.

        All of them have to ask, before their first message.
        """
        ...


class Pool:
    """Memory for messages, kept from phase to phase: new pages cost more than the copy to them."""

    def __init__(self) -> None:
        self._kept: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """At least so many bytes; the least that are kept, or new ones."""
        fits = [i for i, kept in enumerate(self._kept) if len(kept) >= size]
        if fits:
            return self._kept.pop(min(fits, key=lambda i: len(self._kept[i])))
        if self._kept:
            self._kept.pop()  # one that is too small makes way for it
        return np.empty(size + size // 4, np.uint8)

    def give(self, memory: Sequence[Bytes]) -> None:
        """Let memory be taken again."""
        self._kept.extend(memory)


class CopiedMail:
    """Mail over any channel, by way of memory of one's own."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.pool = channel, Pool()

    def room(self, peer: str, size: int) -> Letter:
        """Some of this rank's memory."""
        return Letter(peer, self.pool.take(size)[:size])

    def post(self, letters: Sequence[Letter], expected: Sequence[tuple[str, int]]) -> Arriving:
        """Receives are posted at once: there is memory for them."""
        memory = [self.pool.take(size) for _, size in expected]
        arrived = [kept[:size] for kept, (_, size) in zip(memory, expected, strict=True)]
        receives = [(peer, data) for (peer, _), data in zip(expected, arrived, strict=True)]
        posted = self.channel.post([(one.peer, one.data) for one in letters], receives)
        return Copies(self.pool, posted, letters, memory, arrived)

    @property
    def waited_s(self) -> Mapping[str, float]:
        """The channel's."""
        return self.channel.waited_s

    def common_memory(self, size: int) -> Bytes | None:
        """Nothing is known of where the others are."""
        return None


class Copies(NamedTuple):
    """Messages on their way between two ranks' own memory."""

    pool: Pool
    posted: Posted
    letters: Sequence[Letter]
    memory: list[Bytes]
    arrived: list[Bytes]

    def wait(self) -> list[Bytes]:
        """What was expected."""
        self.posted.wait()
        self.pool.give([_whole(letter.data) for letter in self.letters])
        return self.arrived

    def release(self) -> None:
        """Its memory may be used again."""
        self.pool.give(self.memory)


def _whole(data: Bytes) -> Bytes:
    """The array that a part was cut from."""
    return data if data.base is None else np.asarray(data.base)
