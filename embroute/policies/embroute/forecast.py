"""What the steps of a window take as its samples are dealt.

Axes: T batches, W workers, A arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import (
    FLOAT_BYTES,
    INDEX_BYTES,
    StepTime,
    Traffic,
    pipelined,
    step_time,
)
from embroute.kernels.array_types import F64, I64
from embroute.kernels.codes import (
    GRADIENT,
    MISS_PULL,
    NUM_KINDS,
    NUM_PHASES,
    UPDATE_PUSH,
    VALUE_STATE,
)
from embroute.planner.setup import Setup
from embroute.policies.embroute.predicted_traffic import (
    PULL_BYTES,
    PUSH_BYTES,
    TouchedRows,
    predict_traffic,
    spill_overflow,
    touch_matrix,
)
from embroute.policies.embroute.search import WindowProblem, num_homes


class Forecast(NamedTuple):
    """What the batches of a window take, and their rows. Axes: T batches, W workers, A arenas."""

    times: list[StepTime]
    rows_TWA: I64


def _traffic(dealt: WindowProblem, t: int, bytes_HWDP: F64, rows_WA: I64, setup: Setup) -> Traffic:
    """What batch t of a window moves; where homes are not told apart, rows lie evenly."""
    workers, shards = setup.num_workers, setup.cluster.num_shards
    bytes_WKIP = np.zeros((workers, shards, NUM_KINDS, NUM_PHASES), np.int64)
    bytes_WHDP = bytes_HWDP.swapaxes(0, 1)
    bytes_WHDP = bytes_WHDP * (bytes_WHDP.shape[1] / shards)
    bytes_WKIP[:, :, MISS_PULL] = bytes_WHDP[:, :, PULL_BYTES]
    bytes_WKIP[:, :, UPDATE_PUSH] = bytes_WHDP[:, :, PUSH_BYTES]
    batch, samples_W = dealt.entries[t].batch, dealt.loads.load_TW[t].astype(np.int64)
    lookups = len(batch.rows) / max(1, len(batch))
    per_sample = FLOAT_BYTES * (batch.dense.shape[1] + 1) + INDEX_BYTES * lookups
    nothing_K = np.zeros(shards, np.int64)
    control_W = (per_sample * samples_W).astype(np.int64)
    plan_W = INDEX_BYTES * rows_WA.sum(1)
    hot = dealt.reduced[t].rows
    arenas = setup.arena_of(dealt.entries[t].rows_U[hot])
    hot_bytes = int(setup.record_bytes_XA[GRADIENT][arenas].sum())
    about = (bytes_WKIP, bytes_WKIP, samples_W, control_W, plan_W, nothing_K)
    return Traffic(*about, len(hot), hot_bytes)


def forecast_steps(dealt: WindowProblem, setup: Setup, capacity_WA: I64) -> Forecast:
    """What the batches of a window take as they are dealt."""
    nodes, worker_S = dealt.nodes, dealt.uses.worker_S
    count = len(nodes.before_N)
    touched_NW = touch_matrix(dealt.node_L, dealt.first_S, worker_S, count, setup.num_workers)
    deal = TouchedRows(touched_NW, dealt.first_node_T)
    record_XA = setup.record_bytes_XA.astype(np.float64)
    told = predict_traffic(nodes, deal, record_XA, capacity_WA, num_homes(setup))
    spill_overflow(told.bytes_THWDP, told.counts, record_XA[VALUE_STATE], capacity_WA)
    parts = enumerate(zip(told.bytes_THWDP, told.counts.rows_TWA, strict=True))
    moved = (_traffic(dealt, t, bytes_, rows, setup) for t, (bytes_, rows) in parts)
    times = [step_time(pipelined(traffic, setup.cluster), setup.cluster) for traffic in moved]
    return Forecast(times, told.counts.rows_TWA)


def mean_step_s(times: Sequence[StepTime]) -> float:
    """Seconds of a step; the first half of a window pays for rows that change places."""
    return float(np.mean([time.total_s for time in times[len(times) // 2 :]]))
