"""Prices: the bytes of a record, what a step moved, and what that costs on a cluster.

Axes: W workers, K shards, I kinds of transfer, P phases, X kinds of record, A arenas, H hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from embroute.config.cluster import Cluster
from embroute.cost.inside import (
    PULLS,
    PUSHES,
    inside_cost_W,
    inside_seconds_W,
    ring_seconds,
    ring_share_W,
)
from embroute.cost.pipeline import PhaseTimes, best_overlap
from embroute.kernels.array_types import F64, I64
from embroute.kernels.codes import (
    EARLY,
    LATE,
    LAZY,
    MAX_CHUNKS,
    URGENT,
)

FLOAT_BYTES = 4
INDEX_BYTES = 4  # a slot, an offset or an entry of a list in a plan
KIND_NAMES = ("miss_pull", "stale_pull", "update_push", "evict_push")
SHORT_SUM_S = 0.02e-3  # time on the shard's link that the sum of dense gradients may always take
MIN_CHUNK_S = 0.25e-3  # time of a chunk of urgent pushes or late pulls, on the slowest link

# Floats of optimizer state that a row of width w carries. Adam counts steps per table, not per row.
OPTIMIZERS: Mapping[str, Callable[[int], int]] = {
    "sgd": lambda width: 0,
    "adagrad": lambda width: width,
    "rowwise-adagrad": lambda width: 1,
    "adam": lambda width: 2 * width,
}


def record_bytes(widths: tuple[int, ...], optimizer: str) -> I64:
    """Bytes of each kind of record per width: value, value and state, gradient, delta."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    value = np.array(widths, np.int64)
    whole = value + np.array([OPTIMIZERS[optimizer](width) for width in widths], np.int64)
    sizes: I64 = FLOAT_BYTES * np.stack([value, whole, value, whole])
    return sizes


@dataclass(frozen=True)
class Traffic:
    """Rows and bytes that a step, or a span of steps, moves."""

    rows_WKIP: I64
    bytes_WKIP: I64
    samples_W: I64
    sample_bytes_W: I64  # labels, dense features, look-ups
    plan_bytes_W: I64  # lists of transfers and slots for the worker
    plan_bytes_K: I64  # lists of transfers for the shards
    hot_rows: int = 0  # distinct rows whose gradients are all-reduced
    hot_bytes: int = 0
    chunks: int = 1  # of urgent pushes and late pulls; of a span, the most
    # Row ids and clocks with which a published system asks shards whether copies are valid.
    check_bytes_WK: I64 = field(default_factory=lambda: np.zeros((1, 1), np.int64))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            rows_WKIP=self.rows_WKIP + other.rows_WKIP,
            bytes_WKIP=self.bytes_WKIP + other.bytes_WKIP,
            samples_W=self.samples_W + other.samples_W,
            sample_bytes_W=self.sample_bytes_W + other.sample_bytes_W,
            plan_bytes_W=self.plan_bytes_W + other.plan_bytes_W,
            plan_bytes_K=self.plan_bytes_K + other.plan_bytes_K,
            hot_rows=self.hot_rows + other.hot_rows,
            hot_bytes=self.hot_bytes + other.hot_bytes,
            chunks=max(self.chunks, other.chunks),
            check_bytes_WK=self.check_bytes_WK + other.check_bytes_WK,
        )


def reduces_at_shard(cluster: Cluster, with_rows: bool = False) -> bool:
    """Whether the first shard sums the workers' dense gradients, or a ring all-reduce does.

    Through the shard the gradients pass a slow link once each way, less often than in a ring; but
    the shard's own link carries them for every worker. So the shard's link must be as fast as n
    times the slowest worker's link, or the sum must take hardly any time. Gradients of rows
    (`with_rows`) always take the ring, as in the published systems that replicate rows: through a
    shard, replicas would save nothing. Workers of one host need no link at all.
    """
    if with_rows or len(set(cluster.host_W.tolist())) == 1:
        return False
    centre = cluster.hosts[cluster.shards[0]]
    rate, n = min(centre.up_bytes_s, centre.down_bytes_s), cluster.num_workers
    return bool(
        n * cluster.bytes_s_W.min() <= rate or n * cluster.dense_bytes <= rate * SHORT_SUM_S
    )


