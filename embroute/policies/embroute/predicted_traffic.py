"""What the batches of a window will move if they are dealt as they are now.

Axes: N rows of the window's batches one after the other, L look-ups, S samples, T batches,
W workers, A arenas, D directions (pull, push), P phases, X kinds of record, H homes of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F64, I32, I64, U8
from embroute.kernels.codes import EARLY, GRADIENT, LATE, NUM_PHASES, URGENT, VALUE, VALUE_STATE
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.policies.embroute.uses import NEW_USE, USE_KINDS, Nodes

PULL_BYTES, PUSH_BYTES = 0, 1
_NO_OWNER = -1
NO_PULL = -1


class TouchedRows(NamedTuple):
    """Who touches each row, and the first row of each batch."""

    touched_NW: U8
    first_node_T: I64


@kernel
def touch_matrix(node_L: I32, first_S: I64, worker_S: I32, num_nodes: int, num_workers: int) -> U8:
    """Which workers touch each row of each batch."""
    touched_NW = np.zeros((num_nodes, num_workers), np.uint8)
    for s in range(len(worker_S)):
        w = index(worker_S[s])
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] >= 0:
                touched_NW[index(node_L[i]), w] = 1
    return touched_NW


@kernel
def _batches(first_node_T: I64) -> I32:
    """The batch of every node."""
    batch_N = np.empty(first_node_T[-1], np.int32)
    for t in range(len(first_node_T) - 1):
        batch_N[first_node_T[t] : first_node_T[t + 1]] = t
    return batch_N


class RowCounts(NamedTuple):
    """Rows of each batch at each worker and arena."""

    rows_TWA: I64
    alone_TWA: I64  # that no other worker touches
    again_TWA: I64  # that the batch before had there too
    since_TTWA: I64  # distinct ones from a batch to another, both among them
    size_N: I32  # workers that touch a row
    last_N: I32  # the last of them


class PredictedTraffic(NamedTuple):
    """Bytes of each batch at each worker, if caches hold two steps, and its rows."""

    bytes_THWDP: F64
    counts: RowCounts


@kernel
def _since(before_TTWA: I64) -> I64:
    """Distinct rows from one batch to another, of each batch's rows by who had them before it."""
    out = np.zeros_like(before_TTWA)
    num_batches = len(out)
    for first in range(num_batches):
        for t in range(first, num_batches):
            if t > first:
                out[first, t] = out[first, t - 1]
            for earlier in range(first + 1):
                out[first, t] += before_TTWA[earlier, t]
    return out


@kernel
def _crowds(
    nodes: Nodes, touched_NW: U8, batch_N: I32, num_batches: int, num_arenas: int
) -> RowCounts:
    """Count the rows of every batch."""
    num_workers = touched_NW.shape[1]
    rows_TWA = np.zeros((num_batches, num_workers, num_arenas), np.int64)
    alone_TWA, again_TWA = np.zeros_like(rows_TWA), np.zeros_like(rows_TWA)
    # Rows of a batch by the batch that had them there before, plus one.
    before_TTWA = np.zeros((num_batches, num_batches, num_workers, num_arenas), np.int64)
    size_N, last_N = np.zeros(len(batch_N), np.int32), np.full(len(batch_N), _NO_OWNER, np.int32)
    for n in range(len(batch_N)):
        t, a, before = batch_N[n], nodes.arena_N[n] % num_arenas, nodes.before_N[n]
        near = before >= 0 and batch_N[before] == t - 1
        for w in range(num_workers):
            if touched_NW[n, w]:
                size_N[n] += 1
                last_N[n] = w
            rows_TWA[t, w, a] += touched_NW[n, w]
            had = before >= 0 and touched_NW[before, w] > 0
            before_TTWA[batch_N[before] + 1 if had else 0, t, w, a] += touched_NW[n, w]
            again_TWA[t, w, a] += near and touched_NW[n, w] * touched_NW[before, w]
        if size_N[n] == 1:
            alone_TWA[t, last_N[n], a] += 1
    return RowCounts(rows_TWA, alone_TWA, again_TWA, _since(before_TTWA), size_N, last_N)


@kernel
def _defer(bytes_HWDP: F64, w: int, direction: int, phase: int, wanted: float) -> float:
    """Let some of the early bytes of a worker wait for a later phase; returns how many."""
    early = float(bytes_HWDP[:, w, direction, EARLY].sum())
    part = min(1.0, wanted / early) if early > 0 else 0.0
    bytes_HWDP[:, w, direction, phase] += part * bytes_HWDP[:, w, direction, EARLY]
    bytes_HWDP[:, w, direction, EARLY] *= 1 - part
    return part * early


