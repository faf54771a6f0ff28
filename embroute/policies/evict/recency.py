"""Orders by past use: least recently used, least frequently used, and HET's light LFU."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I32
from embroute.kernels.codes import EXCLUSIVE, FIRST_BUCKET, FREE, REPLICA, SLOT_MASK, TICKET, UNHELD
from embroute.planner.interfaces import Evict, SyncContext
from embroute.planner.kernels.cache import Placement
from embroute.planner.kernels.eviction import BUCKET, EvictionMoves
from embroute.planner.kernels.transfers import Decision


def touch_moves(context: SyncContext, placement: Placement, bucket_T: I32) -> EvictionMoves:
    """Every touched copy becomes the youngest of its bucket."""
    return EvictionMoves(context.touches.worker_T, placement.slot_T, context.arena_T, bucket_T, 0)


def lru() -> Evict:
    """The copy whose last touch is longest ago leaves first."""
    order = np.array([FREE, FIRST_BUCKET], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        return touch_moves(
            context, placement, np.full(len(placement.slot_T), FIRST_BUCKET, np.int32)
        )

    return Evict("lru", FIRST_BUCKET + 1, lambda step: order, moves)


def _counted(name: str, most: int) -> Evict:
    """The copy touched least often while cached leaves first, the oldest of equals before."""
    order = np.array([FREE, *range(FIRST_BUCKET, FIRST_BUCKET + most)], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        caches, worker_T = context.state.caches, context.touches.worker_T
        ticket_T = caches.slot_WCF[worker_T, placement.slot_T, TICKET] - 1
        before_T = caches.eviction.ticket_WQ4[worker_T, ticket_T, BUCKET]
        bucket_T = np.minimum(before_T + 1, FIRST_BUCKET + most - 1)
        bucket_T = np.where(decision.need_T & UNHELD, FIRST_BUCKET, bucket_T).astype(np.int32)
        return touch_moves(context, placement, bucket_T)

    return Evict(name, FIRST_BUCKET + most, lambda step: order, moves)


def lfu() -> Evict:
    """Least frequently used; counts above 4096 are not told apart."""
    return _counted("lfu", 4096)


def light_lfu() -> Evict:
    """HET's light LFU: ten frequency buckets.

    A row that reaches count ten is pinned: it leaves only if nothing else can.
    """
    return _counted("light-lfu", 10)


def stale_first() -> Evict:
    """Copies that others' updates made stale leave first, oldest first; then least recently used.

    A stale copy saves nothing: to read it costs a pull, as if it were not there.
    """
    stale, readable = FIRST_BUCKET, FIRST_BUCKET + 1
    order = np.array([FREE, stale, readable], np.int32)

    def moves(context: SyncContext, decision: Decision, placement: Placement) -> EvictionMoves:
        """Readers of this step's rows lose what they had; touched copies follow and overrule it."""
        only_U, touches = context.copies.only_U, context.touches
        held = np.flatnonzero(only_U >= 0)
        worker = only_U[held]
        slot = (context.copies_UW[held, worker] & SLOT_MASK) - 1
        kept_T = (decision.mode_T == EXCLUSIVE) | (decision.mode_T == REPLICA)
        bucket_T = np.where(kept_T, readable, stale).astype(np.int32)
        return EvictionMoves(
            np.concatenate([worker, touches.worker_T]),
            np.concatenate([slot, placement.slot_T]),
            np.concatenate([context.rows.arena_U[held], context.arena_T]),
            np.concatenate([np.full(len(held), stale, np.int32), bucket_T]),
            len(held),
        )

    return Evict("stale-first", FIRST_BUCKET + 2, lambda step: order, moves)
