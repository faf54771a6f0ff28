"""A whole job in one process, for tests and trials: ranks are threads, channels are queues."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from embroute.kernels.array_types import U8
from embroute.launch.rank import RankContext, rank_names, role_and_index
from embroute.transport.allreduce import new_allreduce, reduce_bytes
from embroute.transport.headers import MessageCounter, check_header
from embroute.transport.interface import LostPeerError, Message, Receive

_T = TypeVar("_T")
_Queue = queue.SimpleQueue[tuple[bytes, U8] | None]


@dataclass
class InProcessNetwork:
    """All queues between the ranks of one process, and their common memory."""

    queues: dict[tuple[str, str, str], _Queue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    common: dict[Hashable, U8] = field(default_factory=dict)

    def queue_between(self, channel: str, source: str, target: str) -> _Queue:
        """Messages on their way from one rank to another."""
        with self.lock:
            return self.queues.setdefault((channel, source, target), queue.SimpleQueue())

    def memory(self, key: Hashable, size: int) -> U8:
        """Zeros, the same for every rank that asks for this key."""
        with self.lock:
            return self.common.setdefault(key, np.zeros(size, np.uint8))

    def abort(self) -> None:
        """Wake every waiting rank: one rank has failed."""
        self.broken.set()
        with self.lock:
            for messages in self.queues.values():
                messages.put(None)


class InProcessChannel:
    """A channel between threads of one process."""

    def __init__(self, network: InProcessNetwork, kind: str, name: str) -> None:
        self.network, self.kind, self.name = network, kind, name
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self._counter, self._common = MessageCounter(kind), count(1)
        self.begin = self._counter.begin

    def acquire(self, peer: str, size: int) -> U8:
        """New memory: the receiver takes it over."""
        return np.empty(size, np.uint8)

    def submit(self, sends: Sequence[Message], receives: Sequence[Receive]) -> InProcessMessages:
        """Copy the sends into the other ranks' queues at once; `wait` receives."""
        for peer, data in sends:
            header = self._counter.sent(peer, data.nbytes)
            self.network.queue_between(self.kind, self.name, peer).put((header, data.copy()))
        sizes = [room.nbytes if isinstance(room, np.ndarray) else room for _, room in receives]
        peers = [peer for peer, _ in receives]
        expected = [self._counter.expected(*pair) for pair in zip(peers, sizes, strict=True)]
        return InProcessMessages(self, receives, expected)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Receive]) -> list[U8]:
        """Send and receive all messages."""
        return self.submit(sends, receives).wait()

    def common_memory(self, size: int) -> U8 | None:
        """The same memory for the same call of every rank."""
        return self.network.memory((self.kind, next(self._common)), size)

    def close(self) -> None:
        """Nothing: the queues end with the network."""

    def receive(self, peer: str, room: U8 | int, expected: bytes) -> U8:
        """Wait for the next message of a peer."""
        began = time.perf_counter()
        queue_of_peer = self.network.queue_between(self.kind, peer, self.name)
        message = None if self.network.broken.is_set() else queue_of_peer.get()
        if message is None:
            raise LostPeerError(f"lost {peer}: another rank failed")
        header, data = message
        check_header(peer, header, expected)
        if isinstance(room, np.ndarray):
            room[:] = data
        self.waited_s[peer] += time.perf_counter() - began
        return data


class InProcessMessages(NamedTuple):
    """Messages that a rank has submitted."""

    channel: InProcessChannel
    receives: Sequence[Receive]
    headers: Sequence[bytes]

    def wait(self) -> list[U8]:
        """Receive every message."""
        messages = zip(self.receives, self.headers, strict=True)
        return [self.channel.receive(peer, room, header) for (peer, room), header in messages]

    def release(self) -> None:
        """Nothing: every message has its own memory."""


def in_process_rank(
    network: InProcessNetwork, name: str, num_workers: int, num_shards: int
) -> RankContext:
    """One rank among the threads of a network."""
    channels = {
        kind: InProcessChannel(network, kind, name)
        for kind in ("plans", "rows", "answers", "star", "sums")
    }
    role, index = role_and_index(name)
    sums, memory = channels["sums"], None
    if role == "worker" and num_workers > 1:
        memory = network.memory("addends", reduce_bytes(num_workers))
    allreduce = new_allreduce(sums, index if role == "worker" else 0, num_workers, memory)
    allreduce.in_memory = False  # as between hosts, so that its bytes count
    return RankContext(
        name,
        num_workers,
        num_shards,
        control=channels["plans"],
        rows=channels["rows"],
        allreduce=allreduce,
        replies=channels["answers"],
        central=channels["star"],
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
