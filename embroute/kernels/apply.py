"""What a step leaves behind in the caches: copies come and go, clocks advance.

Axes: W workers, C slots, R rows, U distinct rows of the step, T touches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import Caches, Placement
from embroute.kernels.codes import (
    CLOCK,
    DIRTY,
    EXCLUSIVE,
    FILL,
    FRESH,
    HIT,
    LOCAL,
    MISS,
    NO_HOLDER,
    NOTHING,
    REPLICA,
    ROW,
    SHARED,
    SLOT_MASK,
    START,
    USED,
)
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.touches import Touches
from embroute.kernels.transfers import Decision, StepRows, Transfers

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@kernel
def clean(cell_RW: I32, worker: I32, row: I64) -> None:
    """Copies whose update went home hold nothing the shard does not have."""
    for i in range(len(row)):
        cell_RW[row[i], worker[i]] &= ~DIRTY


@inlined
def _after(mode: int, pushed: int) -> int:
    """Bits of a touched copy after the step."""
    bits = 0
    if mode == EXCLUSIVE:
        bits = FRESH if pushed != NOTHING else FRESH | DIRTY
    elif mode == LOCAL:
        bits = DIRTY
    elif mode == FILL:
        bits = FRESH
    return bits


@kernel
def _settle_replicas(caches: Caches, rows: StepRows, touches: Touches, mode_T: U8) -> None:
    """Every replica is up to date and the shard is not; one of them will bring the row home."""
    cell_RW, slots, rows_U = caches.cell_RW, caches.slot_WCF, rows.rows_U
    num_workers = cell_RW.shape[1]
    for t in range(len(mode_T)):
        row = rows_U[touches.unique_T[t]]
        if mode_T[t] != REPLICA:
            continue
        for k in range(num_workers):
            slot = (cell_RW[row, k] & SLOT_MASK) - 1
            if slot >= 0:
                keeper = DIRTY if k == row % num_workers else 0
                cell_RW[row, k] = (slot + 1) | FRESH | keeper
                slots[k, slot, USED] = rows.step + 1


@kernel
def _outdate(caches: Caches, rows: StepRows, touches: Touches, mode_T: U8, only_U: I32) -> None:
    """Copies of rows that exact updates change are no longer up to date, whoever holds them."""
    cell_RW, rows_U = caches.cell_RW, rows.rows_U
    first_U, of_row_T = touches.first_U, touches.of_row_T
    for u in range(len(rows_U)):
        if only_U[u] == NO_HOLDER or first_U[u] == first_U[u + 1]:
            continue
        if mode_T[of_row_T[first_U[u]]] > SHARED:
            continue
        start = max(only_U[u], 0)
        stop = start + 1 if only_U[u] >= 0 else cell_RW.shape[1]
        for k in range(start, stop):
            cell_RW[rows_U[u], k] &= SLOT_MASK


@kernel
def settle(
    caches: Caches,
    rows: StepRows,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    only_U: I32,
) -> None:
    """Victims leave, missing rows take their slots, and the cells of the step's rows are set.

    `only_U`: who had a row FRESH or DIRTY before the step.
    """
    _outdate(caches, rows, touches, decision.mode_T, only_U)
    cell_RW, slots, now = caches.cell_RW, caches.slot_WCF, rows.step + 1
    first_WA, used_WA = caches.first_WA, caches.used_WA
    rows_U, arena_U, need_T = rows.rows_U, rows.arena_U, decision.need_T
    worker_T, unique_T = touches.worker_T, touches.unique_T
    mode_T, push_T = decision.mode_T, decision.push_T
    slot_T, victim_T = placement.slot_T, placement.victim_T
    replicas = False
    for t in range(len(slot_T)):
        w, slot, row = worker_T[t], slot_T[t], rows_U[unique_T[t]]
        slots[w, slot, USED] = now
        if need_T[t] == MISS:
            if victim_T[t] >= 0:
                cell_RW[victim_T[t], w] = 0
            slots[w, slot, ROW] = row
            a = arena_U[unique_T[t]]
            used_WA[w, a] = max(used_WA[w, a], slot - first_WA[w, a] + 1)
        cell_RW[row, w] = (slot + 1) | _after(mode_T[t], push_T[t])
        replicas |= mode_T[t] == REPLICA
    if replicas:
        _settle_replicas(caches, rows, touches, mode_T)


@kernel
def drop(caches: Caches, rows: StepRows, touches: Touches, drop_T: U8) -> None:
    """Copies that do not outlive the step leave."""
    cell_RW, rows_U = caches.cell_RW, rows.rows_U
    unique_T, worker_T = touches.unique_T, touches.worker_T
    for t in range(len(drop_T)):
        if drop_T[t]:
            cell_RW[rows_U[unique_T[t]], worker_T[t]] = 0


@kernel
def tick(
    caches: Caches,
    rows: StepRows,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    pushed: tuple[Transfers, Transfers],
) -> None:
    """Advance the clocks by a step. `pushed`: returns, which land before it, and evictions."""
    returned, evicted = pushed
    clocks, clock_R, rows_U = caches.clock_WC2, caches.clock_R, rows.rows_U
    worker_T, unique_T, need_T = touches.worker_T, touches.unique_T, decision.need_T
    for i in range(len(returned.row)):
        clock = clocks[returned.worker[i], returned.slot[i], CLOCK]
        clock_R[returned.row[i]] = max(clock_R[returned.row[i]], clock)
    # The slots of evicted copies are about to be taken over.
    left = np.empty(len(evicted.row), np.int32)
    for i in range(len(left)):
        left[i] = clocks[evicted.worker[i], evicted.slot[i], CLOCK]
    slot_T = placement.slot_T
    for t in range(len(slot_T)):
        w, slot = worker_T[t], slot_T[t]
        if need_T[t] != HIT:
            clock = clock_R[rows_U[unique_T[t]]]
            clocks[w, slot, START] = clock
            clocks[w, slot, CLOCK] = clock
        clocks[w, slot, CLOCK] += 1
    for i in range(len(left)):
        clock_R[evicted.row[i]] = max(clock_R[evicted.row[i]], left[i])


@kernel
def count_lookups(access_R: I32, rows: npt.NDArray[np.int64]) -> None:
    """Add a batch's look-ups to the counts per row."""
    for i in range(len(rows)):
        if rows[i] >= 0:
            access_R[rows[i]] += 1
