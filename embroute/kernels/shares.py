"""How many samples each worker gets so that a step is shortest, from tables of what they cost.

Axes: W workers, N numbers of samples from none to the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.jit import kernel

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BOUNDS = 48  # values tried for the longest late transfer
WIDEST = 1e-4  # the smallest of them over the largest
HALVINGS = 30


@kernel
def _within(cost_WN: F64, w: int, limit: float, most: int) -> int:
    """Most samples of a worker whose cost keeps a limit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost_WN[w, middle] <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def _fill(cost_WN: F64, limit: float, least_W: I64, most_W: I64, quota_W: I64) -> int:
    """Quotas that keep a limit; how many samples they hold."""
    held = 0
    for w in range(len(quota_W)):
        quota_W[w] = max(least_W[w], _within(cost_WN, w, limit, most_W[w]))
        held += quota_W[w]
    return held


@kernel
def _level(cost_WN: F64, least_W: I64, most_W: I64, quota_W: I64) -> float:
    """The lowest limit under which a whole batch has room; quotas at it."""
    samples, low, high = cost_WN.shape[1] - 1, 0.0, 0.0
    for w in range(len(quota_W)):
        high = max(high, cost_WN[w, most_W[w]])
    if _fill(cost_WN, high, least_W, most_W, quota_W) < samples:
        return np.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _fill(cost_WN, middle, least_W, most_W, quota_W) < samples:
            low = middle
        else:
            high = middle
    _fill(cost_WN, high, least_W, most_W, quota_W)
    return high


@kernel
def shortest(first_WN: F64, late_WN: F64, least_W: I64, most_W: I64) -> I64:
    """Quotas that minimise max(first) + max(late), between a least and a most for each worker.

    They hold at least a batch; what is too much is the caller's to take away.
    """
    workers, samples = len(least_W), first_WN.shape[1] - 1
    best_W, quota_W, room_W = most_W.copy(), most_W.copy(), most_W.copy()
    shortest_s, largest = np.inf, 0.0
    for w in range(workers):
        largest = max(largest, late_WN[w, most_W[w]])
    for i in range(BOUNDS):
        bound = largest * WIDEST ** (i / (BOUNDS - 1))
        for w in range(workers):
            room_W[w] = max(least_W[w], _within(late_WN, w, bound, most_W[w]))
        first = _level(first_WN, least_W, room_W, quota_W)
        if first == np.inf:
            continue
        late = 0.0
        for w in range(workers):
            late = max(late, late_WN[w, min(quota_W[w], samples)])
        if first + late < shortest_s:
            shortest_s = first + late
            best_W[:] = quota_W
    return best_W
