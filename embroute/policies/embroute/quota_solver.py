"""How many samples each worker gets so that a step is shortest, from tables of what they cost.

Axes: W workers, N numbers of samples from none to the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.cost.pipeline import pulls_s, pushes_s
from embroute.kernels.array_types import F64, I64
from embroute.kernels.jit import inlined, kernel

LEADS = 24  # tried between none and the longest late pulls, and again around the best of them
HALVINGS = 30


class CostCurves(NamedTuple):
    """Seconds of each worker's phases (`rhythm.Beat`) by number of samples."""

    start_WN: F64
    urgent_WN: F64
    first_WN: F64
    late_WN: F64
    last_WN: F64


@inlined
def _turn(grown: CostCurves, w: int, n: int, lead: float) -> float:
    """What a worker with n samples takes for its pulls, its compute and its pushes."""
    pulls = pulls_s(grown.late_WN[w, n], grown.last_WN[w, n], lead)
    pushes = pushes_s(grown.urgent_WN[w, n], grown.first_WN[w, n], lead)
    return float(pulls + grown.start_WN[w, n] + pushes)


@kernel
def _within(grown: CostCurves, w: int, lead: float, limit: float, most: int) -> int:
    """Most samples of a worker whose turn keeps a limit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _turn(grown, w, middle, lead) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def _fill(
    grown: CostCurves, lead: float, limit: float, least_W: I64, most_W: I64, quota_W: I64
) -> int:
    """Quotas that keep a limit; how many samples they hold."""
    held = 0
    for w in range(len(quota_W)):
        quota_W[w] = max(least_W[w], _within(grown, w, lead, limit, most_W[w]))
        held += quota_W[w]
    return held


@kernel
def _level(grown: CostCurves, lead: float, least_W: I64, most_W: I64, quota_W: I64) -> float:
    """The lowest limit under which a whole batch has room; quotas at it."""
    samples, low, high = grown.late_WN.shape[1] - 1, 0.0, 0.0
    for w in range(len(quota_W)):
        high = max(high, _turn(grown, w, most_W[w], lead))
    if _fill(grown, lead, high, least_W, most_W, quota_W) < samples:
        return np.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _fill(grown, lead, middle, least_W, most_W, quota_W) < samples:
            low = middle
        else:
            high = middle
    _fill(grown, lead, high, least_W, most_W, quota_W)
    return high


@kernel
def solve_quotas(grown: CostCurves, least_W: I64, most_W: I64) -> I64:
    """Quotas that make a step shortest, between a least and a most for each worker.

    They hold at least a batch; what is too much is the caller's to take away.
    """
    best_W, quota_W = most_W.copy(), most_W.copy()
    shortest_s, best, width = np.inf, 0.0, 0.0
    for w in range(len(least_W)):
        width = max(width, grown.late_WN[w, most_W[w]])
    low = 0.0
    for _ in range(2):
        for i in range(LEADS):
            lead = low + width * i / (LEADS - 1)
            step_s = _level(grown, lead, least_W, most_W, quota_W)
            if step_s < shortest_s:
                shortest_s, best = step_s, lead
                best_W[:] = quota_W
        width /= LEADS - 1
        low, width = max(0.0, best - width), 2 * width
    return best_W
