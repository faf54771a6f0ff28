"""Every update is pushed in the step that makes it: `vanilla`, and no cache at all."""

from __future__ import annotations

import numpy as np

from embroute.kernels.codes import FRESH, GRADIENT, SHARED
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


def decide_uncached(context: SyncContext) -> Decision:
    """Pull every row, push every gradient, keep nothing."""
    need_T = classify_needs(context.cell_T, FRESH)
    push_T = np.full(len(need_T), GRADIENT, np.uint8)
    decision = make_decision(need_T, np.full(len(need_T), SHARED, np.uint8), push_T)
    return decision._replace(drop_T=np.ones(len(need_T), np.uint8))


def uncached() -> Sync:
    """A plain parameter server: the shard applies every update."""
    return Sync("none", decide_uncached, caches=False)
