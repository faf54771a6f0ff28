"""HET as its released code counts (Hetu, `src/hetu_cache`): clocks of look-ups, not of steps.

A copy has the version of its row at the shard, and a count of its pending look-ups. A look-up adds
one to the count. A count above s is pushed after the step: it is added to the row's version at the
shard and to the version of the copy, which stays. A read pulls if the shard's version exceeds the
copy's by more than s; pending updates are added to the pulled row and stay pending. So the shard's
version grows with every look-up of every worker, where the paper takes the larger of two clocks.

Not copied from that code: crashes with two servers, fused messages that count an update twice, and
pending updates that nothing sends at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64, Bools
from embroute.kernels.codes import DELTA, FRESH, HIT, LOCAL, MISS, NOTHING, SLOT_MASK, STALE
from embroute.kernels.touches import Touches
from embroute.planner.interfaces import PartMemory, RunStart, Sync, SyncContext
from embroute.planner.kernels.cache import CachedCopies, sole_holders
from embroute.planner.kernels.transfers import Decision, StepRows, Transfers
from embroute.planner.plan import Plan
from embroute.planner.state import State
from embroute.policies.sync.decision import make_decision

# The two counts of a slot.
SHARD_VERSION, PENDING = 0, 1


class LookupClocks(NamedTuple):
    """SHARD_VERSION and PENDING of copies by slot, and versions of rows at their shards."""

    slot_WC2: I32
    row_R: I64


def _first_clocks(start: RunStart) -> LookupClocks:
    capacity_WA = start.setup.capacity_WA
    # One slot more than needed: number -1, no slot, is the last.
    slot_WC2 = np.zeros((len(capacity_WA), int(capacity_WA.sum(1).max()) + 1, 2), np.int32)
    return LookupClocks(slot_WC2, np.zeros(start.setup.schema.num_rows, np.int64))


def _valid(clocks: LookupClocks, rows_U: I64, copies_UW: I32, bound: int) -> Bools:
    """Which copies are held and at most `bound` look-ups behind their shard."""
    slot_UW = (copies_UW & SLOT_MASK) - 1
    version_UW = clocks.slot_WC2[np.arange(copies_UW.shape[1]), slot_UW, SHARD_VERSION]
    valid_UW: Bools = (slot_UW >= 0) & (clocks.row_R[rows_U][:, None] - version_UW <= bound)
    return valid_UW


def _lookups(touches: Touches) -> I64:
    """Look-ups of each touch."""
    touch_L, num_touches = touches.touch_of_lookup, len(touches.unique_T)
    return np.bincount(touch_L[touch_L >= 0], minlength=num_touches).astype(np.int64)


def _pending(clocks: LookupClocks, touches: Touches, cell_T: I32) -> I64:
    """Pending look-ups of each touched copy after the step."""
    slot_T = (cell_T & SLOT_MASK) - 1
    pending_T: I64 = clocks.slot_WC2[touches.worker_T, slot_T, PENDING] + _lookups(touches)
    return pending_T


def _learn(state: State, plan: Plan) -> None:
    clocks, touches, decision = state.memory(LookupClocks), plan.touches, plan.decision
    worker_T, slot_T, need_T = touches.worker_T, plan.placement.slot_T, decision.need_T
    left, rows_T = plan.evictions, plan.rows.rows_U[touches.unique_T]
    # Evictions and pushes reach the shard after the step's reads.
    landing = clocks.slot_WC2[left.worker, left.slot, PENDING].copy()
    pending_T = np.where(need_T == MISS, 0, clocks.slot_WC2[worker_T, slot_T, PENDING])
    pending_T = pending_T + _lookups(touches)
    version_T = clocks.slot_WC2[worker_T, slot_T, SHARD_VERSION]
    version_T = np.where(need_T == HIT, version_T, clocks.row_R[rows_T])
    sent_T = np.where(decision.push_T == NOTHING, 0, pending_T)
    clocks.slot_WC2[worker_T, slot_T, SHARD_VERSION] = version_T + sent_T
    clocks.slot_WC2[worker_T, slot_T, PENDING] = pending_T - sent_T
    np.add.at(clocks.row_R, left.row, landing)
    np.add.at(clocks.row_R, rows_T, sent_T)


def _learn_drain(state: State, drained: Transfers) -> None:
    clocks = state.memory(LookupClocks)
    pending = clocks.slot_WC2[drained.worker, drained.slot, PENDING]
    np.add.at(clocks.row_R, drained.row, pending)
    clocks.slot_WC2[drained.worker, drained.slot, SHARD_VERSION] += pending
    clocks.slot_WC2[drained.worker, drained.slot, PENDING] = 0


def released(bound: int, check_bytes: int) -> Sync:
    """Reads and unsent writes may each be `bound` look-ups late."""

    def readable(state: State, rows: StepRows, copies: CachedCopies) -> CachedCopies:
        valid_UW = _valid(state.memory(LookupClocks), rows.rows_U, copies.copies_UW, bound)
        readable_UW = np.where(valid_UW, copies.copies_UW & SLOT_MASK | FRESH, 0).astype(np.int32)
        return copies._replace(copies_UW=readable_UW, only_U=sole_holders(readable_UW))

    def decide(context: SyncContext) -> Decision:
        clocks, touches = context.state.memory(LookupClocks), context.touches
        valid_UW = _valid(clocks, context.rows.rows_U, context.copies_UW, bound)
        need_T = np.where(valid_UW[touches.unique_T, touches.worker_T], HIT, STALE)
        need_T = np.where(context.cell_T == 0, MISS, need_T).astype(np.uint8)
        full_T = _pending(clocks, touches, context.cell_T) > bound
        push_T = np.where(full_T, DELTA, NOTHING).astype(np.uint8)
        return make_decision(need_T, np.full_like(need_T, LOCAL), push_T)

    def laws(plan: Plan, state: State) -> Iterator[tuple[str, int]]:
        clocks, touches, slot_T = state.memory(LookupClocks), plan.touches, plan.placement.slot_T
        version_T, pending_T = np.moveaxis(clocks.slot_WC2[touches.worker_T, slot_T], -1, 0)
        behind_T = clocks.row_R[plan.rows.rows_U[touches.unique_T]] - version_T
        late_T = (plan.decision.need_T == HIT) & (np.maximum(behind_T, pending_T) > bound)
        yield "4 (bounded staleness)", int(np.argmax(late_T)) if late_T.any() else -1

    return Sync(
        f"het({bound}, clocks=release)",
        decide,
        memory=PartMemory(LookupClocks, _first_clocks, _learn, _learn_drain),
        readable=readable,
        laws=laws,
        bound=bound,
        refused_optimizers=("adam",),
        check_bytes=check_bytes,
    )
