"""Lists of transfers: building them from the decisions of a step, and counting them.

Axes: T touches, U distinct rows, W workers, K shards, N transfers, X kinds of record, A arenas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import I32, I64, U8, U32
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
    NEW,
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
from embroute.kernels.memory import index, nonzero, prefetch
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import RETURNED, Caches, Placement, marked, victim_cells


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
    return_worker: I32  # copies of the step's rows whose update returns to the shard before it
    return_unique: I32
    record: int  # kind of record of a return or an eviction


def select(transfers: Transfers, chosen: npt.NDArray[np.bool_]) -> Transfers:
    """Some of the transfers, in order."""
    return Transfers._make(column[chosen] for column in transfers)


def _empty_transfers(count: int) -> Transfers:
    """Transfers to be filled in."""
    return Transfers(
        worker=np.empty(count, np.int32),
        row=np.empty(count, np.int64),
        slot=np.empty(count, np.int32),
        arena=np.empty(count, np.uint8),
        kind=np.empty(count, np.uint8),
        record=np.empty(count, np.uint8),
        phase=np.empty(count, np.uint8),
    )


NO_TRANSFERS = _empty_transfers(0)
empty_transfers = kernel(_empty_transfers)


@kernel
def returns(caches: Caches, rows: StepRows, decision: Decision, copies_UW: I32) -> Transfers:
    """Updates that return to their shard before the step because another worker needs the row."""
    slots, rows_U, arena_U, step = caches.slot_WCF, rows.rows_U, rows.arena_U, rows.step
    holder, unique, record = decision.return_worker, decision.return_unique, decision.record
    out = empty_transfers(len(holder))
    worker, row, slot_of, arena, kind, record_of, phase = out
    for i in range(len(row)):
        w, u = index(holder[i]), index(unique[i])
        slot = (copies_UW[u, w] & SLOT_MASK) - 1
        prefetch(slots, (w, slot, USED))
        worker[i], row[i], slot_of[i] = w, rows_U[u], slot
        arena[i], kind[i], record_of[i] = arena_U[u], UPDATE_PUSH, record
    # A second loop, so that the hints of the first have arrived. USED is the step of the last touch
    # plus one: equal to this step, the update exists only after the previous backward pass.
    for i in range(len(row)):
        trained = slots[index(worker[i]), index(slot_of[i]), USED] == step
        phase[i] = URGENT if trained else EARLY
    return out


@kernel
def _dirty_victims(caches: Caches, touches: Touches, placement: Placement) -> U32:
    """Touches whose victim holds an update that no return pushes."""
    slots, planning = caches.slot_WCF, caches.planning[0]
    worker_T, slot_T = touches.worker_T, placement.slot_T
    chosen = nonzero(placement.victim_T >= 0)
    cells = victim_cells(caches.cells, touches, placement, chosen)
    for i in range(len(chosen)):
        w, slot = index(worker_T[chosen[i]]), index(slot_T[chosen[i]])
        if cells[i] & DIRTY and marked(slots, w, slot, RETURNED, planning):
            cells[i] = 0
    dirty: U32 = chosen[nonzero(cells & DIRTY != 0)]
    return dirty


@kernel
def evictions(
    caches: Caches, rows: StepRows, touches: Touches, placement: Placement, record: int, lazy: bool
) -> Transfers:
    """Updates of copies that lose their slot. `lazy`: they may arrive after the step's reads."""
    chosen = _dirty_victims(caches, touches, placement)
    slots, arena_U, step = caches.slot_WCF, rows.arena_U, rows.step
    worker_T, unique_T, slot_T = touches.worker_T, touches.unique_T, placement.slot_T
    out = empty_transfers(len(chosen))
    worker, row, slot_of, arena, kind, record_of, phase = out
    for i in range(len(chosen)):
        t = chosen[i]
        w, slot = worker_T[t], slot_T[t]
        worker[i], row[i], slot_of[i] = w, placement.victim_T[t], slot
        arena[i], kind[i], record_of[i] = arena_U[unique_T[t]], EVICT_PUSH, record
        trained = slots[w, slot, USED] == step
        phase[i] = LAZY if lazy else (URGENT if trained else EARLY)
    return out


