"""Sums over workers: in shared memory, round a ring, or at the first shard.

A ring passes every slow link several times, one after the other, and each time behind whatever else
is on it. Here a worker's part leaves as soon as it is there, while others still compute, and the
sum goes to all of them at once. `cost.sums_by_shard` says for which sizes that is better.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from embroute.kernels.array_types import I64, U8
from embroute.transport.bootstrap import MEMORY_APART, MEMORY_SHARED, receive_memory
from embroute.transport.interface import Channel, LostPeerError, Message, Work
from embroute.transport.sockets import SocketChannel

REDUCIBLE_DTYPES = (torch.float32, torch.float64)
# What a worker says before its part: how many numbers follow and are awaited, and of how many bytes
# each. A worker that has nothing to add sends no part; one that leaves says so.
SENT, AWAITED, WIDTH = range(3)
GONE = -1


def can_reduce(flat: torch.Tensor) -> bool:
    """Whether a tensor is one whose numbers the centre can add."""
    return flat.device.type == "cpu" and flat.dtype in REDUCIBLE_DTYPES


class CentralAllReduce:
    """A worker's end. One thread only."""

    def __init__(self, channel: Channel, centre: str) -> None:
        self.channel, self.centre = channel, centre

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers that add something, taken in their order."""
        count = len(flat)
        head = np.array([count if adds else 0, count, flat.itemsize], np.int64)
        data: U8 = flat.numpy().view(np.uint8)
        part = [(self.centre, data)] if adds else []
        self.channel.exchange([(self.centre, head.view(np.uint8)), *part], [])
        self.channel.exchange([], [(self.centre, data)])

    def leave(self) -> None:
        """No more sums."""
        self.channel.exchange([(self.centre, np.array([GONE, 0, 0], np.int64).view(np.uint8))], [])


def serve_allreduce(channel: Channel, workers: Sequence[str]) -> None:
    """The centre's end: sums as they are asked for, until all workers have left."""
    head_W = np.zeros((len(workers), 3), np.int64)
    while True:
        try:
            heads = (head.view(np.uint8) for head in head_W)
            channel.exchange([], list(zip(workers, heads, strict=True)))
            if (head_W[:, SENT] == GONE).all():
                return
            _reduce_once(channel, workers, head_W)
        except LostPeerError:
            return  # whoever is lost is missed elsewhere


def _reduce_once(channel: Channel, workers: Sequence[str], head_W: I64) -> None:
    """One sum."""
    asked = {tuple(head) for head in head_W[:, AWAITED:].tolist()}
    sent = set(head_W[:, SENT].tolist()) - {0}
    count, width = asked.pop()
    if asked or sent - {count}:
        raise RuntimeError(f"workers add up different things: {head_W.tolist()}")
    own = [w for w, head in zip(workers, head_W, strict=True) if head[SENT]]
    parts = [np.zeros(count, f"f{width}") for _ in own or workers[:1]]
    channel.exchange([], [(w, part.view(np.uint8)) for w, part in zip(own, parts, strict=False)])
    total = parts[0]
    for part in parts[1:]:
        total += part
    channel.exchange([(w, total.view(np.uint8)) for w in workers], [])


FEW_BYTES = 4  # workers: each of them reads all addends whole, which many should not
REDUCE_BYTES = 1 << 22  # of an addend that is summed at once
TURNS = 2  # an addend may be written while someone still reads the one before


class ReduceStrategy(Protocol):
    """A way to add up over the workers."""

    in_memory: bool  # whether no message carries addends

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers; a tensor of the CPU."""


class WorkerAllReduce:
    """The connections between workers: messages, and sums. One thread only."""

    def __init__(self, channel: SocketChannel, adder: ReduceStrategy) -> None:
        self._channel, self._adder = channel, adder

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        return self._adder.in_memory

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Begin to send and receive."""
        return self._channel.submit(sends, receives)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages."""
        self._channel.exchange(sends, receives)

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


class SharedMemoryReduce:
    """Sums through memory, taken in the order of workers."""

    in_memory = True

    def __init__(self, near: SocketChannel, index: int, memory: torch.Tensor) -> None:
        self._near, self._index = near, index
        self._slab_TWB = memory.view(TURNS, -1, REDUCE_BYTES)
        self._turn = 0

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        for piece in torch.split(flat, REDUCE_BYTES // flat.itemsize):
            # Who is in the next turn has all addends of this one, and everyone has read the last.
            slab_WB = self._slab_TWB[self._turn]
            self._turn = (self._turn + 1) % TURNS
            addends = [ring[: piece.nbytes].view(piece.dtype) for ring in slab_WB]
            addends[self._index].copy_(piece)
            self._meet()
            if len(addends) <= FEW_BYTES:
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
        self._near.exchange(sends, list(zip(names, seen, strict=True)))


def _sum_in_order(addends: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum in the order of workers."""
    torch.add(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        out += addend


class RingReduce:
    """Sums round a ring: every worker has the same, to the last bit."""

    in_memory = False

    def __init__(self, channel: SocketChannel, index: int, workers: Sequence[str]) -> None:
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
        self._channel.exchange(sends, [(self._before, _bytes(goal))] if len(goal) else [])


def _bytes(tensor: torch.Tensor) -> U8:
    data: U8 = tensor.view(torch.uint8).numpy()
    return data


def open_allreduce(
    channel: SocketChannel, index: int, workers: int, timeout_s: float
) -> WorkerAllReduce:
    """Sums through memory if all workers are on one host, else round a ring.

    The first worker knows: it has a connection to each of the others.
    """
    memory = None
    if workers > 1:
        memory = _offer(channel) if index == 0 else _offered(channel, timeout_s)
    if memory is not None:
        return WorkerAllReduce(channel, SharedMemoryReduce(channel, index, memory))
    names = [f"worker{worker}" for worker in range(workers)]
    return WorkerAllReduce(channel, RingReduce(channel, index, names))


def allreduce_links(workers: Sequence[str], on_one_node: bool) -> list[tuple[str, str]]:
    """Who connects to whom: all to all in memory, else the neighbours and the first."""
    count = len(workers)
    return [
        (workers[low], workers[high])
        for low in range(count)
        for high in range(low + 1, count)
        if on_one_node or low == 0 or high - low == 1
    ]


def is_same_host(channel: Channel) -> bool:
    """Whether all ranks of a channel are on this host."""
    return isinstance(channel, SocketChannel) and all(
        sock.family == socket.AF_UNIX for sock in channel.sockets
    )


def _offer(near: SocketChannel) -> torch.Tensor | None:
    """Memory for all workers, or a word that there is none."""
    if not is_same_host(near):
        for sock in near.sockets:
            sock.send(MEMORY_APART)
        return None
    file = os.memfd_create("embroute-sums")
    os.ftruncate(file, TURNS * (len(near.sockets) + 1) * REDUCE_BYTES)
    for sock in near.sockets:
        socket.send_fds(sock, [MEMORY_SHARED], [file])
    return _mapped(file)


def _offered(near: SocketChannel, timeout_s: float) -> torch.Tensor | None:
    """What the first worker offers."""
    file = receive_memory(near, "worker0", timeout_s)
    return None if file is None else _mapped(file)


def _mapped(file: int) -> torch.Tensor:
    """A file's memory, for as long as somebody has it."""
    memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    os.close(file)
    return memory
