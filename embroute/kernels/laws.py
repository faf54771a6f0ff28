"""The laws as checks of a finished plan against the state it starts from.

Each returns the index of the first touch that breaks the law, or -1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import CHECKED, RETURNED, Caches, Placement, any_bit, marked, set_mark
from embroute.kernels.codes import CLOCK, DIRTY, FRESH, HIT, SLOT_MASK, START
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.kernels.transfers import Decision, StepRows

I64 = npt.NDArray[np.int64]


@kernel
def slots_fit(caches: Caches, rows: StepRows, touches: Touches, placement: Placement) -> int:
    """Law 5: every touched row has a slot of its own, inside its arena."""
    for t in range(len(placement.slot_T)):
        w, slot = touches.worker_T[t], placement.slot_T[t]
        a = rows.arena_U[touches.unique_T[t]]
        inside = slot - caches.first_WA[w, a]
        if inside < 0 or inside >= caches.capacity_WA[w, a]:
            return t
        if marked(caches, w, slot, CHECKED, rows.step):
            return t
        set_mark(caches, w, slot, CHECKED, rows.step)
    return -1


@kernel
def victims_safe(caches: Caches, rows: StepRows, touches: Touches, placement: Placement) -> int:
    """Law 2: a copy with an unpushed update does not lose its slot before the update is pushed."""
    for t in range(len(placement.slot_T)):
        row, w, slot = placement.victim_T[t], touches.worker_T[t], placement.slot_T[t]
        if row < 0 or caches.cell_RW[row, w] & DIRTY == 0:
            continue
        if not marked(caches, w, slot, RETURNED, rows.step):
            return t
    return -1


@kernel
def reads_fresh(caches: Caches, rows: StepRows, touches: Touches, decision: Decision) -> int:
    """Law 3: a copy used without a pull is up to date."""
    for t in range(len(decision.need_T)):
        cell = caches.cell_RW[rows.rows_U[touches.unique_T[t]], touches.worker_T[t]]
        if decision.need_T[t] == HIT and not cell & FRESH:
            return t
    return -1


@kernel
def updates_home(caches: Caches, rows: StepRows, touches: Touches) -> int:
    """Laws 2 and 3: before a row is pulled or updated elsewhere, its newest value is home."""
    for u in range(len(rows.rows_U)):
        first, last = touches.first_U[u], touches.first_U[u + 1]
        if first == last or not any_bit(caches.cell_RW, rows.rows_U[u], DIRTY):
            continue
        alone = touches.worker_T[touches.of_row_T[first]] if last - first == 1 else -1
        for k in range(caches.cell_RW.shape[1]):
            cell = caches.cell_RW[rows.rows_U[u], k]
            if not cell & DIRTY or k == alone:
                continue
            if not marked(caches, k, (cell & SLOT_MASK) - 1, RETURNED, rows.step):
                return int(touches.of_row_T[first])
    return -1


@kernel
def shard_clocks(caches: Caches, rows: StepRows) -> I64:
    """The shard's clock of each row once the step's returns have landed."""
    out_U = np.empty(len(rows.rows_U), np.int64)
    for u in range(len(rows.rows_U)):
        row = rows.rows_U[u]
        out_U[u] = caches.clock_R[row]
        for k in range(caches.cell_RW.shape[1]):
            slot = (caches.cell_RW[row, k] & SLOT_MASK) - 1
            if slot >= 0 and marked(caches, k, slot, RETURNED, rows.step):
                out_U[u] = max(out_U[u], caches.slot_WCF[k, slot, CLOCK])
    return out_U


@kernel
def reads_bounded(
    caches: Caches,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    shard_U: I64,
    bound: int,
) -> int:
    """Law 4: a copy used without a pull is within the bound, on both sides."""
    for t in range(len(decision.need_T)):
        w, slot = touches.worker_T[t], placement.slot_T[t]
        clock = caches.slot_WCF[w, slot, CLOCK]
        if decision.need_T[t] != HIT:
            continue
        if clock > caches.slot_WCF[w, slot, START] + bound:
            return t
        if shard_U[touches.unique_T[t]] > clock + bound:
            return t
    return -1
