"""Samples dealt without looking at caches."""

from __future__ import annotations

import numpy as np

from embroute.planner.interfaces import Assignment, Dispatch, DispatchContext


def block() -> Dispatch:
    """The first samples to worker 0, the next to worker 1, as a plain data loader does."""

    def choose(context: DispatchContext) -> Assignment:
        return Assignment(
            np.repeat(np.arange(len(context.quotas_W), dtype=np.int32), context.quotas_W)
        )

    return Dispatch("block", choose, looks_at_caches=False)


def robin() -> Dispatch:
    """One sample to each worker in turn, skipping those whose quota is full."""

    def choose(context: DispatchContext) -> Assignment:
        workers = np.repeat(np.arange(len(context.quotas_W), dtype=np.int32), context.quotas_W)
        turn = np.concatenate([np.arange(quota) for quota in context.quotas_W])
        return Assignment(workers[np.argsort(turn, kind="stable")])

    return Dispatch("robin", choose, looks_at_caches=False)
