"""Sums over workers: in shared memory, round a ring, or at the first shard.

A ring passes every slow link several times in a row, each time behind the link's other traffic. At
the first shard, a worker's addend leaves as soon as it is ready, while others still compute, and
the sum goes to all workers at once. `cost.step_time.reduces_at_shard` says which of them is better.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from embroute.kernels.array_types import I64, U8
from embroute.transport.interface import Channel, LostPeerError, Message, Work
from embroute.transport.shm import (
    MEMORY_APART,
    create_memory,
    map_memory,
    receive_memory,
    send_memory,
)
from embroute.transport.sockets import SocketChannel

REDUCIBLE_DTYPES = (torch.float32, torch.float64)
# The header before an addend: how many numbers follow, how many the worker awaits, and the bytes of
# each. A worker with nothing to add sends a header only; one that leaves sends GONE.
SENT, AWAITED, WIDTH = range(3)
GONE = -1


def can_reduce(flat: torch.Tensor) -> bool:
    """Whether the centre can add up tensors of this kind."""
    return flat.device.type == "cpu" and flat.dtype in REDUCIBLE_DTYPES


class CentralAllReduce:
    """A worker's end of the sums at the first shard. One thread only."""

    def __init__(self, channel: Channel, centre: str) -> None:
        self.channel, self.centre = channel, centre

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers that add something, taken in their order."""
        count = len(flat)
        header = np.array([count if adds else 0, count, flat.itemsize], np.int64)
        data: U8 = flat.numpy().view(np.uint8)
        addend = [(self.centre, data)] if adds else []
        # Everything must have left before the sum may overwrite the addend: hence two exchanges.
        self.channel.exchange([(self.centre, header.view(np.uint8)), *addend], [])
        self.channel.exchange([], [(self.centre, data)])

    def leave(self) -> None:
        """Tell the centre that this worker asks for no more sums."""
        self.channel.exchange([(self.centre, np.array([GONE, 0, 0], np.int64).view(np.uint8))], [])


def serve_allreduce(channel: Channel, workers: Sequence[str]) -> None:
    """The centre's end: add up as workers ask, until all of them have left."""
    header_W3 = np.zeros((len(workers), 3), np.int64)
    while True:
        try:
            headers = (header.view(np.uint8) for header in header_W3)
            channel.exchange([], list(zip(workers, headers, strict=True)))
            if (header_W3[:, SENT] == GONE).all():
                return
            _reduce_once(channel, workers, header_W3)
        except LostPeerError:
            return  # the thread that moves rows reports the lost worker


def _reduce_once(channel: Channel, workers: Sequence[str], header_W3: I64) -> None:
    awaited = {tuple(header) for header in header_W3[:, AWAITED:].tolist()}
    sent = set(header_W3[:, SENT].tolist()) - {0}
    count, width = awaited.pop()
    if awaited or sent - {count}:
        raise RuntimeError(f"workers add up different things: {header_W3.tolist()}")
    senders = [w for w, header in zip(workers, header_W3, strict=True) if header[SENT]]
    if senders:
        addends = [np.empty(count, f"f{width}") for _ in senders]
        channel.exchange([], list(zip(senders, (a.view(np.uint8) for a in addends), strict=True)))
    else:
        addends = [np.zeros(count, f"f{width}")]
    total = addends[0]
    for addend in addends[1:]:
        total += addend
    channel.exchange([(w, total.view(np.uint8)) for w in workers], [])


# Up to so many workers, each adds up everything by itself; with more, each adds up a share, which
# costs a second meeting but reads every addend once.
FEW_WORKERS = 4
REDUCE_BYTES = 1 << 22  # of an addend that one turn adds up
TURNS = 2  # a worker may write its next addend while another still reads the one before


class ReduceStrategy(Protocol):
    """A way to add up over the workers."""

    in_memory: bool  # whether addends use no link

    def add(self, flat: torch.Tensor) -> None:
        """Replace a tensor in the CPU's memory by the sum over the workers."""


class WorkerAllReduce:
    """The connections between workers: messages and sums. One thread only."""

    def __init__(self, channel: SocketChannel, strategy: ReduceStrategy) -> None:
        self._channel, self._strategy = channel, strategy

    @property
    def in_memory(self) -> bool:
        """Whether sums use no link."""
        return self._strategy.in_memory

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
            self._strategy.add(flat)
        else:
            staged = flat.cpu()
            self._strategy.add(staged)
            flat.copy_(staged)


