"""Links inside a host, such as NVLink, PCIe or shared memory: each worker has one to its host.

Axes: W workers, K shards, I kinds of transfer, P phases.
"""

from __future__ import annotations

import numpy as np

from embroute.config.cluster import Cluster
from embroute.kernels.array_types import F64, I64
from embroute.kernels.codes import EVICT_PUSH, MISS_PULL, STALE_PULL, UPDATE_PUSH

PULLS, PUSHES = (MISS_PULL, STALE_PULL), (UPDATE_PUSH, EVICT_PUSH)


def _inside_bytes_W(bytes_WKI: I64, cluster: Cluster) -> tuple[F64, F64]:
    """Bytes that each worker pulls from, and pushes to, shards of its own host."""
    inside_WI = (bytes_WKI * ~cluster.crosses_WK[:, :, None]).sum(1)
    pulls: F64 = inside_WI[:, list(PULLS)].sum(1).astype(np.float64)
    pushes: F64 = inside_WI[:, list(PUSHES)].sum(1).astype(np.float64)
    return pulls, pushes


def inside_cost_W(bytes_WKI: I64, cluster: Cluster) -> F64:
    """Seconds that each worker's inside link is busy, both directions added."""
    pulls_W, pushes_W = _inside_bytes_W(bytes_WKI, cluster)
    return (pulls_W + pushes_W) / cluster.inside_bytes_s_W


def inside_seconds_W(bytes_WKIP: I64, cluster: Cluster, phases: tuple[int, ...]) -> F64:
    """Seconds of each worker's inside link in some phases: both directions at once."""
    bytes_WKI = bytes_WKIP[:, :, :, list(phases)].sum(3)
    seconds: F64 = np.maximum(*_inside_bytes_W(bytes_WKI, cluster)) / cluster.inside_bytes_s_W
    return seconds


def ring_share_W(cluster: Cluster) -> F64:
    """How many times all-reduced bytes leave, and enter, each worker's inside link.

    A ring passes the workers of a host one after the other, so that a worker with others on its
    host has a neighbour there.
    """
    neighbours_W = np.bincount(cluster.host_W)[cluster.host_W]
    n = cluster.num_workers
    return np.where(neighbours_W > 1, 2 * (n - 1) / n, 0.0)


def ring_seconds(size: float, cluster: Cluster) -> float:
    """A ring all-reduce on the slowest inside link: its links work at the same time."""
    return float((ring_share_W(cluster) * size / cluster.inside_bytes_s_W).max())
