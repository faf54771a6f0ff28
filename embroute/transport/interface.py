"""How bytes get from rank to rank: one interface, over Gloo, sockets or within one process.

A channel belongs to one thread of each rank. Ranks are addressed by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from embroute.kernels.array_types import U8

Message = tuple[str, U8]  # the other rank, and the bytes to send or to fill


class LostPeerError(RuntimeError):
    """Another rank is gone, or cannot be reached."""


class Work(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when every one has left or arrived."""
        ...


class Channel(Protocol):
    """Point-to-point messages whose sizes both ends know."""

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Begin to send and receive; messages between two ranks arrive in the order posted.

        Their bytes must be left alone until `wait` returns. Posting a phase before the one ahead
        of it is done keeps links busy.
        """
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages; returns when every one has left or arrived."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""
        ...


class AllReduce(Channel, Protocol):
    """A channel whose ranks can also add up what each of them has."""

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        ...

    def sum(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the channel's ranks."""
        ...
