"""What a step leaves behind in the caches: copies come and go, clocks advance.

Axes: W workers, C slots, R rows, U distinct rows of the step, T touches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import Caches, Placement, any_bit
from embroute.kernels.codes import (
    CLOCK,
    DIRTY,
    EXCLUSIVE,
    FILL,
    FRESH,
    HIT,
    LOCAL,
    NOTHING,
    REPLICA,
    ROW,
    SHARED,
    SLOT_MASK,
    START,
    USED,
)
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.kernels.transfers import Decision, StepRows, Transfers

I32 = npt.NDArray[np.int32]


@kernel
def clean(caches: Caches, pushed: Transfers) -> None:
    """Copies whose update went home hold nothing the shard does not have."""
    for i in range(len(pushed.row)):
        caches.cell_RW[pushed.row[i], pushed.worker[i]] &= ~DIRTY


@kernel
def occupy(caches: Caches, rows: StepRows, touches: Touches, placement: Placement) -> None:
    """Victims leave, touched rows take their slots."""
    for t in range(len(placement.slot_T)):
        w, slot = touches.worker_T[t], placement.slot_T[t]
        u = touches.unique_T[t]
        if placement.victim_T[t] >= 0:
            caches.cell_RW[placement.victim_T[t], w] = 0
        caches.slot_WCF[w, slot, ROW] = rows.rows_U[u]
        caches.slot_WCF[w, slot, USED] = rows.step + 1
        a = rows.arena_U[u]
        used = slot - caches.first_WA[w, a] + 1
        if used > caches.used_WA[w, a]:
            caches.used_WA[w, a] = used


@kernel
def _settle_replica(caches: Caches, row: int, step: int) -> None:
    """Every replica is up to date and the shard is not; one of them will bring the row home."""
    num_workers = caches.cell_RW.shape[1]
    for k in range(num_workers):
        slot = (caches.cell_RW[row, k] & SLOT_MASK) - 1
        if slot < 0:
            continue
        keeper = DIRTY if k == row % num_workers else 0
        caches.cell_RW[row, k] = (slot + 1) | FRESH | keeper
        caches.slot_WCF[k, slot, USED] = step + 1


@kernel
def _after(mode: int, pushed: int) -> int:
    """Bits of a touched copy after the step."""
    if mode == EXCLUSIVE:
        return FRESH | (DIRTY if pushed == NOTHING else 0)
    if mode == LOCAL:
        return DIRTY
    return FRESH if mode == FILL else 0


@kernel
def settle(
    caches: Caches, rows: StepRows, touches: Touches, decision: Decision, placement: Placement
) -> None:
    """Set the cells of all copies of the step's rows."""
    for u in range(len(rows.rows_U)):
        first, last = touches.first_U[u], touches.first_U[u + 1]
        if first == last:
            continue
        row = rows.rows_U[u]
        mode = decision.mode_T[touches.of_row_T[first]]
        if mode <= SHARED and any_bit(caches.cell_RW, row, FRESH | DIRTY):
            for k in range(caches.cell_RW.shape[1]):
                caches.cell_RW[row, k] &= SLOT_MASK
        for i in range(first, last):
            t = touches.of_row_T[i]
            bits = _after(mode, decision.push_T[t])
            caches.cell_RW[row, touches.worker_T[t]] = (placement.slot_T[t] + 1) | bits
        if mode == REPLICA:
            _settle_replica(caches, row, rows.step)


@kernel
def drop(caches: Caches, rows: StepRows, touches: Touches, decision: Decision) -> None:
    """Copies that do not outlive the step leave."""
    for t in range(len(decision.drop_T)):
        if decision.drop_T[t]:
            caches.cell_RW[rows.rows_U[touches.unique_T[t]], touches.worker_T[t]] = 0


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
    for i in range(len(returned.row)):
        clock = caches.slot_WCF[returned.worker[i], returned.slot[i], CLOCK]
        caches.clock_R[returned.row[i]] = max(caches.clock_R[returned.row[i]], clock)
    # The slots of evicted copies are about to be taken over.
    left = np.empty(len(evicted.row), np.int32)
    for i in range(len(left)):
        left[i] = caches.slot_WCF[evicted.worker[i], evicted.slot[i], CLOCK]
    for t in range(len(placement.slot_T)):
        w, slot = touches.worker_T[t], placement.slot_T[t]
        if decision.need_T[t] != HIT:
            clock = caches.clock_R[rows.rows_U[touches.unique_T[t]]]
            caches.slot_WCF[w, slot, START] = clock
            caches.slot_WCF[w, slot, CLOCK] = clock
        caches.slot_WCF[w, slot, CLOCK] += 1
    for i in range(len(left)):
        caches.clock_R[evicted.row[i]] = max(caches.clock_R[evicted.row[i]], left[i])


@kernel
def count_lookups(access_R: I32, rows: npt.NDArray[np.int64]) -> None:
    """Add a batch's look-ups to the counts per row."""
    for i in range(len(rows)):
        if rows[i] >= 0:
            access_R[rows[i]] += 1
