"""The interface of all channels between ranks: over sockets, in shared memory, in one process.

At each rank, one thread owns a channel. Ranks are addressed by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from embroute.kernels.array_types import U8

AUTO, SOCKETS, SHARED_MEMORY = "auto", "sockets", "shared-memory"
TRANSPORTS = (AUTO, SOCKETS, SHARED_MEMORY)  # values of the setting `transport`

Message = tuple[str, U8]  # the other rank, and the bytes to send
Receive = tuple[str, U8 | int]  # the other rank, and memory to fill; or a size, in any memory


class LostPeerError(RuntimeError):
    """Another rank is gone, or cannot be reached."""


class MessageError(RuntimeError):
    """A message is damaged, or not what its reader expects. Names the peer, the step, the kind."""


class PendingMessages(Protocol):
    """Submitted messages, in both directions."""

    def wait(self) -> list[U8]:
        """The expected messages, in order, once they have arrived and the sent ones have left."""
        ...

    def release(self) -> None:
        """Let the memory of arrived messages be used again, unless the receiver gave it."""
        ...


class Channel(Protocol):
    """Messages whose sizes both ends know; each carries a header that the receiver checks.

    Messages between two ranks arrive in the order of their submission, and are read in that order.
    """

    def begin(self, kind: str, step: int) -> None:
        """Label all messages from now on; both ends must give the same labels."""
        ...

    def acquire(self, peer: str, size: int) -> U8:
        """Memory for the next message to a peer, which must then be submitted."""
        ...

    def submit(self, sends: Sequence[Message], receives: Sequence[Receive]) -> PendingMessages:
        """Begin to send and receive.

        Do not touch their bytes until `wait` returns. A phase that is submitted before the previous
        one is complete keeps links busy.
        """
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Receive]) -> list[U8]:
        """Send and receive all messages; returns when all of them have left or arrived."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer; seconds of waiting for several count for each."""
        ...

    def common_memory(self, size: int) -> U8 | None:
        """Zeros that all ranks of the channel can read and write; None without shared memory.

        All of them must call this before their first message.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
