"""The order of a worker's touches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import I32, I64, U8
from embroute.kernels.codes import EXCLUSIVE, GRADIENT, LOCAL, NOTHING
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index


@kernel
def number_touches(
    worker_T: I32, arena_T: U8, mode_T: npt.NDArray[np.integer], slot_T: I32, first_slot_WA: I64
) -> tuple[I64, I32, I32]:
    """Touches by worker and arena, those that are updated on the spot first: a counting sort.

    Returns where each (worker, arena, away) begins, every touch's number within its worker and
    arena, and in the new order the slots of the arena.
    """
    workers, arenas = first_slot_WA.shape
    first = np.zeros(workers * arenas * 2 + 1, np.int64)
    box_T = np.empty(len(worker_T), np.int32)
    for t in range(len(worker_T)):
        away = mode_T[t] != EXCLUSIVE and mode_T[t] != LOCAL
        box_T[t] = (worker_T[t] * arenas + arena_T[t]) * 2 + away
        first[index(box_T[t] + 1)] += 1
    for box in range(len(first) - 1):
        first[box + 1] += first[box]
    filled, number_T = first.copy(), np.empty(len(worker_T), np.int32)
    slots = np.empty(len(worker_T), np.int32)
    for t in range(len(worker_T)):
        box = index(box_T[t])
        place = index(filled[box])
        filled[box] += 1
        number_T[t] = place - first[box & ~1]
        slots[place] = slot_T[t] - first_slot_WA[worker_T[t], arena_T[t]]
    return first, number_T, slots


@kernel
def renumber(number_T: I32, touch_L: I32) -> I32:
    """Numbers of touches for look-ups; padding stays -1."""
    out = np.empty(len(touch_L), np.int32)
    for i in range(len(touch_L)):
        out[index(i)] = number_T[index(touch_L[index(i)])] if touch_L[index(i)] >= 0 else -1
    return out


@kernel
def name_gradients(push_T: U8, number_T: I32, out_N: I32) -> None:
    """The touches of pushed gradients, in place of slots; the last entries are the pushes."""
    i = len(out_N)
    for t in range(len(push_T) - 1, -1, -1):
        if push_T[index(t)] != NOTHING:
            i -= 1
            if push_T[index(t)] == GRADIENT:
                out_N[index(i)] = number_T[index(t)]
