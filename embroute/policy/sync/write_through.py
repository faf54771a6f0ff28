"""Every update is pushed in the step that makes it: `vanilla`, and no cache at all."""

from __future__ import annotations

import numpy as np

from embroute.kernels.caches import hits
from embroute.kernels.codes import FRESH, GRADIENT, SHARED
from embroute.kernels.transfers import Decision
from embroute.policy.parts import Scene, Sync
from embroute.policy.sync.outcome import outcome, sharing


def decide_write_through(scene: Scene) -> Decision:
    """Push every gradient; a sole toucher applies it as well and keeps a fresh copy."""
    need_T = hits(scene.cell_T, FRESH)
    push_T = np.full(len(need_T), GRADIENT, np.uint8)
    return outcome(need_T, sharing(scene.touches), push_T)


def write_through() -> Sync:
    """The yardstick. Both ends apply a sole toucher's gradient, so its copy equals the shard's."""
    return Sync("write-through", decide_write_through)


def decide_uncached(scene: Scene) -> Decision:
    """Pull every row, push every gradient, keep nothing."""
    need_T = hits(scene.cell_T, FRESH)
    push_T = np.full(len(need_T), GRADIENT, np.uint8)
    decision = outcome(need_T, np.full(len(need_T), SHARED, np.uint8), push_T)
    return decision._replace(drop_T=np.ones(len(need_T), np.uint8))


def uncached() -> Sync:
    """A plain parameter server: the shard applies every update."""
    return Sync("none", decide_uncached, caches=False)
