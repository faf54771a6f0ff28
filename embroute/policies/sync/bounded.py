"""HET (VLDB 2022, arXiv 2112.07221): a cache with per-row bounded staleness.

A copy counts its updates (`clock`) from the shard's clock at its pull (`start`). It is valid while
clock <= start + s (unsent writes bounded) and the shard's clock <= clock + s (stale reads
bounded). Reading an invalid copy pushes its accumulated update, then pulls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import (
    CLOCK,
    DELTA,
    DIRTY,
    FRESH,
    HIT,
    LOCAL,
    MISS,
    SLOT_MASK,
    STALE,
    START,
)
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.planner.interfaces import Sync, SyncContext
from embroute.planner.kernels.cache import CachedCopies, Caches, sole_holders
from embroute.planner.kernels.transfers import Decision, StepRows
from embroute.planner.state import State
from embroute.policies.sync.decision import make_decision
from embroute.policies.sync.write_through import write_through


@kernel
def _invalid(caches: Caches, w: int, slot: int, shard_clock: int, bound: int) -> bool:
    clock = caches.clock_WC2[w, slot, CLOCK]
    return bool(clock > caches.clock_WC2[w, slot, START] + bound or shard_clock > clock + bound)


class RowClock(NamedTuple):
    """A row of the step, the shard's clock of it, and the bound of staleness."""

    u: int
    shard_clock: int
    bound: int


@kernel
def _invalidate(
    caches: Caches, touches: Touches, copies_UW: I32, row: RowClock, need_T: U8
) -> None:
    """Mark invalid copies of a row among its touchers STALE.

    A push advances the shard's clock, which may invalidate another toucher: repeat until none.
    """
    u, shard_clock, bound = row
    changed = True
    while changed:
        changed = False
        for i in range(touches.first_U[u], touches.first_U[u + 1]):
            t = touches.of_row_T[i]
            w = touches.worker_T[t]
            slot = (copies_UW[u, w] & SLOT_MASK) - 1
            if need_T[t] != HIT or not _invalid(caches, w, slot, shard_clock, bound):
                continue
            need_T[t] = STALE
            changed = True
            if copies_UW[u, w] & DIRTY:
                shard_clock = max(shard_clock, caches.clock_WC2[w, slot, CLOCK])


@kernel
def _needs(caches: Caches, touches: Touches, copies_UW: I32, rows_U: I64, bound: int) -> U8:
    need_T = np.empty(len(touches.unique_T), np.uint8)
    for t in range(len(need_T)):
        held = copies_UW[touches.unique_T[t], touches.worker_T[t]] != 0
        need_T[t] = HIT if held else MISS
    for u in range(len(rows_U)):
        row = RowClock(u, int(caches.clock_R[rows_U[u]]), bound)
        _invalidate(caches, touches, copies_UW, row, need_T)
    return need_T


@kernel
def _readable(caches: Caches, copies_UW: I32, rows_U: I64, bound: int) -> I32:
    out_UW = np.zeros_like(copies_UW)
    for u in range(len(rows_U)):
        for w in range(copies_UW.shape[1]):
            slot = (copies_UW[u, w] & SLOT_MASK) - 1
            if slot >= 0 and not _invalid(caches, w, slot, caches.clock_R[rows_U[u]], bound):
                out_UW[u, w] = (slot + 1) | FRESH
    return out_UW


def bounded(bound: int) -> Sync:
    """Reads may miss updates within `bound` clocks; 0 is defined as write-through, and exact."""
    if bound == 0:
        return write_through()

    def readable(state: State, rows: StepRows, copies: CachedCopies) -> CachedCopies:
        # No DIRTY: another worker's pull forces no push here.
        readable_UW = _readable(state.caches, copies.copies_UW, rows.rows_U, bound)
        return copies._replace(copies_UW=readable_UW, only_U=sole_holders(readable_UW))

    def decide(context: SyncContext) -> Decision:
        caches, touches = context.state.caches, context.touches
        need_T = _needs(caches, touches, context.copies_UW, context.rows.rows_U, bound)
        # An invalid copy pushes its own updates before it pulls.
        return_T = (need_T == STALE) & ((context.cell_T & DIRTY) != 0)
        returned = (touches.worker_T[return_T], touches.unique_T[return_T])
        decision = make_decision(need_T, np.full_like(need_T, LOCAL), returned=returned)
        return decision._replace(record=DELTA)

    return Sync(
        f"het({bound})",
        decide,
        readable=readable,
        record=DELTA,
        bound=bound,
        refused_optimizers=("adam",),  # deltas of its moments do not add up to its moments
    )