def allreduce_share_W(cluster: Cluster, with_rows: bool) -> F64:
    """How many times the summed bytes leave, and enter, each worker's link."""
    n = cluster.num_workers
    if len(set(cluster.host_W.tolist())) == 1:
        return np.zeros(n)
    if reduces_at_shard(cluster, with_rows):
        return np.not_equal(cluster.host_W, cluster.shards[0]).astype(np.float64)
    # A ring moves n - 1 of n chunks to sum them, and as many again to hand the sums round.
    return np.full(n, 2 * (n - 1) / n)


def allreduce_sends_W(cluster: Cluster, with_rows: bool) -> F64:
    """How many times each worker sends, and receives, the summed bytes over a link with a rate."""
    inside_W = np.where(np.isinf(cluster.inside_bytes_s_W), 0.0, ring_share_W(cluster))
    return np.maximum(allreduce_share_W(cluster, with_rows), inside_W)


def allreduce_cost_W(hot_bytes: float, cluster: Cluster) -> F64:
    """Seconds each worker's links are busy with all-reduced rows, both directions added."""
    up, down = link_rates(cluster)
    inside_W = 2 * ring_share_W(cluster) / cluster.inside_bytes_s_W
    return hot_bytes * (allreduce_share_W(cluster, with_rows=True) * (1 / up + 1 / down) + inside_W)


def allreduce_seconds(size: float, cluster: Cluster, with_rows: bool) -> float:
    """A lower bound on the time of a sum: of the ring, or of the slowest worker's pull.

    A worker without samples pushes nothing to the shard, so only the pull counts.
    """
    share_W = allreduce_share_W(cluster, with_rows)
    if reduces_at_shard(cluster, with_rows):
        return float((share_W * size / link_rates(cluster)[1]).max())
    network_s = float(share_W.max() * size / cluster.bytes_s_W.min())
    return max(network_s, ring_seconds(size, cluster))


def link_rates(cluster: Cluster) -> tuple[F64, F64]:
    """Bytes per second up and down of each worker's link."""
    up = np.array([host.up_bytes_s for host in cluster.hosts])
    down = np.array([host.down_bytes_s for host in cluster.hosts])
    return up[cluster.host_W], down[cluster.host_W]


def shard_rate(cluster: Cluster) -> float:
    """Bytes per second of all shards' links together, in the slower direction."""
    hosts = [cluster.hosts[host] for host in set(cluster.shards)]
    return min(sum(host.up_bytes_s for host in hosts), sum(host.down_bytes_s for host in hosts))


def transfer_cost_W(bytes_WKI: I64, cluster: Cluster) -> F64:
    """Seconds each worker's links are busy with rows to and from shards, both directions added."""
    crossing_WI = (bytes_WKI * cluster.crosses_WK[:, :, None]).sum(1)
    up, down = link_rates(cluster)
    pull_s: F64 = crossing_WI[:, list(PULLS)].sum(1) / down
    push_s: F64 = crossing_WI[:, list(PUSHES)].sum(1) / up
    return pull_s + push_s + inside_cost_W(bytes_WKI, cluster)


def transmission_cost(traffic: Traffic, cluster: Cluster) -> float:
    """The papers' objective: sum over workers of row bytes over bandwidth, in seconds."""
    rows = transfer_cost_W(traffic.bytes_WKIP.sum(3), cluster)
    return float((rows + allreduce_cost_W(traffic.hot_bytes, cluster)).sum())


def _host_bytes(traffic: Traffic, cluster: Cluster, phases: tuple[int, ...]) -> tuple[F64, F64]:
    """Bytes of rows and of checks of copies that leave and enter each host in some phases."""
    bytes_WKI = traffic.bytes_WKIP[:, :, :, list(phases)].sum(3) * cluster.crosses_WK[:, :, None]
    pull_WK = bytes_WKI[:, :, list(PULLS)].sum(2)
    push_WK = bytes_WKI[:, :, list(PUSHES)].sum(2)
    if URGENT in phases:  # a copy is checked between the step before and the read
        push_WK = push_WK + traffic.check_bytes_WK * cluster.crosses_WK
    up_H, down_H = np.zeros(len(cluster.hosts)), np.zeros(len(cluster.hosts))
    shards = np.array(cluster.shards, np.intp)
    np.add.at(up_H, cluster.host_W, push_WK.sum(1))
    np.add.at(down_H, cluster.host_W, pull_WK.sum(1))
    np.add.at(up_H, shards, pull_WK.sum(0))
    np.add.at(down_H, shards, push_WK.sum(0))
    return up_H, down_H


