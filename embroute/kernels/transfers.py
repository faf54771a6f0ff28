"""Lists of transfers: building them from the decisions of a step, and counting them.

Axes: T touches, U distinct rows, W workers, K shards, N transfers, X kinds of record, A arenas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import RETURNED, Caches, Placement, marked
from embroute.kernels.codes import (
    DIRTY,
    EARLY,
    EVICT_PUSH,
    GRADIENT,
    HIT,
    LATE,
    LAZY,
    MISS,
    MISS_PULL,
    NOTHING,
    NUM_KINDS,
    NUM_PHASES,
    SHARED,
    SLOT_MASK,
    STALE_PULL,
    UPDATE_PUSH,
    URGENT,
    USED,
    VALUE,
    VALUE_STATE,
)
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Transfers(NamedTuple):
    """Rows that move between a worker and their shards."""

    worker: I32
    row: I64
    slot: I32
    arena: U8
    kind: U8
    record: U8
    phase: U8


class StepRows(NamedTuple):
    """The distinct rows of a step and when they are used before and after it."""

    rows_U: I64
    before_U: I32
    later_U: I32
    arena_U: U8
    step: int


class Decision(NamedTuple):
    """What a sync decides: what each touch needs, who applies it, and what is pushed when."""

    need_T: U8
    mode_T: U8
    push_T: U8  # record pushed after the step, or NOTHING
    drop_T: U8  # whether the copy leaves the cache after the step
    return_worker: I32  # copies of rows of the step that come home before it
    return_unique: I32
    record: int  # what a return or an eviction carries


@kernel
def empty(count: int) -> Transfers:
    """Room for transfers."""
    return Transfers(
        np.empty(count, np.int32),
        np.empty(count, np.int64),
        np.empty(count, np.int32),
        np.empty(count, np.uint8),
        np.empty(count, np.uint8),
        np.empty(count, np.uint8),
        np.empty(count, np.uint8),
    )


@kernel
def returns(caches: Caches, rows: StepRows, decision: Decision, copies_UW: I32) -> Transfers:
    """Updates that come home before the step because someone else needs the row."""
    out = empty(len(decision.return_worker))
    for i in range(len(out.row)):
        w, u = decision.return_worker[i], decision.return_unique[i]
        slot = (copies_UW[u, w] & SLOT_MASK) - 1
        out.worker[i], out.row[i], out.slot[i] = w, rows.rows_U[u], slot
        out.arena[i], out.kind[i], out.record[i] = rows.arena_U[u], UPDATE_PUSH, decision.record
        # Trained in the step before: the update exists only after that step's backward pass.
        out.phase[i] = URGENT if caches.slot_WCF[w, slot, USED] == rows.step else EARLY
    return out


@kernel
def _lost(caches: Caches, w: int, row: int, slot: int, step: int) -> bool:
    """Whether a victim holds an update that nothing else brings home."""
    if row < 0 or caches.cell_RW[row, w] & DIRTY == 0:
        return False
    return not marked(caches, w, slot, RETURNED, step)


@kernel
def evictions(
    caches: Caches, rows: StepRows, touches: Touches, placement: Placement, record: int, lazy: bool
) -> Transfers:
    """Updates of copies that lose their slot. `lazy`: they may arrive after the step's reads."""
    victims, step = placement.victim_T, rows.step
    chosen = np.zeros(len(victims), np.bool_)
    for t in range(len(victims)):
        if victims[t] >= 0:
            chosen[t] = _lost(caches, touches.worker_T[t], victims[t], placement.slot_T[t], step)
    out = empty(int(chosen.sum()))
    count = 0
    for t in range(len(victims)):
        if not chosen[t]:
            continue
        w, slot = touches.worker_T[t], placement.slot_T[t]
        out.worker[count], out.row[count], out.slot[count] = w, victims[t], slot
        out.arena[count] = rows.arena_U[touches.unique_T[t]]
        out.kind[count], out.record[count] = EVICT_PUSH, record
        trained = caches.slot_WCF[w, slot, USED] == step
        out.phase[count] = LAZY if lazy else (URGENT if trained else EARLY)
        count += 1
    return out


@kernel
def pulls(
    caches: Caches, rows: StepRows, touches: Touches, decision: Decision, placement: Placement
) -> Transfers:
    """Rows that workers need and do not have, or not up to date."""
    out = empty(int((decision.need_T != HIT).sum()))
    count = 0
    for t in range(len(touches.unique_T)):
        if decision.need_T[t] == HIT:
            continue
        w, u, slot = touches.worker_T[t], touches.unique_T[t], placement.slot_T[t]
        out.worker[count], out.row[count], out.slot[count] = w, rows.rows_U[u], slot
        out.arena[count] = rows.arena_U[u]
        out.kind[count] = MISS_PULL if decision.need_T[t] == MISS else STALE_PULL
        # Whoever applies the optimizer needs its state as well.
        out.record[count] = VALUE if decision.mode_T[t] == SHARED else VALUE_STATE
        # A row or a slot that the step before trains is free only after its backward pass.
        busy = rows.before_U[u] == rows.step - 1
        if placement.victim_T[t] >= 0 and caches.slot_WCF[w, slot, USED] == rows.step:
            busy = True
        out.phase[count] = LATE if busy else EARLY
        count += 1
    return out


@kernel
def updates(
    rows: StepRows, touches: Touches, decision: Decision, placement: Placement
) -> Transfers:
    """Gradients and values that leave after the step."""
    out = empty(int((decision.push_T != NOTHING).sum()))
    count = 0
    for t in range(len(touches.unique_T)):
        record = decision.push_T[t]
        if record == NOTHING:
            continue
        u = touches.unique_T[t]
        out.worker[count], out.row[count] = touches.worker_T[t], rows.rows_U[u]
        out.slot[count], out.arena[count] = placement.slot_T[t], rows.arena_U[u]
        evicted = decision.drop_T[t] and record != GRADIENT
        out.kind[count] = EVICT_PUSH if evicted else UPDATE_PUSH
        out.record[count] = record
        out.phase[count] = URGENT if rows.later_U[u] == rows.step + 1 else LAZY
        count += 1
    return out


@kernel
def tally(transfers: Transfers, record_bytes_XA: I64, rows_WKIP: I64, bytes_WKIP: I64) -> None:
    """Add transfers to counts per worker, shard, kind and phase."""
    num_shards = rows_WKIP.shape[1]
    for i in range(len(transfers.row)):
        w, k = transfers.worker[i], transfers.row[i] % num_shards
        kind, phase = transfers.kind[i], transfers.phase[i]
        rows_WKIP[w, k, kind, phase] += 1
        size = record_bytes_XA[transfers.record[i], transfers.arena[i]]
        bytes_WKIP[w, k, kind, phase] += size


def empty_counts(num_workers: int, num_shards: int) -> I64:
    """Zeros of the shape that `tally` fills."""
    return np.zeros((num_workers, num_shards, NUM_KINDS, NUM_PHASES), np.int64)
