"""How many samples each worker gets, where that is free: as many as let all finish together.

Gradients are sums over samples, so micro-batches need not be equal. What a worker's samples cost is
taken from the last step, and supposed to grow with their number as distinct rows do.
"""

from __future__ import annotations

import numpy as np

from embroute.cost.step_time import StepTime
from embroute.kernels.array_types import F32, F64, I64
from embroute.planner.state import SearchState
from embroute.policies.embroute.quota_solver import CostCurves, solve_quotas

SPEED = 0.2  # part of the way to the best shares that one step goes
SHARPNESS = 8  # how much more the slowest worker counts than one a little faster
GROWTH = 0.5  # of rows that steps one after the other use, with samples: most are shared by several
FRESH_GROWTH = 0.9  # of all others
SHARE_SMOOTHING = 0.3  # weight of the last step among those before it
CACHE_SHARE = 0.9  # of a cache that the rows of a step may take when shares are chosen


def _pressure(seconds_W: F64) -> F64:
    """How much each worker decides a maximum over workers; one on average."""
    most = float(seconds_W.max())
    if most <= 0:
        return np.ones_like(seconds_W)
    near_W = (seconds_W / most) ** SHARPNESS
    pressure: F64 = near_W * len(near_W) / near_W.sum()
    return pressure


def _part(part_W: F64, whole_W: F64) -> float:
    """How much of a phase one part of it takes."""
    return float(part_W.max() / whole_W.max()) if whole_W.any() else 1.0


def _weigh(time: StepTime, memory: SearchState) -> None:
    """Move the weights of seconds towards what they counted in a step.

    A step takes as long as the worker whose pulls, compute and pushes take longest. A worker counts
    as far as it is near that; where compute covers what runs beside it, that costs nothing, and
    of pulls or pushes that the lead covers one part counts. Where the shards' link takes longer
    than all that, every byte counts alike.
    """
    pressure_W = _pressure(time.turn_W)
    uncovered_W = time.early_W > time.compute_W
    waits_W = time.urgent_W >= time.first_W + time.lead_s
    urgent_W = np.where(waits_W, 1.0, _part(time.first_W, time.urgent_W))
    waits_W = time.late_W - time.lead_s >= time.last_W
    late_W = np.where(waits_W, 1.0, _part(time.last_W, time.late_W))
    weight_PW = pressure_W * np.stack([uncovered_W, urgent_W, late_W])
    bound_by_shards = time.shard_s >= time.total_s
    if bound_by_shards:
        weight_PW[:] = 0
    shard_W = np.full(len(late_W), float(bound_by_shards))
    memory.weight_PW[:] += SHARE_SMOOTHING * (np.vstack([weight_PW, shard_W]) - memory.weight_PW)


def _grown(time: StepTime, samples_W: I64, batch: int) -> CostCurves:
    """What workers take with samples from none to the whole batch."""
    count_N = np.arange(batch + 1, dtype=np.float64)
    times_WN = count_N / np.maximum(samples_W, 1)[:, None]
    slow_WN, fast_WN = times_WN**GROWTH, times_WN**FRESH_GROWTH
    per_sample_W = time.compute_W / np.maximum(samples_W, 1)
    start_WN = np.maximum(per_sample_W[:, None] * count_N, time.early_W[:, None] * fast_WN)
    urgent_WN, first_WN, late_WN, last_WN = (
        part_W[:, None] * slow_WN
        for part_W in (time.urgent_W, time.first_W, time.late_W, time.last_W)
    )
    return CostCurves(start_WN, urgent_WN, first_WN, late_WN, last_WN)


def samples_that_fit(rows_WA: I64, capacity_WA: I64, samples_W: I64) -> F64:
    """Samples whose rows each worker's cache holds, judged by those it has."""
    full_W = (rows_WA / np.maximum(capacity_WA, 1)).max(1)
    held_W: F64 = CACHE_SHARE * samples_W / np.maximum(full_W, 1e-9)
    return np.where(samples_W > 0, held_W, np.inf)


def balance_shares(time: StepTime, samples_W: I64, memory: SearchState, room_W: F64) -> None:
    """Move shares and weights towards what would have made a step shorter.

    `room_W`: samples whose rows each worker's cache holds.
    """
    batch = int(samples_W.sum())
    if batch == 0:
        return
    _weigh(time, memory)
    before = float(memory.took_1[0]) or time.total_s
    memory.took_1[0] = before + SHARE_SMOOTHING * (time.total_s - before)
    if (memory.range_2W[0] == memory.range_2W[1]).all():
        return
    grown = _grown(time, samples_W, batch)
    least_W = np.floor(batch * memory.range_2W[0]).astype(np.int64)
    most_W = np.minimum(np.ceil(batch * memory.range_2W[1]), np.maximum(1, room_W))
    most_W = np.clip(most_W.astype(np.int64), least_W, batch) * (memory.range_2W[1] > 0)
    idle_W = (samples_W == 0) & (most_W > 0)
    if idle_W.any():  # nothing is known of them; a sample there is a try
        most_W[idle_W] = np.minimum(most_W[idle_W], 1)
    above_W = solve_quotas(grown, least_W, most_W) - least_W
    if above_W.sum() > 0:
        above_W = above_W * (batch - least_W.sum()) / above_W.sum()  # room can be more than needed
        memory.share_W[:] += SPEED * ((least_W + above_W) / batch - memory.share_W)


def clip_shares(share_W: F32, range_2W: F32) -> F32:
    """Shares that keep their ranges and sum to one; there must be such."""
    least_W, most_W = range_2W.astype(np.float64)
    kept_W: F64 = np.clip(share_W.astype(np.float64), least_W, most_W)
    lacking = 1 - float(kept_W.sum())
    free_W = most_W - kept_W if lacking > 0 else kept_W - least_W
    if free_W.sum() > 0:
        kept_W += lacking * free_W / free_W.sum()
    return kept_W.astype(np.float32)
