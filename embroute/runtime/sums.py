"""Sums over workers, through memory that they share or round a ring of their own connections.

In memory everyone writes its own addend, tells the others, and adds up all of them in the order of
workers. A ring passes pieces on from worker to worker: each is added up on its first way round and
handed to everyone on its second.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from embroute.runtime.exchange import Bytes, Channel, Message, Posted
from embroute.runtime.links import APART, SHARED, taken_memory
from embroute.runtime.streams import StreamChannel

FEW = 4  # workers: each of them reads all addends whole, which many should not
SLAB_BYTES = 1 << 22  # of an addend that is summed at once
TURNS = 2  # an addend may be written while someone still reads the one before


class Adder(Protocol):
    """A way to add up over the workers."""

    in_memory: bool  # whether no message carries addends

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers; a tensor of the CPU."""


class WorkerSums:
    """The connections between workers: messages, and sums. One thread only."""

    def __init__(self, channel: StreamChannel, adder: Adder) -> None:
        self._channel, self._adder = channel, adder

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        return self._adder.in_memory

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Begin to send and receive."""
        return self._channel.post(sends, receives)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages."""
        self._channel.swap(sends, receives)

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds spent waiting for each worker."""
        return self._channel.waited_s

    def close(self) -> None:
        """Close the connections."""
        self._channel.close()

    def sum(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        if flat.device.type == "cpu":
            self._adder.add(flat)
        else:
            staged = flat.cpu()
            self._adder.add(staged)
            flat.copy_(staged)


class SharedAdder:
    """Sums through memory, taken in the order of workers."""

    in_memory = True

    def __init__(self, near: StreamChannel, index: int, memory: torch.Tensor) -> None:
        self._near, self._index = near, index
        self._slab_TWB = memory.view(TURNS, -1, SLAB_BYTES)
        self._turn = 0

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        for piece in torch.split(flat, SLAB_BYTES // flat.itemsize):
            # Who is in the next turn has all addends of this one, and everyone has read the last.
            slab_WB = self._slab_TWB[self._turn]
            self._turn = (self._turn + 1) % TURNS
            addends = [slab[: piece.nbytes].view(piece.dtype) for slab in slab_WB]
            addends[self._index].copy_(piece)
            self._meet()
            if len(addends) <= FEW:
                _sum_in_order(addends, piece)
            else:
                self._add_by_share(addends, piece)

    def _add_by_share(self, addends: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Each worker adds up a share of the numbers, and writes it where nobody else reads."""
        shares = [addend.tensor_split(len(addends)) for addend in addends]
        mine = [share[self._index] for share in shares]
        total = torch.empty_like(mine[0])
        _sum_in_order(mine, total)
        mine[self._index].copy_(total)
        self._meet()
        torch.cat([share[worker] for worker, share in enumerate(shares)], out=piece)

    def _meet(self) -> None:
        """Tell the others that this worker has written, and wait until all of them have."""
        names = self._near.names
        written, seen = np.ones(1, np.uint8), np.empty((len(names), 1), np.uint8)
        sends = [(name, written) for name in names]
        self._near.swap(sends, list(zip(names, seen, strict=True)))


def _sum_in_order(addends: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum in the order of workers."""
    torch.add(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        out += addend


class RingAdder:
    """Sums round a ring: every worker has the same, to the last bit."""

    in_memory = False

    def __init__(self, channel: StreamChannel, index: int, workers: Sequence[str]) -> None:
        self._channel, self._index, self._count = channel, index, len(workers)
        self._before, self._after = workers[index - 1], workers[(index + 1) % len(workers)]

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        pieces = flat.tensor_split(self._count)
        arrived = torch.empty_like(pieces[0])  # the largest
        for turn in range(self._count - 1):
            mine = pieces[(self._index - turn) % self._count]
            goal = pieces[(self._index - turn - 1) % self._count]
            self._pass_on(mine, arrived[: len(goal)])
            goal += arrived[: len(goal)]
        for turn in range(self._count - 1):
            mine = pieces[(self._index + 1 - turn) % self._count]
            self._pass_on(mine, pieces[(self._index - turn) % self._count])

    def _pass_on(self, mine: torch.Tensor, goal: torch.Tensor) -> None:
        sends = [(self._after, _bytes(mine))] if len(mine) else []
        self._channel.swap(sends, [(self._before, _bytes(goal))] if len(goal) else [])


def _bytes(tensor: torch.Tensor) -> Bytes:
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data


def worker_sums(channel: StreamChannel, index: int, workers: int, timeout_s: float) -> WorkerSums:
    """Sums through memory if all workers are on one host, else round a ring.

    The first worker knows: it has a connection to each of the others.
    """
    memory = None
    if workers > 1:
        memory = _offer(channel) if index == 0 else _offered(channel, timeout_s)
    if memory is not None:
        return WorkerSums(channel, SharedAdder(channel, index, memory))
    names = [f"worker{worker}" for worker in range(workers)]
    return WorkerSums(channel, RingAdder(channel, index, names))


def sum_links(workers: Sequence[str], on_one_node: bool) -> list[tuple[str, str]]:
    """Who connects to whom: all to all in memory, else the neighbours and the first."""
    count = len(workers)
    return [
        (workers[low], workers[high])
        for low in range(count)
        for high in range(low + 1, count)
        if on_one_node or low == 0 or high - low == 1
    ]


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
