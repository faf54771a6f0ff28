"""HET (VLDB 2022, arXiv 2112.07221): a cache with per-row bounded staleness.

A copy counts its updates (`clock`) from the shard's clock at its pull (`start`). It is valid while
clock <= start + s (unsent writes bounded) and the shard's clock <= clock + s (stale reads
bounded). Reading an invalid copy pushes its accumulated update, then pulls.

A published worker asks the shard at each read whether a copy is valid: it sends the row's id and
the copy's clock. Here the coordinator knows all clocks, so no rank sends them. Step time still
includes these bytes, to price HET fairly. Rows and transmission cost do not: they equal what ranks
move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np

from embroute.config.signature import Between
from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import DIRTY, FRESH, HIT, LOCAL, MISS, SLOT_MASK, STALE
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.planner.interfaces import PartMemory, RunStart, Sync, SyncContext
from embroute.planner.kernels.cache import (
    RETURNED,
    CachedCopies,
    Caches,
    Placement,
    marked,
    sole_holders,
)
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers
from embroute.planner.plan import Plan
from embroute.planner.state import State
from embroute.policies.sync.decision import make_decision
from embroute.policies.sync.released import released
from embroute.policies.sync.write_through import write_through

# The two clocks of a slot: the shard's at the pull, and the copy's own.
START, CLOCK = 0, 1
CLOCK_CHECK_BYTES = 16  # a row's id and a copy's clock, 8 bytes each in the released code (Hetu)


class Clocks(NamedTuple):
    """Clocks of copies, by slot, and of rows at their shards. Axis W: workers, C: slots."""

    slot_WC2: I32  # START and CLOCK
    row_R: I32


def _first_clocks(start: RunStart) -> Clocks:
    capacity_WA = start.setup.capacity_WA
    slot_WC2 = np.zeros((len(capacity_WA), int(capacity_WA.sum(1).max()), 2), np.int32)
    return Clocks(slot_WC2, np.zeros(start.setup.schema.num_rows, np.int32))


@kernel
def _invalid(clocks: Clocks, w: int, slot: int, shard_clock: int, bound: int) -> bool:
    clock = clocks.slot_WC2[w, slot, CLOCK]
    return bool(clock > clocks.slot_WC2[w, slot, START] + bound or shard_clock > clock + bound)


class RowClock(NamedTuple):
    """A row of the step, the shard's clock of it, and the bound of staleness."""

    u: int
    shard_clock: int
    bound: int


