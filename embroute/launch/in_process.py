"""A whole job in one process, for tests and trials: ranks are threads, channels are queues."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from embroute.kernels.array_types import U8
from embroute.launch.rank import RankContext, rank_names, worker_names
from embroute.transport.buffers import CopyingTransport
from embroute.transport.interface import LostPeerError, Message, Work

_T = TypeVar("_T")
_Queue = queue.SimpleQueue[U8 | None]


@dataclass
class InProcessNetwork:
    """All queues between the ranks of one process, and their common memory."""

    queues: dict[tuple[str, str, str], _Queue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    common: dict[int, U8] = field(default_factory=dict)

    def queue_between(self, channel: str, source: str, target: str) -> _Queue:
        """Messages on their way from one rank to another."""
        with self.lock:
            return self.queues.setdefault((channel, source, target), queue.SimpleQueue())

    def memory(self, number: int, size: int) -> U8:
        """Zeros, the same for every rank that asks for this number."""
        with self.lock:
            return self.common.setdefault(number, np.zeros(size, np.uint8))

    def abort(self) -> None:
        """Wake every waiting rank: one rank has failed."""
        self.broken.set()
        with self.lock:
            for messages in self.queues.values():
                messages.put(None)


@dataclass(frozen=True)
class InProcessChannel:
    """A channel between threads of one process; sums are taken in the order of `members`."""

    network: InProcessNetwork
    kind: str
    name: str
    members: tuple[str, ...] = ()
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    in_memory = False

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> Work:
        """Copy the sends into the other ranks' queues at once; `wait` receives."""
        for peer, data in sends:
            self.network.queue_between(self.kind, self.name, peer).put(data.copy())
        return InProcessWork(self, receives)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages."""
        self.submit(sends, receives).wait()

    def close(self) -> None:
        """Nothing: the queues end with the network."""

    def receive(self, peer: str, data: U8) -> None:
        """Wait for the next message of a peer, which must be as long as `data`."""
        began = time.perf_counter()
        messages = self.network.queue_between(self.kind, peer, self.name)
        message = None if self.network.broken.is_set() else messages.get()
        if message is None:
            raise LostPeerError(f"lost {peer}: another rank failed")
        if len(message) != len(data):
            raise RuntimeError(
                f"{peer} sent {self.name} {len(message)} bytes on {self.kind}, expected {len(data)}"
            )
        data[:] = message
        self.waited_s[peer] += time.perf_counter() - began

    def sum(self, flat: torch.Tensor) -> None:
        """The first member adds up the others' tensors, and sends the sum back."""
        data, first = flat.numpy().view(np.uint8), self.members[0]
        if self.name != first:
            self.exchange([(first, data)], [(first, data)])
            return
        addend = torch.empty_like(flat)
        for peer in self.members[1:]:
            self.exchange([], [(peer, addend.numpy().view(np.uint8))])
            flat += addend
        self.exchange([(peer, data) for peer in self.members[1:]], [])


@dataclass(frozen=True)
class InProcessWork:
    """Messages that a rank has submitted."""

    channel: InProcessChannel
    receives: Sequence[Message]

    def wait(self) -> None:
        """Receive every message."""
        for peer, data in self.receives:
            self.channel.receive(peer, data)


class InProcessTransport(CopyingTransport):
    """Row messages between threads, which can also share memory."""

    def __init__(self, network: InProcessNetwork, channel: InProcessChannel) -> None:
        super().__init__(channel)
        self._network, self._calls = network, 0

    def common_memory(self, size: int) -> U8 | None:
        """The same memory for the same call of every rank."""
        self._calls += 1
        return self._network.memory(self._calls, size)


def in_process_rank(
    network: InProcessNetwork, name: str, num_workers: int, num_shards: int
) -> RankContext:
    """One rank among the threads of a network."""
    workers = tuple(worker_names(num_workers))
    return RankContext(
        name,
        num_workers,
        num_shards,
        control=InProcessChannel(network, "plans", name),
        rows=InProcessTransport(network, InProcessChannel(network, "rows", name)),
        allreduce=InProcessChannel(network, "dense", name, workers),
        replies=InProcessChannel(network, "answers", name),
        central=InProcessChannel(network, "star", name),
    )


def run_in_process(
    num_workers: int, num_shards: int, main: Callable[[RankContext], _T]
) -> dict[str, _T]:
    """Run `main` as every rank of a job; returns each rank's result, or raises the first error.

    A rank that fails wakes all others, as a closed connection would.
    """
    network, results = InProcessNetwork(), dict[str, _T]()
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            results[name] = main(in_process_rank(network, name, num_workers, num_shards))
        except BaseException as error:
            errors.append(error)
            network.abort()

    ranks = rank_names(num_workers, num_shards)
    threads = [threading.Thread(target=run, args=(name,), name=name) for name in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, LostPeerError)), errors[0])
    return results
