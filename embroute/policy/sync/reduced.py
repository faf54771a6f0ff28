"""On demand, but rows that all workers share ride the all-reduce where that is faster.

A copy is up to date at every worker after such a step, and one of them will bring the row home. So
a row is all-reduced in one step and not in the next without anything to be undone. Exact.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from embroute.data.window import Window
from embroute.kernels.codes import HIT, NOTHING, REPLICA
from embroute.kernels.jit import kernel
from embroute.kernels.touches import Touches
from embroute.kernels.transfers import Decision
from embroute.policy.parts import Extra, Scene, Sync
from embroute.policy.reduction import reduction
from embroute.policy.state import State
from embroute.policy.sync.on_demand import decide_on_demand

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


@kernel
def _complete(touches: Touches, need_T: U8, chosen: I32, num_rows: int) -> npt.NDArray[np.bool_]:
    """Which rows of a step are all-reduced and up to date at every worker: nothing comes home."""
    out_U = np.zeros(num_rows, np.bool_)
    for u in chosen:
        out_U[u] = True
        for i in range(touches.first_U[u], touches.first_U[u + 1]):
            out_U[u] &= need_T[touches.of_row_T[i]] == HIT
    return out_U


def _decide(scene: Scene, makes: bool) -> Decision:
    """As on demand; the gradients of rows that all workers touch are all-reduced."""
    decision, chosen = decide_on_demand(scene, makes), scene.everywhere
    if not len(chosen):
        return decision
    reduced_U = np.zeros(len(scene.rows.rows_U), np.bool_)
    reduced_U[chosen] = True
    reduced_T = reduced_U[scene.touches.unique_T]
    complete_U = _complete(scene.touches, decision.need_T, chosen, len(reduced_U))
    home = ~complete_U[decision.return_unique]
    return decision._replace(
        mode_T=np.where(reduced_T, REPLICA, decision.mode_T).astype(np.uint8),
        push_T=np.where(reduced_T, NOTHING, decision.push_T).astype(np.uint8),
        return_worker=decision.return_worker[home],
        return_unique=decision.return_unique[home],
    )


def reduced(makes: bool = True) -> Sync:
    """Push on demand, in parts; all-reduce what relieves links that everybody waits for."""

    def extra(window: Window, state: State) -> Extra:
        chosen = reduction(window.now, state.setup, state.outlook).rows
        return Extra(np.empty(0, np.int64), chosen)

    decide = partial(_decide, makes=makes)
    return Sync("reduced", decide, extra, replicates=True, streams=True, makes=makes)
