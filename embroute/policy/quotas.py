"""How many samples each worker gets, where that is free: as many as let all finish together.

Gradients are sums over samples, so micro-batches need not be equal. After each step shares move
from workers that took longer than the others to those that waited for them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.cost import step_time
from embroute.policy.plan import Plan, traffic
from embroute.policy.state import State

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

SPEED = 0.2  # exponent of a correction: 1 would be right if time were proportional to samples
MOST = 1.2  # factor of one correction
LEAST = 1e-4  # of a batch: a worker that sits out can come back


def next_shares(plan: Plan, state: State) -> F32:
    """Shares of the next batch, from the time each worker takes for this one."""
    cluster, share_W = state.setup.cluster, state.outlook.share_W
    time = step_time(traffic(plan, state.setup), cluster)
    busy_W = np.maximum(time.compute_W, time.early_W) + time.urgent_W + time.late_W
    usual = float((busy_W * share_W).sum() / share_W.sum())
    if usual <= 0:
        return share_W.copy()
    correction_W = (usual / np.maximum(busy_W, usual * 1e-3)) ** SPEED
    moved_W = share_W * np.clip(correction_W, 1 / MOST, MOST)
    moved_W = np.maximum(moved_W, LEAST)
    shares: F32 = (moved_W / moved_W.sum()).astype(np.float32)
    return shares


def whole(share_W: F32, num_samples: int) -> I64:
    """Samples of each worker: by shares, the remainder to the largest fractions."""
    exact_W = num_samples * share_W.astype(np.float64) / float(share_W.sum())
    quota_W: I64 = np.floor(exact_W).astype(np.int64)
    order = np.argsort(quota_W - exact_W, kind="stable")
    quota_W[order[: num_samples - int(quota_W.sum())]] += 1
    return quota_W
