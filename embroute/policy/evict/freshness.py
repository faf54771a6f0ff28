"""Evict copies that must be pulled again anyway, before any that could still be read."""

from __future__ import annotations

import numpy as np

from embroute.kernels.caches import Placement
from embroute.kernels.codes import EXCLUSIVE, FIRST_BUCKET, FREE, REPLICA, SLOT_MASK
from embroute.kernels.order import Moves
from embroute.kernels.transfers import Decision
from embroute.policy.parts import Evict, Scene


def stale_first() -> Evict:
    """Copies that others' updates made stale leave first, oldest first; then least recently used.

    A stale copy saves nothing: to read it costs a pull, as if it were not there.
    """
    stale, readable = FIRST_BUCKET, FIRST_BUCKET + 1
    order = np.array([FREE, stale, readable], np.int32)

    def moves(scene: Scene, decision: Decision, placement: Placement) -> Moves:
        """Readers of this step's rows lose what they had; touched copies follow and overrule it."""
        only_U, touches = scene.found.only_U, scene.touches
        held = np.flatnonzero(only_U >= 0)
        worker = only_U[held]
        slot = (scene.copies_UW[held, worker] & SLOT_MASK) - 1
        kept_T = (decision.mode_T == EXCLUSIVE) | (decision.mode_T == REPLICA)
        bucket_T = np.where(kept_T, readable, stale).astype(np.int32)
        return Moves(
            np.concatenate([worker, touches.worker_T]),
            np.concatenate([slot, placement.slot_T]),
            np.concatenate([scene.rows.arena_U[held], scene.arena_T]),
            np.concatenate([np.full(len(held), stale, np.int32), bucket_T]),
            len(held),
        )

    return Evict("stale-first", FIRST_BUCKET + 2, lambda step: order, moves)