@kernel
def spill_overflow(bytes_THWDP: F64, crowds: RowCounts, record_A: F64, capacity_WA: I64) -> None:
    """A cache that does not hold two steps at once: rows leave after the step that used them.

    What takes their places comes late. Those that were shared leave first, the others' updates have
    to be pushed at once, wherever they live.
    """
    rows_TWA, homes = crowds.rows_TWA, bytes_THWDP.shape[1]
    for t in range(1, len(rows_TWA)):
        for w in range(len(capacity_WA)):
            late = urgent = 0.0
            for a in range(len(record_A)):
                both = rows_TWA[t - 1, w, a] + rows_TWA[t, w, a] - crowds.again_TWA[t, w, a]
                leaving = max(0, both - capacity_WA[w, a])
                shared = rows_TWA[t - 1, w, a] - crowds.alone_TWA[t - 1, w, a]
                late += leaving * record_A[a]
                urgent += max(0, leaving - shared) * record_A[a]
            if late > 0:
                _defer(bytes_THWDP[t], w, PULL_BYTES, LATE, late)
                urgent -= _defer(bytes_THWDP[t], w, PUSH_BYTES, URGENT, urgent)
                bytes_THWDP[t, :, w, PUSH_BYTES, URGENT] += urgent / homes


@kernel
def _share(
    bytes_WDP: F64, touched_W: U8, owner: int, phases: tuple[int, int], a_bytes: F64
) -> None:
    """Every worker of a set pulls a value, unless it owns the row, and pushes a gradient.

    Nobody pulls a row of no pulling phase.
    """
    for w in range(len(touched_W)):
        if touched_W[w]:
            bytes_WDP[w, PUSH_BYTES, phases[PUSH_BYTES]] += a_bytes[GRADIENT]
            if phases[PULL_BYTES] != NO_PULL and w != owner:
                bytes_WDP[w, PULL_BYTES, phases[PULL_BYTES]] += a_bytes[VALUE]


@kernel
def predict_traffic(
    nodes: Nodes, deal: TouchedRows, record_XA: F64, capacity_WA: I64, homes: int
) -> PredictedTraffic:
    """Pulls and pushes of every batch: a row alone at its owner rests, all others move.

    What the step before used is pushed back urgently and pulled late; a sharer's gradient that the
    next step needs is urgent too. A row is gone from a cache in which more distinct rows were used
    since than it holds.
    """
    touched_NW, first_node_T = deal
    num_workers, num_arenas = touched_NW.shape[1], record_XA.shape[1]
    batch_N = _batches(first_node_T)
    num_batches = len(first_node_T) - 1
    crowds = _crowds(nodes, touched_NW, batch_N, num_batches, num_arenas)
    bytes_THWDP = np.zeros((num_batches, homes, num_workers, 2, NUM_PHASES), np.float64)
    owner_N = nodes.owner_N.copy()
    for n in range(len(batch_N)):
        t, before = batch_N[n], nodes.before_N[n]
        a, kind = nodes.arena_N[n] % num_arenas, nodes.arena_N[n] // num_arenas % USE_KINDS
        bytes_WDP = bytes_THWDP[t, nodes.arena_N[n] // (USE_KINDS * num_arenas)]
        owner = owner_N[before] if before >= 0 else owner_N[n]
        since = batch_N[before] + 1 if before >= 0 else 0
        if owner >= 0 and crowds.since_TTWA[since, t, owner, a] > capacity_WA[owner, a]:
            bytes_WDP[owner, PUSH_BYTES, EARLY] += record_XA[VALUE_STATE, a]
            owner = _NO_OWNER
        size, sole = crowds.size_N[n], crowds.last_N[n]
        owner_N[n] = sole if size == 1 else _NO_OWNER
        if size == 1 and sole == owner:
            continue
        pull_phase = LATE if kind >= 2 else EARLY
        if owner >= 0:
            back_phase = URGENT if kind >= 2 else EARLY
            bytes_WDP[owner, PUSH_BYTES, back_phase] += record_XA[VALUE_STATE, a]
        if kind >= NEW_USE:
            pull_phase = NO_PULL
        if size == 1 and pull_phase != NO_PULL:
            bytes_WDP[sole, PULL_BYTES, pull_phase] += record_XA[VALUE_STATE, a]
        elif size > 1:
            phases = (pull_phase, URGENT if kind % 2 == 1 else EARLY)
            _share(bytes_WDP, touched_NW[n], owner, phases, record_XA[:, a])
    return PredictedTraffic(bytes_THWDP, crowds)
