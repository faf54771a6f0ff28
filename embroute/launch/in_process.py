"""A whole job in one process: every rank a thread, every channel a queue. For tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from embroute.kernels.array_types import U8
from embroute.launch.rank import RankContext, rank_names
from embroute.transport.buffers import CopyingTransport
from embroute.transport.inproc import InProcessChannel, InProcessNetwork
from embroute.transport.interface import LostPeerError

_T = TypeVar("_T")


class InProcessTransport(CopyingTransport):
    """Mail between threads, which share all of their memory."""

    def __init__(self, hub: InProcessNetwork, channel: InProcessChannel) -> None:
        super().__init__(channel)
        self._hub, self._asked = hub, 0

    def common_memory(self, size: int) -> U8 | None:
        """The hub's: other memory each time that all ask."""
        self._asked += 1
        return self._hub.memory(self._asked, size)


def in_process_rank(
    hub: InProcessNetwork, name: str, num_workers: int, num_shards: int
) -> RankContext:
    """A rank that is a thread of this process."""
    workers = tuple(f"worker{i}" for i in range(num_workers))
    kinds = ("plans", "rows", "answers", "star")
    plans, rows, answers, star = (InProcessChannel(hub, kind, name) for kind in kinds)
    dense = InProcessChannel(hub, "dense", name, workers)
    transport = InProcessTransport(hub, rows)
    return RankContext(name, num_workers, num_shards, plans, transport, dense, answers, star)


def run_in_process(
    num_workers: int, num_shards: int, main: Callable[[RankContext], _T]
) -> dict[str, _T]:
    """Run `main` as every rank of a job; returns what each gave, or raises what the first raised.

    A rank that fails wakes all others, as a closed connection would.
    """
    hub, results = InProcessNetwork(), dict[str, _T]()
    errors: list[BaseException] = []

    def rank(name: str) -> None:
        try:
            results[name] = main(in_process_rank(hub, name, num_workers, num_shards))
        except BaseException as error:
            errors.append(error)
            hub.abort()

    ranks = rank_names(num_workers, num_shards)
    threads = [threading.Thread(target=rank, args=(name,), name=name) for name in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, LostPeerError)), errors[0])
    return results
