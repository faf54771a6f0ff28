"""Building a sync's decision from the few things that differ between them."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I32, U8
from embroute.kernels.codes import EXCLUSIVE, NOTHING, SHARED, VALUE_STATE
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.kernels.touches import Touches
from embroute.planner.kernels.transfers import Decision

NO_INDICES: I32 = np.empty(0, np.int32)


@kernel
def touch_modes(touches: Touches) -> U8:
    """EXCLUSIVE for touches whose row no other worker touches, SHARED for the others."""
    mode_T = np.empty(len(touches.unique_T), np.uint8)
    for t in range(len(mode_T)):
        u = index(touches.unique_T[t])
        alone = touches.first_U[u + index(1)] - touches.first_U[u] == 1
        mode_T[t] = EXCLUSIVE if alone else SHARED
    return mode_T


def make_decision(
    need_T: U8,
    mode_T: U8,
    push_T: U8 | None = None,
    returned: tuple[I32, I32] = (NO_INDICES, NO_INDICES),
) -> Decision:
    """A decision that drops no copy; `returned` copies (worker, row) push value and state."""
    if push_T is None:
        push_T = np.full(len(need_T), NOTHING, np.uint8)
    return Decision(
        need_T=need_T,
        mode_T=mode_T,
        push_T=push_T,
        drop_T=np.zeros(len(need_T), np.uint8),
        return_worker=returned[0],
        return_unique=returned[1],
        record=VALUE_STATE,
    )
