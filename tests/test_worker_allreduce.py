"""The all-reduce of workers, in shared memory and in a ring: right, and equal on all workers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from embroute.transport import allreduce
from embroute.transport.allreduce import (
    FEW_WORKERS,
    AllReduce,
    allreduce_links,
    new_allreduce,
    share_addends,
)
from embroute.transport.interface import LostPeerError
from embroute.transport.sockets import SocketChannel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux only")
Near = list[SocketChannel]


def connected(
    workers: int, pair: Callable[[], tuple[socket.socket, socket.socket]], near: bool = True
) -> Near:
    """Every worker's connections to the workers it needs."""
    names = [f"worker{i}" for i in range(workers)]
    links: dict[str, dict[str, socket.socket]] = {name: {} for name in names}
    for low, high in allreduce_links(names, near):
        left, right = pair()
        left.setblocking(False)
        right.setblocking(False)
        links[low][high], links[high][low] = left, right
    return [SocketChannel(links[name]) for name in names]


def network_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(channels: Near, index: int, near: bool) -> AllReduce:
    """The all-reduce of one worker; with `near`, through memory."""
    memory = share_addends(channels[index], index, len(channels), 20.0) if near else None
    return new_allreduce(channels[index], index, len(channels), memory)


def ready(workers: int, opened: ExitStack, near: bool = True) -> list[AllReduce]:
    """The open all-reduce of every worker."""
    channels = connected(workers, socket.socketpair if near else network_pair, near)
    for channel in channels:
        opened.callback(channel.close)
    near = near and workers > 1
    return together([partial(begin, channels, i, near) for i in range(workers)])


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [task.result(60) for task in [pool.submit(one) for one in work]]


def parts(workers: int, step: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=draw).to(dtype) for _ in range(workers)]


SIZES = [0, 1, 5, 1000, 1024, 5000, 3] * 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("workers", [2, 3, FEW_WORKERS, FEW_WORKERS + 1, 8])
def test_shared_memory_all_reduce_adds_in_worker_order(
    workers: int, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce, "REDUCE_BYTES", 4096)  # most sums take several turns
    channels = ready(workers, opened)
    assert all(channel.in_memory for channel in channels)

    def work(worker: int) -> int:
        right = 0
        for step, size in enumerate(SIZES):
            own = parts(workers, step, size, DTYPES[step % 3])
            expected = own[0].clone()
            for other in own[1:]:
                expected += other
            channels[worker].sum(own[worker])
            right += torch.equal(own[worker], expected)
        return right

    assert together([partial(work, w) for w in range(workers)]) == [len(SIZES)] * workers


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_ring_all_reduce_is_right_and_equal_on_all_workers(workers: int, opened: ExitStack) -> None:
    channels = ready(workers, opened, near=False)
    assert not any(channel.in_memory for channel in channels)

    def work(worker: int) -> list[torch.Tensor]:
        made = []
        for step, size in enumerate(SIZES):
            own = parts(workers, step, size, DTYPES[step % 2])
            channels[worker].sum(own[worker])
            made.append(own[worker])
        return made

    made = together([partial(work, w) for w in range(workers)])
    for step, size in enumerate(SIZES):
        expected = torch.stack(parts(workers, step, size, DTYPES[step % 2])).double().sum(0)
        torch.testing.assert_close(made[0][step].double(), expected, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(other[step], made[0][step]) for other in made)


def test_all_reduce_of_one_worker_changes_nothing(opened: ExitStack) -> None:
    (alone,) = ready(1, opened)
    own = torch.arange(5.0)
    alone.sum(own)
    assert own.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("near", [True, False])
def test_workers_exchange_messages_beside_the_all_reduce(near: bool, opened: ExitStack) -> None:
    first, *_, last = ready(4, opened, near)
    data = torch.arange(4, dtype=torch.uint8).numpy()
    got = torch.zeros(4, dtype=torch.uint8).numpy()
    first.channel.exchange([("worker3", data)], [])
    last.channel.submit([], [("worker0", got)]).wait()
    assert got.tolist() == [0, 1, 2, 3]
    first.channel.close()


@pytest.mark.parametrize("near", [True, False])
def test_all_reduce_names_a_lost_worker(near: bool, opened: ExitStack) -> None:
    first, second = ready(2, opened, near)
    second.channel.close()
    with pytest.raises(LostPeerError, match="lost worker1"):
        first.sum(torch.ones(3))


def test_opening_the_all_reduce_names_a_lost_worker() -> None:
    near = connected(2, socket.socketpair)
    near[0].close()
    with pytest.raises(LostPeerError, match="lost worker0"):
        share_addends(near[1], 1, 2, 20.0)
    near[1].close()
