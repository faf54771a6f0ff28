"""Samples assigned without a look at caches."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I32, I64
from embroute.planner.interfaces import Assignment, Dispatch, DispatchContext


def _blocks(quotas_W: I64) -> I32:
    return np.repeat(np.arange(len(quotas_W), dtype=np.int32), quotas_W)


def block() -> Dispatch:
    """The first samples to worker 0, the next to worker 1, as a plain data loader does."""

    def choose(context: DispatchContext) -> Assignment:
        return Assignment(_blocks(context.quotas_W))

    return Dispatch("block", choose, looks_at_caches=False)


def round_robin() -> Dispatch:
    """One sample to each worker in turn, skipping those whose quota is full."""

    def choose(context: DispatchContext) -> Assignment:
        turn = np.concatenate([np.arange(quota) for quota in context.quotas_W])
        return Assignment(_blocks(context.quotas_W)[np.argsort(turn, kind="stable")])

    return Dispatch("robin", choose, looks_at_caches=False)
