"""Expected communication from access counts alone (SCARS, arXiv 2411.01611).

Row i is drawn with probability p_i. Of b independent draws, row i is among them with probability
1 - (1 - p_i)^b; sums over all rows are sums over the few distinct counts, so that tens of
millions of rows take milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embroute.config.cluster import Cluster
from embroute.cost.expected import drawn_probability
from embroute.cost.step_time import allreduce_seconds
from embroute.kernels.array_types import F64, I64


def expected_distinct(counts: I64, lookups: float, total: float | None = None) -> float:
    """Expected number of distinct rows among `lookups` independent draws.

    `counts` are access counts; `total` is their sum over all rows, where `counts` are only some.
    """
    values, rows = np.unique(counts, return_counts=True)
    total = float(counts.sum()) if total is None else total
    if total <= 0 or lookups <= 0:
        return 0.0
    return float((rows * drawn_probability(values / total, lookups)).sum())


@dataclass(frozen=True)
class Draws:
    """Access counts of each table, most accessed first, and how a step draws from them."""

    counts_by_table: tuple[I64, ...]
    lookups_by_table: F64  # expected look-ups of one sample
    samples_per_worker: float


@dataclass(frozen=True)
class HotStep:
    """The expected step when the `hot` most accessed rows are replicated."""

    hot: int
    free_share: float  # samples all of whose rows are hot
    reduced_rows: float  # all-reduced per step
    cold_rows: float  # pulled, and pushed, per worker and cold step
    time_s: float


def hot_threshold(counts: I64, hot: int) -> int:
    """The lowest count among the `hot` most accessed rows."""
    return int(counts[hot - 1]) if hot else int(counts[0]) + 1


def predict_hot(draws: Draws, threshold: int, cluster: Cluster, row_bytes: float) -> HotStep:
    """Expected step with every row of at least `threshold` accesses replicated.

    Samples are sorted, so a share `free_share` of the steps touches hot rows only. A cold step
    all-reduces its hot rows and moves its cold rows to and from the shards.
    """
    workers, samples = cluster.num_workers, draws.samples_per_worker
    free, hot, reduced, cold = 1.0, 0, 0.0, 0.0
    for counts, lookups in zip(draws.counts_by_table, draws.lookups_by_table, strict=True):
        total = float(counts.sum())
        if total == 0:
            continue
        in_hot = counts >= threshold
        hot += int(in_hot.sum())
        free *= (counts[in_hot].sum() / total) ** lookups
        reduced += expected_distinct(counts[in_hot], workers * samples * lookups, total)
        cold += expected_distinct(counts[~in_hot], samples * lookups, total)
    # Workers of a host share its link.
    slowest = float((cluster.bytes_s_W / np.bincount(cluster.host_W)[cluster.host_W]).min())
    shard = min(
        min(cluster.hosts[k].up_bytes_s, cluster.hosts[k].down_bytes_s) for k in cluster.shards
    )
    reduce_s = allreduce_seconds(reduced * row_bytes, cluster, with_rows=True)
    # Only cold samples draw cold rows, so sorting leaves them denser in the cold steps.
    dense_cold = cold / max(1e-12, 1 - free) if cold else 0.0
    cold_bytes = min(dense_cold, cold * workers) * row_bytes
    cold_s = max(2 * cold_bytes / slowest, workers * cold_bytes / (shard * len(cluster.shards)))
    return HotStep(
        hot=hot,
        free_share=free,
        reduced_rows=reduced,
        cold_rows=cold,
        time_s=reduce_s + (1 - free) * cold_s,
    )


def best_hot(draws: Draws, limit: int, cluster: Cluster, row_bytes: float) -> HotStep:
    """The hot set of at most `limit` rows with the shortest expected step."""
    pooled = -np.sort(-np.concatenate(draws.counts_by_table))
    nothing_hot = int(pooled[0]) + 1
    pooled = pooled[pooled > 0][: max(limit, 0)]
    sizes = np.unique(np.geomspace(1, max(1, len(pooled)), 24).astype(np.int64))
    best = predict_hot(draws, nothing_hot, cluster, row_bytes)
    for size in sizes[sizes <= len(pooled)]:
        step = predict_hot(draws, hot_threshold(pooled, int(size)), cluster, row_bytes)
        if step.hot <= limit and step.time_s < best.time_s:
            best = step
    return best
