"""The all-reduce at the first shard: the order of additions, and the sizes for which it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from embroute.config.cluster import Worker, star_cluster
from embroute.config.cluster_file import open_cluster
from embroute.cost.step_time import link_bytes, reduces_at_shard
from embroute.launch.in_process import InProcessChannel, InProcessNetwork
from embroute.planner.plan import traffic
from embroute.planner.plan_stream import plans, start
from embroute.policies.catalog import make_policy
from embroute.simulator.simulation import Workload
from embroute.transport.allreduce import CentralReduce, can_reduce, serve_allreduce
from tests.test_embroute_policy import job

CENTRE = "shard0"


def together(num_workers: int, own: Callable[[int, CentralReduce], object]) -> dict[int, object]:
    """The results of all workers while the first shard adds up."""
    hub, found, failed = InProcessNetwork(), dict[int, object](), list[BaseException]()
    names = [f"worker{i}" for i in range(num_workers)]

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
            hub.abort()

    def worker(i: int) -> None:
        sums = CentralReduce(InProcessChannel(hub, "star", names[i]), CENTRE)
        found[i] = own(i, sums)
        sums.leave()

    jobs: list[Callable[[], None]] = [
        lambda: serve_allreduce(InProcessChannel(hub, "star", CENTRE), names),
        *(lambda i=i: worker(i) for i in range(num_workers)),
    ]
    threads = [threading.Thread(target=guarded, args=(each,)) for each in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if failed:
        raise next(e for e in failed if isinstance(e, RuntimeError) and "different" in str(e))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adds", [(True, True, True), (False, True, True), (False, False, False)])
def test_central_all_reduce_adds_in_worker_order(adds: Sequence[bool], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    parts = torch.randn(5, 3, 40, generator=generator, dtype=dtype)

    def own(i: int, sums: CentralReduce) -> list[torch.Tensor]:
        flats = [part[i].clone() for part in parts]
        for flat in flats:
            sums.sum(flat, adds[i])
        return flats

    expected = []
    for part in parts:
        total = torch.zeros(40, dtype=dtype)
        for i in np.flatnonzero(adds):
            total = total + part[i]
        expected.append(total)
    for flats in together(3, own).values():
        assert isinstance(flats, list)
        for flat, total in zip(flats, expected, strict=True):
            assert torch.equal(flat, total)


def test_central_all_reduce_refuses_different_sizes() -> None:
    with pytest.raises(RuntimeError, match="different things"):
        together(2, lambda i, sums: sums.sum(torch.zeros(3 + i)))


def test_central_all_reduce_accepts_float_tensors_in_memory() -> None:
    assert can_reduce(torch.zeros(1))
    assert not can_reduce(torch.zeros(1, dtype=torch.bfloat16))
    assert not can_reduce(torch.zeros(1, device="meta"))


def test_first_shard_reduces_when_its_link_suffices() -> None:
    """Eight parts take less time at 10 Gbit/s than one at 0.5, and at 100 more than one at 100."""
    edge, even = open_cluster("edge-8"), open_cluster("dc-8")
    assert reduces_at_shard(replace(edge, dense_bytes=1e9))
    # Two workers and the shard at one rate: half of what the shard's link carries is a ring's.
    assert not reduces_at_shard(replace(star_cluster([1.0, 1.0], 1.0), dense_bytes=1e6))
    assert reduces_at_shard(replace(star_cluster([1.0, 1.0], 2.0), dense_bytes=1e6))
    assert reduces_at_shard(replace(even, dense_bytes=30e3))  # 8 x 30 KB in 0.02 ms
    assert not reduces_at_shard(replace(even, dense_bytes=32e3))
    assert not reduces_at_shard(replace(even, workers=(Worker(1), Worker(1))))
    assert not reduces_at_shard(edge, with_rows=True)


def test_central_all_reduce_bytes_cross_each_link_once() -> None:
    given: Workload = job("edge-4", 0.1)
    cluster = replace(given.setup.cluster, dense_bytes=1000.0)
    policy = make_policy("vanilla")
    step = next(plans(policy, given.batches(), start(policy, given.setup)))
    moved = traffic(step.plan, given.setup)
    with_dense, without = link_bytes(moved, cluster), link_bytes(moved, given.setup.cluster)
    for own, other in zip(with_dense, without, strict=True):
        assert (own - other).tolist() == [4000.0, 1000.0, 1000.0, 1000.0, 1000.0]
