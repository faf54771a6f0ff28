"""The caches after a step: copies come and go.

Axes: W workers, C slots, R rows, U distinct rows of the step, T touches.
"""

from __future__ import annotations

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import (
    DIRTY,
    EXCLUSIVE,
    FILL,
    FRESH,
    LOCAL,
    NOTHING,
    REPLICA,
    ROW,
    SEVERAL,
    SHARED,
    SLOT_MASK,
    UNHELD,
    USED,
)
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import AHEAD, index, nonzero, prefetch
from embroute.kernels.touches import Touches
from embroute.planner.kernels.cache import CachedCopies, Caches, Cells, Placement
from embroute.planner.kernels.transfers import Decision, StepRows


@kernel
def mark_clean(cell_NW: I32, number: I32, worker: I32) -> None:
    """Clear DIRTY of copies whose update is pushed: the shard has it now."""
    for i in range(len(number)):
        cell_NW[index(number[i]), index(worker[i])] &= ~DIRTY


@inlined
def _bits_after(mode: int, pushed: int) -> int:
    """FRESH and DIRTY of a touched copy after the step, without branches: modes alternate."""
    fresh = (mode == EXCLUSIVE) | (mode == FILL)
    dirty = ((mode == EXCLUSIVE) | (mode == LOCAL)) & (pushed == NOTHING)
    return FRESH * fresh | DIRTY * dirty


@kernel
def _settle_replicas(caches: Caches, rows: StepRows, touches: Touches, mode_T: U8) -> None:
    """Every replica has the update and the shard has not: one replica is DIRTY and will push it."""
    cell_NW, slots, rows_U = caches.cells.cell_NW, caches.slot_WCF, rows.rows_U
    num_workers = cell_NW.shape[1]
    for t in range(len(mode_T)):
        if mode_T[t] != REPLICA:
            continue
        row = rows_U[touches.unique_T[t]]
        number = caches.cells.number_R[row]
        for k in range(num_workers):
            slot = (cell_NW[number, k] & SLOT_MASK) - 1
            if slot >= 0:
                # The row's number chooses the pusher, so that pushes spread over the workers.
                pusher = DIRTY if k == row % num_workers else 0
                cell_NW[number, k] = (slot + 1) | FRESH | pusher
                slots[k, slot, USED] = rows.step + 1


@kernel
def _take_slots(
    caches: Caches, rows: StepRows, touches: Touches, need_T: U8, placement: Placement
) -> None:
    """Victims leave and missing rows take their slots."""
    cells, slots, used_WA = caches.cells, caches.slot_WCF, caches.used_WA
    worker_T, unique_T = touches.worker_T, touches.unique_T
    slot_T, victim_T = placement.slot_T, placement.victim_T
    for t in nonzero(victim_T >= 0):
        number = cells.number_R[index(victim_T[t])]
        cells.cell_NW[index(number), index(worker_T[t])] = 0
    for t in nonzero(need_T & UNHELD != 0):
        w, slot, u = index(worker_T[t]), index(slot_T[t]), index(unique_T[t])
        slots[w, slot, ROW] = rows.rows_U[u]
        a = index(rows.arena_U[u])
        # Slots are first used in order, so the highest one says how many are used.
        used_WA[w, a] = max(used_WA[w, a], slot - caches.first_WA[w, a] + 1)


@kernel
def number_rows(cells: Cells, rows_U: I64, touches: Touches, number_U: I32) -> I32:
    """The numbers of the step's rows; rows touched for the first time get the next numbers."""
    out_U, first_U = number_U.copy(), touches.first_U
    # Row u is touched if its range in of_row_T is not empty.
    new = nonzero((number_U == 0) & (first_U[:-1] < first_U[1:]))
    for i in range(len(new)):
        prefetch(cells.number_R, (rows_U[new[i]],))
    for i in range(len(new)):
        out_U[new[i]] = cells.numbered[0] + i + 1
        cells.number_R[index(rows_U[new[i]])] = out_U[new[i]]
    cells.numbered[0] += len(new)
    return out_U


@inlined
def _outdate(cell_NW: I32, number: int, only: int) -> None:
    """An exact update of a row makes all its copies stale and clean: only their slots stay."""
    if only == SEVERAL:
        for k in range(cell_NW.shape[1]):
            cell_NW[number, k] &= SLOT_MASK
    else:
        # Without a holder no cell has these bits; a test would cost more than to clear one cell.
        cell_NW[number, index(max(only, 0))] &= SLOT_MASK


@kernel
def apply_step(
    caches: Caches,
    rows: StepRows,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    copies: CachedCopies,
) -> None:
    """Victims leave, missing rows take their slots, and the cells of the step's rows are set."""
    _take_slots(caches, rows, touches, decision.need_T, placement)
    number_U = number_rows(caches.cells, rows.rows_U, touches, copies.number_U)
    cell_NW, only_U, slot_T = caches.cells.cell_NW, copies.only_U, placement.slot_T
    first_U, of_row_T, worker_T = touches.first_U, touches.of_row_T, touches.worker_T
    mode_T, push_T = decision.mode_T, decision.push_T
    replicas = False
    for u in range(len(number_U)):
        soon = min(u + AHEAD, len(number_U) - 1)
        prefetch(cell_NW, (number_U[soon], max(only_U[soon], 0)))
        first, last = index(first_U[u]), index(first_U[u + 1])
        if first == last:
            continue
        n = index(number_U[u])
        # All touches of a row agree: EXCLUSIVE or SHARED change the row itself, other modes not.
        if mode_T[index(of_row_T[first])] <= SHARED:
            _outdate(cell_NW, n, only_U[u])
        for i in range(first, last):
            t = index(of_row_T[i])
            cell_NW[n, index(worker_T[t])] = (slot_T[t] + 1) | _bits_after(mode_T[t], push_T[t])
            replicas |= mode_T[t] == REPLICA
    if replicas:
        _settle_replicas(caches, rows, touches, mode_T)


@kernel
def drop_copies(caches: Caches, rows: StepRows, touches: Touches, drop_T: U8) -> None:
    """Copies that do not outlive the step leave."""
    cells, rows_U = caches.cells, rows.rows_U
    unique_T, worker_T = touches.unique_T, touches.worker_T
    for t in range(len(drop_T)):
        if drop_T[t]:
            number = cells.number_R[index(rows_U[index(unique_T[t])])]
            cells.cell_NW[index(number), index(worker_T[t])] = 0