class SharedMemoryReduce:
    """Sums through shared memory, added up in the order of workers."""

    in_memory = True

    def __init__(self, channel: SocketChannel, index: int, memory: torch.Tensor) -> None:
        self._channel, self._index = channel, index
        self._addends_TWB = memory.view(TURNS, -1, REDUCE_BYTES)  # turns x workers x bytes
        self._turn = 0

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        for piece in torch.split(flat, REDUCE_BYTES // flat.itemsize):
            # A worker that reaches the next turn has met all others in this one. So all of them
            # have finished reading the turn before, whose memory the next turn overwrites.
            addends_WB = self._addends_TWB[self._turn]
            self._turn = (self._turn + 1) % TURNS
            addends = [memory[: piece.nbytes].view(piece.dtype) for memory in addends_WB]
            addends[self._index].copy_(piece)
            self._meet()
            if len(addends) <= FEW_WORKERS:
                _sum_in_order(addends, piece)
            else:
                self._add_by_share(addends, piece)

    def _add_by_share(self, addends: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        """Each worker adds up its share, and writes it over its own addend of that share.

        No other worker reads that place before the second meeting.
        """
        share_of = [addend.tensor_split(len(addends)) for addend in addends]
        share = [shares[self._index] for shares in share_of]
        total = torch.empty_like(share[0])
        _sum_in_order(share, total)
        share[self._index].copy_(total)
        self._meet()
        torch.cat([shares[worker] for worker, shares in enumerate(share_of)], out=piece)

    def _meet(self) -> None:
        """Tell the others that this worker has written, and wait until all of them have."""
        names = self._channel.names
        flag, flags = np.ones(1, np.uint8), np.empty((len(names), 1), np.uint8)
        sends = [(name, flag) for name in names]
        self._channel.exchange(sends, list(zip(names, flags, strict=True)))


def _sum_in_order(addends: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The order of workers is the same everywhere, so every worker gets the same bits."""
    torch.add(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        out += addend


class RingReduce:
    """Sums round a ring: every worker gets the same sum, to the last bit."""

    in_memory = False

    def __init__(self, channel: SocketChannel, index: int, workers: Sequence[str]) -> None:
        self._channel, self._index, self._count = channel, index, len(workers)
        self._previous, self._next = workers[index - 1], workers[(index + 1) % len(workers)]

    def add(self, flat: torch.Tensor) -> None:
        """Replace by the sum over the workers."""
        pieces = flat.tensor_split(self._count)
        arrived = torch.empty_like(pieces[0])  # the largest piece
        # Reduce-scatter: after the last turn, piece (index + 1) is complete at this worker.
        for turn in range(self._count - 1):
            outgoing = pieces[(self._index - turn) % self._count]
            target = pieces[(self._index - turn - 1) % self._count]
            self._pass_on(outgoing, arrived[: len(target)])
            target += arrived[: len(target)]
        # All-gather: complete pieces go round and replace the others.
        for turn in range(self._count - 1):
            outgoing = pieces[(self._index + 1 - turn) % self._count]
            self._pass_on(outgoing, pieces[(self._index - turn) % self._count])

    def _pass_on(self, outgoing: torch.Tensor, target: torch.Tensor) -> None:
        sends = [(self._next, _bytes(outgoing))] if len(outgoing) else []
        receives = [(self._previous, _bytes(target))] if len(target) else []
        self._channel.exchange(sends, receives)


def _bytes(tensor: torch.Tensor) -> U8:
    data: U8 = tensor.view(torch.uint8).numpy()
    return data


def open_allreduce(
    channel: SocketChannel, index: int, workers: int, timeout_s: float
) -> WorkerAllReduce:
    """Sums through memory if all workers are on one host, else round a ring.

    The first worker decides: it has a connection to each of the others.
    """
    file = None
    if workers > 1:
        first = index == 0
        file = _offer(channel) if first else receive_memory(channel, "worker0", timeout_s)
    if file is not None:
        memory = torch.from_numpy(map_memory(file))
        return WorkerAllReduce(channel, SharedMemoryReduce(channel, index, memory))
    names = [f"worker{worker}" for worker in range(workers)]
    return WorkerAllReduce(channel, RingReduce(channel, index, names))


def allreduce_links(workers: Sequence[str], on_one_node: bool) -> list[tuple[str, str]]:
    """Pairs of workers to connect: all pairs for memory, else neighbours and the first worker."""
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


def _offer(channel: SocketChannel) -> int | None:
    """Send memory to all workers, or a byte that says there is none."""
    if not is_same_host(channel):
        for sock in channel.sockets:
            sock.send(MEMORY_APART)
        return None
    file = create_memory("embroute-sums", TURNS * (len(channel.names) + 1) * REDUCE_BYTES)
    for name in channel.names:
        send_memory(channel, name, file)
    return file