def _control_bytes(traffic: Traffic, cluster: Cluster) -> tuple[F64, F64]:
    """Bytes of samples and plans that leave the coordinator's host and enter the others."""
    up_H, down_H = np.zeros(len(cluster.hosts)), np.zeros(len(cluster.hosts))
    np.add.at(down_H, cluster.host_W, traffic.sample_bytes_W + traffic.plan_bytes_W)
    np.add.at(down_H, np.array(cluster.shards, np.intp), traffic.plan_bytes_K)
    down_H[cluster.coordinator] = 0
    up_H[cluster.coordinator] = down_H.sum()
    return up_H, down_H


def _sum_bytes_H(hot_bytes: float, cluster: Cluster) -> F64:
    """Bytes that leave, and enter, each host when workers sum dense gradients and rows.

    A ring enters and leaves a host once, however many workers the host has.
    """
    with_rows = hot_bytes > 0
    moved_W = allreduce_share_W(cluster, with_rows) * (cluster.dense_bytes + hot_bytes)
    moved_H = np.zeros(len(cluster.hosts))
    if not reduces_at_shard(cluster, with_rows):
        moved_H[cluster.host_W] = moved_W  # not added: workers of a host share the ring's link
        return moved_H
    np.add.at(moved_H, cluster.host_W, moved_W)
    moved_H[cluster.shards[0]] += moved_W.sum()
    return moved_H


def link_bytes(traffic: Traffic, cluster: Cluster, steps: int = 1) -> tuple[F64, F64]:
    """Bytes of a span that leave and enter each host: rows, checks, samples, plans, sums."""
    up_H, down_H = _host_bytes(traffic, cluster, (EARLY, URGENT, LATE, LAZY))
    control_up, control_down = _control_bytes(traffic, cluster)
    sum_H = steps * _sum_bytes_H(traffic.hot_bytes / steps, cluster)
    return up_H + control_up + sum_H, down_H + control_down + sum_H


@dataclass(frozen=True)
class StepTime:
    """A step's time and where each worker spends it, in seconds. Axis W: workers.

    `lead_s`: time between the arrival of all workers' first chunks and of their last.
    """

    total_s: float
    compute_W: F64
    early_W: F64
    urgent_W: F64
    first_W: F64  # the first chunk of urgent_W
    late_W: F64
    last_W: F64  # the last chunk of late_W
    lead_s: float
    allreduce_s: float  # round a ring
    shard_s: float  # the busiest shard link, which no schedule can beat

    @property
    def start_W(self) -> F64:
        """From the last late pull to the first urgent push."""
        return np.maximum(self.compute_W, self.early_W)

    @property
    def pulling_W(self) -> F64:
        """Time of late pulls that other workers' pushes do not cover."""
        return np.maximum(self.last_W, self.late_W - self.lead_s)

    @property
    def pushing_W(self) -> F64:
        """Time until all pushes, or the first chunk and the lead, are over."""
        return np.maximum(self.urgent_W, self.first_W + self.lead_s)

    @property
    def turn_W(self) -> F64:
        """Each worker's time for its pulls, its compute and its pushes."""
        return self.pulling_W + self.start_W + self.pushing_W

    @property
    def rest_s(self) -> float:
        """The step without the shards' links."""
        return float(self.turn_W.max()) + self.allreduce_s


def _link_seconds(up_H: F64, down_H: F64, cluster: Cluster) -> F64:
    """Time of each host's link: both directions at once, plus its latency if anything moves."""
    rate_up = np.array([host.up_bytes_s for host in cluster.hosts])
    rate_down = np.array([host.down_bytes_s for host in cluster.hosts])
    latency = np.array([host.latency_s for host in cluster.hosts])
    busy = np.maximum(up_H / rate_up, down_H / rate_down)
    return np.where(busy > 0, busy + latency, 0.0)


def pipelined(traffic: Traffic, cluster: Cluster) -> Traffic:
    """The same traffic with urgent pushes and late pulls in chunks.

    While one chunk is pushed, the chunk before it is pulled. A chunk is work at both ends, so
    each takes at least MIN_CHUNK_S on the slowest link.
    """
    moved = (_host_bytes(traffic, cluster, (phase,)) for phase in (URGENT, LATE))
    seconds = (_link_seconds(up_H, down_H, cluster)[cluster.host_W] for up_H, down_H in moved)
    shorter_s, chunks = min(float(times.max()) for times in seconds), 1
    while chunks < MAX_CHUNKS and shorter_s >= 2 * chunks * MIN_CHUNK_S:
        chunks *= 2
    return replace(traffic, chunks=chunks)


