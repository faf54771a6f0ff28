"""Which rows of a step ride the all-reduce: those that relieve links that everybody waits for.

A row that k workers share crosses the shards' link k times each way in every step, and each of
these workers' links twice. All-reduced, it does not cross the shards' link at all, but 2(n-1)/n
times the link of every worker, the slowest too. Rows are taken from the most used on as long as the
longer of the two, shards and all others, gets shorter (docs/policy.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cluster import Cluster
from embroute.cost import LEAST_PART_S, StepTime, link_rates, shard_rate, sum_share_W
from embroute.data.window import Indexed
from embroute.kernels.codes import GRADIENT
from embroute.policy.setup import Setup
from embroute.policy.state import Outlook

I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

WORTHWHILE = 0.97  # of a step's time, at most, for rows to be all-reduced
CROWD = 2  # samples for each worker, at least, of a row that all workers are taken to share
ROOM = 0.25  # of the smallest cache that all-reduced rows may take
SMOOTHING = 0.3  # weight of the last step among those before it
SHARD, REST = 0, 1


class Reduction(NamedTuple):
    """All-reduced rows of a batch, as indices into its distinct ones, and what they change."""

    rows: I32
    saved_s: float  # at the shards' link
    added_s: float  # in the time of everything else; relief of workers' links is negative


class _Prices(NamedTuple):
    """Seconds of a byte at the shards' link for each sharer, of a reduced one, and its relief.

    `parted_s`: the relief where pulls run beside pushes; `slowest_s`: of a byte on that link.
    """

    shard_s: float
    ring_s: float
    relief_s: float
    parted_s: float
    slowest_s: float


NO_REDUCTION = Reduction(np.empty(0, np.int32), 0.0, 0.0)


@lru_cache(maxsize=64)
def _prices(cluster: Cluster) -> _Prices:
    crossing = float(cluster.crosses_WK.mean())
    up, down = link_rates(cluster)
    slowest_s = 1 / float(cluster.bytes_s_W.min())
    # What links without waiting workers spare is no relief: the fastest link is taken for all.
    relief_s = crossing * float((1 / up + 1 / down).min())
    parted_s = crossing * float(np.maximum(1 / up, 1 / down).min())
    ring_s = float(sum_share_W(cluster, with_rows=True).max()) * slowest_s
    return _Prices(crossing / shard_rate(cluster), ring_s, relief_s, parted_s, slowest_s)


def _everyone(outlook: Outlook) -> bool:
    """Whether step time is minimised, is known, and no worker sits out."""
    return len(outlook.pace_2) > 0 and outlook.pace_2[SHARD] > 0 and bool(outlook.range_2W[1].all())


def reduction(batch: Indexed, setup: Setup, outlook: Outlook) -> Reduction:
    """The rows of a batch whose gradients are best all-reduced.

    None where shares are given and nobody knows what a sample takes, as in training by default.
    """
    unknown = setup.shares and not setup.cluster.compute_s_per_sample
    if unknown or setup.num_workers == 1 or not _everyone(outlook):
        return NO_REDUCTION
    shard_s, rest_s = outlook.pace_2.astype(np.float64)
    price = _prices(setup.cluster)
    if shard_s <= rest_s and price.ring_s >= price.relief_s:
        return NO_REDUCTION  # nobody waits for the shards, and workers would wait longer
    found = batch.unique_of_lookup[batch.unique_of_lookup >= 0]
    count_U = np.bincount(found, minlength=len(batch.rows_U))
    again_U = batch.before_U == batch.step - 1
    hot = np.flatnonzero((count_U >= CROWD * setup.num_workers) & again_U)
    hot = hot[np.argsort(-count_U[hot], kind="stable")]
    hot = hot[: int(ROOM * setup.capacity_WA.min())]
    size = setup.record_bytes_XA[GRADIENT][setup.arena_of(batch.rows_U[hot])].astype(np.float64)
    workers = setup.num_workers
    sharers = workers * (1 - (1 - 1 / workers) ** count_U[hot])
    saved = np.concatenate([[0.0], np.cumsum(size * sharers * price.shard_s)])
    part = sharers / workers
    # So many rows would come while others go, were they not all-reduced (`cost.streamed`).
    parted = float((size * part).sum()) * price.slowest_s >= 2 * LEAST_PART_S
    relief = part * (price.parted_s if parted else price.relief_s)
    added = np.concatenate([[0.0], np.cumsum(size * (price.ring_s - relief))])
    time = np.maximum(shard_s - saved, rest_s + added)
    best = int(np.argmin(time))
    if time[best] > WORTHWHILE * time[0]:
        return NO_REDUCTION
    return Reduction(hot[:best].astype(np.int32), float(saved[best]), float(added[best]))


def learn_pace(outlook: Outlook, time: StepTime, done: Reduction) -> None:
    """What a step would have taken at the shards' link and elsewhere, were nothing all-reduced."""
    if not len(outlook.pace_2):
        return
    rest_s = time.rest_s - done.added_s
    now_2 = np.array([time.shard_s + done.saved_s, max(0.0, rest_s)], np.float32)
    known = outlook.pace_2[SHARD] > 0
    outlook.pace_2[:] += (SMOOTHING if known else 1) * (now_2 - outlook.pace_2)
