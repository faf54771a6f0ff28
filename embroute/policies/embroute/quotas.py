"""How many samples each worker gets, where that is free: so many that all finish together.

Gradients are sums over samples, so micro-batches need not be equal. The cost of a worker's samples
is taken from the last step. It is assumed to grow with their number as distinct rows do.

Axes: W workers, N numbers of samples from none to the whole batch, P phases of `weight_PW`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.cost.pipeline import pulls_s, pushes_s
from embroute.cost.step_time import StepTime
from embroute.kernels.array_types import F32, F64, I64
from embroute.kernels.jit import inlined, kernel
from embroute.policies.embroute.search_state import SearchState

LEARNING_RATE = 0.2  # part of the way to the best shares that one step goes
SHARPNESS = 8  # how much more the slowest worker counts than one a little faster
# Exponents of the number of samples: rows that consecutive steps use are mostly shared by several
# samples, so their number grows slowly; other rows are mostly used by one sample.
GROWTH, FRESH_GROWTH = 0.5, 0.9
SHARE_SMOOTHING = 0.3  # weight of the last step among those before it
CACHE_SHARE = 0.9  # of a cache that the rows of a step may take when shares are chosen
OVERLAPS = 24  # tried between none and the longest late pulls, and again around the best of them
HALVINGS = 30


class CostCurves(NamedTuple):
    """Seconds of each worker's phases (`cost.pipeline.PhaseTimes`) by number of samples."""

    start_WN: F64
    urgent_WN: F64
    first_WN: F64
    late_WN: F64
    last_WN: F64


@inlined
def _turn_s(curves: CostCurves, w: int, n: int, overlap: float) -> float:
    """Seconds of a worker's pulls, compute and pushes with n samples."""
    pulls = pulls_s(curves.late_WN[w, n], curves.last_WN[w, n], overlap)
    pushes = pushes_s(curves.urgent_WN[w, n], curves.first_WN[w, n], overlap)
    return float(pulls + curves.start_WN[w, n] + pushes)


@kernel
def _samples_within(curves: CostCurves, w: int, overlap: float, limit: float, most: int) -> int:
    """The largest number of samples with which a worker keeps a time limit, at most `most`."""
    # Curves grow with the number of samples, so bisection finds it. Invariant: `low` samples keep
    # the limit (or are none), `high` + 1 do not (or are too many).
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _turn_s(curves, w, middle, overlap) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


class QuotaRanges(NamedTuple):
    """Samples that each worker gets at least and at most."""

    least_W: I64
    most_W: I64


@kernel
def _fill(
    curves: CostCurves, overlap: float, limit: float, ranges: QuotaRanges, quota_W: I64
) -> int:
    """Write the largest quotas that keep a time limit; returns their sum."""
    samples = 0
    for w in range(len(quota_W)):
        most = _samples_within(curves, w, overlap, limit, ranges.most_W[w])
        quota_W[w] = max(ranges.least_W[w], most)
        samples += quota_W[w]
    return samples


@kernel
def _least_limit(curves: CostCurves, overlap: float, ranges: QuotaRanges, quota_W: I64) -> float:
    """The lowest time limit under which a whole batch has room; writes the quotas at it."""
    batch, low, high = curves.late_WN.shape[1] - 1, 0.0, 0.0
    for w in range(len(quota_W)):
        high = max(high, _turn_s(curves, w, ranges.most_W[w], overlap))
    if _fill(curves, overlap, high, ranges, quota_W) < batch:
        return np.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _fill(curves, overlap, middle, ranges, quota_W) < batch:
            low = middle
        else:
            high = middle
    _fill(curves, overlap, high, ranges, quota_W)
    return high


@kernel
def solve_quotas(curves: CostCurves, least_W: I64, most_W: I64) -> I64:
    """Quotas that make a step shortest, between a least and a most for each worker.

    Their sum is at least a batch; the caller takes away what is too much.
    """
    ranges = QuotaRanges(least_W=least_W, most_W=most_W)
    best_W, quota_W = most_W.copy(), most_W.copy()
    shortest_s, best_overlap, width = np.inf, 0.0, 0.0
    for w in range(len(least_W)):
        width = max(width, curves.late_WN[w, most_W[w]])
    low = 0.0
    # Two grids: the second one covers the neighbours of the first one's best point.
    for _ in range(2):
        for i in range(OVERLAPS):
            overlap = low + width * i / (OVERLAPS - 1)
            step_s = _least_limit(curves, overlap, ranges, quota_W)
            if step_s < shortest_s:
                shortest_s, best_overlap = step_s, overlap
                best_W[:] = quota_W
        width /= OVERLAPS - 1
        low, width = max(0.0, best_overlap - width), 2 * width
    return best_W


def _pressure(seconds_W: F64) -> F64:
    """How much each worker determines the maximum over workers; 1 on average."""
    longest = float(seconds_W.max())
    if longest <= 0:
        return np.ones_like(seconds_W)
    near_W = (seconds_W / longest) ** SHARPNESS
    pressure_W: F64 = near_W * len(near_W) / near_W.sum()
    return pressure_W


