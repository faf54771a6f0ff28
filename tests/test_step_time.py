"""Transmission cost and step time, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embroute.config.cluster import Cluster, Host, Worker
from embroute.cost.step_time import Traffic, allreduce_seconds, step_time, transmission_cost
from embroute.kernels import codes
from embroute.planner.kernels.transfers import empty_counts


def two_worker_star(shard_bytes_s: float) -> Cluster:
    """Worker 0: 10 bytes/s up, 20 down. Worker 1: 5 both ways, 1 s latency. 0.5 s a sample."""
    hosts = (
        Host("shard", shard_bytes_s, shard_bytes_s),
        Host("w0", 10.0, 20.0),
        Host("w1", 5.0, 5.0, 1.0),
    )
    return Cluster(hosts, (Worker(1), Worker(2)), (0,), compute_s_per_sample=0.5, dense_bytes=40.0)


def priced() -> Traffic:
    """Worker 0 pulls 40 bytes early and pushes 20 urgently; worker 1 pulls 10 late and pushes 15
    lazily; 8 bytes are all-reduced; 12 bytes of samples and plans go to worker 0, 6 to worker 1,
    4 to the shard."""
    bytes_WKIP = empty_counts(2, 1)
    bytes_WKIP[0, 0, codes.MISS_PULL, codes.EARLY] = 40
    bytes_WKIP[0, 0, codes.UPDATE_PUSH, codes.URGENT] = 20
    bytes_WKIP[1, 0, codes.STALE_PULL, codes.LATE] = 10
    bytes_WKIP[1, 0, codes.EVICT_PUSH, codes.LAZY] = 15
    samples, sample_bytes, lists = np.array([4, 2]), np.array([10, 5]), np.array([2, 1])
    return Traffic(
        np.sign(bytes_WKIP), bytes_WKIP, samples, sample_bytes, lists, np.array([4]), 1, 8
    )


def test_transmission_cost_by_hand() -> None:
    """Worker 0: 40/20 + 20/10 = 4. Worker 1: 10/5 + 15/5 = 5. All-reduced: 2(n-1)/n = 1 times 8
    bytes out and in: 8/10 + 8/20 = 1.2 and 8/5 + 8/5 = 3.2. Together 13.4."""
    assert transmission_cost(priced(), two_worker_star(100.0)) == pytest.approx(13.4)


def without_rows() -> Traffic:
    """The same traffic, with only 40 bytes of dense gradients all-reduced."""
    return replace(priced(), hot_rows=0, hot_bytes=0)


def test_step_time_by_hand() -> None:
    time = step_time(without_rows(), two_worker_star(100.0))
    # Four samples and two.
    assert time.compute_W.tolist() == [2.0, 1.0]
    # By way of the shard, 2 x 40/100 s, less than 40/5: 40 bytes up and down.
    sums = np.array([[4.0, 8.0], [2.0, 8.0]])
    # Worker 0: (40 + 12)/20 down. Worker 1: the longer of 15/5 up and 6/5 down, and its latency.
    assert time.early_W.tolist() == pytest.approx([2.6, 4.0])
    assert time.urgent_W.tolist() == pytest.approx(sums[0] + [2.0, 0.0])
    assert time.late_W.tolist() == pytest.approx(sums[1] + [0.0, 3.0])
    # Out of the shard's host: pulls 40 + 10, lists 12 + 6 (its own 4 stay inside), sums 2 x 40.
    assert time.shard_s == pytest.approx(1.48)
    # The longer of 2 + max(2, 2.6) + 4 + 2 and 8 + 3 + max(1, 4) + 8
    assert time.turn_W.tolist() == pytest.approx([10.6, 23.0])
    assert time.total_s == pytest.approx(23.0)


def test_step_time_with_a_ring_all_reduce_by_hand() -> None:
    """A ring reduces row gradients, and dense gradients if the shard's link of 9 bytes/s is too
    slow."""
    slow = step_time(without_rows(), two_worker_star(9.0))
    assert slow.allreduce_s == pytest.approx(40 / 5)
    time = step_time(priced(), two_worker_star(9.0))
    # Once over the slowest link.
    assert time.allreduce_s == pytest.approx(48 / 5)
    assert time.shard_s == pytest.approx(68 / 9)
    # max(max(2, 2.6) + 2, 3 + max(1, 4) + 0) + 9.6
    assert time.total_s == pytest.approx(7.0 + 9.6)


def test_worker_without_samples_sends_no_dense_gradients() -> None:
    time = step_time(replace(without_rows(), samples_W=np.array([6, 0])), two_worker_star(100.0))
    assert time.urgent_W.tolist() == pytest.approx([6.0, 0.0])
    assert time.late_W.tolist() == pytest.approx([2.0, 11.0])


def test_step_time_is_at_least_the_busiest_shard_link() -> None:
    assert step_time(priced(), two_worker_star(1.0)).total_s == pytest.approx(68.0)


def test_ranks_of_one_host_use_no_link() -> None:
    """The shard is beside worker 0: its rows cost nothing, and only worker 1's lists leave the
    host."""
    apart = two_worker_star(100.0)
    beside = replace(apart, shards=(1,), coordinator=1)
    # Worker 1 as before, 5, and the all-reduce, 4.4.
    assert transmission_cost(priced(), beside) == pytest.approx(9.4)
    # Host 1 now carries worker 1's late 10 bytes up at 10 bytes/s, and 6 bytes of lists early.
    time = step_time(priced(), beside)
    assert time.urgent_W.tolist() == [0.0, 0.0]
    assert time.early_W.tolist() == pytest.approx([max(6 / 10, 15 / 20), 4.0])
    assert time.late_W.tolist() == pytest.approx([1.0, 3.0])
    alone = replace(apart, workers=(Worker(1), Worker(1)), shards=(1,), coordinator=1)
    assert transmission_cost(priced(), alone) == 0
    assert step_time(priced(), alone).total_s == 2.0


def one_box(inside_bytes_s: float) -> Cluster:
    """Two workers and a shard on one host, and a second shard elsewhere."""
    box = Host("box", 100.0, 100.0, inside_bytes_s=inside_bytes_s)
    hosts = (box, Host("store", 100.0, 100.0))
    return Cluster(hosts, (Worker(0), Worker(0)), (0, 1), coordinator=0, dense_bytes=40.0)


def through_both_shards() -> Traffic:
    """Each worker pulls 60 bytes from the shard of its host, late, and 10 from the other shard."""
    bytes_WKIP = empty_counts(2, 2)
    bytes_WKIP[:, 0, codes.MISS_PULL, codes.LATE] = 60
    bytes_WKIP[:, 1, codes.MISS_PULL, codes.LATE] = 10
    nothing = np.zeros(2, np.int64)
    return Traffic(np.sign(bytes_WKIP), bytes_WKIP, np.ones(2, np.int64), nothing, nothing, nothing)


def test_links_inside_a_host_take_time() -> None:
    traffic = through_both_shards()
    free, slow = (step_time(traffic, one_box(rate)) for rate in (np.inf, 20.0))
    # The network: 2 x 10 bytes through the box's link. Inside: 60 bytes of each worker.
    assert free.late_W.tolist() == pytest.approx([0.2, 0.2])
    assert slow.late_W.tolist() == pytest.approx([3.0, 3.0])
    # A ring of two passes 40 bytes once each way, on both inside links at the same time.
    assert free.allreduce_s == 0
    assert slow.allreduce_s == pytest.approx(2.0)
    assert free.total_s == pytest.approx(0.2)
    assert slow.total_s == pytest.approx(5.0)


def test_links_inside_a_host_are_busy_at_a_cost() -> None:
    traffic = replace(through_both_shards(), hot_rows=1, hot_bytes=8)
    network = 2 * 10 / 100
    assert transmission_cost(traffic, one_box(np.inf)) == pytest.approx(network)
    # 60 bytes of each worker; all-reduced, 8 bytes out and in at each worker.
    assert transmission_cost(traffic, one_box(20.0)) == pytest.approx(network + 6 + 2 * 16 / 20)


def test_ring_over_hosts_waits_for_its_slowest_link() -> None:
    hosts = (Host("a", 100.0, 100.0, inside_bytes_s=5.0), Host("b", 100.0, 100.0))
    cluster = Cluster(hosts, (Worker(0), Worker(0), Worker(1)), (1,))
    # Each link carries 2 (n - 1) / n = 4/3 times the bytes.
    assert allreduce_seconds(30.0, cluster, with_rows=True) == pytest.approx(8.0)
    fast = replace(cluster, hosts=(replace(hosts[0], inside_bytes_s=1000.0), hosts[1]))
    assert allreduce_seconds(30.0, fast, with_rows=True) == pytest.approx(0.4)
