"""What the steps of a window take as its samples are dealt: now, and once caches have filled.

Axes: T batches, W workers, A arenas, C when rows were used before (`kernels/foretell.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cost import FLOAT_BYTES, INDEX_BYTES, StepTime, Traffic, step_time, streamed
from embroute.data.window import Indexed, Window
from embroute.kernels.codes import (
    GRADIENT,
    MISS_PULL,
    NUM_KINDS,
    NUM_PHASES,
    UPDATE_PUSH,
    VALUE_STATE,
)
from embroute.kernels.foretell import COLD, KNOWN, PULL, PUSH, Deal, crowd_out, foretell, touched
from embroute.policy.dispatch.search import Spread, num_homes
from embroute.policy.setup import Setup
from embroute.policy.state import State

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

FILLED = 32  # step by which a crew is judged while caches fill
FITTED = 4  # batches that show a trend
STEEPEST = -1  # power with which first uses become fewer, at most
DOUBTS = 1  # times its standard error that a trend of steps must exceed


class Forecast(NamedTuple):
    """What the batches of a window take: as they are, and were they to come when caches are full.

    And their rows. Axes: T batches, W workers, A arenas.
    """

    now: list[StepTime]
    then: list[StepTime]
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


def look(dealt: Spread, setup: Setup, capacity_WA: I64, then_TC: F64) -> Forecast:
    """What the batches of a window take as they are dealt.

    `then_TC`: times as many first uses, and others, there will be when caches are full.
    """
    nodes, worker_S = dealt.nodes, dealt.uses.worker_S
    count = len(nodes.before_N)
    touched_NW = touched(dealt.node_L, dealt.first_S, worker_S, count, setup.num_workers)
    deal = Deal(touched_NW, dealt.first_node_T, dealt.cold_N)
    record_XA = setup.record_bytes_XA.astype(np.float64)
    told = foretell(nodes, deal, record_XA, capacity_WA, num_homes(setup))

    def times(part_TC: F64) -> list[StepTime]:
        bytes_THWDP = np.einsum("tc,cthwdp->thwdp", part_TC, told.bytes_CTHWDP)
        crowd_out(bytes_THWDP, told.crowds, record_XA[VALUE_STATE], capacity_WA)
        parts = enumerate(zip(bytes_THWDP, told.crowds.rows_TWA, strict=True))
        moved = (_traffic(dealt, t, bytes_, rows, setup) for t, (bytes_, rows) in parts)
        return [step_time(streamed(traffic, setup.cluster), setup.cluster) for traffic in moved]

    then_TC = then_TC[: len(dealt.entries)]
    now = times(np.ones_like(then_TC))
    then = times(then_TC) if (then_TC != 1).any() else now
    return Forecast(now, then, told.crowds.rows_TWA)


def _first_uses(entry: Indexed, state: State) -> int:
    """Rows of a batch that were never used before."""
    number_U = state.caches.cells.number_R[entry.rows_U]
    known_U = state.outlook.affinity_NW[number_U].any(1)
    return int(((entry.before_U < 0) & ~known_U).sum())


def until_full(window: Window, state: State) -> F64:
    """Times as many first uses, and uses of known rows, a batch has once caches have filled.

    First uses become fewer with a power of the number of steps (Heaps' law), which the window
    shows; as many more rows were used before, and may be at another worker. Those that every step
    uses remain as many.
    """
    entries = (window.now, *window.ahead)
    number_T = np.arange(window.step + 1, window.step + len(entries) + 1)
    then_TC = np.ones((len(entries), 3))
    if len(entries) < FITTED or window.step >= FILLED:
        return then_TC
    cold_T = np.array([_first_uses(entry, state) for entry in entries])
    size_T = np.array([int((e.before_U != e.step - 1).sum()) for e in entries])
    slope = np.polyfit(np.log(number_T[1:]), np.log(np.maximum(cold_T[1:], 1)), 1)[0]
    then_TC[:, COLD] = np.maximum(1, FILLED / number_T) ** np.clip(slope, STEEPEST, 0)
    known_T = size_T - cold_T
    then_T = size_T - then_TC[:, COLD] * cold_T
    then_TC[:, KNOWN] = np.where(known_T > 0, then_T / np.maximum(known_T, 1), 1)
    return then_TC


def mean(times: Sequence[StepTime]) -> float:
    """Seconds of a step; the first half of a window pays for rows that change places."""
    return float(np.mean([time.total_s for time in times[len(times) // 2 :]]))


def settled(times: Sequence[StepTime]) -> float:
    """What a step will take once samples are dealt well that nobody had dealt when the job began.

    Steps grow shorter with the logarithm of their number. The very first one, in which everything
    is new, says nothing about it.
    """
    now = mean(times)
    if len(times) < FITTED:
        return now
    doublings = np.log2(np.arange(2, len(times) + 1))
    took = np.array([time.total_s for time in times[1:]])
    away = doublings - doublings.mean()
    slope = float((away * took).sum() / (away**2).sum())
    left = took - took.mean() - slope * away
    doubt = float(np.sqrt((left**2).sum() / (len(left) - 2) / (away**2).sum()))
    slope = min(0.0, slope + DOUBTS * doubt)
    computed = float(np.mean([time.compute_W.max() for time in times]))
    then = float(took.mean() + slope * (np.log2(FILLED) - doublings.mean()))
    return min(now, max(then, now / 2, computed))
