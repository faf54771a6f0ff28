"""The cheapest assignment of samples to workers with quotas: exact, near linear in the samples.

This is a transportation problem with few sinks, so it is solved over the workers alone instead
of as an assignment of samples to places (cf. Ahuja, Magnanti, Orlin, "Network Flows", ch. 9):

1. Dummy samples, which cost nothing anywhere, fill spare capacity. From here on there are as many
   places as samples.
2. At given prices every sample takes the worker of least cost + price. Then no move has a
   negative reduced cost `cost[i, k] + price[k] - cost[i, j] - price[j]`, but loads are uneven.
3. While a worker is overfull: in the graph whose edge j -> k is the cheapest move of any sample at
   j to k, find a shortest path from the overfull workers to a worker with room. Raise the price of
   each nearer worker by the difference of distances, and move one sample along each edge. The
   path is free at the new prices and no reduced cost falls below zero.

When no worker is overfull, all are exactly full and no cycle of moves is a gain: the assignment is
optimal, whatever the first prices were. Each path reduces the overflow by one, so the loop ends.
If no path exists, the samples at the workers reached may go nowhere else and those workers are
full: the overflow has no place at all. Good first prices make paths few. They are the final prices
of the same problem for a quarter of the samples; for two workers, the difference of costs at which
both are just full.

Ties: among equally cheap workers a sample starts at the worker with most room, then at the first.
Among equally cheap moves the first in the list goes, among equally near workers the first. Equal
inputs give equal results. Sums of costs are rounded; sums of integers below 2**53 are exact.

Axes: S samples, W workers, B places on a shortlist.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embroute.kernels.array_types import F64, I64
from embroute.planner.kernels.shortest_paths import (
    AssignmentState,
    PathSearch,
    assign_cheapest,
    assign_dummies,
    has_fault,
    move_overflow,
)

# Differences of two costs, summed along a path, must stay finite.
COST_LIMIT = 1e300
COARSENING = 4


def assign(
    cost_SW: NDArray[np.float64] | NDArray[np.float32], quotas: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Worker of each sample, at the least total cost with at most `quotas[k]` samples at k.

    A cost of +inf forbids the pair. The quotas may sum to more than the number of samples.
    """
    _check(cost_SW, quotas)
    # One memory layout, also for read-only arrays: each other one would be compiled anew.
    dense_SW = np.require(cost_SW, np.float64, ["C", "A", "W"])
    if has_fault(dense_SW, COST_LIMIT):
        raise ValueError(f"cost_SW has NaN, -inf or a finite cost beyond {COST_LIMIT:g}")
    samples = cost_SW.shape[0]
    if samples == 0:
        return np.empty(0, np.int32)
    open_W = np.flatnonzero(quotas).astype(np.int32)
    if open_W.size == 0:
        raise ValueError(_no_place_error(samples, samples))
    if open_W.size < quotas.size:
        dense_SW = np.take(dense_SW, open_W, axis=1)
    quota_W = np.minimum(quotas[open_W], samples).astype(np.int64)
    worker_S, unplaced = _solve(dense_SW, quota_W, _first_prices(dense_SW, quota_W))
    if unplaced > 0:
        raise ValueError(_no_place_error(unplaced, samples))
    return open_W[worker_S]


def _check(cost_SW: NDArray[np.float64] | NDArray[np.float32], quotas: NDArray[np.integer]) -> None:
    """Refuse arrays of the wrong shape or kind, and negative quotas."""
    if cost_SW.ndim != 2 or quotas.shape != cost_SW.shape[1:]:
        raise ValueError(f"cost_SW {cost_SW.shape} and quotas {quotas.shape}: not (S, W) and (W,)")
    if cost_SW.dtype not in (np.float64, np.float32):
        raise ValueError(f"cost_SW is {cost_SW.dtype}, not float64 or float32")
    if not np.issubdtype(quotas.dtype, np.integer):
        raise ValueError(f"quotas is {quotas.dtype}, not an integer type")
    if quotas.size and quotas.min() < 0:
        raise ValueError(f"quotas has {quotas.min()}, a quota is at least 0")


def _no_place_error(count: int, samples: int) -> str:
    return f"{count} of {samples} samples cannot be placed: too little capacity or too many inf"


def _first_prices(cost_SW: F64, quota_W: I64) -> F64:
    """Final prices of the same problem for a quarter of the samples; zero if those are few."""
    samples, workers = cost_SW.shape
    count = samples // COARSENING
    if workers == 2 and count:
        return _two_prices(cost_SW, quota_W)
    if count <= workers // 2:
        return np.zeros(workers)
    coarse_SW = np.take(cost_SW, _coarse_samples(count), 0)
    coarse_quota_W = np.diff(np.cumsum(quota_W) * count // samples, prepend=0)
    price_W = _first_prices(coarse_SW, coarse_quota_W)
    _solve(coarse_SW, coarse_quota_W, price_W)
    return price_W


def _two_prices(cost_SW: F64, quota_W: I64) -> F64:
    """With two workers the first gets the samples that are cheaper there, while both have room."""
    samples = len(cost_SW)
    with np.errstate(invalid="ignore"):  # a sample that neither may take
        gain_S = cost_SW[:, 1] - cost_SW[:, 0]
    wanted = int((gain_S > 0).sum())
    count = min(max(wanted, samples - int(quota_W[1])), int(quota_W[0]))
    if count == wanted:
        return np.zeros(2)
    price = np.partition(gain_S, samples - count)[samples - count]
    return np.array([price, 0.0]) if np.isfinite(price) else np.zeros(2)


@lru_cache(maxsize=32)
def _coarse_samples(count: int) -> NDArray[np.int64]:
    """One random sample of every four neighbours, so that no drift or period misleads."""
    rng = np.random.default_rng([0, count])
    return np.arange(count) * COARSENING + rng.integers(COARSENING, size=count)


def _solve(cost_SW: F64, quota_W: I64, price_W: F64) -> tuple[NDArray[np.int32], int]:
    """Worker of each sample and how many could not be placed; leaves the final prices."""
    state = _unassigned(cost_SW, quota_W)
    workers = price_W.size
    search = PathSearch(
        price_W=price_W,
        distance_W=np.empty(workers),
        parent_W=np.empty(workers, np.int32),
        settled_W=np.empty(workers, np.bool_),
    )
    unassigned = assign_cheapest(state, price_W)
    assign_dummies(state, price_W, max(0, int(quota_W.sum()) - cost_SW.shape[0]))
    return state.worker_S, unassigned + move_overflow(state, search)


def _unassigned(cost_SW: F64, quota_W: I64) -> AssignmentState:
    """No sample is assigned, all shortlists are empty."""
    samples, workers = cost_SW.shape
    # Long enough to be refilled rarely, short enough that most arrivals do not enter.
    length = max(4, math.isqrt(samples // workers))
    pairs = (workers, workers)
    return AssignmentState(
        cost_SW=cost_SW,
        worker_S=np.empty(samples, np.int32),
        room_W=quota_W.copy(),
        dummies_W=np.zeros(workers, np.int64),
        value_WWB=np.empty((*pairs, length)),
        sample_WWB=np.empty((*pairs, length), np.int32),
        count_WW=np.zeros(pairs, np.int32),
        bound_WW=np.full(pairs, np.inf),
        edge_WW=np.empty(pairs),
    )
