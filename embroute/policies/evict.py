"""Eviction orders of policies (LRU, LFU, ...): the bucket of a copy, and which bucket loses copies.

Axes: T touches of a step, U distinct rows of a step, B buckets.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from embroute.config.signature import Between
from embroute.kernels.array_types import I32, I64
from embroute.kernels.codes import (
    EXCLUSIVE,
    FIRST_BUCKET,
    FREE,
    REPLICA,
    ROW,
    SLOT_MASK,
    TICKET,
    UNHELD,
)
from embroute.kernels.jit import kernel
from embroute.planner.interfaces import Evict, SyncContext
from embroute.planner.kernels.cache import Caches, Placement, cell_of
from embroute.planner.kernels.eviction import BUCKET, EvictionMoves
from embroute.planner.kernels.transfers import Decision


def touch_moves(context: SyncContext, placement: Placement, bucket_T: I32) -> EvictionMoves:
    """Every touched copy becomes the youngest of its bucket."""
    return EvictionMoves(context.touches.worker_T, placement.slot_T, context.arena_T, bucket_T, 0)


def _join(untouched: list[EvictionMoves], touched: EvictionMoves) -> EvictionMoves:
    """Moves of copies that the step does not touch, then those that it touches."""
    lists = [*untouched, touched]
    return EvictionMoves(
        worker=np.concatenate([moves.worker for moves in lists]),
        slot=np.concatenate([moves.slot for moves in lists]),
        arena=np.concatenate([moves.arena for moves in lists]),
        bucket=np.concatenate([moves.bucket for moves in lists]),
        untouched=sum(len(moves.slot) for moves in untouched),
    )


def lru() -> Evict:
    """The copy whose last touch is longest ago leaves first."""
    order_B = np.array([FREE, FIRST_BUCKET], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        bucket_T = np.full(len(placement.slot_T), FIRST_BUCKET, np.int32)
        return touch_moves(context, placement, bucket_T)

    return Evict("lru", FIRST_BUCKET + 1, lambda step: order_B, moves)


def _counted(name: str, max_count: int) -> Evict:
    """The copy touched least often while cached leaves first; among equals the oldest."""
    num_buckets = FIRST_BUCKET + max_count
    order_B = np.array([FREE, *range(FIRST_BUCKET, num_buckets)], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        caches, worker_T = context.state.caches, context.touches.worker_T
        # The bucket is the count: a touch moves the copy from its bucket to the next one.
        ticket_T = caches.slot_WCF[worker_T, placement.slot_T, TICKET] - 1
        before_T = caches.eviction.ticket_WQ4[worker_T, ticket_T, BUCKET]
        bucket_T = np.minimum(before_T + 1, num_buckets - 1)
        bucket_T = np.where(decision.need_T & UNHELD, FIRST_BUCKET, bucket_T).astype(np.int32)
        return touch_moves(context, placement, bucket_T)

    return Evict(name, num_buckets, lambda step: order_B, moves)


def lfu() -> Evict:
    """Least frequently used. Counts above 4096 are equal."""
    return _counted("lfu", 4096)


def light_lfu() -> Evict:
    """HET's light LFU: ten frequency buckets.

    A row that reaches count ten is pinned: it leaves only if nothing else can.
    """
    return _counted("light-lfu", 10)


def stale_first() -> Evict:
    """Copies that other workers' updates made stale leave first, oldest first; then LRU.

    A stale copy saves nothing: a read pulls the row, as if the copy were not there.
    """
    stale, readable = FIRST_BUCKET, FIRST_BUCKET + 1
    order_B = np.array([FREE, stale, readable], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        # A copy of a row of this step becomes stale unless its holder touches the row: the
        # moves of touches come later, and the last move of a slot counts.
        only_U = context.copies.only_U
        held = np.flatnonzero(only_U >= 0)
        worker = only_U[held]
        slot = (context.copies_UW[held, worker] & SLOT_MASK) - 1
        buckets = np.full(len(held), stale, np.int32)
        outdated = EvictionMoves(worker, slot, context.rows.arena_U[held], buckets, len(held))
        fresh_T = (decision.mode_T == EXCLUSIVE) | (decision.mode_T == REPLICA)
        bucket_T = np.where(fresh_T, readable, stale).astype(np.int32)
        return _join([outdated], touch_moves(context, placement, bucket_T))

    return Evict("stale-first", FIRST_BUCKET + 2, lambda step: order_B, moves)


@kernel
def _holders(caches: Caches, rows: I64, bucket: I32) -> tuple[I32, I32, I32]:
    """Every copy of the given rows with the bucket of its row: worker, slot, bucket."""
    cells, num_workers = caches.cells, caches.cells.cell_NW.shape[1]
    capacity = len(rows) * num_workers
    worker, slot = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    bucket_of_copy = np.empty(capacity, np.int32)
    count = 0
    for i in range(len(rows)):
        for w in range(num_workers):
            # Slot + 1, or 0 where the worker has no copy.
            held = cell_of(cells, rows[i], w) & SLOT_MASK
            if held:
                worker[count], slot[count], bucket_of_copy[count] = w, held - 1, bucket[i]
                count += 1
    return worker[:count].copy(), slot[:count].copy(), bucket_of_copy[:count].copy()


def _move_copies(context: SyncContext, rows: I64, bucket: I32) -> EvictionMoves:
    """Every copy of the given rows goes to the bucket of its row, touched or not."""
    caches = context.state.caches
    worker, slot, bucket_of_copy = _holders(caches, rows, bucket)
    arena = context.state.setup.arena_of(caches.slot_WCF[worker, slot, ROW].astype(np.int64))
    return EvictionMoves(worker, slot, arena, bucket_of_copy, len(slot))


Lookahead = Annotated[int, Between(1, 10_000)]


def clairvoyant(lookahead: Lookahead = 20) -> Evict:
    """Evict what the window needs last (Belady's rule, as far as the window sees).

    Rows without a use in the window leave first, oldest first; then those used last.
    """
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
        # Copies of this step's rows go to the bucket of their next use; so do copies of rows
        # whose next use came into sight with the last batch of the window.
        rows, ahead = context.rows, context.window.ahead
        bucket_U = bucket_of(rows.later_U, rows.step)
        untouched = [_move_copies(context, rows.rows_U, bucket_U)]
        if len(ahead) >= sight:
            last = ahead[sight - 1]
            unseen = last.rows_U[last.before_U < rows.step]
            bucket = np.full(len(unseen), never + 1 + (rows.step + sight) % cycle, np.int32)
            untouched.append(_move_copies(context, unseen, bucket))
        return _join(untouched, touch_moves(context, placement, bucket_U[context.touches.unique_T]))

    return Evict("clairvoyant", never + 1 + cycle, order, moves, lookahead=sight)
