"""What the steps of a window move and take if its samples are dispatched as they are now.

Axes: N nodes (the rows of the window's batches, one batch after the other), L look-ups, S samples,
T batches, W workers, A arenas, D directions (pull, push), P phases, X kinds of record, H shard
groups.
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
from embroute.kernels.array_types import F64, I32, I64, U8
from embroute.kernels.codes import (
    EARLY,
    GRADIENT,
    LATE,
    MISS_PULL,
    NUM_KINDS,
    NUM_PHASES,
    UPDATE_PUSH,
    URGENT,
    VALUE,
    VALUE_STATE,
)
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.planner.setup import Setup
from embroute.policies.embroute.problem import WindowProblem, num_shard_groups
from embroute.policies.embroute.uses import (
    NO_OWNER,
    NO_PULL,
    UNTRAINED_USE,
    USE_KINDS,
    Nodes,
    UsePhases,
)

PULL_BYTES, PUSH_BYTES = 0, 1


class TouchedRows(NamedTuple):
    """The workers that touch each node, and the first node of each batch."""

    touched_NW: U8
    first_node_T: I64


@kernel
def touch_matrix(node_L: I32, first_S: I64, worker_S: I32, num_nodes: int, num_workers: int) -> U8:
    """The workers that touch each node."""
    touched_NW = np.zeros((num_nodes, num_workers), np.uint8)
    for s in range(len(worker_S)):
        w = index(worker_S[s])
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] >= 0:
                touched_NW[index(node_L[i]), w] = 1
    return touched_NW


@kernel
def _batch_of_nodes(first_node_T: I64) -> I32:
    """The batch of every node."""
    batch_N = np.empty(first_node_T[-1], np.int32)
    for t in range(len(first_node_T) - 1):
        batch_N[first_node_T[t] : first_node_T[t + 1]] = t
    return batch_N


class RowCounts(NamedTuple):
    """Rows of each batch at each worker and arena."""

    rows_TWA: I64
    alone_TWA: I64  # rows that no other worker touches
    again_TWA: I64  # rows that the previous batch touched at the same worker
    since_TTWA: I64  # distinct rows from one batch to another, both included
    size_N: I32  # workers that touch a row
    last_N: I32  # the last of them


class PredictedTraffic(NamedTuple):
    """Bytes of each batch at each worker if caches hold two steps, and the rows behind them."""

    bytes_THWDP: F64
    counts: RowCounts


@kernel
def _distinct_since(before_TTWA: I64) -> I64:
    """Distinct rows from each batch to each later one.

    `before_TTWA[e, t]`: rows of batch t whose previous use was in batch e - 1 at the same worker;
    all other rows for e = 0.
    """
    out = np.zeros_like(before_TTWA)
    num_batches = len(out)
    for first in range(num_batches):
        for t in range(first, num_batches):
            if t > first:
                out[first, t] = out[first, t - 1]
            # A row of batch t is new in the span if its previous use is before `first`.
            for e in range(first + 1):
                out[first, t] += before_TTWA[e, t]
    return out


@kernel
def _count_rows(
    nodes: Nodes, touched_NW: U8, batch_N: I32, num_batches: int, num_arenas: int
) -> RowCounts:
    """Count the rows of every batch."""
    num_workers = touched_NW.shape[1]
    rows_TWA = np.zeros((num_batches, num_workers, num_arenas), np.int64)
    alone_TWA, again_TWA = np.zeros_like(rows_TWA), np.zeros_like(rows_TWA)
    before_TTWA = np.zeros((num_batches, num_batches, num_workers, num_arenas), np.int64)
    size_N, last_N = np.zeros(len(batch_N), np.int32), np.full(len(batch_N), NO_OWNER, np.int32)
    for n in range(len(batch_N)):
        # The arena varies fastest in a price class.
        t, a, before = batch_N[n], nodes.class_N[n] % num_arenas, nodes.before_N[n]
        is_next = before >= 0 and batch_N[before] == t - 1
        for w in range(num_workers):
            if touched_NW[n, w]:
                size_N[n] += 1
                last_N[n] = w
            rows_TWA[t, w, a] += touched_NW[n, w]
            held = before >= 0 and touched_NW[before, w] > 0
            before_TTWA[batch_N[before] + 1 if held else 0, t, w, a] += touched_NW[n, w]
            again_TWA[t, w, a] += is_next and touched_NW[n, w] * touched_NW[before, w]
        if size_N[n] == 1:
            alone_TWA[t, last_N[n], a] += 1
    return RowCounts(
        rows_TWA=rows_TWA,
        alone_TWA=alone_TWA,
        again_TWA=again_TWA,
        since_TTWA=_distinct_since(before_TTWA),
        size_N=size_N,
        last_N=last_N,
    )


@kernel
def _defer(bytes_HWDP: F64, w: int, direction: int, phase: int, deferred: float) -> float:
    """Move some early bytes of a worker to a later phase; returns how many there were to move."""
    early = float(bytes_HWDP[:, w, direction, EARLY].sum())
    share = min(1.0, deferred / early) if early > 0 else 0.0
    bytes_HWDP[:, w, direction, phase] += share * bytes_HWDP[:, w, direction, EARLY]
    bytes_HWDP[:, w, direction, EARLY] *= 1 - share
    return share * early


@kernel
def spill_overflow(bytes_THWDP: F64, counts: RowCounts, record_A: F64, capacity_WA: I64) -> None:
    """Correct predicted traffic for caches that do not hold two steps at once.

    Rows leave such a cache only after the step that used them, so the rows that take their slots
    come late. Shared rows leave first, because they carry no update. Updates of the others must be
    pushed urgently, to whatever shard.
    """
    rows_TWA, num_groups = counts.rows_TWA, bytes_THWDP.shape[1]
    for t in range(1, len(rows_TWA)):
        for w in range(len(capacity_WA)):
            late = urgent = 0.0
            for a in range(len(record_A)):
                both_steps = rows_TWA[t - 1, w, a] + rows_TWA[t, w, a] - counts.again_TWA[t, w, a]
                leaving = max(0, both_steps - capacity_WA[w, a])
                shared = rows_TWA[t - 1, w, a] - counts.alone_TWA[t - 1, w, a]
                late += leaving * record_A[a]
                urgent += max(0, leaving - shared) * record_A[a]
            if late > 0:
                _defer(bytes_THWDP[t], w, PULL_BYTES, LATE, late)
                urgent -= _defer(bytes_THWDP[t], w, PUSH_BYTES, URGENT, urgent)
                bytes_THWDP[t, :, w, PUSH_BYTES, URGENT] += urgent / num_groups


@kernel
def _add_shared_use(
    bytes_WDP: F64, touched_W: U8, owner: int, phases: UsePhases, size_X: F64
) -> None:
    """Every worker of a set pulls the value, unless it owns the row, and pushes a gradient."""
    for w in range(len(touched_W)):
        if touched_W[w]:
            bytes_WDP[w, PUSH_BYTES, phases.push] += size_X[GRADIENT]
            if phases.pull != NO_PULL and w != owner:
                bytes_WDP[w, PULL_BYTES, phases.pull] += size_X[VALUE]


@kernel
def predict_traffic(
    nodes: Nodes, touched: TouchedRows, record_XA: F64, capacity_WA: I64, num_groups: int
) -> PredictedTraffic:
    """Pulls and pushes of every batch: a row that only its owner touches moves nothing.

    A row that the previous step used is pushed back urgently and pulled late. A gradient of a
    shared row is urgent if the next step needs the row. A cache has lost a row if it has seen more
    distinct rows since the row's last use than it holds.
    """
    touched_NW, first_node_T = touched
    num_workers, num_arenas = touched_NW.shape[1], record_XA.shape[1]
    batch_N = _batch_of_nodes(first_node_T)
    num_batches = len(first_node_T) - 1
    counts = _count_rows(nodes, touched_NW, batch_N, num_batches, num_arenas)
    bytes_THWDP = np.zeros((num_batches, num_groups, num_workers, 2, NUM_PHASES), np.float64)
    owner_N = nodes.owner_N.copy()  # from here on: the owner after the node
    for n in range(len(batch_N)):
        t, before = batch_N[n], nodes.before_N[n]
        a, kind = nodes.class_N[n] % num_arenas, nodes.class_N[n] // num_arenas % USE_KINDS
        bytes_WDP = bytes_THWDP[t, nodes.class_N[n] // (USE_KINDS * num_arenas)]
        owner = owner_N[before] if before >= 0 else owner_N[n]
        # Rows that entered the owner's cache after the row's last use may have pushed it out.
        since = batch_N[before] + 1 if before >= 0 else 0
        if owner >= 0 and counts.since_TTWA[since, t, owner, a] > capacity_WA[owner, a]:
            bytes_WDP[owner, PUSH_BYTES, EARLY] += record_XA[VALUE_STATE, a]
            owner = NO_OWNER
        size, toucher = counts.size_N[n], counts.last_N[n]
        owner_N[n] = toucher if size == 1 else NO_OWNER
        if size == 1 and toucher == owner:
            continue
        # Bit 1 of the kind: the step before used the row; bit 0: the next one does.
        pull_phase = LATE if kind >= 2 else EARLY
        if owner >= 0:
            return_phase = URGENT if kind >= 2 else EARLY
            bytes_WDP[owner, PUSH_BYTES, return_phase] += record_XA[VALUE_STATE, a]
        if kind >= UNTRAINED_USE:
            pull_phase = NO_PULL
        if size == 1 and pull_phase != NO_PULL:
            bytes_WDP[toucher, PULL_BYTES, pull_phase] += record_XA[VALUE_STATE, a]
        elif size > 1:
            phases = UsePhases(pull=pull_phase, push=URGENT if kind % 2 == 1 else EARLY)
            _add_shared_use(bytes_WDP, touched_NW[n], owner, phases, record_XA[:, a])
    return PredictedTraffic(bytes_THWDP, counts)


class Forecast(NamedTuple):
    """The time of each batch of a window, and its rows."""

    times: list[StepTime]
    rows_TWA: I64


def _traffic(
    problem: WindowProblem, t: int, bytes_HWDP: F64, rows_WA: I64, setup: Setup
) -> Traffic:
    """What batch t of a window moves; rows of one shard group lie evenly on all shards."""
    workers, shards = setup.num_workers, setup.cluster.num_shards
    bytes_WKIP = np.zeros((workers, shards, NUM_KINDS, NUM_PHASES), np.int64)
    bytes_WHDP = bytes_HWDP.swapaxes(0, 1)
    # H is 1 or the number of shards; a single group is broadcast over the shards.
    bytes_WHDP = bytes_WHDP * (bytes_WHDP.shape[1] / shards)
    bytes_WKIP[:, :, MISS_PULL] = bytes_WHDP[:, :, PULL_BYTES]
    bytes_WKIP[:, :, UPDATE_PUSH] = bytes_WHDP[:, :, PUSH_BYTES]
    batch, samples_W = problem.entries[t].batch, problem.loads.load_TW[t].astype(np.int64)
    lookups = len(batch.rows) / max(1, len(batch))
    per_sample = FLOAT_BYTES * (batch.dense.shape[1] + 1) + INDEX_BYTES * lookups
    hot = problem.reduced[t].rows
    arenas = setup.arena_of(problem.entries[t].rows_U[hot])
    return Traffic(
        rows_WKIP=bytes_WKIP,  # not rows, but only bytes are priced
        bytes_WKIP=bytes_WKIP,
        samples_W=samples_W,
        sample_bytes_W=(per_sample * samples_W).astype(np.int64),
        plan_bytes_W=INDEX_BYTES * rows_WA.sum(1),
        plan_bytes_K=np.zeros(shards, np.int64),
        hot_rows=len(hot),
        hot_bytes=int(setup.record_bytes_XA[GRADIENT][arenas].sum()),
    )


def forecast_steps(problem: WindowProblem, setup: Setup, capacity_WA: I64) -> Forecast:
    """The time of each batch of a window with the samples where they are now."""
    nodes, worker_S = problem.nodes, problem.uses.worker_S
    num_nodes = len(nodes.before_N)
    touched_NW = touch_matrix(
        problem.node_L, problem.first_S, worker_S, num_nodes, setup.num_workers
    )
    touched = TouchedRows(touched_NW, problem.first_node_T)
    record_XA = setup.record_bytes_XA.astype(np.float64)
    groups = num_shard_groups(setup)
    predicted = predict_traffic(nodes, touched, record_XA, capacity_WA, groups)
    spill_overflow(predicted.bytes_THWDP, predicted.counts, record_XA[VALUE_STATE], capacity_WA)
    rows_TWA, times = predicted.counts.rows_TWA, []
    for t, bytes_HWDP in enumerate(predicted.bytes_THWDP):
        traffic = _traffic(problem, t, bytes_HWDP, rows_TWA[t], setup)
        times.append(step_time(pipelined(traffic, setup.cluster), setup.cluster))
    return Forecast(times, rows_TWA)


def mean_step_s(times: Sequence[StepTime]) -> float:
    """Seconds of a step; the first half of a window pays for rows that change their worker."""
    return float(np.mean([time.total_s for time in times[len(times) // 2 :]]))