def _sum_seconds_W(traffic: Traffic, cluster: Cluster) -> tuple[F64, F64]:
    """Time of a sum through a shard on each worker's link, up and down.

    A worker without samples pushes nothing.
    """
    share_W = allreduce_share_W(cluster, traffic.hot_bytes > 0)
    moved_W = share_W * (cluster.dense_bytes + traffic.hot_bytes)
    up_W, down_W = link_rates(cluster)
    return moved_W / up_W * (traffic.samples_W > 0), moved_W / down_W


def _shard_seconds(traffic: Traffic, cluster: Cluster, by_shard: bool) -> float:
    """Time of the busiest shard link."""
    up_H, down_H = _host_bytes(traffic, cluster, (EARLY, URGENT, LATE, LAZY))
    control_up, control_down = _control_bytes(traffic, cluster)
    sum_H = _sum_bytes_H(traffic.hot_bytes, cluster) if by_shard else 0.0
    busy_H = _link_seconds(up_H + control_up + sum_H, down_H + control_down + sum_H, cluster)
    return float(busy_H[list(cluster.shards)].max())


def _phase_seconds_W(traffic: Traffic, cluster: Cluster, phase: int, chunks: int) -> F64:
    """Time of one chunk of a phase on each worker's links: of its host, and inside its host."""
    up_H, down_H = _host_bytes(traffic, cluster, (phase,))
    network_W = _link_seconds(up_H / chunks, down_H / chunks, cluster)[cluster.host_W]
    return np.maximum(network_W, inside_seconds_W(traffic.bytes_WKIP, cluster, (phase,)) / chunks)


def step_time(traffic: Traffic, cluster: Cluster) -> StepTime:
    """The time of a step:

    max_j(late_j + max(compute_j, early_j) + urgent_j) + ring, and never less than the busiest shard
    link. A worker waits for all urgent pushes, and then for its own late pulls only. Dense
    gradients that a shard sums are pushed and pulled like rows, before the rows. Lazy pushes,
    samples and plans travel beside compute, with the early transfers. With several chunks, pulls
    of one run beside pushes of the next (`cost/pipeline.py`).
    """
    early_up, early_down = _host_bytes(traffic, cluster, (EARLY, LAZY))
    control_up, control_down = _control_bytes(traffic, cluster)
    early_H = _link_seconds(early_up + control_up, early_down + control_down, cluster)
    inside_W = inside_seconds_W(traffic.bytes_WKIP, cluster, (EARLY, LAZY))
    early_W = np.maximum(early_H[cluster.host_W], inside_W)
    # Of urgent and of late transfers: all of them, then one chunk.
    urgent_W, first_W, late_W, last_W = (
        _phase_seconds_W(traffic, cluster, phase, chunks)
        for phase in (URGENT, LATE)
        for chunks in (1, traffic.chunks)
    )
    by_shard, ring_s = reduces_at_shard(cluster, traffic.hot_bytes > 0), 0.0
    sum_up_W, sum_down_W = np.zeros_like(late_W), np.zeros_like(late_W)
    if by_shard:
        sum_up_W, sum_down_W = _sum_seconds_W(traffic, cluster)
    else:
        size = cluster.dense_bytes + traffic.hot_bytes
        ring_s = allreduce_seconds(size, cluster, traffic.hot_bytes > 0)
    compute_W = traffic.samples_W * cluster.compute_s_W
    phases = PhaseTimes(
        start_W=np.maximum(compute_W, early_W),
        urgent_W=urgent_W + sum_up_W,
        first_W=first_W + sum_up_W,
        late_W=late_W + sum_down_W,
        last_W=last_W,
    )
    time = StepTime(
        total_s=0.0,  # follows from the rest
        compute_W=compute_W,
        early_W=early_W,
        urgent_W=phases.urgent_W,
        first_W=phases.first_W,
        late_W=phases.late_W,
        last_W=phases.last_W,
        lead_s=best_overlap(phases) if traffic.chunks > 1 else 0.0,
        allreduce_s=ring_s,
        shard_s=_shard_seconds(traffic, cluster, by_shard),
    )
    return replace(time, total_s=max(time.rest_s, time.shard_s))
