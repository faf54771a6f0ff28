"""Sums through shared memory: those of all workers, in their order, and never without one."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from embroute.runtime import sums
from embroute.runtime.exchange import Hub, LocalChannel, LostPeerError, Sums
from embroute.runtime.streams import StreamChannel
from embroute.runtime.sums import FEW, SharedSums, shared_sums

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are driven on Linux only")
Near = list[StreamChannel]


def connected(workers: int, pair: Callable[[], tuple[socket.socket, socket.socket]]) -> Near:
    """Every worker's connections to all others."""
    links: list[dict[str, socket.socket]] = [{} for _ in range(workers)]
    for low, high in itertools.combinations(range(workers), 2):
        left, right = pair()
        left.setblocking(False)
        right.setblocking(False)
        links[low][f"worker{high}"], links[high][f"worker{low}"] = left, right
    return [StreamChannel(own) for own in links]


def network_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ready(workers: int, opened: ExitStack, pair: Any = socket.socketpair) -> list[Sums]:
    """Every worker's sums."""
    near, hub = connected(workers, pair), Hub()
    for channel in near:
        opened.callback(channel.close)
    members = tuple(f"worker{i}" for i in range(workers))
    apart = [LocalChannel(hub, "dense", name, members) for name in members]
    return together([partial(shared_sums, apart[i], near[i], i, 20.0) for i in range(workers)])


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [task.result(60) for task in [pool.submit(one) for one in work]]


def parts(workers: int, step: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=draw).to(dtype) for _ in range(workers)]


@pytest.mark.parametrize("workers", range(2, FEW + 1))
def test_sums_are_taken_in_the_order_of_workers(
    workers: int, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "SLAB_BYTES", 4096)  # most sums take several turns
    channels = ready(workers, opened)
    assert all(isinstance(channel, SharedSums) for channel in channels)
    kinds = (torch.float32, torch.float64, torch.bfloat16)

    def work(worker: int) -> int:
        right = 0
        for step, size in enumerate([0, 1, 5, 1000, 1024, 5000, 3] * 20):
            own = parts(workers, step, size, kinds[step % 3])
            expected = own[0].clone()
            for other in own[1:]:
                expected += other
            channels[worker].sum(own[worker])
            right += torch.equal(own[worker], expected)
        return right

    assert together([partial(work, w) for w in range(workers)]) == [140] * workers


def test_messages_go_where_they_went(opened: ExitStack) -> None:
    first, second = ready(2, opened)
    data = torch.arange(4, dtype=torch.uint8).numpy()
    got = torch.zeros(4, dtype=torch.uint8).numpy()
    first.swap([("worker1", data)], [])
    second.post([], [("worker0", got)]).wait()
    assert got.tolist() == [0, 1, 2, 3]
    first.close()


def test_workers_of_several_hosts_share_no_memory(opened: ExitStack) -> None:
    channels = ready(3, opened, network_pair)
    assert all(isinstance(channel, LocalChannel) for channel in channels)


def test_a_lost_worker_is_named(opened: ExitStack) -> None:
    channels = ready(2, opened)
    assert isinstance(channels[1], SharedSums)
    channels[1]._near.close()
    with pytest.raises(LostPeerError, match="lost worker1"):
        channels[0].sum(torch.ones(3))


def test_a_worker_lost_at_the_start_is_named() -> None:
    near = connected(2, socket.socketpair)
    near[0].close()
    with pytest.raises(LostPeerError, match="lost worker0"):
        shared_sums(LocalChannel(Hub(), "dense", "worker1"), near[1], 1, 20.0)
    near[1].close()
