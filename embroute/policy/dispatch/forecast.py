"""What the steps of a window take as its samples are dealt.

Axes: T batches, W workers, A arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cost import FLOAT_BYTES, INDEX_BYTES, StepTime, Traffic, step_time, streamed
from embroute.kernels.codes import (
    GRADIENT,
    MISS_PULL,
    NUM_KINDS,
    NUM_PHASES,
    UPDATE_PUSH,
    VALUE_STATE,
)
from embroute.kernels.foretell import PULL, PUSH, Deal, crowd_out, foretell, touched
from embroute.policy.dispatch.search import Spread, num_homes
from embroute.policy.setup import Setup

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class Forecast(NamedTuple):
    """What the batches of a window take, and their rows. Axes: T batches, W workers, A arenas."""

    times: list[StepTime]
    rows_TWA: I64


def _traffic(dealt: Spread, t: int, bytes_HWDP: F64, rows_WA: I64, setup: Setup) -> Traffic:
    """What batch t of a window moves; where homes are not told apart, rows lie evenly."""
    workers, shards = setup.num_workers, setup.cluster.num_shards
    bytes_WKIP = np.zeros((workers, shards, NUM_KINDS, NUM_PHASES), np.int64)
    bytes_WHDP = bytes_HWDP.swapaxes(0, 1)
    bytes_WHDP = bytes_WHDP * (bytes_WHDP.shape[1] / shards)
    bytes_WKIP[:, :, MISS_PULL] = bytes_WHDP[:, :, PULL]
    bytes_WKIP[:, :, UPDATE_PUSH] = bytes_WHDP[:, :, PUSH]
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


def look(dealt: Spread, setup: Setup, capacity_WA: I64) -> Forecast:
    """What the batches of a window take as they are dealt."""
    nodes, worker_S = dealt.nodes, dealt.uses.worker_S
    count = len(nodes.before_N)
    touched_NW = touched(dealt.node_L, dealt.first_S, worker_S, count, setup.num_workers)
    deal = Deal(touched_NW, dealt.first_node_T)
    record_XA = setup.record_bytes_XA.astype(np.float64)
    told = foretell(nodes, deal, record_XA, capacity_WA, num_homes(setup))
    crowd_out(told.bytes_THWDP, told.crowds, record_XA[VALUE_STATE], capacity_WA)
    parts = enumerate(zip(told.bytes_THWDP, told.crowds.rows_TWA, strict=True))
    moved = (_traffic(dealt, t, bytes_, rows, setup) for t, (bytes_, rows) in parts)
    times = [step_time(streamed(traffic, setup.cluster), setup.cluster) for traffic in moved]
    return Forecast(times, told.crowds.rows_TWA)


def mean(times: Sequence[StepTime]) -> float:
    """Seconds of a step; the first half of a window pays for rows that change places."""
    return float(np.mean([time.total_s for time in times[len(times) // 2 :]]))
