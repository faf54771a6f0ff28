"""How many samples each worker gets, where that is free: as many as let all finish together.

Gradients are sums over samples, so micro-batches need not be equal. After each step shares move
from workers that took longer than the others to those that waited for them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.cost import step_time
from embroute.kernels.codes import LATE, URGENT
from embroute.policy.plan import Plan, traffic
from embroute.policy.setup import Setup
from embroute.policy.state import Outlook

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

SPEED = 0.2  # exponent of a correction of shares
MOST = 1.2  # factor of one correction
LEAST = 1e-4  # of a batch: a worker that sits out can come back
SHARPNESS = 8  # how much more the slowest worker counts than one a little faster
ELASTICITY = 0.5  # growth of late transfers with samples: most rows are shared by several
SMOOTHING = 0.3  # weight of the last step among those before it


def _pressure(seconds_W: F64) -> F64:
    """How much each worker decides a maximum over workers; one on average."""
    most = float(seconds_W.max())
    if most <= 0:
        return np.ones_like(seconds_W)
    near_W = (seconds_W / most) ** SHARPNESS
    pressure: F64 = near_W * len(near_W) / near_W.sum()
    return pressure


def balance(plan: Plan, setup: Setup, outlook: Outlook) -> None:
    """Move shares and weights towards what would have made this step shorter.

    A step takes max(max(compute, early) + urgent) + max(late), each over all workers. A worker
    counts in a maximum as far as it is near it; where compute covers what runs beside it, that
    costs nothing. Shares are right when one more sample adds as much at every worker.
    """
    time = step_time(traffic(plan, setup), setup.cluster)
    first_W = np.maximum(time.compute_W, time.early_W) + time.urgent_W
    first_pressure_W, late_pressure_W = _pressure(first_W), _pressure(time.late_W)
    uncovered_W = time.early_W > time.compute_W
    weight_PW = np.stack([first_pressure_W * uncovered_W, first_pressure_W, late_pressure_W])
    outlook.weight_PW[:] += SMOOTHING * (weight_PW - outlook.weight_PW)
    adds_W = (
        outlook.weight_PW[URGENT] * first_W + ELASTICITY * outlook.weight_PW[LATE] * time.late_W
    )
    adds_W /= np.maximum(1, plan.samples_W)
    usual = float((adds_W * outlook.share_W).sum())
    if usual <= 0:
        return
    correction_W = (usual / np.maximum(adds_W, usual * 1e-3)) ** SPEED
    moved_W = np.maximum(outlook.share_W * np.clip(correction_W, 1 / MOST, MOST), LEAST)
    outlook.share_W[:] = moved_W / moved_W.sum()


def whole(share_W: F32, num_samples: int) -> I64:
    """Samples of each worker: by shares, the remainder to the largest fractions."""
    exact_W = num_samples * share_W.astype(np.float64) / float(share_W.sum())
    quota_W: I64 = np.floor(exact_W).astype(np.int64)
    order = np.argsort(quota_W - exact_W, kind="stable")
    quota_W[order[: num_samples - int(quota_W.sum())]] += 1
    return quota_W
