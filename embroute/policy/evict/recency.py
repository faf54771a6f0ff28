"""Orders by past use: least recently used, least frequently used, and HET's light LFU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import Placement
from embroute.kernels.codes import FIRST_BUCKET, FREE, TICKET, UNHELD
from embroute.kernels.order import BUCKET, Moves
from embroute.kernels.transfers import Decision
from embroute.policy.parts import Evict, Scene

I32 = npt.NDArray[np.int32]


def touched(scene: Scene, placement: Placement, bucket_T: I32) -> Moves:
    """Every touched copy becomes the youngest of its bucket."""
    return Moves(scene.touches.worker_T, placement.slot_T, scene.arena_T, bucket_T, 0)


def lru() -> Evict:
    """The copy whose last touch is longest ago leaves first."""
    order = np.array([FREE, FIRST_BUCKET], np.int32)

    def moves(scene: Scene, decision: Decision, placement: Placement) -> Moves:
        return touched(scene, placement, np.full(len(placement.slot_T), FIRST_BUCKET, np.int32))

    return Evict("lru", FIRST_BUCKET + 1, lambda step: order, moves)


def _counted(name: str, most: int) -> Evict:
    """The copy touched least often while cached leaves first, the oldest of equals before."""
    order = np.array([FREE, *range(FIRST_BUCKET, FIRST_BUCKET + most)], np.int32)

    def moves(scene: Scene, decision: Decision, placement: Placement) -> Moves:
        caches, worker_T = scene.state.caches, scene.touches.worker_T
        ticket_T = caches.slot_WCF[worker_T, placement.slot_T, TICKET] - 1
        before_T = caches.order.ticket_WQ4[worker_T, ticket_T, BUCKET]
        bucket_T = np.minimum(before_T + 1, FIRST_BUCKET + most - 1)
        bucket_T = np.where(decision.need_T & UNHELD, FIRST_BUCKET, bucket_T).astype(np.int32)
        return touched(scene, placement, bucket_T)

    return Evict(name, FIRST_BUCKET + most, lambda step: order, moves)


def lfu() -> Evict:
    """Least frequently used; counts above 4096 are not told apart."""
    return _counted("lfu", 4096)


def light_lfu() -> Evict:
    """HET's light LFU: ten frequency buckets.

    A row that reaches count ten is pinned: it leaves only if nothing else can.
    """
    return _counted("light-lfu", 10)
