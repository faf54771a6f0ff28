"""Rows stay where the shards keep them: for workers of one machine, who can reach that memory."""

from __future__ import annotations

import numpy as np

from embroute.kernels.codes import GRADIENT, HIT, NOTHING, SHARED
from embroute.kernels.transfers import Decision
from embroute.policy.parts import Scene, Sync
from embroute.policy.sync.outcome import outcome, sharing


def decide_in_place(scene: Scene) -> Decision:
    """Sole touchers update a row on the spot; its shard adds up the gradients of several."""
    mode_T = sharing(scene.touches)
    push_T = np.where(mode_T == SHARED, np.uint8(GRADIENT), np.uint8(NOTHING))
    return outcome(np.full(len(mode_T), HIT, np.uint8), mode_T, push_T)


def in_place() -> Sync:
    """No row is ever pulled: every worker reads the tables themselves. Exact."""
    return Sync("in-place", decide_in_place, caches=False, in_place=True)
