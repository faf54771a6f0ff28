"""The laws as checks of a finished plan against the state it starts from.

Each returns the index of the first touch that breaks a law, or -1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import CHECKED, RETURNED, Caches, Placement, marked, set_mark
from embroute.kernels.codes import (
    CLOCK,
    DIRTY,
    EXCLUSIVE,
    FRESH,
    HIT,
    LOCAL,
    MISS,
    NO_HOLDER,
    NOTHING,
    ROW,
    SLOT_MASK,
    START,
)
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.kernels.transfers import Decision, StepRows

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


SLOTS, LOST, STALE_READ = 1, 2, 3  # what touches_lawful finds


@kernel
def touches_lawful(
    caches: Caches,
    rows: StepRows,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    exact: bool,
) -> tuple[int, int]:
    """The first touch that breaks a law and which, or (-1, 0).

    Law 5: every touched row has a slot of its own, inside its arena. Law 2: a copy with an
    unpushed update does not lose its slot before the update is pushed, nor is it dropped after
    the step. Law 3, if `exact`: a copy used without a pull is up to date.
    """
    cell_RW, slots, planning = caches.cell_RW, caches.slot_WCF, caches.planning[0]
    first_WA, end_WA = caches.first_WA, caches.first_WA + caches.capacity_WA
    rows_U, arena_U, need_T = rows.rows_U, rows.arena_U, decision.need_T
    mode_T, push_T, drop_T = decision.mode_T, decision.push_T, decision.drop_T
    worker_T, unique_T = touches.worker_T, touches.unique_T
    slot_T, victim_T = placement.slot_T, placement.victim_T
    for t in range(len(slot_T)):
        w, u, slot = worker_T[t], unique_T[t], slot_T[t]
        inside = first_WA[w, arena_U[u]] <= slot < end_WA[w, arena_U[u]]
        if not inside or marked(slots, w, slot, CHECKED, planning):
            return t, SLOTS
        set_mark(slots, w, slot, CHECKED, planning)
        if need_T[t] != MISS and slots[w, slot, ROW] != rows_U[u]:
            return t, SLOTS
        kept_apart = mode_T[t] == EXCLUSIVE or mode_T[t] == LOCAL
        if drop_T[t] and kept_apart and push_T[t] == NOTHING:
            return t, LOST
        dirty = victim_T[t] >= 0 and cell_RW[victim_T[t], w] & DIRTY
        if dirty and not marked(slots, w, slot, RETURNED, planning):
            return t, LOST
        if exact and need_T[t] == HIT and not cell_RW[rows_U[u], w] & FRESH:
            return t, STALE_READ
    return -1, 0


@kernel
def updates_home(caches: Caches, rows: StepRows, touches: Touches, only_U: I32) -> int:
    """Laws 2 and 3: before a row is pulled or updated elsewhere, its newest value is home."""
    cell_RW, slots, rows_U = caches.cell_RW, caches.slot_WCF, rows.rows_U
    planning = caches.planning[0]
    first_U, of_row_T, worker_T = touches.first_U, touches.of_row_T, touches.worker_T
    for u in range(len(rows_U)):
        first, last, row = first_U[u], first_U[u + 1], rows_U[u]
        if first == last or only_U[u] == NO_HOLDER:
            continue
        alone = worker_T[of_row_T[first]] if last - first == 1 else -1
        start = max(only_U[u], 0)
        for k in range(start, start + 1 if only_U[u] >= 0 else cell_RW.shape[1]):
            cell = cell_RW[row, k]
            if not cell & DIRTY or k == alone:
                continue
            if not marked(slots, k, (cell & SLOT_MASK) - 1, RETURNED, planning):
                return int(of_row_T[first])
    return -1


@kernel
def shard_clocks(caches: Caches, rows: StepRows) -> I64:
    """The shard's clock of each row once the step's returns have landed."""
    cell_RW, slots, rows_U = caches.cell_RW, caches.slot_WCF, rows.rows_U
    planning = caches.planning[0]
    out_U = np.empty(len(rows_U), np.int64)
    for u in range(len(rows_U)):
        row = rows_U[u]
        clock = np.int64(caches.clock_R[row])
        for k in range(cell_RW.shape[1]):
            slot = (cell_RW[row, k] & SLOT_MASK) - 1
            if slot >= 0 and marked(slots, k, slot, RETURNED, planning):
                clock = max(clock, np.int64(caches.clock_WC2[k, slot, CLOCK]))
        out_U[u] = clock
    return out_U


@kernel
def reads_bounded(
    clock_WC2: I32, touches: Touches, need_T: U8, slot_T: I32, shard_U: I64, bound: int
) -> int:
    """Law 4: a copy used without a pull is within the bound, on both sides."""
    worker_T, unique_T = touches.worker_T, touches.unique_T
    for t in range(len(need_T)):
        if need_T[t] != HIT:
            continue
        w, slot = worker_T[t], slot_T[t]
        clock = clock_WC2[w, slot, CLOCK]
        unsent = clock > clock_WC2[w, slot, START] + bound
        if unsent or shard_U[unique_T[t]] > clock + bound:
            return t
    return -1