@kernel
def _invalidate(
    clocks: Clocks, touches: Touches, copies_UW: I32, row: RowClock, need_T: U8
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
            if need_T[t] != HIT or not _invalid(clocks, w, slot, shard_clock, bound):
                continue
            need_T[t] = STALE
            changed = True
            if copies_UW[u, w] & DIRTY:
                shard_clock = max(shard_clock, clocks.slot_WC2[w, slot, CLOCK])


@kernel
def _needs(clocks: Clocks, touches: Touches, copies_UW: I32, rows_U: I64, bound: int) -> U8:
    need_T = np.empty(len(touches.unique_T), np.uint8)
    for t in range(len(need_T)):
        held = copies_UW[touches.unique_T[t], touches.worker_T[t]] != 0
        need_T[t] = HIT if held else MISS
    for u in range(len(rows_U)):
        row = RowClock(u, int(clocks.row_R[rows_U[u]]), bound)
        _invalidate(clocks, touches, copies_UW, row, need_T)
    return need_T


@kernel
def _readable(clocks: Clocks, copies_UW: I32, rows_U: I64, bound: int) -> I32:
    out_UW = np.zeros_like(copies_UW)
    for u in range(len(rows_U)):
        for w in range(copies_UW.shape[1]):
            slot = (copies_UW[u, w] & SLOT_MASK) - 1
            if slot >= 0 and not _invalid(clocks, w, slot, clocks.row_R[rows_U[u]], bound):
                out_UW[u, w] = (slot + 1) | FRESH
    return out_UW


class LeavingCopies(NamedTuple):
    """Pushes before a step's updates: returns arrive before its reads, evictions may be later."""

    returns: Transfers
    evictions: Transfers


@kernel
def _advance(
    clocks: Clocks,
    rows: StepRows,
    touches: Touches,
    decision: Decision,
    placement: Placement,
    pushed: LeavingCopies,
) -> None:
    """The clocks after a step."""
    returned, evicted = pushed
    slots, clock_R, rows_U = clocks.slot_WC2, clocks.row_R, rows.rows_U
    worker_T, unique_T, need_T = touches.worker_T, touches.unique_T, decision.need_T
    for i in range(len(returned.row)):
        clock = slots[returned.worker[i], returned.slot[i], CLOCK]
        clock_R[returned.row[i]] = max(clock_R[returned.row[i]], clock)
    # Read before the loop below gives these slots to other rows; written after it, because
    # evictions may reach the shard after the step's reads.
    left = np.empty(len(evicted.row), np.int32)
    for i in range(len(left)):
        left[i] = slots[evicted.worker[i], evicted.slot[i], CLOCK]
    slot_T = placement.slot_T
    for t in range(len(slot_T)):
        w, slot = worker_T[t], slot_T[t]
        if need_T[t] != HIT:
            clock = clock_R[rows_U[unique_T[t]]]
            slots[w, slot, START] = clock
            slots[w, slot, CLOCK] = clock
        slots[w, slot, CLOCK] += 1
    for i in range(len(left)):
        clock_R[evicted.row[i]] = max(clock_R[evicted.row[i]], left[i])


def _learn_clocks(state: State, plan: Plan) -> None:
    pushed = LeavingCopies(plan.returns, plan.evictions)
    clocks = state.memory(Clocks)
    _advance(clocks, plan.rows, plan.touches, plan.decision, plan.placement, pushed)


def _learn_drain(state: State, drained: Transfers) -> None:
    clocks = state.memory(Clocks)
    clock = clocks.slot_WC2[drained.worker, drained.slot, CLOCK]
    np.maximum.at(clocks.row_R, drained.row, clock)


@kernel
def _shard_clocks(clocks: Clocks, rows_U: I64, copies_UW: I32, caches: Caches) -> I64:
    """The shard's clock of each row once the step's returns have landed."""
    slots, planning = caches.slot_WCF, caches.planning[0]
    out_U = np.empty(len(rows_U), np.int64)
    for u in range(len(rows_U)):
        clock = np.int64(clocks.row_R[rows_U[u]])
        for k in range(copies_UW.shape[1]):
            slot = (copies_UW[u, k] & SLOT_MASK) - 1
            if slot >= 0 and marked(slots, k, slot, RETURNED, planning):
                clock = max(clock, np.int64(clocks.slot_WC2[k, slot, CLOCK]))
        out_U[u] = clock
    return out_U


@kernel
def _reads_bounded(
    clocks: Clocks, touches: Touches, need_T: U8, slot_T: I32, shard_U: I64, bound: int
) -> int:
    """Law 4: a copy used without a pull is within the bound, on both sides."""
    worker_T, unique_T = touches.worker_T, touches.unique_T
    for t in range(len(need_T)):
        if need_T[t] != HIT:
            continue
        w, slot = worker_T[t], slot_T[t]
        clock = clocks.slot_WC2[w, slot, CLOCK]
        unpushed = clock > clocks.slot_WC2[w, slot, START] + bound
        if unpushed or shard_U[unique_T[t]] > clock + bound:
            return t
    return -1


StalenessBound = Annotated[int, Between(0)]
ClockRules = Literal["paper", "release"]


def bounded(bound: StalenessBound = 100, clocks: ClockRules = "paper") -> Sync:
    """Reads may miss updates within `bound` clocks; 0 is defined as write-through, and exact.

    `clocks`: `paper` counts the steps that touch a row; `release` follows the released code, which
    counts look-ups and adds up the counts of all workers, so that it pulls more.
    """
    if bound == 0:
        return write_through()
    if clocks == "release":
        return released(bound, CLOCK_CHECK_BYTES)

    return _by_paper(bound)


def _by_paper(bound: int) -> Sync:
    def readable(state: State, rows: StepRows, copies: CachedCopies) -> CachedCopies:
        # No DIRTY: another worker's pull forces no push here.
        readable_UW = _readable(state.memory(Clocks), copies.copies_UW, rows.rows_U, bound)
        return copies._replace(copies_UW=readable_UW, only_U=sole_holders(readable_UW))

    def decide(context: SyncContext) -> Decision:
        clocks, touches = context.state.memory(Clocks), context.touches
        need_T = _needs(clocks, touches, context.copies_UW, context.rows.rows_U, bound)
        # An invalid copy pushes its own updates before it pulls.
        return_T = (need_T == STALE) & ((context.cell_T & DIRTY) != 0)
        returned = (touches.worker_T[return_T], touches.unique_T[return_T])
        return make_decision(need_T, np.full_like(need_T, LOCAL), returned=returned)

    def laws(plan: Plan, state: State) -> Iterator[tuple[str, int]]:
        clocks, slot_T = state.memory(Clocks), plan.placement.slot_T
        shard_U = _shard_clocks(clocks, plan.rows.rows_U, plan.copies.copies_UW, state.caches)
        touch = _reads_bounded(clocks, plan.touches, plan.decision.need_T, slot_T, shard_U, bound)
        yield "4 (bounded staleness)", touch

    return Sync(
        f"het({bound})",
        decide,
        memory=PartMemory(Clocks, _first_clocks, _learn_clocks, _learn_drain),
        readable=readable,
        laws=laws,
        bound=bound,
        refused_optimizers=("adam",),  # deltas of its moments do not add up to its moments
        check_bytes=CLOCK_CHECK_BYTES,
    )