@kernel
def pulls(
    caches: Caches, rows: StepRows, touches: Touches, decision: Decision, placement: Placement
) -> Transfers:
    """Rows that workers need and do not have, or not up to date."""
    slots, unused_WA = caches.slot_WCF, caches.first_WA + caches.used_WA
    rows_U, before_U, arena_U = rows.rows_U, rows.before_U, rows.arena_U
    worker_T, unique_T, need_T = touches.worker_T, touches.unique_T, decision.need_T
    mode_T, slot_T, step = decision.mode_T, placement.slot_T, rows.step
    chosen = nonzero((need_T != HIT) & (need_T != NEW))
    out = empty_transfers(len(chosen))
    worker, row, slot_of, arena, kind, record_of, phase = out
    for i in range(len(chosen)):
        t = chosen[i]
        w, u, slot = index(worker_T[t]), index(unique_T[t]), index(slot_T[t])
        worker[i], row[i], slot_of[i], arena[i] = w, rows_U[u], slot, arena_U[u]
        kind[i] = MISS_PULL if need_T[t] == MISS else STALE_PULL
        # A worker that applies the optimizer needs its state as well.
        record_of[i] = VALUE if mode_T[t] == SHARED else VALUE_STATE
        # A row that the step before trains, or a slot that it uses, is free only after its
        # backward pass. A held row's slot is used only with the row.
        busy = before_U[u] == step - 1
        if (need_T[t] == MISS) & (slot < unused_WA[w, index(arena_U[u])]):
            busy |= slots[w, slot, USED] == step
        phase[i] = LATE if busy and step > 0 else EARLY
    return out


@kernel
def updates(
    rows: StepRows, touches: Touches, decision: Decision, placement: Placement
) -> Transfers:
    """Gradients and values that leave after the step."""
    rows_U, later_U, arena_U, step = rows.rows_U, rows.later_U, rows.arena_U, rows.step
    worker_T, unique_T, slot_T = touches.worker_T, touches.unique_T, placement.slot_T
    push_T, drop_T = decision.push_T, decision.drop_T
    out = empty_transfers(int((push_T != NOTHING).sum()))
    worker, row, slot_of, arena, kind, record_of, phase = out
    i = index(0)
    for t in range(len(push_T)):
        if push_T[t] == NOTHING:
            continue
        u = index(unique_T[t])
        worker[i], row[i], slot_of[i], arena[i] = worker_T[t], rows_U[u], slot_T[t], arena_U[u]
        evicted = drop_T[t] and push_T[t] != GRADIENT
        kind[i] = EVICT_PUSH if evicted else UPDATE_PUSH
        record_of[i] = push_T[t]
        # Only an update whose row the next step uses is waited for.
        phase[i] = URGENT if later_U[u] == step + 1 else LAZY
        i += index(1)
    return out


@kernel
def tally(transfers: Transfers, record_bytes_XA: I64, rows_WKIP: I64, bytes_WKIP: I64) -> None:
    """Add transfers to counts per worker, shard, kind and phase."""
    num_shards = rows_WKIP.shape[1]
    worker, row, _, arena, kind, record, phase = transfers
    for i in range(len(row)):
        # Rows are spread over shards by their number: row r lies at shard r mod K.
        w, k = worker[i], row[i] % num_shards
        rows_WKIP[w, k, kind[i], phase[i]] += 1
        bytes_WKIP[w, k, kind[i], phase[i]] += record_bytes_XA[record[i], arena[i]]


def empty_counts(num_workers: int, num_shards: int) -> I64:
    """Zeros of the shape that `tally` fills."""
    return np.zeros((num_workers, num_shards, NUM_KINDS, NUM_PHASES), np.int64)
