"""Sums over a few workers of one host, through memory that they share.

Everyone writes its own part, tells the others, and adds up all parts in the order of workers. Gloo
takes the same bytes through the network's protocol, ten times as dear as the sum itself.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from embroute.runtime.exchange import Channel, Message, Posted, Sums
from embroute.runtime.links import APART, SHARED, taken_memory
from embroute.runtime.streams import StreamChannel

FEW = 4  # workers: everyone reads everyone's part, which many should not
SLAB_BYTES = 1 << 22  # of a part that is summed at once
TURNS = 2  # a part may be written while someone still reads the one before


class SharedSums:
    """Messages of one channel, and sums through memory. One thread only."""

    def __init__(self, apart: Sums, near: StreamChannel, index: int, memory: torch.Tensor) -> None:
        self._apart, self._near, self._index = apart, near, index
        self._slab_TWB = memory.view(TURNS, -1, SLAB_BYTES)
        self._turn = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """As the channel that carries messages does."""
        return self._apart.post(sends, receives)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """The same."""
        self._apart.swap(sends, receives)

    @property
    def waited_s(self) -> Mapping[str, float]:
        """For messages, not for sums."""
        return self._apart.waited_s

    def close(self) -> None:
        """No sums any more."""
        self._apart.close()

    def sum(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers, taken in their order."""
        if flat.device.type != "cpu":
            self._apart.sum(flat)
            return
        for part in torch.split(flat, SLAB_BYTES // flat.itemsize):
            self._sum(part)

    def _sum(self, part: torch.Tensor) -> None:
        # Who is in the next turn has this one's parts of all others, and they have read the last.
        slab_WB = self._slab_TWB[self._turn]
        self._turn = (self._turn + 1) % TURNS
        parts = [slab[: part.nbytes].view(part.dtype) for slab in slab_WB]
        parts[self._index].copy_(part)
        names = self._near.names
        written, seen = np.ones(1, np.uint8), np.empty((len(names), 1), np.uint8)
        sends = [(name, written) for name in names]
        self._near.swap(sends, list(zip(names, seen, strict=True)))
        torch.add(parts[0], parts[1], out=part)
        for other in parts[2:]:
            part += other


def shared_sums(apart: Sums, near: StreamChannel, index: int, timeout_s: float) -> Sums:
    """Sums through memory if all workers are on one host, else those of `apart`.

    The first worker knows: it has a connection to each of the others. `near` is to all of them.
    """
    memory = _offer(near) if index == 0 else _offered(near, timeout_s)
    return apart if memory is None else SharedSums(apart, near, index, memory)


def is_near(channel: Channel) -> bool:
    """Whether all ranks of a channel are on this host."""
    return isinstance(channel, StreamChannel) and all(
        sock.family == socket.AF_UNIX for sock in channel.sockets
    )


def _offer(near: StreamChannel) -> torch.Tensor | None:
    """Memory for all workers, or a word that there is none."""
    if not is_near(near):
        for sock in near.sockets:
            sock.send(APART)
        return None
    file = os.memfd_create("embroute-sums")
    os.ftruncate(file, TURNS * (len(near.sockets) + 1) * SLAB_BYTES)
    for sock in near.sockets:
        socket.send_fds(sock, [SHARED], [file])
    return _mapped(file)


def _offered(near: StreamChannel, timeout_s: float) -> torch.Tensor | None:
    """What the first worker offers."""
    file = taken_memory(near, "worker0", timeout_s)
    return None if file is None else _mapped(file)


def _mapped(file: int) -> torch.Tensor:
    """A file's memory, for as long as somebody has it."""
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    os.close(file)
    return memory