def _chunk_share(chunk_W: F64, phase_W: F64) -> float:
    """The part of a phase's time that one chunk of it takes."""
    return float(chunk_W.max() / phase_W.max()) if phase_W.any() else 1.0


def _learn_weights(time: StepTime, memory: SearchState) -> None:
    """Move the weights of seconds towards what they counted in a step.

    A step takes as long as the slowest worker's pulls, compute and pushes. Workers count by how
    close they are to the slowest one. Early transfers count only where compute does not hide them.
    Of pushes or pulls that the overlap hides, one chunk counts. Where the shards' link takes longer
    than all workers, every byte counts alike.
    """
    pressure_W = _pressure(time.turn_W)
    exposed_W = time.early_W > time.compute_W
    waits_W = time.urgent_W >= time.first_W + time.lead_s
    urgent_W = np.where(waits_W, 1.0, _chunk_share(time.first_W, time.urgent_W))
    waits_W = time.late_W - time.lead_s >= time.last_W
    late_W = np.where(waits_W, 1.0, _chunk_share(time.last_W, time.late_W))
    weight_PW = pressure_W * np.stack([exposed_W, urgent_W, late_W])
    bound_by_shards = time.shard_s >= time.total_s
    if bound_by_shards:
        weight_PW[:] = 0
    shard_W = np.full(len(late_W), float(bound_by_shards))
    memory.weight_PW[:] += SHARE_SMOOTHING * (np.vstack([weight_PW, shard_W]) - memory.weight_PW)


def _cost_curves(time: StepTime, samples_W: I64, batch: int) -> CostCurves:
    """The last step's times, extrapolated to every number of samples."""
    count_N = np.arange(batch + 1, dtype=np.float64)
    ratio_WN = count_N / np.maximum(samples_W, 1)[:, None]
    slow_WN, fast_WN = ratio_WN**GROWTH, ratio_WN**FRESH_GROWTH
    per_sample_W = time.compute_W / np.maximum(samples_W, 1)
    return CostCurves(
        start_WN=np.maximum(per_sample_W[:, None] * count_N, time.early_W[:, None] * fast_WN),
        urgent_WN=time.urgent_W[:, None] * slow_WN,
        first_WN=time.first_W[:, None] * slow_WN,
        late_WN=time.late_W[:, None] * slow_WN,
        last_WN=time.last_W[:, None] * slow_WN,
    )


def samples_that_fit(rows_WA: I64, capacity_WA: I64, samples_W: I64) -> F64:
    """Samples whose rows each worker's cache holds, estimated from a step's rows and samples."""
    full_W = (rows_WA / np.maximum(capacity_WA, 1)).max(1)
    fits_W: F64 = CACHE_SHARE * samples_W / np.maximum(full_W, 1e-9)
    return np.where(samples_W > 0, fits_W, np.inf)


def balance_shares(time: StepTime, samples_W: I64, memory: SearchState, room_W: F64) -> None:
    """Move shares and weights towards those that would have made a step shorter.

    `room_W`: samples whose rows each worker's cache holds.
    """
    batch = int(samples_W.sum())
    if batch == 0:
        return
    _learn_weights(time, memory)
    before_s = float(memory.took_1[0]) or time.total_s
    memory.took_1[0] = before_s + SHARE_SMOOTHING * (time.total_s - before_s)
    if (memory.range_2W[0] == memory.range_2W[1]).all():
        return
    curves = _cost_curves(time, samples_W, batch)
    least_W = np.floor(batch * memory.range_2W[0]).astype(np.int64)
    most_W = np.minimum(np.ceil(batch * memory.range_2W[1]), np.maximum(1, room_W))
    most_W = np.clip(most_W.astype(np.int64), least_W, batch) * (memory.range_2W[1] > 0)
    idle_W = (samples_W == 0) & (most_W > 0)
    if idle_W.any():  # their costs are unknown; one sample is a trial
        most_W[idle_W] = np.minimum(most_W[idle_W], 1)
    above_W = solve_quotas(curves, least_W, most_W) - least_W
    if above_W.sum() > 0:
        above_W = above_W * (batch - least_W.sum()) / above_W.sum()  # quotas may exceed a batch
        memory.share_W[:] += LEARNING_RATE * ((least_W + above_W) / batch - memory.share_W)


def clip_shares(share_W: F32, range_2W: F32) -> F32:
    """Shares that keep their ranges and sum to one; the ranges must allow that."""
    least_W, most_W = range_2W.astype(np.float64)
    clipped_W: F64 = np.clip(share_W.astype(np.float64), least_W, most_W)
    missing = 1 - float(clipped_W.sum())
    free_W = most_W - clipped_W if missing > 0 else clipped_W - least_W
    if free_W.sum() > 0:
        clipped_W += missing * free_W / free_W.sum()
    return clipped_W.astype(np.float32)
