"""Sums over workers: in shared memory, round a ring, or at the first shard.

A ring passes every slow link several times in a row, each time behind the link's other traffic. At
the first shard, a worker's addend leaves as soon as it is ready, while others still compute, and
the sum goes to all workers at once. `cost.step_time.reduces_at_shard` says which of them is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import numpy as np
import torch

from embroute.kernels.array_types import I64, U8
from embroute.transport.interface import Channel, LostPeerError, MessageError
from embroute.transport.shm import share_memory
from embroute.transport.sockets import SocketChannel

REDUCIBLE_DTYPES = (torch.float32, torch.float64)
# The header before an addend: how many numbers follow, how many the worker awaits, and the bytes of
# each. A worker with nothing to add sends a header only; one that leaves sends GONE.
SENT, AWAITED, WIDTH = range(3)
GONE = -1
# Up to so many workers, each adds up everything by itself; with more, each adds up a share, which
# costs a second meeting but reads every addend once.
FEW_WORKERS = 4
REDUCE_BYTES = 1 << 22  # of an addend that one turn adds up
TURNS = 2  # a worker may write its next addend while another still reads the one before


class AllReduce(Protocol):
    """A way to add up tensors over the workers. One thread only."""

    channel: Channel
    in_memory: bool  # whether addends use no link

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers; a worker that adds nothing has zeros."""
        ...


def can_reduce(flat: torch.Tensor) -> bool:
    """Whether the centre can add up tensors of this kind."""
    return flat.device.type == "cpu" and flat.dtype in REDUCIBLE_DTYPES


class CentralReduce:
    """Sums at the first shard, in the order of workers: a worker's end."""

    def __init__(self, channel: Channel, centre: str) -> None:
        self.in_memory = False
        self.channel, self.centre, self._sums = channel, centre, count(1)

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers that add something."""
        size = len(flat)
        head = np.array([size if adds else 0, size, flat.itemsize], np.int64)
        data: U8 = flat.numpy().view(np.uint8)
        addend = [(self.centre, data)] if adds else []
        self.channel.begin("star", next(self._sums))
        # Everything must have left before the sum may overwrite the addend: hence two exchanges.
        self.channel.exchange([(self.centre, head.view(np.uint8)), *addend], [])
        self.channel.exchange([], [(self.centre, data)])

    def leave(self) -> None:
        """Tell the centre that this worker asks for no more sums."""
        self.channel.begin("star", next(self._sums))
        self.channel.exchange([(self.centre, np.array([GONE, 0, 0], np.int64).view(np.uint8))], [])


def serve_allreduce(channel: Channel, workers: Sequence[str]) -> None:
    """The centre's end: add up as workers ask, until all of them have left."""
    header_W3 = np.zeros((len(workers), 3), np.int64)
    for number in count(1):
        channel.begin("star", number)
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
    size, width = awaited.pop()
    if awaited or sent - {size} or width not in (4, 8) or size < 0:
        raise MessageError(f"workers add up different things: {header_W3.tolist()}")
    senders = [w for w, header in zip(workers, header_W3, strict=True) if header[SENT]]
    if senders:
        addends = [np.empty(size, f"f{width}") for _ in senders]
        channel.exchange([], list(zip(senders, (a.view(np.uint8) for a in addends), strict=True)))
    else:
        addends = [np.zeros(size, f"f{width}")]
    total = addends[0]
    for addend in addends[1:]:
        total += addend
    channel.exchange([(w, total.view(np.uint8)) for w in workers], [])


class SharedMemoryReduce:
    """Sums through shared memory, added up in the order of workers."""

    def __init__(self, channel: Channel, index: int, memory: torch.Tensor) -> None:
        self.channel, self._index, self.in_memory = channel, index, True
        self._addends_TWB = memory.view(TURNS, -1, REDUCE_BYTES)  # turns x workers x bytes
        self._names = [f"worker{w}" for w in range(self._addends_TWB.shape[1]) if w != index]
        self._turn, self._sums = 0, count(1)

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers."""
        self.channel.begin("sums", next(self._sums))
        staged = flat.cpu()
        for piece in torch.split(staged, REDUCE_BYTES // flat.itemsize):
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
        if staged is not flat:
            flat.copy_(staged)

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
        flag, flags = np.ones(1, np.uint8), np.empty((len(self._names), 1), np.uint8)
        sends = [(name, flag) for name in self._names]
        self.channel.exchange(sends, list(zip(self._names, flags, strict=True)))


def _sum_in_order(addends: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The order of workers is the same everywhere, so every worker gets the same bits."""
    torch.add(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        out += addend


class RingReduce:
    """Sums round a ring: every worker gets the same sum, to the last bit."""

    def __init__(self, channel: Channel, index: int, workers: Sequence[str]) -> None:
        self.channel, self._index, self._count = channel, index, len(workers)
        self.in_memory = False
        self._previous, self._next = workers[index - 1], workers[(index + 1) % len(workers)]
        self._sums = count(1)

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers."""
        self.channel.begin("sums", next(self._sums))
        staged = flat.cpu()
        pieces = staged.tensor_split(self._count)
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
        if staged is not flat:
            flat.copy_(staged)

    def _pass_on(self, outgoing: torch.Tensor, target: torch.Tensor) -> None:
        sends = [(self._next, _bytes(outgoing))] if len(outgoing) else []
        receives = [(self._previous, _bytes(target))] if len(target) else []
        self.channel.exchange(sends, receives)


def _bytes(tensor: torch.Tensor) -> U8:
    data: U8 = tensor.view(torch.uint8).numpy()
    return data


def reduce_bytes(workers: int) -> int:
    """Bytes of memory in which so many workers add up."""
    return TURNS * workers * REDUCE_BYTES


def new_allreduce(channel: Channel, index: int, workers: int, memory: U8 | None) -> AllReduce:
    """Sums of a worker through common memory, or round a ring."""
    if memory is None:
        return RingReduce(channel, index, [f"worker{worker}" for worker in range(workers)])
    return SharedMemoryReduce(channel, index, torch.from_numpy(memory))


def share_addends(channel: SocketChannel, index: int, workers: int, timeout_s: float) -> U8:
    """Memory for the addends of workers of one host, made by the first worker."""
    source, targets = ("worker0", []) if index else ("", channel.names)
    return share_memory(channel, reduce_bytes(workers), source, targets, timeout_s)


def allreduce_links(workers: Sequence[str], in_memory: bool) -> list[tuple[str, str]]:
    """Pairs of workers to connect: all pairs for memory, else neighbours and the first worker."""
    return [
        (workers[low], workers[high])
        for low in range(len(workers))
        for high in range(low + 1, len(workers))
        if in_memory or low == 0 or high - low == 1
    ]
