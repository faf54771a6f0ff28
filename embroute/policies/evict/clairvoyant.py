"""Evict what the window needs last (Belady's rule, as far as the window sees)."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I32, I64
from embroute.kernels.codes import FIRST_BUCKET, FREE, ROW, SLOT_MASK
from embroute.kernels.jit import kernel
from embroute.planner.interfaces import Evict, SyncContext
from embroute.planner.kernels.cache import Caches, Placement, cell_of
from embroute.planner.kernels.eviction import EvictionMoves
from embroute.planner.kernels.transfers import Decision
from embroute.policies.evict.recency import touch_moves


@kernel
def _holders(caches: Caches, rows: I64, bucket: I32) -> tuple[I32, I32, I32]:
    """Every copy of the given rows with the bucket of its row: worker, slot, bucket."""
    cells, num_workers = caches.cells, caches.cells.cell_NW.shape[1]
    most = len(rows) * num_workers
    worker, slot, goes = (
        np.empty(most, np.int32),
        np.empty(most, np.int32),
        np.empty(most, np.int32),
    )
    count = 0
    for i in range(len(rows)):
        for w in range(num_workers):
            held = cell_of(cells, rows[i], w) & SLOT_MASK
            if held:
                worker[count], slot[count], goes[count] = w, held - 1, bucket[i]
                count += 1
    return worker[:count].copy(), slot[:count].copy(), goes[:count].copy()


def _held(context: SyncContext, rows: I64, bucket: I32) -> EvictionMoves:
    """Every copy of the given rows goes to the bucket of its row, touched or not."""
    caches = context.state.caches
    worker, slot, goes = _holders(caches, rows, bucket)
    arena = context.state.setup.arena_of(caches.slot_WCF[worker, slot, ROW].astype(np.int64))
    return EvictionMoves(worker, slot, arena, goes, len(slot))


def clairvoyant(lookahead: int = 20) -> Evict:
    """Rows without a use in the window leave first, oldest first; then those used last."""
    never = FIRST_BUCKET
    # The victims of a step are chosen by what was known after the step before.
    sight = lookahead + 1
    cycle = sight + 1  # uses at step .. step+sight never share a bucket

    def bucket_of(later_U: I32, step: int) -> I32:
        unseen = later_U > step + sight
        return np.where(unseen, never, never + 1 + later_U % cycle).astype(np.int32)

    def order(step: int) -> I32:
        farthest_first = range(step + sight, step, -1)
        # A use in this very step by another worker: the copy is about to be stale.
        soon = [never + 1 + later % cycle for later in farthest_first]
        return np.array([FREE, never, never + 1 + step % cycle, *soon], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        """Copies of this step's rows go to their next use; so do those of the batch that enters."""
        rows, ahead = context.rows, context.window.ahead
        bucket_U = bucket_of(rows.later_U, rows.step)
        parts = [_held(context, rows.rows_U, bucket_U)]
        if len(ahead) >= sight:
            entering = ahead[sight - 1]
            parts.append(_entering(context, entering.rows_U, entering.before_U))
        untouched = sum(len(part.slot) for part in parts)
        parts.append(touch_moves(context, placement, bucket_U[context.touches.unique_T]))
        return EvictionMoves(
            np.concatenate([part.worker for part in parts]),
            np.concatenate([part.slot for part in parts]),
            np.concatenate([part.arena for part in parts]),
            np.concatenate([part.bucket for part in parts]),
            untouched,
        )

    def _entering(context: SyncContext, rows_U: I64, before_U: I32) -> EvictionMoves:
        """Copies whose next use just came into sight."""
        step = context.rows.step
        unseen = rows_U[before_U < step]
        bucket = np.full(len(unseen), never + 1 + (step + sight) % cycle, np.int32)
        return _held(context, unseen, bucket)

    return Evict("clairvoyant", never + 1 + cycle, order, moves, lookahead=sight)
