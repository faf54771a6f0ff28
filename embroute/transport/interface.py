"""The interface of all channels between ranks: over sockets, Gloo, or within one process.

At each rank, one thread owns a channel. Ranks are addressed by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from embroute.kernels.array_types import U8

Message = tuple[str, U8]  # the other rank, and the bytes to send or to fill


class LostPeerError(RuntimeError):
    """Another rank is gone, or cannot be reached."""


class MessageError(RuntimeError):
    """A message is damaged, or not what its reader expects. Names the peer, the step, the kind."""


class Work(Protocol):
    """Submitted messages."""

    def wait(self) -> None:
        """Return when all of them have left or arrived."""
        ...


class Channel(Protocol):
    """Point-to-point messages whose sizes both ends know."""

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Begin to send and receive; messages between two ranks keep their order.

        Do not touch their bytes until `wait` returns. A phase that is submitted before the previous
        one is complete keeps links busy.
        """
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages; returns when all of them have left or arrived."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each peer; seconds of waiting for several count for each."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class AllReduce(Channel, Protocol):
    """A channel whose ranks can also add up tensors."""

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        ...

    def sum(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the channel's ranks."""
        ...
