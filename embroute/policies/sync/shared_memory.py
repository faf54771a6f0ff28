"""Rows stay where the shards keep them: for workers of one machine, who can reach that memory."""

from __future__ import annotations

import numpy as np

from embroute.kernels.codes import GRADIENT, HIT, NOTHING, SHARED
from embroute.planner.interfaces import Sync, SyncContext
from embroute.planner.kernels.transfers import Decision
from embroute.policies.sync.decision import make_decision, touch_modes


def decide_shared_memory(context: SyncContext) -> Decision:
    """Sole touchers update a row on the spot; its shard adds up the gradients of several."""
    mode_T = touch_modes(context.touches)
    push_T = np.where(mode_T == SHARED, np.uint8(GRADIENT), np.uint8(NOTHING))
    return make_decision(np.full(len(mode_T), HIT, np.uint8), mode_T, push_T)


def shared_memory() -> Sync:
    """No row is ever pulled: every worker reads the tables themselves. Exact."""
    return Sync("in-place", decide_shared_memory, caches=False, shared_memory=True)
