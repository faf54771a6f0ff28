"""Syncs that leave no update unpushed: write-through, without a cache, in shared memory."""

from __future__ import annotations

import numpy as np

from embroute.kernels.codes import FRESH, GRADIENT, HIT, NOTHING, SHARED
from embroute.planner.interfaces import Sync, SyncContext
from embroute.planner.kernels.cache import classify_needs
from embroute.planner.kernels.transfers import Decision
from embroute.policies.sync.decision import make_decision, touch_modes


def decide_write_through(context: SyncContext) -> Decision:
    """Push every gradient; a sole toucher applies it as well and keeps a fresh copy."""
    need_T = classify_needs(context.cell_T, FRESH)
    push_T = np.full(len(need_T), GRADIENT, np.uint8)
    return make_decision(need_T, touch_modes(context.touches), push_T)


def write_through() -> Sync:
    """The yardstick. Both ends apply a sole toucher's gradient, so its copy equals the shard's."""
    return Sync("write-through", decide_write_through)


def uncached() -> Sync:
    """A plain parameter server: pull every row, push every gradient, the shard applies it."""

    def decide(context: SyncContext) -> Decision:
        need_T = classify_needs(context.cell_T, FRESH)
        mode_T, push_T = np.full_like(need_T, SHARED), np.full_like(need_T, GRADIENT)
        return make_decision(need_T, mode_T, push_T)._replace(drop_T=np.ones_like(need_T))

    return Sync("none", decide, copies="dropped")


def shared_memory() -> Sync:
    """On one machine no row is ever pulled: every worker reads the tables themselves. Exact."""

    def decide(context: SyncContext) -> Decision:
        # A sole toucher updates the row itself; the row's shard sums the gradients of several.
        mode_T = touch_modes(context.touches)
        push_T = np.where(mode_T == SHARED, np.uint8(GRADIENT), np.uint8(NOTHING))
        return make_decision(np.full_like(mode_T, HIT), mode_T, push_T)

    return Sync("in-place", decide, copies="none")
