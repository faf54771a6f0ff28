"""A cluster: hosts and their links, the hosts of workers and shards, the speed of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import F64, Bools

GIGABIT = 1e9 / 8  # bytes per second


@dataclass(frozen=True)
class Host:
    """A machine and its link to the network.

    `inside_bytes_s`: rate of each rank's link to the other ranks of the host, such as NVLink or
    PCIe, in each direction. By default bytes inside a host take no time.
    """

    name: str
    up_bytes_s: float
    down_bytes_s: float
    latency_s: float = 0.0
    inside_bytes_s: float = math.inf


@dataclass(frozen=True)
class Worker:
    """A worker: its host, and its compute time relative to the reference worker."""

    host: int
    slowness: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Hosts, their ranks, and the costs of a step that do not depend on rows."""

    hosts: tuple[Host, ...]
    workers: tuple[Worker, ...]
    shards: tuple[int, ...]  # host of each shard
    coordinator: int = 0  # host of the coordinator
    compute_s_per_sample: float = 0.0
    dense_bytes: float = 0.0

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @cached_property
    def compute_s_W(self) -> F64:
        """Compute time per sample of each worker."""
        return self.compute_s_per_sample * np.array([w.slowness for w in self.workers])

    @cached_property
    def host_W(self) -> npt.NDArray[np.intp]:
        """Host of each worker."""
        return np.array([worker.host for worker in self.workers], np.intp)

    @cached_property
    def crosses_WK(self) -> Bools:
        """Whether worker w and shard k are on different hosts."""
        return np.not_equal.outer(self.host_W, np.array(self.shards, np.intp))

    @cached_property
    def bytes_s_W(self) -> F64:
        """Bandwidth of each worker's link, in the slower direction."""
        slower = [min(host.up_bytes_s, host.down_bytes_s) for host in self.hosts]
        return np.array(slower)[self.host_W]

    @cached_property
    def inside_bytes_s_W(self) -> F64:
        """Bandwidth of each worker's link to the other ranks of its host."""
        return np.array([host.inside_bytes_s for host in self.hosts])[self.host_W]

    @property
    def moves_for_free(self) -> bool:
        """Whether all workers and shards are on one host whose inside links take no time."""
        return len(self.used_hosts) == 1 and bool(np.isinf(self.inside_bytes_s_W).all())

    @property
    def fastest_first(self) -> npt.NDArray[np.intp]:
        """Workers by bandwidth; workers with equal links by compute time."""
        return np.lexsort((self.compute_s_W, -self.bytes_s_W))

    @property
    def used_hosts(self) -> set[int]:
        """Hosts with a worker or a shard."""
        return {*self.host_W.tolist(), *self.shards}

    def together(self) -> Cluster:
        """The same workers and shards on one host."""
        workers = tuple(replace(worker, host=0) for worker in self.workers)
        shards = (0,) * self.num_shards
        return replace(self, hosts=self.hosts[:1], workers=workers, shards=shards, coordinator=0)

    def only(self, workers: Sequence[int]) -> Cluster:
        """The same cluster with a part of the workers, in the given order."""
        return replace(self, workers=tuple(self.workers[w] for w in workers))


def star_cluster(speeds_gbit: Sequence[float], shard_gbit: float) -> Cluster:
    """A host for each worker, and one host for the shard and the coordinator."""
    hosts = [Host("shard", shard_gbit * GIGABIT, shard_gbit * GIGABIT)]
    hosts += [Host(f"w{i}", g * GIGABIT, g * GIGABIT) for i, g in enumerate(speeds_gbit)]
    return Cluster(tuple(hosts), tuple(Worker(i + 1) for i in range(len(speeds_gbit))), (0,))


def edge(n: int) -> Cluster:
    """Half of the workers at 5 Gbit/s, half at 0.5, the shard host at 10."""
    return star_cluster([5.0] * (n - n // 2) + [0.5] * (n // 2), 10.0)


def datacenter(n: int) -> Cluster:
    """Every worker and the shard host at 100 Gbit/s."""
    return star_cluster([100.0] * n, 100.0)


def uneven(n: int) -> Cluster:
    """The links of `edge`; the last two workers compute half as fast."""
    cluster = edge(n)
    slow = [replace(w, slowness=2.0) if i >= n - 2 else w for i, w in enumerate(cluster.workers)]
    return replace(cluster, workers=tuple(slow))


def colocated(n: int) -> Cluster:
    """A worker and a shard on every host, all links at 10 Gbit/s."""
    hosts = tuple(Host(f"h{i}", 10 * GIGABIT, 10 * GIGABIT) for i in range(n))
    return Cluster(hosts, tuple(Worker(i) for i in range(n)), tuple(range(n)))


def box(n: int, network_gbit: float = 100.0) -> Cluster:
    """All workers on one host with fast links inside (NVLink 2), the shard on another host."""
    network = network_gbit * GIGABIT
    hosts = (Host("shard", network, network), Host("box", network, network, 0.0, 1200 * GIGABIT))
    return Cluster(hosts, (Worker(1),) * n, (0,))


def uniform_cluster(num_workers: int, num_shards: int) -> Cluster:
    """A separate host for every worker and every shard, all links at 10 Gbit/s."""
    names = [f"shard{i}" for i in range(num_shards)] + [f"worker{i}" for i in range(num_workers)]
    hosts = tuple(Host(name, 10 * GIGABIT, 10 * GIGABIT) for name in names)
    workers = tuple(Worker(num_shards + i) for i in range(num_workers))
    return Cluster(hosts, workers, tuple(range(num_shards)))


CLUSTER_PRESETS: Mapping[str, Callable[[int], Cluster]] = {
    "edge": edge,
    "dc": datacenter,
    "uneven": uneven,
    "colo": colocated,
    "box": box,
}
