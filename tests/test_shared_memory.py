"""Messages between shards and workers are the same in shared memory and over connections."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.transport import shm
from embroute.transport.interface import Channel, LostPeerError
from embroute.transport.shm import NOWHERE, RingBuffer, SharedMemoryChannel, share_rows
from embroute.transport.sockets import SocketChannel
from tests.sizes import sized

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux only")
SIZES = [1, 8, 0, 300, 4096, 64, 2000, 9000, 5] * 20


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(opened: ExitStack) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of one connection."""
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    ends = SocketChannel({"worker0": left}), SocketChannel({"shard0": right})
    for end in ends:
        opened.callback(end.close)
    return ends


def near(opened: ExitStack) -> tuple[SharedMemoryChannel, SharedMemoryChannel]:
    shard, worker = connected(opened)
    return share_rows("shard0", shard, 20.0), share_rows("worker0", worker, 20.0)


def content(size: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


def exchange(transport: Channel, peer: str, ahead: int) -> int:
    """Send messages both ways, some ahead of reading; the number that arrived as sent."""
    right, posted = 0, []
    for i, size in enumerate(SIZES):
        buffer = transport.acquire(peer, size)
        buffer[:] = content(size, i)
        posted.append((i, transport.submit([(peer, buffer)], [(peer, size)])))
        if len(posted) > ahead or i == len(SIZES) - 1:
            for number, arriving in posted:
                (found,) = arriving.wait()
                right += np.array_equal(found, content(SIZES[number], number))
                arriving.release()
            posted = []
    return right


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("kind", ["shared", "crowded", "copied"])
def test_shared_memory_messages_arrive_in_order(
    kind: str, ahead: int, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "crowded":  # many messages find no room, and some never do
        monkeypatch.setattr(shm, "RING_BYTES", 1 << 12)
    ends: tuple[Channel, Channel] = near(opened)
    if kind == "copied":
        ends = connected(opened)
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(exchange, ends[0], "worker0", ahead)]
        tasks.append(pool.submit(exchange, ends[1], "shard0", ahead))
        assert [task.result(60) for task in tasks] == 2 * [len(SIZES)]


def test_receiver_reads_a_shared_message_without_a_copy(opened: ExitStack) -> None:
    shard, worker = near(opened)
    buffer = shard.acquire("worker0", 100)
    buffer[:] = 7
    shard.submit([("worker0", buffer)], [])
    arriving = worker.submit([], [("shard0", 100)])
    (found,) = arriving.wait()
    buffer[:] = 8
    assert (found == 8).all()


def test_unreleased_buffers_are_not_overwritten(opened: ExitStack) -> None:
    shard, worker = near(opened)
    kept = []
    for i in range(5):
        buffer = shard.acquire("worker0", 100)
        buffer[:] = i
        shard.submit([("worker0", buffer)], [])
        kept.append(worker.submit([], [("shard0", 100)]))
    assert [found.tolist() for one in kept for found in one.wait()] == [[i] * 100 for i in range(5)]


def test_wait_on_shared_memory_names_a_lost_peer(opened: ExitStack) -> None:
    shard, worker = connected(opened)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(share_rows, "worker0", worker, 20.0)
        transport = share_rows("shard0", shard, 20.0)
        taking.result(60)
    arriving = transport.submit([], [("worker0", 10)])
    worker.close()
    with pytest.raises(LostPeerError, match="lost worker0"):
        arriving.wait()
    with pytest.raises(LostPeerError, match="lost worker0"):
        transport.exchange([("worker0", transport.acquire("worker0", 10))], [])


def test_common_memory_is_shared_by_all_shards_and_workers(opened: ExitStack) -> None:
    ranks = {
        name: dict[str, socket.socket]() for name in ("shard0", "shard1", "worker0", "worker1")
    }
    for shard, worker in product(("shard0", "shard1"), ("worker0", "worker1")):
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        ranks[shard][worker], ranks[worker][shard] = ends
    channels = {name: SocketChannel(sockets) for name, sockets in ranks.items()}
    for channel in channels.values():
        opened.callback(channel.close)
    shards = [share_rows(name, channels[name], 20.0) for name in ("shard0", "shard1")]
    workers = [share_rows(name, channels[name], 20.0) for name in ("worker0", "worker1")]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(transport.common_memory, 5000) for transport in (*workers, *shards)]
        found = [task.result(60) for task in asked]
    for number, memory in enumerate(found):
        assert memory is not None
        assert len(memory) == 5000
        memory[number] = number + 1
    assert all(m is not None and m[:5].tolist() == [1, 2, 3, 4, 0] for m in found)


def test_sockets_have_no_common_memory(opened: ExitStack) -> None:
    assert connected(opened)[0].common_memory(100) is None


def test_shared_memory_leaves_no_file(opened: ExitStack) -> None:
    near(opened)
    assert not [name for name in os.listdir("/dev/shm") if "embroute" in name]


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 4)), max_size=60))
@settings(max_examples=sized(50, 200))
def test_ring_buffer_keeps_messages_apart(moves: list[tuple[int, int]]) -> None:
    ring, held, read = RingBuffer(np.zeros(4096, np.uint8)), list[tuple[int, int]](), 0
    for size, reads in moves:
        start = ring.find(size)
        if start != NOWHERE:
            assert 0 <= start <= start + size <= 4096
            assert all(
                start + size <= first or last <= start for first, last in held if last > first
            )
            held.append((start, start + size))
        else:
            assert held, "an empty slab has room"
        done = min(reads, len(held))
        held, read = held[done:], read + done
        ring.free(read)
