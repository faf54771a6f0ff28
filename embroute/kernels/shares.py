"""How many samples each worker gets so that a step is shortest, from tables of what they cost.

Axes: W workers, N numbers of samples from none to the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.jit import kernel

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BOUNDS = 48  # values tried for the longest late transfer
WIDEST = 1e-4  # the smallest of them over the largest
HALVINGS = 30


class Grown(NamedTuple):
    """Seconds by number of samples: until a worker has pushed everything, or a first part of what
    others wait for; and those of its late pulls, of which a last part waits for all pushes."""

    pushed_WN: F64
    begun_WN: F64
    late_WN: F64
    last: float


@kernel
def _step(grown: Grown, w: int, n: int, late: float) -> float:
    """A step for which a worker with n samples pushes, and whose late pulls take so long."""
    whole = grown.pushed_WN[w, n] + grown.last * late
    return float(max(whole, grown.begun_WN[w, n] + late))


@kernel
def _within(grown: Grown, w: int, late: float, limit: float, most: int) -> int:
    """Most samples of a worker with which a step keeps a limit, its own late pulls another."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if grown.late_WN[w, middle] <= late and _step(grown, w, middle, late) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def _fill(grown: Grown, late: float, limit: float, least_W: I64, most_W: I64, quota_W: I64) -> int:
    """Quotas that keep a limit; how many samples they hold."""
    held = 0
    for w in range(len(quota_W)):
        quota_W[w] = max(least_W[w], _within(grown, w, late, limit, most_W[w]))
        held += quota_W[w]
    return held


@kernel
def _level(grown: Grown, late: float, least_W: I64, most_W: I64, quota_W: I64) -> float:
    """The lowest limit under which a whole batch has room; quotas at it."""
    samples, low, high = grown.late_WN.shape[1] - 1, 0.0, 0.0
    for w in range(len(quota_W)):
        high = max(high, _step(grown, w, most_W[w], late))
    if _fill(grown, late, high, least_W, most_W, quota_W) < samples:
        return np.inf
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _fill(grown, late, middle, least_W, most_W, quota_W) < samples:
            low = middle
        else:
            high = middle
    _fill(grown, late, high, least_W, most_W, quota_W)
    return high


@kernel
def shortest(grown: Grown, least_W: I64, most_W: I64) -> I64:
    """Quotas that make a step shortest, between a least and a most for each worker.

    They hold at least a batch; what is too much is the caller's to take away.
    """
    workers, samples = len(least_W), grown.late_WN.shape[1] - 1
    best_W, quota_W = most_W.copy(), most_W.copy()
    shortest_s, largest = np.inf, 0.0
    for w in range(workers):
        largest = max(largest, grown.late_WN[w, most_W[w]])
    for i in range(BOUNDS):
        bound = largest * WIDEST ** (i / (BOUNDS - 1))
        if _level(grown, bound, least_W, most_W, quota_W) == np.inf:
            continue
        late, step_s = 0.0, 0.0
        for w in range(workers):
            late = max(late, grown.late_WN[w, min(quota_W[w], samples)])
        for w in range(workers):
            step_s = max(step_s, _step(grown, w, min(quota_W[w], samples), late))
        if step_s < shortest_s:
            shortest_s = step_s
            best_W[:] = quota_W
    return best_W
